//! D_t = S_t, the number of keys visible at position t

use crate::Real;
use crate::parts::denominator::DenominatorPart;
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// The number of visible keys.
    Length,
    Info {
        word: "length",
        usage: "over=length",
        formula: "D_t = S_t",
        about: "The number of keys visible at position t.",
        examples: &["length"],
    }
}

impl DenominatorPart for Length {
    #[inline(always)]
    fn value<R: Real>(&self, _: R, count: R, _: R) -> R {
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_examples, check_denominator};

    #[test]
    fn the_value_is_the_count() {
        assert_examples::<Length>();
        check_denominator(&Length, false);
        assert_eq!(Length.value(3.5, 7.0, -1.0), 7.0);
    }
}
