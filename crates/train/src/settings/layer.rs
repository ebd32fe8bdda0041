//! Settings as they come from one place: a file, flags, a run.

use std::path::Path;

use termwise_base::files;
use termwise_base::nearest;
use termwise_model::Config;
use toml::{Table, Value};

use super::{bad, keys, presets};
use crate::error::{Error, Result};

/// Some settings and where they come from, for messages.
#[derive(Clone, Debug)]
pub struct Layer {
    pub(super) place: String,
    pub(super) table: Table,
    /// Whether a run has saved them.
    pub(super) of_run: bool,
}

impl Layer {
    /// Whether it says something of this setting.
    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Settings in a TOML text; `place` is the file as the user would name it.
    pub fn parse(text: &str, place: &str) -> Result<Layer> {
        let table = text.parse().map_err(|source| Error::Toml { place: place.into(), source: Box::new(source) })?;
        Layer::new(table, place)
    }

    /// Settings in a TOML file.
    pub fn read(path: impl AsRef<Path>) -> Result<Layer> {
        let path = path.as_ref();
        let text = files::read_any(path, files::TEXT).and_then(files::text).map_err(Error::io("read the settings", path))?;
        Layer::parse(&text, &path.display().to_string())
    }

    /// The settings that a run has saved. They say every size, so the model that it once started from is not looked at again, and need not be
    /// there any more.
    pub fn of_run(text: &str, place: &str) -> Result<Layer> {
        let table = text.parse().map_err(|source| Error::Toml { place: place.into(), source: Box::new(source) })?;
        Layer::checked(table, place, true)
    }

    /// Checked for keys that do not exist and values of another kind; presets it names are put beneath it.
    pub fn new(table: Table, place: &str) -> Result<Layer> {
        Layer::checked(table, place, false)
    }

    fn checked(table: Table, place: &str, of_run: bool) -> Result<Layer> {
        let mut own = Table::new();
        for (name, value) in &table {
            let unknown = || {
                let suggestion = nearest(name, keys::names()).map(str::to_owned);
                Error::UnknownSetting { place: place.into(), key: name.clone(), suggestion }
            };
            let key = keys::find(name).ok_or_else(unknown)?;
            let wrong = || bad(name, value, format!("it must be {}", key.kind.expected())).at(place);
            if own.insert(key.name.to_owned(), key.kind.accept(value).ok_or_else(wrong)?).is_some() {
                return Err(bad(name, value, format!("it is given twice, as `{}` and as `{}`", key.name, key.shown())).at(place));
            }
        }
        let mut layer = Layer { place: place.into(), table: Table::new(), of_run };
        if let Some(recipe) = own.get("recipe").and_then(Value::as_str) {
            layer.cover(presets::recipe(recipe).map_err(|error| error.at(place))?);
        }
        if let Some(model) = own.get("model").or(layer.table.get("model")).and_then(Value::as_str) {
            layer.cover(presets::model(model).map_err(|error| error.at(place))?);
        }
        if let Some(from) = own.get("from").and_then(Value::as_str).filter(|from| !from.is_empty() && !of_run) {
            layer.cover(sizes_of(from)?);
        }
        layer.cover(own);
        Ok(layer)
    }

    /// Lays the table over this one.
    fn cover(&mut self, above: Table) {
        self.table.extend(above);
    }
}

/// Sizes and attention of the model in a folder.
fn sizes_of(folder: &str) -> Result<Table> {
    let config = Config::read(crate::run::locate(folder))?;
    let attention = Value::try_from(config.attention_json()).map_err(|_| Error::Internal("an attention map that is no TOML"))?;
    let sizes = [
        ("hidden", config.hidden_size),
        ("mlp", config.intermediate_size),
        ("heads", config.num_attention_heads),
        ("kv_heads", config.num_key_value_heads),
        ("layers", config.num_hidden_layers),
        ("head_dim", config.head_dim),
        ("vocab", config.vocab_size),
    ];
    let mut table: Table = sizes.into_iter().map(|(key, size)| (key.to_owned(), Value::Integer(size as i64))).collect();
    table.insert("tie".into(), config.tie_word_embeddings.into());
    table.insert("rope_theta".into(), config.rope_theta.into());
    table.insert("norm_eps".into(), config.rms_norm_eps.into());
    table.insert("init_std".into(), config.initializer_range.into());
    table.insert("attention".into(), attention);
    Ok(table)
}
