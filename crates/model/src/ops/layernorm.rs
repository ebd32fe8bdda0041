//! LayerNorm: h = w·(x − μ)·r + b with μ = mean(x) and r = 1/√(var(x) + eps), for x and h [M, C], w and b [C], r [M].
//!
//! Backward, with x̂ = (x − μ)·r and g = dh·w: dx = r·(g − mean(g) − x̂·mean(g·x̂)), dw = Σ_m dh·x̂ and db = Σ_m dh.

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::NormInput;
use super::chunks::rows_per_chunk;

/// The parameters of a LayerNorm.
#[derive(Clone, Copy)]
pub struct LayerNormParams<'a> {
    /// w [C]
    pub weight: &'a [f32],
    /// b [C]
    pub bias: &'a [f32],
    pub eps: f32,
}

/// Computes h and r from x. The backward pass needs r.
pub fn forward(x: &[f32], affine: LayerNormParams, h: &mut [f32], inverse: &mut [f32]) {
    let width = affine.weight.len();
    let rows = rows_per_chunk(width);
    (x.par_chunks(rows * width), h.par_chunks_mut(rows * width), inverse.par_chunks_mut(rows))
        .into_par_iter()
        .for_each(|(x, h, inverse)| dispatch(LayerNormForward { x, affine, h, inverse }));
}

/// Length of the scratch of [`backward`] for M rows of width C.
pub fn scratch_len(rows: usize, width: usize) -> usize {
    2 * rows.div_ceil(rows_per_chunk(width)) * width
}

/// Adds the gradients of x, w and b to `dx`, `dweight` and `dbias`. `dh` is overwritten by h, which the weight gradients of the following
/// projections need.
///
/// dw and db are summed within chunks of rows, then over the chunks in order. `scratch` has [`scratch_len`] values.
pub fn backward(
    input: NormInput,
    affine: LayerNormParams,
    dh: &mut [f32],
    dx: &mut [f32],
    [dweight, dbias]: [&mut [f32]; 2],
    scratch: &mut [f32],
) {
    let NormInput { x, inverse } = input;
    let width = affine.weight.len();
    let rows = rows_per_chunk(width);
    (
        x.par_chunks(rows * width),
        inverse.par_chunks(rows),
        dh.par_chunks_mut(rows * width),
        dx.par_chunks_mut(rows * width),
        scratch.par_chunks_mut(2 * width),
    )
        .into_par_iter()
        .for_each(|(x, inverse, dh, dx, partial)| dispatch(LayerNormBackward { x, affine, inverse, dh, dx, partial }));
    for partial in scratch[..scratch_len(inverse.len(), width)].chunks_exact(2 * width) {
        let (weight, bias) = partial.split_at(width);
        dweight.iter_mut().zip(weight).for_each(|(sum, part)| *sum += part);
        dbias.iter_mut().zip(bias).for_each(|(sum, part)| *sum += part);
    }
}

/// The mean of a row.
#[inline(always)]
fn mean<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let mut sum = simd.splat(0.0);
    for i in (0..x.len()).step_by(S::LANES) {
        sum = simd.add(sum, simd.load_at(x, i));
    }
    simd.sum(sum) / x.len() as f32
}

struct LayerNormForward<'a> {
    x: &'a [f32],
    affine: LayerNormParams<'a>,
    h: &'a mut [f32],
    inverse: &'a mut [f32],
}

impl Task for LayerNormForward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let LayerNormParams { weight, bias, eps } = self.affine;
        let width = weight.len();
        for ((x, h), inverse) in self.x.chunks_exact(width).zip(self.h.chunks_exact_mut(width)).zip(self.inverse.iter_mut()) {
            let mean = simd.splat(mean(simd, x));
            for i in (0..width).step_by(S::LANES) {
                simd.store_at(h, i, simd.sub(simd.load_at(x, i), mean));
            }
            let mut squares = simd.splat(0.0);
            for i in (0..width).step_by(S::LANES) {
                let centered = simd.load_at(h, i);
                squares = simd.fma(centered, centered, squares);
            }
            *inverse = 1.0 / (simd.sum(squares) / width as f32 + eps).sqrt();
            let r = simd.splat(*inverse);
            for i in (0..width).step_by(S::LANES) {
                let unit = simd.mul(simd.load_at(h, i), r);
                simd.store_at(h, i, simd.fma(simd.load_at(weight, i), unit, simd.load_at(bias, i)));
            }
        }
    }
}

struct LayerNormBackward<'a> {
    x: &'a [f32],
    affine: LayerNormParams<'a>,
    inverse: &'a [f32],
    dh: &'a mut [f32],
    dx: &'a mut [f32],
    /// Partial sums of dw, then of db.
    partial: &'a mut [f32],
}

impl Task for LayerNormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let LayerNormParams { weight, bias, .. } = self.affine;
        let width = weight.len();
        self.partial.fill(0.0);
        let (dweight, dbias) = self.partial.split_at_mut(width);
        let rows = self.x.chunks_exact(width).zip(self.dh.chunks_exact_mut(width)).zip(self.dx.chunks_exact_mut(width));
        for (((x, dh), dx), &inverse) in rows.zip(self.inverse) {
            let (mean, r) = (simd.splat(mean(simd, x)), simd.splat(inverse));
            let (mut sum, mut product) = (simd.splat(0.0), simd.splat(0.0));
            for i in (0..width).step_by(S::LANES) {
                let g = simd.mul(simd.load_at(dh, i), simd.load_at(weight, i));
                // Lanes past the end have a gradient of zero, so their x − μ does not contribute.
                let unit = simd.mul(simd.sub(simd.load_at(x, i), mean), r);
                (sum, product) = (simd.add(sum, g), simd.fma(g, unit, product));
            }
            let of = |sum: S::V| simd.splat(simd.sum(sum) / width as f32);
            let (constant, along) = (of(sum), of(product));
            for i in (0..width).step_by(S::LANES) {
                let (w, d) = (simd.load_at(weight, i), simd.load_at(dh, i));
                let unit = simd.mul(simd.sub(simd.load_at(x, i), mean), r);
                let gradient = simd.sub(simd.sub(simd.mul(d, w), constant), simd.mul(unit, along));
                simd.store_at(dx, i, simd.fma(gradient, r, simd.load_at(dx, i)));
                simd.store_at(dweight, i, simd.fma(d, unit, simd.load_at(dweight, i)));
                simd.store_at(dbias, i, simd.add(d, simd.load_at(dbias, i)));
                simd.store_at(dh, i, simd.fma(w, unit, simd.load_at(bias, i)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradient, numbers};

    const EPS: f32 = 1e-2;

    fn naive(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
        let c = w.len();
        let row = |x: &[f64]| {
            let mean = x.iter().sum::<f64>() / c as f64;
            let r = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c as f64 + EPS as f64).sqrt();
            x.iter().zip(w).zip(b).map(|((x, w), b)| (x - mean) * r * w + b).collect::<Vec<_>>()
        };
        x.chunks(c).flat_map(row).collect()
    }

    #[test]
    fn forward_and_backward_match_float64() {
        for (m, c) in [(1, 1), (3, 7), (5, 32), (70, 300)] {
            // A mean far from zero, which the norm has to remove first.
            let x: Vec<f32> = numbers(m * c, 1).iter().map(|x| x + 3.0).collect();
            let (w, b, dh) = (numbers(c, 2), numbers(c, 4), numbers(m * c, 3));
            let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
            let affine = LayerNormParams { weight: &w, bias: &b, eps: EPS };
            let (mut h, mut inverse) = (vec![f32::NAN; m * c], vec![f32::NAN; m]);
            forward(&x, affine, &mut h, &mut inverse);
            assert_close(&h, &naive(&wide(&x), &wide(&w), &wide(&b)), 2e-6, "h");

            let start = numbers(m * c, 5);
            let (mut dx, mut dw, mut db) = (start.clone(), vec![0.0; c], vec![0.0; c]);
            let (mut again, mut scratch) = (dh.clone(), vec![f32::NAN; scratch_len(m, c)]);
            backward(NormInput { x: &x, inverse: &inverse }, affine, &mut again, &mut dx, [&mut dw, &mut db], &mut scratch);
            assert_close(&again, &wide(&h), 1e-6, "h recomputed");
            dx.iter_mut().zip(&start).for_each(|(dx, start)| *dx -= start);
            if c > 1 && m * c <= 200 {
                assert_gradient(&dx, &x, &dh, |x| naive(x, &wide(&w), &wide(&b)), "dx");
            }
            assert_gradient(&dw, &w, &dh, |w| naive(&wide(&x), w, &wide(&b)), "dw");
            assert_gradient(&db, &b, &dh, |b| naive(&wide(&x), &wide(&w), b), "db");
        }
    }
}
