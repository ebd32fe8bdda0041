//! From tokens to the last norm: the one pass that training and decoding share.

use super::architecture::{Architecture, Block, Norm, Widths};
use super::layer::{Activations, AfterNorm, Keep, LayerActivations, Products, Weights};
use super::timing::{Stage, Timing};
use crate::error::Result;
use crate::ops::{activation, embedding, interleave, layernorm, rmsnorm};

/// What a pass reads, and how it computes products.
pub(crate) struct Pass<'a> {
    pub architecture: &'a Architecture,
    pub weights: Weights<'a>,
    pub products: Products<'a>,
    pub timing: &'a mut Timing,
}

impl Pass<'_> {
    /// Runs the layers on ids [M] and leaves the output of the last norm in `h`.
    ///
    /// `attention` computes y of a layer from its q, k, v and gates.
    pub fn forward(
        &mut self,
        ids: &[u32],
        activations: &mut Activations,
        mut attention: impl FnMut(usize, &Block, &mut LayerActivations) -> Result<()>,
    ) -> Result<()> {
        let Pass { architecture, weights, products, timing } = self;
        let Architecture { widths, embedding, embedding_scale, activation, blocks, norm, parallel, interleaved, .. } = architecture;
        let Widths { c, i, queries, .. } = *widths;
        let (m, weights) = (ids.len(), *weights);
        let Activations { keep, layers, residuals, inverses, h, product } = activations;
        let (h, product) = (&mut h[..m * c], &mut product[..m * i]);

        embedding::forward(ids, weights.matrix(embedding), *embedding_scale, &mut residuals[0][..m * c], c);
        timing.forward(Stage::Embedding);
        match blocks.first().map_or(Some(norm), |block| block.attention_norms.before.as_ref()) {
            Some(first) => first.forward(weights, &residuals[0][..m * c], h, &mut inverses[0][..m]),
            None => h.copy_from_slice(&residuals[0][..m * c]),
        }
        timing.forward(Stage::Norm);

        // The norm behind attention or MLP, in place; then x += h, and h becomes the next norm of x, or x. In a parallel block the next norm after
        // attention is that of the residual before it.
        let mut add_and_norm = |i: usize, after: Option<&Norm>, step: &mut AfterNorm, next: Option<&Norm>, h: &mut [f32]| {
            if let Some(after) = after {
                step.x[..m * c].copy_from_slice(h);
                after.forward(weights, &step.x[..m * c], h, &mut step.inverse[..m]);
            }
            let (from, to) = (i % residuals.len(), (i + 1) % residuals.len());
            let [base, x] = residuals.get_disjoint_mut([from, to]).expect("at least two residuals");
            let (base, x) = (&base[..m * c], &mut x[..m * c]);
            match next {
                Some(next) if *parallel && i.is_multiple_of(2) => {
                    rmsnorm::add(base, h, x, c);
                    next.forward(weights, base, h, &mut inverses[to][..m]);
                }
                Some(next) => next.forward_residual(weights, base, x, h, &mut inverses[to][..m]),
                None => {
                    rmsnorm::add(base, h, x, c);
                    h.copy_from_slice(x);
                }
            }
        };
        for (l, block) in blocks.iter().enumerate() {
            let layer = &mut layers[if *keep == Keep::All { l } else { 0 }];
            products.multiply(h, &block.qkv, weights, &mut layer.qkv[..m * widths.qkv()])?;
            if let Some((heads, d)) = *interleaved {
                interleave::split(&mut layer.qkv[..m * widths.qkv()], heads, d);
            }
            for (extra, linear) in &block.gates {
                products.multiply(h, linear, weights, &mut layer.gate_mut(*extra).values[..m * linear.outputs])?;
            }
            timing.forward(Stage::Projections);
            layer.shift_norms(block, weights, norm.offset);
            attention(l, block, layer)?;
            timing.forward(Stage::Attention);
            products.multiply(&layer.y[..m * queries], &block.output, weights, h)?;
            timing.forward(Stage::Projections);
            let [after_attention, after_mlp] = &mut layer.after;
            add_and_norm(2 * l, block.attention_norms.after.as_ref(), after_attention, block.mlp_norms.before.as_ref(), h);
            timing.forward(Stage::Norm);

            let gate_up = &mut layer.gate_up[..m * block.gate_up.outputs];
            products.multiply(h, &block.gate_up, weights, gate_up)?;
            timing.forward(Stage::Mlp);
            activation::forward(*activation, gate_up, product, i);
            timing.forward(Stage::Swiglu);
            products.multiply(product, &block.down, weights, h)?;
            timing.forward(Stage::Mlp);
            let next = blocks.get(l + 1).map_or(Some(norm), |next| next.attention_norms.before.as_ref());
            add_and_norm(2 * l + 1, block.mlp_norms.after.as_ref(), after_mlp, next, h);
            timing.forward(Stage::Norm);
        }
        Ok(())
    }
}

impl Norm {
    /// h and 1/rms of x.
    fn forward(&self, weights: Weights, x: &[f32], h: &mut [f32], inverse: &mut [f32]) {
        let weight = weights.vector(&self.weight);
        match &self.bias {
            None => rmsnorm::forward(x, self.scale(weight), h, inverse),
            Some(bias) => layernorm::forward(x, self.affine(weight, weights.vector(bias)), h, inverse),
        }
    }

    /// x = base + h, then h and 1/rms of x.
    fn forward_residual(&self, weights: Weights, base: &[f32], x: &mut [f32], h: &mut [f32], inverse: &mut [f32]) {
        let weight = weights.vector(&self.weight);
        match &self.bias {
            None => rmsnorm::forward_residual(base, x, self.scale(weight), h, inverse),
            Some(_) => {
                rmsnorm::add(base, h, x, weight.len());
                self.forward(weights, x, h, inverse);
            }
        }
    }

    /// The parameters of an RMSNorm.
    pub(super) fn scale<'a>(&self, weight: &'a [f32]) -> rmsnorm::Scale<'a> {
        rmsnorm::Scale { weight, offset: self.offset, eps: self.eps }
    }

    /// The parameters of a LayerNorm.
    pub(super) fn affine<'a>(&self, weight: &'a [f32], bias: &'a [f32]) -> layernorm::Affine<'a> {
        layernorm::Affine { weight, bias, eps: self.eps }
    }
}
