//! The gradient of one step, over one batch or several.
//!
//! The rows of a step, those of all its batches, are cut into micro-batches, neighbours and as many in each. Their gradients are added in a
//! [`Tree`], so that each rank can compute some of them and the sum has the same bytes. With one micro-batch, batches add up one after another.

use std::ops::Range;

use termwise_model::NonpositiveDenominator;
use termwise_model::{Batch, Model, Objective, Params, Session, SessionOptions};

use crate::collective::{Alone, Collective, Tree, tree};
use crate::error::{Error, Result};
use crate::eval::Sums;
use termwise_data::Rows;

/// How the rows of a step are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Rows of a batch.
    pub batch: usize,
    /// Positions of a row.
    pub length: usize,
    /// Batches of a step.
    pub accumulate: usize,
    /// Micro-batches of a step: a divisor of `accumulate`, or `accumulate` times a divisor of `batch`.
    pub micro_batches: usize,
}

impl Cut {
    /// Whether micro-batches have as many rows each, and none has parts of two batches.
    pub fn is_even(self) -> bool {
        let Cut { batch, accumulate, micro_batches, .. } = self;
        let whole = micro_batches > 0 && accumulate.is_multiple_of(micro_batches);
        whole || micro_batches.is_multiple_of(accumulate) && micro_batches > 0 && batch.is_multiple_of(micro_batches / accumulate)
    }

    /// Rows that run through the model at once.
    fn rows(self) -> usize {
        self.batch / (self.micro_batches / self.accumulate).max(1)
    }

    /// The batches of a micro-batch, and the rows of each.
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

/// A session, and gradients that add up.
pub struct Gradients {
    /// Buffers of the model.
    session: Session,
    /// How it computes.
    options: SessionOptions,
    cut: Cut,
    /// Sums of nodes of the tree, of this rank and in its order, and room to compute them. The first becomes the whole gradient.
    sums: Vec<Params>,
    /// What lies there.
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

/// What a step's gradient came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Computed {
    /// Mean loss over all tokens of all batches, in nats.
    pub loss: f64,
    /// Tokens that counted.
    pub tokens: u64,
    /// Norm of the gradient.
    pub norm: f64,
    /// The first denominator of an attention that was not positive.
    pub nonpositive: Option<NonpositiveDenominator>,
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
    /// Room for the micro-batches of one of several ranks.
    pub fn new(model: &Model, cut: Cut, options: SessionOptions, (rank, ranks): (usize, usize)) -> Result<Gradients> {
        let tree = Tree { leaves: cut.micro_batches };
        let nodes = tree.nodes(tree.share(rank, ranks));
        let room = nodes.iter().enumerate().map(|(place, node)| place + tree::depth(node)).max().unwrap_or(1);
        let sums = (0..room).map(|_| model.params.zeros_like()).collect::<termwise_model::Result<_>>()?;
        let session = model.session(cut.rows(), cut.length, options)?;
        Ok(Gradients { session, options, cut, sums, nodes, losses: Vec::new(), tokens: 0 })
    }

    /// How the model computes.
    pub fn options(&self) -> SessionOptions {
        self.options
    }

    /// The gradient, once it is reduced.
    pub fn gradient(&self) -> &Params {
        &self.sums[0]
    }

    /// The same, to be changed.
    pub fn gradient_mut(&mut self) -> &mut Params {
        &mut self.sums[0]
    }

    /// The gradient of the mean loss over all tokens of `batches` together, as far as it comes from this rank's micro-batches.
    pub fn compute(&mut self, params: &Params, batches: &[Rows]) -> Result<()> {
        let tokens: usize = batches.iter().map(counted).sum();
        self.tokens = tokens as u64;
        self.losses.clear();
        for place in 0..self.nodes.len() {
            self.node(self.nodes[place].clone(), place, params, batches, tokens)?;
        }
        Ok(())
    }

    /// The sum of a node's leaves, into the place `at`; places behind it are used.
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

    /// The gradient and the loss of all ranks. The norm is still to be taken.
    pub fn reduce(&mut self, collective: &dyn Collective) -> Result<Computed> {
        let mut losses = std::mem::take(&mut self.losses);
        if collective.size() > 1 {
            let mut own: Vec<&mut [f32]> = self.sums.iter_mut().map(Params::values_mut).collect();
            collective.sum(Tree { leaves: self.cut.micro_batches }, &mut own)?;
            let own: Vec<u64> = losses.iter().flat_map(|loss| loss.to_words()).collect();
            losses = collective.gather_words(&own)?.concat().as_chunks().0.iter().map(MicroLoss::of_words).collect();
        }
        if losses.len() != self.cut.micro_batches {
            return Err(Error::Internal("ranks do not cover the micro-batches of a step"));
        }
        let loss = losses.iter().map(|loss| loss.sum).sum::<f64>() / self.tokens.max(1) as f64;
        let nonpositive = losses.iter().find_map(|loss| loss.nonpositive);
        let bad_batch = losses.iter().find_map(|loss| loss.bad_batch);
        // The buffer is kept.
        losses.clear();
        self.losses = losses;
        Ok(Computed { loss, tokens: self.tokens, norm: f64::NAN, nonpositive, bad_batch })
    }

    /// Both, where this is the only process, with the norm.
    pub fn whole(&mut self, params: &Params, batches: &[Rows]) -> Result<Computed> {
        self.compute(params, batches)?;
        let computed = self.reduce(&Alone)?;
        Ok(Computed { norm: crate::gradient_norm(self.gradient()), ..computed })
    }

    /// The losses of a batch of as many rows as in training.
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

/// A denominator as it is sent to other ranks.
pub(crate) fn words_of(found: Option<NonpositiveDenominator>) -> [u64; 6] {
    found.map_or([0; 6], |at| [1, at.layer as u64, at.head as u64, at.row as u64, at.position as u64, at.value.to_bits()])
}

/// Read back.
pub(crate) fn of_words([flag, layer, head, row, position, value]: [u64; 6]) -> Option<NonpositiveDenominator> {
    let [layer, head, row, position] = [layer, head, row, position].map(|n| n as usize);
    (flag == 1).then(|| NonpositiveDenominator { layer, head, row, position, value: f64::from_bits(value) })
}

/// A batch as the model takes it.
pub(crate) fn batch_of(rows: &Rows, tokens: Option<usize>) -> Batch<'_> {
    part_of(rows, 0..rows.rows, tokens)
}

/// Some rows of a batch.
pub(crate) fn part_of(rows: &Rows, part: Range<usize>, tokens: Option<usize>) -> Batch<'_> {
    let lengths = (!rows.lengths.is_empty()).then(|| &rows.lengths[part.clone()]);
    let positions = part.start * rows.time..part.end * rows.time;
    Batch::new(&rows.ids[positions.clone()], &rows.labels[positions]).lengths(lengths).tokens(tokens)
}

/// The same with the row that it has in the whole batch.
pub(crate) fn within_batch(found: Option<NonpositiveDenominator>, first: usize) -> Option<NonpositiveDenominator> {
    found.map(|at| NonpositiveDenominator { row: first + at.row, ..at })
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
    fn losses_are_sent_whole() {
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
