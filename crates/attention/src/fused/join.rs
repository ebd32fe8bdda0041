//! From the gradients of a row's sums to those of its sums over near and over far keys, which [`crate::epilogue::join`] had joined:
//!
//! ```text
//! U·e^ρ = U_n·e^{ρ_n} + U_f·e^{ρ_f}
//! ```
//!
//! ρ is a constant: kernels that take one subtract ρ; sums of the others have the factor e^−ρ, which is that of dU and dz.

use rayon::prelude::*;

use crate::Inputs;
use crate::fused::plan::{Head, Layout};
use crate::fused::scratch::CallScratch;
use crate::kernels::disjoint::Blocks;
use crate::kernels::score_rows::Rescale;

/// The factor that ρ leaves of the weights of one kind of keys: 1 for kernels that take ρ themselves.
#[inline(always)]
fn factor(head: &Head, rho: f32) -> f32 {
    if head.rescale == Rescale::None { (-rho).exp() } else { 1.0 }
}

/// From dU and dz of the rows, in the first places of [passes, N, T, ep] and [passes, N, T], to those of the sums over far and over near keys.
pub fn backward(l: &Layout, inputs: &Inputs<f32>, rho: &[f32], w: &mut CallScratch) {
    let s = l.shape;
    if l.passes() == 1 {
        return;
    }
    let n = l.head_count();
    let (near_u, far_u) = w.du.split_at_mut(n * s.time * l.ep);
    let (near_z, far_z) = w.dz.split_at_mut(n * s.time);
    let [near_u, near_z, far_u, far_z] = [near_u, near_z, far_u, far_z].map(|x| Blocks::pieces(x, n).par());
    let rows = near_u.zip(near_z).zip(far_u.zip(far_z));
    rows.enumerate().with_max_len(1).for_each(|(n, ((mut u, mut z), (mut far_u, mut far_z)))| {
        let (b, h) = (n / s.heads, n % s.heads);
        let (u, z) = (u.piece(), z.piece());
        let len = inputs.length(b, &s);
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
        // Positions past the length of the row count for nothing.
        far_u.piece().iter_mut().skip(len * l.ep).for_each(|x| *x = 0.0);
        far_z.piece().iter_mut().skip(len).for_each(|x| *x = 0.0);
    });
}
