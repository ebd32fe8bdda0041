//! Ranges of quantized keys: per layer, KV head and channel, from the keys of the calibration text.

use serde::{Deserialize, Serialize};
use termwise_attention::{AuxKind, AuxTensor};
use termwise_model::Config;

use crate::kv::Error;
use crate::kv::calibrate::Gathered;
use crate::kv::kinds::Kind;

/// Ranges are wider than the observed ones by this factor.
const MARGIN: f32 = 1.05;

/// The tensors that quantization adds to a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerRanges {
    /// The middle of each channel, [G, d].
    pub centre: Vec<f32>,
    /// Half the width of each channel, [G, d].
    pub half_width: Vec<f32>,
}

/// The ranges of all layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantRanges {
    /// Digest of the model and the calibration contexts.
    pub identity: String,
    /// By layer.
    pub layers: Vec<LayerRanges>,
    /// Positions that the ranges cover, if more than the calibration contexts have.
    extended: Option<usize>,
}

impl QuantRanges {
    /// No tensors: enough for memories in float32.
    pub fn none(identity: &str) -> QuantRanges {
        QuantRanges { identity: identity.into(), ..QuantRanges::default() }
    }

    /// Ranges that hold keys of up to `positions`, from a calibration on contexts of up to `calibrated` tokens.
    pub fn new(config: &Config, gathered: &Gathered, calibrated: usize, positions: usize) -> Result<QuantRanges, Error> {
        let (g, extended) = (config.num_key_value_heads, (positions > calibrated).then_some(positions));
        let layers = gathered.keys.chunks(g).enumerate().map(|(layer, heads)| -> Result<LayerRanges, Error> {
            let rope = config.rope(layer, positions.max(1))?;
            let rotated = extended.is_some() && config.heads(layer).iter().any(|head| head.rope);
            let frequencies = if rotated { rope.frequencies() } else { &[] };
            let ranges = heads.iter().flat_map(|head| head.ranges(frequencies, positions));
            let (centre, half_width) = ranges.map(|(low, high)| (0.5 * (low + high), (0.5 * MARGIN * (high - low)).max(1e-3))).unzip();
            Ok(LayerRanges { centre, half_width })
        });
        Ok(QuantRanges { identity: gathered.identity.clone(), layers: layers.collect::<Result<_, _>>()?, extended })
    }

    /// Digest of everything that measurements with these kinds depend on.
    pub fn identity_for(&self, kinds: &[Kind]) -> String {
        let positions = self.extended.filter(|_| kinds.iter().any(|kind| kind.bits < 32));
        positions.map_or(self.identity.clone(), |positions| format!("{} ranges of {positions} positions", self.identity))
    }

    /// The values of a tensor that conversion adds to a layer.
    pub fn tensor(&self, layer: usize, extra: AuxTensor) -> Option<&[f32]> {
        let own = self.layers.get(layer)?;
        match extra.kind {
            AuxKind::CodeCentre => Some(&own.centre),
            AuxKind::CodeRange => Some(&own.half_width),
            _ => None,
        }
    }
}
