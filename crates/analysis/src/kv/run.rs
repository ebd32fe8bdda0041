//! Entry points: from the names of a model and texts to a result.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use termwise_base::files::create_folder;
use termwise_data::Source;
use termwise_model::{Config, Model};

use crate::kv::assemble::{assemble, attention};
use crate::kv::atlas::{Atlas, Recalls};
use crate::kv::audit::{self, Audit};
use crate::kv::calibrate::gather;
use crate::kv::convert::{self, Budget, Conversion, Granularity, Prepared};
use crate::kv::frontier::{self, ALL, Frontier, Method};
use crate::kv::journal::{Journal, digest};
use crate::kv::kinds::{Kind, key_bytes};
use crate::kv::recall::Facts;
use crate::kv::record::Record;
use crate::kv::text::PROBE_LENGTH;
use crate::kv::{Cutting, Error, Named, Texts};
use crate::request::{Monitor, TextOptions, WINDOW, tokenizer_of};
use crate::spectrum::windows;
use crate::truncate;

/// Texts for calibration and evaluation.
#[derive(Clone, Debug)]
pub struct TextSplit {
    /// Evaluated texts, with settings of data.
    pub text: TextOptions,
    /// Texts for calibration; empty: the first half of each evaluated text.
    pub calibration: Vec<String>,
    /// Tokens per evaluated context; default: 2048 or the context of the model.
    pub length: Option<usize>,
    /// Calibration contexts over all texts.
    pub calibration_contexts: usize,
    /// Tokens per calibration context; default: 2048 or the context of the model.
    pub calibration_length: Option<usize>,
}

impl Default for TextSplit {
    fn default() -> TextSplit {
        TextSplit { text: TextOptions::default(), calibration: Vec::new(), length: None, calibration_contexts: 4, calibration_length: None }
    }
}

/// Default length of contexts.
const LENGTH: usize = 2048;

impl TextSplit {
    /// The names of the texts, and their contexts, `contexts` of each evaluated text.
    fn read(&self, folder: &Path, config: &Config, contexts: usize, monitor: &Monitor) -> Result<(Vec<String>, Texts), Error> {
        let named = self.text.names();
        let others = self.calibration.iter().filter(|path| !named.contains(path));
        let all: Vec<String> = named.iter().chain(others).cloned().collect();
        if named.is_empty() {
            return Err(Error::Request("no text was given; name some with --data, as in --data book.txt".into()));
        }
        let mut sources: Vec<Box<dyn Source>> = Vec::new();
        for path in &all {
            sources.push(self.text.open_packed(folder, Some(path), monitor)?.source);
        }
        let texts: Vec<Named> = all
            .iter()
            .zip(&sources)
            .map(|(path, source)| Named {
                name: Path::new(path).file_stem().map_or(path.clone(), |name| name.to_string_lossy().into_owned()),
                source: source.as_ref(),
                fitted: self.calibration.is_empty() || self.calibration.contains(path),
                evaluated: named.contains(path),
            })
            .collect();
        let usual = LENGTH.min(config.max_position_embeddings);
        let cutting = Cutting {
            length: self.length.unwrap_or(usual),
            contexts,
            calibration_length: self.calibration_length.unwrap_or(usual),
            calibration_contexts: self.calibration_contexts,
        };
        Ok((all, Texts::cut(&texts, cutting)?))
    }
}

/// Name of a model in results: as the user gave it, or its folder.
fn shown(requested: Option<&str>, folder: &Path) -> String {
    requested.map_or_else(|| folder.display().to_string(), str::to_owned)
}

/// Options of [`convert()`].
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Model by name; default: the newest run.
    pub model: Option<String>,
    /// Budget of the memory.
    pub budget: Budget,
    /// Evaluated contexts per text.
    pub contexts: usize,
    /// Texts.
    pub texts: TextSplit,
    /// Whether every KV head has its own memory, or every layer.
    pub granularity: Granularity,
    /// Folder of the converted model, and of finished measurements, from which a later call with the same options resumes.
    pub save: Option<PathBuf>,
    /// Replace another model in that folder.
    pub overwrite: bool,
}

/// Finished measurements, in the folder of a converted model.
const MEASUREMENTS: &str = "measurements";

/// Refuses a folder with files that no conversion of this model wrote.
fn check_place(name: &str, model: &Path, to: &Path, overwrite: bool) -> Result<(), Error> {
    let canonical = |path: &Path| std::fs::canonicalize(path).ok();
    let own = match Record::read(to) {
        Ok(Some(record)) => record.original == name || canonical(Path::new(&record.original)) == canonical(model),
        // Interrupted before the model was saved.
        Ok(None) => to.join(MEASUREMENTS).is_dir() && !to.join("config.json").exists(),
        Err(_) => false,
    };
    Ok(truncate::check_place(model, to, overwrite || own)?)
}

/// Replaces the KV cache of a model with fixed-size memory under a budget, measures the loss and saves the model.
///
/// # Errors
/// If the model or a text cannot be used, the budget is too small, the work was stopped, or the model cannot be saved.
pub fn convert(options: &ConvertOptions, monitor: &Monitor) -> Result<Conversion, Error> {
    let folder = &monitor.model_folder(options.model.as_deref())?;
    if let Some(place) = &options.save {
        // Checked first, because measurements take long.
        check_place(&shown(options.model.as_deref(), folder), folder, place, options.overwrite)?;
    }
    let model = Model::read(folder)?;
    convert::check_budget(&model.config, ALL, options.budget)?;
    let (data, texts) = options.texts.read(folder, &model.config, options.contexts, monitor)?;
    let (stop, progress) = (monitor.stop, &mut |done: u64, of: u64, what: &str| (monitor.progress)(done, of, what));
    let config = &model.config;
    let measurements = options.save.as_ref().map(|folder| folder.join(MEASUREMENTS));
    let place = measurements.as_deref();
    let prepared = Prepared::new(&model, &texts, ALL, place, stop, progress)?;
    let kinds = convert::choose(&model, &prepared, ALL, &texts, (options.budget, options.granularity), stop, progress)?;
    let per_head: Vec<Option<Kind>> = kinds.iter().copied().map(Some).collect();
    let mut converted = assemble(&model, &per_head)?;
    let mut journal = Journal::open(place.map(|folder| folder.join("evaluation.jsonl")).as_deref())?;
    let identity = digest(&format!("{} {kinds:?}", prepared.gathered.identity));
    let measured = convert::evaluate(&model, &converted, &texts, &mut journal, &identity, stop, progress)?;
    let (units, d) = ((config.num_hidden_layers * config.num_key_value_heads) as u64, config.head_dim);
    let bytes = convert::bytes_of(&kinds, d, prepared.overhead);
    let conversion = Conversion {
        model: shown(options.model.as_deref(), folder),
        data,
        budget: options.budget,
        bytes,
        keys: bytes as f64 / (units * key_bytes(d)) as f64,
        cache_bytes: units * key_bytes(d) * config.max_position_embeddings as u64,
        context: config.max_position_embeddings,
        layers: config.num_hidden_layers,
        kv_heads: config.num_key_value_heads,
        granularity: options.granularity,
        kinds,
        calibration_tokens: texts.calibration.iter().map(Vec::len).sum(),
        measured,
    };
    if let Some(to) = &options.save {
        let record = Record::new(&conversion.model, &converted, &conversion.kinds, options.granularity, bytes);
        truncate::save(&mut converted, &attention(config, &per_head)?, folder, to, true)?;
        record.write(to)?;
    }
    Ok(conversion)
}

/// Options of [`frontier()`].
#[derive(Clone, Debug)]
pub struct FrontierOptions {
    /// Model by name; default: the newest run.
    pub model: Option<String>,
    /// Budgets, in 16-bit key/value pairs per KV head.
    pub keys: Vec<u64>,
    /// Names of methods; empty: all.
    pub methods: Vec<String>,
    /// Evaluated contexts per text.
    pub contexts: usize,
    /// Texts.
    pub texts: TextSplit,
    /// Folder of finished measurements. A later call resumes from them.
    pub journal: Option<PathBuf>,
}

/// Compares loss and KL of fixed-size memories at equal bytes. `changed` receives every intermediate result.
///
/// # Errors
/// If the model or a text cannot be used, or a budget is too small.
pub fn frontier(options: &FrontierOptions, monitor: &Monitor, changed: &mut dyn FnMut(&Frontier)) -> Result<Frontier, Error> {
    let folder = &monitor.model_folder(options.model.as_deref())?;
    let model = Model::read(folder)?;
    let methods = Method::named(&options.methods)?;
    // Checked first, because calibration takes long.
    Method::check_budgets(&methods, &options.keys, &model.config)?;
    let (_, texts) = options.texts.read(folder, &model.config, options.contexts, monitor)?;
    if let Some(folder) = &options.journal {
        create_folder(folder)?;
    }
    let (stop, progress) = (monitor.stop, &mut |done: u64, of: u64, what: &str| (monitor.progress)(done, of, what));
    let (families, place) = (Method::families(&methods), options.journal.as_deref());
    let prepared = Prepared::new(&model, &texts, &families, place, stop, progress)?;
    let journal = place.map(|folder| folder.join("frontier.jsonl"));
    let how = frontier::Options { keys: options.keys.clone(), methods: options.methods.clone(), journal: journal.as_deref() };
    let about = Frontier {
        model: shown(options.model.as_deref(), folder),
        calibration_tokens: texts.calibration.iter().map(Vec::len).sum(),
        ..Frontier::default()
    };
    frontier::run(&model, &prepared, &texts, &how, about, stop, progress, changed)
}

/// Options of [`audit()`].
#[derive(Clone, Debug)]
pub struct AuditOptions {
    /// Converted model by name.
    pub model: String,
    /// Original model by name.
    pub against: String,
    /// Text.
    pub text: TextOptions,
    /// Tokens per context; default: 1024 or the context of the original.
    pub length: Option<usize>,
    /// Contexts.
    pub contexts: usize,
    /// Recall queries per task and distance.
    pub facts: usize,
    /// Tokens per continuation.
    pub tokens: usize,
}

/// Checks a converted model against its record and its original.
///
/// # Errors
/// If a model or the text cannot be used, or the work was stopped. Failed checks are part of the result.
pub fn audit(options: &AuditOptions, monitor: &Monitor) -> Result<Audit, Error> {
    let folder = monitor.model_folder(Some(&options.model))?;
    let original = monitor.model_folder(Some(&options.against))?;
    // The record first: it refuses conversions of earlier builds.
    let record = Record::read(&folder)?;
    let (model, against) = (Arc::new(Model::read(&folder)?), Arc::new(Model::read(&original)?));
    // Recall needs a tokenizer; it is skipped for a model without one.
    let tokenizer = tokenizer_of(&original)?;
    let opened = options.text.open_packed(&original, None, monitor)?;
    let length = options.length.unwrap_or(against.config.max_position_embeddings.min(WINDOW));
    let mut contexts = windows(opened.source.as_ref(), length, (options.contexts * length) as u64)?;
    contexts.truncate(options.contexts);
    let how = audit::Options {
        record: record.as_ref(),
        tokenizer: tokenizer.as_ref(),
        facts: options.facts,
        tokens: options.tokens,
        between: &mut |_, _| Ok(()),
    };
    let progress = &mut |done: u64, of: u64, what: &str| (monitor.progress)(done, of.max(done), what);
    let found = audit::audit(&model, &against, &contexts, how, monitor.stop, progress)?;
    Ok(Audit { model: options.model.clone(), against: options.against.clone(), ..found })
}

/// Options of [`atlas()`].
#[derive(Clone, Debug)]
pub struct AtlasOptions {
    /// Model by name; default: the newest run.
    pub model: Option<String>,
    /// Measure the effect of removing the memory of each KV head.
    pub removal: bool,
    /// Recall queries, for the KV heads with the largest effect.
    pub recall: Option<Recalls>,
    /// Texts.
    pub texts: TextSplit,
    /// Folder of finished measurements.
    pub journal: Option<PathBuf>,
}

/// Measures how far back each attention head attends.
///
/// # Errors
/// If the model or a text cannot be used, if recall is requested and the model has no tokenizer, or the work was stopped.
pub fn atlas(options: &AtlasOptions, monitor: &Monitor) -> Result<Atlas, Error> {
    let folder = &monitor.model_folder(options.model.as_deref())?;
    let model = Model::read(folder)?;
    let (data, texts) = options.texts.read(folder, &model.config, 0, monitor)?;
    let (stop, progress) = (monitor.stop, &mut |done: u64, of: u64, what: &str| (monitor.progress)(done, of, what));
    let gathered = gather(&model, &texts.calibration, None, stop, progress)?;
    let length = texts.calibration.first().map_or(0, Vec::len);
    let mut atlas = Atlas::new(&shown(options.model.as_deref(), folder), data, &model.config, &gathered, length);
    let Some(last) = texts.calibration.last().filter(|_| options.removal) else { return Ok(atlas) };
    let tokenizer = tokenizer_of(folder)?;
    let recall = match (&tokenizer, options.recall) {
        (Some(tokenizer), Some(recall)) => Some((Facts::new(tokenizer, &texts.calibration, length, recall.facts), recall)),
        (None, Some(_)) => return Err(Error::Request("recall queries need a tokenizer, and the model has no tokenizer.json".into())),
        _ => None,
    };
    if let Some(folder) = &options.journal {
        create_folder(folder)?;
    }
    let mut journal = Journal::open(options.journal.as_ref().map(|folder| folder.join("journal.jsonl")).as_deref())?;
    let context = &last[..last.len().min(PROBE_LENGTH)];
    atlas.add_removals(&Arc::new(model), (&gathered, context), recall, &mut journal, stop, progress)?;
    Ok(atlas)
}
