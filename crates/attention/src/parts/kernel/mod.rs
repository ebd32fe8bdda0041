//! w, the kernel: the weight of a value as a function of the score.

pub mod exp;
pub mod feature;
pub mod hedgehog;
pub mod power;
pub mod taylor;

use crate::Real;
use crate::parts::kernel::feature::Map;
use crate::parts::slot::{Part, slot};
use termwise_kernels::combinatorics::monomials;
use termwise_kernels::score_rows::{BackwardRow, CoefficientRow, ForwardRow, Rescale, ScoreKernel};
use termwise_kernels::simd::{Simd, Task};

/// The possible signs of a kernel's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Positive.
    Positive,
    /// Nonnegative.
    Nonnegative,
    /// Either.
    Mixed,
}

/// The methods of a kernel.
pub trait KernelPart: Part + ScoreKernel {
    /// How its rows are rescaled if a variant cancels the factor: [`ScoreKernel::RESCALE`] or none.
    fn rescale(&self) -> Rescale {
        Self::RESCALE
    }
    /// φ, applied to q and k before their product.
    fn map(&self) -> Map {
        Map::Identity
    }
    /// Whether learned features, which double the dimension, are applied to q and k before φ.
    fn has_learned_map(&self) -> bool {
        false
    }
    /// The possible signs of its weights.
    fn sign(&self) -> Sign;
    /// The orders n and coefficients a_n of w(x) = Σ_n a_n·x^n/n!, ascending; `None` if w is not a polynomial.
    fn polynomial(&self) -> Option<Vec<(usize, f64)>>;
    /// Rows of its finite feature map for head dimension d, per order; `None` for an infinite map.
    fn state_rows(&self, d: usize) -> Option<Vec<(usize, u128)>> {
        Some(self.polynomial()?.into_iter().map(|(n, _)| (n, monomials(d, n))).collect())
    }
    /// ∂w/∂a_n for every learned coefficient, at x.
    fn learned_slopes(&self, _x: f64, _slopes: &mut [f64]) {}

    /// w(x)
    fn value<R: Real>(&self, x: R) -> R;
    /// w'(x)
    fn slope<R: Real>(&self, x: R) -> R;

    /// One row of a tile, forward: scores become weights. The loop is compiled here for each kernel, as a separate function and once
    /// for all callers: inlined into tiles, functions would take minutes to compile.
    #[inline(always)]
    fn forward_row<S: Simd>(&self, simd: S, row: ForwardRow) -> Option<(f32, f32)> {
        simd.call(ForwardTask(self, row))
    }
    /// One row of a tile, backward.
    #[inline(always)]
    fn backward_row<S: Simd>(&self, simd: S, row: BackwardRow) -> f32 {
        simd.call(BackwardTask(self, row))
    }
    /// The gradients of its learned coefficients over one row of a tile.
    #[inline(always)]
    fn learned_row<S: Simd>(&self, _simd: S, _row: CoefficientRow, _grads: &mut [f64]) {}
}

struct ForwardTask<'a, K>(&'a K, ForwardRow<'a>);

impl<K: ScoreKernel> Task for ForwardTask<'_, K> {
    type Output = Option<(f32, f32)>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Option<(f32, f32)> {
        self.1.run(simd, self.0)
    }
}

struct BackwardTask<'a, K>(&'a K, BackwardRow<'a>);

impl<K: ScoreKernel> Task for BackwardTask<'_, K> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        self.1.run(simd, self.0)
    }
}

slot! {
    /// The kernel of a variant.
    Kernel { exp::Exp, taylor::Taylor, power::Power, feature::Feature }
    /// How its rows are rescaled.
    fn rescale() -> Rescale;
    /// φ, applied to q and k before their product.
    fn map() -> Map;
    /// Whether learned features, which double the dimension, are applied to q and k before φ.
    fn has_learned_map() -> bool;
    /// The possible signs of its weights.
    fn sign() -> Sign;
    /// The orders n and coefficients a_n of w(x) = Σ_n a_n·x^n/n!, ascending; `None` if w is not a polynomial.
    fn polynomial() -> Option<Vec<(usize, f64)>>;
    /// Rows of its finite feature map for head dimension d per order; `None` for an infinite map.
    fn state_rows(d: usize) -> Option<Vec<(usize, u128)>>;
    /// ∂w/∂a_n for every learned coefficient, at x.
    fn learned_slopes(x: f64, slopes: &mut [f64]);
    /// w(x)
    fn value<R: Real>(x: R) -> R;
    /// w'(x)
    fn slope<R: Real>(x: R) -> R;
    /// w of a vector.
    fn values<S: Simd>(simd: S, x: S::V) -> S::V;
    /// w and w' of a vector.
    fn values_and_slopes<S: Simd>(simd: S, x: S::V) -> (S::V, S::V);
    /// One row of a tile, forward.
    fn forward_row<S: Simd>(simd: S, row: ForwardRow) -> Option<(f32, f32)>;
    /// One row of a tile, backward.
    fn backward_row<S: Simd>(simd: S, row: BackwardRow) -> f32;
    /// The gradients of its learned coefficients over one row of a tile.
    fn learned_row<S: Simd>(simd: S, row: CoefficientRow, grads: &mut [f64]);
}

impl Kernel {
    /// a_n of a series with its bound learned coefficients; undefined for other kernels.
    pub(crate) fn coefficient(&self, n: usize) -> f64 {
        if let Kernel::Taylor(taylor) = self { taylor.coefficient(n) } else { 1.0 }
    }

    /// Whether it is e^x, whose weights can absorb a factor into the exponent.
    pub(crate) fn is_exp(&self) -> bool {
        matches!(self, Kernel::Exp(_))
    }

    /// Binds learned coefficients, if it has any.
    pub fn bind(&mut self, learned: &[f64]) {
        if let Kernel::Taylor(taylor) = self {
            taylor.bind(learned);
        }
    }
}
