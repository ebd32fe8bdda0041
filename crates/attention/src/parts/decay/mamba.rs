//! c = cumsum(−exp(a_h)·softplus(g)), g = W·h + b, a_h learned per head

use crate::parts::decay::{DecayParams, DecayPart, softplus};
use crate::parts::gate::sigmoid::sigmoid;
use crate::parts::slot::{Info, channel_part};

channel_part! {
    /// A decay with a learned rate per head.
    MambaDecay,
    "decay",
    Info {
        word: "mamba",
        usage: "decay=mamba[,channel]",
        formula: "M_ts = exp(c_t − c_s), c_t = −exp(a_h)·Σ_{s≤t} ln(1 + exp(W·h_s + b))",
        about: "The decay of Mamba-2 and of Gated DeltaNet; with `channel` that of KDA.",
        examples: &["mamba", "mamba,channel"],
    }
}

impl DecayPart for MambaDecay {
    fn has_bias(&self) -> bool {
        true
    }
    fn has_rate(&self) -> bool {
        true
    }
    fn by_channel(&self) -> bool {
        self.channel
    }

    fn step(&self, g: f64, p: DecayParams<f64>) -> f64 {
        -(p.rate.exp() * softplus(g))
    }

    fn step_backward(&self, dstep: f64, g: f64, p: DecayParams<f64>) -> [f64; 2] {
        let rate = p.rate.exp();
        [-dstep * rate * sigmoid(g), -(dstep * rate * softplus(g))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_decay};

    #[test]
    fn steps_of_a_learned_size() {
        let mut c = [f64::NAN; 2];
        MambaDecay::default().forward(&[0.0, 1.0], DecayParams { head: 0, rate: 0.5 }, &mut c, &mut 0.0);
        let step = |x: f64| -(0.5f64).exp() * (1.0 + x.exp()).ln();
        assert_all_close(&c, &[step(0.0), step(0.0) + step(1.0)], 1e-15);
    }

    #[test]
    fn gradients() {
        check_decay(&MambaDecay::default());
    }
}
