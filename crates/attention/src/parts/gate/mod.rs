//! I, O and P: gates that multiply a key's value or a query's output by a factor computed from the hidden state.
//!
//! A gate maps logits g over the positions of one head to one factor per position. A post gate can have one factor per value instead,
//! applied per channel.

pub mod cumulative;
pub mod shared;
pub mod sigmoid;
pub mod silu;

use crate::Real;
use crate::parts::slot::{Part, slot};

/// The methods of a gate, over the time axis of one head.
pub trait GatePart: Part {
    /// Whether it has one logit per value of a head instead of one per head.
    #[inline(always)]
    fn by_channel(&self) -> bool {
        false
    }
    /// The factors [T] from g [T]. `sum` is carried from one call to the next: zero before the first position.
    fn forward<R: Real>(&self, g: &mut [R], sum: &mut f64);
    /// dg [T] from dfactor [T]; `g` are the logits, `factor` the result of `forward`.
    fn backward<R: Real>(&self, g: &[R], factor: &[R], dfactor: &mut [R]);
}

slot! {
    /// The input gate of a variant.
    InGate { sigmoid::Sigmoid }
    /// g becomes the factors.
    fn forward<R: Real>(g: &mut [R], sum: &mut f64);
    /// dfactor becomes dg.
    fn backward<R: Real>(g: &[R], factor: &[R], dfactor: &mut [R]);
}

slot! {
    /// The output gate of a variant.
    OutGate { sigmoid::Sigmoid, cumulative::Cumulative }
    /// g becomes the factors.
    fn forward<R: Real>(g: &mut [R], sum: &mut f64);
    /// dfactor becomes dg.
    fn backward<R: Real>(g: &[R], factor: &[R], dfactor: &mut [R]);
}

slot! {
    /// The gate after the norm.
    PostGate { sigmoid::PostSigmoid, silu::Silu, shared::Shared }
    /// Whether it has one logit per value of a head instead of one per head.
    fn by_channel() -> bool;
    /// The factors from g; [`shared::Shared`] has no logits and uses the factors of the output gate.
    fn forward<R: Real>(g: &mut [R], sum: &mut f64);
    /// dfactor becomes dg.
    fn backward<R: Real>(g: &[R], factor: &[R], dfactor: &mut [R]);
}
