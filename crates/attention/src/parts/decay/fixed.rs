//! c = t·ln(1 − 2^(−5−h)), h the head

use crate::parts::decay::{DecayParams, DecayPart};
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// The decay of RetNet: fixed, slower with each head.
    FixedDecay,
    Info {
        word: "fixed",
        usage: "decay=fixed",
        formula: "M_ts = (1 − 2^(−5−h))^(t−s), h = 0, 1, … the head",
        about: "The decay of RetNet: not learned; the memory of each head is twice as long as that of the previous one.",
        examples: &["fixed"],
    }
}

impl DecayPart for FixedDecay {
    fn has_logits(&self) -> bool {
        false
    }

    fn step(&self, _: f64, p: DecayParams<f64>) -> f64 {
        (-(2f64.powi(-5 - p.head as i32))).ln_1p()
    }

    fn step_backward(&self, _: f64, _: f64, _: DecayParams<f64>) -> [f64; 2] {
        [0.0; 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_decay};

    #[test]
    fn each_head_has_its_own_decay() {
        check_decay(&FixedDecay);
        for (head, kept) in [(0, 1.0 - 1.0 / 32.0), (3, 1.0 - 1.0 / 256.0)] {
            let mut c = [f64::NAN; 2];
            FixedDecay.forward(&[], DecayParams { head, rate: 0.0 }, &mut c, &mut 0.0);
            assert_all_close(&c, &[f64::ln(kept), 2.0 * f64::ln(kept)], 1e-15);
        }
    }
}
