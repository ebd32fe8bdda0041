//! D, the denominator: what the weighted sum over keys is divided by.
//!
//! Sums arrive in the frame of their row: the true sum is z·e^ρ, where ρ is what the exponential subtracted.

pub mod length;
pub mod none;
pub mod position;
pub mod sum;

use crate::Real;
use crate::parts::slot::{Part, slot};

/// What every denominator provides.
pub trait DenominatorPart: Part {
    /// Divides by Σ_s w, so that a factor common to all weights of a row cancels.
    const SUMS: bool;
    /// Weighs the keys instead of the row.
    const KEY_SIDE: bool = false;

    /// Whether it divides by Σ_s w.
    fn sums(&self) -> bool {
        Self::SUMS
    }
    /// Whether it weighs the keys instead of the row.
    fn key_side(&self) -> bool {
        Self::KEY_SIDE
    }
    /// D in the frame of the row: z the sum of weights in it, `count` = S_t, ρ the frame.
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
    /// Whether it weighs the keys instead of the row.
    fn key_side() -> bool;
    /// D in the frame of the row.
    fn value<R: Real>(z: R, count: R, rho: R) -> R;
    /// ∂D/∂z.
    fn slope<R: Real>(z: R, count: R, rho: R) -> R;
}
