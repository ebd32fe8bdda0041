//! A cut model as a checkpoint.

use std::fs;
use std::path::Path;

use termwise_llama::config::AttentionMap;
use termwise_llama::weights::WriteOptions;
use termwise_llama::{Error as ModelError, Model};

use crate::Error;

/// Files beside the weights that other commands and tools look for.
const COPIED: [&str; 5] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "settings.toml"];

/// Writes the model with this attention into a folder, which is made where it is not there, with the tokenizer's files and the settings of its
/// training from the model's own folder. Refuses to write into that folder itself.
pub fn save(model: &mut Model, attention: &AttentionMap, from: &Path, to: &Path) -> Result<(), Error> {
    fs::create_dir_all(to).map_err(ModelError::io("create the folder", to))?;
    let same = |path: &Path| fs::canonicalize(path).ok();
    if same(from).is_some() && same(from) == same(to) {
        return Err(Error::Sizes(format!("{} is the model's own folder; name another one to save the cut model in", to.display())));
    }
    for name in COPIED {
        let path = from.join(name);
        if path.is_file() {
            fs::copy(&path, to.join(name)).map_err(ModelError::io("copy", &path))?;
        }
    }
    let own = model.config.attention.clone();
    model.config.set_attention(attention.clone())?;
    let written = model.write(to, &WriteOptions::default());
    model.config.set_attention(own)?;
    Ok(written?)
}
