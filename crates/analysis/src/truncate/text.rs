//! Splits of the text: calibration, tuning and evaluation use different batches.

use serde::{Deserialize, Serialize};
use termwise_data::{BestLoss, Error as DataError, Result as DataResult, Rows, Source};
use termwise_train::eval::Windows;

use crate::Error;

/// A range of the held-out batches of a source.
#[derive(Clone, Debug)]
pub struct Split<'a> {
    source: &'a dyn Source,
    first: u64,
    count: u64,
}

impl<'a> Split<'a> {
    /// All batches of a source, at most `limit` unless it is 0.
    pub fn whole(source: &'a dyn Source, windows: Windows, limit: u64) -> Result<Split<'a>, Error> {
        Ok(Split { source, first: 0, count: batches(source, windows, limit)? })
    }

    /// A range of its batches.
    pub fn part(&self, first: u64, count: u64) -> Split<'a> {
        Split { source: self.source, first: self.first + first, count: count.min(self.count.saturating_sub(first)) }
    }

    /// Number of batches.
    pub fn batches(&self) -> u64 {
        self.count
    }
}

impl Source for Split<'_> {
    fn vocabulary(&self) -> usize {
        self.source.vocabulary()
    }

    fn fingerprint(&self) -> String {
        format!("{} {}+{}", self.source.fingerprint(), self.first, self.count)
    }

    fn train(&self, _: u64, _: u64, _: usize, _: usize, _: &mut Rows) -> DataResult<()> {
        Err(DataError::Internal("evaluation text has no training batches"))
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> DataResult<bool> {
        if index >= self.count {
            out.reset(rows, time);
            return Ok(false);
        }
        self.source.held_out(self.first + index, rows, time, out)
    }

    fn best_loss(&self) -> Option<BestLoss> {
        self.source.best_loss()
    }
}

/// The number of held-out batches of a source, at most `limit` unless it is 0, by doubling and bisection.
fn batches(source: &dyn Source, windows: Windows, limit: u64) -> Result<u64, Error> {
    let mut rows = Rows::default();
    let mut has = |index: u64| source.held_out(index, windows.batch, windows.length, &mut rows);
    let most = if limit == 0 { u64::MAX } else { limit };
    let mut step = 1;
    while step < most && has(step - 1)? {
        step = step.saturating_mul(2);
    }
    let (mut low, mut high) = (step / 2, step.min(most));
    // All batches below `low` exist, none from `high` on, or `high` is the limit.
    while low < high {
        let middle = low + (high - low) / 2;
        if has(middle)? { low = middle + 1 } else { high = middle }
    }
    Ok(low)
}

/// The splits for calibration, tuning and evaluation.
#[derive(Clone, Debug)]
pub struct Texts<'a> {
    /// Coefficients are fitted on it.
    pub calibration: Split<'a>,
    /// Plans are chosen on it.
    pub tuning: Split<'a>,
    /// Reported losses are measured on it.
    pub evaluation: Split<'a>,
    /// Whether calibration and tuning have separate text, and evaluation all of the data.
    pub separate: bool,
    /// Windows of all three.
    pub windows: Windows,
}

/// More tokens do not improve a fit.
const CALIBRATION_TOKENS: u64 = 65_536;

impl<'a> Texts<'a> {
    /// The data split into three, in order: a quarter, at most 65,536 tokens, for calibration; a quarter for tuning; the rest. Separate
    /// calibration text is split into two, and all data are for evaluation. At most `limit` batches in total unless it is 0.
    pub fn split(data: &'a dyn Source, calibration: Option<&'a dyn Source>, windows: Windows, limit: u64) -> Result<Texts<'a>, Error> {
        let enough = (CALIBRATION_TOKENS / (windows.batch * windows.length).max(1) as u64).max(1);
        let whole = Split::whole(data, windows, limit)?;
        let (own, from) = match calibration {
            Some(source) => (true, Split::whole(source, windows, if limit == 0 { 0 } else { limit.max(2) })?),
            None => (false, whole.clone()),
        };
        let needed = if own { 2 } else { 3 };
        if from.batches() < needed || whole.batches() == 0 {
            return Err(Error::Sizes(format!(
                "the text has {} batches of {} windows of {} tokens, and at least {needed} are needed for calibration, tuning and evaluation on different text; name more data, or use a smaller --batch or --length",
                from.batches().min(whole.batches()),
                windows.batch,
                windows.length
            )));
        }
        let first = (from.batches() / if own { 2 } else { 4 }).clamp(1, enough);
        let second = if own { from.batches() - first } else { (from.batches() / 4).max(1) };
        let evaluation = if own { whole } else { from.part(first + second, u64::MAX) };
        Ok(Texts { calibration: from.part(0, first), tuning: from.part(first, second), evaluation, separate: own, windows })
    }
}

/// Tokens of each split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokens {
    /// For calibration.
    pub calibration: u64,
    /// For tuning.
    pub tuning: u64,
    /// For evaluation.
    pub evaluation: u64,
}

/// Number of labels in the batches of a split.
pub fn tokens(split: &Split, windows: Windows) -> Result<u64, Error> {
    let mut rows = Rows::default();
    let mut sum = 0;
    for index in 0..split.batches() {
        split.held_out(index, windows.batch, windows.length, &mut rows)?;
        sum += rows.labels.iter().filter(|label| **label >= 0).count() as u64;
    }
    Ok(sum)
}
