//! N(x) = γ · (x − mean x) / √(var x + 1e-5) + β

use crate::Real;
use crate::parts::norm::rms::eps_without_scale;
use crate::parts::norm::{NormGrads, NormParams, NormPart};
use crate::parts::slot::{Info, unit_part};
use termwise_kernels::real::{dot, sum_of, sum_of3};

const EPS: f64 = 1e-5;

unit_part! {
    /// Layer norm with learned γ and β.
    Layer,
    Info {
        word: "layer",
        usage: "norm=layer",
        formula: "N(x) = γ·(x − mean x) / √(var x + 1e-5) + β",
        about: "Layer norm per head with learned γ and β.",
        examples: &["layer"],
    }
}

impl NormPart for Layer {
    fn scale_free(&self) -> bool {
        true
    }
    fn has_weight(&self) -> bool {
        true
    }
    fn has_bias(&self) -> bool {
        true
    }

    #[inline(always)]
    fn forward<R: Real>(&self, x: &mut [R], p: NormParams<R>) {
        let (mean, inverse) = moments(x, p.log_scale);
        for ((x, &weight), &bias) in x.iter_mut().zip(p.weight).zip(p.bias) {
            *x = (*x - mean) * inverse * weight + bias;
        }
    }

    #[inline(always)]
    fn backward<R: Real>(&self, x: &[R], p: NormParams<R>, dy: &mut [R], grads: NormGrads<R>) {
        let (mean, inverse) = moments(x, p.log_scale);
        for (((dw, db), &g), &x) in grads.weight.iter_mut().zip(grads.bias).zip(&*dy).zip(x) {
            *dw += g * (x - mean) * inverse;
            *db += g;
        }
        let count = R::of(x.len() as f64);
        let flat = dot(dy, p.weight) / count;
        let along = sum_of3(dy, p.weight, x, |g, w, x| g * w * (x - mean)) * inverse * inverse / count;
        for ((g, &x), &w) in dy.iter_mut().zip(x).zip(p.weight) {
            *g = (*g * w - flat - (x - mean) * along) * inverse;
        }
    }
}

/// Mean, and 1/√(var + eps·e^{−2λ}).
#[inline(always)]
fn moments<R: Real>(x: &[R], log_scale: R) -> (R, R) {
    let count = R::of(x.len() as f64);
    let mean = sum_of(x, |x| x) / count;
    let variance = sum_of(x, |x| (x - mean) * (x - mean)) / count;
    (mean, R::one() / (variance + eps_without_scale(EPS, log_scale)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_norm};

    #[test]
    fn centred_and_scaled() {
        let mut x = [1.0f64, 2.0, 6.0];
        Layer.forward(&mut x, NormParams { weight: &[1.0, 2.0, 1.0], bias: &[0.0, 0.0, 5.0], log_scale: 0.0 });
        let deviation = (14.0f64 / 3.0 + 1e-5).sqrt();
        assert_all_close(&x, &[-2.0 / deviation, -2.0 / deviation, 3.0 / deviation + 5.0], 1e-15);
    }

    #[test]
    fn gradients_and_log_scale() {
        check_norm(&Layer);
    }
}
