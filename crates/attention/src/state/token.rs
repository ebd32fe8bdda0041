//! What a token is before it meets the memory: angles, convolutions, gates and decays, each going on from the token before.

use crate::buffer::resize;
use crate::parts::denominator::position::key_weight;
use crate::parts::gate::PostGate;
use crate::state::step_state::StepState;
use crate::{Error, Extra, Inputs, Layer, Shape};

/// What all state groups of a step read, computed before them: angles, filtered inputs, gates.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    /// Angles [B, pairs], empty without RoPE.
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    /// q, k and v after the short convolution, empty without.
    pub filtered: [Vec<f32>; 3],
    /// q and k after their norm, [sources, B, channels], empty without.
    pub normed: [Vec<f32>; 2],
    /// O and P [B, H].
    pub out: Vec<f32>,
    pub post: Vec<f32>,
    /// P of post gates by channel [B, H, e].
    pub post_channels: Vec<f32>,
    /// I [B, G].
    pub in_gate: Vec<f32>,
    /// I·κ [B, H].
    pub key_weights: Vec<f32>,
    /// m_t [B, H], or [B, H, d] by channel.
    pub decay: Vec<f32>,
}

impl Token {
    pub fn new(layer: &Layer, shape: &Shape) -> Result<Token, Error> {
        let Shape { batch, heads: h, kv_heads: g, e, .. } = *shape;
        let by_channel = layer.heads().iter().any(|variant| variant.post_gate.as_ref().is_some_and(PostGate::by_channel));
        let of = |n: usize, value: f32| -> Result<Vec<f32>, Error> {
            let mut values = Vec::new();
            resize(&mut values, batch * n)?;
            values.fill(value);
            Ok(values)
        };
        let half = layer.rotary_pairs();
        let (sources, [all_q, all_k, _]) = (layer.norm_sources().count(), shape.widths());
        let [q, k, v] = shape.widths().map(|channels| if layer.taps() > 0 { channels } else { 0 });
        Ok(Token {
            cos: of(half, 0.0)?,
            sin: of(half, 0.0)?,
            filtered: [of(q, 0.0)?, of(k, 0.0)?, of(v, 0.0)?],
            normed: [of(sources * all_q, 0.0)?, of(sources * all_k, 0.0)?],
            out: of(h, 1.0)?,
            post: of(h, 1.0)?,
            post_channels: of(if by_channel { h * e } else { 0 }, 1.0)?,
            in_gate: of(g, 1.0)?,
            key_weights: of(h, 1.0)?,
            decay: of(h * layer.decay_channels(), 1.0)?,
        })
    }
}

impl Token {
    /// Angles, convolutions, gates and decays of this token.
    pub fn prepare(&mut self, layer: &Layer, shape: &Shape, inputs: &Inputs<f32>, steps: &mut StepState) {
        let Shape { batch, heads: h, kv_heads: g, e, .. } = *shape;
        let (token, heads) = (self, layer.heads());
        for b in (0..batch).filter(|&b| inputs.length(b, shape) > 0) {
            if let Some(rope) = layer.rope().filter(|_| !token.cos.is_empty()) {
                let half = token.cos.len() / batch;
                rope.angles(steps.positions[b], &mut token.cos[b * half..][..half], &mut token.sin[b * half..][..half]);
            }
            if steps.width > 0 {
                for (which, (extra, channels)) in [Extra::ConvQ, Extra::ConvK, Extra::ConvV].into_iter().zip(shape.widths()).enumerate() {
                    let filtered = &mut token.filtered[which][b * channels..][..channels];
                    steps.convolve(which, b, inputs.x[which].row(b, channels), inputs.extra(extra), filtered);
                }
            }
            if let Some(norm) = layer.qk_norm() {
                for (which, (extra, channels)) in [Extra::QNorm, Extra::KNorm].into_iter().zip(shape.widths()).enumerate() {
                    let weight = if norm.has_weight() { inputs.extra(extra) } else { &[] };
                    for (source, conv) in layer.norm_sources().enumerate() {
                        let from = if conv { &token.filtered[which][b * channels..] } else { inputs.x[which].row(b, channels) };
                        let normed = &mut token.normed[which][(source * batch + b) * channels..][..channels];
                        normed.copy_from_slice(&from[..channels]);
                        normed.chunks_exact_mut(if norm.over_heads() { channels } else { shape.d }).for_each(|x| norm.forward(x, weight));
                    }
                }
            }
            for kv_head in 0..g {
                let at = b * g + kv_head;
                let group = &heads[kv_head * (h / g)..(kv_head + 1) * (h / g)];
                if let Some(gate) = group.iter().find_map(|variant| variant.in_gate.as_ref()) {
                    token.in_gate[at] = inputs.extra(Extra::InGate)[at];
                    gate.forward(&mut token.in_gate[at..=at], &mut steps.in_gate[at]);
                }
            }
            for (head, variant) in heads.iter().enumerate() {
                let at = b * h + head;
                if let Some(gate) = &variant.out_gate {
                    token.out[at] = inputs.extra(Extra::OutGate)[at];
                    gate.forward(&mut token.out[at..=at], &mut steps.out_gate[at]);
                }
                match &variant.post_gate {
                    Some(PostGate::Shared(_)) => token.post[at] = token.out[at],
                    Some(gate) => {
                        let (factors, dim) = if gate.by_channel() { (&mut token.post_channels, e) } else { (&mut token.post, 1) };
                        let factors = &mut factors[at * dim..][..dim];
                        factors.copy_from_slice(&inputs.extra(Extra::PostGate)[at * dim..][..dim]);
                        gate.forward(factors, &mut steps.post_gate[at]);
                    }
                    None => {}
                }
                if let Some(decay) = &variant.decay {
                    let width = if decay.by_channel() { shape.d } else { 1 };
                    for at in at * width..(at + 1) * width {
                        let mut c = [0.0];
                        let logits = if decay.has_logits() { &inputs.extra(Extra::DecayGate)[at..=at] } else { &[] };
                        decay.forward(logits, variant.decay_params(inputs, head), &mut c, &mut steps.decay[at]);
                        token.decay[at] = (c[0] - steps.log_decay[at]).exp() as f32;
                        steps.log_decay[at] = c[0];
                    }
                }
                token.key_weights[at] = if variant.in_gate.is_some() { token.in_gate[b * g + head / (h / g)] } else { 1.0 };
                if variant.denominator.key_side() {
                    token.key_weights[at] *= key_weight(inputs.extra(Extra::NormConst)[head], variant.visible(steps.positions[b]) as f32);
                }
            }
        }
    }
}
