//! What a run is set to: flags and a TOML file with the same keys (see [`keys::KEYS`]).
//!
//! Settings are laid over each other: defaults, then files, then flags. A layer that names a `recipe` or a `model` brings what that
//! stands for, and its own keys above it. What results says every value, so that a run's `settings.toml` means the same in any later
//! version.

pub mod keys;
pub mod presets;

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_attention::nearest;
use termwise_llama::Config;
use toml::{Table, Value};

use self::keys::Effect;
use crate::AdamWConfig;
use crate::error::{Error, Result};
use crate::schedule::{Decay, Schedule};

/// Everything that decides a run. The fields are the keys of [`keys::KEYS`], which say what each means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Settings {
    pub recipe: String,
    pub model: String,
    pub from: String,
    pub hidden: usize,
    pub mlp: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub layers: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub tie: bool,
    pub rope_theta: f64,
    pub norm_eps: f64,
    pub init_std: f64,
    pub attention: Value,
    pub data: Vec<String>,
    pub language: String,
    pub tokenizer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_of_document: Option<String>,
    pub special_tokens: bool,
    pub field: String,
    pub documents: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out: Option<f64>,
    pub split_seed: u64,
    pub layout: String,
    pub batch: usize,
    pub length: usize,
    pub accumulate: usize,
    pub steps: u64,
    pub seed: u64,
    pub lr: f64,
    pub warmup: u64,
    pub decay: Decay,
    pub horizon: u64,
    pub final_lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub adam_eps: f64,
    pub weight_decay: f64,
    pub decay_matrices_only: bool,
    pub clip: f64,
    pub clip_gated_only: bool,
    pub eval_every: u64,
    pub eval_batches: u64,
    pub checkpoint_every: u64,
    pub keep: usize,
    pub log_every: u64,
    pub threads: usize,
    pub skip_nonfinite: u64,
}

/// Some settings and where they come from, for messages.
#[derive(Clone, Debug)]
pub struct Layer {
    place: String,
    table: Table,
}

impl Layer {
    /// Settings in a TOML text; `place` is the file as the user would name it.
    pub fn parse(text: &str, place: &str) -> Result<Layer> {
        let table = text.parse().map_err(|source| Error::Toml { place: place.into(), source: Box::new(source) })?;
        Layer::new(table, place)
    }

    /// Settings in a TOML file.
    pub fn read(path: impl AsRef<Path>) -> Result<Layer> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(Error::io("read the settings", path))?;
        Layer::parse(&text, &path.display().to_string())
    }

    /// The settings that a run has saved. They say every size, so the model that it once started from is not looked at again.
    pub fn of_run(text: &str, place: &str) -> Result<Layer> {
        let mut table: Table = text.parse().map_err(|source| Error::Toml { place: place.into(), source: Box::new(source) })?;
        table.remove("from");
        Layer::new(table, place)
    }

    /// Checked for keys that do not exist and values of another kind; presets it names are put beneath it.
    pub fn new(table: Table, place: &str) -> Result<Layer> {
        let mut own = Table::new();
        for (name, value) in &table {
            let unknown = || {
                let suggestion = nearest(name, keys::KEYS.iter().map(|key| key.name)).map(str::to_owned);
                Error::UnknownSetting { place: place.into(), key: name.clone(), suggestion }
            };
            let key = keys::find(name).ok_or_else(unknown)?;
            let wrong = || bad(name, value, format!("it must be {}", key.kind.expected())).at(place);
            own.insert(name.clone(), key.kind.accept(value).ok_or_else(wrong)?);
        }
        let mut layer = Layer { place: place.into(), table: Table::new() };
        if let Some(recipe) = own.get("recipe").and_then(Value::as_str) {
            layer.cover(presets::recipe(recipe).map_err(|error| error.at(place))?);
        }
        if let Some(model) = own.get("model").or(layer.table.get("model")).and_then(Value::as_str) {
            layer.cover(presets::model(model).map_err(|error| error.at(place))?);
        }
        if let Some(from) = own.get("from").and_then(Value::as_str).filter(|from| !from.is_empty()) {
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
    let config = Config::read(folder)?;
    let json: serde_json::Value = serde_json::from_str(&config.to_json_string()).map_err(Error::json(Path::new(folder)))?;
    let attention = json.get("attention_variant").cloned().unwrap_or("softmax".into());
    let attention = Value::try_from(attention).map_err(|_| Error::Internal("an attention map that is no TOML"))?;
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

impl Settings {
    /// The defaults with these layers above them, later ones above earlier ones. What is returned is valid.
    pub fn resolve(layers: &[Layer]) -> Result<Settings> {
        let mut table = Layer::new(Table::from_iter([("recipe".to_owned(), Value::from("default"))]), "the defaults")?.table;
        for layer in layers {
            table.extend(layer.table.clone());
        }
        let place = layers.last().map_or("", |layer| layer.place.as_str());
        let mut settings: Settings =
            Value::Table(table).try_into().map_err(|source| Error::Toml { place: place.into(), source: Box::new(source) })?;
        settings.fill();
        settings.validate()?;
        Ok(settings)
    }

    /// The settings in a TOML text; keys that are missing have their defaults.
    pub fn from_toml(text: &str, place: &str) -> Result<Settings> {
        Settings::resolve(&[Layer::parse(text, place)?])
    }

    /// The settings in a checkpoint.
    pub(crate) fn from_checkpoint(text: &str, place: &str) -> Result<Settings> {
        Settings::resolve(&[Layer::of_run(text, place)?])
    }

    /// Replaces zeros that stand for another setting's value, so that a later change of that one does not change these.
    fn fill(&mut self) {
        if self.kv_heads == 0 {
            self.kv_heads = self.heads;
        }
        if self.head_dim == 0 && self.heads > 0 {
            self.head_dim = self.hidden / self.heads;
        }
        if self.horizon == 0 {
            self.horizon = self.steps;
        }
    }

    /// Checks that every value is possible.
    pub fn validate(&self) -> Result<()> {
        let positive = [
            ("batch", self.batch as u64, 1 << 24),
            ("length", self.length as u64, 1 << 24),
            ("accumulate", self.accumulate as u64, 1 << 20),
            ("steps", self.steps, 1 << 40),
            ("horizon", self.horizon, 1 << 40),
            ("log_every", self.log_every, u64::MAX),
            ("keep", self.keep as u64, u64::MAX),
        ];
        for (key, value, most) in positive {
            if value == 0 || value > most {
                return Err(bad(key, value, format!("it must be from 1 to {most}")));
            }
        }
        if self.heads > 0 && self.head_dim.checked_mul(self.heads) != Some(self.hidden) && self.head_dim == self.hidden / self.heads {
            return Err(bad("hidden", self.hidden, format!("{} heads do not divide it; change one of them or say head_dim", self.heads)));
        }
        if self.threads > 4096 {
            return Err(bad("threads", self.threads, "it must be at most 4096".into()));
        }
        let shares = [("beta1", self.beta1), ("beta2", self.beta2), ("held_out", self.held_out.unwrap_or(0.0))];
        for (key, value) in shares {
            if !(0.0..1.0).contains(&value) {
                return Err(bad(key, value, "it must be at least 0 and below 1".into()));
            }
        }
        for (key, value) in [("lr", self.lr), ("weight_decay", self.weight_decay), ("clip", self.clip), ("final_lr", self.final_lr)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(bad(key, value, "it must be zero or a positive number".into()));
            }
        }
        // Zero moments would otherwise give 0/0.
        if self.adam_eps.is_nan() || (self.adam_eps as f32) < f32::MIN_POSITIVE {
            return Err(bad("adam_eps", self.adam_eps, "it must be positive in float32".into()));
        }
        if self.data.is_empty() {
            return Err(bad("data", "[]", "it must name files, folders or builtin".into()));
        }
        self.config(self.vocab.max(1)).map(|_| ())
    }

    /// The model that these settings describe, for data with that many tokens.
    pub fn config(&self, vocabulary: usize) -> Result<Config> {
        let vocab_size = if self.vocab == 0 { vocabulary } else { self.vocab };
        if vocab_size < vocabulary {
            return Err(bad("vocab", vocab_size, format!("the data has {vocabulary} tokens; leave it at 0 or make it larger")));
        }
        let mut config = if self.from.is_empty() {
            Config {
                vocab_size,
                hidden_size: self.hidden,
                intermediate_size: self.mlp,
                num_hidden_layers: self.layers,
                num_attention_heads: self.heads,
                num_key_value_heads: self.kv_heads,
                head_dim: self.head_dim,
                rms_norm_eps: self.norm_eps,
                rope_theta: self.rope_theta,
                rope_scaling: None,
                tie_word_embeddings: self.tie,
                max_position_embeddings: self.length,
                bos_token_id: None,
                eos_token_id: Vec::new(),
                initializer_range: self.init_std,
                torch_dtype: Some("float32".into()),
                attention: Default::default(),
                other: Default::default(),
            }
        } else {
            self.started_config(vocab_size)?
        };
        // Expanding a map needs sizes that make sense.
        config.validate()?;
        let attention = serde_json::to_value(&self.attention).map_err(|_| Error::Internal("an attention map that is no JSON"))?;
        config.set_attention_json(&attention)?;
        config.validate()?;
        Ok(config)
    }

    fn started_config(&self, vocab_size: usize) -> Result<Config> {
        let config = Config { torch_dtype: Some("float32".into()), ..Config::read(&self.from)? };
        let sizes = [
            ("hidden", self.hidden, config.hidden_size),
            ("mlp", self.mlp, config.intermediate_size),
            ("heads", self.heads, config.num_attention_heads),
            ("kv_heads", self.kv_heads, config.num_key_value_heads),
            ("layers", self.layers, config.num_hidden_layers),
            ("head_dim", self.head_dim, config.head_dim),
            ("vocab", vocab_size, config.vocab_size),
        ];
        match sizes.into_iter().find(|(_, asked, found)| asked != found) {
            Some((key, asked, found)) => Err(bad(key, asked, format!("the model in {} has {found}; leave the key out", self.from))),
            None => Ok(config),
        }
    }

    /// Whether some head has a gate.
    fn gated(&self) -> Result<bool> {
        let config = self.config(self.vocab.max(1))?;
        let gated = |layer| config.heads(layer).iter().any(|v| v.in_gate.is_some() || v.out_gate.is_some() || v.post_gate.is_some());
        Ok((0..config.num_hidden_layers).any(gated))
    }

    /// The largest norm of the gradient, if it is limited for this model.
    pub fn clip_limit(&self) -> Result<Option<f64>> {
        let clips = self.clip > 0.0 && (!self.clip_gated_only || self.gated()?);
        Ok(clips.then_some(self.clip))
    }

    /// The learning rate.
    pub fn schedule(&self) -> Schedule {
        Schedule { peak: self.lr, warmup: self.warmup, decay: self.decay, horizon: self.horizon, last: self.final_lr }
    }

    /// The optimizer.
    pub fn adamw(&self) -> AdamWConfig {
        let Settings { beta1, beta2, adam_eps: eps, weight_decay, decay_matrices_only, .. } = *self;
        AdamWConfig { beta1, beta2, eps, weight_decay, decay_matrices_only }
    }

    fn table(&self) -> Table {
        Table::try_from(self).expect("settings hold nothing that TOML cannot say")
    }

    /// Every setting, with headings; [`Settings::from_toml`] reads it back.
    pub fn to_toml(&self) -> String {
        let table = self.table();
        let mut text = String::new();
        for key in keys::KEYS {
            if let Some(value) = table.get(key.name) {
                text += &format!("# {}\n{} = {value}\n", key.help, key.name);
            }
        }
        text
    }

    /// The settings that change what is computed and differ between the two.
    pub fn differences(&self, other: &Settings) -> Vec<Difference> {
        self.differing(other, Effect::Mathematics)
    }

    /// The settings of this effect that differ between the two.
    pub(crate) fn differing(&self, other: &Settings, effect: Effect) -> Vec<Difference> {
        let (ours, theirs) = (self.table(), other.table());
        let show = |table: &Table, name| table.get(name).map_or("absent".into(), ToString::to_string);
        let differing = keys::KEYS.iter().filter(|key| key.effect == effect && ours.get(key.name) != theirs.get(key.name));
        differing.map(|key| Difference { key: key.name, asked: show(&ours, key.name), found: show(&theirs, key.name) }).collect()
    }

    /// A hash of the settings that change what is computed or where data come from.
    pub fn hash(&self) -> String {
        let table = self.table();
        let mut hasher = blake3::Hasher::new();
        for key in keys::KEYS.iter().filter(|key| key.effect != Effect::Nothing) {
            if let Some(value) = table.get(key.name) {
                hasher.update(format!("{} = {value}\n", key.name).as_bytes());
            }
        }
        hasher.finalize().to_hex()[..16].to_owned()
    }

    /// A name for the run: model, attention and a short hash.
    pub fn name(&self) -> String {
        let attention = self.attention.as_str().unwrap_or("mixed");
        let plain: String = attention.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).take(40).collect();
        let model = if self.from.is_empty() { &self.model } else { "from" };
        format!("{model}-{}-{}", plain.trim_matches('-'), &self.hash()[..8])
    }
}

/// A setting that is asked for with one value and found with another.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The key.
    pub key: &'static str,
    /// What is asked for.
    pub asked: String,
    /// What the checkpoint has.
    pub found: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} asked for, {} in the checkpoint", self.key, self.asked, self.found)
    }
}

fn bad(key: &str, found: impl fmt::Display, expected: String) -> Error {
    Error::Setting { place: String::new(), key: key.into(), found: found.to_string(), expected }
}
