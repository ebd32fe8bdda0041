//! The activation of an MLP. Gated: a = act(g)·u, with gate g and up u side by side in [M, 2·I]. Plain: a = act(u), with u [M, I].
//!
//! All activations have the form act(g) = g·s(g): SiLU with s = σ(g), GELU with the normal distribution function s = Φ(g), and GELU in its tanh form with
//! s = σ(z), z = 2·√(2/π)·(g + 0.044715·g³), since (1 + tanh x)/2 = σ(2x).
//! Backward: du = da·act(g), dg = da·u·act'(g), where act' = s·(1 + g·(1 − s)·z') for s = σ(z), and Φ + g·φ for GELU.

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::chunks::rows_per_chunk;

/// The activation function of an MLP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// SiLU
    #[default]
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
    /// GELU.
    Gelu,
}

/// a [M, I] from [g, u] [M, 2·I] if gated, else from u [M, I].
pub fn forward(activation: Activation, inputs: &[f32], a: &mut [f32], width: usize) {
    assert!(a.len().is_multiple_of(width) && (inputs.len() == a.len() || inputs.len() == 2 * a.len()), "tensor lengths of an activation");
    let (chunk, wide) = (rows_per_chunk(width) * width, inputs.len() / a.len().max(1));
    (inputs.par_chunks(wide.max(1) * chunk), a.par_chunks_mut(chunk)).into_par_iter().for_each(|(inputs, a)| match activation {
        Activation::Silu => dispatch(ActivationForward { act: Silu, inputs, a, width }),
        Activation::GeluTanh => dispatch(ActivationForward { act: GeluTanh, inputs, a, width }),
        Activation::Gelu => dispatch(ActivationForward { act: Gelu, inputs, a, width }),
    });
}

/// Replaces the inputs by their gradients and `da` by a. The weight gradient of the following projection needs a, so the forward pass does not store it.
pub fn backward(activation: Activation, inputs: &mut [f32], da: &mut [f32], width: usize) {
    assert!(
        da.len().is_multiple_of(width) && (inputs.len() == da.len() || inputs.len() == 2 * da.len()),
        "tensor lengths of an activation"
    );
    let (chunk, wide) = (rows_per_chunk(width) * width, inputs.len() / da.len().max(1));
    (inputs.par_chunks_mut(wide.max(1) * chunk), da.par_chunks_mut(chunk)).into_par_iter().for_each(|(inputs, da)| match activation {
        Activation::Silu => dispatch(ActivationBackward { act: Silu, inputs, da, width }),
        Activation::GeluTanh => dispatch(ActivationBackward { act: GeluTanh, inputs, da, width }),
        Activation::Gelu => dispatch(ActivationBackward { act: Gelu, inputs, da, width }),
    });
}

/// An activation g·s(g).
trait Act: Copy {
    /// s
    fn gate<S: Simd>(self, simd: S, g: S::V) -> S::V;

    /// The derivative of g·s(g), given s.
    fn slope<S: Simd>(self, simd: S, g: S::V, s: S::V) -> S::V;
}

#[derive(Clone, Copy)]
struct Silu;

#[derive(Clone, Copy)]
struct GeluTanh;

#[derive(Clone, Copy)]
struct Gelu;

impl Act for Silu {
    #[inline(always)]
    fn gate<S: Simd>(self, simd: S, g: S::V) -> S::V {
        simd.sigmoid(g)
    }

    #[inline(always)]
    fn slope<S: Simd>(self, simd: S, g: S::V, s: S::V) -> S::V {
        let one = simd.splat(1.0);
        simd.mul(s, simd.fma(g, simd.sub(one, s), one))
    }
}

/// 2·√(2/π)
const TWICE: f32 = 2.0 * std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
const CUBIC: f32 = 0.044_715;

impl Act for GeluTanh {
    #[inline(always)]
    fn gate<S: Simd>(self, simd: S, g: S::V) -> S::V {
        let inner = simd.fma(simd.splat(CUBIC), simd.mul(g, g), simd.splat(1.0));
        simd.sigmoid(simd.mul(simd.mul(simd.splat(TWICE), g), inner))
    }

    #[inline(always)]
    fn slope<S: Simd>(self, simd: S, g: S::V, s: S::V) -> S::V {
        let one = simd.splat(1.0);
        let dz = simd.mul(simd.splat(TWICE), simd.fma(simd.splat(3.0 * CUBIC), simd.mul(g, g), one));
        simd.mul(s, simd.fma(simd.mul(g, dz), simd.sub(one, s), one))
    }
}

impl Act for Gelu {
    /// Φ(g) = erfc(−g/√2)/2, with the Chebyshev fit of erfc whose relative error is below 1.2e-7 everywhere (Press et al., Numerical Recipes, §6.2).
    #[inline(always)]
    fn gate<S: Simd>(self, simd: S, g: S::V) -> S::V {
        const COEFFICIENTS: [f32; 10] = [
            -1.265_512_2,
            1.000_023_7,
            0.374_091_96,
            0.096_784_18,
            -0.186_288_06,
            0.278_868_07,
            -1.135_204,
            1.488_515_9,
            -0.822_152_2,
            0.170_872_77,
        ];
        let z = simd.mul(simd.abs(g), simd.splat(std::f32::consts::FRAC_1_SQRT_2));
        let t = simd.div(simd.splat(1.0), simd.fma(simd.splat(0.5), z, simd.splat(1.0)));
        let mut exponent = simd.splat(COEFFICIENTS[9]);
        for &coefficient in COEFFICIENTS[..9].iter().rev() {
            exponent = simd.fma(exponent, t, simd.splat(coefficient));
        }
        let exponent = simd.sub(exponent, simd.mul(z, z));
        let tail = simd.mul(simd.splat(0.5), simd.mul(t, simd.exp(exponent)));
        simd.select(simd.gt(g, simd.splat(0.0)), simd.sub(simd.splat(1.0), tail), tail)
    }

    #[inline(always)]
    fn slope<S: Simd>(self, simd: S, g: S::V, s: S::V) -> S::V {
        const DENSITY: f32 = 0.5 * std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
        let density = simd.mul(simd.splat(DENSITY), simd.exp(simd.mul(simd.splat(-0.5), simd.mul(g, g))));
        simd.fma(g, density, s)
    }
}

struct ActivationForward<'a, A> {
    act: A,
    inputs: &'a [f32],
    a: &'a mut [f32],
    width: usize,
}

impl<A: Act> Task for ActivationForward<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ActivationForward { act, inputs, a, width } = self;
        if inputs.len() == a.len() {
            for i in (0..a.len()).step_by(S::LANES) {
                let u = simd.load_at(inputs, i);
                simd.store_at(a, i, simd.mul(u, act.gate(simd, u)));
            }
            return;
        }
        for (row, a) in inputs.chunks_exact(2 * width).zip(a.chunks_exact_mut(width)) {
            let (gate, up) = row.split_at(width);
            for i in (0..a.len()).step_by(S::LANES) {
                let g = simd.load_at(gate, i);
                simd.store_at(a, i, simd.mul(simd.mul(g, act.gate(simd, g)), simd.load_at(up, i)));
            }
        }
    }
}

struct ActivationBackward<'a, A> {
    act: A,
    inputs: &'a mut [f32],
    da: &'a mut [f32],
    width: usize,
}

impl<A: Act> Task for ActivationBackward<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ActivationBackward { act, inputs, da, width } = self;
        if inputs.len() == da.len() {
            for i in (0..da.len()).step_by(S::LANES) {
                let u = simd.load_at(inputs, i);
                let s = act.gate(simd, u);
                simd.store_at(inputs, i, simd.mul(simd.load_at(da, i), act.slope(simd, u, s)));
                simd.store_at(da, i, simd.mul(u, s));
            }
            return;
        }
        for (row, a) in inputs.chunks_exact_mut(2 * width).zip(da.chunks_exact_mut(width)) {
            let (gate, up) = row.split_at_mut(width);
            for i in (0..a.len()).step_by(S::LANES) {
                let (g, u, da) = (simd.load_at(gate, i), simd.load_at(up, i), simd.load_at(a, i));
                let s = act.gate(simd, g);
                let value = simd.mul(g, s);
                simd.store_at(gate, i, simd.mul(simd.mul(da, u), act.slope(simd, g, s)));
                simd.store_at(up, i, simd.mul(da, value));
                simd.store_at(a, i, simd.mul(value, u));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradient, numbers};

    const ALL: [Activation; 3] = [Activation::Silu, Activation::GeluTanh, Activation::Gelu];

    fn act(activation: Activation, g: f64) -> f64 {
        match activation {
            Activation::Gelu => 0.5 * g * libm::erfc(-g / std::f64::consts::SQRT_2),
            Activation::Silu => g / (1.0 + (-g).exp()),
            Activation::GeluTanh => 0.5 * g * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3))).tanh()),
        }
    }

    /// a of rows of [gate, up].
    fn naive(activation: Activation, gate_up: &[f64], width: usize) -> Vec<f64> {
        let row = |row: &[f64]| (0..width).map(|i| act(activation, row[i]) * row[width + i]).collect::<Vec<_>>();
        gate_up.chunks(2 * width).flat_map(row).collect()
    }

    #[test]
    fn forward_and_backward_match_float64() {
        let sizes = [(1, 1), (1, 15), (3, 16), (2, 33), (7, 5), (600, 37), (1, 20_000)];
        for (activation, (m, width)) in ALL.into_iter().flat_map(|act| sizes.map(|size| (act, size))) {
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
        for activation in ALL {
            let mut a = [f32::NAN; 4];
            forward(activation, &[-200.0, 200.0, -90.0, 90.0, 1.0, 1.0, 1.0, 1.0], &mut a, 4);
            assert!(a[0].abs() < 1e-30 && a[1] == 200.0 && a[2].abs() < 1e-30 && a[3] == 90.0, "{a:?}");
        }
    }

    #[test]
    fn plain_activations_match_float64() {
        for activation in ALL {
            let (m, width) = (7, 37);
            let (x, da) = (numbers(m * width, 1).iter().map(|x| 6.0 * x).collect::<Vec<_>>(), numbers(m * width, 3));
            let plain = |x: &[f64]| x.iter().map(|&x| act(activation, x)).collect::<Vec<_>>();
            let wide: Vec<f64> = x.iter().map(|&x| x as f64).collect();
            let mut a = vec![f32::NAN; m * width];
            forward(activation, &x, &mut a, width);
            assert_close(&a, &plain(&wide), 1e-6, "a");
            let (mut dx, mut again) = (x.clone(), da.clone());
            backward(activation, &mut dx, &mut again, width);
            assert_eq!(again, a, "a recomputed");
            assert_gradient(&dx, &x, &da, plain, "du");
        }
    }
}
