//! Step 3: the gates of a head, and their gradients.

use crate::epilogue::Post;
use crate::naive::add_to;
use crate::naive::head_slice::HeadSlice;
use crate::parts::denominator::position::{key_weight, key_weight_slope};
use crate::parts::gate::PostGate;
use crate::{AuxKind, Grads, Inputs, Real, Variant};

/// Factors per position, or their gradients.
pub(crate) struct Gates<R> {
    /// I_s
    pub input: Vec<R>,
    /// O_t
    pub output: Vec<R>,
    /// P_t: one per position, or [length, e].
    pub post: Vec<R>,
    /// Whether the post gate is per channel.
    pub per_channel: bool,
    e: usize,
    /// κ_s of the `position` denominator; 1 for other denominators.
    pub key_weights: Vec<R>,
    /// β_t of the delta rule; empty without it.
    pub beta: Vec<R>,
}

impl<R: Real> Gates<R> {
    pub fn new(variant: &Variant, inputs: &Inputs<R>, query: HeadSlice, key: HeadSlice, e: usize) -> Gates<R> {
        let ones = vec![R::one(); query.length];
        let mut input = ones.clone();
        if let Some(gate) = &variant.in_gate {
            input = key.logits(inputs, AuxKind::InGate, 1);
            gate.forward(&mut input, &mut 0.0);
        }
        let mut output = ones.clone();
        if let Some(gate) = &variant.out_gate {
            output = query.logits(inputs, AuxKind::OutGate, 1);
            gate.forward(&mut output, &mut 0.0);
        }
        let per_channel = variant.post_gate.as_ref().is_some_and(PostGate::by_channel);
        let mut post = ones.clone();
        if let Some(gate) = &variant.post_gate {
            post = match variant.needs(AuxKind::PostGate) {
                true => query.logits(inputs, AuxKind::PostGate, if per_channel { e } else { 1 }),
                false => output.clone(),
            };
            gate.forward(&mut post, &mut 0.0);
        }
        let mut key_weights = ones;
        if variant.denominator.key_side() {
            let m = inputs.aux(AuxKind::NormConst)[query.head];
            key_weights = (0..query.length).map(|s| key_weight(m, count(variant, s))).collect();
        }
        let beta = match variant.write {
            Some(delta) => key.logits(inputs, AuxKind::Beta, 1).into_iter().map(|logit| delta.beta(logit)).collect(),
            None => Vec::new(),
        };
        Gates { input, output, post, per_channel, e, key_weights, beta }
    }

    /// Gradients of the same sizes, all zero.
    pub fn zeros(&self) -> Gates<R> {
        let zeros = |x: &[R]| vec![R::zero(); x.len()];
        Gates {
            input: zeros(&self.input),
            output: zeros(&self.output),
            post: zeros(&self.post),
            per_channel: self.per_channel,
            e: self.e,
            key_weights: zeros(&self.key_weights),
            beta: zeros(&self.beta),
        }
    }

    /// P_t for the epilogue.
    pub fn post_row(&self, t: usize) -> Post<'_, R> {
        if self.per_channel { Post::Each(&self.post[t * self.e..][..self.e]) } else { Post::One(self.post[t]) }
    }

    /// From the gradients `g` of the factors to those of the logits.
    pub fn backward(
        &self,
        variant: &Variant,
        inputs: &Inputs<R>,
        (query, key): (HeadSlice, HeadSlice),
        mut g: Gates<R>,
        grads: &mut Grads<R>,
    ) {
        match &variant.post_gate {
            Some(PostGate::Shared(_)) => g.output.iter_mut().zip(&g.post).for_each(|(out, &post)| *out += post),
            Some(gate) => {
                let dim = if self.per_channel { self.e } else { 1 };
                gate.backward(&query.logits(inputs, AuxKind::PostGate, dim), &self.post, &mut g.post);
                query.add_logits(&g.post, AuxKind::PostGate, dim, grads);
            }
            None => {}
        }
        if let Some(gate) = &variant.out_gate {
            gate.backward(&query.logits(inputs, AuxKind::OutGate, 1), &self.output, &mut g.output);
            query.add_logits(&g.output, AuxKind::OutGate, 1, grads);
        }
        if let Some(gate) = &variant.in_gate {
            gate.backward(&key.logits(inputs, AuxKind::InGate, 1), &self.input, &mut g.input);
            key.add_logits(&g.input, AuxKind::InGate, 1, grads);
        }
        if let Some(delta) = variant.write {
            let logits = key.logits(inputs, AuxKind::Beta, 1);
            let dlogits: Vec<R> = logits.iter().zip(&g.beta).map(|(&logit, &dbeta)| dbeta * delta.slope(logit)).collect();
            key.add_logits(&dlogits, AuxKind::Beta, 1, grads);
        }
        if variant.denominator.key_side() {
            let m = inputs.aux(AuxKind::NormConst)[query.head];
            let slope = |s: usize| key_weight_slope(m, count(variant, s), self.key_weights[s]);
            let dm = g.key_weights.iter().enumerate().map(|(s, &dkey)| dkey * slope(s)).sum();
            add_to(grads, AuxKind::NormConst, query.head, &[dm]);
        }
    }
}

/// S_t
pub(crate) fn count<R: Real>(variant: &Variant, t: usize) -> R {
    R::of(variant.visible(t) as f64)
}
