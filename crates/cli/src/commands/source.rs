//! Opening data for commands: where tokens are kept, and progress while they are made.

use std::path::{Path, PathBuf};

use termwise_data::language::Language;
use termwise_data::{Prepare, Progress, Source};
use termwise_train::resolve::{self, Named};
use termwise_train::settings::Layer;
use termwise_train::tell::tell;
use termwise_train::{Error, Result, Settings};

use super::settings::DataSettings;
use crate::progress::Bar;

/// The folder that was asked for, or `termwise` in the user's cache.
pub fn cache_folder(asked: Option<&Path>) -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || variable("XDG_CACHE_HOME").or_else(|| variable("LOCALAPPDATA")).or_else(|| Some(variable("HOME")?.join(".cache")));
    asked.map(Path::to_owned).or_else(|| Some(user()?.join("termwise"))).unwrap_or_else(|| ".termwise-cache".into())
}

/// The data of these settings; says how far it is while text is tokenized.
pub fn prepare_with_progress(settings: &Settings, cache: &Path, quiet: bool) -> Result<Box<dyn Source>> {
    let bar = Bar::new(quiet);
    let progress = |progress: &Progress| bar.at(progress.read, progress.file_bytes, "bytes tokenized");
    settings.open_source(cache, &Prepare { progress: &progress, ..Prepare::default() })
}

/// The folder of a model by what the user calls it; says on standard error which was taken where the name does not.
pub fn model_folder(asked: Option<&str>, quiet: bool) -> Result<PathBuf> {
    let Named { folder, taken } = resolve::model(asked)?;
    if let Some(taken) = taken.filter(|_| !quiet) {
        tell(&format!("model: {taken}"));
    }
    Ok(folder)
}

/// The built-in language that a checkpoint was trained on; `None` where it was text, or nothing is said.
pub fn language_of(folder: &Path) -> Result<Option<Language>> {
    let saved = folder.join("settings.toml");
    if !saved.is_file() {
        return Ok(None);
    }
    let text = termwise_base::files::read_text(&saved).map_err(|source| Error::Io { action: "read", path: saved.clone(), source })?;
    Settings::resolve(&[Layer::of_run(&text, &saved.display().to_string())?])?.builtin_language()
}

/// Text for a model that exists.
pub struct Opened {
    /// Its held-out batches are the text.
    pub source: Box<dyn Source>,
    /// As the settings name it.
    pub data: Vec<String>,
    /// Whether it is only the held-out part of it.
    pub held_out_only: bool,
    /// Positions of a window in training, where the folder is a checkpoint of a run.
    pub trained: Option<usize>,
}

/// What a model's folder says about data and tokenizer, to lay the flags above; and whether it is a checkpoint of a run.
pub fn layers_of_model(folder: &Path, flags: &DataSettings) -> Result<(Vec<Layer>, bool)> {
    let saved = folder.join("settings.toml");
    let mut layers = Vec::new();
    let trained = saved.is_file();
    if trained {
        let text = termwise_base::files::read_text(&saved).map_err(|source| Error::Io { action: "read", path: saved.clone(), source })?;
        layers.push(Layer::of_run(&text, &saved.display().to_string())?);
    } else if !flags.has("data") {
        let expected = "this folder says nothing about data; name some with --data, or builtin".into();
        return Err(Error::Setting { place: String::new(), key: "data".into(), found: "absent".into(), expected });
    }
    if !flags.has("tokenizer") && folder.join("tokenizer.json").exists() {
        let own = toml::Table::from_iter([("tokenizer".to_owned(), toml::Value::String(folder.display().to_string()))]);
        layers.push(Layer::new(own, "the model's folder")?);
    }
    Ok((layers, trained))
}

/// All of the data that the flags name; without `--data`, the held-out part of what the checkpoint was trained on. A folder's own tokenizer
/// is used where no other is named.
pub fn open_for_model(folder: &Path, flags: &DataSettings, held_out_only: bool, cache: &Path) -> Result<Opened> {
    let (mut layers, trained) = layers_of_model(folder, flags)?;
    layers.push(flags.layer()?);
    let settings = Settings::resolve(&layers)?;
    let held_out_only = held_out_only || !flags.has("data");
    let whole = if held_out_only { None } else { settings.open_whole(cache, &Prepare::default())? };
    let source: Box<dyn Source> = match whole {
        Some(whole) => Box::new(whole),
        None => settings.open_source(cache, &Prepare::default())?,
    };
    Ok(Opened { source, held_out_only, trained: trained.then_some(settings.length), data: settings.data })
}
