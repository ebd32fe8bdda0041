//! Where the parameters of each layer lie in the flat buffer, so that a step looks up no names.

use std::ops::Range;

use termwise_attention::{Extra, Extras, Source};

use crate::config::Config;
use crate::error::Result;
use crate::params::{EMBEDDING, HEAD, Layout};

pub(crate) struct Places {
    pub embedding: Range<usize>,
    pub layers: Vec<LayerPlaces>,
    pub norm: Range<usize>,
    /// The embedding's own in a tied model.
    pub head: Range<usize>,
}

pub(crate) struct LayerPlaces {
    pub attention_norm: Range<usize>,
    pub q: Range<usize>,
    pub k: Range<usize>,
    pub v: Range<usize>,
    pub o: Range<usize>,
    pub signals: Vec<Signal>,
    /// Ascending, as [`carve`] needs them.
    pub parameters: Vec<(Extra, Range<usize>)>,
    pub mlp_norm: Range<usize>,
    pub gate: Range<usize>,
    pub up: Range<usize>,
    pub down: Range<usize>,
}

/// A gate that is projected from h.
pub(crate) struct Signal {
    pub extra: Extra,
    pub outputs: usize,
    pub weight: Range<usize>,
    pub bias: Option<Range<usize>>,
}

impl Places {
    pub fn new(config: &Config, layout: &Layout) -> Result<Places> {
        let find = |name: &str| layout.find(name).map(|entry| entry.range());
        let layers = (0..config.num_hidden_layers).map(|layer| LayerPlaces::new(config, layer, &find)).collect::<Result<_>>()?;
        Ok(Places { embedding: find(EMBEDDING)?, layers, norm: find("model.norm.weight")?, head: find(HEAD)? })
    }
}

impl LayerPlaces {
    fn new(config: &Config, layer: usize, find: &impl Fn(&str) -> Result<Range<usize>>) -> Result<LayerPlaces> {
        let at = |name: &str| find(&format!("model.layers.{layer}.{name}"));
        let (mut signals, mut parameters) = (Vec::new(), Vec::new());
        for spec in config.attention_layer(layer, &config.heads(layer))?.extras() {
            let name = format!("self_attn.{}", spec.name);
            match &spec.source {
                Source::Projection { outputs, bias } => signals.push(Signal {
                    extra: spec.extra,
                    outputs: *outputs,
                    weight: at(&format!("{name}.weight"))?,
                    bias: bias.then(|| at(&format!("{name}.bias"))).transpose()?,
                }),
                Source::Parameter { .. } => parameters.push((spec.extra, at(&name)?)),
            }
        }
        parameters.sort_by_key(|(_, range)| range.start);
        Ok(LayerPlaces {
            attention_norm: at("input_layernorm.weight")?,
            q: at("self_attn.q_proj.weight")?,
            k: at("self_attn.k_proj.weight")?,
            v: at("self_attn.v_proj.weight")?,
            o: at("self_attn.o_proj.weight")?,
            signals,
            parameters,
            mlp_norm: at("post_attention_layernorm.weight")?,
            gate: at("mlp.gate_proj.weight")?,
            up: at("mlp.up_proj.weight")?,
            down: at("mlp.down_proj.weight")?,
        })
    }
}

/// Several parameters of a layer at once, mutably; `wanted` ascends and does not overlap.
pub(crate) fn carve<'a>(values: &'a mut [f32], wanted: &[(Extra, Range<usize>)]) -> Extras<&'a mut [f32]> {
    let mut extras = Extras::default();
    let (mut rest, mut passed) = (values, 0);
    for (extra, range) in wanted {
        let (found, behind) = rest.split_at_mut(range.end - passed);
        extras.set(*extra, &mut found[range.start - passed..]);
        (rest, passed) = (behind, range.end);
    }
    extras
}
