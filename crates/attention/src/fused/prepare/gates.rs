//! Gates and decays: from their logits over time to factors, and back.

use rayon::prelude::*;

use crate::fused::call::Call;
use crate::fused::gradients::TileGrads;
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::{CallPlan, HeadPlan};
use crate::layer::{GateInputs, gather};
use crate::parts::denominator::position::{key_weight, key_weight_slope};
use crate::parts::gate::PostGate;
use crate::{AuxKind, Buffer, Error, Grads, Inputs, Shape, Variant};
use termwise_kernels::TILE;
use termwise_kernels::buffer::resize;
use termwise_kernels::disjoint::Blocks;
use termwise_kernels::score_rows::Rescale;

scratch_memory! {
    /// Gate factors, key weights and accumulated log decays.
    GateScratch {
        /// Factors of the input gate [B, G, T].
        in_gate: Buffer,
        /// Factors of the output gate and of the post gate [N, T].
        out_gate: Buffer,
        post_gate: Buffer,
        /// Factors of post gates per channel [B, T, H, e].
        post_channels: Buffer,
        /// Weights of keys [N, Tp].
        key_weights: Buffer,
        /// c of the decay [N, Tp], and per channel [N, Tp, d].
        decay: Vec<f64>,
        channel_decay: Vec<f64>,
        /// Logits of one gate of each head [N, T].
        logits: Buffer,
        /// Running sums at the last position before the call, then at its end.
        sums: GateSums,
    }
}

scratch_memory! {
    /// Running sums of cumulative gates and of decays; zero at the start of a sequence.
    GateSums {
        /// [B, G]
        in_gate: Vec<f64>,
        /// [N]
        out_gate: Vec<f64>,
        post_gate: Vec<f64>,
        /// [N], or [N, d] with a decay per channel.
        decay: Vec<f64>,
    }
}

scratch_memory! {
    /// Gradients of gate factors, which become those of their logits.
    GateGrads {
        /// Of the input gate [N, T], once per head.
        din: Buffer,
        /// Of the output gate and of the post gate [N, T], from the epilogue.
        dout: Buffer,
        dpost: Buffer,
        /// Of post gates per channel [N, T, e], from the epilogue.
        dpost_channels: Buffer,
        /// Of the logits of the decay [N, T].
        ddecay_logits: Buffer,
        /// Of m_h and of decay rates [N].
        dconst: Buffer,
        drate: Buffer,
    }
}

impl GateScratch {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let (s, n, gates) = (&l.shape, l.head_count(), l.has_gates() as usize);
        let sums = &mut self.sums;
        let lens = [s.batch * s.kv_heads, n, n, n * l.layer.decay_channels()];
        for (sums, len) in [&mut sums.in_gate, &mut sums.out_gate, &mut sums.post_gate, &mut sums.decay].into_iter().zip(lens) {
            resize(sums, len)?;
            sums.fill(0.0);
        }
        self.in_gate.ensure(gates * s.batch * s.kv_heads * s.time)?;
        self.out_gate.ensure(gates * n * s.time)?;
        self.post_gate.ensure(gates * n * s.time)?;
        self.post_channels.ensure(l.has_post_channels() as usize * n * s.time * s.e)?;
        self.key_weights.ensure(gates * n * l.tp())?;
        resize(&mut self.decay, gates * n * l.tp())?;
        if l.layer.decays_by_channel() {
            resize(&mut self.channel_decay, n * l.tp() * s.d)?;
        }
        Ok(self.logits.ensure(gates * n * s.time)?)
    }
}

impl GateGrads {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let (s, n, gates) = (&l.shape, l.head_count(), l.has_gates() as usize);
        for buffer in [&mut self.din, &mut self.dout, &mut self.dpost, &mut self.ddecay_logits] {
            buffer.ensure(gates * n * s.time)?;
        }
        self.dpost_channels.ensure(l.has_post_channels() as usize * n * s.time * s.e)?;
        self.dconst.ensure(gates * n)?;
        Ok(self.drate.ensure(gates * n)?)
    }
}

/// Factors from gates, and parameters of the norm; empty slices if a variant has none.
#[derive(Clone, Copy)]
pub struct GateFactors<'a> {
    /// O and P [N, T]
    pub out: &'a [f32],
    pub post: &'a [f32],
    /// P of post gates per channel [B, T, H, e]
    pub post_channels: &'a [f32],
    /// b of sums with a sink [H]
    sinks: &'a [f32],
    /// I·κ [N, Tp]
    key_weights: &'a [f32],
    /// c [N, Tp]
    pub decay: &'a [f64],
    /// c of the last position before the first, [N].
    pub log_decay_before: &'a [f64],
    /// Positions before the first of each batch row.
    pub positions: &'a [usize],
    pub norm_weight: &'a [f32],
    pub norm_bias: &'a [f32],
}

impl<'a> GateFactors<'a> {
    /// Of a call whose factors have been computed.
    pub fn new(call: &Call<'a>, factors: &'a GateScratch) -> GateFactors<'a> {
        let (inputs, initial) = (call.inputs, call.initial);
        GateFactors {
            out: &factors.out_gate,
            post: &factors.post_gate,
            post_channels: &factors.post_channels,
            sinks: inputs.get(AuxKind::Sink).unwrap_or_default(),
            key_weights: &factors.key_weights,
            decay: &factors.decay,
            log_decay_before: &initial.log_decay,
            positions: &initial.positions,
            norm_weight: inputs.get(AuxKind::NormWeight).unwrap_or_default(),
            norm_bias: inputs.get(AuxKind::NormBias).unwrap_or_default(),
        }
    }

    /// e^{b−ρ} of a sum with a sink, otherwise 0.
    #[inline(always)]
    pub fn scaled_sink(&self, variant: &Variant, h: usize, rho: f32) -> f32 {
        if variant.denominator.has_sink() { (self.sinks[h] - rho).exp() } else { 0.0 }
    }

    /// ρ before the first key. A sink acts like a key: the running maximum starts with it.
    #[inline(always)]
    pub fn first_rho(&self, head: &HeadPlan, h: usize) -> f32 {
        if head.rescale == Rescale::SubtractMax && head.variant.denominator.has_sink() { self.sinks[h] } else { head.rescale.start() }
    }

    /// b of a sum with a sink.
    pub fn sink(&self, variant: &Variant, h: usize) -> Option<f32> {
        variant.denominator.has_sink().then(|| self.sinks[h])
    }

    /// Positions of batch row b before the first of the call.
    pub fn positions_before(&self, b: usize) -> usize {
        self.positions[b]
    }

    /// Key weights of one tile of head n, in whole vectors.
    #[inline(always)]
    pub fn tile_weights(&self, plan: &CallPlan, h: usize, n: usize, tile: usize) -> Option<&'a [f32]> {
        plan.heads[h].weighs_keys.then(|| &self.key_weights[n * plan.tp() + tile * plan.tile..][..plan.pitch])
    }
}

/// c of the keys of one tile minus the first of them, in float32; and that first.
#[inline(always)]
pub fn decay_columns(decay: &[f64], columns: &mut [f32; TILE]) -> f64 {
    let base = decay[0];
    for (column, c) in columns.iter_mut().zip(decay) {
        *column = (c - base) as f32;
    }
    base
}

/// All factors of a call. The running sums move to the last position of each batch row.
pub fn forward(call: &Call, to: &mut GateScratch) {
    let (l, inputs, positions) = (call.plan, call.inputs, &call.initial.positions);
    let (s, tp, group) = (l.shape, l.tp(), l.shape.group());
    let GateScratch { in_gate, out_gate, post_gate, post_channels, key_weights, decay, channel_decay, logits, sums } = to;
    if l.has_post_channels() {
        post_channels_forward(l, inputs, post_channels);
    }
    let channels = l.layer.decay_channels();
    // One task per kv head of a batch row, with the heads of its group.
    let factors = in_gate.par_chunks_exact_mut(s.time).zip(out_gate.par_chunks_exact_mut(group * s.time));
    let factors = factors.zip(post_gate.par_chunks_exact_mut(group * s.time)).zip(key_weights.par_chunks_exact_mut(group * tp));
    let factors = factors.zip(decay.par_chunks_exact_mut(group * tp)).zip(logits.par_chunks_exact_mut(group * s.time));
    let GateSums { in_gate, out_gate, post_gate, decay } = sums;
    let sums = in_gate.par_iter_mut().zip(out_gate.par_chunks_exact_mut(group));
    let sums = sums.zip(post_gate.par_chunks_exact_mut(group)).zip(decay.par_chunks_exact_mut(group * channels));
    let sums =
        sums.zip(Blocks::pieces(if l.layer.decays_by_channel() { &mut channel_decay[..] } else { &mut [] }, s.batch * s.kv_heads).par());
    factors.zip(sums).enumerate().for_each(|(pair, (factors, sums))| {
        let (((((in_factors, out), post), key_weights), decay), logits) = factors;
        let ((((in_sum, out_sums), post_sums), decay_sums), mut channel_decay) = sums;
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        let row = GateInputs { inputs, shape: s, b, before: positions[b] };
        if let Some(gate) = (0..group).find_map(|i| l.heads[g * group + i].variant.in_gate.as_ref()) {
            row.input_gate(gate, g, in_factors, in_sum);
        }
        for i in 0..group {
            let (h, times) = (g * group + i, i * s.time..(i + 1) * s.time);
            let head = &l.heads[h];
            let (out, post, logits) = (&mut out[times.clone()], &mut post[times.clone()], &mut logits[times]);
            if let Some(gate) = &head.variant.out_gate {
                row.output_gate(gate, h, out, &mut out_sums[i]);
            }
            if let Some(gate) = &head.variant.post_gate {
                row.post_gate(gate, h, out, post, &mut post_sums[i]);
            }
            if head.weighs_keys {
                let (weights, padding) = key_weights[i * tp..(i + 1) * tp].split_at_mut(s.time);
                padding.fill(0.0);
                row.key_weights(head, h, in_factors, weights);
            }
            let (c, padding) = decay[i * tp..(i + 1) * tp].split_at_mut(s.time);
            if head.variant.decays_by_channel() {
                let all = &mut channel_decay.piece()[i * tp * s.d..(i + 1) * tp * s.d];
                for (channel, sum) in decay_sums[i * s.d..(i + 1) * s.d].iter_mut().enumerate() {
                    row.decay((head, h, channel), logits, c, sum);
                    all.iter_mut().skip(channel).step_by(s.d).zip(&*c).for_each(|(all, c)| *all = *c);
                }
            } else if head.variant.decays_by_head() {
                row.decay((head, h, 0), logits, c, &mut decay_sums[i]);
                padding.fill(c[s.time - 1]);
            }
        }
    });
}

/// Factors of post gates per channel [B, T, H, e], the layout of their logits.
fn post_channels_forward(l: &CallPlan, inputs: &Inputs<f32>, factors: &mut [f32]) {
    let Shape { heads, e, .. } = l.shape;
    let rows = factors.par_chunks_exact_mut(heads * e).zip(inputs.aux(AuxKind::PostGate).par_chunks_exact(heads * e));
    rows.with_min_len(16).for_each(|(row, logits)| {
        for (h, head) in l.heads.iter().enumerate() {
            if let Some(gate) = head.variant.post_gate.as_ref().filter(|gate| gate.by_channel()) {
                GateInputs::post_channels(gate, &logits[h * e..][..e], &mut row[h * e..][..e]);
            }
        }
    });
}

/// Adds the gradients of the logits of post gates per channel, from those of their factors [N, T, e].
fn post_channels_backward(l: &CallPlan, inputs: &Inputs<f32>, factors: &[f32], dfactors: &mut [f32], grads: &mut Grads<f32>) {
    let Shape { time, heads, e, .. } = l.shape;
    let logits = inputs.aux(AuxKind::PostGate);
    let dfactors_by_head = dfactors.par_chunks_exact_mut(time * e).enumerate();
    dfactors_by_head.for_each(|(n, dfactors)| {
        let Some(gate) = l.heads[n % heads].variant.post_gate.as_ref().filter(|gate| gate.by_channel()) else { return };
        for (t, dfactors) in dfactors.chunks_exact_mut(e).enumerate() {
            let at = ((n / heads * time + t) * heads + n % heads) * e;
            gate.backward(&logits[at..at + e], &factors[at..at + e], dfactors);
        }
    });
    grads.aux(AuxKind::PostGate).par_chunks_exact_mut(heads * e).with_min_len(16).enumerate().for_each(|(row, to)| {
        for h in (0..heads).filter(|&h| l.heads[h].variant.needs(AuxKind::PostGate)) {
            let from = &dfactors[((row / time * heads + h) * time + row % time) * e..][..e];
            to[h * e..][..e].iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    });
}

/// Adds the gradients of logits, of m_h and of decay rates, from those of factors, key weights and c.
pub fn backward(call: &Call, factors: &mut GateScratch, from: &mut TileGrads, own: &mut GateGrads, grads: &mut Grads<f32>) {
    let (l, inputs, positions) = (call.plan, call.inputs, &call.initial.positions);
    let (s, tp, n) = (l.shape, l.tp(), l.head_count());
    let GateGrads { din, dout, dpost, dpost_channels, ddecay_logits, dconst, drate } = own;
    let TileGrads { dkey_weights, ddecay_queries, ddecay_keys, .. } = from;
    let GateScratch { logits, in_gate, out_gate, post_gate, post_channels, .. } = factors;
    let own = din.par_chunks_exact_mut(s.time).zip(dout.par_chunks_exact_mut(s.time)).zip(dpost.par_chunks_exact_mut(s.time));
    let own = own.zip(ddecay_logits.par_chunks_exact_mut(s.time)).zip(logits.par_chunks_exact_mut(s.time)).zip(dconst.par_iter_mut());
    let own = own.zip(drate.par_iter_mut());
    own.zip(Blocks::pieces(ddecay_queries, n).par()).enumerate().for_each(|(n, (own, mut dc))| {
        let ((((((din, dout), dpost), ddecay_logits), logits), dconst), drate) = own;
        let (b, h, dc) = (n / s.heads, n % s.heads, dc.piece());
        let (head, len) = (&l.heads[h], inputs.length(b, &s));
        let pair = b * s.kv_heads + h / s.group();
        let times = n * s.time..(n + 1) * s.time;
        if let Some(gate) = &head.variant.out_gate {
            if matches!(head.variant.post_gate, Some(PostGate::Shared(_))) {
                dout.iter_mut().zip(&*dpost).for_each(|(d, p)| *d += *p);
            }
            gather(inputs.aux(AuxKind::OutGate), b, s.heads, h, logits);
            let (own, padding) = dout.split_at_mut(len);
            padding.fill(0.0);
            gate.backward(&logits[..len], &out_gate[times.clone()][..len], own);
        }
        if let Some(gate) = head.variant.post_gate.as_ref().filter(|gate| head.variant.needs(AuxKind::PostGate) && !gate.by_channel()) {
            gather(inputs.aux(AuxKind::PostGate), b, s.heads, h, logits);
            gate.backward(logits, &post_gate[times], dpost);
        }
        if head.weighs_keys {
            // No query sees padding: its gradients were not written.
            let in_factors = &in_gate[pair * s.time..][..s.time];
            let in_factor = |t: usize| if head.variant.in_gate.is_some() { in_factors[t] } else { 1.0 };
            din[len..].fill(0.0);
            din[..len].copy_from_slice(&dkey_weights[n * tp..][..len]);
            if head.variant.denominator.key_side() {
                let m = inputs.aux(AuxKind::NormConst)[h];
                let mut dm = 0.0;
                for (t, d) in din[..len].iter_mut().enumerate() {
                    let count = head.variant.visible(positions[b] + t) as f32;
                    let weight = key_weight(m, count);
                    dm += (*d * in_factor(t)) as f64 * key_weight_slope(m, count, weight) as f64;
                    *d *= weight;
                }
                *dconst = dm as f32;
            }
            if let Some(gate) = &head.variant.in_gate {
                gather(inputs.aux(AuxKind::InGate), b, s.kv_heads, h / s.group(), logits);
                gate.backward(logits, in_factors, din);
            }
        }
        if let Some(decay) = head.variant.decay.as_ref().filter(|decay| !decay.by_channel()) {
            dc.iter_mut().zip(&ddecay_keys[n * tp..]).for_each(|(d, keys)| *d += *keys);
            if decay.has_logits() {
                gather(inputs.aux(AuxKind::DecayGate), b, s.heads, h, logits);
            }
            *drate = decay.backward(logits, head.variant.decay_params(inputs, h), &dc[..s.time], ddecay_logits) as f32;
        }
    });
    let head_of = |h: usize| h;
    let kv_of = |h: usize| h / s.group();
    scatter(l, grads, AuxKind::OutGate, dout, s.heads, head_of);
    match l.has_post_channels() {
        false => scatter(l, grads, AuxKind::PostGate, dpost, s.heads, head_of),
        true => post_channels_backward(l, inputs, post_channels, dpost_channels, grads),
    }
    scatter(l, grads, AuxKind::InGate, din, s.kv_heads, kv_of);
    if !l.layer.decays_by_channel() {
        scatter(l, grads, AuxKind::DecayGate, ddecay_logits, s.heads, head_of);
    }
    for n in 0..l.head_count() {
        let h = n % s.heads;
        if l.heads[h].variant.denominator.key_side() {
            grads.aux(AuxKind::NormConst)[h] += dconst[n];
        }
        if l.heads[h].variant.needs(AuxKind::DecayRate) && !l.heads[h].variant.decays_by_channel() {
            grads.aux(AuxKind::DecayRate)[h] += drate[n];
        }
    }
}

/// Adds `from` [N, T] to the gradient of logits [B, T, columns], of the heads that have them.
fn scatter(l: &CallPlan, grads: &mut Grads<f32>, aux: AuxKind, from: &[f32], columns: usize, column: impl Fn(usize) -> usize + Sync) {
    let s = l.shape;
    if !l.heads.iter().any(|head| head.variant.needs(aux)) {
        return;
    }
    grads.aux(aux).par_chunks_exact_mut(columns).with_min_len(64).enumerate().for_each(|(row, to)| {
        let (b, t) = (row / s.time, row % s.time);
        for h in (0..s.heads).filter(|&h| l.heads[h].variant.needs(aux)) {
            to[column(h)] += from[(b * s.heads + h) * s.time + t];
        }
    });
}
