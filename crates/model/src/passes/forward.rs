//! The forward pass, from token ids to the output of the final norm.
//!
//! ```text
//! embed                      x = scale·embedding(ids);  h = norm(x)
//! for each layer:
//!     project_qkv            q, k, v and gate logits from h
//!     attention              y from q, k and v
//!     finish_layer           x += output(y);  h = norm(x);  x += mlp(h);  h = next norm(x)
//! ```
//!
//! [`Session::forward`] is this outline for training and evaluation. Decoding has the same outline in `decode/prefill.rs` and `decode/step.rs`:
//! only attention differs, which there reads a cache or a recurrent state.

use std::ops::Range;

use termwise_attention::{AuxTensor, AuxTensors, Inputs};
use termwise_kernels::bf16::{WeightMatrix, widen};
use termwise_kernels::gemm::Matrix;
use termwise_kernels::gemv;

use super::activations::{Activations, GateLogits, Keep, LayerActivations};
use super::batch::NonpositiveDenominator;
use super::session::{ObservedAttention, Session};
use super::timing::{Stage, StageTiming};
use super::weight_view::WeightView;
use crate::architecture::{Architecture, LinearLayer, NormLayer, TransformerBlock, Widths};
use crate::error::{Error, Result};
use crate::ops::products::{Products, Weight};
use crate::ops::{Buffer, activation, embedding, interleave, layernorm, linear, rmsnorm};
use crate::params::Params;

impl Session {
    /// Runs all layers. Leaves the output of the final norm in `activations.h` and, with [`Keep::All`], the data for the backward pass.
    ///
    /// Returns the first denominator that was not positive.
    pub(super) fn forward(
        &mut self,
        params: &Params,
        ids: &[u32],
        lengths: Option<&[usize]>,
        keep: Keep,
        observe: &mut dyn FnMut(ObservedAttention),
    ) -> Result<Option<NonpositiveDenominator>> {
        let Session { layout, shape, attention, engines, saved, activations, products, timing, has_output, .. } = self;
        *has_output = false;
        // Buffers that no backward pass has used return to their pool.
        saved.clear();
        let (architecture, weights) = (layout.architecture(), WeightView::F32(params.values()));
        let rows = AttentionRows { widths: architecture.widths, positions: ids.len(), lengths };
        let mut widened = Buffer::default();
        products.prepare(params, keep == Keep::All)?;
        let matmul = MatMul::Gemm { widened: &mut widened, products };
        let mut pass = ForwardPass { architecture, weights, matmul, activations, timing, rows: ids.len() };
        let mut nonpositive = None;

        pass.embed(ids);
        for (l, block) in architecture.blocks.iter().enumerate() {
            let layer = pass.project_qkv(l)?;
            let (inputs, y) = layer.attention(block, weights, rows);
            let report = match keep {
                Keep::All => engines[l].forward(&inputs, y).map(|layer_saved| {
                    let report = layer_saved.report();
                    saved.push(layer_saved);
                    report
                }),
                Keep::Nothing => engines[l].infer(&inputs, y),
            };
            let report = report.map_err(|source| Error::Layer { layer: l, source })?;
            nonpositive = nonpositive.or(report.nonpositive.map(|found| NonpositiveDenominator::at(l, found.row, found)));
            observe(ObservedAttention { layer: l, attention: &attention[l], shape: *shape, inputs: &inputs, y });
            pass.finish_layer(l)?;
        }
        *has_output = true;
        Ok(nonpositive)
    }
}

/// A forward pass over M positions.
pub(crate) struct ForwardPass<'a> {
    pub architecture: &'a Architecture,
    pub weights: WeightView<'a>,
    pub matmul: MatMul<'a>,
    pub activations: &'a mut Activations,
    pub timing: &'a mut StageTiming,
    /// M
    pub rows: usize,
}

impl ForwardPass<'_> {
    /// x = scale·embedding(ids), and h = the first norm of x.
    pub fn embed(&mut self, ids: &[u32]) {
        let Architecture { widths, embedding, embedding_scale, blocks, norm, .. } = self.architecture;
        let (m, c) = (self.rows, widths.c);
        let Activations { residuals, inverses, h, .. } = &mut *self.activations;
        let x = &mut residuals[0][..m * c];
        embedding::forward(ids, self.weights.matrix(embedding), *embedding_scale, x, c);
        self.timing.forward(Stage::Embedding);
        match blocks.first().map_or(Some(norm), |block| block.attention_norms.before.as_ref()) {
            Some(first) => first.forward(self.weights, x, &mut h[..m * c], &mut inverses[0][..m]),
            None => h[..m * c].copy_from_slice(x),
        }
        self.timing.forward(Stage::Norm);
    }

    /// q, k, v and gate logits of a layer from h.
    pub fn project_qkv(&mut self, l: usize) -> Result<&mut LayerActivations> {
        let Architecture { widths, blocks, norm, interleaved, .. } = self.architecture;
        let (m, block) = (self.rows, &blocks[l]);
        let at = self.activations.layer_index(l);
        let Activations { layers, h, .. } = &mut *self.activations;
        let (h, layer) = (&h[..m * widths.c], &mut layers[at]);
        let qkv = &mut layer.qkv[..m * widths.qkv()];
        self.matmul.multiply(h, &block.qkv, self.weights, qkv)?;
        if let Some((heads, d)) = *interleaved {
            interleave::split(qkv, heads, d);
        }
        for (aux, linear) in &block.gates {
            self.matmul.multiply(h, linear, self.weights, &mut layer.gate_mut(*aux).values[..m * linear.outputs])?;
        }
        if norm.offset != 0.0 {
            layer.shift_qk_norms(block, self.weights, norm.offset);
        }
        self.timing.forward(Stage::Projections);
        Ok(layer)
    }

    /// The output projection, the MLP and both residual additions of a layer, after attention has written y.
    pub fn finish_layer(&mut self, l: usize) -> Result<()> {
        self.timing.forward(Stage::Attention);
        let Architecture { widths, blocks, activation, .. } = self.architecture;
        let Widths { c, i, queries, .. } = *widths;
        let (m, block, at) = (self.rows, &blocks[l], self.activations.layer_index(l));

        let Activations { layers, h, .. } = &mut *self.activations;
        self.matmul.multiply(&layers[at].y[..m * queries], &block.output, self.weights, &mut h[..m * c])?;
        self.timing.forward(Stage::Projections);
        self.add_residual(2 * l);

        let Activations { layers, h, mlp, .. } = &mut *self.activations;
        let (h, mlp) = (&mut h[..m * c], &mut mlp[..m * i]);
        let gate_up = &mut layers[at].gate_up[..m * block.gate_up.outputs];
        self.matmul.multiply(h, &block.gate_up, self.weights, gate_up)?;
        self.timing.forward(Stage::Mlp);
        activation::forward(*activation, gate_up, mlp, i);
        self.timing.forward(Stage::Activation);
        self.matmul.multiply(mlp, &block.down, self.weights, h)?;
        self.timing.forward(Stage::Mlp);
        self.add_residual(2 * l + 1);
        Ok(())
    }

    /// Adds the output h of sublayer i to the residual and computes the next norm: x_{i+1} = x_i + post_norm(h), h = norm(x_{i+1}).
    ///
    /// Sublayer 2l is the attention of layer l, sublayer 2l + 1 its MLP. In a parallel block the MLP reads the same residual as attention, so
    /// the norm before it is that of x_i.
    fn add_residual(&mut self, i: usize) {
        let Architecture { widths, blocks, norm, parallel, .. } = self.architecture;
        let (m, c, weights) = (self.rows, widths.c, self.weights);
        let (block, is_attention) = (&blocks[i / 2], i.is_multiple_of(2));
        let (post_norm, next) = match is_attention {
            true => (&block.attention_norms.after, block.mlp_norms.before.as_ref()),
            false => (&block.mlp_norms.after, blocks.get(i / 2 + 1).map_or(Some(norm), |next| next.attention_norms.before.as_ref())),
        };
        let at = self.activations.layer_index(i / 2);
        let Activations { layers, residuals, inverses, h, .. } = &mut *self.activations;
        let h = &mut h[..m * c];
        if let Some(post_norm) = post_norm {
            let saved = &mut layers[at].post_norms[i % 2];
            saved.x[..m * c].copy_from_slice(h);
            post_norm.forward(weights, &saved.x[..m * c], h, &mut saved.inverse[..m]);
        }
        let (from, to) = (i % residuals.len(), (i + 1) % residuals.len());
        let [base, x] = residuals.get_disjoint_mut([from, to]).expect("at least two residuals");
        let (base, x, inverse) = (&base[..m * c], &mut x[..m * c], &mut inverses[to][..m]);
        match next {
            Some(next) if *parallel && is_attention => {
                rmsnorm::add(base, h, x, c);
                next.forward(weights, base, h, inverse);
            }
            Some(next) => next.forward_residual(weights, base, x, h, inverse),
            None => {
                rmsnorm::add(base, h, x, c);
                h.copy_from_slice(x);
            }
        }
        self.timing.forward(Stage::Norm);
    }
}

/// The largest number of rows for which GEMV is used. Up to this number, a product is bound by the memory bandwidth of its weights.
pub(crate) const GEMV_MAX_ROWS: usize = 32;

/// How a pass computes its matrix products, with the buffers of the method.
pub(crate) enum MatMul<'a> {
    /// For many rows. A bfloat16 matrix is first converted to float32 in `widened`, which grows to the largest matrix of a block.
    Gemm { widened: &'a mut Buffer, products: &'a mut Products },
    /// For at most [`GEMV_MAX_ROWS`] rows. `columns` is scratch of length [`gemv::scratch_len`].
    Gemv { columns: &'a mut [f32] },
}

impl MatMul<'_> {
    /// y [M, outputs] = x [M, inputs] Wᵀ + b
    pub fn multiply(&mut self, x: &[f32], layer: &LinearLayer, weights: WeightView, y: &mut [f32]) -> Result<()> {
        let (weight, bias) = (weights.matrix(&layer.weight), layer.bias.as_ref().map(|range| weights.vector(range)));
        match self {
            MatMul::Gemv { columns } => gemv::forward(x, weight, bias, y, layer.inputs, columns),
            MatMul::Gemm { widened, products } => match weight {
                WeightMatrix::F32(weight) => {
                    let write = linear::start_with_bias(y, bias);
                    let (x, weight) =
                        (Matrix::new(x, x.len() / layer.inputs, layer.inputs), Weight::new(weight, layer.weight.start, layer.inputs));
                    products.forward(y, layer.outputs, write, x, weight)?;
                }
                WeightMatrix::Bf16(weight) => {
                    widened.ensure(weight.len())?;
                    widen(weight, widened);
                    linear::forward(x, widened, bias, y, layer.inputs);
                }
            },
        }
        Ok(())
    }
}

/// The positions of a pass that attention reads.
#[derive(Clone, Copy)]
pub(crate) struct AttentionRows<'a> {
    pub widths: Widths,
    /// B·T positions.
    pub positions: usize,
    /// Valid positions of each batch row. [B]
    pub lengths: Option<&'a [usize]>,
}

impl LayerActivations {
    /// The inputs of attention and the buffer of its output.
    pub fn attention<'a>(
        &'a mut self,
        block: &TransformerBlock,
        weights: WeightView<'a>,
        rows: AttentionRows<'a>,
    ) -> (Inputs<'a, f32>, &'a mut [f32]) {
        let AttentionRows { widths, positions, lengths } = rows;
        let LayerActivations { qkv, y, gates, shifted_qk_norms, .. } = self;
        let inputs = Inputs::packed(&qkv[..positions * widths.qkv()], widths.packed());
        let aux = aux_tensors(block, weights, (gates, shifted_qk_norms), 0..positions);
        (inputs.with_aux(aux).lengths(lengths), &mut y[..positions * widths.queries])
    }

    /// The inputs of attention at one position.
    pub fn attention_at<'a>(
        &'a self,
        position: usize,
        block: &TransformerBlock,
        weights: WeightView<'a>,
        widths: Widths,
    ) -> Inputs<'a, f32> {
        let qkv = &self.qkv[position * widths.qkv()..][..widths.qkv()];
        let aux = aux_tensors(block, weights, (&self.gates, &self.shifted_qk_norms), position..position + 1);
        Inputs::packed(qkv, widths.packed()).with_aux(aux)
    }
}

/// The gate logits of these positions, and the parameters of attention.
fn aux_tensors<'a>(
    block: &TransformerBlock,
    weights: WeightView<'a>,
    (gates, shifted_qk_norms): (&'a [GateLogits], &'a [(AuxTensor, Vec<f32>)]),
    positions: Range<usize>,
) -> AuxTensors<&'a [f32]> {
    let mut tensors = AuxTensors::default();
    for GateLogits { aux, width, values } in gates.iter().filter(|gate| block.gates.iter().any(|(own, _)| *own == gate.aux)) {
        tensors.set(*aux, &values[positions.start * width..positions.end * width]);
    }
    for (aux, range) in &block.parameters {
        let shifted = shifted_qk_norms.iter().find(|(known, _)| known == aux);
        tensors.set(*aux, shifted.map_or_else(|| weights.vector(range), |(_, values)| values));
    }
    tensors
}

impl NormLayer {
    /// h = norm(x), with 1/rms or 1/σ of each row.
    fn forward(&self, weights: WeightView, x: &[f32], h: &mut [f32], inverse: &mut [f32]) {
        let weight = weights.vector(&self.weight);
        match &self.bias {
            None => rmsnorm::forward(x, self.rms_norm(weight), h, inverse),
            Some(bias) => layernorm::forward(x, self.layer_norm(weight, weights.vector(bias)), h, inverse),
        }
    }

    /// x = base + h, then h = norm(x), with 1/rms or 1/σ of each row.
    fn forward_residual(&self, weights: WeightView, base: &[f32], x: &mut [f32], h: &mut [f32], inverse: &mut [f32]) {
        let weight = weights.vector(&self.weight);
        match &self.bias {
            None => rmsnorm::forward_residual(base, x, self.rms_norm(weight), h, inverse),
            Some(_) => {
                rmsnorm::add(base, h, x, weight.len());
                self.forward(weights, x, h, inverse);
            }
        }
    }

    /// The parameters of an RMSNorm.
    pub(super) fn rms_norm<'a>(&self, weight: &'a [f32]) -> rmsnorm::RmsNormParams<'a> {
        rmsnorm::RmsNormParams { weight, offset: self.offset, eps: self.eps }
    }

    /// The parameters of a LayerNorm.
    pub(super) fn layer_norm<'a>(&self, weight: &'a [f32], bias: &'a [f32]) -> layernorm::LayerNormParams<'a> {
        layernorm::LayerNormParams { weight, bias, eps: self.eps }
    }
}
