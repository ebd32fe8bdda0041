//! Finds the first layer whose output is NaN or infinite: runs the model with only its first layers, then without the MLP of the last of them.

use std::fmt;

use serde::{Deserialize, Serialize};
use termwise_model::config::AttentionMap;
use termwise_model::{Model, ObservedAttention, SessionOptions};

use crate::error::Result;
use crate::step::batch_of;
use termwise_data::Rows;

/// The origin of a NaN or infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The embedding, the final norm or the output projection.
    Ends,
    /// The attention of this layer.
    Attention(usize),
    /// The MLP of this layer.
    Mlp(usize),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Ends => f.write_str("the embedding or the output projection"),
            Origin::Attention(layer) => write!(f, "the attention of layer {layer}"),
            Origin::Mlp(layer) => write!(f, "the MLP of layer {layer}"),
        }
    }
}

/// The origin of the first NaN or infinity in this batch; `None` if all values are finite.
pub(super) fn origin(model: &Model, rows: &Rows, options: SessionOptions) -> Result<Option<Origin>> {
    let layers = model.config.num_hidden_layers;
    if finite(&first_layers(model, layers, true)?, rows, options)? {
        return Ok(None);
    }
    // NaN and infinity persist in the residual stream, so bisection finds the first layer.
    let (mut good, mut bad) = (0, layers);
    while bad - good > 1 {
        let middle = (good + bad) / 2;
        if finite(&first_layers(model, middle, true)?, rows, options)? { good = middle } else { bad = middle }
    }
    let layer = bad - 1;
    if layer == 0 && !finite(&without_layer(model)?, rows, SessionOptions::default())? {
        return Ok(Some(Origin::Ends));
    }
    let attention_is_good = finite(&first_layers(model, bad, false)?, rows, options)?;
    Ok(Some(if attention_is_good { Origin::Mlp(layer) } else { Origin::Attention(layer) }))
}

/// The first head of this layer whose output is NaN or infinite. The position is unknown: a tile of keys also affects earlier queries, with weight zero.
pub(super) fn head(model: &Model, rows: &Rows, options: SessionOptions, layer: usize) -> Result<Option<usize>> {
    let short = first_layers(model, layer + 1, false)?;
    let mut session = short.session(rows.rows, rows.time, options)?;
    let mut found = None;
    let batch = batch_of(rows, None);
    session.observe(&short.params, batch.ids, batch.lengths, &mut |seen: ObservedAttention| {
        if seen.layer == layer {
            // y is [B, T, H, e].
            let bad = seen.y.chunks(seen.shape.e).enumerate().filter(|(_, y)| y.iter().any(|x| !x.is_finite()));
            found = bad.map(|(at, _)| at % seen.shape.heads).min();
        }
    })?;
    Ok(found)
}

/// The model with its first `count` layers. The last of them has its MLP only if `mlp` is set.
fn first_layers(model: &Model, count: usize, mlp: bool) -> Result<Model> {
    let mut config = model.config.clone();
    let mut attention = AttentionMap::from(model.config.attention.default_variant().clone());
    for layer in 0..count {
        for (head, variant) in model.config.heads(layer).into_iter().enumerate() {
            attention.set_head(layer, head, variant);
        }
    }
    config.attention = attention;
    config.num_hidden_layers = count;
    let mut short = Model::zeros(config)?;
    let layout = short.params.layout().clone();
    let prefix = format!("model.layers.{}.mlp.", count - 1);
    for entry in layout.entries().iter().filter(|entry| mlp || !entry.spec.name.starts_with(&prefix)) {
        let values = model.params.get(&entry.spec.name)?;
        short.params.values_mut()[entry.range()].copy_from_slice(values);
    }
    Ok(short)
}

/// A model with one layer that adds zero: embedding, final norm and output projection.
fn without_layer(model: &Model) -> Result<Model> {
    let mut config = model.config.clone();
    config.attention = AttentionMap::default();
    config.num_hidden_layers = 1;
    let mut ends = Model::zeros(config)?;
    let shared: Vec<String> = ends.params.layout().entries().iter().map(|entry| entry.spec.name.clone()).collect();
    for name in shared.iter().filter(|name| !name.contains(".layers.")) {
        let values = model.params.get(name)?.to_vec();
        ends.params.get_mut(name)?.copy_from_slice(&values);
    }
    Ok(ends)
}

fn finite(model: &Model, rows: &Rows, options: SessionOptions) -> Result<bool> {
    use termwise_model::Objective;
    let mut session = model.session(rows.rows, rows.time, options)?;
    Ok(session.loss(&model.params, &batch_of(rows, None))?.sum.is_finite())
}
