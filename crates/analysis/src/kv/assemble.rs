//! The converted model: the original's weights, with the variants of its KV heads and the tensors that these read.

use termwise_attention::Variant;
use termwise_model::config::AttentionMap;
use termwise_model::{Config, Model};

use crate::kv::Error;
use crate::kv::kinds::Kind;
use crate::kv::ranges::QuantRanges;

/// The attention of a model whose KV heads have these memories; `None` leaves a head as it is.
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

/// A converted model that becomes the next one where only variants and small tensors differ: weights are copied once for each layout.
#[derive(Default)]
pub struct Bench {
    model: Option<Model>,
}

impl Bench {
    /// The model with these memories.
    pub fn assemble(&mut self, model: &Model, ranges: &QuantRanges, kinds: &[Option<Kind>]) -> Result<&Model, Error> {
        let mut config = model.config.clone();
        config.set_attention(attention(&model.config, kinds)?)?;
        let same = |known: &Model| -> Result<bool, Error> {
            let list = config.parameter_list()?;
            let entries = known.params.layout().entries();
            Ok(list.len() == entries.len() && list.iter().zip(entries).all(|(spec, entry)| *spec == entry.spec))
        };
        let (mut converted, fresh) = match self.model.take() {
            Some(known) if same(&known)? => (Model { config, ..known }, false),
            _ => (Model::zeros(config)?, true),
        };
        let layout = converted.params.layout().clone();
        let layers = converted.config.attention_layers(1)?;
        for entry in layout.entries() {
            let to = &mut converted.params.values_mut()[entry.range()];
            if let Ok(own) = model.params.get(&entry.spec.name) {
                if fresh {
                    to.copy_from_slice(own);
                }
                continue;
            }
            let place = entry.spec.name.split_once("layers.").and_then(|(_, rest)| rest.split_once('.'));
            let layer = place.and_then(|(number, rest)| Some((number.parse::<usize>().ok()?, rest.strip_prefix("self_attn.")?)));
            let found = layer.and_then(|(layer, name)| {
                let spec = layers[layer].aux_specs().iter().find(|spec| spec.name == name)?;
                ranges.tensor(layer, spec.aux)
            });
            match found.filter(|values| values.len() == to.len()) {
                Some(values) => to.copy_from_slice(values),
                None => return Err(Error::Asked(format!("`{}` was not calibrated; quantized memories need calibration", entry.spec.name))),
            }
        }
        Ok(self.model.insert(converted))
    }
}

/// The model with these memories.
pub fn assemble(model: &Model, ranges: &QuantRanges, kinds: &[Option<Kind>]) -> Result<Model, Error> {
    let mut bench = Bench::default();
    bench.assemble(model, ranges, kinds)?;
    bench.model.ok_or_else(|| Error::Asked("there is no model".into()))
}
