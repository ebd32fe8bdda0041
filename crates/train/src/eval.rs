//! How well a model predicts text that it has not seen.
//!
//! With a stride below the length, windows overlap: each asks for as many tokens as the stride, and shows up to length − stride tokens
//! before them. A stride equal to the length cuts the text into windows that know nothing of each other.

use serde::{Deserialize, Serialize};
use termwise_llama::model::Nonpositive;
use termwise_llama::{Model, Objective, Options, Params, Session};

use crate::error::{Error, Result};
use crate::step::{batch_of, counts};
use termwise_data::{BestLoss, Rows, Source};

/// What an evaluation found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Tokens that were asked for.
    pub tokens: u64,
    /// Cross-entropy, the mean over all tokens, in nats.
    pub loss: f64,
    /// exp of the mean over all tokens.
    #[serde(deserialize_with = "termwise_report::nan")]
    pub perplexity: f64,
    /// Bits for each byte of text; absent where the data is not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// Tokens that can only be recalled, where the data marks them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<Part>,
    /// The others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<Part>,
    /// Loss above that of the best possible predictor, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excess: Option<Excess>,
    /// Positions that rows of training have, where rows are longer here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Part>,
    /// Positions beyond them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beyond: Option<Part>,
}

/// Some of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// How many.
    pub tokens: u64,
    /// Mean loss in nats; 0 where there is none.
    pub loss: f64,
}

/// Loss above the best possible, in nats a token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Excess {
    /// Over all tokens.
    pub all: f64,
    /// Over recall tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recall: Option<f64>,
    /// Over the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<f64>,
}

/// Sums of losses, batch by batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    all: Sum,
    recall: Sum,
    marked: bool,
    /// Positions of a row in training, and the losses on these and beyond them.
    trained: Option<usize>,
    within: Sum,
    beyond: Sum,
    bytes: u64,
    /// The first.
    nonpositive: Option<Nonpositive>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    loss: f64,
    count: u64,
}

impl Sum {
    fn mean(self) -> f64 {
        if self.count == 0 { 0.0 } else { self.loss / self.count as f64 }
    }

    fn part(self) -> Part {
        Part { tokens: self.count, loss: self.mean() }
    }
}

impl Sums {
    /// Of rows that are longer than those of training, which have so many positions.
    pub fn beyond(trained: usize) -> Sums {
        Sums { trained: Some(trained), ..Sums::default() }
    }

    /// Runs a batch and adds its losses.
    pub fn add(&mut self, session: &mut Session, params: &Params, rows: &Rows) -> Result<()> {
        let loss = session.loss(params, &batch_of(rows, None))?;
        self.all.loss += loss.sum;
        self.all.count += loss.count as u64;
        self.bytes += rows.bytes;
        self.nonpositive = self.nonpositive.or(loss.nonpositive);
        if !rows.recall.is_empty() {
            self.marked = true;
            let marked = rows.recall.iter().enumerate().filter(|&(at, &recall)| recall && counts(rows, at));
            for (at, _) in marked {
                self.recall.loss += session.token_losses().get(at).copied().unwrap_or(0.0);
                self.recall.count += 1;
            }
        }
        if let Some(trained) = self.trained {
            for at in (0..rows.labels.len()).filter(|&at| counts(rows, at)) {
                let part = if at % rows.time.max(1) < trained { &mut self.within } else { &mut self.beyond };
                part.loss += session.token_losses().get(at).copied().unwrap_or(0.0);
                part.count += 1;
            }
        }
        Ok(())
    }

    /// What they come to; `best` is what the best possible predictor has.
    pub fn finish(&self, best: Option<BestLoss>) -> Evaluation {
        let loss = self.all.mean();
        let rest = Sum { loss: self.all.loss - self.recall.loss, count: self.all.count - self.recall.count };
        let (within, beyond) = (self.trained.map(|_| self.within.part()), self.trained.map(|_| self.beyond.part()));
        let bits_per_byte = (self.bytes > 0).then(|| self.all.loss / std::f64::consts::LN_2 / self.bytes as f64);
        let (recall, rest) = (self.marked.then(|| self.recall.part()), self.marked.then(|| rest.part()));
        let excess = best.map(|best| Excess {
            all: loss - best.all,
            recall: recall.map(|part| part.loss - best.recall),
            rest: rest.map(|part| part.loss - best.rest),
        });
        Evaluation { tokens: self.all.count, loss, perplexity: loss.exp(), bits_per_byte, recall, rest, excess, within, beyond }
    }
}

/// How text is cut into windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Windows {
    /// Windows computed at once.
    pub batch: usize,
    /// Positions of a window.
    pub length: usize,
    /// Tokens that a window asks for.
    pub stride: usize,
}

/// Evaluates a model on the held-out batches of a source, at most `limit` batches where that is not 0.
pub fn evaluate(model: &Model, source: &dyn Source, windows: Windows, limit: u64) -> Result<Evaluation> {
    Ok(evaluate_with(model, source, windows, limit, Options::default())?.0)
}

/// As [`evaluate`], computed as the options say, and the first denominator of an attention that was not positive. A loss that is not
/// finite is an error.
pub fn evaluate_with(
    model: &Model,
    source: &dyn Source,
    windows: Windows,
    limit: u64,
    options: Options,
) -> Result<(Evaluation, Option<Nonpositive>)> {
    let Windows { batch, length, stride } = windows;
    let bad = |key: &str, found: usize, expected: String| Error::Setting {
        place: String::new(),
        key: key.into(),
        found: found.to_string(),
        expected,
    };
    if batch == 0 || length == 0 {
        return Err(bad("batch or length", 0, "it must be at least 1".into()));
    }
    if stride == 0 || stride > length {
        return Err(bad("stride", stride, format!("it must be from 1 to the length, {length}")));
    }
    if source.vocabulary() > model.config.vocab_size {
        let expected = format!("the model knows {} tokens; use the model's own tokenizer", model.config.vocab_size);
        return Err(bad("vocabulary of the data", source.vocabulary(), expected));
    }
    // The parameters are there already.
    crate::memory::check(&model.config, batch, length, 0, if options.forward_only { 1 } else { model.config.num_hidden_layers })?;
    let mut session = model.session(batch, length, options)?;
    let (mut sums, mut rows, mut sliding) = (Sums::default(), Rows::default(), Sliding::default());
    for index in 0.. {
        let more =
            if stride == length { source.held_out(index, batch, length, &mut rows)? } else { sliding.next(source, windows, &mut rows)? };
        if !more || (limit > 0 && index >= limit) {
            break;
        }
        sums.add(&mut session, &model.params, &rows)?;
        if !sums.all.loss.is_finite() {
            return Err(Error::EvaluationNotFinite { batch: index, denominator: sums.nonpositive });
        }
    }
    Ok((sums.finish(source.best_loss()), sums.nonpositive))
}

/// Overlapping windows of a stream.
#[derive(Default)]
struct Sliding {
    piece: u64,
    /// Tokens before the next piece, at most length − stride.
    context: Vec<u32>,
    rows: Rows,
}

impl Sliding {
    fn next(&mut self, source: &dyn Source, windows: Windows, out: &mut Rows) -> Result<bool> {
        let Windows { batch, length, stride } = windows;
        out.reset(batch, length);
        let mut any = false;
        for row in 0..batch {
            if !source.held_out(self.piece, 1, stride, &mut self.rows)? {
                break;
            }
            // Of built-in data the best loss is known.
            if !self.rows.lengths.is_empty() || source.best_loss().is_some() {
                let expected = "these data are separate documents, which have nothing before them; make it the length".into();
                return Err(Error::Setting { place: String::new(), key: "stride".into(), found: stride.to_string(), expected });
            }
            any = true;
            self.piece += 1;
            let (begin, shown) = (row * length, self.context.len());
            out.ids[begin..begin + shown].copy_from_slice(&self.context);
            out.ids[begin + shown..begin + shown + stride].copy_from_slice(&self.rows.ids);
            out.labels[begin + shown..begin + shown + stride].copy_from_slice(&self.rows.labels);
            out.bytes += self.rows.bytes;
            self.context.extend_from_slice(&self.rows.ids);
            let surplus = self.context.len().saturating_sub(length - stride);
            self.context.drain(..surplus);
        }
        Ok(any)
    }
}
