//! q, k ← x / max(‖x‖, 1e-12), over the head dimension

use crate::Real;
use crate::parts::norm::NormPart;
use crate::parts::norm::l2::L2;
use crate::parts::qk_norm::{QkNormPart, grads, params};
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// Queries and keys of unit length.
    QkL2,
    Info {
        word: "l2",
        usage: "qk_norm=l2",
        formula: "q, k ← x / max(‖x‖, 1e-12)",
        about: "Queries and keys of unit length, as in delta rules.",
        examples: &["l2"],
    }
}

impl QkNormPart for QkL2 {
    fn has_weight(&self) -> bool {
        false
    }
    fn over_heads(&self) -> bool {
        false
    }

    #[inline(always)]
    fn forward<R: Real>(&self, x: &mut [R], weight: &[R]) {
        L2.forward(x, params(weight));
    }

    #[inline(always)]
    fn backward<R: Real>(&self, x: &[R], weight: &[R], dy: &mut [R], dweight: &mut [R]) {
        L2.backward(x, params(weight), dy, grads(dweight));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::check_qk_norm;

    #[test]
    fn unit_length_and_gradients() {
        let mut x = [3.0f64, -4.0];
        QkL2.forward(&mut x, &[]);
        assert_eq!(x, [0.6000000000000001, -0.8]);
        check_qk_norm(&QkL2);
    }
}
