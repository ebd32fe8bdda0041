//! a = silu(g)·u elementwise, silu(g) = g·σ(g), with a [M, I], and gate g and up u beside each other in [M, 2·I].
//!
//! Backward: du = da·silu(g), dg = da·u·σ(g)·(1 + g·(1 − σ(g))).

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::pieces::rows_of;

/// a [M, I] = silu(g)·u of [g, u] [M, 2·I].
pub fn forward(gate_up: &[f32], a: &mut [f32], width: usize) {
    assert!(gate_up.len() == 2 * a.len() && a.len().is_multiple_of(width), "swiglu over tensors of different lengths");
    let piece = rows_of(width) * width;
    (gate_up.par_chunks(2 * piece), a.par_chunks_mut(piece))
        .into_par_iter()
        .for_each(|(gate_up, a)| dispatch(Forward { gate_up, a, width }));
}

/// In place: g becomes dg, u becomes du, and `da` becomes a, which the gradient of the next weight needs and so is never stored.
pub fn backward(gate_up: &mut [f32], da: &mut [f32], width: usize) {
    assert!(gate_up.len() == 2 * da.len() && da.len().is_multiple_of(width), "swiglu over tensors of different lengths");
    let piece = rows_of(width) * width;
    (gate_up.par_chunks_mut(2 * piece), da.par_chunks_mut(piece))
        .into_par_iter()
        .for_each(|(gate_up, da)| dispatch(Backward { gate_up, da, width }));
}

struct Forward<'a> {
    gate_up: &'a [f32],
    a: &'a mut [f32],
    width: usize,
}

impl Task for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (row, a) in self.gate_up.chunks_exact(2 * self.width).zip(self.a.chunks_exact_mut(self.width)) {
            let (gate, up) = row.split_at(self.width);
            for i in (0..a.len()).step_by(S::LANES) {
                let (g, u) = (simd.load_at(gate, i), simd.load_at(up, i));
                let silu = simd.mul(g, simd.sigmoid(g));
                simd.store_at(a, i, simd.mul(silu, u));
            }
        }
    }
}

struct Backward<'a> {
    gate_up: &'a mut [f32],
    da: &'a mut [f32],
    width: usize,
}

impl Task for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let one = simd.splat(1.0);
        for (row, a) in self.gate_up.chunks_exact_mut(2 * self.width).zip(self.da.chunks_exact_mut(self.width)) {
            let (gate, up) = row.split_at_mut(self.width);
            for i in (0..a.len()).step_by(S::LANES) {
                let (g, u, da) = (simd.load_at(gate, i), simd.load_at(up, i), simd.load_at(a, i));
                let s = simd.sigmoid(g);
                let silu = simd.mul(g, s);
                let slope = simd.mul(s, simd.fma(g, simd.sub(one, s), one));
                simd.store_at(gate, i, simd.mul(simd.mul(da, u), slope));
                simd.store_at(up, i, simd.mul(da, silu));
                simd.store_at(a, i, simd.mul(silu, u));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradient, numbers};

    /// a of rows of [gate, up].
    fn naive(gate_up: &[f64], width: usize) -> Vec<f64> {
        let row = |row: &[f64]| (0..width).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[width + i]).collect::<Vec<_>>();
        gate_up.chunks(2 * width).flat_map(row).collect()
    }

    #[test]
    fn forward_and_backward_match_float64() {
        for (m, width) in [(1, 1), (1, 15), (3, 16), (2, 33), (7, 5), (600, 37), (1, 20_000)] {
            let (x, da) = (numbers(2 * m * width, 1).iter().map(|x| 4.0 * x).collect::<Vec<_>>(), numbers(m * width, 3));
            let mut a = vec![f32::NAN; m * width];
            forward(&x, &mut a, width);
            let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
            assert_close(&a, &naive(&wide(&x), width), 1e-6, "a");
            let (mut dx, mut again) = (x.clone(), da.clone());
            backward(&mut dx, &mut again, width);
            assert_close(&again, &wide(&a), 1e-7, "a again");
            // The last row: finite differences of all would take long.
            if width < 100 {
                let last = (m - 1) * width;
                assert_gradient(&dx[2 * last..], &x[2 * last..], &da[last..], |x| naive(x, width), "dgate and dup");
            }
        }
    }

    #[test]
    fn large_gates_saturate_without_nan() {
        let mut a = [f32::NAN; 4];
        forward(&[-200.0, 200.0, -90.0, 90.0, 1.0, 1.0, 1.0, 1.0], &mut a, 4);
        assert!(a[0].abs() < 1e-30 && a[1] == 200.0 && a[2].abs() < 1e-30 && a[3] == 90.0, "{a:?}");
    }
}
