//! Stretches of text: what is calibrated on, tuned on and evaluated on are different batches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use termwise_data::{BestLoss, Error as DataError, Result as DataResult, Rows, Source};
use termwise_train::eval::Windows;

use crate::Error;

/// Some of the held-out batches of a source, counted in batches of one size.
#[derive(Clone, Debug)]
pub struct Split<'a> {
    source: &'a dyn Source,
    first: u64,
    count: u64,
}

impl<'a> Split<'a> {
    /// All batches of a source, at most `limit` where that is not 0.
    pub fn whole(source: &'a dyn Source, windows: Windows, limit: u64) -> Result<Split<'a>, Error> {
        Ok(Split { source, first: 0, count: batches(source, windows, limit)? })
    }

    /// Some of its batches.
    pub fn part(&self, first: u64, count: u64) -> Split<'a> {
        Split { source: self.source, first: self.first + first, count: count.min(self.count.saturating_sub(first)) }
    }

    /// How many.
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
        Err(DataError::Internal("text to evaluate on has no training batches"))
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

/// How many held-out batches a source has, up to `limit` where that is not 0: by doubling and halving, since any batch can be asked for.
fn batches(source: &dyn Source, windows: Windows, limit: u64) -> Result<u64, Error> {
    let mut rows = Rows::default();
    let mut has = |index: u64| source.held_out(index, windows.batch, windows.length, &mut rows);
    let most = if limit == 0 { u64::MAX } else { limit };
    let mut step = 1;
    while step < most && has(step - 1)? {
        step = step.saturating_mul(2);
    }
    let (mut low, mut high) = (step / 2, step.min(most));
    // All before `low` are there, none from `high` on, or `high` is as many as are wanted.
    while low < high {
        let middle = low + (high - low) / 2;
        if has(middle)? { low = middle + 1 } else { high = middle }
    }
    Ok(low)
}

/// What is calibrated on, tuned on and evaluated on.
#[derive(Clone, Debug)]
pub struct Texts<'a> {
    /// Coefficients are fitted to it.
    pub calibration: Split<'a>,
    /// Plans are chosen by it.
    pub tuning: Split<'a>,
    /// Everything that is reported is measured on it.
    pub evaluation: Split<'a>,
    /// Whether calibration and tuning have text of their own, and evaluation all of the data.
    pub separate: bool,
}

/// Batches beyond this do not make a fit better.
const CALIBRATION_TOKENS: u64 = 65_536;

impl<'a> Texts<'a> {
    /// The data cut into three, first to last: a quarter, at most 65,536 tokens, to calibrate; a quarter to tune; the rest. With calibration
    /// text of its own that is cut into two, and all data are evaluated on. At most `limit` batches in all where that is not 0.
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
                "the text makes {} batches of {} windows of {} tokens, and at least {needed} are needed to calibrate, tune and evaluate on different text; name more data, or use a smaller --batch or --length",
                from.batches().min(whole.batches()),
                windows.batch,
                windows.length
            )));
        }
        let first = (from.batches() / if own { 2 } else { 4 }).clamp(1, enough);
        let second = if own { from.batches() - first } else { (from.batches() / 4).max(1) };
        let evaluation = if own { whole } else { from.part(first + second, u64::MAX) };
        Ok(Texts { calibration: from.part(0, first), tuning: from.part(first, second), evaluation, separate: own })
    }
}

/// Tokens of each split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tokens {
    /// Fitted to.
    pub calibration: u64,
    /// Chosen by.
    pub tuning: u64,
    /// Reported on.
    pub evaluation: u64,
}

/// Tokens that the batches of a split ask for.
pub fn tokens(split: &Split, windows: Windows) -> Result<u64, Error> {
    let mut rows = Rows::default();
    let mut sum = 0;
    for index in 0..split.batches() {
        split.held_out(index, windows.batch, windows.length, &mut rows)?;
        sum += rows.labels.iter().filter(|label| **label >= 0).count() as u64;
    }
    Ok(sum)
}
