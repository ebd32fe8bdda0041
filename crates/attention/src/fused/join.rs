//! From the gradients of a row's sums to those of its sums over near and over far keys, which [`crate::epilogue::join`] had joined:
//!
//! ```text
//! U·e^ρ = U_n·e^{ρ_n + l_n} + U_f·e^{ρ_f + l_f},   l the log factors of both
//! ```
//!
//! ρ is a constant: kernels that take one subtract ρ − l, sums of the others have the factor e^{l − ρ}, which is that of dU and dz.

use rayon::prelude::*;

use crate::Inputs;
use crate::fused::plan::{Head, Layout};
use crate::fused::prepare::Sources;
use crate::fused::scratch::CallScratch;
use crate::kernels::disjoint::Blocks;
use crate::kernels::score_rows::Rescale;

/// What ρ leaves of the weights of one kind of keys: ρ itself for kernels that take it, and the factor of the others.
#[inline(always)]
pub fn rho_and_factor(head: &Head, rho: f32, log: f32) -> (Option<f32>, f32) {
    match head.rescale {
        Rescale::None => (None, (log - rho).exp()),
        rescale => (rescale.of(rho - log), 1.0),
    }
}

/// From dU and dz of the rows, in the first places of [passes, N, T, ep] and [passes, N, T], to those of the sums over far and over near keys; and
/// the log factors of all rows, [passes, N, T].
pub fn backward(l: &Layout, inputs: &Inputs<f32>, rho: &[f32], w: &mut CallScratch) {
    let s = l.shape;
    if l.passes() == 1 && !l.has_log_factors() {
        return;
    }
    let n = l.head_count();
    let [mut du, mut dz, mut logs] = [&mut w.du, &mut w.dz, &mut w.logs].map(std::mem::take);
    let sources = &Sources::new(l, inputs, w);
    let (near_u, far_u) = du.split_at_mut(n * s.time * l.ep);
    let (near_z, far_z) = dz.split_at_mut(n * s.time);
    let half = logs.len().min(n * s.time);
    let (near_logs, far_logs) = logs.split_at_mut(half);
    let [near_u, near_z, near_logs] = [near_u, near_z, near_logs].map(|x| Blocks::pieces(x, n).par());
    let [far_u, far_z, far_logs] = [far_u, far_z, far_logs].map(|x| Blocks::pieces(x, n).par());
    let rows = near_u.zip(near_z).zip(near_logs).zip(far_u.zip(far_z).zip(far_logs));
    rows.enumerate().with_max_len(1).for_each(|(n, (((mut u, mut z), mut logs), ((mut far_u, mut far_z), mut far_logs)))| {
        let (b, h) = (n / s.heads, n % s.heads);
        let (u, z) = (u.piece(), z.piece());
        let len = inputs.length(b, &s);
        let log_of = |far: bool, t: usize| {
            let head = l.pass(h, far);
            if !l.has_log_factor(head) {
                return 0.0;
            }
            let features = sources.query(l, b, h, far).features;
            let at = (far as usize * l.head_count() + n) * l.tp() + t;
            features.log_factor(&w.q[at * l.dp..][..l.dp])
        };
        for t in 0..len {
            let rho = rho[n * s.time + t];
            let du = &mut u[t * l.ep..][..l.ep];
            if let Some(head) = &l.far[h] {
                let log = log_of(true, t);
                let (_, factor) = rho_and_factor(head, rho, log);
                far_u.piece()[t * l.ep..][..l.ep].iter_mut().zip(&*du).for_each(|(to, du)| *to = factor * du);
                far_z.piece()[t] = factor * z[t];
                far_logs.piece().get_mut(t).into_iter().for_each(|to| *to = log);
            }
            let log = log_of(false, t);
            let (_, factor) = rho_and_factor(&l.heads[h], rho, log);
            if factor != 1.0 {
                du.iter_mut().for_each(|du| *du *= factor);
                z[t] *= factor;
            }
            logs.piece().get_mut(t).into_iter().for_each(|to| *to = log);
        }
        // What lies behind the end of a text counts for nothing.
        far_u.piece().iter_mut().skip(len * l.ep).for_each(|x| *x = 0.0);
        far_z.piece().iter_mut().skip(len).for_each(|x| *x = 0.0);
    });
    (w.du, w.dz, w.logs) = (du, dz, logs);
}
