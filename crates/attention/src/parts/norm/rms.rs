//! N(x) = γ · x / √(mean x² + eps), eps = 1.1920929e-7

use crate::Real;
use crate::parts::norm::{NormGrads, NormParams, NormPart};
use crate::parts::slot::{Info, unit_part};
use termwise_kernels::real::{dot, sum_of3};

/// The float32 machine epsilon, as in PyTorch's RMSNorm.
const EPS: f64 = 1.1920929e-7;

unit_part! {
    /// RMS norm with a learned γ.
    Rms,
    Info {
        word: "rms",
        usage: "norm=rms",
        formula: "N(x) = γ·x / √(mean x² + 1.19e-7)",
        about: "RMS norm per head with a learned γ.",
        examples: &["rms"],
    }
}

impl NormPart for Rms {
    fn scale_free(&self) -> bool {
        true
    }
    fn has_weight(&self) -> bool {
        true
    }

    #[inline(always)]
    fn forward<R: Real>(&self, x: &mut [R], p: NormParams<R>) {
        let inverse = inverse_rms(x, p.log_scale);
        for (x, &weight) in x.iter_mut().zip(p.weight) {
            *x = *x * inverse * weight;
        }
    }

    #[inline(always)]
    fn backward<R: Real>(&self, x: &[R], p: NormParams<R>, dy: &mut [R], grads: NormGrads<R>) {
        let inverse = inverse_rms(x, p.log_scale);
        for ((dw, &g), &x) in grads.weight.iter_mut().zip(&*dy).zip(x) {
            *dw += g * x * inverse;
        }
        let n = x.len();
        let along = sum_of3(dy, p.weight, x, |g, w, x| g * w * x) * inverse * inverse / R::of(n as f64);
        for ((g, &x), &w) in dy.iter_mut().zip(x).zip(p.weight) {
            *g = (*g * w - x * along) * inverse;
        }
    }
}

/// 1/√(mean x² + eps·e^{−2λ}).
#[inline(always)]
fn inverse_rms<R: Real>(x: &[R], log_scale: R) -> R {
    R::one() / (dot(x, x) / R::of(x.len() as f64) + eps_without_scale(EPS, log_scale)).sqrt()
}

/// eps relative to the mean square of a row whose log scale λ was removed.
#[inline(always)]
pub(crate) fn eps_without_scale<R: Real>(eps: f64, log_scale: R) -> R {
    if log_scale == R::zero() { R::of(eps) } else { R::of((eps.ln() - 2.0 * log_scale.wide()).exp()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_norm};

    #[test]
    fn unit_mean_square() {
        let mut x = [3.0f64, -4.0];
        Rms.forward(&mut x, NormParams { weight: &[1.0, 2.0], bias: &[], log_scale: 0.0 });
        let rms = (12.5f64 + 1.1920929e-7).sqrt();
        assert_all_close(&x, &[3.0 / rms, -8.0 / rms], 1e-15);
    }

    #[test]
    fn gradients_and_log_scale() {
        check_norm(&Rms);
    }
}
