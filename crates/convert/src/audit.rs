//! Whether a converted model is what it says: a verdict for each check.
//!
//! The same text through four computations (by the plain formula, at once, as a prompt, token by token); the memory that a text takes; and what each part
//! of it is worth: predictions with sinks, chosen keys and far states switched off, compared with the original's.

use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use termwise_attention::Variant;
use termwise_llama::config::AttentionMap;
use termwise_llama::generate::{Decoder, DecoderOptions};
use termwise_llama::{Config, Engine, Model, Options};
use termwise_report::{Block, Cell, Document, Documented, Section, Table, Tone};

use crate::meter::{Reference, Sums, whole};
use crate::{Error, Tell};

/// Logits may differ by so much of the largest, by rounding.
const ROUNDING: f64 = 2e-3;
/// A part that changes predictions by less does nothing, nats per token.
const NOTHING: f64 = 1e-6;
/// Positions that the plain formula computes.
const PLAIN: usize = 192;

/// One check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// What is checked.
    pub name: String,
    /// What was found.
    pub found: String,
    /// Whether that is as it should be; absent where there was nothing to check.
    pub passed: Option<bool>,
}

/// A part of the memory, switched off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Which.
    pub name: String,
    /// Heads that have it.
    pub heads: usize,
    /// Loss and KL to the original without it, nats per token.
    pub loss: f64,
    /// KL(original ‖ without it).
    pub kl: f64,
    /// KL(converted ‖ without it): how much it does at all.
    pub change: f64,
}

/// All checks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// What each part is worth.
    pub parts: Vec<Part>,
    /// In the order in which they were made.
    pub checks: Vec<Check>,
}

impl Audit {
    /// Whether no check failed.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|check| check.passed != Some(false))
    }
}

/// The variants of all heads, changed one by one; how many were.
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

/// The largest difference of two rows of logits, relative to the largest of the first.
fn difference(expected: &[f32], found: &[f32]) -> f64 {
    let size = expected.iter().fold(0.0f32, |size, x| size.max(x.abs()));
    let worst = expected.iter().zip(found).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs()));
    // What is not a number is no agreement.
    if found.iter().all(|x| x.is_finite()) { f64::from(worst) / f64::from(size.max(f32::MIN_POSITIVE)) } else { f64::INFINITY }
}

fn logits(model: &Model, ids: &[u32], engine: Engine) -> Result<Vec<f32>, Error> {
    let mut session = model.session(1, ids.len(), Options { engine, forward_only: true, ..Options::default() })?;
    session.run(&model.params, ids, None)?;
    let mut logits = vec![0.0; ids.len() * model.config.vocab_size];
    session.logits(&model.params, 0..ids.len(), &mut logits)?;
    Ok(logits)
}

/// Makes all checks on these contexts.
pub fn audit(model: &Model, original: &Model, contexts: &[Vec<u32>], stop: &AtomicBool, tell: Tell) -> Result<Audit, Error> {
    let Some(first) = contexts.first().filter(|ids| ids.len() > 1) else {
        return Err(Error::Asked("there is no text to check with; name some with --data".into()));
    };
    let mut audit = Audit {
        model: String::new(),
        against: String::new(),
        contexts: contexts.len(),
        length: first.len(),
        original: 0.0,
        loss: 0.0,
        kl: 0.0,
        parts: Vec::new(),
        checks: vec![same_weights(model, original)],
    };
    let mut done = 0;
    let mut step = |what: &str| -> Result<(), Error> {
        tell(done, 7, what);
        done += 1;
        if stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    };
    step("the formula")?;
    audit.checks.push(formula(model, first)?);
    step("token by token")?;
    audit.checks.extend(tokens(model, first)?);

    // Each part switched off, on every context.
    let has = |variant: &Variant, part: &str| match part {
        "sinks" => variant.sinks.map(|_| Variant { sinks: None, ..variant.clone() }),
        "chosen keys" => variant.chosen.map(|_| Variant { chosen: None, ..variant.clone() }),
        "far states" => variant.far.as_ref().map(|_| Variant { far: None, ..variant.clone() }),
        "codes" => variant.bits.map(|_| Variant { bits: None, ..variant.clone() }),
        _ => None,
    };
    let names = ["sinks", "chosen keys", "far states", "codes"];
    let (mut sums, mut own) = (vec![(Sums::default(), Sums::default()); names.len()], Sums::default());
    let mut counts = [0; 4];
    for ids in contexts {
        step("the original")?;
        let (reference, converted) = (Reference::new(original, ids)?, Reference::new(model, ids)?);
        own.add(&whole(&reference.compare(model)?));
        for (at, name) in names.iter().enumerate() {
            let (map, count) = changed(&model.config, |variant| has(variant, name));
            counts[at] = count;
            if count == 0 {
                continue;
            }
            step(&format!("without {name}"))?;
            let without = model.with_attention(map)?;
            sums[at].0.add(&whole(&reference.compare(&without)?));
            sums[at].1.add(&whole(&converted.compare(&without)?));
        }
    }
    let mean = |sum: f64| sum / own.count.max(1) as f64;
    (audit.original, audit.loss, audit.kl) = (mean(own.original), mean(own.loss), own.mean_kl());
    for ((name, (from_original, from_own)), heads) in names.iter().zip(&sums).zip(counts).filter(|(_, heads)| *heads > 0) {
        let part = Part {
            name: (*name).into(),
            heads,
            loss: from_original.loss / from_original.count.max(1) as f64,
            kl: from_original.mean_kl(),
            change: from_own.mean_kl(),
        };
        // Codes are there for their bytes, and may cost a little.
        let worth = *name == "codes" || part.kl > audit.kl;
        let found = match (part.change > NOTHING, worth) {
            (false, _) => format!("{} heads have {name}, and without them nothing changes: they do nothing", part.heads),
            (true, false) => format!("without {name} the KL to the original falls from {:.5} to {:.5}: they do harm", audit.kl, part.kl),
            (true, true) => format!("without {name} the KL to the original goes from {:.5} to {:.5}", audit.kl, part.kl),
        };
        audit.checks.push(Check { name: format!("{name} do their work"), found, passed: Some(part.change > NOTHING && worth) });
        audit.parts.push(part);
    }
    Ok(audit)
}

/// What both have is the same, unless the model was healed.
fn same_weights(model: &Model, original: &Model) -> Check {
    let mut other = 0;
    for (entry, values) in original.params.iter() {
        other += usize::from(model.params.get(&entry.spec.name).map_or(true, |own| own != values));
    }
    let found = match other {
        0 => "all weights of the original are there as they were".to_owned(),
        n => format!("{n} tensors of the original are missing or were changed, as by training"),
    };
    Check { name: "weights".into(), found, passed: (other == 0).then_some(true) }
}

/// The engine against the plain formula.
fn formula(model: &Model, ids: &[u32]) -> Result<Check, Error> {
    let ids = &ids[..PLAIN.min(ids.len())];
    let (plain, fused) = (logits(model, ids, Engine::Reference)?, logits(model, ids, Engine::Fused)?);
    let v = model.config.vocab_size;
    let worst = plain.chunks_exact(v).zip(fused.chunks_exact(v)).map(|(a, b)| difference(a, b)).fold(0.0, f64::max);
    let found = format!("logits of {} positions differ by at most {worst:.1e} of the largest", ids.len());
    Ok(Check { name: "a text at once follows the formula".into(), found, passed: Some(worst < ROUNDING) })
}

/// A prompt and tokens after it against the whole text at once; and what they keep.
fn tokens(model: &Model, ids: &[u32]) -> Result<Vec<Check>, Error> {
    let (v, expected) = (model.config.vocab_size, logits(model, ids, Engine::Fused)?);
    let mut decoder = Decoder::new(model.clone(), DecoderOptions { window: 64, ..DecoderOptions::default() })?;
    let row = |t: usize| &expected[t * v..(t + 1) * v];
    let prompt = ids.len() / 2;
    let (mut of_prompt, mut of_tokens, mut bytes, mut grown) = (0.0f64, 0.0f64, 0, 0);
    for chunk in ids[..prompt].chunks(64).scan(0, |end, chunk| {
        *end += chunk.len();
        Some((*end, chunk))
    }) {
        decoder.read(0, chunk.1)?;
        of_prompt = of_prompt.max(difference(row(chunk.0 - 1), decoder.logits(0)?));
    }
    for (t, &token) in ids.iter().enumerate().skip(prompt) {
        decoder.step(&[Some(token)])?;
        of_tokens = of_tokens.max(difference(row(t), decoder.logits(0)?));
        let now = decoder.state_bytes(0)?;
        if t == prompt + (ids.len() - prompt) / 2 {
            bytes = now;
        }
        grown = now.saturating_sub(bytes);
    }
    let agreement = |name: &str, worst: f64| Check {
        name: name.into(),
        found: format!("logits differ from those of the text at once by at most {worst:.1e} of the largest"),
        passed: Some(worst < ROUNDING),
    };
    let constant = decoder.room(0)?.is_none() && grown == 0;
    let found = match constant {
        true => format!("{bytes} bytes, which do not grow"),
        false => format!("{bytes} bytes, and {grown} more in the last quarter of the text"),
    };
    Ok(vec![
        agreement("a prompt in parts", of_prompt),
        agreement("token by token", of_tokens),
        Check { name: "memory is constant".into(), found, passed: Some(constant) },
    ])
}

impl Documented for Audit {
    const KIND: &'static str = "audit";

    fn document(&self) -> Document {
        let facts = vec![
            ("model".to_owned(), self.model.clone()),
            ("against".to_owned(), self.against.clone()),
            ("text".to_owned(), format!("{} contexts of {} tokens", self.contexts, self.length)),
            ("loss".to_owned(), format!("{:.4}, original {:.4}; KL to the original {:.5}", self.loss, self.original, self.kl)),
        ];
        let checks = self.checks.iter().map(|check| {
            let (tone, label) = match check.passed {
                Some(true) => (Tone::Good, "holds"),
                Some(false) => (Tone::Bad, "fails"),
                None => (Tone::Open, "to know"),
            };
            Block::badge(tone, label, format!("{}: {}", check.name, check.found))
        });
        let mut table =
            Table::new("With a part switched off, nats per token", ["without", "heads", "loss", "KL to the original", "KL to the model"]);
        for part in &self.parts {
            table.rows.push(vec![
                Cell::text(&part.name),
                Cell::count(part.heads),
                Cell::Number(part.loss, 4),
                Cell::Number(part.kl, 5),
                Cell::Number(part.change, 5),
            ]);
        }
        let name = self.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let mut sections = vec![Section::new("Checks", checks.collect())];
        if !self.parts.is_empty() {
            sections.push(Section::new("What each part is worth", vec![Block::table("parts", table)]));
        }
        Document { title: format!("{name}: an audit"), lead: vec![Block::Facts(facts)], sections }
    }
}
