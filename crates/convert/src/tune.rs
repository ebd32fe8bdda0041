//! Healing: the converted model learns to predict what the original predicts.
//!
//! ```text
//! loss   mean over positions of KL(original ‖ converted), on text that was fitted to and is not evaluated
//! step   one context; AdamW without weight decay, gradients of norm 1 at most; warm-up over a twentieth of the steps, then a cosine to a tenth of the peak
//! learns what conversion added: projections, coefficients, γ and spread of far keys; with `all`, every weight at a rate of its own
//! ```
//!
//! The teacher predicts each context anew, a block of positions at a time: nothing of it is kept. Which context a step takes depends on its number alone, and a
//! checkpoint has weights, moments and that number: a run that was stopped goes on as if it had not been, to the last bit.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use termwise_base::files::{create_folder, write_whole};
use termwise_base::rng::Rng;
use termwise_llama::params::Entry;
use termwise_llama::weights::{Checkpoint, Tensor, WriteOptions, write_file};
use termwise_llama::{Model, Options};
use termwise_report::{Axis, Block, Cell, Chart, Figure, Layer, Line, Scale, Section, Table, Unit, thousands};
use termwise_train::schedule::{Decay, Schedule};
use termwise_train::{AdamW, AdamWConfig, clip, gradient_norm};

use crate::convert::Measured;
use crate::journal::digest;
use crate::{Error, Tell};

/// Time between checkpoints.
const BETWEEN: Duration = Duration::from_secs(300);
/// The largest norm of a gradient.
const LIMIT: f64 = 1.0;
/// What is known of a checkpoint, in its folder.
const STATE: &str = "tuning.json";

/// How a model is healed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Tokens to learn from, counted as often as they are seen.
    pub tokens: u64,
    /// Whether every weight learns, and not only what conversion added.
    pub all: bool,
    /// The highest learning rate of what conversion added.
    pub rate: f64,
    /// That of all other weights.
    pub weight_rate: f64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { tokens: 1_000_000, all: false, rate: 1e-3, weight_rate: 2e-5 }
    }
}

/// What healing did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// How.
    pub settings: Settings,
    /// Tokens of a context, which is one step.
    pub length: usize,
    /// Different contexts.
    pub contexts: usize,
    /// Numbers that learned.
    pub trained: u64,
    /// KL(original ‖ converted) before each step, on that step's context, nats per token.
    pub kl: Vec<f64>,
    /// Afterwards, on text that was neither fitted to nor learned from.
    pub measured: Vec<Measured>,
    /// The original through the same training.
    pub control: Option<Vec<Measured>>,
}

impl Tuning {
    /// Mean KL over the first and over the last tenth of the steps.
    pub fn ends(&self) -> [f64; 2] {
        let count = self.kl.len().div_ceil(10);
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len().max(1) as f64;
        [mean(&self.kl[..count]), mean(&self.kl[self.kl.len() - count..])]
    }

    /// What healing did, beside what was measured before it.
    pub fn section(&self, before: &[Measured]) -> Section {
        let [first, last] = self.ends();
        let facts = vec![
            (
                "learned".to_owned(),
                format!(
                    "{} numbers: {}",
                    thousands(self.trained),
                    if self.settings.all { "all weights" } else { "what conversion added; all other weights are as they were" }
                ),
            ),
            (
                "from".to_owned(),
                format!(
                    "{} tokens of the calibration text, {} contexts of {}",
                    thousands(self.kl.len() as u64 * self.length as u64),
                    thousands(self.contexts as u64),
                    thousands(self.length as u64)
                ),
            ),
            ("KL while learning".to_owned(), format!("{first:.4} over the first tenth of the steps, {last:.4} over the last")),
        ];
        let columns = ["text", "model", "loss", "rise", "KL"];
        let mut table = Table::new("Before and after, on text that was neither fitted to nor learned from, nats per token", columns);
        let models = [("converted", Some(before)), ("healed", Some(&self.measured[..])), ("control", self.control.as_deref())];
        for (at, text) in before.iter().enumerate() {
            for (model, found) in models.iter().filter_map(|(model, measured)| Some((model, measured.as_ref()?.get(at)?))) {
                let numbers = [found.loss, found.loss - found.original, found.kl].map(|x| Cell::Number(x, 4));
                table.rows.push([Cell::text(&text.text), Cell::text(*model)].into_iter().chain(numbers).collect());
            }
        }
        let width = self.kl.len().div_ceil(200).max(1);
        let points = self.kl.chunks(width).enumerate().map(|(i, part)| {
            (((i * width) as f64 + 0.5 * part.len() as f64) * self.length as f64, part.iter().sum::<f64>() / part.len() as f64)
        });
        let chart = Chart {
            title: "KL to the original while learning".into(),
            x: Axis::new("tokens", Scale::Linear, Unit::Number),
            y: Axis::new("nats per token", Scale::Linear, Unit::Number),
            layers: vec![Layer::Line(Line { name: "KL".into(), color: 1, dashed: false, points: points.collect() })],
        };
        let description = "KL between the original and the converted model on the contexts that it learned from.".into();
        let figure = Figure { title: "Healing".into(), description, panels: vec![chart.into()] };
        let mut blocks = vec![Block::Facts(facts), Block::table("healing", table), Block::figure("healing", figure)];
        if self.control.is_some() {
            blocks.push(Block::Text(
                "The control is the original through the same training. It predicts what it is taught from the start, so that a difference would be what training does by itself.".into(),
            ));
        }
        Section::new("Healing", blocks)
    }
}

/// How far a healing is.
#[derive(Serialize, Deserialize)]
struct State {
    identity: String,
    file: String,
    kl: Vec<f64>,
}

/// Which parameters learn, and how fast: peaks of their rates by entry.
fn rates(original: &Model, student: &Model, settings: &Settings) -> Result<Vec<f64>, Error> {
    let layers = student.config.attention_layers(1)?;
    let calibrated = |entry: &Entry| {
        let place = entry.spec.name.split_once("layers.").and_then(|(_, rest)| rest.split_once('.'));
        let layer = place.and_then(|(number, rest)| Some((number.parse::<usize>().ok()?, rest.strip_prefix("self_attn.")?)));
        layer.is_some_and(|(layer, name)| {
            layers.get(layer).is_some_and(|layer| layer.extras().iter().any(|spec| spec.name == name && !spec.trained))
        })
    };
    let known = original.params.layout();
    let rate = |entry: &Entry| match known.find(&entry.spec.name).is_ok() {
        _ if calibrated(entry) => 0.0,
        true if settings.all => settings.weight_rate,
        true => 0.0,
        false => settings.rate,
    };
    let rates: Vec<f64> = student.params.layout().entries().iter().map(rate).collect();
    if rates.iter().all(|&rate| rate == 0.0) {
        return Err(Error::Asked(
            "the conversion added nothing that can learn: no kv head has a far state; allow another budget, or heal all weights with --tune-all".into(),
        ));
    }
    Ok(rates)
}

/// The context of a step: each once in an order of its own, then all again in another.
fn context_of(step: u64, count: usize) -> usize {
    let (round, place) = (step / count as u64, (step % count as u64) as usize);
    let mut rng = Rng::named(0, &format!("contexts in round {round}"));
    let mut order: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        order.swap(i, rng.below(i + 1));
    }
    order[place]
}

/// Heals a student of this original on contexts of equal length. With a folder, the same call goes on after it was stopped. Gives the KL before each step, and how
/// many numbers learned.
pub fn tune(
    original: &Model,
    student: &mut Model,
    contexts: &[Vec<u32>],
    settings: Settings,
    folder: Option<&Path>,
    stop: &AtomicBool,
    tell: Tell,
) -> Result<(Vec<f64>, u64), Error> {
    let length = contexts.first().map_or(0, Vec::len);
    if length < 2 || contexts.iter().any(|context| context.len() != length) {
        return Err(Error::Asked("healing needs contexts of text that are equally long; name more text".into()));
    }
    let steps = settings.tokens.div_ceil(length as u64).max(1);
    let peaks = rates(original, student, &settings)?;
    let layout = student.params.layout().clone();
    let trained: u64 = layout.entries().iter().zip(&peaks).filter(|(_, rate)| **rate > 0.0).map(|(entry, _)| entry.spec.len() as u64).sum();
    let config = AdamWConfig { weight_decay: 0.0, ..AdamWConfig::default() };
    let schedule = |peak: f64| Schedule { peak, warmup: steps / 20, decay: Decay::Cosine, horizon: steps, last: 0.1 };
    let mut optimizer = AdamW::new(&student.params, config)?;
    let mut kl = Vec::new();
    let identity = match folder {
        None => String::new(),
        Some(_) => digest(&format!("{settings:?} {contexts:?} {}", fingerprint(original, student))),
    };
    if let Some(folder) = folder {
        create_folder(folder)?;
        kl = read(folder, &identity, student, &mut optimizer, &peaks)?.unwrap_or_default();
    }
    let mut gradients = student.params.zeros_like()?;
    let mut session = student.session(1, length, Options::default())?;
    let mut teacher = original.session(1, length, Options { forward_only: true, ..Options::default() })?;
    let mut written = Instant::now();
    while (kl.len() as u64) < steps {
        let step = kl.len() as u64;
        let keep = |kl: &[f64], student: &Model, optimizer: &AdamW| match folder {
            Some(folder) => write(folder, &identity, student, optimizer, &peaks, kl),
            None => Ok(()),
        };
        if stop.load(Ordering::Relaxed) {
            keep(&kl, student, &optimizer)?;
            return Err(Error::Stopped);
        }
        let ids = &contexts[context_of(step, contexts.len())];
        teacher.run(&original.params, ids, None)?;
        gradients.set_zero();
        let (scale, given) = (1.0 / length as f32, (&mut teacher, &original.params));
        let loss = session.distill(&student.params, ids, given, (scale, settings.all), &mut gradients)?;
        for (entry, _) in layout.entries().iter().zip(&peaks).filter(|(_, rate)| **rate == 0.0) {
            gradients.values_mut()[entry.range()].fill(0.0);
        }
        let norm = gradient_norm(&gradients);
        if !norm.is_finite() || !loss.sum.is_finite() {
            return Err(Error::Asked(format!(
                "at step {} of {steps} the KL is {} and the norm of its gradient {norm}; weights are as after the step before in the checkpoint: try a lower --tune-rate",
                step + 1,
                loss.mean()
            )));
        }
        let rate = |entry: &Entry| {
            let at = layout.entries().partition_point(|other| other.offset < entry.offset);
            schedule(peaks[at]).rate(step)
        };
        optimizer.step_by(&mut student.params, &gradients, &rate, clip(norm, LIMIT));
        kl.push(loss.mean());
        tell(kl.len() as u64, steps, &format!("steps of healing, KL {:.4}", loss.mean()));
        if written.elapsed() > BETWEEN || kl.len() as u64 == steps {
            keep(&kl, student, &optimizer)?;
            written = Instant::now();
        }
    }
    Ok((kl, trained))
}

/// Both models as they are before healing.
fn fingerprint(original: &Model, student: &Model) -> String {
    let mut hasher = blake3::Hasher::new();
    for model in [original, student] {
        for (entry, values) in model.params.iter() {
            hasher.update(entry.spec.name.as_bytes());
            let mut bytes = Vec::with_capacity(4 * 4096);
            for piece in values.chunks(4096) {
                bytes.clear();
                piece.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
                hasher.update(&bytes);
            }
        }
    }
    hasher.finalize().to_hex().to_string()
}

/// What learned, and its moments, under names of their own.
fn parts<'a>(student: &'a Model, optimizer: &'a AdamW, peaks: &'a [f64]) -> impl Iterator<Item = (String, &'a Entry, &'a [f32])> {
    let kinds = [("weight", &student.params), ("first", &optimizer.first), ("second", &optimizer.second)];
    kinds.into_iter().flat_map(move |(kind, params)| {
        let learned = params.iter().zip(peaks).filter(|(_, rate)| **rate > 0.0);
        learned.map(move |((entry, data), _)| (format!("{kind}.{}", entry.spec.name), entry, data))
    })
}

/// The file with the weights is whole before the state names it, and the one before goes last.
fn write(folder: &Path, identity: &str, student: &Model, optimizer: &AdamW, peaks: &[f64], kl: &[f64]) -> Result<(), Error> {
    let before = std::fs::read(folder.join(STATE)).ok().and_then(|bytes| serde_json::from_slice::<State>(&bytes).ok());
    let file = format!("tuning-{}.safetensors", kl.len());
    let named: Vec<(String, &Entry, &[f32])> = parts(student, optimizer, peaks).collect();
    let tensors = named.iter().map(|(name, entry, data)| Tensor { name, shape: &entry.spec.shape, data });
    write_file(folder.join(&file), tensors, &WriteOptions::default())?;
    let state = State { identity: identity.into(), file: file.clone(), kl: kl.to_vec() };
    write_whole(&folder.join(STATE), &serde_json::to_vec(&state).unwrap_or_default())?;
    if let Some(before) = before.filter(|before| before.file != file && !before.file.contains(['/', '\\'])) {
        // A file that stays only takes room.
        let _ = std::fs::remove_file(folder.join(before.file));
    }
    Ok(())
}

/// Takes up what a folder holds of the same healing.
fn read(folder: &Path, identity: &str, student: &mut Model, optimizer: &mut AdamW, peaks: &[f64]) -> Result<Option<Vec<f64>>, Error> {
    let Ok(bytes) = std::fs::read(folder.join(STATE)) else { return Ok(None) };
    let Some(state) = serde_json::from_slice::<State>(&bytes).ok().filter(|state| state.identity == identity) else { return Ok(None) };
    let file = Checkpoint::open(folder.join(&state.file))?;
    let layout = student.params.layout().clone();
    for (kind, params) in [("weight", &mut student.params), ("first", &mut optimizer.first), ("second", &mut optimizer.second)] {
        for (entry, _) in layout.entries().iter().zip(peaks).filter(|(_, rate)| **rate > 0.0) {
            file.read_into(&format!("{kind}.{}", entry.spec.name), &entry.spec.shape, &mut params.values_mut()[entry.range()])?;
        }
    }
    optimizer.steps = state.kl.len() as u64;
    Ok(Some(state.kl))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_context_comes_once_in_each_round() {
        for count in [1, 2, 7] {
            for round in 0..3 {
                let mut seen: Vec<usize> = (0..count as u64).map(|i| context_of(round * count as u64 + i, count)).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..count).collect::<Vec<_>>());
            }
        }
        let order = |round: u64| (0..7).map(|i| context_of(7 * round + i, 7)).collect::<Vec<_>>();
        assert_ne!(order(0), order(1));
    }
}
