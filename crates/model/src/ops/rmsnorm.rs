//! RMSNorm: h = (o + w)·x·r with r = 1/√(mean(x²) + eps), for x and h [M, C], w [C], r [M]. The offset o is 0, or 1 for models that store w − 1.
//!
//! Backward, with g = dh·(o + w): dx = r·g − x·r³·(g·x)/C and dw = Σ_m dh·x·r.
//!
//! If Σ x² overflows float32, r is computed in float64. Otherwise r, and with it h, would silently become zero.

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::NormInput;
use super::chunks::rows_per_chunk;

/// The parameters of an RMSNorm.
#[derive(Clone, Copy)]
pub struct RmsNormParams<'a> {
    /// w [C]
    pub weight: &'a [f32],
    /// o
    pub offset: f32,
    pub eps: f32,
}

impl RmsNormParams<'_> {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, i: usize) -> S::V {
        simd.add(simd.load_at(self.weight, i), simd.splat(self.offset))
    }
}

/// Computes h and r from x. The backward pass needs r.
pub fn forward(x: &[f32], scale: RmsNormParams, h: &mut [f32], inverse: &mut [f32]) {
    let width = scale.weight.len();
    let rows = rows_per_chunk(width);
    (x.par_chunks(rows * width), h.par_chunks_mut(rows * width), inverse.par_chunks_mut(rows))
        .into_par_iter()
        .for_each(|(x, h, inverse)| dispatch(RmsNormForward { x, scale, h, inverse }));
}

/// x = base + step, then [`forward`] of x in the same pass over memory. `step` is overwritten by h.
pub fn forward_residual(base: &[f32], x: &mut [f32], scale: RmsNormParams, step: &mut [f32], inverse: &mut [f32]) {
    let width = scale.weight.len();
    let rows = rows_per_chunk(width);
    (base.par_chunks(rows * width), x.par_chunks_mut(rows * width), step.par_chunks_mut(rows * width), inverse.par_chunks_mut(rows))
        .into_par_iter()
        .for_each(|(base, x, step, inverse)| {
            dispatch(AddResidual { base, step, x });
            dispatch(RmsNormForward { x, scale, h: step, inverse });
        });
}

/// x = base + step, for a residual without a norm.
pub fn add(base: &[f32], step: &[f32], x: &mut [f32], width: usize) {
    let chunk = rows_per_chunk(width) * width;
    (base.par_chunks(chunk), step.par_chunks(chunk), x.par_chunks_mut(chunk))
        .into_par_iter()
        .for_each(|(base, step, x)| dispatch(AddResidual { base, step, x }));
}

/// Length of the scratch of [`backward`] for M rows of width C.
pub fn scratch_len(rows: usize, width: usize) -> usize {
    rows.div_ceil(rows_per_chunk(width)) * width
}

/// Adds the gradients of x and w to `dx` and `dweight`. `dh` is overwritten by h, which the weight gradients of the following projections need.
///
/// dw is summed within chunks of rows, then over the chunks in order. `scratch` has [`scratch_len`] values.
pub fn backward(input: NormInput, scale: RmsNormParams, dh: &mut [f32], dx: &mut [f32], dweight: &mut [f32], scratch: &mut [f32]) {
    let NormInput { x, inverse } = input;
    let width = scale.weight.len();
    let rows = rows_per_chunk(width);
    (
        x.par_chunks(rows * width),
        inverse.par_chunks(rows),
        dh.par_chunks_mut(rows * width),
        dx.par_chunks_mut(rows * width),
        scratch.par_chunks_mut(width),
    )
        .into_par_iter()
        .for_each(|(x, inverse, dh, dx, partial)| dispatch(RmsNormBackward { x, scale, inverse, dh, dx, partial }));
    for partial in scratch[..scratch_len(inverse.len(), width)].chunks_exact(width) {
        dweight.iter_mut().zip(partial).for_each(|(sum, part)| *sum += part);
    }
}

struct AddResidual<'a> {
    base: &'a [f32],
    step: &'a [f32],
    x: &'a mut [f32],
}

impl Task for AddResidual<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for i in (0..self.x.len()).step_by(S::LANES) {
            simd.store_at(self.x, i, simd.add(simd.load_at(self.base, i), simd.load_at(self.step, i)));
        }
    }
}

struct RmsNormForward<'a> {
    x: &'a [f32],
    scale: RmsNormParams<'a>,
    h: &'a mut [f32],
    inverse: &'a mut [f32],
}

impl Task for RmsNormForward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let RmsNormParams { eps, .. } = self.scale;
        let width = self.scale.weight.len();
        for (x, inverse) in self.x.chunks_exact(width).zip(self.inverse.iter_mut()) {
            let mut squares = simd.splat(0.0);
            for i in (0..width).step_by(S::LANES) {
                let x = simd.load_at(x, i);
                squares = simd.fma(x, x, squares);
            }
            let squares = simd.sum(squares);
            *inverse = if squares.is_finite() { 1.0 / (squares / width as f32 + eps).sqrt() } else { inverse_in_float64(x, eps) };
        }
        for ((x, h), &inverse) in self.x.chunks_exact(width).zip(self.h.chunks_exact_mut(width)).zip(self.inverse.iter()) {
            let r = simd.splat(inverse);
            for i in (0..width).step_by(S::LANES) {
                simd.store_at(h, i, simd.mul(self.scale.at(simd, i), simd.mul(simd.load_at(x, i), r)));
            }
        }
    }
}

/// r of a row whose sum of squares overflows float32; NaN if the row contains NaN or infinity.
#[cold]
fn inverse_in_float64(x: &[f32], eps: f32) -> f32 {
    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    if squares.is_finite() { (1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt()) as f32 } else { f32::NAN }
}

struct RmsNormBackward<'a> {
    x: &'a [f32],
    scale: RmsNormParams<'a>,
    inverse: &'a [f32],
    dh: &'a mut [f32],
    dx: &'a mut [f32],
    partial: &'a mut [f32],
}

impl Task for RmsNormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let RmsNormBackward { scale, partial, .. } = self;
        let width = scale.weight.len();
        partial.fill(0.0);
        let rows = self.x.chunks_exact(width).zip(self.dh.chunks_exact_mut(width)).zip(self.dx.chunks_exact_mut(width));
        for (((x, dh), dx), &inverse) in rows.zip(self.inverse) {
            let mut product = simd.splat(0.0);
            for i in (0..width).step_by(S::LANES) {
                let g = simd.mul(simd.load_at(dh, i), scale.at(simd, i));
                product = simd.fma(g, simd.load_at(x, i), product);
            }
            let r = simd.splat(inverse);
            // In this order, since r² alone underflows for large x.
            let along = simd.splat(-inverse * (inverse * simd.sum(product) / width as f32));
            for i in (0..width).step_by(S::LANES) {
                let (w, d) = (scale.at(simd, i), simd.load_at(dh, i));
                let unit = simd.mul(simd.load_at(x, i), r);
                let gradient = simd.fma(unit, along, simd.mul(simd.mul(d, w), r));
                simd.store_at(dx, i, simd.add(simd.load_at(dx, i), gradient));
                simd.store_at(partial, i, simd.fma(d, unit, simd.load_at(partial, i)));
                simd.store_at(dh, i, simd.mul(w, unit));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradient, numbers};

    const EPS: f32 = 1e-2;

    fn scale(weight: &[f32]) -> RmsNormParams<'_> {
        RmsNormParams { weight, offset: 0.0, eps: EPS }
    }

    fn naive(x: &[f64], w: &[f64]) -> Vec<f64> {
        let c = w.len();
        let row = |x: &[f64]| {
            let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / c as f64 + EPS as f64).sqrt();
            x.iter().zip(w).map(|(x, w)| x * w * r).collect::<Vec<_>>()
        };
        x.chunks(c).flat_map(row).collect()
    }

    /// dx of one row, by the formula at the top of this file.
    fn naive_gradient(x: &[f64], w: &[f64], dh: &[f64]) -> Vec<f64> {
        let c = x.len() as f64;
        let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / c + EPS as f64).sqrt();
        let product: f64 = x.iter().zip(w).zip(dh).map(|((x, w), dh)| x * w * dh).sum();
        x.iter().zip(w).zip(dh).map(|((x, w), dh)| r * dh * w - x * r.powi(3) * product / c).collect()
    }

    #[test]
    fn overflowing_squares_do_not_zero_the_output() {
        let (m, c) = (4, 37);
        let (w, dh) = (numbers(c, 2), numbers(m * c, 3));
        let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
        for size in [1e18f32, 1e20, 1e25, 1e37, 3e38] {
            let x: Vec<f32> = numbers(m * c, 1).iter().map(|x| x * size).collect();
            let (mut h, mut inverse) = (vec![f32::NAN; m * c], vec![f32::NAN; m]);
            forward(&x, scale(&w), &mut h, &mut inverse);
            assert_close(&h, &naive(&wide(&x), &wide(&w)), 1e-6, "h");
            if size > 1e30 {
                // The gradients underflow in float32.
                continue;
            }
            let (mut dx, mut dw, mut again, mut scratch) = (vec![0.0; m * c], vec![0.0; c], dh.clone(), vec![f32::NAN; scratch_len(m, c)]);
            backward(NormInput { x: &x, inverse: &inverse }, scale(&w), &mut again, &mut dx, &mut dw, &mut scratch);
            let expected =
                wide(&x).chunks(c).zip(wide(&dh).chunks(c)).flat_map(|(x, dh)| naive_gradient(x, &wide(&w), dh)).collect::<Vec<_>>();
            // Scaled by the size, since the mean of their squares would underflow.
            let [dx, expected] = [wide(&dx), expected].map(|dx| dx.iter().map(|dx| dx * size as f64).collect::<Vec<_>>());
            assert_close(&dx.iter().map(|&dx| dx as f32).collect::<Vec<_>>(), &expected, 1e-5, "dx");
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = numbers(m * c, 1);
            x[c + 3] = bad;
            let (mut h, mut inverse) = (vec![0.0; m * c], vec![0.0; m]);
            forward(&x, scale(&w), &mut h, &mut inverse);
            assert!(h[c..2 * c].iter().all(|h| h.is_nan()) && h[2 * c..].iter().all(|h| h.is_finite()), "{bad}");
        }
    }

    #[test]
    fn forward_and_backward_match_float64() {
        for (m, c) in [(1, 1), (3, 7), (5, 32), (70, 300)] {
            let (x, w, dh) = (numbers(m * c, 1), numbers(c, 2), numbers(m * c, 3));
            let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
            let (mut h, mut inverse) = (vec![f32::NAN; m * c], vec![f32::NAN; m]);
            forward(&x, scale(&w), &mut h, &mut inverse);
            assert_close(&h, &naive(&wide(&x), &wide(&w)), 1e-6, "h");

            let (step, mut sum, mut inverse2) = (numbers(m * c, 4), vec![f32::NAN; m * c], vec![f32::NAN; m]);
            let mut fused = step.clone();
            forward_residual(&x, &mut sum, scale(&w), &mut fused, &mut inverse2);
            let expected: Vec<f32> = x.iter().zip(&step).map(|(a, b)| a + b).collect();
            assert_eq!(sum, expected);
            assert_close(&fused, &naive(&wide(&expected), &wide(&w)), 1e-6, "h after the residual");

            let start = numbers(m * c, 5);
            let (mut dx, mut dw, mut again, mut scratch) = (start.clone(), vec![0.0; c], dh.clone(), vec![f32::NAN; scratch_len(m, c)]);
            backward(NormInput { x: &x, inverse: &inverse }, scale(&w), &mut again, &mut dx, &mut dw, &mut scratch);
            assert_eq!(again, h, "h again");
            dx.iter_mut().zip(&start).for_each(|(dx, start)| *dx -= start);
            if m * c <= 200 {
                assert_gradient(&dx, &x, &dh, |x| naive(x, &wide(&w)), "dx");
            }
            assert_gradient(&dw, &w, &dh, |w| naive(&wide(&x), w), "dw");
        }
    }

    #[test]
    fn an_offset_of_one_gives_the_same_output_and_gradient() {
        let (m, c) = (5, 37);
        let (x, dh) = (numbers(m * c, 1), numbers(m * c, 3));
        // Multiples of 1/16, so w − 1 is exact.
        let w: Vec<f32> = (0..c).map(|i| i as f32 / 16.0 - 1.0).collect();
        let less: Vec<f32> = w.iter().map(|w| w - 1.0).collect();
        let run = |scale: RmsNormParams| {
            let (mut h, mut inverse) = (vec![f32::NAN; m * c], vec![f32::NAN; m]);
            forward(&x, scale, &mut h, &mut inverse);
            let (mut dx, mut dw, mut again, mut scratch) = (vec![0.0; m * c], vec![0.0; c], dh.clone(), vec![f32::NAN; scratch_len(m, c)]);
            backward(NormInput { x: &x, inverse: &inverse }, scale, &mut again, &mut dx, &mut dw, &mut scratch);
            [h, again, dx, dw]
        };
        assert_eq!(run(scale(&w)), run(RmsNormParams { offset: 1.0, ..scale(&less) }));
    }
}
