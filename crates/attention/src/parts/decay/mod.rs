//! M_ts = exp(c_t − c_s), c a running sum of gate values: older keys have smaller weights.
//!
//! Per channel: x_ts = Σ_c q_tc·k_sc·exp(c_t,c − c_s,c). Every monomial of a state decays by the product of its channels, and order 0
//! does not decay.

pub mod fixed;
pub mod given;
pub mod linear;
pub mod mamba;
pub mod sigmoid;
pub mod softplus;

use crate::Real;
use crate::parts::slot::{Part, slot};

/// Inputs of a decay other than logits.
#[derive(Clone, Copy, Debug)]
pub struct DecayParams<R> {
    /// The query head.
    pub head: usize,
    /// a_h, for decays with a learned rate.
    pub rate: R,
}

impl<R: Real> DecayParams<R> {
    fn wide(self) -> DecayParams<f64> {
        DecayParams { head: self.head, rate: self.rate.wide() }
    }
}

/// The methods of a decay, over the time axis of one head or one channel.
pub trait DecayPart: Part {
    /// Whether it reads logits.
    fn has_logits(&self) -> bool {
        true
    }
    /// Whether the projection has a bias.
    fn has_bias(&self) -> bool {
        false
    }
    /// Whether a rate a_h is learned per head.
    fn has_rate(&self) -> bool {
        false
    }
    /// Whether it has one gate per channel of q and k.
    fn by_channel(&self) -> bool {
        false
    }
    /// The log decay of one step from its logit.
    fn step(&self, g: f64, p: DecayParams<f64>) -> f64;
    /// The gradients of the logit and of the rate, from that of [`DecayPart::step`].
    fn step_backward(&self, dstep: f64, g: f64, p: DecayParams<f64>) -> [f64; 2];
    /// c [T] from the logits g [T], which are empty if it reads none. float64, since only differences of c matter and c grows with T.
    /// `sum` is carried from one call to the next: zero before the first position.
    fn forward<R: Real>(&self, g: &[R], p: DecayParams<R>, c: &mut [f64], sum: &mut f64) {
        let p = p.wide();
        for (t, c) in c.iter_mut().enumerate() {
            *sum += self.step(g.get(t).map_or(0.0, |g| g.wide()), p);
            *c = *sum;
        }
    }
    /// dg [T] from dc [T], and the gradient of the rate.
    fn backward<R: Real>(&self, g: &[R], p: DecayParams<R>, dc: &[f64], dg: &mut [R]) -> f64 {
        let (p, mut later, mut drate) = (p.wide(), 0.0, 0.0);
        for ((dg, dc), g) in dg.iter_mut().zip(dc).zip(g).rev() {
            later += dc;
            let [dlogit, of_rate] = self.step_backward(later, g.wide(), p);
            *dg = R::of(dlogit);
            drate += of_rate;
        }
        drate
    }
}

slot! {
    /// The decay of a variant.
    Decay { linear::LinearDecay, softplus::SoftplusDecay, sigmoid::SigmoidDecay, mamba::MambaDecay, fixed::FixedDecay, given::GivenDecay }
    /// Whether it reads logits.
    fn has_logits() -> bool;
    /// Whether the projection has a bias.
    fn has_bias() -> bool;
    /// Whether a rate a_h is learned per head.
    fn has_rate() -> bool;
    /// Whether it has one gate per channel of q and k.
    fn by_channel() -> bool;
    /// c from the logits.
    fn forward<R: Real>(g: &[R], p: DecayParams<R>, c: &mut [f64], sum: &mut f64);
    /// dg from dc, and the gradient of the rate.
    fn backward<R: Real>(g: &[R], p: DecayParams<R>, dc: &[f64], dg: &mut [R]) -> f64;
}

/// ln(1 + e^x), without overflow.
#[inline(always)]
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
