//! c = cumsum(−softplus(g)), g = W·h

use crate::Real;
use crate::parts::decay::DecayPart;
use crate::parts::gate::sigmoid::sigmoid;
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// A decay that only forgets.
    SoftplusDecay,
    Info {
        word: "softplus",
        usage: "decay=softplus",
        formula: "M_ts = exp(c_t − c_s), c_t = −Σ_{s≤t} ln(1 + exp(W·h_s))",
        about: "A decay that only forgets.",
        examples: &["softplus"],
    }
}

impl DecayPart for SoftplusDecay {
    fn forward<R: Real>(&self, g: &[R], c: &mut [f64], sum: &mut f64) {
        for (c, g) in c.iter_mut().zip(g) {
            let g = g.wide();
            *sum -= g.max(0.0) + (-g.abs()).exp().ln_1p();
            *c = *sum;
        }
    }

    fn backward<R: Real>(&self, g: &[R], dc: &[f64], dg: &mut [R]) {
        let mut later = 0.0;
        for ((dg, dc), g) in dg.iter_mut().zip(dc).zip(g).rev() {
            later += dc;
            *dg = R::of(-later * sigmoid(g.wide()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_decay};

    #[test]
    fn a_running_sum_of_softplus() {
        let mut c = [f64::NAN; 2];
        SoftplusDecay.forward(&[0.0, 1.0], &mut c, &mut 0.0);
        let softplus = |x: f64| (1.0 + x.exp()).ln();
        assert_all_close(&c, &[-softplus(0.0), -softplus(0.0) - softplus(1.0)], 1e-15);
        SoftplusDecay.forward(&[1000.0, -1000.0], &mut c, &mut 0.0);
        assert_all_close(&c, &[-1000.0, -1000.0], 1e-15);
    }

    #[test]
    fn gradients() {
        check_decay(&SoftplusDecay);
    }
}
