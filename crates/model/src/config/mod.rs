//! The configuration of a model: `config.json` of the supported Hugging Face families ([`ModelFamily`]), and the attention of each head.
//!
//! - Unknown keys are kept and written back. Unsupported keys that would change the computation are errors.
//! - `attention_variant` is a variant string for the whole model, or a map per layer and head ([`AttentionMap`]).
//! - The published key `attention_type` is read, but never written.
//! - RoPE is written with the older keys `rope_theta` and `rope_scaling`, which all tools read.

mod attention_map;
mod family;
mod family_config;
mod layer_patterns;
mod read;
mod rope;
mod write;

use std::path::Path;

use serde_json::{Map, Value};
use termwise_attention::{Rope, RopeScaling, Shape, Variant};
use termwise_base::files::{read_text, write_whole};

use crate::error::{Error, Result};
use crate::json;

pub use attention_map::{AttentionMap, LayerAttention};
pub use family::ModelFamily;
pub(crate) use family::NormPlacement;
pub use family_config::FamilyConfig;

/// The largest accepted number of layers and of heads. A table per layer and head is allocated before the weights are checked.
const MAX_LAYERS_OR_HEADS: usize = 4096;

/// The configuration of a model. Fields have the names of the keys in `config.json`.
///
/// Fields may be changed; [`Config::validate`] checks that they are consistent.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The model family and its settings.
    pub family: FamilyConfig,
    /// V, vocabulary size.
    pub vocab_size: usize,
    /// C, hidden size.
    pub hidden_size: usize,
    /// I, hidden size of the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// H, query heads per layer.
    pub num_attention_heads: usize,
    /// G, key-value heads per layer. H is a multiple of G.
    pub num_key_value_heads: usize,
    /// d, head dimension. Default: C / H.
    pub head_dim: usize,
    /// eps of all norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies for long contexts.
    pub rope_scaling: Option<RopeScaling>,
    /// Fraction of the coordinates of a head that RoPE rotates, starting with the first.
    pub partial_rotary_factor: f64,
    /// Whether the output projection is tied to the embedding.
    pub tie_word_embeddings: bool,
    /// Context length of the model.
    pub max_position_embeddings: usize,
    /// Beginning-of-text token.
    pub bos_token_id: Option<u32>,
    /// End-of-text tokens.
    pub eos_token_id: Vec<u32>,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// `torch_dtype` or `dtype`. Kept for other tools.
    pub torch_dtype: Option<String>,
    /// The attention of each head.
    pub attention: AttentionMap,
    /// Unknown keys. Kept for other tools.
    pub other: Map<String, Value>,
}

/// Name of the Python file that `auto_map` in `config.json` refers to.
pub const LOADER_FILE: &str = "modeling_termwise.py";
/// Content of [`LOADER_FILE`]: it imports `termwise.hf`, or fails and names the missing package.
pub const LOADER_SOURCE: &str = include_str!("modeling_termwise.py");

impl Config {
    /// Parses and validates a configuration. Errors start with `source_name`.
    pub fn from_json_str(text: &str, source_name: &str) -> Result<Config> {
        let config = json::parse(text).and_then(read::from_value);
        config.and_then(|config| config.validate().map(|()| config)).map_err(|error| error.in_file(source_name))
    }

    /// Reads and validates a configuration file, or the `config.json` of a directory.
    pub fn read(path: impl AsRef<Path>) -> Result<Config> {
        let (requested, folder) = (path.as_ref(), path.as_ref().is_dir());
        let path = if folder { requested.join("config.json") } else { requested.to_owned() };
        let text = match read_text(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(Error::NoModel { path: requested.into(), folder }),
            text => text.map_err(Error::io("read the configuration", &path))?,
        };
        Config::from_json_str(&text, &path.display().to_string())
    }

    /// The content of `config.json`. [`Config::from_json_str`] and, for the attention of the family, Transformers read it.
    ///
    /// If a head has another attention than its family, `attention_variant` is written with a `model_type` that other tools reject.
    pub fn to_json_string(&self) -> String {
        format!("{:#}\n", Value::Object(write::to_map(self)))
    }

    /// The keys that affect the computation, except the attention of each head.
    pub(crate) fn computation(&self) -> Map<String, Value> {
        const OTHERS: [&str; 8] = [
            "attention_variant",
            "attn_implementation",
            "auto_map",
            "bos_token_id",
            "eos_token_id",
            "initializer_range",
            "max_position_embeddings",
            "torch_dtype",
        ];
        let mut map = write::to_map(self);
        map.retain(|key, _| !OTHERS.contains(&key.as_str()) && !self.other.contains_key(key));
        // With the names of the family, independent of the attention.
        map.extend(self.family.write(false).into_iter().map(|(key, value)| (key.to_owned(), value)));
        map
    }

    /// Writes [`Config::files`] into an existing directory, each atomically.
    pub fn write(&self, folder: impl AsRef<Path>) -> Result<()> {
        for name in self.files() {
            let text = if *name == LOADER_FILE { LOADER_SOURCE.to_owned() } else { self.to_json_string() };
            write_whole(&folder.as_ref().join(name), text.as_bytes())?;
        }
        Ok(())
    }

    /// Names of the files that [`Config::write`] writes: [`LOADER_FILE`] if a head has another attention than its family, and `config.json`.
    pub fn files(&self) -> &'static [&'static str] {
        if write::has_own_attention(self) { &[LOADER_FILE, "config.json"] } else { &["config.json"] }
    }

    /// The variants of a layer, one per head.
    pub fn heads(&self, layer: usize) -> Vec<Variant> {
        self.attention.heads(layer, self.num_attention_heads)
    }

    /// The variant of the model, if all heads have the same.
    pub fn uniform_attention(&self) -> Option<&Variant> {
        self.attention.uniform_over(self.num_hidden_layers, self.num_attention_heads)
    }

    /// Sets the attention: a [`Variant`] for all heads, or an [`AttentionMap`]. Fails without a change if a head does not support it.
    pub fn set_attention(&mut self, attention: impl Into<AttentionMap>) -> Result<()> {
        let attention = attention.into();
        self.check_attention(&attention)?;
        self.attention = attention;
        Ok(())
    }

    /// Sets the attention from a JSON value in the format of `attention_variant`.
    pub fn set_attention_json(&mut self, value: &Value) -> Result<()> {
        let attention =
            AttentionMap::from_json(value, "attention_variant", &self.family, self.num_hidden_layers, self.num_attention_heads)?;
        self.set_attention(attention)
    }

    /// The attention in the format of `attention_variant`.
    pub fn attention_json(&self) -> Value {
        self.attention.to_json(self.num_hidden_layers, self.num_attention_heads)
    }

    /// The sizes of a layer's attention for one token.
    pub(crate) fn shape(&self) -> Shape {
        Shape { batch: 1, time: 1, heads: self.num_attention_heads, kv_heads: self.num_key_value_heads, d: self.head_dim, e: self.head_dim }
    }

    /// The rotary embedding of a layer. Some kinds of scaling depend on the sequence length.
    pub fn rope(&self, layer: usize, length: usize) -> Result<Rope> {
        // Checked first, since the number of frequencies grows with the head dimension.
        self.shape().validate()?;
        let local = self.family.local_rope().filter(|local| local.layers.get(layer) == Some(&true));
        let (theta, scaling) = local.map_or((self.rope_theta, &self.rope_scaling), |local| (local.theta, &local.scaling));
        rope::validate(theta, scaling.as_ref())?;
        Ok(Rope::for_length(self.rotary_dim(), theta, scaling.as_ref(), length)?)
    }

    /// The number of coordinates per head that RoPE rotates.
    pub fn rotary_dim(&self) -> usize {
        (self.head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// The longest sequence of a KV cache: the context length, or the length up to which the rotary frequencies are constant.
    pub fn context(&self) -> usize {
        let fixed = self.rope_scaling.as_ref().and_then(RopeScaling::fixed_up_to);
        fixed.map_or(self.max_position_embeddings, |fixed| self.max_position_embeddings.min(fixed as usize))
    }

    /// Checks that sizes, attention and RoPE are consistent, and that the parameters fit into the address space.
    pub fn validate(&self) -> Result<()> {
        self.check_sizes()?;
        (0..self.num_hidden_layers).try_for_each(|layer| self.rope(layer, 0).map(drop))?;
        self.check_attention(&self.attention)?;
        self.parameter_count().map(|_| ())
    }

    fn check_sizes(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, usize::MAX),
            ("hidden_size", self.hidden_size, usize::MAX),
            ("intermediate_size", self.intermediate_size, usize::MAX),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS_OR_HEADS),
            ("num_attention_heads", self.num_attention_heads, MAX_LAYERS_OR_HEADS),
            ("num_key_value_heads", self.num_key_value_heads, MAX_LAYERS_OR_HEADS),
            ("head_dim", self.head_dim, usize::MAX),
            ("max_position_embeddings", self.max_position_embeddings, usize::MAX),
        ];
        for (key, size, most) in sizes {
            if size == 0 {
                return Err(bad_value(key, size, "it must be at least 1"));
            }
            if size > most {
                return Err(bad_value(key, size, format!("at most {most} are possible")));
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let expected = format!("num_key_value_heads is {}: the first must be a multiple of the second", self.num_key_value_heads);
            return Err(bad_value("num_attention_heads", self.num_attention_heads, expected));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(bad_value("head_dim", self.head_dim, "it must be even, since RoPE rotates pairs of coordinates"));
        }
        let (rotary_dim, head_dim) = (self.rotary_dim(), self.head_dim);
        if !rotary_dim.is_multiple_of(2) || !(2..=head_dim).contains(&rotary_dim) {
            let expected = format!("it rotates {rotary_dim} of {head_dim} coordinates, and RoPE needs an even number from 2 to {head_dim}");
            return Err(bad_value("partial_rotary_factor", self.partial_rotary_factor, expected));
        }
        if self.family.kind().traits().interleaved && self.num_key_value_heads != self.num_attention_heads {
            let expected = format!("num_attention_heads is {}: this family has no grouped-query attention", self.num_attention_heads);
            return Err(bad_value("num_key_value_heads", self.num_key_value_heads, expected));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(bad_value("rms_norm_eps", self.rms_norm_eps, "it must be zero or a positive number"));
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.0) {
            return Err(bad_value("initializer_range", self.initializer_range, "it must be zero or a positive number"));
        }
        Ok(())
    }

    fn check_attention(&self, attention: &AttentionMap) -> Result<()> {
        attention.check_range(self.num_hidden_layers, self.num_attention_heads)?;
        let mentioned = attention.layers().map(|(layer, _)| layer);
        let unmentioned = (0..self.num_hidden_layers).find(|&layer| attention.layer(layer).is_none());
        for layer in mentioned.chain(unmentioned) {
            let heads = attention.heads(layer, self.num_attention_heads);
            self.attention_layer(layer, &heads)?;
        }
        Ok(())
    }
}

/// The error of a value that is out of range.
fn bad_value(key: impl Into<String>, found: impl ToString, expected: impl Into<String>) -> Error {
    Error::KeyValue { key: key.into(), found: found.to_string(), expected: expected.into() }
}
