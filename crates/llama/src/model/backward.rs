//! From the loss back to every parameter: the forward pass in reverse.

use termwise_attention::{Grads, Inputs};

use super::clock::Stage;
use super::forward::extras;
use super::places::carve;
use super::session::{Gradients, Layer, Session, Sizes};
use crate::error::{Error, Result};
use crate::ops::linear::Write;
use crate::ops::{embedding, linear, rmsnorm, swiglu, vector};
use crate::params::Params;

impl Session {
    /// Adds the gradient of `scale`·Σ losses to `grads`, after [`Session::forward`] on the same batch.
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
        let Session {
            sizes, places, engines, layers, saved, residuals, inverses, h, product, gradients, head, targets, losses, clock, ..
        } = self;
        let Sizes { c, i, queries, .. } = *sizes;
        let Gradients { x: dx, q: dq, k: dk, v: dv, y: dy, signals: dsignals, norm: scratch, groups } = gradients;
        let (w, g) = (params.values(), grads.values_mut());

        head.backward(h, &w[places.head.clone()], targets, scale, &mut g[places.head.clone()], losses);
        clock.backward(Stage::Head);
        vector::zero(dx);
        let last = 2 * layers.len();
        rmsnorm::backward(&residuals[last], &w[places.norm.clone()], &inverses[last], h, dx, &mut g[places.norm.clone()], scratch);
        clock.backward(Stage::Norm);

        for (l, ((layer, attention), at)) in layers.iter_mut().zip(engines).zip(&places.layers).enumerate().rev() {
            let Layer { q, k, v, y, signals, gate, up } = layer;

            linear::backward_input(dx, &w[at.down.clone()], product, i, Write::Replace);
            clock.backward(Stage::Mlp);
            swiglu::backward(gate, up, product);
            clock.backward(Stage::Swiglu);
            linear::backward_weight(dx, product, &mut g[at.down.clone()], i);
            linear::backward_input(gate, &w[at.gate.clone()], h, c, Write::Replace);
            linear::backward_input(up, &w[at.up.clone()], h, c, Write::Add);
            clock.backward(Stage::Mlp);
            let (x, inverse) = (&residuals[2 * l + 1], &inverses[2 * l + 1]);
            rmsnorm::backward(x, &w[at.mlp_norm.clone()], inverse, h, dx, &mut g[at.mlp_norm.clone()], scratch);
            clock.backward(Stage::Norm);
            linear::backward_weight(gate, h, &mut g[at.gate.clone()], c);
            linear::backward_weight(up, h, &mut g[at.up.clone()], c);
            clock.backward(Stage::Mlp);

            linear::backward_input(dx, &w[at.o.clone()], dy, queries, Write::Replace);
            linear::backward_weight(dx, y, &mut g[at.o.clone()], queries);
            clock.backward(Stage::Projections);

            [&mut *dq, &mut *dk, &mut *dv].into_iter().for_each(|gradient| vector::zero(gradient));
            let mut dextras = carve(g, &at.parameters);
            for (extra, gradient) in dsignals.iter_mut().filter(|(extra, _)| signals.iter().any(|(own, _)| own == extra)) {
                gradient.fill(0.0);
                dextras.set(*extra, &mut gradient[..]);
            }
            let inputs = Inputs::new(&**q, &**k, &**v).extras(extras(at, signals, w)).lengths(lengths);
            let mut attention_grads = Grads::new(dq, dk, dv).extras(dextras);
            let saved = saved[l].take().expect("the forward pass of this batch has run");
            attention.backward(&inputs, &saved, dy, &mut attention_grads).map_err(|source| Error::Layer { layer: l, source })?;
            clock.backward(Stage::Attention);

            let own = |extra| dsignals.iter().find(|(other, _)| *other == extra).map(|(_, gradient)| &gradient[..]);
            linear::backward_input(dq, &w[at.q.clone()], h, c, Write::Replace);
            linear::backward_input(dk, &w[at.k.clone()], h, c, Write::Add);
            linear::backward_input(dv, &w[at.v.clone()], h, c, Write::Add);
            for signal in &at.signals {
                let gradient = own(signal.extra).expect("every signal of a layer has room for its gradient");
                linear::backward_input(gradient, &w[signal.weight.clone()], h, c, Write::Add);
            }
            clock.backward(Stage::Projections);
            let (x, inverse) = (&residuals[2 * l], &inverses[2 * l]);
            rmsnorm::backward(x, &w[at.attention_norm.clone()], inverse, h, dx, &mut g[at.attention_norm.clone()], scratch);
            clock.backward(Stage::Norm);
            linear::backward_weight(dq, h, &mut g[at.q.clone()], c);
            linear::backward_weight(dk, h, &mut g[at.k.clone()], c);
            linear::backward_weight(dv, h, &mut g[at.v.clone()], c);
            for signal in &at.signals {
                let gradient = own(signal.extra).expect("every signal of a layer has room for its gradient");
                linear::backward_weight(gradient, h, &mut g[signal.weight.clone()], c);
                if let Some(bias) = &signal.bias {
                    linear::backward_bias(gradient, &mut g[bias.clone()]);
                }
            }
            clock.backward(Stage::Projections);
        }
        embedding::backward(ids, dx, &mut g[places.embedding.clone()], c, groups);
        clock.backward(Stage::Embedding);
        Ok(())
    }
}
