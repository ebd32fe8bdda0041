//! The configuration of a model: Hugging Face's `config.json` of Llama and its relatives ([`Kind`]), and which attention each head has.
//!
//! Notable choices:
//! - keys that mean nothing here are kept and written back; keys that would change the computation are refused;
//! - `attention_variant` is one text for the whole model, or a map by layer and head (see [`AttentionMap`]);
//! - the published key `attention_type` is understood, never written;
//! - RoPE is written in the old form (`rope_theta`, `rope_scaling`), which every reader understands.

mod attention_map;
mod family;
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
pub(crate) use family::Norms;
pub use family::{Family, Kind};

/// Layers and heads beyond which a number in a configuration is taken for a mistake: a table by layer and head is built from them.
const MOST: usize = 4096;

/// Sizes and choices of a Llama, under Hugging Face's names.
///
/// Fields may be changed freely; [`Config::validate`] says whether they still fit together.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What the model computes beyond a plain Llama, or instead of it.
    pub family: Family,
    /// V, tokens in the vocabulary.
    pub vocab_size: usize,
    /// C, width of the hidden state.
    pub hidden_size: usize,
    /// I, width inside the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// H, query heads of a layer.
    pub num_attention_heads: usize,
    /// G, key-value heads of a layer; H is a multiple of it.
    pub num_key_value_heads: usize,
    /// d, width of a head; C / H unless the file says otherwise.
    pub head_dim: usize,
    /// eps of the norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How they are stretched.
    pub rope_scaling: Option<RopeScaling>,
    /// Share of each head's coordinates that RoPE rotates, the first ones; 1 unless the rotary embedding is partial.
    pub partial_rotary_factor: f64,
    /// Whether the embedding is the output projection as well.
    pub tie_word_embeddings: bool,
    /// Longest context that the model was made for.
    pub max_position_embeddings: usize,
    /// Token at the beginning of a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text; often one, possibly none.
    pub eos_token_id: Vec<u32>,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
    /// Type of the weights by the file's own word (`torch_dtype` or `dtype`); kept, not acted upon.
    pub torch_dtype: Option<String>,
    /// Which attention each head has.
    pub attention: AttentionMap,
    /// Keys that mean nothing here, kept for other tools.
    pub other: Map<String, Value>,
}

impl Config {
    /// The configuration in a JSON text; errors begin with `source_name`. What is returned is valid.
    pub fn from_json_str(text: &str, source_name: &str) -> Result<Config> {
        let config = json::parse(text).and_then(read::from_value);
        config.and_then(|config| config.validate().map(|()| config)).map_err(|error| error.in_file(source_name))
    }

    /// The configuration in a file, or in the `config.json` of a folder. What is returned is valid.
    pub fn read(path: impl AsRef<Path>) -> Result<Config> {
        let (asked, folder) = (path.as_ref(), path.as_ref().is_dir());
        let path = if folder { asked.join("config.json") } else { asked.to_owned() };
        let text = match read_text(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(Error::NoModel { path: asked.into(), folder }),
            text => text.map_err(Error::io("read the configuration", &path))?,
        };
        Config::from_json_str(&text, &path.display().to_string())
    }

    /// What Hugging Face's tools read as a model of its family, and [`Config::from_json_str`] as this configuration.
    /// Where some head has not the attention of its family, `attention_variant` is written, with a `model_type` of its own that other tools refuse.
    pub fn to_json_string(&self) -> String {
        format!("{:#}\n", Value::Object(write::to_map(self)))
    }

    /// The keys that decide what is computed from the weights, besides the attention of each head.
    pub(crate) fn computation(&self) -> Map<String, Value> {
        const OTHERS: [&str; 6] =
            ["attention_variant", "bos_token_id", "eos_token_id", "initializer_range", "max_position_embeddings", "torch_dtype"];
        let mut map = write::to_map(self);
        map.retain(|key, _| !OTHERS.contains(&key.as_str()) && !self.other.contains_key(key));
        // Under the family's own name, whatever the attention.
        map.extend(self.family.write(false).into_iter().map(|(key, value)| (key.to_owned(), value)));
        map
    }

    /// Writes `config.json` into a folder that exists; it appears whole or not at all.
    pub fn write(&self, folder: impl AsRef<Path>) -> Result<()> {
        let path = folder.as_ref().join("config.json");
        Ok(write_whole(&path, self.to_json_string().as_bytes())?)
    }

    /// The variants of a layer, one for each head.
    pub fn heads(&self, layer: usize) -> Vec<Variant> {
        self.attention.heads(layer, self.num_attention_heads)
    }

    /// The variant of the whole model, if all heads of all layers have the same.
    pub fn uniform_attention(&self) -> Option<&Variant> {
        self.attention.uniform_over(self.num_hidden_layers, self.num_attention_heads)
    }

    /// Gives the model this attention: one [`Variant`] for all of it, or an [`AttentionMap`].
    /// Refused, and nothing changed, where some head cannot have it.
    pub fn set_attention(&mut self, attention: impl Into<AttentionMap>) -> Result<()> {
        let attention = attention.into();
        self.check_attention(&attention)?;
        self.attention = attention;
        Ok(())
    }

    /// Gives the model the attention of a JSON value in the form of the key `attention_variant`.
    pub fn set_attention_json(&mut self, value: &Value) -> Result<()> {
        let attention =
            AttentionMap::from_json(value, "attention_variant", &self.family, self.num_hidden_layers, self.num_attention_heads)?;
        self.set_attention(attention)
    }

    /// The attention in the form of the key `attention_variant`.
    pub fn attention_json(&self) -> Value {
        self.attention.to_json(self.num_hidden_layers, self.num_attention_heads)
    }

    /// Sizes of a layer's attention, for one token.
    pub(crate) fn shape(&self) -> Shape {
        Shape { batch: 1, time: 1, heads: self.num_attention_heads, kv_heads: self.num_key_value_heads, d: self.head_dim, e: self.head_dim }
    }

    /// Rotary frequencies of a layer's heads, for texts of this length, on which some kinds depend.
    pub fn rope(&self, layer: usize, length: usize) -> Result<Rope> {
        // The frequencies are as many as half a head: an absurd head must be refused before they are made.
        self.shape().validate()?;
        let local = self.family.local_rope().filter(|local| local.layers.get(layer) == Some(&true));
        let (theta, scaling) = local.map_or((self.rope_theta, &self.rope_scaling), |local| (local.theta, &local.scaling));
        rope::validate(theta, scaling.as_ref())?;
        Ok(Rope::for_length(self.rotary_dim(), theta, scaling.as_ref(), length)?)
    }

    /// Coordinates of each head that RoPE rotates.
    pub fn rotary_dim(&self) -> usize {
        (self.head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// The longest text that a cache of keys can hold: that which the model was made for, or up to which its rotary frequencies stay the same.
    pub fn context(&self) -> usize {
        let fixed = self.rope_scaling.as_ref().and_then(RopeScaling::fixed_up_to);
        fixed.map_or(self.max_position_embeddings, |fixed| self.max_position_embeddings.min(fixed as usize))
    }

    /// Checks that sizes, attention and RoPE fit together and that the model could be addressed in memory.
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
            ("num_hidden_layers", self.num_hidden_layers, MOST),
            ("num_attention_heads", self.num_attention_heads, MOST),
            ("num_key_value_heads", self.num_key_value_heads, MOST),
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
            return Err(bad_value("head_dim", self.head_dim, "it must be even, since RoPE turns pairs of coordinates"));
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

/// A value that cannot be.
fn bad_value(key: impl Into<String>, found: impl ToString, expected: impl Into<String>) -> Error {
    Error::KeyValue { key: key.into(), found: found.to_string(), expected: expected.into() }
}
