//! A model as it is embedded in the demo.

use std::collections::BTreeMap;

use serde::Serialize;
use termwise_model::{Model, config::ModelFamily};
use termwise_report::base64;

use crate::Error;

/// Sizes, attention and tensors.
#[derive(Serialize)]
pub(super) struct Embedded {
    name: String,
    /// Its training data.
    attention: String,
    config: Config,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Serialize)]
struct Config {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    layers: usize,
    rope_theta: f64,
    norm_eps: f64,
}

/// Float32, row-major, little-endian.
#[derive(Serialize)]
struct Tensor {
    shape: Vec<usize>,
    data: String,
}

impl Embedded {
    pub fn new(name: &str, model: &Model, vocabulary: usize) -> Result<Embedded, Error> {
        let config = &model.config;
        let heads: Vec<String> = (0..config.num_hidden_layers).flat_map(|l| config.heads(l)).map(|head| head.to_string()).collect();
        let refused = |what: String| Err(Error::Sizes(format!("the demo cannot use the model `{name}`: {what}")));
        if heads.windows(2).any(|pair| pair[0] != pair[1]) {
            return refused("its heads have different attentions".into());
        }
        if config.family.kind() != ModelFamily::Llama || config.rope_scaling.is_some() {
            return refused("it is not a plain Llama model".into());
        }
        if config.vocab_size != vocabulary {
            return refused(format!("its vocabulary has {} tokens and that of the demo {vocabulary}", config.vocab_size));
        }
        let tensor = |shape: &[usize], data: &[f32]| {
            let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
            Tensor { shape: shape.to_vec(), data: base64(&bytes) }
        };
        Ok(Embedded {
            name: name.into(),
            attention: heads.into_iter().next().unwrap_or_default(),
            config: Config {
                hidden: config.hidden_size,
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
                layers: config.num_hidden_layers,
                rope_theta: config.rope_theta,
                norm_eps: config.rms_norm_eps,
            },
            tensors: model.params.iter().map(|(entry, data)| (entry.spec.name.clone(), tensor(&entry.spec.shape, data))).collect(),
        })
    }
}
