//! c = cumsum(g), g the input itself

use crate::parts::decay::{DecayParams, DecayPart};
use crate::parts::slot::{Info, channel_part};

channel_part! {
    /// The log decay of each step as an input.
    GivenDecay,
    "decay",
    Info {
        word: "given",
        usage: "decay=given[,channel]",
        formula: "M_ts = exp(c_t − c_s), c_t = Σ_{s≤t} g_s",
        about: "The input is the log decay of each step, as `g` in flash-linear-attention; for library use.",
        examples: &["given", "given,channel"],
    }
}

impl DecayPart for GivenDecay {
    fn by_channel(&self) -> bool {
        self.channel
    }

    fn step(&self, g: f64, _: DecayParams<f64>) -> f64 {
        g
    }

    fn step_backward(&self, dstep: f64, _: f64, _: DecayParams<f64>) -> [f64; 2] {
        [dstep, 0.0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{check_decay, decay_params};

    #[test]
    fn a_running_sum() {
        let mut c = [f64::NAN; 3];
        GivenDecay::default().forward(&[-1.0, -0.5, 0.25], decay_params(), &mut c, &mut 0.0);
        assert_eq!(c, [-1.0, -1.5, -1.25]);
        check_decay(&GivenDecay::default());
    }
}
