//! Gates and decays: from their logits over time to factors, and back.

use rayon::prelude::*;

use crate::epilogue::{Post, Row};
use crate::fused::plan::{Head, Layout};
use crate::fused::scratch::CallScratch;
use crate::kernels::TILE;
use crate::kernels::disjoint::Blocks;
use crate::kernels::score_rows::Rescale;
use crate::parts::denominator::position::{key_weight, key_weight_slope};
use crate::parts::gate::PostGate;
use crate::{Extra, Grads, Inputs, Shape, Variant};

/// Factors from gates, and parameters of the norm; empty slices where a variant has none.
#[derive(Clone, Copy)]
pub struct Gates<'a> {
    /// O and P [N, T]
    out: &'a [f32],
    post: &'a [f32],
    /// P of post gates by channel [B, T, H, e]
    post_channels: &'a [f32],
    /// b of sums with a sink [H]
    sinks: &'a [f32],
    /// I·κ [N, Tp]
    key_weights: &'a [f32],
    /// c [N, Tp]
    pub decay: &'a [f64],
    /// c of the last position before the first, [N].
    pub log_decay_before: &'a [f64],
    /// Positions before the first of each batch row.
    positions: &'a [usize],
    norm_weight: &'a [f32],
    norm_bias: &'a [f32],
}

impl<'a> Gates<'a> {
    /// Of a call whose factors have been computed.
    pub fn new(inputs: &Inputs<'a, f32>, w: &'a CallScratch) -> Gates<'a> {
        Gates {
            out: &w.out_gate,
            post: &w.post_gate,
            post_channels: &w.post_channels,
            sinks: inputs.get(Extra::Sink).unwrap_or_default(),
            key_weights: &w.key_weights,
            decay: &w.decay,
            log_decay_before: &w.initial.log_decay,
            positions: &w.initial.positions,
            norm_weight: inputs.get(Extra::NormWeight).unwrap_or_default(),
            norm_bias: inputs.get(Extra::NormBias).unwrap_or_default(),
        }
    }

    /// The epilogue's view of row t of head n = (b, h).
    #[inline(always)]
    pub fn row(&self, layout: &Layout, h: usize, n: usize, t: usize, z: f32, rho: f32) -> Row<'a, f32> {
        let variant = &layout.heads[h].variant;
        let at = n * layout.shape.time + t;
        Row {
            z,
            count: variant.visible(self.positions[n / layout.shape.heads] + t) as f32,
            rho,
            out: if variant.out_gate.is_some() { self.out[at] } else { 1.0 },
            post: match &variant.post_gate {
                Some(gate) if gate.by_channel() => {
                    let Shape { time, heads, e, .. } = layout.shape;
                    Post::Each(&self.post_channels[((n / heads * time + t) * heads + h) * e..][..e])
                }
                Some(_) => Post::One(self.post[at]),
                None => Post::One(1.0),
            },
            sink: self.scaled_sink(variant, h, rho),
            weight: if variant.norm.has_weight() { self.norm_weight } else { &[] },
            bias: if variant.norm.has_bias() { self.norm_bias } else { &[] },
        }
    }

    /// e^{b−ρ} of a sum with a sink, 0 elsewhere.
    #[inline(always)]
    pub fn scaled_sink(&self, variant: &Variant, h: usize, rho: f32) -> f32 {
        if variant.denominator.has_sink() { (self.sinks[h] - rho).exp() } else { 0.0 }
    }

    /// ρ before the first key. A sink is as if it were a key: the running maximum starts with it.
    #[inline(always)]
    pub fn first_rho(&self, head: &Head, h: usize) -> f32 {
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
    pub fn tile_weights(&self, layout: &Layout, h: usize, n: usize, tile: usize) -> Option<&'a [f32]> {
        layout.heads[h].weighs_keys.then(|| &self.key_weights[n * layout.tp() + tile * layout.tile..][..layout.pitch])
    }
}

/// c of the keys of one tile, less the first of them, in float32; and that first.
#[inline(always)]
pub fn decay_columns(decay: &[f64], columns: &mut [f32; TILE]) -> f64 {
    let base = decay[0];
    for (column, c) in columns.iter_mut().zip(decay) {
        *column = (c - base) as f32;
    }
    base
}

/// Column `head` of logits [B, T, heads] in batch row b, into `out` [T].
pub fn gather(logits: &[f32], b: usize, heads: usize, head: usize, out: &mut [f32]) {
    let time = out.len();
    for (t, out) in out.iter_mut().enumerate() {
        *out = logits[(b * time + t) * heads + head];
    }
}

/// All factors of a call, from the sums of the initial state on, which move to the last position that counts.
pub fn forward(l: &Layout, inputs: &Inputs<f32>, w: &mut CallScratch) {
    if !l.has_gates() {
        return;
    }
    let (s, tp, group) = (l.shape, l.tp(), l.shape.group());
    if l.has_post_channels() {
        post_channels_forward(l, inputs, &mut w.post_channels);
    }
    let CallScratch { in_gate, out_gate, post_gate, key_weights, decay, channel_decay, logits, initial, .. } = w;
    let channels = l.layer.decay_channels();
    let positions = &initial.positions;
    // One task for each kv head of a batch row, with the heads of its group.
    let factors = in_gate.par_chunks_exact_mut(s.time).zip(out_gate.par_chunks_exact_mut(group * s.time));
    let factors = factors.zip(post_gate.par_chunks_exact_mut(group * s.time)).zip(key_weights.par_chunks_exact_mut(group * tp));
    let factors = factors.zip(decay.par_chunks_exact_mut(group * tp)).zip(logits.par_chunks_exact_mut(group * s.time));
    let sums = initial.in_gate.par_iter_mut().zip(initial.out_gate.par_chunks_exact_mut(group));
    let sums = sums.zip(initial.post_gate.par_chunks_exact_mut(group)).zip(initial.decay.par_chunks_exact_mut(group * channels));
    let sums =
        sums.zip(Blocks::pieces(if l.layer.decays_by_channel() { &mut channel_decay[..] } else { &mut [] }, s.batch * s.kv_heads).par());
    factors.zip(sums).enumerate().for_each(|(pair, (factors, sums))| {
        let (((((in_factors, out), post), key_weights), decay), logits) = factors;
        let ((((in_sum, out_sums), post_sums), decay_sums), mut channel_decay) = sums;
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        let len = inputs.length(b, &s);
        if let Some(gate) = (0..group).find_map(|i| l.heads[g * group + i].variant.in_gate.as_ref()) {
            gather(inputs.extra(Extra::InGate), b, s.kv_heads, g, in_factors);
            by_length(len, s.time, in_sum, |range, sum| gate.forward(&mut in_factors[range], sum));
        }
        for i in 0..group {
            let head = &l.heads[g * group + i];
            let (h, times) = (g * group + i, i * s.time..(i + 1) * s.time);
            let (out, post, logits) = (&mut out[times.clone()], &mut post[times.clone()], &mut logits[times]);
            if let Some(gate) = &head.variant.out_gate {
                gather(inputs.extra(Extra::OutGate), b, s.heads, h, out);
                by_length(len, s.time, &mut out_sums[i], |range, sum| gate.forward(&mut out[range], sum));
            }
            match &head.variant.post_gate {
                Some(PostGate::Shared(_)) => post.copy_from_slice(out),
                Some(gate) if !gate.by_channel() => {
                    gather(inputs.extra(Extra::PostGate), b, s.heads, h, post);
                    by_length(len, s.time, &mut post_sums[i], |range, sum| gate.forward(&mut post[range], sum));
                }
                _ => {}
            }
            if head.weighs_keys {
                let (weights, padding) = key_weights[i * tp..(i + 1) * tp].split_at_mut(s.time);
                padding.fill(0.0);
                match &head.variant.in_gate {
                    Some(_) => weights.copy_from_slice(in_factors),
                    None => weights.fill(1.0),
                }
                if head.variant.denominator.key_side() {
                    let m = inputs.extra(Extra::NormConst)[h];
                    weights
                        .iter_mut()
                        .enumerate()
                        .for_each(|(t, weight)| *weight *= key_weight(m, head.variant.visible(positions[b] + t) as f32));
                }
            }
            if let Some(part) = &head.variant.decay {
                let (c, padding) = decay[i * tp..(i + 1) * tp].split_at_mut(s.time);
                let params = head.variant.decay_params(inputs, h);
                if part.by_channel() {
                    let all = &mut channel_decay.piece()[i * tp * s.d..(i + 1) * tp * s.d];
                    for (channel, sum) in decay_sums[i * s.d..(i + 1) * s.d].iter_mut().enumerate() {
                        if part.has_logits() {
                            gather(inputs.extra(Extra::DecayGate), b, s.heads * s.d, h * s.d + channel, logits);
                        }
                        by_length(len, s.time, sum, |range, sum| part.forward(&logits[range.clone()], params, &mut c[range], sum));
                        all.iter_mut().skip(channel).step_by(s.d).zip(&*c).for_each(|(all, c)| *all = *c);
                    }
                    continue;
                }
                if part.has_logits() {
                    gather(inputs.extra(Extra::DecayGate), b, s.heads, h, logits);
                }
                by_length(len, s.time, &mut decay_sums[i], |range, sum| part.forward(&logits[range.clone()], params, &mut c[range], sum));
                padding.fill(c[s.time - 1]);
            }
        }
    });
}

/// Factors of post gates by channel [B, T, H, e], which is how their logits lie.
fn post_channels_forward(l: &Layout, inputs: &Inputs<f32>, factors: &mut [f32]) {
    let Shape { heads, e, .. } = l.shape;
    let rows = factors.par_chunks_exact_mut(heads * e).zip(inputs.extra(Extra::PostGate).par_chunks_exact(heads * e));
    rows.with_min_len(16).for_each(|(row, logits)| {
        for (h, head) in l.heads.iter().enumerate() {
            if let Some(gate) = head.variant.post_gate.as_ref().filter(|gate| gate.by_channel()) {
                row[h * e..][..e].copy_from_slice(&logits[h * e..][..e]);
                gate.forward(&mut row[h * e..][..e], &mut 0.0);
            }
        }
    });
}

/// Adds the gradients of the logits of post gates by channel, from those of their factors [N, T, e].
fn post_channels_backward(l: &Layout, inputs: &Inputs<f32>, factors: &[f32], dfactors: &mut [f32], grads: &mut Grads<f32>) {
    let Shape { time, heads, e, .. } = l.shape;
    let logits = inputs.extra(Extra::PostGate);
    let dfactors_by_head = dfactors.par_chunks_exact_mut(time * e).enumerate();
    dfactors_by_head.for_each(|(n, dfactors)| {
        let Some(gate) = l.heads[n % heads].variant.post_gate.as_ref().filter(|gate| gate.by_channel()) else { return };
        for (t, dfactors) in dfactors.chunks_exact_mut(e).enumerate() {
            let at = ((n / heads * time + t) * heads + n % heads) * e;
            gate.backward(&logits[at..at + e], &factors[at..at + e], dfactors);
        }
    });
    grads.extra(Extra::PostGate).par_chunks_exact_mut(heads * e).with_min_len(16).enumerate().for_each(|(row, to)| {
        for h in (0..heads).filter(|&h| l.heads[h].variant.needs(Extra::PostGate)) {
            let from = &dfactors[((row / time * heads + h) * time + row % time) * e..][..e];
            to[h * e..][..e].iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    });
}

/// Runs f on the positions that count, then on those after them, which change no sum.
fn by_length(len: usize, time: usize, sum: &mut f64, mut f: impl FnMut(std::ops::Range<usize>, &mut f64)) {
    f(0..len, sum);
    f(len..time, &mut sum.clone());
}

/// Adds the gradients of logits and of m_h, from those of the factors.
pub fn backward(l: &Layout, inputs: &Inputs<f32>, w: &mut CallScratch, grads: &mut Grads<f32>) {
    if !l.has_gates() {
        return;
    }
    let (s, tp, n) = (l.shape, l.tp(), l.head_count());
    let CallScratch { din, dout, dpost, dkey_weights, ddecay_queries, ddecay_keys, ddecay_logits, dconst, drate, .. } = w;
    let CallScratch { logits, in_gate, out_gate, post_gate, initial, .. } = w;
    let positions = &initial.positions;
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
            gather(inputs.extra(Extra::OutGate), b, s.heads, h, logits);
            let (own, padding) = dout.split_at_mut(len);
            padding.fill(0.0);
            gate.backward(&logits[..len], &out_gate[times.clone()][..len], own);
        }
        if let Some(gate) = head.variant.post_gate.as_ref().filter(|gate| head.variant.needs(Extra::PostGate) && !gate.by_channel()) {
            gather(inputs.extra(Extra::PostGate), b, s.heads, h, logits);
            gate.backward(logits, &post_gate[times], dpost);
        }
        if head.weighs_keys {
            // Keys after the length were seen by no query: their places hold nothing.
            let in_factors = &in_gate[pair * s.time..][..s.time];
            let in_factor = |t: usize| if head.variant.in_gate.is_some() { in_factors[t] } else { 1.0 };
            din[len..].fill(0.0);
            din[..len].copy_from_slice(&dkey_weights[n * tp..][..len]);
            if head.variant.denominator.key_side() {
                let m = inputs.extra(Extra::NormConst)[h];
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
                gather(inputs.extra(Extra::InGate), b, s.kv_heads, h / s.group(), logits);
                gate.backward(logits, in_factors, din);
            }
        }
        if let Some(decay) = head.variant.decay.as_ref().filter(|decay| !decay.by_channel()) {
            dc.iter_mut().zip(&ddecay_keys[n * tp..]).for_each(|(d, keys)| *d += *keys);
            if decay.has_logits() {
                gather(inputs.extra(Extra::DecayGate), b, s.heads, h, logits);
            }
            *drate = decay.backward(logits, head.variant.decay_params(inputs, h), &dc[..s.time], ddecay_logits) as f32;
        }
    });
    let head_of = |h: usize| h;
    let kv_of = |h: usize| h / s.group();
    scatter(l, grads, Extra::OutGate, dout, s.heads, head_of);
    match l.has_post_channels() {
        false => scatter(l, grads, Extra::PostGate, dpost, s.heads, head_of),
        true => post_channels_backward(l, inputs, &w.post_channels, &mut w.dpost_channels, grads),
    }
    scatter(l, grads, Extra::InGate, din, s.kv_heads, kv_of);
    if !l.layer.decays_by_channel() {
        scatter(l, grads, Extra::DecayGate, ddecay_logits, s.heads, head_of);
    }
    for n in 0..l.head_count() {
        let h = n % s.heads;
        if l.heads[h].variant.denominator.key_side() {
            grads.extra(Extra::NormConst)[h] += dconst[n];
        }
        if l.heads[h].variant.needs(Extra::DecayRate) {
            grads.extra(Extra::DecayRate)[h] += drate[n];
        }
    }
}

/// Adds `from` [N, T] to the gradient of logits [B, T, columns], of the heads that have them.
fn scatter(l: &Layout, grads: &mut Grads<f32>, extra: Extra, from: &[f32], columns: usize, column: impl Fn(usize) -> usize + Sync) {
    let s = l.shape;
    if !l.heads.iter().any(|head| head.variant.needs(extra)) {
        return;
    }
    grads.extra(extra).par_chunks_exact_mut(columns).with_min_len(64).enumerate().for_each(|(row, to)| {
        let (b, t) = (row / s.time, row % s.time);
        for h in (0..s.heads).filter(|&h| l.heads[h].variant.needs(extra)) {
            to[column(h)] += from[(b * s.heads + h) * s.time + t];
        }
    });
}
