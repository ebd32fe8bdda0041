//! Soft cap on scores: x becomes c·tanh(x/c)

use crate::Real;

/// c·tanh(x/c)
#[inline(always)]
pub fn value<R: Real>(x: R, c: R) -> R {
    c * (x / c).tanh()
}

/// Its slope, from its value: 1 − (value/c)².
#[inline(always)]
pub fn slope_from_value<R: Real>(value: R, c: R) -> R {
    let ratio = value / c;
    R::one() - ratio * ratio
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_close, derivative};

    #[test]
    fn scores_stay_within_the_cap() {
        assert_close(value(0.01, 50.0), 0.01, 1e-8);
        assert_eq!((value(1e6, 5.0), value(-1e6, 5.0)), (5.0, -5.0));
        for x in [-7.0, -0.3, 0.0, 1.5, 12.0] {
            assert_close(slope_from_value(value(x, 5.0), 5.0), derivative(|x| value(x, 5.0), x), 1e-10);
        }
    }
}
