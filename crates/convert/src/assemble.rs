//! The converted model: the original's weights, with the variants of its kv heads and the tensors that these read.

use termwise_attention::{Extra, Variant};
use termwise_llama::config::AttentionMap;
use termwise_llama::{Config, Model};

use crate::Error;
use crate::fit::{Fits, LayerTensors};
use crate::kinds::{Far, Kind};

/// One kind for each kv head, by layer and kv head.
pub type Choice = Vec<Kind>;

/// The attention of a model whose kv heads have these memories; `None` leaves a head as it is.
pub fn attention(config: &Config, kinds: &[Option<Kind>]) -> Result<AttentionMap, Error> {
    let (g, group) = (config.num_key_value_heads, config.num_attention_heads / config.num_key_value_heads);
    let mut map = config.attention.clone();
    for (index, kind) in kinds.iter().enumerate() {
        let (layer, kv_head) = (index / g, index % g);
        let own: Vec<Variant> = config.heads(layer);
        for head in kv_head * group..(kv_head + 1) * group {
            if let Some(kind) = kind {
                map.set_head(layer, head, kind.variant(&own[head])?);
            }
        }
    }
    Ok(map)
}

impl LayerTensors {
    /// The values of a tensor that conversion added; `mean` where far keys are kept by their mean alone.
    pub fn get(&self, extra: Extra, mean: bool) -> Option<&[f32]> {
        Some(match extra {
            Extra::FarDimQ => &self.q_dim,
            Extra::FarDimK => &self.k_dim,
            Extra::FarSpread => &self.spread,
            Extra::FarGamma if mean => &self.mean_gamma,
            Extra::FarGamma => &self.gamma,
            Extra::FarCoefficients if mean => &self.mean_coefficient,
            Extra::FarCoefficients => &self.coefficients,
            Extra::CodeCentre => &self.code_centre,
            Extra::CodeRange => &self.code_range,
            _ => return None,
        })
    }
}

/// The model with these memories.
pub fn assemble(model: &Model, fits: &Fits, kinds: &[Option<Kind>]) -> Result<Model, Error> {
    let mut config = model.config.clone();
    config.set_attention(attention(&model.config, kinds)?)?;
    let g = config.num_key_value_heads;
    let mut converted = Model::zeros(config)?;
    let layout = converted.params.layout().clone();
    let layers = converted.config.attention_layers(1)?;
    for entry in layout.entries() {
        let to = &mut converted.params.values_mut()[entry.range()];
        if let Ok(own) = model.params.get(&entry.spec.name) {
            to.copy_from_slice(own);
            continue;
        }
        let place = entry.spec.name.split_once("layers.").and_then(|(_, rest)| rest.split_once('.'));
        let layer = place.and_then(|(number, rest)| Some((number.parse::<usize>().ok()?, rest.strip_prefix("self_attn.")?)));
        let found = layer.and_then(|(layer, name)| {
            let mean = kinds[layer * g..(layer + 1) * g].iter().flatten().any(|kind| kind.far == Far::Mean);
            let spec = layers[layer].extras().iter().find(|spec| spec.name == name)?;
            fits.layers.get(layer)?.get(spec.extra, mean)
        });
        match found.filter(|values| values.len() == to.len()) {
            Some(values) => to.copy_from_slice(values),
            None => {
                return Err(Error::Asked(format!(
                    "`{}` was not calibrated; this is a kind of memory that needs more than that",
                    entry.spec.name
                )));
            }
        }
    }
    Ok(converted)
}
