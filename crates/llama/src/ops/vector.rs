//! Pieces of work of fixed size, and loads and stores that end with the slice.

use rayon::prelude::*;
use termwise_attention::simd::Simd;

/// Values in a piece of elementwise work: 64 KB, so that a piece and its partners stay in the second cache and starting one
/// costs nothing beside it.
pub const PIECE: usize = 16 * 1024;

/// Rows of `width` values in a piece of row-wise work; depends on the width alone.
pub fn rows_of(width: usize) -> usize {
    (PIECE / width.max(1)).clamp(1, 256)
}

/// Sets every value to zero, in parallel.
pub fn zero(x: &mut [f32]) {
    x.par_chunks_mut(PIECE).for_each(|piece| piece.fill(0.0));
}

/// x[i..i + LANES]; behind the end of x, zeros.
#[inline(always)]
pub fn load<S: Simd>(simd: S, x: &[f32], i: usize) -> S::V {
    if i + S::LANES <= x.len() {
        // SAFETY: the guard leaves LANES values from i on.
        unsafe { simd.load(x.as_ptr().add(i)) }
    } else {
        simd.load_part(&x[i..])
    }
}

/// x[i..i + LANES] = value; lanes behind the end of x are dropped.
#[inline(always)]
pub fn store<S: Simd>(simd: S, x: &mut [f32], i: usize, value: S::V) {
    if i + S::LANES <= x.len() {
        // SAFETY: the guard leaves LANES values from i on.
        unsafe { simd.store(x.as_mut_ptr().add(i), value) };
    } else {
        let rest = &mut x[i..];
        rest.copy_from_slice(&simd.to_array(value)[..rest.len()]);
    }
}

/// 1 / (1 + e^−x)
#[inline(always)]
pub fn sigmoid<S: Simd>(simd: S, x: S::V) -> S::V {
    let one = simd.splat(1.0);
    let e = simd.exp(simd.sub(simd.splat(0.0), x));
    simd.div(one, simd.add(one, e))
}
