//! Condition number and positivity of a series.

use crate::parts::kernel::taylor::Taylor;

/// Number of samples of the real line per order.
const SAMPLES: usize = 64;

impl Taylor {
    /// Σ|terms|/|w| at x: the amplification of rounding errors when the series is summed in powers of x, as a state does.
    pub fn condition(&self, x: f64) -> f64 {
        self.horner_magnitude(x) / self.accurate(x).abs().max(f64::MIN_POSITIVE)
    }

    /// |x| beyond which the highest order exceeds all others together (Fujiwara's bound of the roots).
    pub(super) fn reach(&self) -> f64 {
        let p = self.degree();
        let lead = self.dense[p].abs();
        let ratio = |(n, c): (usize, &f64)| (c.abs() / lead).powf(1.0 / (p - n) as f64);
        let bound = self.dense[..p].iter().enumerate().map(ratio).fold(0.0, f64::max);
        if bound.is_finite() { 2.0 * bound } else { 2.0 * p as f64 + 4.0 }
    }

    /// Whether w is positive at samples of the real line x = r·tan θ, on which w·cosᵖ θ is a trigonometric polynomial of degree p, and
    /// at the minimum between any three of them. Odd degrees never are.
    pub(super) fn is_positive(&self) -> bool {
        let p = self.degree();
        if p % 2 == 1 || self.dense[p] <= 0.0 {
            return false;
        }
        let (count, scale) = (SAMPLES * (p + 1), (self.reach() / 2.0).max(f64::MIN_POSITIVE));
        let angle = |i: f64| (i / count as f64 - 0.5) * std::f64::consts::PI;
        // Multiplied by cosᵖ θ, so nothing overflows.
        let value = |i: f64| {
            let (sin, cos) = angle(i).sin_cos();
            (0..=p).map(|n| self.dense[n] * scale.powi(n as i32) * sin.powi(n as i32) * cos.powi((p - n) as i32)).sum::<f64>()
        };
        let samples: Vec<f64> = (0..count).map(|i| value(i as f64)).collect();
        (0..count).all(|i| {
            let (before, here, after) = (samples[(i + count - 1) % count], samples[i], samples[(i + 1) % count]);
            if here > before || here > after || here <= 0.0 {
                return here > 0.0;
            }
            lowest(value, i as f64 - 1.0, i as f64 + 1.0) > 0.0
        })
    }
}

/// The minimum between a and b of a unimodal function, by golden-section search.
fn lowest(f: impl Fn(f64) -> f64, mut a: f64, mut b: f64) -> f64 {
    const GOLDEN: f64 = 0.618_033_988_749_894_8;
    let mut least = f64::INFINITY;
    for _ in 0..60 {
        let (left, right) = (b - GOLDEN * (b - a), a + GOLDEN * (b - a));
        let (at_left, at_right) = (f(left), f(right));
        least = least.min(at_left).min(at_right);
        if at_left < at_right { b = right } else { a = left }
    }
    least
}
