//! One head: its rows in blocks, and its results.

use std::f64::consts::LN_10;

use rayon::prelude::*;
use termwise_attention::{Inputs, Layer, Shape, View};

use super::block::{Head, NotFinite, shift_cancels};
use super::lanes::LANES;
use super::result::{CenteredCut, CutFacts, EntropyFacts, HeadSpectrum, LayerSpectrum, Magnitudes, OrderFor, ScoreFacts, Terms};
use super::series::Cuts;
use super::sums::Sums;
use super::{ORDERS, Options};
use crate::Error;

/// Accumulated statistics of a head.
#[derive(Clone, Debug, Default)]
pub struct HeadStatistics {
    sums: Sums,
    /// Variant string with learned coefficients.
    attention: String,
    cuts: Option<Cuts>,
    /// Whether the series around the mean score of a row was measured.
    centered: bool,
}

impl HeadStatistics {
    /// Adds a window.
    pub fn merge(&mut self, other: HeadStatistics) {
        self.sums.merge(&other.sums);
        // Another rank sends sums only; the rest is known from this rank's windows.
        if !other.attention.is_empty() {
            self.attention = other.attention;
            self.cuts = other.cuts;
            self.centered = other.centered;
        }
    }

    /// The sums of a window, as sent to other ranks.
    pub fn to_words(&self) -> Vec<u64> {
        self.sums.to_words()
    }

    /// Reads the sums of a window and advances; `None` if they are incomplete.
    pub fn of_words(words: &mut &[u64]) -> Option<HeadStatistics> {
        Some(HeadStatistics { sums: Sums::of_words(words)?, ..HeadStatistics::default() })
    }
}

/// Errors of a head.
pub enum Failure {
    View(termwise_attention::Error),
    Scores(NotFinite),
}

impl Failure {
    /// The error with layer, head and window.
    pub fn within(self, layer: usize, head: usize, window: usize) -> Error {
        match self {
            Failure::View(error) => error.into(),
            Failure::Scores(NotFinite { query, key }) => Error::Score { layer, head, window, query, key },
        }
    }
}

/// Measures the rows of head `at.1` of batch row `at.0`.
pub fn look(
    layer: &Layer,
    inputs: &Inputs<f32>,
    shape: &Shape,
    at: (usize, usize),
    rows: &[usize],
    options: &Options,
) -> Result<HeadStatistics, Failure> {
    let view = View::new(layer, shape.batch, shape.time, inputs, at.0, at.1).map_err(Failure::View)?;
    let cuts = Cuts::new(&view.variant.near.kernel, &options.orders);
    let head = Head { view: &view, cuts: cuts.as_ref(), tile: options.tiles.keys.next_multiple_of(LANES) };
    let blocks: Vec<&[usize]> = rows.chunks(options.tiles.rows).collect();
    let results: Vec<Result<Sums, NotFinite>> = blocks.par_iter().map(|rows| head.block(rows)).collect();
    let mut sums = Sums::default();
    for result in results {
        sums.merge(&result.map_err(Failure::Scores)?);
    }
    let centered = cuts.is_some() && shift_cancels(&view);
    Ok(HeadStatistics { sums, attention: view.variant.to_string(), cuts, centered })
}

/// Results of a layer from the sums of its heads.
pub fn conclude(layer: usize, heads: Vec<HeadStatistics>, options: &Options) -> LayerSpectrum {
    let logs: Vec<Option<[Logs; 3]>> = heads.iter().map(HeadStatistics::logs).collect();
    let over_heads = |which: usize| {
        let own: Vec<&Logs> =
            logs.iter().flatten().map(|logs| &logs[which]).filter(|logs| logs.iter().any(|log| log.is_finite())).collect();
        let mean = |n: usize| ln_sum(own.iter().map(|logs| logs[n])) - (own.len().max(1) as f64).ln();
        magnitudes(&std::array::from_fn(mean))
    };
    let any = logs.iter().any(Option::is_some);
    let terms = any.then(|| Terms { all: over_heads(0), positive: over_heads(1), negative: over_heads(2) });
    let heads = heads.iter().zip(&logs).enumerate().map(|(head, (found, logs))| found.conclude(head, logs.as_ref(), options));
    LayerSpectrum { layer, terms, heads: heads.collect() }
}

/// ln of the magnitude of each order, −∞ for zero.
type Logs = [f64; ORDERS];

impl HeadStatistics {
    /// For all pairs, and for those of each sign.
    fn logs(&self) -> Option<[Logs; 3]> {
        let cuts = self.cuts.as_ref()?;
        let Sums { positive, negative, .. } = &self.sums;
        let (above, below) = (positive.ln_sums(), negative.ln_sums());
        let coefficient: Logs = std::array::from_fn(|n| cuts.coefficient(n).abs().ln());
        let mean = |count: u64, sum: &dyn Fn(usize) -> f64| -> Logs {
            std::array::from_fn(|n| if count == 0 { f64::NEG_INFINITY } else { sum(n) + coefficient[n] - (count as f64).ln() })
        };
        Some([
            mean(positive.count() + negative.count(), &|n| ln_sum([above[n], below[n]].into_iter())),
            mean(positive.count(), &|n| above[n]),
            mean(negative.count(), &|n| below[n]),
        ])
    }

    fn conclude(&self, head: usize, logs: Option<&[Logs; 3]>, options: &Options) -> HeadSpectrum {
        let Sums { scores, positive, entropy, .. } = &self.sums;
        let rows = |sum: f64, count: u64| (count > 0).then(|| sum / count as f64);
        HeadSpectrum {
            head,
            attention: self.attention.clone(),
            pairs: scores.count,
            positive: self.cuts.is_some().then(|| positive.count() as f64 / scores.count.max(1) as f64),
            scores: ScoreFacts { mean: scores.mean, sd: scores.deviation(), min: scores.min, max: scores.max },
            entropy: rows(entropy.nats, entropy.rows).map(|nats| EntropyFacts { nats, share: rows(entropy.shares, entropy.choices) }),
            terms: logs.map(|[all, above, below]| Terms { all: magnitudes(all), positive: magnitudes(above), negative: magnitudes(below) }),
            cut: self.cuts.as_ref().map(|cuts| self.cut(cuts, options)),
        }
    }

    /// From the degree of a polynomial on, truncation is exact.
    fn cut(&self, cuts: &Cuts, options: &Options) -> CutFacts {
        let Sums { shares, errors, centered_errors, outputs, rows, .. } = &self.sums;
        let index = |p: &usize| cuts.orders().iter().position(|own| own == p);
        let finite = |x: f64| Some(x).filter(|x| x.is_finite());
        let share = |p: &usize| index(p).map_or(Some(1.0), |at| finite(shares[at] / *rows as f64));
        let relative = |errors: &[f64]| -> Vec<Option<f64>> {
            options.orders.iter().map(|p| index(p).map_or(Some(0.0), |at| finite((errors[at] / outputs).sqrt()))).collect()
        };
        let order_for = |errors: &[Option<f64>]| {
            let order = |bound: f64| Some(options.orders[errors.iter().position(|error| error.is_some_and(|error| error <= bound))?]);
            OrderFor { ten_percent: order(0.1), one_percent: order(0.01), tenth_percent: order(0.001) }
        };
        let (error, centered) = (relative(errors), self.centered.then(|| relative(centered_errors)));
        CutFacts {
            share: options.orders.iter().map(share).collect(),
            order_for: order_for(&error),
            centered: centered.map(|error| CenteredCut { order_for: order_for(&error), error }),
            error,
        }
    }
}

fn magnitudes(logs: &Logs) -> Magnitudes {
    let mut dominant = None;
    let mut most = f64::NEG_INFINITY;
    for (n, &log) in logs.iter().enumerate() {
        if log > most {
            (dominant, most) = (Some(n), log);
        }
    }
    Magnitudes { log10: logs.iter().map(|log| log.is_finite().then_some(log / LN_10)).collect(), dominant }
}

/// ln Σ e^l.
fn ln_sum(logs: impl Iterator<Item = f64> + Clone) -> f64 {
    let most = logs.clone().fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY { most } else { most + logs.map(|log| (log - most).exp()).sum::<f64>().ln() }
}
