//! The activation buffers of a pass.

use termwise_attention::AuxTensor;

use super::weight_view::WeightView;
use crate::architecture::{Architecture, TransformerBlock, Widths, is_qk_norm};
use crate::error::Result;
use crate::ops::{Buffer, NormInput, zeros};

/// Which activations a forward pass keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// All that the backward pass needs: every layer has its own buffers.
    All,
    /// None: all layers share one set of buffers.
    Nothing,
}

/// Activations of up to M positions.
pub(crate) struct Activations {
    pub keep: Keep,
    /// One entry per layer with [`Keep::All`], else one entry that all layers share.
    pub layers: Vec<LayerActivations>,
    /// The residual stream x before each norm, [M, C] each: before attention and before the MLP of each layer, then before the final norm.
    /// Two alternating buffers with [`Keep::Nothing`].
    pub residuals: Vec<Buffer>,
    /// 1/rms or 1/σ of each residual, [M] each.
    pub inverses: Vec<Buffer>,
    /// h [M, C]: the output of a norm or of a sublayer. In the backward pass also their gradients.
    pub h: Buffer,
    /// The activation of the MLP, or its gradient. [M, I]
    pub mlp: Buffer,
}

/// Activations of one layer.
pub(crate) struct LayerActivations {
    /// q, k and v side by side. [M, (H + 2·G)·d]
    pub qkv: Buffer,
    /// Output of attention. [M, H·d]
    pub y: Buffer,
    /// Gate logits of this layer, or of all layers that share this entry.
    pub gates: Vec<GateLogits>,
    /// Gate and up [M, 2·I], or up [M, I] for an MLP without a gate. Replaced by their gradient in the backward pass.
    pub gate_up: Buffer,
    /// Inputs of the norms after attention and after the MLP.
    pub post_norms: [PostNormInput; 2],
    /// Weights w of the q and k norms, for models that store w − 1.
    pub shifted_qk_norms: Vec<(AuxTensor, Vec<f32>)>,
}

/// The input of a norm after attention or MLP; empty without such a norm.
pub(crate) struct PostNormInput {
    /// [M, C]
    pub x: Buffer,
    /// 1/rms of each row. [M]
    pub inverse: Buffer,
}

/// Logits of one kind of gate. [M, width]
pub(crate) struct GateLogits {
    pub aux: AuxTensor,
    pub width: usize,
    pub values: Buffer,
}

impl Activations {
    /// Buffers for M positions.
    pub fn new(architecture: &Architecture, rows: usize, keep: Keep) -> Result<Activations> {
        let Widths { c, i, .. } = architecture.widths;
        let zeros = |width| zeros("a batch", rows, width);
        let (layers, norms) = match keep {
            Keep::All => {
                let layer = |block: &TransformerBlock| LayerActivations::new(architecture, rows, block.gate_widths());
                (architecture.blocks.iter().map(layer).collect::<Result<_>>()?, 2 * architecture.blocks.len() + 1)
            }
            Keep::Nothing => (vec![LayerActivations::new(architecture, rows, architecture.gates().into_iter())?], 2),
        };
        Ok(Activations {
            keep,
            layers,
            residuals: (0..norms).map(|_| zeros(c)).collect::<Result<_>>()?,
            inverses: (0..norms).map(|_| zeros(1)).collect::<Result<_>>()?,
            h: zeros(c)?,
            mlp: zeros(i)?,
        })
    }

    /// The index of a layer in [`Activations::layers`].
    pub fn layer_index(&self, layer: usize) -> usize {
        if self.keep == Keep::All { layer } else { 0 }
    }
}

impl LayerActivations {
    fn new(architecture: &Architecture, rows: usize, gates: impl Iterator<Item = (AuxTensor, usize)>) -> Result<LayerActivations> {
        let Widths { c, queries, .. } = architecture.widths;
        let zeros = |width| zeros("a batch", rows, width);
        let post_norm = || -> Result<PostNormInput> {
            let any = architecture.has_post_norms();
            Ok(PostNormInput { x: zeros(if any { c } else { 0 })?, inverse: zeros(if any { 1 } else { 0 })? })
        };
        Ok(LayerActivations {
            post_norms: [post_norm()?, post_norm()?],
            shifted_qk_norms: Vec::new(),
            qkv: zeros(architecture.widths.qkv())?,
            y: zeros(queries)?,
            gates: GateLogits::new(rows, gates)?,
            gate_up: zeros(architecture.blocks.iter().map(|block| block.gate_up.outputs).max().unwrap_or(0))?,
        })
    }

    /// The gate logits of this kind.
    pub fn gate_mut(&mut self, aux: AuxTensor) -> &mut GateLogits {
        self.gates.iter_mut().find(|gate| gate.aux == aux).expect("every gate of a layer has a buffer")
    }

    /// Adds `offset` to the stored weights of the q and k norms, before attention reads them.
    pub fn shift_qk_norms(&mut self, block: &TransformerBlock, weights: WeightView, offset: f32) {
        for (aux, range) in block.parameters.iter().filter(|(aux, _)| is_qk_norm(*aux)) {
            let known = self.shifted_qk_norms.iter().position(|(known, _)| known == aux).unwrap_or_else(|| {
                self.shifted_qk_norms.push((*aux, Vec::new()));
                self.shifted_qk_norms.len() - 1
            });
            let shifted = &mut self.shifted_qk_norms[known].1;
            shifted.clear();
            shifted.extend(weights.vector(range).iter().map(|w| w + offset));
        }
    }
}

impl PostNormInput {
    pub fn input(&self) -> NormInput<'_> {
        NormInput { x: &self.x, inverse: &self.inverse }
    }
}

impl GateLogits {
    /// One buffer per kind of gate.
    pub fn new(rows: usize, gates: impl Iterator<Item = (AuxTensor, usize)>) -> Result<Vec<GateLogits>> {
        gates.map(|(aux, width)| Ok(GateLogits { aux, width, values: zeros("a batch", rows, width)? })).collect()
    }
}
