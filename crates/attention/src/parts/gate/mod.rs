//! I, O and P: gates that multiply a key's value or a query's output by a number computed from the hidden state.
//!
//! A gate reads logits g over the positions of one head and gives a factor for each. A post gate can have one for each value instead: it is then
//! applied channel by channel.

pub mod cumulative;
pub mod shared;
pub mod sigmoid;
pub mod silu;

use crate::Real;
use crate::parts::slot::{Part, slot};

/// What every gate provides, over the whole time axis of one head.
pub trait GatePart: Part {
    /// Whether it has one logit for each value of a head instead of one for the head.
    #[inline(always)]
    fn by_channel(&self) -> bool {
        false
    }
    /// g [T] becomes the factors [T]. `sum` is what passes from one call to the next: zero before the first position.
    fn forward<R: Real>(&self, g: &mut [R], sum: &mut f64);
    /// dfactor [T] becomes dg [T]; `g` are the logits, `factor` what `forward` made of it.
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
    /// Whether it has one logit for each value of a head instead of one for the head.
    fn by_channel() -> bool;
    /// g becomes the factors; [`shared::Shared`] has no logits of its own and takes the output gate's factors as they are.
    fn forward<R: Real>(g: &mut [R], sum: &mut f64);
    /// dfactor becomes dg.
    fn backward<R: Real>(g: &[R], factor: &[R], dfactor: &mut [R]);
}

/// Reads the one option that post gates share.
fn channel_only(word: &str, args: &str) -> Result<bool, String> {
    match args {
        "" => Ok(false),
        "channel" => Ok(true),
        _ => Err(format!("`post={word}` takes `channel`, found `{args}`")),
    }
}

fn channel_text(channel: bool) -> String {
    if channel { "channel".into() } else { String::new() }
}
