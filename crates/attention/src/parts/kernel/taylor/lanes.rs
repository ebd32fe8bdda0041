//! Vectors whose lanes are computed in float64, in plain arithmetic that compiles to float64 vectors. Rare cases are in a
//! separate function, so they are compiled once and not inlined everywhere.

use crate::parts::kernel::taylor::prefix::prefixes;
use termwise_kernels::simd::{Simd, Task};

#[inline(always)]
pub(super) fn beyond<S: Simd>(simd: S, x: S::V, low: f32, high: f32) -> bool {
    simd.any(simd.gt(simd.splat(low), x)) || simd.any(simd.gt(x, simd.splat(high)))
}

#[inline(always)]
pub(super) fn lanes_from<S: Simd>(simd: S, lanes: [f32; 16]) -> S::V {
    simd.load_at(&lanes, 0)
}

/// A value and its slope.
#[inline(always)]
pub(in crate::parts) fn pair_from<S: Simd>(simd: S, (w, slope): ([f32; 16], [f32; 16])) -> (S::V, S::V) {
    (lanes_from(simd, w), lanes_from(simd, slope))
}

/// w with the lanes beyond the bounds replaced by factor·Σ_{n≤p} x^n/n!. The result of a lane depends only on that lane.
#[inline(always)]
pub(super) fn replace_beyond<S: Simd>(simd: S, x: S::V, w: S::V, bounds: (f32, f32), p: usize, factor: f64) -> S::V {
    lanes_from(simd, simd.call(Beyond { x: simd.to_array(x), w: simd.to_array(w), bounds, p, factor }))
}

struct Beyond {
    x: [f32; 16],
    w: [f32; 16],
    bounds: (f32, f32),
    p: usize,
    factor: f64,
}

impl Task for Beyond {
    type Output = [f32; 16];

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> [f32; 16] {
        let Beyond { x, mut w, bounds: (low, high), p, factor } = self;
        // Lanes within the bounds are not needed: zero costs nothing.
        let exact = prefixes(p, x.map(|x| if x < low || x > high { x as f64 } else { 0.0 }));
        for i in 0..16 {
            if x[i] < low || x[i] > high {
                w[i] = (factor * exact[i]) as f32;
            }
        }
        w
    }
}

/// Value and derivative by Horner in powers of x, times a factor.
pub(super) struct Wide<'a> {
    pub dense: &'a [f64],
    pub x: [f32; 16],
    pub factor: f64,
}

impl Task for Wide<'_> {
    type Output = ([f32; 16], [f32; 16]);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> ([f32; 16], [f32; 16]) {
        let x = self.x.map(|x| x as f64);
        let (mut w, mut slope) = ([0.0f64; 16], [0.0f64; 16]);
        for &c in self.dense.iter().rev() {
            for i in 0..16 {
                slope[i] = slope[i] * x[i] + w[i];
                w[i] = w[i] * x[i] + c;
            }
        }
        (w.map(|w| (w * self.factor) as f32), slope.map(|s| (s * self.factor) as f32))
    }
}
