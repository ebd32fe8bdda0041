//! Checks of a converted model against its record and its original. Each check has a printed rule and a verdict.
//!
//! ```text
//! record       variants and bytes equal the record
//! agreement    reference formula, full-sequence forward, prefill in chunks and token-by-token decoding agree
//! shares       contributions of sinks, window and heavy hitters to each head's output, next to the original's use of the same keys
//! parts        predictions without each of these, compared with the original's
//! generation   loss of the original on greedy continuations
//! recall       facts at distances within and beyond the window, by generation
//! ```

mod agreement;
mod document;
mod generation;
mod shares;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use termwise_attention::Variant;
use termwise_data::Tokenizer;
use termwise_model::config::AttentionMap;
use termwise_model::decode::Decoder;
use termwise_model::{Config, Model};

use crate::kv::meter::{Reference, Sums, whole};
use crate::kv::recall::{self, Facts};
use crate::kv::record::Record;
use crate::kv::{Error, ProgressFn};

pub use crate::kv::recall::Recall;
pub use generation::Generation;
pub(crate) use generation::continuation;
use shares::Contribution;
pub use shares::Share;

/// Smallest KL in nats per token that counts as a change of predictions.
const MIN_KL: f64 = 1e-6;

/// One check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Checked property.
    pub name: String,
    /// Condition to pass.
    pub rule: String,
    /// Finding.
    pub found: String,
    /// Whether it passed; `None` if there was nothing to check.
    pub passed: Option<bool>,
}

impl Check {
    pub(crate) fn new(name: &str, rule: &str, found: String, passed: Option<bool>) -> Check {
        Check { name: name.into(), rule: rule.into(), found, passed }
    }
}

/// Effect of removing a part of the memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Name of the part.
    pub name: String,
    /// Heads that have it.
    pub heads: usize,
    /// Loss and KL to the original without it, nats per token.
    pub loss: f64,
    /// KL(original ‖ without it).
    pub kl: f64,
    /// KL(converted ‖ without it).
    pub change: f64,
}

/// All checks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// The converted model.
    pub model: String,
    /// The original.
    pub against: String,
    /// Contexts and their length.
    pub contexts: usize,
    /// Tokens of each.
    pub length: usize,
    /// Loss of the original, nats per token.
    pub original: f64,
    /// Loss of the converted model.
    pub loss: f64,
    /// KL(original ‖ converted).
    pub kl: f64,
    /// Layers, for maps.
    pub layers: usize,
    /// By layer and head.
    pub shares: Vec<Share>,
    /// Effect of removing each part.
    pub parts: Vec<Part>,
    /// Greedy continuations.
    pub generation: Option<Generation>,
    /// Facts by task and distance.
    pub recall: Vec<Recall>,
    /// In order of execution.
    pub checks: Vec<Check>,
}

impl Audit {
    /// Whether no check failed.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|check| check.passed != Some(false))
    }
}

/// Callback before a decoder reads a chunk or a token, with its position. Tests of the audit inject faults with it.
pub type Between<'a> = &'a mut dyn FnMut(usize, &mut Decoder) -> Result<(), Error>;

/// Options of an audit in addition to the contexts.
pub struct Options<'a> {
    /// Record of the conversion.
    pub record: Option<&'a Record>,
    /// Tokenizer of the recall test, which is skipped without it.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Questions per task and distance.
    pub facts: usize,
    /// Tokens of each continuation.
    pub tokens: usize,
    /// Called between tokens.
    pub between: Between<'a>,
}

/// The variants of all heads after a change, and the number of changed heads.
fn changed(config: &Config, change: impl Fn(&Variant) -> Option<Variant>) -> (AttentionMap, usize) {
    let (mut map, mut count) = (config.attention.clone(), 0);
    for layer in 0..config.num_hidden_layers {
        for (head, own) in config.heads(layer).iter().enumerate() {
            if let Some(other) = change(own) {
                map.set_head(layer, head, other);
                count += 1;
            }
        }
    }
    (map, count)
}

const PARTS: [&str; 4] = ["sinks", "windows", "heavy hitters", "quantization"];

/// The variant without a part; `None` if it does not have the part. A window of one key does not count.
fn without(variant: &Variant, part: &str) -> Option<Variant> {
    let own = variant.clone();
    match part {
        "sinks" => variant.sinks.map(|_| own.with_sinks(None)),
        "windows" => variant.window.filter(|window| *window > 1).map(|_| own.with_window(1)),
        "heavy hitters" => variant.heavy_hitters.map(|_| own.with_heavy_hitters(None)),
        "quantization" => variant.bits.map(|_| own.with_bits(None)),
        _ => None,
    }
}

/// Runs all checks on these contexts.
pub fn audit(
    model: &Arc<Model>,
    original: &Arc<Model>,
    contexts: &[Vec<u32>],
    options: Options,
    stop: &AtomicBool,
    progress: ProgressFn,
) -> Result<Audit, Error> {
    let Some(first) = contexts.first().filter(|ids| ids.len() > 1) else {
        return Err(Error::Request("no text was given; name some with --data".into()));
    };
    let Options { record, tokenizer, facts, tokens, between } = options;
    let mut audit = Audit { contexts: contexts.len(), length: first.len(), layers: model.config.num_hidden_layers, ..Audit::default() };
    let had = PARTS.iter().filter(|part| changed(&model.config, |variant| without(variant, part)).1 > 0).count();
    let recall_steps = if tokenizer.is_some() { recall::distances(first.len()).len() * 2 } else { 0 };
    let all = (4 + contexts.len() * (had + 2) + recall_steps) as u64;
    let mut done = 0;
    let mut step = |stage: &str| -> Result<(), Error> {
        progress(done, all, stage);
        done += 1;
        if stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    };
    audit.checks.push(same_weights(model, original));
    audit.checks.push(recorded(model, record));
    step("reference formula")?;
    let (unquantized, quantized) = changed(&model.config, |variant| without(variant, "quantization"));
    let unquantized = (quantized > 0).then(|| smaller(model, unquantized)).transpose()?;
    let full_sequence_logits = agreement::full_sequence_logits(model, first)?;
    let limit = agreement::Limit::new(unquantized.as_ref(), first, &full_sequence_logits)?;
    drop(unquantized);
    audit.checks.push(agreement::formula(model, model, first, limit)?);
    step("token by token")?;
    let (checks, bytes) = agreement::tokens(model, first, &full_sequence_logits, limit, between)?;
    audit.checks.extend(checks);
    if let (Some(record), Some(bytes)) = (record, bytes) {
        audit.checks.push(Check::new(
            "bytes are those of the record",
            "at most the recorded bytes",
            format!("{bytes} bytes, recorded {}", record.bytes),
            Some(bytes as u64 <= record.bytes),
        ));
    }
    step("contributions to the outputs")?;
    drop(full_sequence_logits);
    audit.shares = shares::measure(model, &model.config, first)?;
    let of_original = shares::measure(original, &model.config, first)?;
    let contributions = Contribution::all(&audit.shares, &of_original);
    audit.checks.extend(contributions.iter().map(Contribution::check));

    // Each part removed, on every context.
    let (mut sums, mut own) = (vec![(Sums::default(), Sums::default()); PARTS.len()], Sums::default());
    let mut counts = [0; PARTS.len()];
    for ids in contexts {
        step("the original")?;
        let reference = Reference::new(original, ids)?;
        step("the converted model")?;
        let converted = match Reference::new(model, ids) {
            Err(Error::NoNumbers(t)) => {
                let found = format!("logits at position {t} are NaN or infinite; the remaining checks were not run");
                audit.checks.push(Check::new("predictions are finite", "at every position", found, Some(false)));
                return Ok(audit);
            }
            found => found?,
        };
        own.add(&whole(&reference.compare(model)?));
        for (at, name) in PARTS.iter().enumerate() {
            let (map, count) = changed(&model.config, |variant| without(variant, name));
            counts[at] = count;
            if count == 0 {
                continue;
            }
            step(&format!("without {name}"))?;
            let without = smaller(model, map)?;
            sums[at].0.add(&whole(&reference.compare(&without)?));
            sums[at].1.add(&whole(&converted.compare(&without)?));
        }
    }
    let mean = |sum: f64| sum / own.count.max(1) as f64;
    (audit.original, audit.loss, audit.kl) = (mean(own.original), mean(own.loss), own.mean_kl());
    for ((name, (from_original, from_own)), heads) in PARTS.iter().zip(&sums).zip(counts).filter(|(_, heads)| *heads > 0) {
        let part = Part {
            name: (*name).into(),
            heads,
            loss: from_original.loss / from_original.count.max(1) as f64,
            kl: from_original.mean_kl(),
            change: from_own.mean_kl(),
        };
        // Quantization saves bytes and may raise the KL.
        let worth = *name == "quantization" || part.kl > audit.kl;
        // Parts beyond the window have no effect in a text that is not longer than the window.
        let beyond =
            |own: &Variant| !matches!(*name, "windows" | "quantization") && own.window.is_some_and(|window| window >= audit.length);
        let reached = changed(&model.config, |own| without(own, name).filter(|_| !beyond(own))).1;
        let found = match (part.change > MIN_KL, worth) {
            (false, _) if reached == 0 => {
                format!("windows contain all of these {} tokens: {name} can only be checked on longer text", audit.length)
            }
            (false, _) => format!("{} heads have {name}, and removing it from the model does not change predictions", part.heads),
            (true, false) => format!("without {name} the KL to the original falls from {:.5} to {:.5}", audit.kl, part.kl),
            (true, true) => format!("without {name} the KL to the original changes from {:.5} to {:.5}", audit.kl, part.kl),
        };
        let rule = match *name {
            "quantization" => "predictions change without it",
            _ => "predictions change without them, and the KL to the original rises",
        };
        audit.checks.push(Check::new(
            &format!("effect of {name}"),
            rule,
            found,
            (reached > 0 || part.change > MIN_KL).then_some(part.change > MIN_KL && worth),
        ));
        audit.parts.push(part);
    }
    step("greedy continuations")?;
    match generation::measure(model, original, contexts, tokens) {
        Ok(generation) => {
            audit.checks.extend(generation.as_ref().map(|generation| generation::check(generation, audit.kl)));
            audit.generation = generation;
        }
        Err(Error::Model(error)) => audit.checks.push(generation::refused(&error)),
        Err(error) => return Err(error),
    }
    if let Some(tokenizer) = tokenizer {
        let mut questions = Facts::new(tokenizer, contexts, first.len(), facts);
        audit.checks.push(match questions.ask(&mut recall::decoder(original)?, &mut recall::decoder(model)?, &mut step) {
            Ok(found) => {
                audit.recall = found;
                recall::check(&audit.recall, recall::smallest_window(&model.config))
            }
            Err(Error::Model(error)) => recall::refused(&error),
            Err(error) => return Err(error),
        });
    }
    Ok(audit)
}

/// The model with another attention that needs no more tensors than it has.
fn smaller(model: &Model, map: AttentionMap) -> Result<Model, Error> {
    Ok(model.with_attention(map)?)
}

/// Whether the model has all weights of the original, unchanged.
fn same_weights(model: &Model, original: &Model) -> Check {
    let differs = |name: &str, values: &[f32]| model.params.get(name).map_or(true, |own| own != values);
    let other: Vec<&str> = original
        .params
        .iter()
        .filter(|(entry, values)| differs(&entry.spec.name, values))
        .map(|(entry, _)| entry.spec.name.as_str())
        .collect();
    let found = match other.first() {
        None => "all weights of the original are unchanged".to_owned(),
        Some(first) => format!("{} tensors of the original are missing or changed, the first of them `{first}`", other.len()),
    };
    Check::new("weights", "equal to the original's", found, Some(other.is_empty()))
}

/// Variants against the record of the conversion.
fn recorded(model: &Model, record: Option<&Record>) -> Check {
    let (name, rule) = ("memory is the recorded one", "every head has the recorded variant");
    let Some(record) = record else {
        return Check::new(name, rule, "the folder of the model has no record of a conversion".into(), None);
    };
    let other = record.other_heads(model);
    let found = match other.first() {
        None => "every head has the recorded memory".to_owned(),
        Some((layer, head, recorded, own)) => {
            let or_none = |variant: &str| if variant.is_empty() { "no such head".to_owned() } else { format!("`{variant}`") };
            let (own, recorded) = (or_none(own), or_none(recorded));
            format!("{} heads differ from the record; the first is layer {layer}, head {head}: {own}, recorded {recorded}", other.len())
        }
    };
    Check::new(name, rule, found, Some(other.is_empty()))
}
