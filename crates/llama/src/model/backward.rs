//! From the loss back to every parameter: the forward pass in reverse.

use termwise_attention::{Extras, Grads};

use super::architecture::{Architecture, Linear, Norm, Widths};
use super::layer::{Activations, AfterNorm, Weights};
use super::session::{Gradients, Session};
use super::timing::Stage;
use crate::error::{Error, Result};
use crate::ops::linear::Write;
use crate::ops::{activation, embedding, interleave, layernorm, linear, pieces, rmsnorm};
use crate::params::Params;

impl Session {
    /// Adds the gradient of `scale`·Σ losses to `grads`, after [`Session::forward`] on the same batch, which has saved.
    ///
    /// `h` changes its meaning on the way: gradient of a norm's output before the norm's backward pass, that output itself after it.
    pub(super) fn backward(
        &mut self,
        params: &Params,
        ids: &[u32],
        lengths: Option<&[usize]>,
        scale: f32,
        grads: &mut Params,
    ) -> Result<()> {
        let Session { layout, engines, saved, activations, gradients, lm_head, targets, losses, timing, .. } = self;
        let Architecture { widths, embedding, embedding_scale, activation, blocks, norm, lm_head: head, parallel, interleaved, .. } =
            layout.architecture();
        let Widths { c, i, .. } = *widths;
        let Activations { layers, residuals, inverses, h, product, .. } = activations;
        let Gradients { x: dx, step: dstep, qkv: dqkv, y: dy, gates: dgates, norm: scratch, groups } = gradients;
        let (w, g) = (params.values(), grads.values_mut());
        let mut norms = NormGradients { w, scratch };

        lm_head.backward(h, &w[head.clone()], targets, scale, &mut g[head.clone()], losses);
        timing.backward(Stage::Head);
        pieces::zero(dx);
        let last = 2 * blocks.len();
        norms.backward(norm, &residuals[last], &inverses[last], h, dx, g);
        timing.backward(Stage::Norm);

        for (l, ((layer, attention), block)) in layers.iter_mut().zip(engines).zip(blocks).enumerate().rev() {
            let [after_attention, after_mlp] = &layer.after;
            let dmlp = norms.after(block.mlp_norms.after.as_ref(), after_mlp, h, dx, dstep, g);
            timing.backward(Stage::Norm);
            if *parallel {
                // The gradient of attention's output is that of the block, without the part through the MLP.
                input_gradient(&block.output, dx, w, dy, Write::Replace);
                weight_gradient(&block.output, dx, &layer.y, g);
                timing.backward(Stage::Projections);
            }
            input_gradient(&block.down, dmlp, w, product, Write::Replace);
            timing.backward(Stage::Mlp);
            activation::backward(*activation, &mut layer.gate_up, product, i);
            timing.backward(Stage::Swiglu);
            weight_gradient(&block.down, dmlp, product, g);
            input_gradient(&block.gate_up, &layer.gate_up, w, h, Write::Replace);
            timing.backward(Stage::Mlp);
            let normed = if *parallel { 2 * l } else { 2 * l + 1 };
            norms.before(block.mlp_norms.before.as_ref(), &residuals[normed], &inverses[2 * l + 1], h, dx, g);
            timing.backward(Stage::Norm);
            weight_gradient(&block.gate_up, &layer.gate_up, h, g);
            timing.backward(Stage::Mlp);

            if !*parallel {
                let dattention = norms.after(block.attention_norms.after.as_ref(), after_attention, h, dx, dstep, g);
                timing.backward(Stage::Norm);
                input_gradient(&block.output, dattention, w, dy, Write::Replace);
                weight_gradient(&block.output, dattention, &layer.y, g);
                timing.backward(Stage::Projections);
            }

            pieces::zero(dqkv);
            let own = |gate: &super::layer::Gate| block.gates.iter().position(|(extra, _)| *extra == gate.extra);
            let mut dextras = Extras::default();
            for gate in dgates.iter_mut().filter(|gate| own(gate).is_some()) {
                gate.values.fill(0.0);
                dextras.set(gate.extra, &mut gate.values[..]);
            }
            block.parameters_mut(g).for_each(|(extra, gradient)| dextras.set(extra, gradient));
            let (inputs, _) = layer.inputs(block, Weights::F32(w), (ids.len(), *widths), lengths);
            let mut attention_grads = Grads::packed(dqkv, widths.packed()).extras(dextras);
            let saved = saved.pop().expect("the forward pass has saved every layer");
            attention.backward(&inputs, &saved, dy, &mut attention_grads).map_err(|source| Error::Layer { layer: l, source })?;
            if let Some((heads, d)) = *interleaved {
                interleave::join(dqkv, heads, d);
            }
            timing.backward(Stage::Attention);

            let projections = || {
                let gates = dgates.iter().filter_map(|gate| Some((&block.gates[own(gate)?].1, &gate.values)));
                std::iter::once((&block.qkv, &*dqkv)).chain(gates)
            };
            for (at, (linear, gradient)) in projections().enumerate() {
                input_gradient(linear, gradient, w, h, if at == 0 { Write::Replace } else { Write::Add });
            }
            timing.backward(Stage::Projections);
            norms.before(block.attention_norms.before.as_ref(), &residuals[2 * l], &inverses[2 * l], h, dx, g);
            timing.backward(Stage::Norm);
            projections().for_each(|(linear, gradient)| weight_gradient(linear, gradient, h, g));
            timing.backward(Stage::Projections);
        }
        embedding::backward(ids, dx, *embedding_scale, &mut g[embedding.clone()], c, groups);
        timing.backward(Stage::Embedding);
        Ok(())
    }
}

/// The backward passes of norms, which share what they read and their scratch.
struct NormGradients<'a> {
    w: &'a [f32],
    scratch: &'a mut [f32],
}

impl NormGradients<'_> {
    /// dx += the gradient through the norm of x, and dh becomes that norm again.
    fn backward(&mut self, norm: &Norm, x: &[f32], inverse: &[f32], dh: &mut [f32], dx: &mut [f32], g: &mut [f32]) {
        let (place, weight) = (norm.weight.clone(), &self.w[norm.weight.clone()]);
        match norm.bias.clone() {
            None => rmsnorm::backward(x, norm.scale(weight), inverse, dh, dx, &mut g[place], self.scratch),
            Some(bias) => {
                let affine = norm.affine(weight, &self.w[bias.clone()]);
                let gradients = g.get_disjoint_mut([place, bias]).expect("weight and bias are two tensors");
                layernorm::backward(x, affine, inverse, [dh, dx], gradients, self.scratch);
            }
        }
    }

    /// The same for the norm of a residual, if there is one; without, the norm is x itself.
    fn before(&mut self, norm: Option<&Norm>, x: &[f32], inverse: &[f32], dh: &mut [f32], dx: &mut [f32], g: &mut [f32]) {
        match norm {
            Some(norm) => self.backward(norm, x, inverse, dh, dx, g),
            None => {
                dx.iter_mut().zip(&*dh).for_each(|(dx, dh)| *dx += dh);
                dh.copy_from_slice(x);
            }
        }
    }

    /// The gradient of what is added to the residual, from the residual's: through the norm behind it, if there is one. `h` holds anything
    /// afterwards.
    fn after<'a>(
        &mut self,
        norm: Option<&Norm>,
        given: &AfterNorm,
        h: &mut [f32],
        dx: &'a [f32],
        dstep: &'a mut [f32],
        g: &mut [f32],
    ) -> &'a [f32] {
        let Some(norm) = norm else { return dx };
        h.copy_from_slice(dx);
        pieces::zero(dstep);
        self.backward(norm, &given.x, &given.inverse, h, dstep, g);
        dstep
    }
}

/// dx = or += dy W
fn input_gradient(at: &Linear, dy: &[f32], w: &[f32], dx: &mut [f32], write: Write) {
    linear::backward_input(dy, &w[at.weight.clone()], dx, at.inputs, write);
}

/// dW += dyᵀ x, db += Σ dy
fn weight_gradient(at: &Linear, dy: &[f32], x: &[f32], g: &mut [f32]) {
    linear::backward_weight(dy, x, &mut g[at.weight.clone()], at.inputs);
    if let Some(bias) = &at.bias {
        linear::backward_bias(dy, &mut g[bias.clone()]);
    }
}
