//! What cutting exp to a finite order costs and saves.
//!
//! Two kinds of coefficients at the same order and the same state ([`Choice`]): Taylor's, and fitted to a head's output on calibration text. For each, the loss of the model with every layer cut; then one layer at a time; then a
//! plan, kv head by kv head, that stays within a budget. Fits, plans and what is reported are on different text.
//!
//! Results are handed on as they come, and losses kept in a journal, so that work that was interrupted is not done again.

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
use termwise_train::eval::Windows;

pub use budget::Budget;
pub use choice::{Calibration, Choice};
pub use report::{Curve, Kept, Map, Measured, Plan, PlannedCut, Point, Report, schema};
pub use request::{Request, Truncated, measure};
pub use save::{check_place, save};
pub use text::Texts;

use crate::Error;
use bytes::Heads;
use meter::Meter;
use text::Tokens;
use work::Work;

/// What to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// Orders, in any order.
    pub orders: Vec<usize>,
    /// Kinds of coefficients for the curves.
    pub coefficients: Vec<Choice>,
    /// Kind of coefficients of the map; the best of the curves where absent.
    pub map: Option<Choice>,
    /// Whether to draw the map.
    pub draw_map: bool,
    /// What the loss may rise by; no plan where absent.
    pub budget: Option<Budget>,
    /// Tokens of context at which bytes are counted; what the model was made for where absent.
    pub context: Option<u64>,
    /// Sampled queries of each head.
    pub rows: usize,
    /// Calibrate each layer on what the cut ones below it give.
    pub sequential: bool,
    /// Windows.
    pub windows: Windows,
    /// Where losses are kept from one run to the next.
    pub journal: Option<PathBuf>,
    /// The ranks that share the text; each calibrates on all of its part of it.
    pub collective: Arc<dyn Collective>,
}

/// How far the work is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Pieces of work done.
    pub done: u64,
    /// Pieces of work in all, as far as is known.
    pub total: u64,
    /// What is being done.
    pub now: &'a str,
}

/// What came of it.
pub struct Outcome {
    /// For people and files.
    pub report: Report,
    /// Coefficients of every head.
    pub calibration: Calibration,
    /// The model's own attention.
    pub uncut: AttentionMap,
    /// The attention of the plan, where there is one with cuts.
    pub planned: Option<AttentionMap>,
    /// The model.
    pub model: Model,
}

/// Cuts, measures and plans. `tell` gets every state of the report and the progress; once `stop` is set the work ends after the piece at
/// hand, with what there is.
pub fn run(
    model: Model,
    texts: &Texts,
    options: &Options,
    stop: &AtomicBool,
    report: Report,
    tell: &mut dyn FnMut(&Report, Progress),
) -> Result<Outcome, Error> {
    let mut orders = options.orders.clone();
    orders.sort_unstable();
    orders.dedup();
    let sizes = Heads::of(&model.config);
    let uncut = model.config.attention.clone();
    let context = options.context.unwrap_or(model.config.max_position_embeddings as u64);
    let windows = options.windows;
    let settings = calibrate::Settings { orders: orders.clone(), rows: options.rows, sequential: options.sequential, windows };
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
        tell,
        done: 0,
        total: 1 + calibrate::ticks(&settings, sizes.layers) + (options.coefficients.len() * orders.len()) as u64,
    };
    work.total += if options.draw_map { (sizes.layers * orders.len()) as u64 } else { 0 };
    let first = work.measure("the uncut model", &uncut, &texts.evaluation)?;
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
    work.say("done");
    let Work { report, meter, .. } = work;
    Ok(Outcome { report, calibration, uncut, planned, model: meter.into_model() })
}

#[cfg(test)]
mod tests;
