//! c = cumsum(−softplus(g)), g = W·h

use crate::Real;
use crate::parts::decay::{DecayParams, DecayPart, channel_only, channel_text, softplus};
use crate::parts::gate::sigmoid::sigmoid;
use crate::parts::slot::{Info, Part};

/// A decay with factors of at most 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SoftplusDecay {
    /// One gate per channel.
    pub channel: bool,
}

impl Part for SoftplusDecay {
    const INFO: Info = Info {
        word: "softplus",
        usage: "decay=softplus[,channel]",
        formula: "M_ts = exp(c_t − c_s), c_t = −Σ_{s≤t} ln(1 + exp(W·h_s))",
        about: "A decay with factors of at most 1.",
        examples: &["softplus", "softplus,channel"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        channel_only("softplus", args).map(|channel| SoftplusDecay { channel })
    }

    fn args(&self) -> String {
        channel_text(self.channel)
    }
}

impl DecayPart for SoftplusDecay {
    fn by_channel(&self) -> bool {
        self.channel
    }

    fn forward<R: Real>(&self, g: &[R], _: DecayParams<R>, c: &mut [f64], sum: &mut f64) {
        for (c, g) in c.iter_mut().zip(g) {
            *sum -= softplus(g.wide());
            *c = *sum;
        }
    }

    fn backward<R: Real>(&self, g: &[R], _: DecayParams<R>, dc: &[f64], dg: &mut [R]) -> f64 {
        let mut later = 0.0;
        for ((dg, dc), g) in dg.iter_mut().zip(dc).zip(g).rev() {
            later += dc;
            *dg = R::of(-later * sigmoid(g.wide()));
        }
        0.0
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
