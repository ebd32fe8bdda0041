//! Calibration of coefficients in three passes over the calibration text: for the distribution of scores, for the outputs, and for
//! validation.
//!
//! Every fourth window is a validation window, excluded from the fits. It decides per head between the fit and the Taylor series, by the error of
//! the outputs, computed by the formula.

use rayon::prelude::*;
use termwise_attention::parts::kernel::taylor::{Coefficients, Taylor};
use termwise_attention::{Kernel, View};
use termwise_data::{Rows as Batch, Source};
use termwise_model::config::AttentionMap;
use termwise_model::{Model, ObservedAttention, SessionOptions};
use termwise_train::eval::Windows;

use super::chebyshev::{Interval, sixteenth};
use super::choice::{Calibration, Choice, HeadFit, OrderFit, can_cut};
use super::fit::fit;
use super::rows::{Kind, Rows, scores};
use super::text::Split;
use crate::Error;
use termwise_base::rng::Rng;

/// Maximum bytes of the sampled rows of all heads.
const MAX_SAMPLE_BYTES: usize = 1 << 30;
/// Bins of the histogram of scores.
const BINS: usize = 256;
/// One in this many windows is a validation window.
const VALIDATION_STRIDE: u64 = 4;

/// Options of calibration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Orders, ascending.
    pub orders: Vec<usize>,
    /// Sampled queries per head.
    pub rows: usize,
    /// Fit each layer on the outputs of the truncated layers below, order by order.
    pub sequential: bool,
    /// Windows.
    pub windows: Windows,
}

/// Statistics of the scores of a head.
#[derive(Clone, Debug)]
struct Scores {
    count: f64,
    sum: f64,
    low: f64,
    high: f64,
}

impl Scores {
    const NONE: Scores = Scores { count: 0.0, sum: 0.0, low: f64::INFINITY, high: f64::NEG_INFINITY };

    fn add(&mut self, other: &Scores) {
        let Scores { count, sum, low, high } = *self;
        *self = Scores { count: count + other.count, sum: sum + other.sum, low: low.min(other.low), high: high.max(other.high) };
    }
}

/// The sampled rows of a head.
#[derive(Clone, Debug)]
struct Collected {
    rows: Rows,
    histogram: Vec<f64>,
}

/// Fits every head with an exponential and no clamp. `tick` is called after each pass and each layer of fits.
pub fn calibrate(model: &mut Model, text: &Split, settings: &Settings, tick: &mut dyn FnMut()) -> Result<Calibration, Error> {
    let (layers, per_layer) = (model.config.num_hidden_layers, model.config.num_attention_heads);
    if !settings.sequential {
        return calibrate_layers(model, text, settings, 0..layers, &settings.orders, tick);
    }
    let own = model.config.attention.clone();
    let mut whole = Calibration { heads: vec![None; layers * per_layer], per_layer };
    let result = settings.orders.iter().try_for_each(|&order| {
        model.config.set_attention(own.clone())?;
        for layer in 0..layers {
            let fitted = calibrate_layers(model, text, settings, layer..layer + 1, &[order], tick)?;
            let mut map: AttentionMap = model.config.attention.clone();
            (0..per_layer).try_for_each(|head| fitted.cut(&mut map, layer, head, order, Choice::Calibrated))?;
            model.config.set_attention(map)?;
            for (to, from) in whole.heads.iter_mut().zip(fitted.heads) {
                match (to, from) {
                    (Some(to), Some(from)) => to.orders.extend(from.orders),
                    (to @ None, from) => *to = from,
                    _ => {}
                }
            }
        }
        Ok(())
    });
    model.config.set_attention(own)?;
    result.map(|()| whole)
}

fn calibrate_layers(
    model: &Model,
    text: &Split,
    settings: &Settings,
    layers: std::ops::Range<usize>,
    orders: &[usize],
    tick: &mut dyn FnMut(),
) -> Result<Calibration, Error> {
    let (count, per_layer) = (model.config.num_hidden_layers, model.config.num_attention_heads);
    let Some(&highest) = orders.iter().max() else {
        return Err(Error::Sizes("no truncation order was given; name some with --orders".into()));
    };
    let cuttable: Vec<bool> = (0..count)
        .flat_map(|layer| model.config.heads(layer).iter().map(can_cut).map(|can| can && layers.contains(&layer)).collect::<Vec<_>>())
        .collect();
    let heads = cuttable.iter().filter(|can| **can).count();
    let wanted = settings.rows.min(MAX_SAMPLE_BYTES / Rows::row_bytes(highest) / heads.max(1)).max(64);
    let positions = super::text::tokens(text, settings.windows)? as usize;
    let sampling = Sampling { every: (positions / wanted).max(1) as u64 };

    let mut found: Vec<Option<Scores>> = vec![None; cuttable.len()];
    let look = |_: usize, at: At, view: &View| {
        let mut own = Scores::NONE;
        for t in sampling.queries(at.window, at.length) {
            scores(view, t).into_iter().for_each(|(_, x)| own.add(&Scores { count: 1.0, sum: x, low: x, high: x }));
        }
        own
    };
    pass(model, text, settings.windows, &cuttable, &look, &mut |index, own: Scores| found[index].get_or_insert(Scores::NONE).add(&own))?;
    tick();
    let found: Vec<Option<(Interval, f64)>> = found
        .into_iter()
        .map(|scores| scores.filter(|scores| scores.count > 0.0 && scores.low.is_finite() && scores.high.is_finite()))
        .map(|scores| scores.map(|scores| (Interval::around(scores.low, scores.high), sixteenth(scores.sum / scores.count))))
        .collect();

    // With a single window there is no validation window.
    let windows = settings.windows.batch as u64 * text.batches();
    let held_back = |window: u64| windows < VALIDATION_STRIDE || window % VALIDATION_STRIDE == VALIDATION_STRIDE - 1;
    let mut collected: Vec<Option<Collected>> = vec![None; cuttable.len()];
    let look = |index: usize, at: At, view: &View| {
        let mut own = Collected { rows: Rows::new(Kind::of(&view.variant), highest), histogram: vec![0.0; BINS] };
        let Some((interval, _)) = found[index].as_ref().filter(|_| !held_back(at.window) || windows < VALIDATION_STRIDE) else {
            return own;
        };
        for t in sampling.queries(at.window, at.length) {
            own.rows.add(view, t, interval);
            for (_, x) in scores(view, t) {
                let place = ((x - interval.middle) / interval.half + 1.0) / 2.0 * BINS as f64;
                own.histogram[(place as usize).min(BINS - 1)] += 1.0;
            }
        }
        own
    };
    pass(model, text, settings.windows, &cuttable, &look, &mut |index, own: Collected| match &mut collected[index] {
        None => collected[index] = Some(own),
        Some(all) => {
            all.rows.append(&own.rows);
            all.histogram.iter_mut().zip(&own.histogram).for_each(|(all, own)| *all += own);
        }
    })?;
    tick();
    let fits: Vec<Option<HeadFit>> =
        collected.into_par_iter().zip(&found).map(|(rows, found)| Some(fit_head(&rows?, found.as_ref()?, orders))).collect();
    tick();

    let mut judged: Vec<Vec<f64>> = vec![Vec::new(); cuttable.len()];
    let look = |index: usize, at: At, view: &View| match &fits[index] {
        Some(fit) if held_back(at.window) => fit.squared_errors(view, sampling.queries(at.window, at.length)),
        _ => Vec::new(),
    };
    pass(model, text, settings.windows, &cuttable, &look, &mut |index, own: Vec<f64>| match judged[index].is_empty() {
        true => judged[index] = own,
        false => judged[index].iter_mut().zip(&own).for_each(|(all, own)| *all += own),
    })?;
    let mut heads = fits;
    heads.iter_mut().zip(&judged).for_each(|(head, judged)| {
        if let Some(head) = head {
            head.judge(judged);
        }
    });
    tick();
    Ok(Calibration { heads, per_layer })
}

/// Number of calls of `tick` in [`calibrate`].
pub fn ticks(settings: &Settings, layers: usize) -> u64 {
    if settings.sequential { 4 * (settings.orders.len() * layers) as u64 } else { 4 }
}

/// The sampled queries of a window, the same in every pass.
struct Sampling {
    every: u64,
}

impl Sampling {
    /// The first query of a window sees one key, so it does not depend on the kernel.
    fn queries(&self, window: u64, length: usize) -> impl Iterator<Item = usize> {
        let every = self.every;
        (1..length).filter(move |&t| Rng::new((window << 32) ^ t as u64).bits().is_multiple_of(every))
    }
}

/// A window of the text.
#[derive(Clone, Copy)]
struct At {
    /// Index over all batches.
    window: u64,
    /// Number of valid positions.
    length: usize,
}

/// Runs the model over the text and calls `look` for each of the selected heads of each window, on all threads; `keep` receives the
/// results in a fixed order.
fn pass<T: Send>(
    model: &Model,
    text: &Split,
    windows: Windows,
    chosen: &[bool],
    look: &(dyn Fn(usize, At, &View) -> T + Sync),
    keep: &mut dyn FnMut(usize, T),
) -> Result<(), Error> {
    let Windows { batch, length, .. } = windows;
    let options = SessionOptions::default().forward_only(true);
    let mut session = model.session(batch, length, options)?;
    let mut rows = Batch::default();
    let mut failed = None;
    let per_layer = model.config.num_attention_heads;
    for index in 0..text.batches() {
        if !text.held_out(index, batch, length, &mut rows)? {
            break;
        }
        let at = |row: usize| {
            let labels = &rows.labels[row * length..][..length];
            At { window: index * batch as u64 + row as u64, length: labels.iter().take_while(|label| **label >= 0).count() }
        };
        let lengths = (!rows.lengths.is_empty()).then_some(&rows.lengths[..]);
        session.observe(&model.params, &rows.ids, lengths, &mut |seen: ObservedAttention| {
            let first = seen.layer * per_layer;
            let pairs: Vec<(usize, usize)> =
                (0..batch).flat_map(|row| (0..per_layer).map(move |head| (row, head))).filter(|(_, head)| chosen[first + head]).collect();
            let looked: Vec<Result<(usize, T), termwise_attention::Error>> = pairs
                .into_par_iter()
                .filter(|&(row, _)| at(row).length > 1)
                .map(|(row, head)| {
                    let view = View::new(seen.attention, seen.shape.batch, seen.shape.time, seen.inputs, row, head)?;
                    Ok((first + head, look(first + head, at(row), &view)))
                })
                .collect();
            for result in looked {
                match result {
                    Ok((index, value)) => keep(index, value),
                    Err(error) => failed = failed.take().or(Some(error)),
                }
            }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
    }
    Ok(())
}

/// Fits all orders of one head, each starting from the one below; not yet validated.
fn fit_head(collected: &Collected, (interval, mean): &(Interval, f64), orders: &[usize]) -> HeadFit {
    let mut ascending = orders.to_vec();
    ascending.sort_unstable();
    let mut head = HeadFit { interval: *interval, orders: Vec::new() };
    let mut below: Option<Vec<f64>> = None;
    for order in ascending {
        // Taylor series around zero and around the mean score.
        let plain = |middle: f64| {
            let series = Kernel::Taylor(Taylor::up_to(order).ok()?);
            Some(interval.interpolate(order, |x| series.value(x - middle)))
        };
        let starts: Vec<Vec<f64>> = [plain(0.0), plain(*mean), below.take()].into_iter().flatten().collect();
        let fitted = fit(&collected.rows, order, &starts);
        let given = |c: &Vec<f64>| Taylor::new((0..=order).collect(), Coefficients::Given(interval.series(c))).ok();
        let series = fitted.as_ref().and_then(given);
        let conditions = Choice::ALL.map(|choice| {
            let own = head.candidate(order, choice, series.as_ref());
            own.map_or(f64::INFINITY, |series| state_condition(&series, interval, &collected.histogram))
        });
        head.orders.push(OrderFit { order, errors: [f64::NAN; 2], kept: Choice::Taylor, series, conditions });
        below = fitted;
    }
    head
}

/// Mean Σ|terms| of a state divided by the mean weight, for scores of this distribution.
fn state_condition(series: &Taylor, interval: &Interval, histogram: &[f64]) -> f64 {
    let kernel = Kernel::Taylor(series.clone());
    let (mut terms, mut weights) = (0.0, 0.0);
    for (i, count) in histogram.iter().enumerate().filter(|(_, count)| **count > 0.0) {
        let x = interval.middle + interval.half * (2.0 * (i as f64 + 0.5) / BINS as f64 - 1.0);
        let weight: f64 = kernel.value(x);
        terms += count * series.condition(x) * weight.abs();
        weights += count * weight;
    }
    terms / weights.max(f64::MIN_POSITIVE)
}
