//! c = cumsum(ln σ(g)) / D, g = W·h + b

use crate::parts::decay::{DecayParams, DecayPart, softplus};
use crate::parts::gate::sigmoid::sigmoid;
use crate::parts::slot::{Info, Part, number, short};

/// The log of a forget gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SigmoidDecay {
    /// D, the divisor.
    pub divisor: f64,
    /// One gate per channel.
    pub channel: bool,
}

impl Part for SigmoidDecay {
    const INFO: Info = Info {
        word: "sigmoid",
        usage: "decay=sigmoid[,D][,channel]",
        formula: "M_ts = exp(c_t − c_s), c_t = Σ_{s≤t} ln σ(W·h_s + b) / D, D = 1 unless given",
        about: "A forget gate between 0 and 1 at every position (Forgetting Transformer); with D = 16 and `channel` that of GLA.",
        examples: &["sigmoid", "sigmoid,16", "sigmoid,channel", "sigmoid,16,channel"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        let (mut divisor, mut channel) = (None, false);
        for option in args.split(',').filter(|option| !option.is_empty()) {
            match option {
                "channel" if !channel => channel = true,
                _ if divisor.is_none() => divisor = Some(number("the divisor of `decay=sigmoid`", option, true)?),
                _ => return Err(format!("`decay=sigmoid` takes a divisor and `channel`, each once; found `{option}`")),
            }
        }
        Ok(SigmoidDecay { divisor: divisor.unwrap_or(1.0), channel })
    }

    fn args(&self) -> String {
        let divisor = (self.divisor != 1.0).then(|| short(self.divisor));
        divisor.into_iter().chain(self.channel.then(|| "channel".to_string())).collect::<Vec<_>>().join(",")
    }
}

impl DecayPart for SigmoidDecay {
    fn has_bias(&self) -> bool {
        true
    }
    fn by_channel(&self) -> bool {
        self.channel
    }

    fn step(&self, g: f64, _: DecayParams<f64>) -> f64 {
        -(softplus(-g) / self.divisor)
    }

    fn step_backward(&self, dstep: f64, g: f64, _: DecayParams<f64>) -> [f64; 2] {
        [dstep * sigmoid(-g) / self.divisor, 0.0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_decay, decay_params};

    #[test]
    fn a_running_product_of_gates() {
        let mut c = [f64::NAN; 2];
        SigmoidDecay { divisor: 16.0, channel: false }.forward(&[0.0, 2.0], decay_params(), &mut c, &mut 0.0);
        let gate = |x: f64| 1.0 / (1.0 + (-x).exp());
        assert_all_close(&c, &[gate(0.0).ln() / 16.0, (gate(0.0) * gate(2.0)).ln() / 16.0], 1e-15);
    }

    #[test]
    fn gradients() {
        check_decay(&SigmoidDecay { divisor: 1.0, channel: false });
        check_decay(&SigmoidDecay { divisor: 16.0, channel: true });
        assert!(
            SigmoidDecay::parse("0").is_err() && SigmoidDecay::parse("2,3").is_err() && SigmoidDecay::parse("channel,channel").is_err()
        );
    }
}
