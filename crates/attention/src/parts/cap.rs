//! Soft cap on scores: x becomes c·tanh(x/c)

use crate::Real;

/// c·tanh(x/c)
#[inline(always)]
pub fn value<R: Real>(x: R, c: R) -> R {
    c * (x / c).tanh()
}

/// Its derivative at x: 1/cosh²(x/c). Computed from the value as 1 − tanh², it would be mostly rounding error for scores far beyond the cap: at x = 5·c
/// the derivative is 1.8e-4 and float32 rounds tanh by 6e-8.
#[inline(always)]
pub fn slope<R: Real>(x: R, c: R) -> R {
    let e = (R::of(-2.0) * (x / c).abs()).exp();
    R::of(4.0) * e / ((R::one() + e) * (R::one() + e))
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
            assert_close(slope(x, 5.0), derivative(|x| value(x, 5.0), x), 1e-10);
        }
        // Also far beyond the cap, float32 agrees with float64.
        for x in [-40.0, -9.0, 3.0, 20.0] {
            assert!((f64::from(slope(x as f32, 1.0)) / slope(x, 1.0) - 1.0).abs() < 1e-5, "{x}");
        }
    }
}
