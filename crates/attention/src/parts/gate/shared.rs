//! P_t = O_t: the post gate is the output gate applied again

use crate::Real;
use crate::parts::gate::GatePart;
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// The output gate used a second time, after the norm.
    Shared,
    Info {
        word: "out",
        usage: "post=out",
        formula: "P_t = O_t",
        about: "The output gate applied again after the norm, with the same weights.",
        examples: &["out"],
    }
}

impl GatePart for Shared {
    #[inline(always)]
    fn forward<R: Real>(&self, _: &mut [R], _: &mut f64) {}

    #[inline(always)]
    fn backward<R: Real>(&self, _: &[R], _: &[R], _: &mut [R]) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{check_gate, numbers};

    #[test]
    fn factors_pass_through() {
        check_gate(&Shared, &numbers(5, 1));
        let mut factors = [0.3f64, 0.9];
        Shared.forward(&mut factors, &mut 0.0);
        assert_eq!(factors, [0.3, 0.9]);
    }
}
