//! a = act(g)·u elementwise, with a [M, I], and gate g and up u beside each other in [M, 2·I].
//!
//! Both activations are act(g) = g·σ(z): SiLU with z = g, and GELU in its tanh form with z = 2·√(2/π)·(g + 0.044715·g³), since
//! (1 + tanh x)/2 = σ(2x). Backward, with s = σ(z): du = da·g·s, dg = da·u·s·(1 + g·(1 − s)·z').

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::pieces::rows_of;

/// What the gate of an MLP goes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// SiLU
    #[default]
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

/// a [M, I] = act(g)·u of [g, u] [M, 2·I].
pub fn forward(activation: Activation, gate_up: &[f32], a: &mut [f32], width: usize) {
    assert!(gate_up.len() == 2 * a.len() && a.len().is_multiple_of(width), "swiglu over tensors of different lengths");
    let piece = rows_of(width) * width;
    (gate_up.par_chunks(2 * piece), a.par_chunks_mut(piece)).into_par_iter().for_each(|(gate_up, a)| match activation {
        Activation::Silu => dispatch(Forward::<false> { gate_up, a, width }),
        Activation::GeluTanh => dispatch(Forward::<true> { gate_up, a, width }),
    });
}

/// In place: g becomes dg, u becomes du, and `da` becomes a, which the gradient of the next weight needs and so is never stored.
pub fn backward(activation: Activation, gate_up: &mut [f32], da: &mut [f32], width: usize) {
    assert!(gate_up.len() == 2 * da.len() && da.len().is_multiple_of(width), "swiglu over tensors of different lengths");
    let piece = rows_of(width) * width;
    (gate_up.par_chunks_mut(2 * piece), da.par_chunks_mut(piece)).into_par_iter().for_each(|(gate_up, da)| match activation {
        Activation::Silu => dispatch(Backward::<false> { gate_up, da, width }),
        Activation::GeluTanh => dispatch(Backward::<true> { gate_up, da, width }),
    });
}

/// 2·√(2/π)
const TWICE: f32 = 2.0 * std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
const CUBIC: f32 = 0.044_715;

/// z of an activation, and its slope.
#[inline(always)]
fn inner<S: Simd, const GELU: bool>(simd: S, g: S::V) -> (S::V, S::V) {
    if !GELU {
        return (g, simd.splat(1.0));
    }
    let (square, twice) = (simd.mul(g, g), simd.splat(TWICE));
    let z = simd.mul(simd.mul(twice, g), simd.fma(simd.splat(CUBIC), square, simd.splat(1.0)));
    (z, simd.mul(twice, simd.fma(simd.splat(3.0 * CUBIC), square, simd.splat(1.0))))
}

struct Forward<'a, const GELU: bool> {
    gate_up: &'a [f32],
    a: &'a mut [f32],
    width: usize,
}

impl<const GELU: bool> Task for Forward<'_, GELU> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (row, a) in self.gate_up.chunks_exact(2 * self.width).zip(self.a.chunks_exact_mut(self.width)) {
            let (gate, up) = row.split_at(self.width);
            for i in (0..a.len()).step_by(S::LANES) {
                let (g, u) = (simd.load_at(gate, i), simd.load_at(up, i));
                let act = simd.mul(g, simd.sigmoid(inner::<S, GELU>(simd, g).0));
                simd.store_at(a, i, simd.mul(act, u));
            }
        }
    }
}

struct Backward<'a, const GELU: bool> {
    gate_up: &'a mut [f32],
    da: &'a mut [f32],
    width: usize,
}

impl<const GELU: bool> Task for Backward<'_, GELU> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let one = simd.splat(1.0);
        for (row, a) in self.gate_up.chunks_exact_mut(2 * self.width).zip(self.da.chunks_exact_mut(self.width)) {
            let (gate, up) = row.split_at_mut(self.width);
            for i in (0..a.len()).step_by(S::LANES) {
                let (g, u, da) = (simd.load_at(gate, i), simd.load_at(up, i), simd.load_at(a, i));
                let (z, dz) = inner::<S, GELU>(simd, g);
                let s = simd.sigmoid(z);
                let act = simd.mul(g, s);
                let slope = simd.mul(s, simd.fma(simd.mul(g, dz), simd.sub(one, s), one));
                simd.store_at(gate, i, simd.mul(simd.mul(da, u), slope));
                simd.store_at(up, i, simd.mul(da, act));
                simd.store_at(a, i, simd.mul(act, u));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradient, numbers};

    /// a of rows of [gate, up].
    fn naive(activation: Activation, gate_up: &[f64], width: usize) -> Vec<f64> {
        let act = |g: f64| match activation {
            Activation::Silu => g / (1.0 + (-g).exp()),
            Activation::GeluTanh => 0.5 * g * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3))).tanh()),
        };
        let row = |row: &[f64]| (0..width).map(|i| act(row[i]) * row[width + i]).collect::<Vec<_>>();
        gate_up.chunks(2 * width).flat_map(row).collect()
    }

    #[test]
    fn forward_and_backward_match_float64() {
        let sizes = [(1, 1), (1, 15), (3, 16), (2, 33), (7, 5), (600, 37), (1, 20_000)];
        for (activation, (m, width)) in [Activation::Silu, Activation::GeluTanh].into_iter().flat_map(|act| sizes.map(|size| (act, size))) {
            let (x, da) = (numbers(2 * m * width, 1).iter().map(|x| 4.0 * x).collect::<Vec<_>>(), numbers(m * width, 3));
            let mut a = vec![f32::NAN; m * width];
            forward(activation, &x, &mut a, width);
            let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
            assert_close(&a, &naive(activation, &wide(&x), width), 1e-6, "a");
            let (mut dx, mut again) = (x.clone(), da.clone());
            backward(activation, &mut dx, &mut again, width);
            assert_close(&again, &wide(&a), 1e-7, "a again");
            // The last row: finite differences of all would take long.
            if width < 100 {
                let last = (m - 1) * width;
                assert_gradient(&dx[2 * last..], &x[2 * last..], &da[last..], |x| naive(activation, x, width), "dgate and dup");
            }
        }
    }

    #[test]
    fn large_gates_saturate_without_nan() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let mut a = [f32::NAN; 4];
            forward(activation, &[-200.0, 200.0, -90.0, 90.0, 1.0, 1.0, 1.0, 1.0], &mut a, 4);
            assert!(a[0].abs() < 1e-30 && a[1] == 200.0 && a[2].abs() < 1e-30 && a[3] == 90.0, "{a:?}");
        }
    }
}
