//! silu(g) = g·σ(g), g = W·h + b

use crate::Real;
use crate::parts::gate::GatePart;
use crate::parts::gate::sigmoid::sigmoid;
use crate::parts::slot::{Info, channel_part};

channel_part! {
    /// The SiLU gate of GLA and Gated DeltaNet.
    Silu,
    "post",
    Info {
        word: "silu",
        usage: "post=silu[,channel]",
        formula: "silu(W·h + b)",
        about: "One gate per head and position, or per channel with `channel` (RetNet, GLA, Gated DeltaNet).",
        examples: &["silu", "silu,channel"],
    }
}

impl GatePart for Silu {
    #[inline(always)]
    fn by_channel(&self) -> bool {
        self.channel
    }

    #[inline(always)]
    fn forward<R: Real>(&self, g: &mut [R], _: &mut f64) {
        g.iter_mut().for_each(|g| *g = *g * sigmoid(*g));
    }

    #[inline(always)]
    fn backward<R: Real>(&self, g: &[R], _: &[R], dfactor: &mut [R]) {
        for (d, &g) in dfactor.iter_mut().zip(g) {
            let s = sigmoid(g);
            *d *= s * (R::one() + g * (R::one() - s));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::slot::Part;
    use crate::parts::testing::{assert_all_close, check_gate, numbers};

    #[test]
    fn closed_form_and_gradients() {
        let mut g = [0.0f64, 2.0, -800.0];
        Silu::default().forward(&mut g, &mut 0.0);
        assert_all_close(&g, &[0.0, 2.0 / (1.0 + (-2f64).exp()), 0.0], 1e-15);
        check_gate(&Silu::default(), &numbers(9, 1));
        assert!(Silu::parse("channels").is_err());
    }
}
