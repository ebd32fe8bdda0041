//! From tokens to the last norm: the one pass that training and decoding share.

use super::architecture::{Architecture, Block, Norm, Widths};
use super::layer::{Activations, AfterNorm, Keep, LayerActivations, Products, Weights};
use super::timing::{Stage, Timing};
use crate::error::Result;
use crate::ops::{embedding, rmsnorm, swiglu};

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
        let Architecture { widths, embedding, embedding_scale, activation, blocks, norm, .. } = architecture;
        let Widths { c, i, queries, .. } = *widths;
        let (m, weights) = (ids.len(), *weights);
        let Activations { keep, layers, residuals, inverses, h, product } = activations;
        let (h, product) = (&mut h[..m * c], &mut product[..m * i]);

        embedding::forward(ids, weights.matrix(embedding), *embedding_scale, &mut residuals[0][..m * c], c);
        timing.forward(Stage::Embedding);
        match blocks.first().map_or(Some(norm), |block| block.attention_norms.before.as_ref()) {
            Some(first) => {
                rmsnorm::forward(&residuals[0][..m * c], first.scale(weights.vector(&first.weight)), h, &mut inverses[0][..m]);
            }
            None => h.copy_from_slice(&residuals[0][..m * c]),
        }
        timing.forward(Stage::Norm);

        // The norm behind attention or MLP, in place; then x += h, and h becomes the next norm of x, or x.
        let mut add_and_norm = |i: usize, after: Option<&Norm>, step: &mut AfterNorm, next: Option<&Norm>, h: &mut [f32]| {
            if let Some(after) = after {
                step.x[..m * c].copy_from_slice(h);
                rmsnorm::forward(&step.x[..m * c], after.scale(weights.vector(&after.weight)), h, &mut step.inverse[..m]);
            }
            let (from, to) = (i % residuals.len(), (i + 1) % residuals.len());
            let [base, x] = residuals.get_disjoint_mut([from, to]).expect("at least two residuals");
            let (base, x) = (&base[..m * c], &mut x[..m * c]);
            match next {
                Some(next) => rmsnorm::forward_residual(base, x, next.scale(weights.vector(&next.weight)), h, &mut inverses[to][..m]),
                None => {
                    rmsnorm::add(base, h, x, c);
                    h.copy_from_slice(x);
                }
            }
        };
        for (l, block) in blocks.iter().enumerate() {
            let layer = &mut layers[if *keep == Keep::All { l } else { 0 }];
            products.multiply(h, &block.qkv, weights, &mut layer.qkv[..m * widths.qkv()])?;
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

            let gate_up = &mut layer.gate_up[..2 * m * i];
            products.multiply(h, &block.gate_up, weights, gate_up)?;
            timing.forward(Stage::Mlp);
            swiglu::forward(*activation, gate_up, product, i);
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
