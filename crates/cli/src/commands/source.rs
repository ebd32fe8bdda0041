//! Opening data for commands: where tokens are kept, and progress while they are made.

use std::path::{Path, PathBuf};

use termwise_data::{Prepare, Progress, Source, Tokenizer};
use termwise_llama::Config;
use termwise_report::thousands;
use termwise_train::resolve::{self, Named};
use termwise_train::settings::Layer;
use termwise_train::source;
use termwise_train::tell::tell;
use termwise_train::{Result, Settings};

pub use termwise_train::source::{Opened, cache_folder, language_of};

use super::settings::DataSettings;
use crate::progress::Bar;

/// The data of these settings; says how far it is while text is tokenized.
pub fn prepare_with_progress(settings: &Settings, cache: &Path, quiet: bool) -> Result<Box<dyn Source>> {
    let bar = Bar::new(quiet);
    let progress = |progress: &Progress| bar.at(progress.read, progress.file_bytes, "bytes tokenized");
    settings.open_source(cache, &Prepare { progress: &progress, warn: &warning(quiet), ..Prepare::default() })
}

/// Prints warnings to standard error, unless `quiet`.
pub fn warning(quiet: bool) -> impl Fn(&str) {
    move |text| {
        if !quiet {
            tell(&format!("warning: {text}"));
        }
    }
}

/// Warns of windows that are longer than the model was trained on: its run's rows, or else the context in its config.json.
pub fn warn_beyond_context(length: usize, trained: Option<usize>, config: &Config, quiet: bool) {
    let limit = trained.unwrap_or(config.max_position_embeddings);
    if length > limit {
        let of = if trained.is_some() { "the length of its training rows" } else { "max_position_embeddings in its config.json" };
        warning(quiet)(&format!(
            "windows have {} positions, and the model was trained on at most {} ({of}); positions beyond are extrapolated",
            thousands(length),
            thousands(limit)
        ));
    }
}

/// The folder of a model by what the user calls it; says on standard error which was taken where the name does not.
pub fn model_folder(asked: Option<&str>, quiet: bool) -> Result<PathBuf> {
    let Named { folder, taken } = resolve::model(asked)?;
    if let Some(taken) = taken.filter(|_| !quiet) {
        tell(&format!("model: {taken}"));
    }
    Ok(folder)
}

/// What a model's folder says about data and tokenizer, to lay the flags above; and whether it is a checkpoint of a run.
pub fn layers_of_model(folder: &Path, flags: &DataSettings) -> Result<(Vec<Layer>, bool)> {
    source::layers_of_model(folder, flags.table())
}

/// All of the data that the flags name; without `--data`, the held-out part of what the checkpoint was trained on.
pub fn open_for_model(folder: &Path, flags: &DataSettings, held_out_only: bool, cache: &Path, quiet: bool) -> Result<Opened> {
    source::open_for_model(folder, flags.table(), held_out_only, cache, &Prepare { warn: &warning(quiet), ..Prepare::default() })
}

/// All of the data that the flags name, or of one of them, as a stream: for commands whose windows all have one length, whatever the layout in
/// training. `--layout padded` is refused.
pub fn open_packed(folder: &Path, flags: &DataSettings, only: Option<&str>, cache: &Path, quiet: bool) -> Result<Opened> {
    let mut table = flags.table().clone();
    if let Some(path) = only {
        table.insert("data".into(), vec![path].into());
    }
    match table.insert("layout".into(), "packed".into()) {
        Some(layout) if layout.as_str() == Some("padded") => Err(termwise_train::Error::Setting {
            place: String::new(),
            key: "layout".into(),
            found: "\"padded\"".into(),
            expected: "this command reads windows of one length; leave it out, or use packed".into(),
        }),
        _ => source::open_for_model(folder, &table, false, cache, &Prepare { warn: &warning(quiet), ..Prepare::default() }),
    }
}

/// The tokenizer of a model's folder; `None` where it has no `tokenizer.json`.
pub fn tokenizer_of(folder: &Path) -> Result<Option<Tokenizer>> {
    let path = folder.join("tokenizer.json");
    Ok(if path.is_file() { Some(Tokenizer::open(&path.display().to_string(), None)?) } else { None })
}
