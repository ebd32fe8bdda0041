//! Values of a token that all state groups read: angles, norms of q and k, gates and decays, each continued from the previous token.

use crate::layer::{GateInputs, Head, RowSources, Tensor, channels_last};
use crate::parts::gate::PostGate;
use crate::parts::qk_norm::QkNorm;
use crate::state::step_state::StepState;
use crate::{AuxKind, Error, Inputs, Layer, Shape};
use termwise_kernels::buffer::resize;
use termwise_kernels::simd::{Simd, Task, dispatch};

/// Computed once per token, before the state groups.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    /// Angles [B, pairs], empty without RoPE.
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    /// Filters of the short convolution over q, k and v, channel last [heads, w, dimension]; empty without.
    pub taps: [Vec<f32>; 3],
    /// q and k after their norm, [sources, B, channels], empty without.
    pub normed: [Vec<f32>; 2],
    /// O and P [B, H].
    pub out: Vec<f32>,
    pub post: Vec<f32>,
    /// P of post gates per channel [B, H, e].
    pub post_channels: Vec<f32>,
    /// I [B, G].
    pub in_gate: Vec<f32>,
    /// I·κ [B, H].
    pub key_weights: Vec<f32>,
    /// m_t [B, H], or [B, H, d] per channel.
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
        let mut taps: [Vec<f32>; 3] = Default::default();
        for (taps, channels) in taps.iter_mut().zip(shape.widths()) {
            resize(taps, channels * layer.taps())?;
        }
        let (sources, [all_q, all_k, _]) = (layer.norm_sources().count(), shape.widths());
        Ok(Token {
            cos: of(half, 0.0)?,
            sin: of(half, 0.0)?,
            taps,
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
    /// Computes angles, norms, gates and decays of this token.
    pub fn prepare(&mut self, layer: &Layer, shape: &Shape, inputs: &Inputs<f32>, steps: &mut StepState) {
        if steps.width > 0 {
            for (i, (kind, dim)) in
                [(AuxKind::ConvQ, shape.d), (AuxKind::ConvK, shape.d), (AuxKind::ConvV, shape.e)].into_iter().enumerate()
            {
                channels_last(inputs.aux(kind), dim, steps.width, &mut self.taps[i]);
            }
        }
        for b in (0..shape.batch).filter(|&b| inputs.length(b, shape) > 0) {
            if let Some(rope) = layer.rope().filter(|_| !self.cos.is_empty()) {
                let pairs = self.cos.len() / shape.batch;
                rope.angles(steps.positions[b], &mut self.cos[b * pairs..][..pairs], &mut self.sin[b * pairs..][..pairs]);
            }
            if layer.head_plans().iter().any(Head::has_gates) {
                self.gates(layer, GateInputs { inputs, shape: *shape, b, before: steps.positions[b] }, steps);
            }
        }
        if let Some(norm) = layer.qk_norm() {
            let mut normed = std::mem::take(&mut self.normed);
            dispatch(NormRows { sources: self.rows(layer, shape, inputs, steps), norm, normed: &mut normed });
            self.normed = normed;
        }
    }

    /// The rows of this token. Norms of q and k must have been computed.
    pub fn rows<'a>(&'a self, layer: &'a Layer, shape: &Shape, inputs: &'a Inputs<'a, f32>, steps: &'a StepState) -> RowSources<'a> {
        let pairs = self.cos.len() / shape.batch;
        RowSources {
            layer,
            shape: *shape,
            inputs,
            pairs,
            width: steps.width,
            cos: &self.cos,
            sin: &self.sin,
            angle_stride: pairs,
            taps: self.taps.each_ref().map(|taps| &taps[..]),
            tails: steps.tails.each_ref().map(|tail| &tail[..]),
            normed: self.normed.each_ref().map(|rows| &rows[..]),
            positions: &steps.positions,
        }
    }

    /// Gates, key weights and decays of one batch row.
    fn gates(&mut self, layer: &Layer, row: GateInputs, steps: &mut StepState) {
        let (Shape { heads, kv_heads, d, e, .. }, b, group) = (row.shape, row.b, row.shape.group());
        for (h, head) in layer.head_plans().iter().enumerate() {
            let (variant, at, pair) = (&head.variant, b * heads + h, b * kv_heads + h / group);
            if h % group == 0
                && let Some(gate) = layer.heads()[h..h + group].iter().find_map(|variant| variant.in_gate.as_ref())
            {
                row.input_gate(gate, h / group, &mut self.in_gate[pair..=pair], &mut steps.in_gate[pair]);
            }
            if let Some(gate) = &variant.out_gate {
                row.output_gate(gate, h, &mut self.out[at..=at], &mut steps.out_gate[at]);
            }
            match &variant.post_gate {
                Some(gate) if gate.by_channel() => {
                    let logits = &row.inputs.aux(AuxKind::PostGate)[at * e..][..e];
                    GateInputs::post_channels(gate, logits, &mut self.post_channels[at * e..][..e]);
                }
                Some(gate) => row.post_gate(gate, h, &self.out[at..=at], &mut self.post[at..=at], &mut steps.post_gate[at]),
                None => {}
            }
            row.key_weights(head, h, &self.in_gate[pair..=pair], &mut self.key_weights[at..=at]);
            let channels = if variant.decays_by_channel() { d } else { usize::from(variant.decays_by_head()) };
            for channel in 0..channels {
                let (at, mut c) = (at * channels + channel, [0.0]);
                row.decay((head, h, channel), &mut [0.0], &mut c, &mut steps.decay[at]);
                self.decay[at] = (c[0] - steps.log_decay[at]).exp() as f32;
                steps.log_decay[at] = c[0];
            }
        }
    }
}

/// The norms of q and k of all batch rows, into `normed` [sources, B, heads·d].
struct NormRows<'a> {
    sources: RowSources<'a>,
    norm: &'a QkNorm,
    normed: &'a mut [Vec<f32>; 2],
}

impl Task for NormRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let NormRows { sources: rows, norm, normed } = self;
        let tensors = [(Tensor::Q, AuxKind::QNorm), (Tensor::K, AuxKind::KNorm)];
        for ((normed, (tensor, kind)), width) in normed.iter_mut().zip(tensors).zip(rows.shape.widths()) {
            let weight = if norm.has_weight() { rows.inputs.aux(kind) } else { &[] };
            for (source, conv) in rows.layer.norm_sources().enumerate() {
                for b in (0..rows.shape.batch).filter(|&b| rows.inputs.length(b, &rows.shape) > 0) {
                    let row = &mut normed[(source * rows.shape.batch + b) * width..][..width];
                    rows.normed_row(simd, (tensor, conv), (norm, weight), [b, 0], row);
                }
            }
        }
    }
}
