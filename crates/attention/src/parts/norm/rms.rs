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
        let inverse = inverse_rms(x, eps_without_scale(EPS, p.log_scale));
        scale_row(x, inverse, p.weight);
    }

    #[inline(always)]
    fn backward<R: Real>(&self, x: &[R], p: NormParams<R>, dy: &mut [R], grads: NormGrads<R>) {
        let inverse = inverse_rms(x, eps_without_scale(EPS, p.log_scale));
        scale_row_backward(x, inverse, p.weight, dy, grads.weight);
    }
}

/// 1/√(mean x² + eps)
#[inline(always)]
pub(crate) fn inverse_rms<R: Real>(x: &[R], eps: R) -> R {
    R::one() / (dot(x, x) / R::of(x.len() as f64) + eps).sqrt()
}

/// x ← γ·x·inverse
#[inline(always)]
pub(crate) fn scale_row<R: Real>(x: &mut [R], inverse: R, weight: &[R]) {
    for (x, &weight) in x.iter_mut().zip(weight) {
        *x = *x * inverse * weight;
    }
}

/// Replaces dy by the gradient of x, and adds that of γ, for `inverse` = [`inverse_rms`] of x.
#[inline(always)]
pub(crate) fn scale_row_backward<R: Real>(x: &[R], inverse: R, weight: &[R], dy: &mut [R], dweight: &mut [R]) {
    for ((dw, &g), &x) in dweight.iter_mut().zip(&*dy).zip(x) {
        *dw += g * x * inverse;
    }
    let along = sum_of3(dy, weight, x, |g, w, x| g * w * x) * inverse * inverse / R::of(x.len() as f64);
    for ((g, &x), &w) in dy.iter_mut().zip(x).zip(weight) {
        *g = (*g * w - x * along) * inverse;
    }
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
