//! The inner loop of a step: one pass over the rows of H.

use crate::kernels::simd::Simd;

/// U_i += Q_iᵀ·H for every head i, then H ← m·H + K·vᵀ.
///
/// H is [N, ep], v [ep], K [at least N], Q [heads, as long as K], U [heads, ep]; ep a multiple of 16, K and Q zero behind N.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the symbols of the formula")]
pub fn sweep<S: Simd>(simd: S, h: &mut [f32], ep: usize, m: f32, k: &[f32], v: &[f32], q: &[f32], u: &mut [f32]) {
    let heads = u.len() / ep;
    let stride = k.len();
    // Accumulators: P·A·U of them, about eight to hide the latency of fma, and no more than half of the registers.
    let widest = if S::REGISTERS >= 32 { 4 } else { 2 };
    let mut column = 0;
    while column < ep {
        let vectors = ((ep - column) / S::LANES).min(widest);
        let vectors = if vectors == 3 { 2 } else { vectors };
        let mut first = 0;
        while first < heads {
            let together = (heads - first).min(widest);
            let together = if together == 3 { 2 } else { together };
            let rows = Rows { h: &mut *h, ep, column, m, k, v, q: &q[first * stride..], u: &mut u[first * ep..] };
            let update = first + together == heads;
            match (vectors, together) {
                (1, 1) => rows.run::<S, 1, 1, 8>(simd, update),
                (1, 2) => rows.run::<S, 1, 2, 4>(simd, update),
                (1, _) => rows.run::<S, 1, 4, 2>(simd, update),
                (2, 1) => rows.run::<S, 2, 1, 4>(simd, update),
                (2, 2) => rows.run::<S, 2, 2, 2>(simd, update),
                (2, _) => rows.run::<S, 2, 4, 1>(simd, update),
                (_, 1) => rows.run::<S, 4, 1, 2>(simd, update),
                (_, 2) => rows.run::<S, 4, 2, 1>(simd, update),
                _ => rows.run::<S, 4, 4, 1>(simd, update),
            }
            first += together;
        }
        column += vectors * S::LANES;
    }
}

/// All rows of some columns for some heads.
struct Rows<'a> {
    h: &'a mut [f32],
    ep: usize,
    column: usize,
    m: f32,
    k: &'a [f32],
    v: &'a [f32],
    q: &'a [f32],
    u: &'a mut [f32],
}

impl Rows<'_> {
    /// P vectors of columns, A heads, U rows at a time; the last heads update the rows.
    #[inline(always)]
    fn run<S: Simd, const P: usize, const A: usize, const U: usize>(self, simd: S, update: bool) {
        match (update, self.m == 1.0) {
            (true, true) => self.pass::<S, P, A, U, true, false>(simd),
            (true, false) => self.pass::<S, P, A, U, true, true>(simd),
            (false, _) => self.pass::<S, P, A, U, false, false>(simd),
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "constant bounds and plain indices keep every accumulator in a register")]
    fn pass<S: Simd, const P: usize, const A: usize, const U: usize, const UPDATE: bool, const DECAY: bool>(self, simd: S) {
        let Rows { h, ep, column, m, k, v, q, u } = self;
        let rows = h.len() / ep;
        let stride = k.len();
        assert!(rows <= stride && q.len() >= (A - 1) * stride + rows && column + P * S::LANES <= ep && v.len() >= ep);
        let m = simd.splat(m);
        let mut value = [simd.splat(0.0); P];
        for (p, value) in value.iter_mut().enumerate() {
            *value = simd.load_at(v, column + p * S::LANES);
        }
        let mut sums = [[[simd.splat(0.0); P]; A]; U];
        let (h, k, q) = (h.as_mut_ptr(), k.as_ptr(), q.as_ptr());
        let mut row = 0;
        while row < rows {
            let together = if row + U <= rows { U } else { 1 };
            for i in 0..U {
                if i >= together {
                    break;
                }
                // SAFETY: row + i < rows; the assertion holds for every index formed from it.
                unsafe {
                    let at = row + i;
                    let key = simd.splat(*k.add(at));
                    for p in 0..P {
                        let place = h.add(at * ep + column + p * S::LANES);
                        let x = simd.load(place);
                        if UPDATE {
                            let next = if DECAY { simd.fma(x, m, simd.mul(key, value[p])) } else { simd.fma(key, value[p], x) };
                            simd.store(place, next);
                        }
                        for a in 0..A {
                            sums[i][a][p] = simd.fma(simd.splat(*q.add(a * stride + at)), x, sums[i][a][p]);
                        }
                    }
                }
            }
            row += together;
        }
        for a in 0..A {
            for p in 0..P {
                let at = a * ep + column + p * S::LANES;
                let mut total = simd.load_at(u, at);
                for sums in &sums {
                    total = simd.add(total, sums[a][p]);
                }
                simd.store_at(u, at, total);
            }
        }
    }
}
