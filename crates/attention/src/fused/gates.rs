//! Gates and decays: from signals over time to factors, and back.

use std::ops::Range;

use rayon::prelude::*;

use crate::fused::plan::Layout;
use crate::fused::workspace::Workspace;
use crate::kernels::disjoint::Shared;
use crate::parts::denominator::position::{key_weight, key_weight_slope};
use crate::parts::gate::PostGate;
use crate::{Extra, Grads, Inputs};

/// Column `head` of a signal [B, T, heads] in batch row b, into `out` [T].
fn gather(signal: &[f32], b: usize, heads: usize, head: usize, out: &mut [f32]) {
    let time = out.len();
    for (t, out) in out.iter_mut().enumerate() {
        *out = signal[(b * time + t) * heads + head];
    }
}

/// Adds `from` [T] to column `head` of [B, T, heads].
///
/// # Safety
/// No other task may have this column.
unsafe fn scatter(from: &[f32], b: usize, heads: usize, head: usize, to: &Shared<f32>) {
    for (t, &g) in from.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { to.slice((b * from.len() + t) * heads + head, 1)[0] += g };
    }
}

/// What gates and decays carry over from earlier calls, and take to later ones: [B, G] and [B, H].
#[derive(Clone, Copy)]
pub struct Carried<'a> {
    pub in_gate: Shared<f64>,
    pub out_gate: Shared<f64>,
    pub post_gate: Shared<f64>,
    pub decay: Shared<f64>,
    /// Positions before the first of each batch row.
    pub offsets: &'a [usize],
}

impl Carried<'_> {
    /// Runs f on the positions that count, then on those behind them, which are not carried on.
    ///
    /// # Safety
    /// No other task may have this place.
    unsafe fn run(carried: Option<&Shared<f64>>, at: usize, len: usize, time: usize, mut f: impl FnMut(Range<usize>, &mut f64)) {
        let mut nothing = 0.0;
        // SAFETY: the caller's promise.
        let past = carried.map_or(&mut nothing, |carried| unsafe { &mut carried.slice(at, 1)[0] });
        f(0..len, past);
        f(len..time, &mut past.clone());
    }
}

/// All factors of a call into the workspace.
pub fn forward(l: &Layout, inputs: &Inputs<f32>, w: &mut Workspace, carried: Option<Carried>) {
    let s = l.shape;
    let tp = l.tp();
    let Workspace { in_gate, out_gate, post_gate, key_weights, decay, signal, .. } = w;
    let [in_gate, out_gate, post_gate, key_weights, signal] =
        [in_gate, out_gate, post_gate, key_weights, signal].map(|buffer| Shared::new(buffer.as_mut_slice()));
    let decay = Shared::new(decay);
    (0..s.batch * s.kv_heads).into_par_iter().for_each(|pair| {
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        let len = inputs.lengths.map_or(s.time, |lengths| lengths[b]);
        let group = g * s.group()..(g + 1) * s.group();
        let gate = group.clone().find_map(|h| l.heads[h].variant.in_gate.as_ref());
        // SAFETY of all shared slices below: each task is the only one with this kv head and the heads of its group.
        let in_factors: &[f32] = match gate {
            Some(gate) => {
                // SAFETY: see above.
                let factors = unsafe { in_gate.slice(pair * s.time, s.time) };
                gather(inputs.extra(Extra::InGate), b, s.kv_heads, g, factors);
                // SAFETY: see above.
                unsafe {
                    let carried = carried.as_ref().map(|c| &c.in_gate);
                    Carried::run(carried, pair, len, s.time, |range, past| gate.forward(&mut factors[range], past));
                }
                factors
            }
            None => &[],
        };
        for h in group {
            let head = &l.heads[h];
            let n = b * s.heads + h;
            if let Some(gate) = &head.variant.out_gate {
                // SAFETY: see above.
                let factors = unsafe { out_gate.slice(n * s.time, s.time) };
                gather(inputs.extra(Extra::OutGate), b, s.heads, h, factors);
                // SAFETY: see above.
                unsafe {
                    let carried = carried.as_ref().map(|c| &c.out_gate);
                    Carried::run(carried, n, len, s.time, |range, past| gate.forward(&mut factors[range], past));
                }
            }
            if let Some(gate) = &head.variant.post_gate {
                // SAFETY: see above.
                let factors = unsafe { post_gate.slice(n * s.time, s.time) };
                match gate {
                    // SAFETY: see above.
                    PostGate::Shared(_) => factors.copy_from_slice(unsafe { out_gate.slice(n * s.time, s.time) }),
                    PostGate::Sigmoid(_) => {
                        gather(inputs.extra(Extra::PostGate), b, s.heads, h, factors);
                        // SAFETY: see above.
                        unsafe {
                            let carried = carried.as_ref().map(|c| &c.post_gate);
                            Carried::run(carried, n, len, s.time, |range, past| gate.forward(&mut factors[range], past));
                        }
                    }
                }
            }
            if head.weighs_keys {
                // SAFETY: see above.
                let (weights, padding) = unsafe { key_weights.slice(n * tp, tp) }.split_at_mut(s.time);
                padding.fill(0.0);
                match &head.variant.in_gate {
                    Some(_) => weights.copy_from_slice(in_factors),
                    None => weights.fill(1.0),
                }
                if head.variant.denominator.key_side() {
                    let m = inputs.extra(Extra::NormConst)[h];
                    let offset = carried.as_ref().map_or(0, |c| c.offsets[b]);
                    weights.iter_mut().enumerate().for_each(|(t, weight)| *weight *= key_weight(m, (offset + t + 1) as f32));
                }
            }
            if let Some(part) = &head.variant.decay {
                // SAFETY: see above.
                let (g, (c, padding)) = unsafe { (signal.slice(n * s.time, s.time), decay.slice(n * tp, tp).split_at_mut(s.time)) };
                gather(inputs.extra(Extra::DecayGate), b, s.heads, h, g);
                // SAFETY: see above.
                unsafe {
                    let carried = carried.as_ref().map(|c| &c.decay);
                    Carried::run(carried, n, len, s.time, |range, past| part.forward(&g[range.clone()], &mut c[range], past));
                }
                padding.fill(c[s.time - 1]);
            }
        }
    });
}

/// Adds the gradients of signals and of m_h, from those of the factors in the workspace.
pub fn backward(l: &Layout, inputs: &Inputs<f32>, w: &mut Workspace, grads: &mut Grads<f32>) {
    let s = l.shape;
    let tp = l.tp();
    let Workspace { dout, dpost, dkey_weights, ddecay, dconst, signal, dsignal, in_gate, out_gate, post_gate, .. } = w;
    let [dout, dpost, dkey_weights, dconst, signal, dsignal] =
        [dout, dpost, dkey_weights, dconst, signal, dsignal].map(|buffer| Shared::new(buffer.as_mut_slice()));
    let ddecay = Shared::new(ddecay);
    let to = |grads: &mut Grads<f32>, extra| match grads.extras.get_mut(extra) {
        Some(slice) => Shared::new(slice),
        None => Shared::new(&mut []),
    };
    let [to_in, to_out, to_post, to_decay] =
        [Extra::InGate, Extra::OutGate, Extra::PostGate, Extra::DecayGate].map(|extra| to(grads, extra));
    (0..s.batch * s.kv_heads).into_par_iter().for_each(|pair| {
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        let len = inputs.lengths.map_or(s.time, |lengths| lengths[b]);
        for h in g * s.group()..(g + 1) * s.group() {
            let head = &l.heads[h];
            let n = b * s.heads + h;
            let times = n * s.time..(n + 1) * s.time;
            // SAFETY of all shared slices below: each task is the only one with this kv head and the heads of its group.
            if !head.has_signals() {
                continue;
            }
            // SAFETY: see above.
            let (signal, gradient) = unsafe { (signal.slice(n * s.time, s.time), dsignal.slice(n * s.time, s.time)) };
            if let Some(gate) = &head.variant.out_gate {
                // SAFETY: see above.
                let d = unsafe { dout.slice(n * s.time, s.time) };
                if matches!(head.variant.post_gate, Some(PostGate::Shared(_))) {
                    // SAFETY: see above.
                    let again = unsafe { dpost.slice(n * s.time, s.time) };
                    d.iter_mut().zip(again).for_each(|(d, p)| *d += *p);
                }
                gather(inputs.extra(Extra::OutGate), b, s.heads, h, signal);
                gate.backward(signal, &out_gate.as_slice()[times.clone()], d);
                // SAFETY: see above.
                unsafe { scatter(d, b, s.heads, h, &to_out) };
            }
            if let Some(gate @ PostGate::Sigmoid(_)) = &head.variant.post_gate {
                // SAFETY: see above.
                let d = unsafe { dpost.slice(n * s.time, s.time) };
                gather(inputs.extra(Extra::PostGate), b, s.heads, h, signal);
                gate.backward(signal, &post_gate.as_slice()[times.clone()], d);
                // SAFETY: see above.
                unsafe { scatter(d, b, s.heads, h, &to_post) };
            }
            if head.weighs_keys {
                // Keys behind the length were seen by no query: their places hold nothing.
                // SAFETY: see above.
                let dweights = unsafe { &*dkey_weights.slice(n * tp, len) };
                let in_factor = |t: usize| if head.variant.in_gate.is_some() { in_gate.as_slice()[pair * s.time + t] } else { 1.0 };
                gradient.fill(0.0);
                gradient[..len].copy_from_slice(dweights);
                if head.variant.denominator.key_side() {
                    let m = inputs.extra(Extra::NormConst)[h];
                    let mut dm = 0.0;
                    for (t, d) in gradient[..len].iter_mut().enumerate() {
                        let count = (t + 1) as f32;
                        let weight = key_weight(m, count);
                        dm += (*d * in_factor(t)) as f64 * key_weight_slope(m, count, weight) as f64;
                        *d *= weight;
                    }
                    // SAFETY: see above.
                    unsafe { dconst.slice(n, 1)[0] = dm as f32 };
                }
                if let Some(gate) = &head.variant.in_gate {
                    gather(inputs.extra(Extra::InGate), b, s.kv_heads, g, signal);
                    gate.backward(signal, &in_gate.as_slice()[pair * s.time..][..s.time], gradient);
                    // SAFETY: see above.
                    unsafe { scatter(gradient, b, s.kv_heads, g, &to_in) };
                }
            }
            if let Some(decay) = &head.variant.decay {
                // SAFETY: see above.
                let dc = unsafe { ddecay.slice(n * tp, s.time) };
                gather(inputs.extra(Extra::DecayGate), b, s.heads, h, signal);
                decay.backward(signal, dc, gradient);
                // SAFETY: see above.
                unsafe { scatter(gradient, b, s.heads, h, &to_decay) };
            }
        }
    });
    for n in 0..l.head_count() {
        let h = n % s.heads;
        if l.heads[h].variant.denominator.key_side() {
            grads.extra(Extra::NormConst)[h] += w.dconst.as_slice()[n];
        }
    }
}
