//! Truncation of exp to a finite order: loss and memory.
//!
//! Two kinds of coefficients at the same order and state ([`Choice`]): Taylor, and fitted to a head's output on calibration text. For each, the loss of the model with every layer truncated; then with one layer at a time; then a
//! plan per KV head within a budget. Fits, plans and reported losses use different text.
//!
//! Results are reported as they are measured, and losses are cached in a journal, so an interrupted run resumes.

pub mod budget;
pub mod bytes;
pub mod calibrate;
pub mod chebyshev;
pub mod choice;
mod figures;
pub mod fit;
pub mod meter;
pub mod qp;
pub mod report;
mod request;
pub mod rows;
mod save;
pub mod text;
mod work;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use termwise_model::Model;
use termwise_model::config::AttentionMap;
use termwise_train::collective::Collective;

pub use budget::Budget;
pub use choice::{Calibration, Choice};
pub use report::{Curve, Kept, Map, Measured, Plan, PlannedCut, Point, Report};
pub use request::{Request, Truncated, measure};
pub use save::{check_place, save};
pub use text::Texts;

use crate::Error;
use bytes::Heads;
use meter::Meter;
use text::Tokens;
use work::Work;

/// Options of a truncation.
#[derive(Clone, Debug)]
pub struct Options {
    /// Orders, in any order.
    pub orders: Vec<usize>,
    /// Kinds of coefficients.
    pub coefficients: Vec<Choice>,
    /// Coefficients for truncating one layer at a time; default: the best ones.
    pub map: Option<Choice>,
    /// Truncate one layer at a time.
    pub draw_map: bool,
    /// Largest relative loss increase for the plan; `None`: no plan.
    pub budget: Option<Budget>,
    /// Context length at which memory is counted; default: that of the model.
    pub context: Option<u64>,
    /// Sampled queries per head for fitting coefficients.
    pub queries: usize,
    /// Fit each layer on the output of the truncated layers below it.
    pub sequential: bool,
    /// File of finished measurements. A later call resumes from them.
    pub journal: Option<PathBuf>,
    /// The ranks that share the text; each calibrates on its part of it.
    pub collective: Arc<dyn Collective>,
}

/// Progress of the measurements.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Measurements done.
    pub done: u64,
    /// Total measurements, as far as known.
    pub total: u64,
    /// The current measurement.
    pub now: &'a str,
}

/// The result of a truncation.
pub struct Outcome {
    /// The report.
    pub report: Report,
    /// Coefficients of every head.
    pub calibration: Calibration,
    /// The model's own attention.
    pub uncut: AttentionMap,
    /// The attention of the plan, if it truncates any head.
    pub planned: Option<AttentionMap>,
    /// The model.
    pub model: Model,
}

/// Truncates, measures and plans. `observe` receives every state of the report and the progress. After `stop` is set, the run ends after the
/// current measurement with the results so far.
pub fn run(
    model: Model,
    texts: &Texts,
    options: &Options,
    stop: &AtomicBool,
    report: Report,
    observe: &mut dyn FnMut(&Report, Progress),
) -> Result<Outcome, Error> {
    let mut orders = options.orders.clone();
    orders.sort_unstable();
    orders.dedup();
    let sizes = Heads::of(&model.config);
    let uncut = model.config.attention.clone();
    let context = options.context.unwrap_or(model.config.max_position_embeddings as u64);
    let windows = texts.windows;
    let settings = calibrate::Settings { orders: orders.clone(), rows: options.queries, sequential: options.sequential, windows };
    let mut work = Work {
        report: Report {
            batch: windows.batch,
            length: windows.length,
            tokens: Some(Tokens {
                calibration: text::tokens(&texts.calibration, windows)?,
                tuning: text::tokens(&texts.tuning, windows)?,
                evaluation: text::tokens(&texts.evaluation, windows)?,
            }),
            sequential: options.sequential,
            layers: sizes.layers,
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            context,
            cache_bytes: sizes.model(&model.config, context),
            ..report
        },
        meter: Meter::new(model, windows, options.journal.as_deref(), options.collective.clone())?,
        texts,
        stop,
        observe,
        done: 0,
        total: 1 + calibrate::ticks(&settings, sizes.layers) + (options.coefficients.len() * orders.len()) as u64,
    };
    work.total += if options.draw_map { (sizes.layers * orders.len()) as u64 } else { 0 };
    let first = work.measure("the original model", &uncut, &texts.evaluation)?;
    work.report.uncut = Some(first);
    let calibration = work.calibrate(&settings, &orders)?;
    work.curves(&calibration, &uncut, sizes, &orders, &options.coefficients)?;
    if options.draw_map {
        work.map(&calibration, &orders, options.map)?;
    }
    let mut planned = None;
    if let Some(budget) = options.budget {
        planned = work.plan(&calibration, &uncut, sizes, &orders, budget)?;
    }
    work.report.warnings.extend(work.report.gain());
    work.report.finished = !work.stopped()?;
    work.report_progress("done");
    let Work { report, meter, .. } = work;
    Ok(Outcome { report, calibration, uncut, planned, model: meter.into_model() })
}

#[cfg(test)]
mod tests;
