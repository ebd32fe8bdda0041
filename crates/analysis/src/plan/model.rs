//! The planned model: the sizes of a preset, or a configuration file.

use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_attention::{Shape, Variant};
use termwise_base::nearest;
use termwise_model::Config;
use termwise_model::params::{ParamRole, ParamSpec};
use termwise_train::resolve;
use termwise_train::settings::{Layer, Settings, presets};

use super::count::{Attention, Sizes, Work};
use crate::Error;

/// Sizes and parameters of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// The model as requested.
    pub name: String,
    /// Its attention, or `mixed`.
    pub attention: String,
    /// Vocabulary size, V.
    pub vocabulary: usize,
    /// Hidden size, C.
    pub hidden: usize,
    /// Intermediate size of the MLP, I.
    pub mlp: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads, H.
    pub heads: usize,
    /// KV heads, G.
    pub kv_heads: usize,
    /// Head dimension, d.
    pub head_dim: usize,
    /// Number of parameters.
    pub parameters: u64,
    /// The same per role; roles without parameters are omitted.
    pub parameters_by_kind: Vec<Kind>,
    /// Parameters that multiply every token: all matrices, the embedding only if it is also the output projection.
    pub multiplied: u64,
    /// Activations per token that training stores for the backward pass, float32 or bfloat16.
    pub activations: u64,
}

/// Parameters of one role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    /// The role.
    pub kind: String,
    /// Number of parameters.
    pub count: u64,
}

/// A preset, a `config.json`, or any name that [`resolve::model`] accepts. Of a model on the hub, only the configuration is fetched. Presets of the paper have its vocabulary and length; others are for bytes.
pub fn find(name: &str, vocabulary: Option<usize>) -> Result<Config, Error> {
    if presets::MODELS.iter().any(|model| model.0 == name) {
        let paper = name.starts_with("paper-");
        let recipe = if paper { "paper" } else { "default" };
        let layer = Layer::parse(&format!("recipe = \"{recipe}\"\nmodel = \"{name}\""), "the preset")?;
        return Ok(Settings::resolve(&[layer])?.config(vocabulary.unwrap_or(if paper { PAPER_VOCABULARY } else { BYTES }))?);
    }
    let path = if name.starts_with("hf://") {
        resolve::hub_config(name)?
    } else if Path::new(name).is_file() {
        name.into()
    } else {
        match resolve::model(Some(name)) {
            Ok(found) => found.folder,
            Err(termwise_train::Error::NoModel { tried, .. }) => {
                let known = || presets::MODELS.iter().map(|model| model.0);
                let suggestion = nearest(name, known()).map(str::to_owned);
                let known = format!(
                    "{}, a directory with a config.json, a run, a checkpoint, or hf://OWNER/NAME (tried: {})",
                    known().collect::<Vec<_>>().join(", "),
                    tried.join("; ")
                );
                return Err(Error::Unknown { what: "model", name: name.into(), suggestion, known });
            }
            Err(other) => return Err(other.into()),
        }
    };
    let mut config = Config::read(path)?;
    if let Some(vocabulary) = vocabulary {
        config.vocab_size = vocabulary;
        config.validate()?;
    }
    Ok(config)
}

/// Vocabulary size of the Llama 2 tokenizer.
const PAPER_VOCABULARY: usize = 32_000;
/// 256 bytes and the end-of-document token.
const BYTES: usize = 257;

impl Model {
    /// From a configuration.
    pub fn new(name: &str, config: &Config) -> Result<Model, Error> {
        let mut kinds =
            ["embedding", "attention", "attention extras", "mlp", "norms", "output"].map(|kind| Kind { kind: kind.into(), count: 0 });
        let mut multiplied = 0;
        for spec in config.parameter_list()? {
            let (kind, matrix) = kind_of(&spec);
            let count = spec.len() as u64;
            kinds[kind].count += count;
            multiplied += if matrix { count } else { 0 };
        }
        if config.tie_word_embeddings {
            multiplied += kinds[0].count;
        }
        let parameters = kinds.iter().map(|kind| kind.count).sum();
        Ok(Model {
            name: name.into(),
            attention: config.uniform_attention().map_or("mixed".into(), Variant::to_string),
            vocabulary: config.vocab_size,
            hidden: config.hidden_size,
            mlp: config.intermediate_size,
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            parameters,
            parameters_by_kind: kinds.into_iter().filter(|kind| kind.count > 0).collect(),
            multiplied,
            activations: activations(config),
        })
    }

    /// Cost outside attention for one of `rows` tokens that are computed together: matrices are read once for all of them, and
    /// every activation is written and read once.
    pub fn matrices(&self, rows: f64) -> Work {
        let bytes = 4.0 * self.multiplied as f64 / rows + 8.0 * self.activations as f64;
        Work { flops: 2.0 * self.multiplied as f64, bytes }
    }
}

/// Index of the role, and whether it multiplies every token.
fn kind_of(spec: &ParamSpec) -> (usize, bool) {
    match spec.role {
        ParamRole::Embedding => (0, false),
        ParamRole::Qkv | ParamRole::AttentionOutput => (1, true),
        ParamRole::Auxiliary => (2, spec.name.contains("_proj.weight")),
        ParamRole::Mlp => (3, true),
        ParamRole::LmHead => (5, true),
        _ => (4, false),
    }
}

/// Activations per token for the backward pass: in each layer two residuals, q, k, v, y, gate and up; the final residual. Norms store one value each.
fn activations(config: &Config) -> u64 {
    let Config { hidden_size: c, intermediate_size: i, num_attention_heads: h, num_key_value_heads: g, head_dim: d, .. } = *config;
    let layer = 2 * (c + 1) + 2 * (h + g) * d + 2 * i;
    (config.num_hidden_layers * layer + c + 1) as u64
}

/// Sizes of a layer's attention, for one token.
pub fn shape(config: &Config, batch: u64) -> Shape {
    let Config { num_attention_heads: heads, num_key_value_heads: kv_heads, head_dim: d, .. } = *config;
    Shape { batch: batch as usize, time: 1, heads, kv_heads, d, e: d }
}

/// Costs of attention in all layers.
pub fn attention(config: &Config) -> Attention {
    let sizes = Sizes { kv_heads: config.num_key_value_heads, d: config.head_dim };
    (0..config.num_hidden_layers).map(|layer| Attention::of_layer(&config.heads(layer), sizes)).sum()
}

/// The model truncated at order p like `generate --order`; `None` if no head has an exponential. A clamp is kept, and such a head has a
/// cache.
pub fn cut(config: &Config, order: usize) -> Option<Config> {
    let attention = termwise_model::decode::truncate_attention(config, order).ok()?;
    Some(Config { attention, ..config.clone() })
}
