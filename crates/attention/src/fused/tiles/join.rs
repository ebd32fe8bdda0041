//! Backward pass of [`crate::epilogue::join`]: gradients of the sums over near and over far keys, from those of the joint sums of a row.
//!
//! ```text
//! U·e^ρ = U_n·e^{ρ_n} + U_f·e^{ρ_f}
//! ```
//!
//! ρ is a constant: kernels that take one subtract ρ; sums of the others have the factor e^−ρ, which is that of dU and dz.

use rayon::prelude::*;

use crate::fused::call::Call;
use crate::fused::epilogue::EpilogueGrads;
use crate::fused::plan::HeadPlan;
use termwise_kernels::disjoint::Blocks;
use termwise_kernels::score_rows::Rescale;

/// The factor of ρ in the weights of one branch: 1 for kernels that subtract ρ themselves.
#[inline(always)]
fn factor(head: &HeadPlan, rho: f32) -> f32 {
    if head.rescale == Rescale::None { (-rho).exp() } else { 1.0 }
}

/// Replaces dU and dz of the rows, stored as the first branch, by those of the near branch, and computes those of the far branch.
pub fn backward(call: &Call, rho: &[f32], to: &mut EpilogueGrads) {
    let (l, s, n) = (call.plan, call.plan.shape, call.plan.head_count());
    let (near_u, far_u) = to.du.split_at_mut(n * s.time * l.ep);
    let (near_z, far_z) = to.dz.split_at_mut(n * s.time);
    let [near_u, near_z, far_u, far_z] = [near_u, near_z, far_u, far_z].map(|x| Blocks::pieces(x, n).par());
    let rows = near_u.zip(near_z).zip(far_u.zip(far_z));
    rows.enumerate().with_max_len(1).for_each(|(n, ((mut u, mut z), (mut far_u, mut far_z)))| {
        let (b, h) = (n / s.heads, n % s.heads);
        let (u, z) = (u.piece(), z.piece());
        let len = call.length(b);
        for t in 0..len {
            let rho = rho[n * s.time + t];
            let du = &mut u[t * l.ep..][..l.ep];
            if let Some(head) = &l.far[h] {
                let factor = factor(head, rho);
                far_u.piece()[t * l.ep..][..l.ep].iter_mut().zip(&*du).for_each(|(to, du)| *to = factor * du);
                far_z.piece()[t] = factor * z[t];
            }
            let factor = factor(&l.heads[h], rho);
            if factor != 1.0 {
                du.iter_mut().for_each(|du| *du *= factor);
                z[t] *= factor;
            }
        }
        // Positions past the length of the row are ignored.
        far_u.piece().iter_mut().skip(len * l.ep).for_each(|x| *x = 0.0);
        far_z.piece().iter_mut().skip(len).for_each(|x| *x = 0.0);
    });
}
