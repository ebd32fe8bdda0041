//! The activations of a pass, and the products that fill them.

use std::ops::Range;

use half::bf16;
use termwise_attention::{Extra, Extras, Inputs};

use super::architecture::{Architecture, Block, Linear, Widths, is_qk_norm};
use crate::error::Result;
use crate::kernels::{self, Stored, gemv};
use crate::ops::{Buffer, linear, zeros};

/// Rows up to which reading the weights takes longer than multiplying.
pub(crate) const FEW: usize = 32;

/// The parameters as a pass reads them.
#[derive(Clone, Copy)]
pub(crate) enum Weights<'a> {
    F32(&'a [f32]),
    Bf16 {
        /// In the places of the flat buffer.
        matrices: &'a [bf16],
        vectors: &'a Vectors,
    },
}

/// Parameters that are not multiplied, without the room for the others between them.
#[derive(Default)]
pub(crate) struct Vectors {
    /// Where each lies in the flat buffer and here, ascending.
    places: Vec<(usize, usize)>,
    values: Vec<f32>,
}

impl Vectors {
    /// What begins at this place of the flat buffer, after all that is there.
    pub fn push(&mut self, place: usize, values: &[f32]) {
        self.places.push((place, self.values.len()));
        self.values.extend_from_slice(values);
    }

    pub fn values(&self) -> &[f32] {
        &self.values
    }

    fn get(&self, range: &Range<usize>) -> &[f32] {
        let found = self.places.binary_search_by_key(&range.start, |(place, _)| *place).expect("every vector was pushed");
        &self.values[self.places[found].1..][..range.len()]
    }
}

impl<'a> Weights<'a> {
    /// What is multiplied or looked up.
    pub fn matrix(self, range: &Range<usize>) -> Stored<'a> {
        match self {
            Weights::F32(values) => Stored::F32(&values[range.clone()]),
            Weights::Bf16 { matrices, .. } => Stored::Bf16(&matrices[range.clone()]),
        }
    }

    /// Norms, biases and the parameters of attention.
    pub fn vector(self, range: &Range<usize>) -> &'a [f32] {
        match self {
            Weights::F32(values) => &values[range.clone()],
            Weights::Bf16 { vectors, .. } => vectors.get(range),
        }
    }
}

/// How the products of a pass are computed, with room for what that takes.
pub(crate) enum Products<'a> {
    /// Many rows; bfloat16 is widened into a buffer as large as the largest matrix of a block.
    Gemm { widened: &'a mut Buffer },
    /// Few rows; results before they are put in order, [`gemv::scratch_len`].
    Gemv { columns: &'a mut [f32] },
}

impl Products<'_> {
    /// y [M, outputs] = x [M, inputs] Wᵀ + b
    pub fn multiply(&mut self, x: &[f32], at: &Linear, weights: Weights, y: &mut [f32]) -> Result<()> {
        let (weight, bias) = (weights.matrix(&at.weight), at.bias.as_ref().map(|range| weights.vector(range)));
        match self {
            Products::Gemv { columns } => gemv::forward(x, weight, bias, y, at.inputs, columns),
            Products::Gemm { widened } => match weight {
                Stored::F32(weight) => linear::forward(x, weight, bias, y, at.inputs),
                Stored::Bf16(weight) => {
                    widened.ensure(weight.len())?;
                    kernels::widen(weight, widened);
                    linear::forward(x, widened, bias, y, at.inputs);
                }
            },
        }
        Ok(())
    }
}

/// What a pass leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Everything that the backward pass needs: buffers for each layer.
    All,
    /// Nothing: one set of buffers that all layers share.
    Nothing,
}

/// Activations of up to M positions.
pub(crate) struct Activations {
    pub keep: Keep,
    /// Of each layer, or one that all share.
    pub layers: Vec<LayerActivations>,
    /// x before each norm, [2·layers + 1] of [M, C]: before attention, before the MLP, layer by layer, and before the last norm. Two that
    /// take turns where nothing is kept.
    pub residuals: Vec<Buffer>,
    /// 1/rms of each residual, [M].
    pub inverses: Vec<Buffer>,
    /// h [M, C]: outputs of norms, steps towards the next residual, and on the way back their gradients.
    pub h: Buffer,
    /// The MLP's product [M, I], or its gradient.
    pub product: Buffer,
}

/// What a layer keeps for its backward pass.
pub(crate) struct LayerActivations {
    /// q, k and v side by side, [M, (H + 2·G)·d].
    pub qkv: Buffer,
    /// Attention's output, [M, H·d].
    pub y: Buffer,
    /// Gate logits of this layer, or of any where all share it.
    pub gates: Vec<Gate>,
    /// Gate and up [M, 2·I], or up [M, I] without a gate; their gradient after the backward pass.
    pub gate_up: Buffer,
    /// What goes into the norm behind attention and that behind the MLP.
    pub after: [AfterNorm; 2],
    /// Weights of the norms of q and k plus one, where they are kept less one.
    plus_one: Vec<(Extra, Vec<f32>)>,
}

/// What went into a norm behind attention or MLP; empty where there is none.
pub(crate) struct AfterNorm {
    /// [M, C]
    pub x: Buffer,
    /// 1/rms of it, [M].
    pub inverse: Buffer,
}

/// Logits of one kind of gate, [M, width].
pub(crate) struct Gate {
    pub extra: Extra,
    pub width: usize,
    pub values: Buffer,
}

impl Activations {
    /// Room for M positions.
    pub fn new(architecture: &Architecture, rows: usize, keep: Keep) -> Result<Activations> {
        let Widths { c, i, .. } = architecture.widths;
        let zeros = |width| zeros("a batch", rows, width);
        let (layers, norms) = match keep {
            Keep::All => {
                let layer = |block: &Block| LayerActivations::new(architecture, rows, block.gate_widths());
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
            product: zeros(i)?,
        })
    }
}

impl LayerActivations {
    fn new(architecture: &Architecture, rows: usize, gates: impl Iterator<Item = (Extra, usize)>) -> Result<LayerActivations> {
        let Widths { c, queries, .. } = architecture.widths;
        let zeros = |width| zeros("a batch", rows, width);
        let after = || -> Result<AfterNorm> {
            let any = architecture.has_after_norms();
            Ok(AfterNorm { x: zeros(if any { c } else { 0 })?, inverse: zeros(if any { 1 } else { 0 })? })
        };
        Ok(LayerActivations {
            after: [after()?, after()?],
            plus_one: Vec::new(),
            qkv: zeros(architecture.widths.qkv())?,
            y: zeros(queries)?,
            gates: Gate::all(rows, gates)?,
            gate_up: zeros(architecture.blocks.iter().map(|block| block.gate_up.outputs).max().unwrap_or(0))?,
        })
    }

    /// The gate logits of this kind.
    pub fn gate_mut(&mut self, extra: Extra) -> &mut Gate {
        self.gates.iter_mut().find(|gate| gate.extra == extra).expect("every gate of a layer has room")
    }

    /// Adds one to the weights of the norms of q and k where they are kept less one; before attention reads them.
    pub fn shift_norms(&mut self, block: &Block, weights: Weights, offset: f32) {
        for (extra, range) in block.parameters.iter().filter(|(extra, _)| offset != 0.0 && is_qk_norm(*extra)) {
            let known = self.plus_one.iter().position(|(known, _)| known == extra).unwrap_or_else(|| {
                self.plus_one.push((*extra, Vec::new()));
                self.plus_one.len() - 1
            });
            let shifted = &mut self.plus_one[known].1;
            shifted.clear();
            shifted.extend(weights.vector(range).iter().map(|w| w + offset));
        }
    }

    /// What attention reads of the first `time` positions, and where its output goes.
    pub fn inputs<'a>(
        &'a mut self,
        block: &Block,
        weights: Weights<'a>,
        (time, widths): (usize, Widths),
        lengths: Option<&'a [usize]>,
    ) -> (Inputs<'a, f32>, &'a mut [f32]) {
        let LayerActivations { qkv, y, gates, plus_one, .. } = self;
        let inputs = Inputs::packed(&qkv[..time * widths.qkv()], widths.packed());
        (inputs.extras(extras(block, weights, (gates, plus_one), 0..time)).lengths(lengths), &mut y[..time * widths.queries])
    }

    /// What attention reads of one position alone.
    pub fn position<'a>(&'a self, block: &Block, weights: Weights<'a>, (at, widths): (usize, Widths)) -> Inputs<'a, f32> {
        let qkv = &self.qkv[at * widths.qkv()..][..widths.qkv()];
        Inputs::packed(qkv, widths.packed()).extras(extras(block, weights, (&self.gates, &self.plus_one), at..at + 1))
    }
}

/// Gate logits of some positions, and parameters.
fn extras<'a>(
    block: &Block,
    weights: Weights<'a>,
    (gates, plus_one): (&'a [Gate], &'a [(Extra, Vec<f32>)]),
    positions: Range<usize>,
) -> Extras<&'a [f32]> {
    let mut extras = Extras::default();
    for Gate { extra, width, values } in gates.iter().filter(|gate| block.gates.iter().any(|(own, _)| *own == gate.extra)) {
        extras.set(*extra, &values[positions.start * width..positions.end * width]);
    }
    for (extra, range) in &block.parameters {
        let shifted = plus_one.iter().find(|(known, _)| known == extra);
        extras.set(*extra, shifted.map_or_else(|| weights.vector(range), |(_, values)| values));
    }
    extras
}

impl Gate {
    pub fn all(rows: usize, gates: impl Iterator<Item = (Extra, usize)>) -> Result<Vec<Gate>> {
        gates.map(|(extra, width)| Ok(Gate { extra, width, values: zeros("a batch", rows, width)? })).collect()
    }
}
