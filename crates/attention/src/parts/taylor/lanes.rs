//! Vectors whose lanes are computed one by one.

use super::prefix::prefixes;
use crate::simd::Simd;

#[inline(always)]
pub(super) fn beyond<S: Simd>(simd: S, x: S::V, low: f32, high: f32) -> bool {
    simd.any(simd.gt(simd.splat(low), x)) || simd.any(simd.gt(x, simd.splat(high)))
}

/// w with the lanes beyond the bounds replaced by factor·Σ_{n≤p} x^n/n!. A lane's result depends on that lane alone.
#[inline(always)]
pub(super) fn replace_beyond<S: Simd>(simd: S, x: S::V, w: S::V, (low, high): (f32, f32), p: usize, factor: f64) -> S::V {
    let mut lanes = simd.to_array(w);
    let x = simd.to_array(x);
    // Lanes within the bounds are not asked for: zero costs nothing.
    let exact = prefixes(p, x.map(|x| if x < low || x > high { x as f64 } else { 0.0 }));
    for i in 0..S::LANES {
        if x[i] < low || x[i] > high {
            lanes[i] = (factor * exact[i]) as f32;
        }
    }
    lanes_from(simd, lanes)
}

#[inline(always)]
pub(in crate::parts) fn lanes_from<S: Simd>(simd: S, lanes: [f32; 16]) -> S::V {
    // SAFETY: no vector has more than 16 lanes.
    unsafe { simd.load(lanes.as_ptr()) }
}

/// Value and slope by Horner in powers of x − c in float64, times a factor, lane by lane; plain arithmetic, which compiles to vectors
/// of float64.
#[inline(always)]
pub(super) fn wide(dense: &[f64], centre: f64, x: [f32; 16], factor: f64) -> ([f32; 16], [f32; 16]) {
    let x = x.map(|x| x as f64 - centre);
    let (mut w, mut slope) = ([0.0f64; 16], [0.0f64; 16]);
    for &c in dense.iter().rev() {
        for i in 0..16 {
            slope[i] = slope[i] * x[i] + w[i];
            w[i] = w[i] * x[i] + c;
        }
    }
    (w.map(|w| (w * factor) as f32), slope.map(|s| (s * factor) as f32))
}
