//! h = (o + w)·x·r with r = 1/√(mean(x²) + eps), for x and h [M, C], w [C], r [M]; o is 0, or 1 where weights are kept less one.
//!
//! Backward, with g = dh·(o + w): dx = r·g − x·r³·(g·x)/C and dw = Σ_m dh·x·r.
//!
//! Any finite x has its r, also where Σ x² is beyond float32: an overflow there would make r, and so h, zero without a trace.

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::pieces::rows_of;

/// What a norm multiplies by, and what it keeps from dividing by zero.
#[derive(Clone, Copy)]
pub struct Scale<'a> {
    /// w [C]
    pub weight: &'a [f32],
    /// o
    pub offset: f32,
    pub eps: f32,
}

impl Scale<'_> {
    #[inline(always)]
    fn at<S: Simd>(&self, simd: S, i: usize) -> S::V {
        simd.add(simd.load_at(self.weight, i), simd.splat(self.offset))
    }
}

/// h and r from x; r is kept for the backward pass.
pub fn forward(x: &[f32], scale: Scale, h: &mut [f32], inverse: &mut [f32]) {
    let width = scale.weight.len();
    let piece = rows_of(width);
    (x.par_chunks(piece * width), h.par_chunks_mut(piece * width), inverse.par_chunks_mut(piece))
        .into_par_iter()
        .for_each(|(x, h, inverse)| dispatch(Forward { x, scale, h, inverse }));
}

/// x += step, the residual, then as [`forward`]: one pass over memory for both. `step` holds h afterwards.
pub fn forward_residual(base: &[f32], x: &mut [f32], scale: Scale, step: &mut [f32], inverse: &mut [f32]) {
    let width = scale.weight.len();
    let piece = rows_of(width);
    (base.par_chunks(piece * width), x.par_chunks_mut(piece * width), step.par_chunks_mut(piece * width), inverse.par_chunks_mut(piece))
        .into_par_iter()
        .for_each(|(base, x, step, inverse)| {
            dispatch(Add { base, step, x });
            dispatch(Forward { x, scale, h: step, inverse });
        });
}

/// x = base + step: the residual without a norm behind it.
pub fn add(base: &[f32], step: &[f32], x: &mut [f32], width: usize) {
    let piece = rows_of(width) * width;
    (base.par_chunks(piece), step.par_chunks(piece), x.par_chunks_mut(piece))
        .into_par_iter()
        .for_each(|(base, step, x)| dispatch(Add { base, step, x }));
}

/// Partial sums of dw that [`backward`] needs for M rows of width C.
pub fn scratch_len(rows: usize, width: usize) -> usize {
    rows.div_ceil(rows_of(width)) * width
}

/// dx += the gradient through the norm, dw += its own. In place: `dh` becomes h, which the gradients of the weights behind it need.
///
/// dw is summed over pieces of rows, then over pieces in order; `scratch` has [`scratch_len`] values.
pub fn backward(x: &[f32], scale: Scale, inverse: &[f32], dh: &mut [f32], dx: &mut [f32], dweight: &mut [f32], scratch: &mut [f32]) {
    let width = scale.weight.len();
    let piece = rows_of(width);
    (
        x.par_chunks(piece * width),
        inverse.par_chunks(piece),
        dh.par_chunks_mut(piece * width),
        dx.par_chunks_mut(piece * width),
        scratch.par_chunks_mut(width),
    )
        .into_par_iter()
        .for_each(|(x, inverse, dh, dx, partial)| dispatch(Backward { x, scale, inverse, dh, dx, partial }));
    for partial in scratch[..scratch_len(inverse.len(), width)].chunks_exact(width) {
        dweight.iter_mut().zip(partial).for_each(|(sum, part)| *sum += part);
    }
}

struct Add<'a> {
    base: &'a [f32],
    step: &'a [f32],
    x: &'a mut [f32],
}

impl Task for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for i in (0..self.x.len()).step_by(S::LANES) {
            simd.store_at(self.x, i, simd.add(simd.load_at(self.base, i), simd.load_at(self.step, i)));
        }
    }
}

struct Forward<'a> {
    x: &'a [f32],
    scale: Scale<'a>,
    h: &'a mut [f32],
    inverse: &'a mut [f32],
}

impl Task for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Scale { eps, .. } = self.scale;
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

/// r of a row whose squares overflow, or that is not finite itself; then it is NaN.
#[cold]
fn inverse_in_float64(x: &[f32], eps: f32) -> f32 {
    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    if squares.is_finite() { (1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt()) as f32 } else { f32::NAN }
}

struct Backward<'a> {
    x: &'a [f32],
    scale: Scale<'a>,
    inverse: &'a [f32],
    dh: &'a mut [f32],
    dx: &'a mut [f32],
    partial: &'a mut [f32],
}

impl Task for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Backward { scale, partial, .. } = self;
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
            // In this order: r² alone would vanish for large x.
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

    fn scale(weight: &[f32]) -> Scale<'_> {
        Scale { weight, offset: 0.0, eps: EPS }
    }

    fn naive(x: &[f64], w: &[f64]) -> Vec<f64> {
        let c = w.len();
        let row = |x: &[f64]| {
            let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / c as f64 + EPS as f64).sqrt();
            x.iter().zip(w).map(|(x, w)| x * w * r).collect::<Vec<_>>()
        };
        x.chunks(c).flat_map(row).collect()
    }

    /// dx of one row, by the formula of the module.
    fn naive_gradient(x: &[f64], w: &[f64], dh: &[f64]) -> Vec<f64> {
        let c = x.len() as f64;
        let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / c + EPS as f64).sqrt();
        let product: f64 = x.iter().zip(w).zip(dh).map(|((x, w), dh)| x * w * dh).sum();
        x.iter().zip(w).zip(dh).map(|((x, w), dh)| r * dh * w - x * r.powi(3) * product / c).collect()
    }

    #[test]
    fn squares_beyond_float32_are_neither_zero_nor_hidden() {
        let (m, c) = (4, 37);
        let (w, dh) = (numbers(c, 2), numbers(m * c, 3));
        let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
        for size in [1e18f32, 1e20, 1e25, 1e37, 3e38] {
            let x: Vec<f32> = numbers(m * c, 1).iter().map(|x| x * size).collect();
            let (mut h, mut inverse) = (vec![f32::NAN; m * c], vec![f32::NAN; m]);
            forward(&x, scale(&w), &mut h, &mut inverse);
            assert_close(&h, &naive(&wide(&x), &wide(&w)), 1e-6, "h");
            if size > 1e30 {
                // Gradients below what float32 can say.
                continue;
            }
            let (mut dx, mut dw, mut again, mut scratch) = (vec![0.0; m * c], vec![0.0; c], dh.clone(), vec![f32::NAN; scratch_len(m, c)]);
            backward(&x, scale(&w), &inverse, &mut again, &mut dx, &mut dw, &mut scratch);
            let expected =
                wide(&x).chunks(c).zip(wide(&dh).chunks(c)).flat_map(|(x, dh)| naive_gradient(x, &wide(&w), dh)).collect::<Vec<_>>();
            // Both times the size, since a mean of their squares would vanish.
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
            backward(&x, scale(&w), &inverse, &mut again, &mut dx, &mut dw, &mut scratch);
            assert_eq!(again, h, "h again");
            dx.iter_mut().zip(&start).for_each(|(dx, start)| *dx -= start);
            if m * c <= 200 {
                assert_gradient(&dx, &x, &dh, |x| naive(x, &wide(&w)), "dx");
            }
            assert_gradient(&dw, &w, &dh, |w| naive(&wide(&x), w), "dw");
        }
    }
    #[test]
    fn weights_less_one_give_the_same_and_have_the_same_gradient() {
        let (m, c) = (5, 37);
        let (x, dh) = (numbers(m * c, 1), numbers(m * c, 3));
        // Sixteenths, from which one can be taken exactly.
        let w: Vec<f32> = (0..c).map(|i| i as f32 / 16.0 - 1.0).collect();
        let less: Vec<f32> = w.iter().map(|w| w - 1.0).collect();
        let run = |scale: Scale| {
            let (mut h, mut inverse) = (vec![f32::NAN; m * c], vec![f32::NAN; m]);
            forward(&x, scale, &mut h, &mut inverse);
            let (mut dx, mut dw, mut again, mut scratch) = (vec![0.0; m * c], vec![0.0; c], dh.clone(), vec![f32::NAN; scratch_len(m, c)]);
            backward(&x, scale, &inverse, &mut again, &mut dx, &mut dw, &mut scratch);
            [h, again, dx, dw]
        };
        assert_eq!(run(scale(&w)), run(Scale { offset: 1.0, ..scale(&less) }));
    }
}
