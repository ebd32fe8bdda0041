//! M_ts = exp(c_t − c_s), c a running sum of a gate: older keys count less.

pub mod linear;
pub mod softplus;

use crate::Real;
use crate::parts::slot::{Part, slot};

/// What every decay provides, over the time axis of one head.
pub trait DecayPart: Part {
    /// Whether the projection has a bias.
    fn has_bias(&self) -> bool {
        false
    }
    /// c [T] from the logits g [T]; float64, since only differences of c matter and c grows with T. `sum` is what passes from
    /// one call to the next: zero before the first position.
    fn forward<R: Real>(&self, g: &[R], c: &mut [f64], sum: &mut f64);
    /// dg [T] from dc [T].
    fn backward<R: Real>(&self, g: &[R], dc: &[f64], dg: &mut [R]);
}

slot! {
    /// The decay of a variant.
    Decay { linear::LinearDecay, softplus::SoftplusDecay }
    /// Whether the projection has a bias.
    fn has_bias() -> bool;
    /// c from the logits.
    fn forward<R: Real>(g: &[R], c: &mut [f64], sum: &mut f64);
    /// dg from dc.
    fn backward<R: Real>(g: &[R], dc: &[f64], dg: &mut [R]);
}
