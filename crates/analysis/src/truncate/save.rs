//! Saving of a truncated model.

use std::fs;
use std::path::Path;

use termwise_model::config::AttentionMap;
use termwise_model::weights::{self, WriteOptions};
use termwise_model::{Error as ModelError, Model};

use crate::Error;

/// Files next to the weights that other commands and tools read.
const COPIED_FILES: [&str; 5] =
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "settings.toml"];

/// Rejects a destination: the directory of the original model and directories of runs and checkpoints, always; other directories that are not empty unless `overwrite`
/// is set.
pub fn check_place(from: &Path, to: &Path, overwrite: bool) -> Result<(), Error> {
    let (same, place) = (|path: &Path| fs::canonicalize(path).ok(), to.display());
    if same(from).is_some() && same(from) == same(to) {
        return Err(Error::Sizes(format!("{place} is the directory of the model; name another one to save to")));
    }
    let has = |name: &str| to.join(name).exists();
    // A saved model has the settings of its training next to its weights; a run has only the settings.
    let model = ["config.json", weights::SINGLE_FILE, weights::INDEX_FILE].into_iter().any(has);
    if let Some(name) = ["checkpoints", "metrics.jsonl", "manifest.json"]
        .into_iter()
        .find(|name| has(name))
        .or((has("settings.toml") && !model).then_some("settings.toml"))
    {
        return Err(Error::Sizes(format!(
            "{place} is the directory of a run or of one of its checkpoints ({name}); name another directory to save to"
        )));
    }
    if overwrite {
        return Ok(());
    }
    let first = match fs::read_dir(to) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        entries => {
            entries.map_err(ModelError::io("read the folder", to))?.next().transpose().map_err(ModelError::io("read the folder", to))?
        }
    };
    match first {
        Some(entry) => {
            let (name, what) = (entry.file_name(), if model { "contains a model" } else { "is not empty" });
            Err(Error::Sizes(format!("{place} {what} ({}); name another directory, or replace it with --overwrite", name.display())))
        }
        None => Ok(()),
    }
}

/// Writes the model with this attention to a directory, which is created if necessary, with the tokenizer files and the training
/// settings of the original model. See [`check_place`] for allowed destinations.
pub fn save(model: &mut Model, attention: &AttentionMap, from: &Path, to: &Path, overwrite: bool) -> Result<(), Error> {
    check_place(from, to, overwrite)?;
    fs::create_dir_all(to).map_err(ModelError::io("create the folder", to))?;
    for name in COPIED_FILES {
        let path = from.join(name);
        if path.is_file() {
            fs::copy(&path, to.join(name)).map_err(ModelError::io("copy", &path))?;
        }
    }
    // The record of an earlier conversion in this directory does not describe this model.
    let record = to.join("conversion.json");
    if record.exists() {
        fs::remove_file(&record).map_err(ModelError::io("remove", &record))?;
    }
    let own = model.config.attention.clone();
    model.config.set_attention(attention.clone())?;
    let written = model.write(to, &WriteOptions::default());
    model.config.set_attention(own)?;
    Ok(written?)
}
