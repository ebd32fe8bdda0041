//! D, the denominator of the weighted sum over keys.
//!
//! Sums have a log scale ρ removed: the true sum is z·e^ρ (docs/engine.md).

pub mod length;
pub mod none;
pub mod position;
pub mod sum;

use crate::Real;
use crate::parts::slot::{Part, slot};

/// The methods of a denominator.
pub trait DenominatorPart: Part {
    /// Whether it divides by Σ_s w. A common factor of all weights of a row then cancels.
    #[inline(always)]
    fn sums(&self) -> bool {
        false
    }
    /// Whether it weights the keys instead of the row.
    #[inline(always)]
    fn key_side(&self) -> bool {
        false
    }
    /// Whether a learned e^b is added to the sum.
    #[inline(always)]
    fn has_sink(&self) -> bool {
        false
    }
    /// D·e^−ρ: z the sum of weights without its log scale ρ, `count` = S_t.
    #[inline(always)]
    fn value<R: Real>(&self, _z: R, _count: R, _rho: R) -> R {
        R::one()
    }
    /// ∂D/∂z.
    #[inline(always)]
    fn slope<R: Real>(&self, _z: R, _count: R, _rho: R) -> R {
        R::zero()
    }
}

slot! {
    /// The denominator of a variant.
    Denominator { sum::Sum, length::Length, none::NoDenominator, position::Position }
    /// Whether it divides by Σ_s w.
    fn sums() -> bool;
    /// Whether it weights the keys instead of the row.
    fn key_side() -> bool;
    /// Whether a learned e^b is added to the sum.
    fn has_sink() -> bool;
    /// D·e^−ρ.
    fn value<R: Real>(z: R, count: R, rho: R) -> R;
    /// ∂D/∂z.
    fn slope<R: Real>(z: R, count: R, rho: R) -> R;
}
