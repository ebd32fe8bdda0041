//! c = cumsum(−exp(a_h)·softplus(g)), g = W·h + b, a_h learned per head

use crate::Real;
use crate::parts::decay::{DecayParams, DecayPart, channel_only, channel_text, softplus};
use crate::parts::gate::sigmoid::sigmoid;
use crate::parts::slot::{Info, Part};

/// A decay with a learned rate per head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MambaDecay {
    /// One gate per channel.
    pub channel: bool,
}

impl Part for MambaDecay {
    const INFO: Info = Info {
        word: "mamba",
        usage: "decay=mamba[,channel]",
        formula: "M_ts = exp(c_t − c_s), c_t = −exp(a_h)·Σ_{s≤t} ln(1 + exp(W·h_s + b))",
        about: "The decay of Mamba-2 and of Gated DeltaNet; with `channel` that of KDA.",
        examples: &["mamba", "mamba,channel"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        channel_only("mamba", args).map(|channel| MambaDecay { channel })
    }

    fn args(&self) -> String {
        channel_text(self.channel)
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

    fn forward<R: Real>(&self, g: &[R], p: DecayParams<R>, c: &mut [f64], sum: &mut f64) {
        let rate = p.rate.wide().exp();
        for (c, g) in c.iter_mut().zip(g) {
            *sum -= rate * softplus(g.wide());
            *c = *sum;
        }
    }

    fn backward<R: Real>(&self, g: &[R], p: DecayParams<R>, dc: &[f64], dg: &mut [R]) -> f64 {
        let rate = p.rate.wide().exp();
        let (mut later, mut drate) = (0.0, 0.0);
        for ((dg, dc), g) in dg.iter_mut().zip(dc).zip(g).rev() {
            later += dc;
            *dg = R::of(-later * rate * sigmoid(g.wide()));
            drate -= later * rate * softplus(g.wide());
        }
        drate
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
