//! Gate factors, key weights and decays of one batch row, for a call of T positions or for one token.
//!
//! Each gate continues from the running sum of the previous positions, which advances to the last position of the row.

use crate::layer::HeadPlan;
use crate::parts::decay::Decay;
use crate::parts::denominator::position::key_weight;
use crate::parts::gate::{InGate, OutGate, PostGate};
use crate::{AuxKind, Inputs, Shape};

/// One batch row of a call.
#[derive(Clone, Copy)]
pub(crate) struct GateInputs<'a> {
    pub inputs: &'a Inputs<'a, f32>,
    pub shape: Shape,
    pub b: usize,
    /// Positions before the call.
    pub before: usize,
}

impl GateInputs<'_> {
    /// I of kv head g, into `factors` [T].
    pub fn input_gate(&self, gate: &InGate, g: usize, factors: &mut [f32], sum: &mut f64) {
        self.logits(AuxKind::InGate, self.shape.kv_heads, g, factors);
        self.by_length(factors.len(), sum, |range, sum| gate.forward(&mut factors[range], sum));
    }

    /// O of head h, into `factors` [T].
    pub fn output_gate(&self, gate: &OutGate, h: usize, factors: &mut [f32], sum: &mut f64) {
        self.logits(AuxKind::OutGate, self.shape.heads, h, factors);
        self.by_length(factors.len(), sum, |range, sum| gate.forward(&mut factors[range], sum));
    }

    /// P of head h, into `factors` [T]; `out` is O. Gates per channel are computed by [`GateInputs::post_channels`].
    pub fn post_gate(&self, gate: &PostGate, h: usize, out: &[f32], factors: &mut [f32], sum: &mut f64) {
        match gate {
            PostGate::Shared(_) => factors.copy_from_slice(out),
            gate if gate.by_channel() => {}
            gate => {
                self.logits(AuxKind::PostGate, self.shape.heads, h, factors);
                self.by_length(factors.len(), sum, |range, sum| gate.forward(&mut factors[range], sum));
            }
        }
    }

    /// P per channel of one position, from the logits [e], into `factors` [e].
    pub fn post_channels(gate: &PostGate, logits: &[f32], factors: &mut [f32]) {
        factors.copy_from_slice(logits);
        gate.forward(factors, &mut 0.0);
    }

    /// I·κ of head h, into `weights` [T]; `input` is I.
    pub fn key_weights(&self, head: &HeadPlan, h: usize, input: &[f32], weights: &mut [f32]) {
        match &head.variant.in_gate {
            Some(_) => weights.copy_from_slice(input),
            None => weights.fill(1.0),
        }
        if head.variant.denominator.key_side() {
            let m = self.inputs.aux(AuxKind::NormConst)[h];
            let count = |t: usize| head.variant.visible(self.before + t) as f32;
            weights.iter_mut().enumerate().for_each(|(t, weight)| *weight *= key_weight(m, count(t)));
        }
    }

    /// c of head h [T], or of one of its channels; `logits` [T] is scratch memory.
    pub fn decay(&self, (head, h, channel): (&HeadPlan, usize, usize), logits: &mut [f32], c: &mut [f64], sum: &mut f64) {
        let Some(decay) = &head.variant.decay else { return };
        let channels = if Decay::by_channel(decay) { self.shape.d } else { 1 };
        if decay.has_logits() {
            self.logits(AuxKind::DecayGate, self.shape.heads * channels, h * channels + channel, logits);
        }
        let params = head.variant.decay_params(self.inputs, h);
        self.by_length(c.len(), sum, |range, sum| decay.forward(&logits[range.clone()], params, &mut c[range], sum));
    }

    /// One column of logits [B, T, columns], into `out` [T].
    fn logits(&self, aux: AuxKind, columns: usize, column: usize, out: &mut [f32]) {
        gather(self.inputs.aux(aux), self.b, columns, column, out);
    }

    /// Runs f on the positions of the row, then on those after its length, which change no sum.
    fn by_length(&self, time: usize, sum: &mut f64, mut f: impl FnMut(std::ops::Range<usize>, &mut f64)) {
        let len = self.inputs.length(self.b, &self.shape);
        f(0..len, sum);
        f(len..time, &mut sum.clone());
    }
}

/// Column `column` of logits [B, T, columns] in batch row b, into `out` [T].
pub(crate) fn gather(logits: &[f32], b: usize, columns: usize, column: usize, out: &mut [f32]) {
    let time = out.len();
    for (t, out) in out.iter_mut().enumerate() {
        *out = logits[(b * time + t) * columns + column];
    }
}
