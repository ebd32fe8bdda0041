//! σ(g), g = W·h + b

use crate::Real;
use crate::parts::gate::GatePart;
use crate::parts::slot::{Info, channel_part, unit_part};

unit_part! {
    /// The logistic gate.
    Sigmoid,
    Info {
        word: "sigmoid",
        usage: "in or out",
        formula: "σ(W·h + b)",
        about: "One gate between 0 and 1 per head and position. The bare words `in` and `out` select it.",
        examples: &["sigmoid"],
    }
}

impl GatePart for Sigmoid {
    #[inline(always)]
    fn forward<R: Real>(&self, g: &mut [R], _: &mut f64) {
        g.iter_mut().for_each(|g| *g = sigmoid(*g));
    }

    #[inline(always)]
    fn backward<R: Real>(&self, _: &[R], factor: &[R], dfactor: &mut [R]) {
        for (d, &value) in dfactor.iter_mut().zip(factor) {
            *d *= slope_from_value(value);
        }
    }
}

channel_part! {
    /// The logistic gate after the norm: one number per head, or one per value of a head.
    PostSigmoid,
    "post",
    Info {
        word: "sigmoid",
        usage: "post or post=sigmoid,channel",
        formula: "σ(W·h + b)",
        about: "One gate between 0 and 1 per head and position, or per channel with `channel` (Qwen's gated attention).",
        examples: &["sigmoid", "sigmoid,channel"],
    }
}

impl GatePart for PostSigmoid {
    #[inline(always)]
    fn by_channel(&self) -> bool {
        self.channel
    }

    #[inline(always)]
    fn forward<R: Real>(&self, g: &mut [R], sum: &mut f64) {
        Sigmoid.forward(g, sum);
    }

    #[inline(always)]
    fn backward<R: Real>(&self, g: &[R], factor: &[R], dfactor: &mut [R]) {
        Sigmoid.backward(g, factor, dfactor);
    }
}

/// 1/(1 + e^{−x}), without overflow.
#[inline(always)]
pub fn sigmoid<R: Real>(x: R) -> R {
    let small = (-x.abs()).exp();
    let larger = R::one() / (R::one() + small);
    if x >= R::zero() { larger } else { small * larger }
}

/// σ' from σ.
#[inline(always)]
pub fn slope_from_value<R: Real>(value: R) -> R {
    value * (R::one() - value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_close, check_gate, numbers};

    #[test]
    fn closed_form_without_overflow() {
        for x in [-5.0, -0.1, 0.0, 2.0f64] {
            assert_close(sigmoid(x), 1.0 / (1.0 + (-x).exp()), 1e-15);
        }
        assert_eq!((sigmoid(-1e4f64), sigmoid(1e4f64)), (0.0, 1.0));
        assert!(sigmoid(-80f32) > 0.0 && sigmoid(f32::NAN).is_nan());
    }

    #[test]
    fn gradients() {
        check_gate(&Sigmoid, &numbers(9, 1));
        check_gate(&PostSigmoid { channel: true }, &numbers(9, 1));
    }
}
