//! N(x) = e · x / max(‖x‖, 1e-12)

use crate::Real;
use crate::parts::norm::l2::{floor, unit_backward};
use crate::parts::norm::{NormGrads, NormParams, NormPart};
use crate::parts::slot::{Info, unit_part};
use termwise_kernels::real::dot;

unit_part! {
    /// L2 normalization to the head dimension.
    ScaledL2,
    Info {
        word: "scaled_l2",
        usage: "norm=scaled_l2",
        formula: "N(x) = d·x / max(‖x‖, 1e-12)",
        about: "Like l2, times the head dimension.",
        examples: &["scaled_l2"],
    }
}

impl NormPart for ScaledL2 {
    fn scale_free(&self) -> bool {
        true
    }

    #[inline(always)]
    fn forward<R: Real>(&self, x: &mut [R], p: NormParams<R>) {
        let factor = R::of(x.len() as f64) / dot(x, x).sqrt().max(floor(p.log_scale));
        x.iter_mut().for_each(|x| *x *= factor);
    }

    #[inline(always)]
    fn backward<R: Real>(&self, x: &[R], p: NormParams<R>, dy: &mut [R], _: NormGrads<R>) {
        unit_backward(x, p.log_scale, R::of(x.len() as f64), dy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, check_norm};

    #[test]
    fn length_equals_the_dimension() {
        let mut x = [3.0f64, -4.0];
        ScaledL2.forward(&mut x, NormParams { weight: &[], bias: &[], log_scale: 0.0 });
        assert_all_close(&x, &[1.2, -1.6], 1e-15);
    }

    #[test]
    fn gradients_and_log_scale() {
        check_norm(&ScaledL2);
    }
}
