//! Norms of q and k, after the short convolution and before RoPE, as in Qwen3 and OLMo-2.
//!
//! `NormPart` computes them: over the d values of a head, or over those of all heads.

pub mod l2;
pub mod rms;

use crate::Real;
use crate::parts::norm::{NormGrads, NormParams};
use crate::parts::slot::{Part, slot};

/// The methods of a norm of q and k.
pub trait QkNormPart: Part {
    /// Whether weights are learned.
    fn has_weight(&self) -> bool;
    /// Whether it runs over all heads.
    fn over_heads(&self) -> bool;
    /// x becomes its norm.
    fn forward<R: Real>(&self, x: &mut [R], weight: &[R]);
    /// dy becomes dx, at the x that entered `forward`; the gradient of the weights is added to.
    fn backward<R: Real>(&self, x: &[R], weight: &[R], dy: &mut [R], dweight: &mut [R]);
}

slot! {
    /// The norm of q and k of a variant.
    QkNorm { rms::QkRms, l2::QkL2 }
    /// Whether weights are learned.
    fn has_weight() -> bool;
    /// Whether it runs over all heads.
    fn over_heads() -> bool;
    /// x becomes its norm.
    fn forward<R: Real>(x: &mut [R], weight: &[R]);
    /// dy becomes dx; the gradient of the weights is added to.
    fn backward<R: Real>(x: &[R], weight: &[R], dy: &mut [R], dweight: &mut [R]);
}

fn params<'a, R: Real>(weight: &'a [R]) -> NormParams<'a, R> {
    NormParams { weight, bias: &[], log_scale: R::zero() }
}

fn grads<R>(weight: &mut [R]) -> NormGrads<'_, R> {
    NormGrads { weight, bias: &mut [] }
}
