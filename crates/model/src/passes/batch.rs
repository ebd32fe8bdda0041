//! Batches, losses, and the checks of a batch.

use crate::error::{Error, Result};
use crate::ops::cross_entropy::IGNORE;

/// A batch of B rows of T tokens.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Batch<'a> {
    /// Token ids, all below the vocabulary size, including padding. [B, T]
    pub ids: &'a [u32],
    /// Labels, or −100 for positions without a loss. They are not shifted: the logits of position t are compared with label t. [B, T]
    pub labels: &'a [i32],
    /// Valid positions of each row. Later positions are padding, which attention and the loss ignore. [B]
    pub lengths: Option<&'a [usize]>,
    /// The number of tokens by which the gradient of the summed loss is divided. Default: the tokens with a loss in this batch. For a micro-batch, set
    /// it to the number of tokens of the whole batch.
    pub tokens: Option<usize>,
}

impl<'a> Batch<'a> {
    /// A batch without padding.
    pub fn new(ids: &'a [u32], labels: &'a [i32]) -> Batch<'a> {
        Batch { ids, labels, lengths: None, tokens: None }
    }

    /// Sets `lengths`.
    #[must_use]
    pub fn lengths(self, lengths: Option<&'a [usize]>) -> Batch<'a> {
        Batch { lengths, ..self }
    }

    /// Sets `tokens`.
    #[must_use]
    pub fn tokens(self, tokens: Option<usize>) -> Batch<'a> {
        Batch { tokens, ..self }
    }
}

/// The loss of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Loss {
    /// Sum of the losses, in nats.
    pub sum: f64,
    /// Number of positions with a loss.
    pub count: usize,
    /// The first attention denominator that was not positive.
    pub nonpositive: Option<NonpositiveDenominator>,
}

impl Loss {
    /// The mean loss in nats per token; NaN without any.
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }
}

/// An attention denominator that is zero, negative or NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NonpositiveDenominator {
    /// Layer index.
    pub layer: usize,
    /// Head index.
    pub head: usize,
    /// Batch row.
    pub row: usize,
    /// Position.
    pub position: usize,
    /// Value of the denominator.
    pub value: f64,
}

impl NonpositiveDenominator {
    pub(crate) fn at(layer: usize, row: usize, found: termwise_attention::Nonpositive) -> NonpositiveDenominator {
        NonpositiveDenominator { layer, row, head: found.head, position: found.position, value: found.value }
    }
}

impl std::fmt::Display for NonpositiveDenominator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let NonpositiveDenominator { layer, head, row, position, value } = self;
        write!(f, "the denominator of layer {layer}, head {head} is {value:e} at position {position} of row {row}")
    }
}

/// Checks the length of a part of a batch.
pub(crate) fn check_len(what: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::BatchLength { what, expected, found }) }
}

/// Checks that every token id is below the vocabulary size.
pub(crate) fn check_ids(ids: &[u32], time: usize, vocabulary: usize) -> Result<()> {
    match ids.iter().position(|&id| id as usize >= vocabulary) {
        None => Ok(()),
        Some(at) => Err(value_error("token", at, time, ids[at] as i64, format!("below the vocabulary size {vocabulary}"))),
    }
}

/// Checks that every length is between 1 and T.
pub(crate) fn check_lengths(lengths: Option<&[usize]>, batch: usize, time: usize) -> Result<()> {
    let Some(lengths) = lengths else { return Ok(()) };
    check_len("lengths", lengths.len(), batch)?;
    match lengths.iter().position(|&length| length == 0 || length > time) {
        None => Ok(()),
        Some(row) => Err(value_error("length", row * time, time, lengths[row] as i64, format!("between 1 and {time}"))),
    }
}

/// Copies the labels to `targets` [B, T], with padding replaced by [`IGNORE`]. Returns the number of positions with a loss.
pub(crate) fn count_targets(batch: &Batch, time: usize, vocabulary: usize, targets: &mut [i32]) -> Result<usize> {
    check_len("labels", batch.labels.len(), targets.len())?;
    let mut count = 0;
    for (at, (&label, target)) in batch.labels.iter().zip(targets).enumerate() {
        let padding = batch.lengths.is_some_and(|lengths| at % time >= lengths[at / time]);
        *target = if padding { IGNORE } else { label };
        if *target == IGNORE {
            continue;
        }
        if label < 0 || label as usize >= vocabulary {
            return Err(value_error(
                "label",
                at,
                time,
                label as i64,
                format!("{IGNORE}, or at least 0 and below the vocabulary size {vocabulary}"),
            ));
        }
        count += 1;
    }
    Ok(count)
}

fn value_error(what: &'static str, at: usize, time: usize, found: i64, expected: String) -> Error {
    Error::BatchValue { what, row: at / time, position: at % time, found, expected }
}
