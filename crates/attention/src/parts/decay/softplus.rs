//! c = cumsum(−softplus(g)), g = W·h

use crate::parts::decay::{DecayParams, DecayPart, softplus};
use crate::parts::gate::sigmoid::sigmoid;
use crate::parts::slot::{Info, channel_part};

channel_part! {
    /// A decay with factors of at most 1.
    SoftplusDecay,
    "decay",
    Info {
        word: "softplus",
        usage: "decay=softplus[,channel]",
        formula: "M_ts = exp(c_t − c_s), c_t = −Σ_{s≤t} ln(1 + exp(W·h_s))",
        about: "A decay with factors of at most 1.",
        examples: &["softplus", "softplus,channel"],
    }
}

impl DecayPart for SoftplusDecay {
    fn by_channel(&self) -> bool {
        self.channel
    }

    fn step(&self, g: f64, _: DecayParams<f64>) -> f64 {
        -softplus(g)
    }

    fn step_backward(&self, dstep: f64, g: f64, _: DecayParams<f64>) -> [f64; 2] {
        [-dstep * sigmoid(g), 0.0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_decay, decay_params};

    #[test]
    fn a_running_sum_of_softplus() {
        let mut c = [f64::NAN; 2];
        SoftplusDecay::default().forward(&[0.0, 1.0], decay_params(), &mut c, &mut 0.0);
        let softplus = |x: f64| (1.0 + x.exp()).ln();
        assert_all_close(&c, &[-softplus(0.0), -softplus(0.0) - softplus(1.0)], 1e-15);
        SoftplusDecay::default().forward(&[1000.0, -1000.0], decay_params(), &mut c, &mut 0.0);
        assert_all_close(&c, &[-1000.0, -1000.0], 1e-15);
    }

    #[test]
    fn gradients() {
        check_decay(&SoftplusDecay::default());
    }
}
