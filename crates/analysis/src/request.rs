//! Inputs that commands on a model share: which model, which text, and the callbacks of long computations.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use termwise_data::{Prepare, Tokenizer};
use termwise_model::Config;
use termwise_report::thousands;
use termwise_train::resolve::{self, Named};
use termwise_train::source::{self, Opened, cache_folder};
use termwise_train::{Error, Result};

/// Window length if neither the user nor a run specifies one.
pub const WINDOW: usize = 1024;

/// Callbacks of a long computation.
#[derive(Clone, Copy)]
pub struct Monitor<'a> {
    /// Set it to stop after the current measurement.
    pub stop: &'a AtomicBool,
    /// Receives the number of finished pieces, their total, and the current activity.
    pub progress: &'a (dyn Fn(u64, u64, &str) + Sync),
    /// Receives warnings and notes, one line each.
    pub message: &'a (dyn Fn(&str) + Sync),
}

impl Monitor<'_> {
    /// Reports a warning.
    pub fn warn(&self, text: &str) {
        (self.message)(&format!("warning: {text}"));
    }

    /// The folder of a model by the user's name for it. Reports the checkpoint that was selected if the name does not determine it.
    ///
    /// # Errors
    /// If there is no such model.
    pub fn model_folder(&self, requested: Option<&str>) -> Result<PathBuf> {
        let Named { folder, taken } = resolve::model(requested)?;
        if let Some(taken) = taken {
            (self.message)(&format!("model: {taken}"));
        }
        Ok(folder)
    }

    /// Warns if windows are longer than the rows of the training run or the context in `config.json`.
    pub fn warn_beyond_context(&self, length: usize, trained: Option<usize>, config: &Config) {
        let limit = trained.unwrap_or(config.max_position_embeddings);
        if length > limit {
            let of = if trained.is_some() { "the length of its training rows" } else { "max_position_embeddings in its config.json" };
            self.warn(&format!(
                "windows have {} positions, and the model was trained on at most {} ({of}); positions beyond are extrapolated",
                thousands(length),
                thousands(limit)
            ));
        }
    }
}

/// Text to evaluate a model on.
#[derive(Clone, Debug, Default)]
pub struct TextOptions {
    /// Settings of data by key, above those in the model's folder; see [`termwise_train::settings::keys`].
    pub settings: toml::Table,
    /// Folder for tokenized text; default: `termwise` in the user's cache.
    pub cache: Option<PathBuf>,
    /// Use only the held-out part of the data.
    pub held_out_only: bool,
}

impl TextOptions {
    /// Whether a setting was given.
    pub fn has(&self, key: &str) -> bool {
        self.settings.contains_key(key)
    }

    /// The names of the data.
    pub fn names(&self) -> Vec<String> {
        let values = self.settings.get("data").and_then(toml::Value::as_array).into_iter().flatten();
        values.filter_map(|value| value.as_str().map(str::to_owned)).collect()
    }

    /// All of the named data; without names, the held-out part of the data that the checkpoint was trained on.
    ///
    /// # Errors
    /// If there is no data, or if it cannot be read.
    pub fn open(&self, model: &Path, monitor: &Monitor) -> Result<Opened> {
        self.open_table(model, &self.settings, monitor)
    }

    /// As [`TextOptions::open`], or one of the named data, as a packed stream: for analyses whose windows all have the same length.
    ///
    /// # Errors
    /// If the layout `padded` was requested, if there is no data, or if it cannot be read.
    pub fn open_packed(&self, model: &Path, only: Option<&str>, monitor: &Monitor) -> Result<Opened> {
        let mut table = self.settings.clone();
        if let Some(path) = only {
            table.insert("data".into(), vec![path].into());
        }
        match table.insert("layout".into(), "packed".into()) {
            Some(layout) if layout.as_str() == Some("padded") => Err(Error::Setting {
                place: String::new(),
                key: "layout".into(),
                found: "\"padded\"".into(),
                expected: "this command reads windows of one length; leave it out, or use packed".into(),
            }),
            _ => self.open_table(model, &table, monitor),
        }
    }

    fn open_table(&self, model: &Path, table: &toml::Table, monitor: &Monitor) -> Result<Opened> {
        let warn = |text: &str| monitor.warn(text);
        let how = Prepare { warn: &warn, ..Prepare::default() };
        source::open_for_model(model, table, self.held_out_only, &cache_folder(self.cache.as_deref()), &how)
    }
}

/// The tokenizer in a model's folder; `None` if there is no `tokenizer.json`.
///
/// # Errors
/// If the file cannot be read.
pub fn tokenizer_of(folder: &Path) -> Result<Option<Tokenizer>> {
    let path = folder.join("tokenizer.json");
    Ok(if path.is_file() { Some(Tokenizer::open(&path.display().to_string(), None)?) } else { None })
}

/// The name of a model in results: its folder, or `hf://OWNER/NAME` instead of a cache folder.
pub(crate) fn shown_name(requested: Option<&str>, folder: &Path) -> String {
    requested.filter(|name| name.starts_with("hf://")).map_or_else(|| folder.display().to_string(), str::to_owned)
}

/// Short name of a model: the last part of its path, preceded by the run for a checkpoint; owner and name on the hub.
pub(crate) fn short_name(name: &str) -> String {
    if let Some(rest) = name.strip_prefix("hf://") {
        return rest.replace(['/', '@'], "-");
    }
    let path = std::path::absolute(name).unwrap_or_else(|_| Path::new(name).to_owned());
    let part = |path: &Path| path.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
    let parent = path.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "checkpoints"));
    match parent.and_then(Path::parent) {
        Some(run) => format!("{}-{}", part(run), part(&path)),
        None => part(&path),
    }
}
