//! The converted model: the weights of the original with the variants of its KV heads.

use termwise_attention::Variant;
use termwise_model::config::AttentionMap;
use termwise_model::{Config, Model};

use crate::kv::Error;
use crate::kv::kinds::Kind;

/// The attention of a model whose KV heads have these memories; `None` leaves a head unchanged.
pub fn attention(config: &Config, kinds: &[Option<Kind>]) -> Result<AttentionMap, Error> {
    let (g, group) = (config.num_key_value_heads, config.num_attention_heads / config.num_key_value_heads);
    let mut map = config.attention.clone();
    for (index, kind) in kinds.iter().enumerate() {
        let (layer, kv_head) = (index / g, index % g);
        let own: Vec<Variant> = config.heads(layer);
        let Some(kind) = kind else { continue };
        for (head, own) in own.iter().enumerate().skip(kv_head * group).take(group) {
            map.set_head(layer, head, kind.variant(own)?);
        }
    }
    Ok(map)
}

/// A copy of a model whose attention can be replaced repeatedly. The weights are copied once.
pub struct Bench {
    model: Model,
    original: Config,
}

impl Bench {
    /// A copy of this model.
    pub fn new(model: &Model) -> Bench {
        Bench { model: model.clone(), original: model.config.clone() }
    }

    /// The model with these memories.
    pub fn assemble(&mut self, kinds: &[Option<Kind>]) -> Result<&Model, Error> {
        let mut config = self.original.clone();
        config.set_attention(attention(&self.original, kinds)?)?;
        self.model.config = config;
        Ok(&self.model)
    }
}

/// The model with these memories.
pub fn assemble(model: &Model, kinds: &[Option<Kind>]) -> Result<Model, Error> {
    let mut bench = Bench::new(model);
    bench.assemble(kinds)?;
    Ok(bench.model)
}
