//! Values of a token that all state groups read: angles, norms of q and k, gates and decays. [`StepState`] contains the values from which they continue:
//! position, last inputs of the short convolution, running sums of gates and decays.

use crate::layer::{GateInputs, HeadPlan, QkvTensor, RowSources, channels_last};
use crate::parts::gate::PostGate;
use crate::parts::qk_norm::QkNorm;
use crate::{AuxKind, Error, Inputs, Layer, Shape};
use termwise_kernels::buffer::resize;
use termwise_kernels::simd::{Simd, Task, dispatch};

/// Values between tokens, in addition to recurrent states and caches. Everything is zero before the first position.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StepState {
    /// Positions seen, [B].
    pub positions: Vec<usize>,
    /// The last width − 1 inputs of the short convolution over q, k and v, [B, heads, width − 1, dimension], oldest first.
    pub tails: [Vec<f32>; 3],
    /// Running sums of the input gates, [B, G].
    pub in_gate: Vec<f64>,
    /// Running sums of the output gates, [B, H].
    pub out_gate: Vec<f64>,
    /// Running sums of the post gates, [B, H].
    pub post_gate: Vec<f64>,
    /// Running sums of the decays, [B, H], or [B, H, d] per channel.
    pub decay: Vec<f64>,
    /// c of the last position, [B, H] or [B, H, d]: memories with a decay refer to it.
    pub log_decay: Vec<f64>,
    /// Bound of |x| over all scores so far, [B, H].
    pub scores: Vec<f32>,
    /// Width of the short convolution, 0 for none.
    pub width: usize,
}

impl StepState {
    /// Before the first position.
    pub fn new(layer: &Layer, shape: &Shape) -> Result<StepState, Error> {
        let Shape { batch, heads: h, kv_heads: g, .. } = *shape;
        let width = layer.taps();
        let mut new = StepState { width, ..StepState::default() };
        resize(&mut new.positions, batch)?;
        for (tail, channels) in new.tails.iter_mut().zip(shape.widths()) {
            resize(tail, batch * channels * width.saturating_sub(1))?;
        }
        resize(&mut new.in_gate, batch * g)?;
        let channels = layer.decay_channels();
        for (sums, width) in [(&mut new.out_gate, 1), (&mut new.post_gate, 1), (&mut new.decay, channels), (&mut new.log_decay, channels)] {
            resize(sums, batch * h * width)?;
        }
        resize(&mut new.scores, batch * h)?;
        Ok(new)
    }

    /// Resets to before the first position.
    pub fn clear(&mut self) {
        self.positions.fill(0);
        self.tails.iter_mut().for_each(|tail| tail.fill(0.0));
        for sums in [&mut self.in_gate, &mut self.out_gate, &mut self.post_gate, &mut self.decay, &mut self.log_decay] {
            sums.fill(0.0);
        }
        self.scores.fill(0.0);
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        let narrow = self.tails.iter().map(Vec::len).sum::<usize>() + self.scores.len();
        let wide = [&self.in_gate, &self.out_gate, &self.post_gate, &self.decay, &self.log_decay];
        size_of::<usize>() * self.positions.len() + 4 * narrow + 8 * wide.map(Vec::len).iter().sum::<usize>()
    }

    /// Advances by one token: its inputs enter the tails, positions increase.
    pub fn advance(&mut self, inputs: &Inputs<f32>, shape: &Shape) {
        for b in (0..shape.batch).filter(|&b| inputs.length(b, shape) > 0) {
            for (which, [heads, dim]) in shape.rows_of_heads().into_iter().enumerate() {
                self.keep_tail(which, b, [heads, dim], std::iter::once(inputs.x[which].row(b, heads * dim)));
            }
            self.positions[b] += 1;
        }
    }

    /// Shifts the inputs of some positions of one batch row, [heads, dimension] each, into the tail of tensor `which` (0 q, 1 k, 2 v).
    pub fn keep_tail<'a>(&mut self, which: usize, row: usize, [heads, dim]: [usize; 2], inputs: impl Iterator<Item = &'a [f32]>) {
        let size = self.width.saturating_sub(1) * dim;
        if size == 0 {
            return;
        }
        let tail = &mut self.tails[which][row * heads * size..][..heads * size];
        for x in inputs {
            for (tail, x) in tail.chunks_exact_mut(size).zip(x.chunks_exact(dim)) {
                tail.copy_within(dim.., 0);
                tail[size - dim..].copy_from_slice(x);
            }
        }
    }
}

/// Computed once per token, before the state groups.
#[derive(Clone, Debug)]
pub(crate) struct TokenParams {
    /// Angles [B, pairs], empty without RoPE.
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    /// Filters of the short convolution over q, k and v, channel last [heads, w, dimension]; empty without a convolution.
    pub taps: [Vec<f32>; 3],
    /// q and k after their norm [sources, B, channels]; empty without a norm.
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

impl TokenParams {
    pub fn new(layer: &Layer, shape: &Shape) -> Result<TokenParams, Error> {
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
        Ok(TokenParams {
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

impl TokenParams {
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
            if layer.head_plans().iter().any(HeadPlan::has_gates) {
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
        let tensors = [(QkvTensor::Q, AuxKind::QNorm), (QkvTensor::K, AuxKind::KNorm)];
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::numbers;

    #[test]
    fn a_tail_contains_the_last_inputs_of_each_head() {
        let shape = Shape { batch: 2, time: 1, heads: 2, kv_heads: 2, d: 3, e: 2 };
        let layer = Layer::new(2, 2, 3).value_dim(2).variant("exp rope=off conv=3").expect("possible");
        let mut steps = StepState::new(&layer, &shape).expect("memory");
        let x: Vec<f32> = numbers(8 * 4, 1).into_iter().map(|x| x as f32).collect();
        steps.keep_tail(2, 1, [2, 2], x[..6 * 4].chunks_exact(4));
        steps.keep_tail(2, 1, [2, 2], x[6 * 4..].chunks_exact(4));
        let row = |t: usize, head: usize| &x[t * 4 + head * 2..][..2];
        assert_eq!(steps.tails[2][8..], [row(6, 0), row(7, 0), row(6, 1), row(7, 1)].concat());
        assert!(steps.tails[2][..8].iter().all(|x| *x == 0.0));
    }
}
