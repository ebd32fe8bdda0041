//! Conversion of a model to fixed-size KV memory under a budget.

use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use termwise_base::files::create_folder;
use termwise_model::{Config, Model};
use termwise_report::{Block, Cell, Document, Documented, Figure, HeatMap, Names, Section, Shade, Table, Unit, thousands};

use crate::kv::allocate::{Offer, allocate};
use crate::kv::assemble::assemble;
use crate::kv::atlas::Atlas;
use crate::kv::calibrate::{Gathered, gather};
use crate::kv::errors::{self, Errors};
use crate::kv::journal::{Journal, digest};
use crate::kv::kinds::{Family, Kind, key_bytes};
use crate::kv::meter::{ByPosition, Reference, known, whole};
use crate::kv::record::EARLIER_BUILD;
use crate::kv::sensitivity::{self, PROBE, Removal};
use crate::kv::{Error, ProgressFn, Texts};

/// Candidate numbers of keys per KV head, in addition to sinks.
pub const SIZES: [usize; 9] = [4, 16, 32, 64, 128, 256, 512, 1024, 2048];

/// Limit of a conversion, in bytes or in loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Budget {
    /// Bytes of the whole model.
    Bytes(u64),
    /// Keys and values in 16 bits for each KV head, on average.
    Keys(u64),
    /// Maximum relative loss increase on calibration text.
    Loss(f64),
}

/// Unit of allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Granularity {
    /// Every KV head.
    #[default]
    Head,
    /// Every layer: all its KV heads have the same kind, as paged caches need it.
    Layer,
}

impl Granularity {
    /// Number of KV heads per unit.
    fn shared(self, config: &Config) -> usize {
        match self {
            Granularity::Head => 1,
            Granularity::Layer => config.num_key_value_heads,
        }
    }
}

impl FromStr for Granularity {
    type Err = String;

    fn from_str(text: &str) -> Result<Granularity, String> {
        match text {
            "head" => Ok(Granularity::Head),
            "layer" => Ok(Granularity::Layer),
            _ => Err(format!("`{text}` is not a granularity; write head or layer")),
        }
    }
}

/// A share such as `+1%`.
#[derive(Clone, Copy, Debug)]
pub struct Share(pub f64);

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Share, String> {
        let number = text.trim().trim_start_matches('+');
        let share = match number.strip_suffix('%') {
            Some(percent) => percent.parse::<f64>().map(|percent| percent / 100.0),
            None => number.parse(),
        };
        share
            .ok()
            .filter(|share| share.is_finite() && *share > 0.0)
            .map(Share)
            .ok_or_else(|| format!("expected a loss increase such as +1%, found `{text}`"))
    }
}

/// Measurements for the allocation.
pub struct Prepared {
    /// Attention statistics.
    pub gathered: Gathered,
    /// Output error of each KV head with each kind.
    pub errors: Errors,
    /// Effect of each KV head at the probe.
    pub removals: Vec<Removal>,
    /// Bytes of all layers in addition to the memory of their KV heads.
    pub overhead: u64,
}

/// Bytes of the states of all layers in addition to the memory of their KV heads: positions, score bounds and running sums, as in empty states.
pub fn overhead(config: &Config) -> Result<u64, Error> {
    let layers = config.attention_layers(1)?;
    layers.iter().map(|layer| -> Result<u64, Error> { Ok(layer.state(1)?.bytes() as u64) }).sum()
}

impl Prepared {
    /// Measures these families on the calibration contexts. Finished measurements are saved to the folder, if given.
    pub fn new(
        model: &Model,
        texts: &Texts,
        families: &[Family],
        folder: Option<&Path>,
        stop: &AtomicBool,
        progress: ProgressFn,
    ) -> Result<Prepared, Error> {
        if let Some(folder) = folder {
            create_folder(folder)?;
        }
        let place = |name: &str| folder.map(|folder| folder.join(name));
        let gathered = gather(model, &texts.calibration, place("calibration.json").as_deref(), stop, progress)?;
        let overhead = overhead(&model.config)?;
        if families.is_empty() {
            return Ok(Prepared { overhead, gathered, errors: Errors { kinds: Vec::new(), values: Vec::new() }, removals: Vec::new() });
        }
        let mut journal = Journal::open(place("journal.jsonl").as_deref())?;
        let mut kinds: Vec<Kind> = vec![Kind::window(PROBE)];
        // Heavy hitters that hold a whole context have the error of the window of that size, with more bytes.
        let longest = texts.error_contexts().iter().map(Vec::len).max().unwrap_or(0);
        let useful = |family: &Family, size: usize| !family.heavy_hitters || size < longest;
        kinds.extend(families.iter().flat_map(|family| SIZES.into_iter().filter(|&size| useful(family, size)).map(|size| family.of(size))));
        let mut seen = std::collections::HashSet::new();
        kinds.retain(|kind| seen.insert(*kind));
        let errors = errors::measure(model, &gathered.identity, texts.error_contexts(), &kinds, &mut journal, stop, progress)?;
        let removals = sensitivity::measure(model, &gathered.identity, &texts.probes(), &mut journal, stop, progress)?;
        Ok(Prepared { gathered, errors, removals, overhead })
    }

    /// The best choice of these families within a byte budget for the whole model, its overhead included. KV heads in groups of `shared` have the same kind.
    pub fn choose(&self, families: &[Family], shared: usize, d: usize, bytes: u64) -> Option<Vec<Kind>> {
        let bytes = bytes.checked_sub(self.overhead)?;
        let wanted = |kind: &Kind| families.iter().any(|family| SIZES.iter().any(|&size| family.of(size) == *kind));
        let columns: Vec<usize> = (0..self.errors.kinds.len()).filter(|&column| wanted(&self.errors.kinds[column])).collect();
        let kinds: Vec<Kind> = columns.iter().map(|&column| self.errors.kinds[column]).collect();
        let sizes: Vec<u64> = kinds.iter().map(|kind| shared as u64 * kind.bytes(d)).collect();
        let ratios = sensitivity::ratios(&self.removals, &self.errors);
        let units: Vec<usize> = (0..ratios.len()).collect();
        let cost = |units: &[usize], column: usize| units.iter().map(|&unit| ratios[unit] * self.errors.get(unit, column)).sum::<f64>();
        let costs: Vec<f64> = units.chunks(shared).flat_map(|units| columns.iter().map(move |&column| cost(units, column))).collect();
        let choice = allocate(&Offer { kinds: &kinds, bytes: &sizes, costs: &costs }, bytes)?;
        Some(choice.into_iter().flat_map(|kind| std::iter::repeat_n(kinds[kind], shared)).collect())
    }

    /// The atlas with the measured effect of each KV head.
    pub fn atlas(&self, name: &str, data: Vec<String>, model: &Model, length: usize) -> Atlas {
        let mut atlas = Atlas::new(name, data, &model.config, &self.gathered, length);
        let (h, g) = (model.config.num_attention_heads, model.config.num_key_value_heads);
        for head in &mut atlas.heads {
            let removal = self.removals.get(head.layer * g + head.head / (h / g));
            (head.kl, head.loss_increase) = (removal.map(|removal| removal.kl), removal.map(|removal| removal.loss_increase));
        }
        atlas
    }
}

/// Result of a conversion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conversion {
    /// Name of the model, as given.
    pub model: String,
    /// The text.
    pub data: Vec<String>,
    /// Requested limit.
    pub budget: Budget,
    /// Bytes of the state of one sequence.
    pub bytes: u64,
    /// The same in 16-bit key/value pairs per KV head.
    pub keys: f64,
    /// Bytes of a cache of all keys in 16 bits at the model's context.
    pub cache_bytes: u64,
    /// The model's context.
    pub context: usize,
    /// Layers and KV heads.
    pub layers: usize,
    /// Of each layer.
    pub kv_heads: usize,
    /// Unit of allocation.
    #[serde(default)]
    pub granularity: Granularity,
    /// By layer and KV head.
    pub kinds: Vec<Kind>,
    /// Number of calibration tokens.
    pub calibration_tokens: usize,
    /// Losses on text that was used neither for calibration nor for allocation.
    pub measured: Vec<Measured>,
}

/// The converted model and the original on one text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The text.
    pub text: String,
    /// Tokens of a context.
    pub length: usize,
    /// Contexts.
    pub contexts: usize,
    /// Loss of the original, nats per token.
    pub original: f64,
    /// Loss of the converted model.
    pub loss: f64,
    /// KL(original ‖ converted), nats per token.
    pub kl: f64,
}

/// Bytes of the whole model with these kinds and this overhead.
pub fn bytes_of(kinds: &[Kind], d: usize, overhead: u64) -> u64 {
    kinds.iter().map(|kind| kind.bytes(d)).sum::<u64>() + overhead
}

/// Rejects a budget below the smallest memory of these families.
pub fn check_budget(config: &Config, families: &[Family], budget: Budget) -> Result<(), Error> {
    let (units, d) = ((config.num_hidden_layers * config.num_key_value_heads) as u64, config.head_dim);
    let bytes = match budget {
        Budget::Bytes(bytes) => bytes,
        Budget::Keys(keys) => keys.saturating_mul(key_bytes(d) * units),
        Budget::Loss(_) => return Ok(()),
    };
    let least = families.iter().map(|family| family.of(SIZES[0]).bytes(d)).min().unwrap_or(0) * units + overhead(config)?;
    if bytes < least {
        return Err(Error::Request(format!(
            "the budget is {bytes} bytes, and the smallest memory of {units} KV heads takes {least}; allow more"
        )));
    }
    Ok(())
}

/// Keys per KV head of the largest memory that a search for a loss tries.
const MAX_SEARCHED_KEYS: f64 = 2048.0;

/// Chooses kinds for a budget. For a share of the loss: the smallest budget by bisection over log bytes, with the loss on calibration contexts.
pub fn choose(
    model: &Model,
    prepared: &Prepared,
    families: &[Family],
    texts: &Texts,
    (budget, granularity): (Budget, Granularity),
    stop: &AtomicBool,
    progress: ProgressFn,
) -> Result<Vec<Kind>, Error> {
    let config = &model.config;
    let (units, d) = ((config.num_hidden_layers * config.num_key_value_heads) as u64, config.head_dim);
    check_budget(config, families, budget)?;
    let shared = granularity.shared(config);
    let too_small = |bytes: u64| Error::Request(format!("the budget of {bytes} bytes is too small; allow more"));
    let within = |bytes: u64| prepared.choose(families, shared, d, bytes).ok_or_else(|| too_small(bytes));
    let share = match budget {
        Budget::Bytes(bytes) => return within(bytes),
        Budget::Keys(keys) => return within(keys.saturating_mul(key_bytes(d) * units)),
        Budget::Loss(share) => share,
    };
    let references: Vec<Reference> = texts.error_contexts().iter().map(|ids| Reference::new(model, ids)).collect::<Result<_, _>>()?;
    let rise = |kinds: &[Kind]| -> Result<f64, Error> {
        let kinds: Vec<Option<Kind>> = kinds.iter().copied().map(Some).collect();
        let converted = assemble(model, &kinds)?;
        let mut sums = crate::kv::meter::Sums::default();
        for reference in &references {
            sums.add(&whole(&reference.compare(&converted)?));
        }
        Ok((sums.loss - sums.original) / sums.original.max(f64::MIN_POSITIVE))
    };
    let (mut low, mut high) = (16.0f64, MAX_SEARCHED_KEYS);
    let mut best = None;
    for round in 0..8 {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        progress(round, 8, "searching for the smallest budget");
        let middle = (low * high).sqrt();
        match prepared.choose(families, shared, d, middle as u64 * key_bytes(d) * units) {
            Some(kinds) if rise(&kinds)? <= share => {
                best = Some(kinds);
                high = middle;
            }
            _ => low = middle,
        }
    }
    if let Some(best) = best {
        return Ok(best);
    }
    let largest = within(MAX_SEARCHED_KEYS as u64 * key_bytes(d) * units)?;
    let found = rise(&largest)?;
    if found > share {
        return Err(Error::Request(format!(
            "the largest memory of the search, {MAX_SEARCHED_KEYS} keys per KV head, increases the loss by {:.4} %, and --loss allows {:.4} %; \
             allow more, or set --keys",
            found * 100.0,
            share * 100.0
        )));
    }
    Ok(largest)
}

/// Measures the converted model on the evaluation texts.
pub fn evaluate(
    model: &Model,
    converted: &Model,
    texts: &Texts,
    journal: &mut Journal,
    identity: &str,
    stop: &AtomicBool,
    progress: ProgressFn,
) -> Result<Vec<Measured>, Error> {
    let all: usize = texts.evaluation.iter().map(|text| text.contexts.len()).sum();
    let (mut done, mut measured) = (0, Vec::new());
    for text in &texts.evaluation {
        let mut sums = crate::kv::meter::Sums::default();
        for context in &text.contexts {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            let key = digest(&format!("evaluation {identity} {context:?}"));
            let found: ByPosition = match known(journal, &key, context) {
                Some(known) => known,
                None => {
                    let found = Reference::new(model, context)?.compare(converted)?;
                    journal.put(&key, &text.name, &found);
                    found
                }
            };
            sums.add(&whole(&found));
            done += 1;
            progress(done, all as u64, "evaluating");
        }
        let mean = |sum: f64| sum / sums.count.max(1) as f64;
        measured.push(Measured {
            text: text.name.clone(),
            length: text.contexts.first().map_or(0, Vec::len),
            contexts: text.contexts.len(),
            original: mean(sums.original),
            loss: mean(sums.loss),
            kl: mean(sums.kl),
        });
    }
    Ok(measured)
}

impl Documented for Conversion {
    const KIND: &'static str = "conversion";

    fn validate(&self, raw: &Value) -> Result<(), String> {
        let kinds = raw.get("kinds").and_then(Value::as_array);
        if kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind.get("bits").is_some())) {
            return Err(EARLIER_BUILD.into());
        }
        let heads = self.layers.checked_mul(self.kv_heads);
        if heads != Some(self.kinds.len()) || self.kinds.is_empty() {
            let (layers, kv_heads, kinds) = (self.layers, self.kv_heads, self.kinds.len());
            return Err(format!("it has {kinds} kinds for {layers} layers of {kv_heads} KV heads; the counts must match"));
        }
        Ok(())
    }

    fn document(&self) -> Document {
        let facts = vec![
            ("model".to_owned(), format!("{}: {} layers, {} KV heads each", self.model, self.layers, self.kv_heads)),
            ("text".to_owned(), format!("{}; calibrated on {} tokens", self.data.join(", "), thousands(self.calibration_tokens as u64))),
            (
                "memory".to_owned(),
                format!(
                    "{} bytes per sequence of any length, as much as {:.1} 16-bit keys and values per KV head",
                    thousands(self.bytes),
                    self.keys
                ),
            ),
            ("16-bit KV cache".to_owned(), format!("{} bytes at {} tokens", thousands(self.cache_bytes), thousands(self.context as u64))),
        ];
        let columns = ["text", "contexts", "length", "original", "converted", "increase", "KL"];
        let mut table = Table::new("Loss on text not used for calibration or allocation, nats per token", columns);
        for found in &self.measured {
            table.rows.push(vec![
                Cell::text(&found.text),
                Cell::count(found.contexts),
                Cell::count(found.length),
                Cell::Number(found.original, 4),
                Cell::Number(found.loss, 4),
                Cell::Number(found.loss - found.original, 4),
                Cell::Number(found.kl, 4),
            ]);
        }
        let map = |title: &str, value: &dyn Fn(&Kind) -> f64| HeatMap {
            title: title.into(),
            x: Names::count("KV head", self.kv_heads),
            y: Names::count("layer", self.layers),
            values: self.kinds.chunks(self.kv_heads.max(1)).map(|row| row.iter().map(|kind| Some(value(kind))).collect()).collect(),
            shade: Shade::Linear,
            range: None,
            unit: Unit::Number,
        };
        let panels = vec![
            map("Stored keys, log2", &|kind| (kind.window as f64 + kind.heavy_hitters as f64).log2()).into(),
            map("Bits of keys", &|kind| f64::from(kind.key_bits)).into(),
            map("Bits of values", &|kind| f64::from(kind.value_bits)).into(),
        ];
        let mut counts: Vec<(String, usize)> = Vec::new();
        for kind in &self.kinds {
            match counts.iter_mut().find(|(label, _)| *label == kind.label()) {
                Some((_, count)) => *count += 1,
                None => counts.push((kind.label(), 1)),
            }
        }
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let mut kinds = Table::new("Kinds of memory", ["kind", "KV heads"]);
        kinds.rows.extend(counts.into_iter().map(|(label, count)| vec![Cell::text(label), Cell::count(count)]));
        let figure = Figure { title: "Memory per KV head".into(), description: "Layers by KV heads.".into(), panels };
        let name = self.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let sections = vec![
            Section::new("Loss on held-out text", vec![Block::table("losses", table)]),
            Section::new("Memory per KV head", vec![Block::figure("kinds", figure), Block::table("kinds", kinds)]),
        ];
        Document { title: format!("{name} with fixed-size KV memory"), lead: vec![Block::Facts(facts)], sections }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages_or_fractions() {
        for (text, share) in [("+1%", 0.01), ("1%", 0.01), ("0.02", 0.02), ("+0.5%", 0.005)] {
            assert!(text.parse::<Share>().is_ok_and(|found| (found.0 - share).abs() < 1e-12), "{text}");
        }
        for text in ["", "x", "-1%", "0", "nan"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
    }
}
