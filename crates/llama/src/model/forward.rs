//! From tokens to the last norm: the one pass that training and decoding share.

use super::architecture::{Architecture, Block, Widths};
use super::layer::{Activations, Keep, LayerActivations, Products, Weights};
use super::timing::{Stage, Timing};
use crate::error::Result;
use crate::ops::{Buffer, embedding, rmsnorm, swiglu};

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
        let Pass { architecture: Architecture { widths, embedding, blocks, norm, .. }, weights, products, timing } = self;
        let Widths { c, i, queries, .. } = *widths;
        let (m, weights) = (ids.len(), *weights);
        let Activations { keep, layers, residuals, inverses, h, product } = activations;
        let (h, product) = (&mut h[..m * c], &mut product[..m * i]);

        embedding::forward(ids, weights.matrix(embedding), &mut residuals[0][..m * c], c);
        timing.forward(Stage::Embedding);
        let first = blocks.first().map_or(norm, |block| &block.attention_norm);
        rmsnorm::forward(&residuals[0][..m * c], weights.vector(&first.weight), first.eps, h, &mut inverses[0][..m]);
        timing.forward(Stage::Norm);

        for (l, block) in blocks.iter().enumerate() {
            let layer = &mut layers[if *keep == Keep::All { l } else { 0 }];
            products.multiply(h, &block.qkv, weights, &mut layer.qkv[..m * widths.qkv()])?;
            for (extra, linear) in &block.gates {
                products.multiply(h, linear, weights, &mut layer.gate_mut(*extra).values[..m * linear.outputs])?;
            }
            timing.forward(Stage::Projections);
            attention(l, block, layer)?;
            timing.forward(Stage::Attention);
            products.multiply(&layer.y[..m * queries], &block.output, weights, h)?;
            timing.forward(Stage::Projections);

            let mut add_and_norm = |i: usize, norm: &super::architecture::Norm, h: &mut [f32]| {
                let (before, after, inverse) = step(residuals, inverses, i);
                rmsnorm::forward_residual(
                    &before[..m * c],
                    &mut after[..m * c],
                    weights.vector(&norm.weight),
                    norm.eps,
                    h,
                    &mut inverse[..m],
                );
            };
            add_and_norm(2 * l, &block.mlp_norm, h);
            timing.forward(Stage::Norm);

            let gate_up = &mut layer.gate_up[..2 * m * i];
            products.multiply(h, &block.gate_up, weights, gate_up)?;
            timing.forward(Stage::Mlp);
            swiglu::forward(gate_up, product, i);
            timing.forward(Stage::Swiglu);
            products.multiply(product, &block.down, weights, h)?;
            timing.forward(Stage::Mlp);
            add_and_norm(2 * l + 1, blocks.get(l + 1).map_or(norm, |next| &next.attention_norm), h);
            timing.forward(Stage::Norm);
        }
        Ok(())
    }
}

/// Residual i, the next one, and that one's 1/rms; the first follows the last where two take turns.
fn step<'a>(residuals: &'a mut [Buffer], inverses: &'a mut [Buffer], i: usize) -> (&'a Buffer, &'a mut Buffer, &'a mut Buffer) {
    let (from, to) = (i % residuals.len(), (i + 1) % residuals.len());
    let [before, after] = residuals.get_disjoint_mut([from, to]).expect("at least two residuals");
    (before, after, &mut inverses[to])
}
