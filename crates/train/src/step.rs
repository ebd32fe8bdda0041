//! The gradient of one step with gradient accumulation.
//!
//! The rows of all batches of a step are split into micro-batches of equal size. Their gradients are added in a
//! [`Tree`], so ranks can share them and the sum has the same bytes. With one micro-batch, batches are added sequentially.

use std::ops::Range;

use termwise_model::NonpositiveDenominator;
use termwise_model::{Batch, Model, Objective, Params, Session, SessionOptions};

use crate::collective::{Alone, Collective, Tree, tree};
use crate::error::{Error, Result};
use crate::eval::Sums;
use termwise_data::Rows;

/// The split of a step into micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Rows per batch.
    pub batch: usize,
    /// Positions per row.
    pub length: usize,
    /// Batches per step.
    pub accumulate: usize,
    /// Micro-batches per step: a divisor of `accumulate`, or `accumulate` times a divisor of `batch`.
    pub micro_batches: usize,
}

impl Cut {
    /// Whether all micro-batches have the same number of rows and none has rows of two batches.
    pub fn is_even(self) -> bool {
        let Cut { batch, accumulate, micro_batches, .. } = self;
        let whole = micro_batches > 0 && accumulate.is_multiple_of(micro_batches);
        whole || micro_batches.is_multiple_of(accumulate) && micro_batches > 0 && batch.is_multiple_of(micro_batches / accumulate)
    }

    /// Rows per forward pass.
    fn rows(self) -> usize {
        self.batch / (self.micro_batches / self.accumulate).max(1)
    }

    /// The batches of a micro-batch, and its rows in each.
    fn place(self, micro_batch: usize) -> (Range<usize>, Range<usize>) {
        let Cut { batch, accumulate, micro_batches, .. } = self;
        if micro_batches <= accumulate {
            let each = accumulate / micro_batches;
            return (micro_batch * each..(micro_batch + 1) * each, 0..batch);
        }
        let (pieces, rows) = (micro_batches / accumulate, self.rows());
        let (whole, piece) = (micro_batch / pieces, micro_batch % pieces);
        (whole..whole + 1, piece * rows..(piece + 1) * rows)
    }
}

/// A session with accumulated gradients.
pub struct Gradients {
    /// Buffers of the model.
    session: Session,
    /// Computation options.
    options: SessionOptions,
    cut: Cut,
    /// Sums of this rank's tree nodes, in order, and scratch buffers to compute them. The first becomes the complete gradient.
    sums: Vec<Params>,
    /// The nodes whose sums are stored there.
    nodes: Vec<Range<usize>>,
    losses: Vec<MicroLoss>,
    tokens: u64,
}

/// The loss of a micro-batch.
#[derive(Clone, Copy, Debug, Default)]
struct MicroLoss {
    sum: f64,
    bad_batch: Option<usize>,
    nonpositive: Option<NonpositiveDenominator>,
}

/// Loss and gradient statistics of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Computed {
    /// Mean loss over all tokens of all batches, in nats.
    pub loss: f64,
    /// Tokens that contribute to the loss.
    pub tokens: u64,
    /// Gradient norm.
    pub norm: f64,
    /// The first attention denominator that was not positive.
    pub nonpositive: Option<NonpositiveDenominator>,
    /// The accumulated batch of the step whose loss is NaN or infinite.
    pub bad_batch: Option<usize>,
}

impl Computed {
    /// Whether loss and gradient norm are finite.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.norm.is_finite()
    }
}

impl Gradients {
    /// Allocates buffers for the micro-batches of one of several ranks.
    pub fn new(model: &Model, cut: Cut, options: SessionOptions, (rank, ranks): (usize, usize)) -> Result<Gradients> {
        let tree = Tree { leaves: cut.micro_batches };
        let nodes = tree.nodes(tree.share(rank, ranks));
        let room = nodes.iter().enumerate().map(|(place, node)| place + tree::depth(node)).max().unwrap_or(1);
        let sums = (0..room).map(|_| model.params.zeros_like()).collect::<termwise_model::Result<_>>()?;
        let session = model.session(cut.rows(), cut.length, options)?;
        Ok(Gradients { session, options, cut, sums, nodes, losses: Vec::new(), tokens: 0 })
    }

    /// Computation options.
    pub fn options(&self) -> SessionOptions {
        self.options
    }

    /// The gradient, after the reduction.
    pub fn gradient(&self) -> &Params {
        &self.sums[0]
    }

    /// Mutable access to the gradient.
    pub fn gradient_mut(&mut self) -> &mut Params {
        &mut self.sums[0]
    }

    /// Computes the share of this rank's micro-batches in the gradient of the mean loss over all tokens of `batches`.
    pub fn compute(&mut self, params: &Params, batches: &[Rows]) -> Result<()> {
        let tokens: usize = batches.iter().map(counted).sum();
        self.tokens = tokens as u64;
        self.losses.clear();
        for place in 0..self.nodes.len() {
            self.node(self.nodes[place].clone(), place, params, batches, tokens)?;
        }
        Ok(())
    }

    /// The sum of a node's leaves, into the slot `at`. Later slots are scratch.
    fn node(&mut self, node: Range<usize>, at: usize, params: &Params, batches: &[Rows], tokens: usize) -> Result<()> {
        if node.len() > 1 {
            let middle = tree::middle(&node);
            self.node(node.start..middle, at, params, batches, tokens)?;
            self.node(middle..node.end, at + 1, params, batches, tokens)?;
            let (front, back) = self.sums.split_at_mut(at + 1);
            tree::add(front[at].values_mut(), back[0].values());
            return Ok(());
        }
        self.sums[at].set_zero();
        let (whole, rows) = self.cut.place(node.start);
        let mut found = MicroLoss::default();
        for index in whole {
            let batch = part_of(&batches[index], rows.clone(), Some(tokens));
            let loss = self.session.loss_and_grad(params, &batch, &mut self.sums[at])?;
            found.sum += loss.sum;
            found.nonpositive = found.nonpositive.or(within_batch(loss.nonpositive, rows.start));
            if !loss.sum.is_finite() {
                found.bad_batch = found.bad_batch.or(Some(index));
            }
        }
        self.losses.push(found);
        Ok(())
    }

    /// Reduces gradient and loss over all ranks. The norm is not computed yet.
    pub fn reduce(&mut self, collective: &dyn Collective) -> Result<Computed> {
        let mut losses = std::mem::take(&mut self.losses);
        if collective.size() > 1 {
            let mut own: Vec<&mut [f32]> = self.sums.iter_mut().map(Params::values_mut).collect();
            collective.sum(Tree { leaves: self.cut.micro_batches }, &mut own)?;
            let own: Vec<u64> = losses.iter().flat_map(|loss| loss.to_words()).collect();
            losses = collective.gather_words(&own)?.concat().as_chunks().0.iter().map(MicroLoss::of_words).collect();
        }
        if losses.len() != self.cut.micro_batches {
            return Err(Error::Internal("the ranks do not cover all micro-batches of a step"));
        }
        let loss = losses.iter().map(|loss| loss.sum).sum::<f64>() / self.tokens.max(1) as f64;
        let nonpositive = losses.iter().find_map(|loss| loss.nonpositive);
        let bad_batch = losses.iter().find_map(|loss| loss.bad_batch);
        // The buffer is reused.
        losses.clear();
        self.losses = losses;
        Ok(Computed { loss, tokens: self.tokens, norm: f64::NAN, nonpositive, bad_batch })
    }

    /// Gradient, reduction and norm for a single process.
    pub fn whole(&mut self, params: &Params, batches: &[Rows]) -> Result<Computed> {
        self.compute(params, batches)?;
        let computed = self.reduce(&Alone)?;
        Ok(Computed { norm: crate::gradient_norm(self.gradient()), ..computed })
    }

    /// The losses of a batch with the row count of training.
    pub fn loss(&mut self, params: &Params, rows: &Rows) -> Result<Sums> {
        let mut sums = Sums::default();
        let at_once = self.cut.rows();
        for first in (0..rows.rows).step_by(at_once) {
            sums.add(&mut self.session, params, rows, first..first + at_once)?;
        }
        Ok(sums)
    }
}

impl MicroLoss {
    fn to_words(self) -> [u64; 8] {
        let [flag, layer, head, row, position, value] = words_of(self.nonpositive);
        [self.sum.to_bits(), self.bad_batch.map_or(u64::MAX, |index| index as u64), flag, layer, head, row, position, value]
    }

    fn of_words(&[sum, bad, flag, layer, head, row, position, value]: &[u64; 8]) -> MicroLoss {
        let nonpositive = of_words([flag, layer, head, row, position, value]);
        MicroLoss { sum: f64::from_bits(sum), bad_batch: (bad < u64::MAX).then_some(bad as usize), nonpositive }
    }
}

/// Encodes a denominator for other ranks.
pub(crate) fn words_of(found: Option<NonpositiveDenominator>) -> [u64; 6] {
    found.map_or([0; 6], |at| [1, at.layer as u64, at.head as u64, at.row as u64, at.position as u64, at.value.to_bits()])
}

/// Decodes [`words_of`].
pub(crate) fn of_words([flag, layer, head, row, position, value]: [u64; 6]) -> Option<NonpositiveDenominator> {
    let [layer, head, row, position] = [layer, head, row, position].map(|n| n as usize);
    (flag == 1).then(|| NonpositiveDenominator { layer, head, row, position, value: f64::from_bits(value) })
}

/// Converts a batch for the model.
pub(crate) fn batch_of(rows: &Rows, tokens: Option<usize>) -> Batch<'_> {
    part_of(rows, 0..rows.rows, tokens)
}

/// Some rows of a batch.
pub(crate) fn part_of(rows: &Rows, part: Range<usize>, tokens: Option<usize>) -> Batch<'_> {
    let lengths = (!rows.lengths.is_empty()).then(|| &rows.lengths[part.clone()]);
    let positions = part.start * rows.time..part.end * rows.time;
    Batch::new(&rows.ids[positions.clone()], &rows.labels[positions]).lengths(lengths).tokens(tokens)
}

/// The same with its row index in the complete batch.
pub(crate) fn within_batch(found: Option<NonpositiveDenominator>, first: usize) -> Option<NonpositiveDenominator> {
    found.map(|at| NonpositiveDenominator { row: first + at.row, ..at })
}

/// Whether the label at this index of [B, T] contributes to the loss.
pub(crate) fn counts(rows: &Rows, at: usize) -> bool {
    let within = rows.lengths.get(at / rows.time.max(1)).is_none_or(|&length| at % rows.time < length);
    within && rows.labels[at] >= 0
}

/// Number of labels that contribute to the loss.
pub(crate) fn counted(rows: &Rows) -> usize {
    (0..rows.labels.len()).filter(|&at| counts(rows, at)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(batch: usize, accumulate: usize, micro_batches: usize) -> Cut {
        Cut { batch, length: 3, accumulate, micro_batches }
    }

    #[test]
    fn micro_batches_cover_a_step_in_order() {
        for (batch, accumulate, micro_batches) in [(4, 1, 1), (4, 1, 2), (4, 1, 4), (4, 3, 1), (4, 3, 3), (4, 3, 6), (2, 8, 4), (6, 2, 4)] {
            let cut = cut(batch, accumulate, micro_batches);
            assert!(cut.is_even(), "{cut:?}");
            let rows: Vec<usize> = (0..micro_batches)
                .flat_map(|i| {
                    let (whole, rows) = cut.place(i);
                    assert_eq!(rows.len(), cut.rows());
                    whole.flat_map(move |b| rows.clone().map(move |row| b * batch + row))
                })
                .collect();
            assert_eq!(rows, (0..batch * accumulate).collect::<Vec<_>>(), "{cut:?}");
        }
        for (batch, accumulate, micro_batches) in [(4, 1, 0), (4, 1, 3), (4, 1, 8), (4, 3, 2), (3, 2, 4)] {
            assert!(!cut(batch, accumulate, micro_batches).is_even());
        }
    }

    #[test]
    fn losses_round_trip_through_words() {
        let at = NonpositiveDenominator { layer: 1, head: 2, row: 3, position: 4, value: f64::NEG_INFINITY };
        for loss in [
            MicroLoss { sum: f64::NAN, bad_batch: Some(0), nonpositive: Some(at) },
            MicroLoss { sum: 1.5, bad_batch: None, nonpositive: None },
        ] {
            let again = MicroLoss::of_words(&loss.to_words());
            assert_eq!((again.sum.to_bits(), again.bad_batch, again.nonpositive), (loss.sum.to_bits(), loss.bad_batch, loss.nonpositive));
        }
    }
}
