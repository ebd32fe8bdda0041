//! w, the kernel: what a score becomes before it weighs a value.

use super::feature::Map;
use super::slot::{Part, slot};
use super::{exp, feature, power, taylor};
use crate::Real;
use crate::fused::rows::{BackwardRow, ForwardRow};
use crate::simd::Simd;
use crate::terms::monomials;

/// Which signs a kernel's weights can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Above zero everywhere.
    Positive,
    /// Zero or above.
    Nonnegative,
    /// Either.
    Mixed,
}

/// How the weights of a row, which float32 may not hold, become w(x)·e^{−ρ}, which it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// They are as they are.
    Fixed,
    /// ρ is subtracted from the scores: w(x)·e^{−ρ} = w(x − ρ). Follows the row maximum.
    Shift,
    /// Weights are multiplied by e^{−ρ}. Zero until scores are so large that weights would come near the end of float32.
    Scale,
}

/// Weights up to e^40 are left as they are: their squares and long sums of them are still within float32.
pub(crate) const CALM: f32 = 40.0;

/// Polynomials of lower degree reach e^40 only for scores beyond 300, and are left as they are.
pub(crate) const SCALED_FROM: usize = 8;

impl Frame {
    /// ρ before the first key.
    pub(crate) fn start(self) -> f32 {
        if self == Frame::Shift { f32::NEG_INFINITY } else { 0.0 }
    }

    /// ρ, where there is one.
    pub(crate) fn of(self, rho: f32) -> Option<f32> {
        (self != Frame::Fixed).then_some(rho)
    }
}

/// What every kernel provides.
pub trait KernelPart: Part {
    /// The frame of its rows, where a variant has something that cancels it.
    const FRAME: Frame = Frame::Fixed;

    /// The frame that this kernel needs: [`KernelPart::FRAME`] or none.
    fn frame(&self) -> Frame {
        Self::FRAME
    }
    /// φ, applied to q and k before their product.
    fn map(&self) -> Map {
        Map::Identity
    }
    /// The signs that its weights can have.
    fn sign(&self) -> Sign;
    /// The orders n and coefficients a_n of w(x) = Σ_n a_n·x^n/n!, ascending; `None` where w is no polynomial.
    fn polynomial(&self) -> Option<Vec<(usize, f64)>>;
    /// Rows of its finite feature map for head dimension d, one number for each order; `None` for an infinite map.
    fn state_rows(&self, d: usize) -> Option<Vec<(usize, u128)>> {
        Some(self.polynomial()?.into_iter().map(|(n, _)| (n, monomials(d, n))).collect())
    }
    /// ∂w/∂a_n for every learned number, at x.
    fn learned_slopes(&self, _x: f64, _slopes: &mut [f64]) {}

    /// w(x)
    fn value<R: Real>(&self, x: R) -> R;
    /// w'(x)
    fn slope<R: Real>(&self, x: R) -> R;
    /// w of a vector.
    fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V;
    /// w and w' of a vector.
    fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V);

    /// Where rows are scaled: the largest |x| for which ρ = 0 will do.
    fn calm(&self) -> f32 {
        f32::INFINITY
    }
    /// Where rows are scaled: log of a bound of |w| for |x| up to `reach`.
    fn log_bound(&self, _reach: f32) -> f32 {
        0.0
    }
    /// Where rows are scaled: w·e^{−ρ} and w'·e^{−ρ} of a vector.
    fn scaled<S: Simd>(&self, simd: S, x: S::V, _rho: f32) -> (S::V, S::V) {
        self.values_and_slopes(simd, x)
    }

    /// One row of a tile, forward: scores become weights. Here so that its loop is compiled for each kernel.
    #[inline(always)]
    fn forward_row<S: Simd>(&self, simd: S, row: ForwardRow) -> Option<(f32, f32)> {
        row.run(simd, self)
    }
    /// One row of a tile, backward.
    #[inline(always)]
    fn backward_row<S: Simd>(&self, simd: S, row: BackwardRow) -> f32 {
        row.run(simd, self)
    }
}

slot! {
    /// The kernel of a variant.
    Kernel { exp::Exp, taylor::Taylor, power::Power, feature::Feature }
    /// The frame that its rows need.
    fn frame() -> Frame;
    /// φ, applied to q and k before their product.
    fn map() -> Map;
    /// The signs that its weights can have.
    fn sign() -> Sign;
    /// The orders n and coefficients a_n of w(x) = Σ_n a_n·x^n/n!, ascending; `None` where w is no polynomial.
    fn polynomial() -> Option<Vec<(usize, f64)>>;
    /// Rows of its finite feature map for head dimension d by order; `None` for an infinite map.
    fn state_rows(d: usize) -> Option<Vec<(usize, u128)>>;
    /// ∂w/∂a_n for every learned number, at x.
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
}

impl Kernel {
    /// a_n of a series with its learned numbers taken in; of no meaning for other kernels, which have none.
    pub(crate) fn coefficient(&self, n: usize) -> f64 {
        if let Kernel::Taylor(taylor) = self { taylor.coefficient(n) } else { 1.0 }
    }

    /// Takes learned numbers in, where it has any.
    pub fn bind(&mut self, learned: &[f64]) {
        if let Kernel::Taylor(taylor) = self {
            taylor.bind(learned);
        }
    }
}
