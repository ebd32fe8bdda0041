//! Settings from one source: a file, flags or a run.

use std::path::Path;

use termwise_base::files;
use termwise_base::nearest;
use termwise_model::Config;
use toml::{Table, Value};

use super::{bad, keys, presets};
use crate::error::{Error, Result};

/// Settings and their source, for messages.
#[derive(Clone, Debug)]
pub struct Layer {
    pub(super) place: String,
    pub(super) table: Table,
    /// Whether they were saved by a run.
    pub(super) of_run: bool,
}

impl Layer {
    /// Whether this setting is given.
    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Settings in a TOML string; `place` is the file name for messages.
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

    /// The settings saved by a run. They contain every size, so the model from which it started is not read again and may be
    /// missing.
    pub fn of_run(text: &str, place: &str) -> Result<Layer> {
        let table = text.parse().map_err(|source| Error::Toml { place: place.into(), source: Box::new(source) })?;
        Layer::checked(table, place, true)
    }

    /// Checks for unknown keys and wrong types. Adds the settings of presets that it names, with lower priority.
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
                return Err(bad(name, value, format!("it is set twice, as `{}` and as `{}`", key.name, key.shown())).at(place));
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

    /// Overrides this table with another.
    fn cover(&mut self, above: Table) {
        self.table.extend(above);
    }
}

/// Sizes and attention of the model in a directory.
fn sizes_of(folder: &str) -> Result<Table> {
    let config = Config::read(crate::run::locate(folder))?;
    let attention = Value::try_from(config.attention_json()).map_err(|_| Error::Internal("an attention map cannot be written as TOML"))?;
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
