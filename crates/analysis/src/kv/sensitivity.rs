//! Effect of the error of one KV head on the predictions: the measured KL with only that head on a short window.
//!
//! Output errors are a poor proxy: their effect on predictions differs between heads by orders of magnitude. The ratio of measured KL to output error at one
//! kind converts the errors of all kinds to KL. Ratios are limited to a factor around the median, since the ratio of two small numbers is unreliable.

use std::sync::atomic::{AtomicBool, Ordering};

use termwise_model::Model;

use crate::kv::assemble::Bench;
use crate::kv::errors::Errors;
use crate::kv::journal::{Journal, digest};
use crate::kv::kinds::Kind;
use crate::kv::meter::{Reference, known, whole};
use crate::kv::{Error, ProgressFn};

/// Window of the measured head.
pub const PROBE: usize = 32;
/// Maximum factor between a ratio and the median.
const MAX_RATIO: f64 = 30.0;

/// Effect of removing the memory of one KV head, nats per token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Removal {
    /// KL(original ‖ without it).
    pub kl: f64,
    /// Loss increase.
    pub loss_increase: f64,
}

/// KL and loss increase in nats per token for each KV head, on these contexts.
pub fn measure(
    model: &Model,
    identity: &str,
    contexts: &[Vec<u32>],
    journal: &mut Journal,
    stop: &AtomicBool,
    progress: ProgressFn,
) -> Result<Vec<Removal>, Error> {
    let units = model.config.num_hidden_layers * model.config.num_key_value_heads;
    let probe = Kind::window(PROBE);
    let (mut removals, mut bench) = (vec![Removal::default(); units], Bench::new(model));
    for (index, context) in contexts.iter().enumerate() {
        let key = |unit: usize| digest(&format!("sensitivity {identity} {context:?} {unit} {probe:?}"));
        let mut reference = None;
        for (unit, removal) in removals.iter_mut().enumerate() {
            let found = match known(journal, &key(unit), context) {
                Some(known) => known,
                None => {
                    if stop.load(Ordering::Relaxed) {
                        return Err(Error::Stopped);
                    }
                    let reference = match &reference {
                        Some(reference) => reference,
                        None => reference.insert(Reference::new(model, context)?),
                    };
                    let mut kinds = vec![None; units];
                    kinds[unit] = Some(probe);
                    let found = reference.compare(bench.assemble(&kinds)?)?;
                    journal.put(&key(unit), &format!("sensitivity of KV head {unit}"), &found);
                    found
                }
            };
            removal.kl += whole(&found).mean_kl() / contexts.len() as f64;
            removal.loss_increase += whole(&found).rise() / contexts.len() as f64;
            progress((index * units + unit + 1) as u64, (contexts.len() * units) as u64, "sensitivity of predictions to KV heads");
        }
    }
    Ok(removals)
}

/// Ratio of KL to output error for each KV head, within bounds.
pub fn ratios(removals: &[Removal], errors: &Errors) -> Vec<f64> {
    let Some(column) = errors.kinds.iter().position(|kind| *kind == Kind::window(PROBE)) else { return vec![1.0; removals.len()] };
    let raw: Vec<f64> =
        removals.iter().enumerate().map(|(unit, removal)| removal.kl.max(0.0) / errors.get(unit, column).max(1e-12)).collect();
    let mut sorted: Vec<f64> = raw.iter().copied().filter(|ratio| *ratio > 0.0).collect();
    sorted.sort_by(f64::total_cmp);
    let median = sorted.get(sorted.len() / 2).copied().unwrap_or(1.0);
    raw.iter().map(|ratio| ratio.clamp(median / MAX_RATIO, median * MAX_RATIO)).collect()
}
