//! The backward pass, from the loss to the gradient of every parameter: the outline of [`super::forward`] in reverse.

use termwise_attention::{AuxTensors, Grads};
use termwise_kernels::gemm::Matrix;

use super::activations::{Activations, GateLogits};
use super::forward::AttentionRows;
use super::session::{ActivationGradients, Session};
use super::timing::Stage;
use super::weight_view::WeightView;
use crate::architecture::{Architecture, LinearLayer, NormLayer, Widths};
use crate::error::{Error, Result};
use crate::ops::linear::Write;
use crate::ops::lm_head::{Projection, Targets};
use crate::ops::products::{Products, Weight};
use crate::ops::{NormInput, activation, chunks, embedding, interleave, layernorm, linear, rmsnorm};
use crate::params::Params;

impl Session {
    /// Adds the gradient of `scale`·Σ losses to `grads`. Requires a [`Session::forward`] on the same batch that kept its activations.
    ///
    /// `h` is the gradient of a norm's output before the backward pass of that norm, and the norm's output after it.
    pub(super) fn backward(
        &mut self,
        params: &Params,
        ids: &[u32],
        lengths: Option<&[usize]>,
        scale: f32,
        grads: &mut Params,
    ) -> Result<()> {
        let Session { layout, engines, saved, activations, gradients, products, lm_head, targets, losses, timing, .. } = self;
        let Architecture { widths, embedding, embedding_scale, activation, blocks, norm, lm_head: head, parallel, interleaved, .. } =
            layout.architecture();
        let Widths { c, i, .. } = *widths;
        let Activations { layers, residuals, inverses, h, mlp, .. } = activations;
        let ActivationGradients { x: dx, sublayer: dsublayer, qkv: dqkv, y: dy, gates: dgates, norm: scratch, token_positions } = gradients;
        let (w, g) = (params.values(), grads.values_mut());
        let mut norms = NormBackward { weights: w, scratch };

        let projection = Projection { weight: Weight::of(w, head, c), products };
        lm_head.backward(h, projection, Targets { labels: targets, scale }, &mut g[head.clone()], losses)?;
        timing.backward(Stage::LmHead);
        chunks::zero(dx);
        let last = 2 * blocks.len();
        norms.backward(norm, NormInput { x: &residuals[last], inverse: &inverses[last] }, h, dx, g);
        timing.backward(Stage::Norm);

        for (l, ((layer, engine), block)) in layers.iter_mut().zip(engines).zip(blocks).enumerate().rev() {
            let [after_attention, after_mlp] = &layer.post_norms;
            let dmlp = match &block.mlp_norms.after {
                None => &*dx,
                Some(norm) => {
                    h.copy_from_slice(dx);
                    chunks::zero(dsublayer);
                    norms.backward(norm, after_mlp.input(), h, dsublayer, g);
                    &*dsublayer
                }
            };
            timing.backward(Stage::Norm);
            if *parallel {
                // dx is the gradient of the block's output here, without the gradient through the MLP.
                input_gradient(products, &block.output, dx, w, (&mut *dy, Write::Replace))?;
                weight_gradient(products, &block.output, dx, &layer.y, g)?;
                timing.backward(Stage::Projections);
            }
            input_gradient(products, &block.down, dmlp, w, (&mut *mlp, Write::Replace))?;
            timing.backward(Stage::Mlp);
            activation::backward(*activation, &mut layer.gate_up, mlp, i);
            timing.backward(Stage::Activation);
            weight_gradient(products, &block.down, dmlp, mlp, g)?;
            input_gradient(products, &block.gate_up, &layer.gate_up, w, (&mut *h, Write::Replace))?;
            timing.backward(Stage::Mlp);
            let residual = if *parallel { 2 * l } else { 2 * l + 1 };
            let input = NormInput { x: &residuals[residual], inverse: &inverses[2 * l + 1] };
            norms.pre_norm(block.mlp_norms.before.as_ref(), input, h, dx, g);
            timing.backward(Stage::Norm);
            weight_gradient(products, &block.gate_up, &layer.gate_up, h, g)?;
            timing.backward(Stage::Mlp);

            if !*parallel {
                let dattention = match &block.attention_norms.after {
                    None => &*dx,
                    Some(norm) => {
                        h.copy_from_slice(dx);
                        chunks::zero(dsublayer);
                        norms.backward(norm, after_attention.input(), h, dsublayer, g);
                        &*dsublayer
                    }
                };
                timing.backward(Stage::Norm);
                input_gradient(products, &block.output, dattention, w, (&mut *dy, Write::Replace))?;
                weight_gradient(products, &block.output, dattention, &layer.y, g)?;
                timing.backward(Stage::Projections);
            }

            chunks::zero(dqkv);
            let own = |gate: &GateLogits| block.gates.iter().position(|(aux, _)| *aux == gate.aux);
            let mut daux = AuxTensors::default();
            for gate in dgates.iter_mut().filter(|gate| own(gate).is_some()) {
                gate.values.fill(0.0);
                daux.set(gate.aux, &mut gate.values[..]);
            }
            block.parameters_mut(g).for_each(|(aux, gradient)| daux.set(aux, gradient));
            let rows = AttentionRows { widths: *widths, positions: ids.len(), lengths };
            let (inputs, _) = layer.attention(block, WeightView::F32(w), rows);
            let mut attention_grads = Grads::packed(dqkv, widths.packed()).with_aux(daux);
            let saved = saved.pop().expect("the forward pass has saved every layer");
            engine.backward(&inputs, &saved, dy, &mut attention_grads).map_err(|source| Error::Layer { layer: l, source })?;
            if let Some((heads, d)) = *interleaved {
                interleave::join(dqkv, heads, d);
            }
            timing.backward(Stage::Attention);

            let projections = || {
                let gates = dgates.iter().filter_map(|gate| Some((&block.gates[own(gate)?].1, &gate.values)));
                std::iter::once((&block.qkv, &*dqkv)).chain(gates)
            };
            for (at, (linear, gradient)) in projections().enumerate() {
                let write = if at == 0 { Write::Replace } else { Write::Add };
                input_gradient(products, linear, gradient, w, (&mut *h, write))?;
            }
            timing.backward(Stage::Projections);
            let input = NormInput { x: &residuals[2 * l], inverse: &inverses[2 * l] };
            norms.pre_norm(block.attention_norms.before.as_ref(), input, h, dx, g);
            timing.backward(Stage::Norm);
            for (linear, gradient) in projections() {
                weight_gradient(products, linear, gradient, h, g)?;
            }
            timing.backward(Stage::Projections);
        }
        embedding::backward(ids, dx, *embedding_scale, &mut g[embedding.clone()], c, token_positions);
        timing.backward(Stage::Embedding);
        Ok(())
    }
}

/// The weights and the scratch of all norms' backward passes.
struct NormBackward<'a> {
    weights: &'a [f32],
    scratch: &'a mut [f32],
}

impl NormBackward<'_> {
    /// Adds the gradient of the norm's input to `dx` and of its parameters to `g`. `dh` is overwritten by the norm's output.
    fn backward(&mut self, norm: &NormLayer, input: NormInput, dh: &mut [f32], dx: &mut [f32], g: &mut [f32]) {
        let (range, weight) = (norm.weight.clone(), &self.weights[norm.weight.clone()]);
        match norm.bias.clone() {
            None => rmsnorm::backward(input, norm.rms_norm(weight), dh, dx, &mut g[range], self.scratch),
            Some(bias) => {
                let params = norm.layer_norm(weight, &self.weights[bias.clone()]);
                let dparams = g.get_disjoint_mut([range, bias]).expect("weight and bias are two tensors");
                layernorm::backward(input, params, dh, dx, dparams, self.scratch);
            }
        }
    }

    /// As [`NormBackward::backward`] for the norm before a sublayer. Without a norm the sublayer reads the residual itself.
    fn pre_norm(&mut self, norm: Option<&NormLayer>, input: NormInput, dh: &mut [f32], dx: &mut [f32], g: &mut [f32]) {
        match norm {
            Some(norm) => self.backward(norm, input, dh, dx, g),
            None => {
                dx.iter_mut().zip(&*dh).for_each(|(dx, dh)| *dx += dh);
                dh.copy_from_slice(input.x);
            }
        }
    }
}

/// dx = dy W, or dx += dy W.
fn input_gradient(products: &mut Products, at: &LinearLayer, dy: &[f32], w: &[f32], (dx, write): (&mut [f32], Write)) -> Result<()> {
    let dy = Matrix::new(dy, dx.len() / at.inputs, at.outputs);
    products.input_gradient(dx, write, dy, Weight::of(w, &at.weight, at.inputs))
}

/// dW += dyᵀ x, db += Σ dy
fn weight_gradient(products: &mut Products, at: &LinearLayer, dy: &[f32], x: &[f32], g: &mut [f32]) -> Result<()> {
    let m = x.len() / at.inputs;
    products.weight_gradient(&mut g[at.weight.clone()], Matrix::new(dy, m, at.outputs), Matrix::new(x, m, at.inputs))?;
    if let Some(bias) = &at.bias {
        linear::backward_bias(dy, &mut g[bias.clone()]);
    }
    Ok(())
}
