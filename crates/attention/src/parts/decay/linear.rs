//! c = cumsum(shift(g)) / 1024, g = W·h + b, shifted right by one with a zero in front

use crate::Real;
use crate::parts::decay::{DecayParams, DecayPart};
use crate::parts::slot::{Info, unit_part};

const SLOWNESS: f64 = 1024.0;

unit_part! {
    /// The published decay: a linear gate, which may also exceed 1.
    LinearDecay,
    Info {
        word: "linear",
        usage: "decay=linear",
        formula: "M_ts = exp(c_t − c_s), c_t = Σ_{s<t} (W·h_s + b) / 1024",
        about: "The published decay: a slow linear gate of either sign.",
        examples: &["linear"],
    }
}

impl DecayPart for LinearDecay {
    fn has_bias(&self) -> bool {
        true
    }

    fn step(&self, g: f64, _: DecayParams<f64>) -> f64 {
        g / SLOWNESS
    }

    fn step_backward(&self, dstep: f64, _: f64, _: DecayParams<f64>) -> [f64; 2] {
        [dstep / SLOWNESS, 0.0]
    }

    // Shifted: a step counts from the next position on. `sum` is that of the logits, before the division.
    fn forward<R: Real>(&self, g: &[R], _: DecayParams<R>, c: &mut [f64], sum: &mut f64) {
        for (c, g) in c.iter_mut().zip(g) {
            *c = *sum / SLOWNESS;
            *sum += g.wide();
        }
    }

    fn backward<R: Real>(&self, _: &[R], _: DecayParams<R>, dc: &[f64], dg: &mut [R]) -> f64 {
        let mut later = 0.0;
        for (dg, dc) in dg.iter_mut().zip(dc).rev() {
            *dg = R::of(later / SLOWNESS);
            later += dc;
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_decay, decay_params};

    #[test]
    fn a_running_sum_shifted_by_one() {
        let mut c = [f64::NAN; 3];
        LinearDecay.forward(&[512.0, -1024.0, 99.0], decay_params(), &mut c, &mut 0.0);
        assert_all_close(&c, &[0.0, 0.5, -0.5], 1e-15);
    }

    #[test]
    fn gradients() {
        check_decay(&LinearDecay);
    }
}
