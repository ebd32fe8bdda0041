//! w(x) = e^x

use crate::Real;
use crate::parts::kernel::{KernelPart, Sign};
use crate::parts::slot::{Info, unit_part};
use termwise_kernels::score_rows::{BackwardRow, ForwardRow, Rescale, ScoreKernel};
use termwise_kernels::simd::Simd;

unit_part! {
    /// The exponential.
    Exp,
    Info {
        word: "exp",
        usage: "exp",
        formula: "w(x) = e^x",
        about: "The exponential: all orders at once, hence no finite state.",
        examples: &[""],
    }
}

impl KernelPart for Exp {
    fn sign(&self) -> Sign {
        Sign::Positive
    }

    fn polynomial(&self) -> Option<Vec<(usize, f64)>> {
        None
    }

    #[inline(always)]
    fn value<R: Real>(&self, x: R) -> R {
        x.exp()
    }

    #[inline(always)]
    fn slope<R: Real>(&self, x: R) -> R {
        x.exp()
    }

    // Rows are short, so the overhead of a call would be significant.

    #[inline(always)]
    fn forward_row<S: Simd>(&self, simd: S, row: ForwardRow) -> Option<(f32, f32)> {
        row.run(simd, self)
    }

    #[inline(always)]
    fn backward_row<S: Simd>(&self, simd: S, row: BackwardRow) -> f32 {
        row.run(simd, self)
    }
}

impl ScoreKernel for Exp {
    const RESCALE: Rescale = Rescale::SubtractMax;

    #[inline(always)]
    fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V {
        simd.exp(x)
    }

    #[inline(always)]
    fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V) {
        let w = simd.exp(x);
        (w, w)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{check_kernel, check_vectors};

    #[test]
    fn closed_form_and_slope() {
        check_kernel(&Exp, f64::exp);
    }

    #[test]
    fn vectors_agree_with_float64() {
        let x: Vec<f32> = (-240..=240).map(|i| i as f32 / 8.0).collect();
        let bound = |x: f64| 1e-6 * x.exp();
        check_vectors(&Exp, &x, bound, bound);
    }
}
