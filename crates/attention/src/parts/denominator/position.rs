//! v_s / S_s^σ(m_h): keys are weighted by their position, with an exponent learned per head

use crate::Real;
use crate::parts::denominator::DenominatorPart;
use crate::parts::gate::sigmoid::{sigmoid, slope_from_value};
use crate::parts::slot::{Info, unit_part};

unit_part! {
    /// A learned power of the position, on the key side.
    Position,
    Info {
        word: "position",
        usage: "over=position",
        formula: "v_s is divided by S_s^σ(m_h), m_h learned per head",
        about: "A learned power of the position on the key side, as in cosine attention.",
        examples: &["position"],
    }
}

impl DenominatorPart for Position {
    fn key_side(&self) -> bool {
        true
    }
}

/// S^−σ(m), where S is the number of keys visible at the key's own position.
#[inline(always)]
pub fn key_weight<R: Real>(m: R, count: R) -> R {
    (-sigmoid(m) * count.ln()).exp()
}

/// ∂/∂m of [`key_weight`], from its value.
#[inline(always)]
pub fn key_weight_slope<R: Real>(m: R, count: R, value: R) -> R {
    -value * count.ln() * slope_from_value(sigmoid(m))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_close, assert_examples, check_denominator, derivative};

    #[test]
    fn a_power_of_the_position() {
        assert_examples::<Position>();
        check_denominator(&Position, false);
        assert_close(key_weight(0.0, 9.0), 1.0 / 3.0, 1e-15);
        assert_eq!(key_weight(0.7, 1.0), 1.0);
        for m in [-2.0, 0.3, 4.0] {
            for count in [1.0, 2.0, 50.0] {
                assert_close(key_weight_slope(m, count, key_weight(m, count)), derivative(|m| key_weight(m, count), m), 1e-10);
            }
        }
    }
}
