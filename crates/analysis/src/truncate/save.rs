//! A cut model as a checkpoint.

use std::fs;
use std::path::Path;

use termwise_model::config::AttentionMap;
use termwise_model::weights::{self, WriteOptions};
use termwise_model::{Error as ModelError, Model};

use crate::Error;

/// Files beside the weights that other commands and tools look for.
const COPIED: [&str; 5] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "settings.toml"];

/// Refuses as a place for a model: the original's own folder and folders of runs and checkpoints, always; other folders that are not empty unless `overwrite`
/// is set.
pub fn check_place(from: &Path, to: &Path, overwrite: bool) -> Result<(), Error> {
    let (same, place) = (|path: &Path| fs::canonicalize(path).ok(), to.display());
    if same(from).is_some() && same(from) == same(to) {
        return Err(Error::Sizes(format!("{place} is the model's own folder; name another one to save in")));
    }
    let has = |name: &str| to.join(name).exists();
    // A saved model has the settings of its training next to its weights; a run has them alone.
    let model = ["config.json", weights::SINGLE_FILE, weights::INDEX_FILE].into_iter().any(has);
    if let Some(name) = ["checkpoints", "metrics.jsonl", "manifest.json"]
        .into_iter()
        .find(|name| has(name))
        .or((has("settings.toml") && !model).then_some("settings.toml"))
    {
        return Err(Error::Sizes(format!(
            "{place} is the folder of a run or of one of its checkpoints ({name}); name another folder to save in"
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
            Err(Error::Sizes(format!("{place} {what} ({}); name another folder, or replace it with --overwrite", name.display())))
        }
        None => Ok(()),
    }
}

/// Writes the model with this attention into a folder, which is made where it is not there, with the tokenizer's files and the settings of its
/// training from the model's own folder. See [`check_place`] for where it can be.
pub fn save(model: &mut Model, attention: &AttentionMap, from: &Path, to: &Path, overwrite: bool) -> Result<(), Error> {
    check_place(from, to, overwrite)?;
    fs::create_dir_all(to).map_err(ModelError::io("create the folder", to))?;
    for name in COPIED {
        let path = from.join(name);
        if path.is_file() {
            fs::copy(&path, to.join(name)).map_err(ModelError::io("copy", &path))?;
        }
    }
    // The record of a conversion that was here before does not describe this model.
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
