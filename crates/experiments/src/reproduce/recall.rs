//! Loss of trained models on associative-recall hits and by position.

use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_base::files::write_whole;
use termwise_data::{Prepare, Rows};
use termwise_model::{Model, SessionOptions};
use termwise_train::Settings;
use termwise_train::eval::{Windows, evaluate_observed};
use termwise_train::slices::{NgramCounts, SliceCounter, Slices};
use termwise_train::source::cache_folder;

use super::list::{LINEAR, SOFTMAX, series};
use super::results::{Results, Run};
use super::{Id, Scale, inside};
use crate::Error;

/// Tokens of the n-grams: bigrams, and longer n-grams, which a byte-level model is less likely to have memorized.
pub const NGRAMS: [usize; 2] = [2, 6];
/// Held-out tokens.
const TOKENS: u64 = 1 << 19;
/// File in the folder of a run, so that nothing is measured twice.
const FILE: &str = "slices.json";

/// The losses of one run in groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunSlices {
    /// Its place in [`Results::runs`].
    pub run: usize,
    /// One for each n of [`NGRAMS`].
    pub slices: Vec<Slices>,
}

/// Measures the finished runs of Figure 1 whose variants are compared by recall.
///
/// # Errors
/// If a model or the text cannot be read.
pub fn measure(results: &Results, out: &Path) -> Result<Vec<RunSlices>, Error> {
    let wanted = [SOFTMAX.to_owned(), LINEAR.into(), series(1), series(2), series(4), "Norm".into()];
    let mut found: Vec<RunSlices> = Vec::new();
    for outcome in results.experiments.iter().filter(|outcome| matches!(outcome.id, Id::Orders | Id::OrdersConv)) {
        // All runs of an experiment have the same text.
        let mut counts: Vec<NgramCounts> = Vec::new();
        let variants = outcome.tasks.iter().flat_map(|task| &task.variants).filter(|outcome| wanted.contains(&outcome.variant.name));
        for &place in variants.flat_map(|outcome| &outcome.runs) {
            let run = &results.runs[place];
            if run.status == "finished" && !found.iter().any(|other| other.run == place) {
                let slices = measured(run, results.scale, out, &mut counts)?;
                found.extend(slices.map(|slices| RunSlices { run: place, slices }));
            }
        }
    }
    Ok(found)
}

/// Of one run: from its folder, or from its newest checkpoint.
fn measured(run: &Run, scale: Scale, out: &Path, counts: &mut Vec<NgramCounts>) -> Result<Option<Vec<Slices>>, Error> {
    let path = out.join(&run.folder).join(FILE);
    if let Some(slices) = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
        return Ok(Some(slices));
    }
    let Some(checkpoint) = inside::newest(&format!("{}/checkpoints", run.folder), out) else { return Ok(None) };
    let checkpoint = out.join(checkpoint);
    let place = checkpoint.join(termwise_train::checkpoint::SETTINGS);
    let text = std::fs::read_to_string(&place).map_err(termwise_model::Error::io("read", &place))?;
    let mut settings = Settings::from_toml(&text, &place.display().to_string())?;
    if scale != Scale::Test {
        settings.valid_tokens = TOKENS;
    }
    let source = settings.open_source(&cache_folder(None), &Prepare::default())?;
    let model = Model::read(&checkpoint)?;
    let windows = Windows { batch: settings.batch, length: settings.length, stride: settings.length };
    let mut counters = NGRAMS.map(SliceCounter::new);
    let mut observe = |rows: &Rows, losses: &[f64]| counters.iter_mut().for_each(|counter| counter.add(rows, losses));
    evaluate_observed(&model, source.as_ref(), windows, 0, SessionOptions::default(), &mut observe)?;
    if counts.is_empty() {
        for counter in &counters {
            counts.push(counter.count_in(source.as_ref())?);
        }
    }
    let slices: Vec<Slices> = counters.iter().zip(&*counts).map(|(counter, counts)| counter.finish(Some(counts))).collect();
    let text = serde_json::to_string(&slices).expect("numbers");
    write_whole(&path, text.as_bytes()).map_err(|error| termwise_model::Error::io(error.action, error.path)(error.source))?;
    Ok(Some(slices))
}
