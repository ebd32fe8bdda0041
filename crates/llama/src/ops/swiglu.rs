//! a = silu(g)·u elementwise, silu(g) = g·σ(g), with gate g, up u and a all [M, I].
//!
//! Backward: du = da·silu(g), dg = da·u·σ(g)·(1 + g·(1 − σ(g))).

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::vector::PIECE;

/// a = silu(g)·u.
pub fn forward(gate: &[f32], up: &[f32], a: &mut [f32]) {
    assert!(gate.len() == a.len() && up.len() == a.len(), "swiglu over tensors of different lengths");
    (gate.par_chunks(PIECE), up.par_chunks(PIECE), a.par_chunks_mut(PIECE))
        .into_par_iter()
        .for_each(|(gate, up, a)| dispatch(Forward { gate, up, a }));
}

/// In place: gate becomes dg, up becomes du, and `da` becomes a, which the gradient of the next weight needs and so is never stored.
pub fn backward(gate: &mut [f32], up: &mut [f32], da: &mut [f32]) {
    assert!(gate.len() == da.len() && up.len() == da.len(), "swiglu over tensors of different lengths");
    (gate.par_chunks_mut(PIECE), up.par_chunks_mut(PIECE), da.par_chunks_mut(PIECE))
        .into_par_iter()
        .for_each(|(gate, up, da)| dispatch(Backward { gate, up, da }));
}

struct Forward<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    a: &'a mut [f32],
}

impl Task for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for i in (0..self.a.len()).step_by(S::LANES) {
            let (g, u) = (simd.load_at(self.gate, i), simd.load_at(self.up, i));
            let silu = simd.mul(g, simd.sigmoid(g));
            simd.store_at(self.a, i, simd.mul(silu, u));
        }
    }
}

struct Backward<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
    da: &'a mut [f32],
}

impl Task for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let one = simd.splat(1.0);
        for i in (0..self.da.len()).step_by(S::LANES) {
            let (g, u, da) = (simd.load_at(self.gate, i), simd.load_at(self.up, i), simd.load_at(self.da, i));
            let s = simd.sigmoid(g);
            let silu = simd.mul(g, s);
            let slope = simd.mul(s, simd.fma(g, simd.sub(one, s), one));
            simd.store_at(self.gate, i, simd.mul(simd.mul(da, u), slope));
            simd.store_at(self.up, i, simd.mul(da, silu));
            simd.store_at(self.da, i, simd.mul(silu, u));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradient, numbers};

    fn naive(gate: &[f64], up: &[f64]) -> Vec<f64> {
        gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    }

    #[test]
    fn forward_and_backward_match_float64() {
        for n in [1, 15, 16, 33, 20_000] {
            let (gate, up, da) = (numbers(n, 1).iter().map(|x| 4.0 * x).collect::<Vec<_>>(), numbers(n, 2), numbers(n, 3));
            let mut a = vec![f32::NAN; n];
            forward(&gate, &up, &mut a);
            let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
            assert_close(&a, &naive(&wide(&gate), &wide(&up)), 1e-6, "a");
            let (mut dg, mut du, mut again) = (gate.clone(), up.clone(), da.clone());
            backward(&mut dg, &mut du, &mut again);
            assert_close(&again, &wide(&a), 1e-7, "a again");
            let checked = n.min(40);
            assert_gradient(&dg[..checked], &gate[..checked], &da[..checked], |g| naive(g, &wide(&up[..checked])), "dg");
            assert_gradient(&du[..checked], &up[..checked], &da[..checked], |u| naive(&wide(&gate[..checked]), u), "du");
        }
    }

    #[test]
    fn large_gates_saturate_without_nan() {
        let (gate, up) = ([-200.0, 200.0, -90.0, 90.0], [1.0; 4]);
        let mut a = [f32::NAN; 4];
        forward(&gate, &up, &mut a);
        assert!(a[0].abs() < 1e-30 && a[1] == 200.0 && a[2].abs() < 1e-30 && a[3] == 90.0, "{a:?}");
    }
}
