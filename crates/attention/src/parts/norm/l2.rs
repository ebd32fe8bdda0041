//! N(x) = x / max(‖x‖, 1e-12)

use crate::Real;
use crate::parts::norm::{NormGrads, NormParams, NormPart};
use crate::parts::slot::{Info, unit_part};
use termwise_kernels::real::dot;

/// Lower bound of the norm.
pub(crate) const FLOOR: f64 = 1e-12;

unit_part! {
    /// L2 normalization.
    L2,
    Info {
        word: "l2",
        usage: "norm=l2",
        formula: "N(x) = x / max(‖x‖, 1e-12)",
        about: "Unit Euclidean length per head; replaces the denominator.",
        examples: &["l2"],
    }
}

impl NormPart for L2 {
    fn scale_free(&self) -> bool {
        true
    }

    #[inline(always)]
    fn forward<R: Real>(&self, x: &mut [R], p: NormParams<R>) {
        let inverse = R::one() / dot(x, x).sqrt().max(floor(p.log_scale));
        x.iter_mut().for_each(|x| *x *= inverse);
    }

    #[inline(always)]
    fn backward<R: Real>(&self, x: &[R], p: NormParams<R>, dy: &mut [R], _: NormGrads<R>) {
        unit_backward(x, p.log_scale, R::one(), dy);
    }
}

/// 1e-12 for x with its log scale λ removed.
#[inline(always)]
pub(crate) fn floor<R: Real>(log_scale: R) -> R {
    if log_scale == R::zero() { R::of(FLOOR) } else { R::of((FLOOR.ln() - log_scale.wide()).exp()) }
}

/// Replaces dy by the gradient of factor·x/‖x‖.
#[inline(always)]
pub(crate) fn unit_backward<R: Real>(x: &[R], log_scale: R, factor: R, dy: &mut [R]) {
    let norm = dot(x, x).sqrt();
    let floor = floor(log_scale);
    let inverse = factor / norm.max(floor);
    let along = if norm > floor { dot(x, dy) / (norm * norm) } else { R::zero() };
    for (g, &x) in dy.iter_mut().zip(x) {
        *g = (*g - x * along) * inverse;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_norm};

    #[test]
    fn unit_length() {
        let mut x = [3.0f64, -4.0];
        L2.forward(&mut x, NormParams { weight: &[], bias: &[], log_scale: 0.0 });
        assert_all_close(&x, &[0.6, -0.8], 1e-15);
    }

    #[test]
    fn short_vectors_are_divided_by_the_floor() {
        let mut x = [3e-13f64, -4e-13];
        L2.forward(&mut x, NormParams { weight: &[], bias: &[], log_scale: 0.0 });
        assert_all_close(&x, &[0.3, -0.4], 1e-15);
        let mut zero = [0.0f64; 2];
        L2.forward(&mut zero, NormParams { weight: &[], bias: &[], log_scale: 5.0 });
        assert_eq!(zero, [0.0; 2]);
    }

    #[test]
    fn gradients_and_log_scale() {
        check_norm(&L2);
    }
}
