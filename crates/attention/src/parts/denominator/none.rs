//! D = 1

use crate::parts::denominator::DenominatorPart;
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// No denominator.
    NoDenominator,
    Info { word: "none", usage: "over=none", formula: "D_t = 1", about: "No denominator.", examples: &["none"] }
}

impl DenominatorPart for NoDenominator {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_examples, check_denominator};

    #[test]
    fn one() {
        assert_examples::<NoDenominator>();
        check_denominator(&NoDenominator, false);
        assert_eq!(NoDenominator.value(3.5, 7.0, -1.0), 1.0);
    }
}
