//! The gradient of one step, over one batch or several.

use termwise_llama::model::Nonpositive;
use termwise_llama::{Batch, Model, Objective, Options, Params, Session};

use crate::error::Result;
use crate::gradient_norm;
use termwise_data::Rows;

/// A session, and gradients that add up.
pub struct Gradients {
    /// Buffers of the model.
    pub session: Session,
    /// How it computes.
    pub options: Options,
    /// The gradient of the last [`Gradients::compute`].
    pub grads: Params,
}

/// What a step's gradient came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Computed {
    /// Mean loss over all tokens of all batches, in nats.
    pub loss: f64,
    /// Tokens that counted.
    pub tokens: u64,
    /// Norm of the gradient; NaN where the loss is not finite, since the gradient is not looked at then.
    pub norm: f64,
    /// The first denominator of an attention that was not positive.
    pub nonpositive: Option<Nonpositive>,
    /// The batch of the step, of those that are accumulated, whose loss is not finite.
    pub bad_batch: Option<usize>,
}

impl Computed {
    /// Whether an update may be made with it.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.norm.is_finite()
    }
}

impl Gradients {
    /// Room for batches of this shape.
    pub fn new(model: &Model, batch: usize, length: usize, options: Options) -> Result<Gradients> {
        Ok(Gradients { session: model.session(batch, length, options)?, options, grads: model.params.zeros_like()? })
    }

    /// The mean loss over all tokens of `parts` together and its gradient.
    pub fn compute(&mut self, params: &Params, parts: &[Rows]) -> Result<Computed> {
        self.grads.set_zero();
        let tokens: usize = parts.iter().map(counted).sum();
        let (mut sum, mut nonpositive, mut bad_batch) = (0.0, None, None);
        for (index, rows) in parts.iter().enumerate() {
            let loss = self.session.loss_and_grad(params, &batch_of(rows, Some(tokens)), &mut self.grads)?;
            sum += loss.sum;
            nonpositive = nonpositive.or(loss.nonpositive);
            if !loss.sum.is_finite() && bad_batch.is_none() {
                bad_batch = Some(index);
            }
        }
        let loss = sum / tokens.max(1) as f64;
        Ok(Computed { loss, tokens: tokens as u64, norm: gradient_norm(&self.grads), nonpositive, bad_batch })
    }
}

/// A batch as the model takes it.
pub(crate) fn batch_of(rows: &Rows, tokens: Option<usize>) -> Batch<'_> {
    let lengths = (!rows.lengths.is_empty()).then_some(&rows.lengths[..]);
    Batch { ids: &rows.ids, labels: &rows.labels, lengths, tokens }
}

/// Whether the label at this place of [B, T] is asked for.
pub(crate) fn counts(rows: &Rows, at: usize) -> bool {
    let within = rows.lengths.get(at / rows.time.max(1)).is_none_or(|&length| at % rows.time < length);
    within && rows.labels[at] >= 0
}

/// How many labels are asked for.
pub(crate) fn counted(rows: &Rows) -> usize {
    (0..rows.labels.len()).filter(|&at| counts(rows, at)).count()
}
