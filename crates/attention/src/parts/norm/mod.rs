//! N, the output norm: over the e values of one head at one position.
//!
//! The true value is x·e^λ. The log scale λ was removed from the row's weights (for exp, the row maximum) and has not been
//! restored; the scale-free norms need it only for their eps.

pub mod l2;
pub mod layer;
pub mod none;
pub mod rms;
pub mod scaled_l2;

use crate::Real;
use crate::parts::slot::{Part, slot};

/// The methods of a norm.
pub trait NormPart: Part {
    /// Whether N(c·x) = N(x) for c > 0, up to eps.
    #[inline(always)]
    fn scale_free(&self) -> bool {
        false
    }
    /// Whether a γ is learned.
    #[inline(always)]
    fn has_weight(&self) -> bool {
        false
    }
    /// Whether a β is learned.
    #[inline(always)]
    fn has_bias(&self) -> bool {
        false
    }
    /// x becomes N(x·e^λ).
    fn forward<R: Real>(&self, x: &mut [R], p: NormParams<R>);
    /// dy becomes the gradient with respect to x, at the x that entered `forward`; dγ and dβ are added to.
    fn backward<R: Real>(&self, x: &[R], p: NormParams<R>, dy: &mut [R], grads: NormGrads<R>);
}

/// Parameters of a norm; empty slices if it has none.
#[derive(Clone, Copy)]
pub struct NormParams<'a, R> {
    /// γ [e]
    pub weight: &'a [R],
    /// β [e]
    pub bias: &'a [R],
    /// λ
    pub log_scale: R,
}

/// Gradients of the parameters of a norm; empty slices if it has none.
pub struct NormGrads<'a, R> {
    /// dγ [e]
    pub weight: &'a mut [R],
    /// dβ [e]
    pub bias: &'a mut [R],
}

slot! {
    /// The output norm of a variant.
    Norm { none::NoNorm, l2::L2, scaled_l2::ScaledL2, rms::Rms, layer::Layer }
    /// Whether positive factors of x cancel.
    fn scale_free() -> bool;
    /// Whether a γ is learned.
    fn has_weight() -> bool;
    /// Whether a β is learned.
    fn has_bias() -> bool;
    /// x becomes N(x·e^λ).
    fn forward<R: Real>(x: &mut [R], p: NormParams<R>);
    /// dy becomes the gradient with respect to x; dγ and dβ are added to.
    fn backward<R: Real>(x: &[R], p: NormParams<R>, dy: &mut [R], grads: NormGrads<R>);
}
