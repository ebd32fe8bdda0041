//! What a model is asked and what it answers.

use crate::error::{Error, Result};
use crate::ops::cross_entropy::IGNORE;

/// B rows of T tokens.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Tokens, [B, T], all below the vocabulary, padding included.
    pub ids: &'a [u32],
    /// The token that should follow each position, [B, T], or −100 where none is asked for. They are used as given: position t is
    /// compared with label t.
    pub labels: &'a [i32],
    /// Positions that count in each row, [B]; later ones are padding, unseen by attention and absent from the loss.
    pub lengths: Option<&'a [usize]>,
    /// Tokens by which the sum of losses is divided for the gradient: those counted in this batch, or, where this is one part of a
    /// larger batch, those of the whole.
    pub tokens: Option<usize>,
}

impl<'a> Batch<'a> {
    /// A batch without padding.
    pub fn new(ids: &'a [u32], labels: &'a [i32]) -> Batch<'a> {
        Batch { ids, labels, lengths: None, tokens: None }
    }
}

/// The loss of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// Σ of the losses of the tokens that count, in nats.
    pub sum: f64,
    /// How many count.
    pub count: usize,
    /// The first denominator of an attention that was not positive.
    pub nonpositive: Option<Nonpositive>,
}

impl Loss {
    /// Per token; NaN where no token counts.
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }
}

/// A denominator of an attention that was zero, negative or NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nonpositive {
    /// Layer.
    pub layer: usize,
    /// Head.
    pub head: usize,
    /// Batch row.
    pub row: usize,
    /// Position.
    pub position: usize,
    /// Its value.
    pub value: f64,
}

impl Nonpositive {
    pub(crate) fn at(layer: usize, row: usize, found: termwise_attention::Nonpositive) -> Nonpositive {
        Nonpositive { layer, row, head: found.head, position: found.position, value: found.value }
    }
}

impl std::fmt::Display for Nonpositive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Nonpositive { layer, head, row, position, value } = self;
        write!(f, "the denominator of layer {layer}, head {head} is {value:e} at position {position} of row {row}")
    }
}

/// As many values as the session has room for.
pub(crate) fn check_len(what: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::BatchLength { what, expected, found }) }
}

/// Every token is one of the vocabulary.
pub(crate) fn check_ids(ids: &[u32], time: usize, vocabulary: usize) -> Result<()> {
    match ids.iter().position(|&id| id as usize >= vocabulary) {
        None => Ok(()),
        Some(at) => Err(value_error("token", at, time, ids[at] as i64, format!("below the vocabulary of {vocabulary}"))),
    }
}

/// Every row has between 1 and T positions.
pub(crate) fn check_lengths(lengths: Option<&[usize]>, batch: usize, time: usize) -> Result<()> {
    let Some(lengths) = lengths else { return Ok(()) };
    check_len("lengths", lengths.len(), batch)?;
    match lengths.iter().position(|&length| length == 0 || length > time) {
        None => Ok(()),
        Some(row) => Err(value_error("length", row * time, time, lengths[row] as i64, format!("between 1 and {time}"))),
    }
}

/// Labels with padding taken out, into `targets` [B, T]; how many count.
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
            return Err(value_error("label", at, time, label as i64, format!("{IGNORE} or from 0 below the vocabulary of {vocabulary}")));
        }
        count += 1;
    }
    Ok(count)
}

fn value_error(what: &'static str, at: usize, time: usize, found: i64, expected: String) -> Error {
    Error::BatchValue { what, row: at / time, position: at % time, found, expected }
}
