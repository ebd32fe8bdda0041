//! N(x) = x

use crate::Real;
use crate::parts::norm::{NormGrads, NormParams, NormPart};
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// No output norm.
    NoNorm,
    Info { word: "none", usage: "norm=none", formula: "N(x) = x", about: "No output norm.", examples: &["none"] }
}

impl NormPart for NoNorm {
    #[inline(always)]
    fn forward<R: Real>(&self, x: &mut [R], p: NormParams<R>) {
        if p.log_scale != R::zero() {
            let scale = p.log_scale.exp();
            x.iter_mut().for_each(|x| *x *= scale);
        }
    }

    #[inline(always)]
    fn backward<R: Real>(&self, _: &[R], p: NormParams<R>, dy: &mut [R], _: NormGrads<R>) {
        self.forward(dy, p);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::check_norm;

    #[test]
    fn gradients_and_log_scale() {
        check_norm(&NoNorm);
    }
}
