//! What a token is before it meets the memory: angles, convolutions, gates and decays, each carried on from the token before.

use crate::parts::denominator::position::key_weight;
use crate::parts::gate::PostGate;
use crate::state::memory::State;
use crate::{Extra, Inputs, Shape, Variant};

/// What all units of a step read, computed before them: angles, filtered inputs, gates.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    /// Angles [B, d/2], empty without RoPE.
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    /// q, k and v after the short convolution, empty without.
    pub filtered: [Vec<f32>; 3],
    /// O and P [B, H].
    pub out: Vec<f32>,
    pub post: Vec<f32>,
    /// I [B, G].
    pub in_gate: Vec<f32>,
    /// I·κ [B, H].
    pub key_weights: Vec<f32>,
    /// m_t [B, H].
    pub decay: Vec<f32>,
    /// Learned a_n of each head, or empty.
    learned: Vec<f64>,
}

impl Token {
    pub fn new(heads: &[Variant], shape: &Shape) -> Token {
        let Shape { batch, heads: h, kv_heads: g, d, e, .. } = *shape;
        let half = if heads.iter().any(|variant| variant.rope) { d / 2 } else { 0 };
        let conv = heads.iter().any(|variant| variant.conv.is_some());
        let ones = |n: usize| vec![1.0; batch * n];
        Token {
            cos: vec![0.0; batch * half],
            sin: vec![0.0; batch * half],
            filtered: [h * d, g * d, g * e].map(|channels| vec![0.0; if conv { batch * channels } else { 0 }]),
            out: ones(h),
            post: ones(h),
            in_gate: ones(g),
            key_weights: ones(h),
            decay: ones(h),
            learned: vec![0.0; heads.iter().map(Variant::learned).max().unwrap_or(0)],
        }
    }
}

impl State {
    /// Learned coefficients, angles, convolutions, gates and decays of this token.
    pub(super) fn prepare(&mut self, inputs: &Inputs<f32>) {
        let Shape { batch, heads: h, kv_heads: g, d, e, .. } = self.shape;
        let (token, carry) = (&mut self.token, &mut self.carry);
        let count = token.learned.len();
        for (head, kernel) in self.kernels.iter_mut().enumerate().filter(|(head, _)| self.heads[*head].learned() > 0) {
            let own = &inputs.extra(Extra::Coefficients)[head * count..][..count];
            token.learned.iter_mut().zip(own).for_each(|(wide, &a)| *wide = a as f64);
            kernel.bind(&token.learned);
        }
        for b in (0..batch).filter(|&b| inputs.length(b, &self.shape) > 0) {
            let half = token.cos.len() / batch;
            if half > 0 {
                inputs.rope.angles(carry.positions[b], &mut token.cos[b * half..][..half], &mut token.sin[b * half..][..half]);
            }
            if carry.width > 0 {
                let sides = [(inputs.q, Extra::ConvQ, h * d), (inputs.k, Extra::ConvK, g * d), (inputs.v, Extra::ConvV, g * e)];
                for (which, (x, extra, channels)) in sides.into_iter().enumerate() {
                    let place = b * channels..(b + 1) * channels;
                    carry.convolve(which, b, &x[place.clone()], inputs.extra(extra), &mut token.filtered[which][place]);
                }
            }
            for kv_head in 0..g {
                let at = b * g + kv_head;
                let group = &self.heads[kv_head * (h / g)..(kv_head + 1) * (h / g)];
                if let Some(gate) = group.iter().find_map(|variant| variant.in_gate.as_ref()) {
                    token.in_gate[at] = inputs.extra(Extra::InGate)[at];
                    gate.forward(&mut token.in_gate[at..=at], &mut carry.in_gate[at]);
                }
            }
            for (head, variant) in self.heads.iter().enumerate() {
                let at = b * h + head;
                if let Some(gate) = &variant.out_gate {
                    token.out[at] = inputs.extra(Extra::OutGate)[at];
                    gate.forward(&mut token.out[at..=at], &mut carry.out_gate[at]);
                }
                if let Some(gate) = &variant.post_gate {
                    token.post[at] = match gate {
                        PostGate::Shared(_) => token.out[at],
                        PostGate::Sigmoid(_) => inputs.extra(Extra::PostGate)[at],
                    };
                    gate.forward(&mut token.post[at..=at], &mut carry.post_gate[at]);
                }
                if let Some(decay) = &variant.decay {
                    let mut c = [0.0];
                    decay.forward(&inputs.extra(Extra::DecayGate)[at..=at], &mut c, &mut carry.decay[at]);
                    token.decay[at] = (c[0] - carry.log_decay[at]).exp() as f32;
                    carry.log_decay[at] = c[0];
                }
                token.key_weights[at] = if variant.in_gate.is_some() { token.in_gate[b * g + head / (h / g)] } else { 1.0 };
                if variant.denominator.key_side() {
                    token.key_weights[at] *= key_weight(inputs.extra(Extra::NormConst)[head], (carry.positions[b] + 1) as f32);
                }
            }
        }
    }
}
