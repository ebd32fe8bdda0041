//! c = cumsum(g), g the input itself

use crate::Real;
use crate::parts::decay::{DecayParams, DecayPart, channel_only, channel_text};
use crate::parts::slot::{Info, Part};

/// The log decay of each step as an input.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GivenDecay {
    /// One number per channel.
    pub channel: bool,
}

impl Part for GivenDecay {
    const INFO: Info = Info {
        word: "given",
        usage: "decay=given[,channel]",
        formula: "M_ts = exp(c_t − c_s), c_t = Σ_{s≤t} g_s",
        about: "The input is the log decay of each step, as `g` in flash-linear-attention; for library use.",
        examples: &["given", "given,channel"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        channel_only("given", args).map(|channel| GivenDecay { channel })
    }

    fn args(&self) -> String {
        channel_text(self.channel)
    }
}

impl DecayPart for GivenDecay {
    fn by_channel(&self) -> bool {
        self.channel
    }

    fn forward<R: Real>(&self, g: &[R], _: DecayParams<R>, c: &mut [f64], sum: &mut f64) {
        for (c, g) in c.iter_mut().zip(g) {
            *sum += g.wide();
            *c = *sum;
        }
    }

    fn backward<R: Real>(&self, _: &[R], _: DecayParams<R>, dc: &[f64], dg: &mut [R]) -> f64 {
        let mut later = 0.0;
        for (dg, dc) in dg.iter_mut().zip(dc).rev() {
            later += dc;
            *dg = R::of(later);
        }
        0.0
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
