//! Fixed-size memory in place of a KV cache: the entry points of `termwise_analysis::kv` with typed options.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::json;
use termwise_analysis::kv::atlas::Recalls;
use termwise_analysis::kv::convert::{Budget, Share};
use termwise_analysis::kv::{self, AtlasOptions, AuditOptions, ConvertOptions, Error, FrontierOptions, TextSplit};
use termwise_analysis::plan::parse_bytes;
use termwise_analysis::request::{Monitor, TextOptions};
use termwise_base::files::write_whole;
use termwise_report::{Documented, to_json, write};
use termwise_train::settings::keys::{DATA, KEYS, find};

use crate::commands::parsed;
use crate::errors::{input, missing, runtime, value};
use crate::result::{Found, provenance};
use crate::threads::{Watch, supervise};

/// Arguments of texts.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TextArguments {
    /// Settings of data, with the names of the texts.
    settings: toml::Table,
    cache: Option<PathBuf>,
    #[serde(default)]
    calibration: Vec<String>,
    #[serde(default)]
    length: Option<usize>,
    #[serde(default)]
    calibration_contexts: Option<usize>,
    #[serde(default)]
    calibration_length: Option<usize>,
}

impl TextArguments {
    fn text(&self) -> PyResult<TextOptions> {
        let known = || KEYS.iter().filter(|key| key.group == DATA).map(|key| key.shown());
        if let Some(name) = self.settings.keys().find(|name| find(name).is_none_or(|key| key.group != DATA)) {
            let names = known().collect::<Vec<_>>().join(", ");
            let hint = termwise_base::nearest(name, known()).map_or(String::new(), |name| format!(" did you mean `{name}`?"));
            return Err(input(format!("`{name}` is not an argument or a setting of data;{hint} settings of data are {names}")));
        }
        Ok(TextOptions { settings: self.settings.clone(), cache: self.cache.clone(), ..TextOptions::default() })
    }

    fn split(&self) -> PyResult<TextSplit> {
        let usual = TextSplit::default();
        for (name, count) in
            [("length", self.length), ("calibration_contexts", self.calibration_contexts), ("calibration_length", self.calibration_length)]
        {
            positive(name, count)?;
        }
        Ok(TextSplit {
            text: self.text()?,
            calibration: self.calibration.clone(),
            length: self.length,
            calibration_contexts: self.calibration_contexts.unwrap_or(usual.calibration_contexts),
            calibration_length: self.calibration_length,
        })
    }
}

fn positive(name: &str, count: Option<usize>) -> PyResult<()> {
    match count {
        Some(0) => Err(input(format!("{name} must be at least 1, found 0"))),
        _ => Ok(()),
    }
}

fn kv_error(error: Error) -> PyErr {
    match &error {
        Error::Inspect(termwise_analysis::Error::Train(cause)) if matches!(**cause, termwise_train::Error::NoModel { .. }) => {
            missing(error.to_string())
        }
        _ if error.is_usage() => value(error),
        _ => runtime(error),
    }
}

/// Runs an entry point and writes its report.
fn report<T: Documented>(watch: &Watch, folder: Option<&Path>, work: impl FnOnce(&Monitor) -> Result<T, Error>) -> PyResult<Found> {
    let send = watch.reporter();
    let progress = move |done: u64, of: u64, what: &str| send(json!({ "done": done, "of": of, "now": what }));
    let found = work(&Monitor { stop: &watch.stop, progress: &progress, message: &|_| {} }).map_err(kv_error)?;
    if let Some(folder) = folder {
        write(&found, folder, Some(provenance())).map_err(runtime)?;
    }
    Ok(Found::of(&found))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConvertArguments {
    model: Option<String>,
    bytes: Option<String>,
    keys: Option<u64>,
    loss: Option<String>,
    contexts: usize,
    texts: TextArguments,
    granularity: String,
    save: Option<PathBuf>,
    overwrite: bool,
}

impl ConvertArguments {
    fn budget(&self) -> PyResult<Budget> {
        match (&self.bytes, self.keys, &self.loss) {
            (Some(bytes), None, None) => Ok(Budget::Bytes(parse_bytes(bytes).map_err(value)?)),
            (None, Some(keys), None) if keys > 0 => Ok(Budget::Keys(keys)),
            (None, Some(_), None) => Err(input("keys must be at least 1, found 0")),
            (None, None, Some(loss)) => Ok(Budget::Loss(loss.parse::<Share>().map_err(input)?.0)),
            _ => Err(input("a budget is needed: give exactly one of bytes, keys and loss")),
        }
    }
}

/// Replaces the KV cache of a model with fixed-size memory.
#[pyfunction]
pub fn run_convert(py: Python<'_>, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
    let given: ConvertArguments = parsed(options)?;
    positive("contexts", Some(given.contexts))?;
    // Texts first, so an unknown argument is reported before a missing budget.
    let (texts, budget) = (given.texts.split()?, given.budget()?);
    let granularity = given.granularity.parse().map_err(input)?;
    let (model, save, overwrite) = (given.model, given.save, given.overwrite);
    let how = ConvertOptions { model, budget, contexts: given.contexts, texts, granularity, save, overwrite };
    supervise(py, callback, |watch| report(watch, how.save.as_deref(), |monitor| kv::convert(&how, monitor)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FrontierArguments {
    model: Option<String>,
    keys: Vec<u64>,
    methods: Vec<String>,
    contexts: usize,
    texts: TextArguments,
    folder: Option<PathBuf>,
}

/// Compares fixed-size memories at equal bytes.
#[pyfunction]
pub fn run_frontier(py: Python<'_>, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
    let given: FrontierArguments = parsed(options)?;
    positive("contexts", Some(given.contexts))?;
    let FrontierArguments { model, keys, methods, contexts, texts, folder: journal } = given;
    let how = FrontierOptions { model, keys, methods, contexts, texts: texts.split()?, journal };
    supervise(py, callback, |watch| {
        let mut written = Ok(());
        let found = report(watch, how.journal.as_deref(), |monitor| {
            kv::frontier(&how, monitor, &mut |found| {
                if let (Some(folder), Ok(())) = (&how.journal, &written) {
                    written = write_whole(&folder.join("frontier.json"), to_json(found, Some(provenance())).as_bytes());
                }
            })
        });
        written.map_err(runtime)?;
        found
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AuditArguments {
    model: String,
    against: String,
    contexts: usize,
    facts: usize,
    tokens: usize,
    texts: TextArguments,
    folder: Option<PathBuf>,
}

/// Checks a converted model against its original.
#[pyfunction]
pub fn run_audit(py: Python<'_>, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
    let given: AuditArguments = parsed(options)?;
    for (name, count) in
        [("contexts", Some(given.contexts)), ("facts", Some(given.facts)), ("tokens", Some(given.tokens)), ("length", given.texts.length)]
    {
        positive(name, count)?;
    }
    let AuditArguments { model, against, contexts, facts, tokens, texts, folder } = given;
    let how = AuditOptions { model, against, text: texts.text()?, length: texts.length, contexts, facts, tokens };
    supervise(py, callback, |watch| report(watch, folder.as_deref(), |monitor| kv::audit(&how, monitor)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AtlasArguments {
    model: Option<String>,
    removal: bool,
    facts: Option<usize>,
    heads: usize,
    texts: TextArguments,
    folder: Option<PathBuf>,
}

/// Measures how far back each attention head attends.
#[pyfunction]
pub fn run_atlas(py: Python<'_>, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
    let given: AtlasArguments = parsed(options)?;
    let AtlasArguments { model, removal, facts, heads, texts, folder: journal } = given;
    positive("facts", facts)?;
    positive("heads", Some(heads))?;
    if facts.is_some() && !removal {
        return Err(input("facts needs removal=True: recall is measured with the memory of a KV head removed"));
    }
    let how = AtlasOptions { model, removal, recall: facts.map(|facts| Recalls { facts, heads }), texts: texts.split()?, journal };
    supervise(py, callback, |watch| report(watch, how.journal.as_deref(), |monitor| kv::atlas(&how, monitor)))
}
