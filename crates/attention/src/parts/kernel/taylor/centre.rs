//! A series around another score than zero: its coefficients in powers of x, how much they cancel, and whether it stays positive.

use crate::parts::kernel::taylor::{Taylor, factorial, prefix};

/// Samples of the whole line, for each order.
const SAMPLES: usize = 64;

impl Taylor {
    /// w^(n)(0) for n = 0..=p: what multiplies x^n/n! when the series is written in powers of x.
    pub(super) fn centre_expanded(&self) -> Vec<f64> {
        let p = self.degree();
        let from = -self.centre;
        if self.is_prefix() {
            return (0..=p).map(|n| prefix(p - n, from)).collect();
        }
        // Horner over m of a_m·(−c)^{m−n}/(m−n)!, a_m = m!·dense[m].
        let a: Vec<f64> = self.dense.iter().enumerate().map(|(m, c)| c * factorial(m)).collect();
        (0..=p).map(|n| (n..=p).rev().fold(0.0, |sum, m| a[m] + sum * from / (m - n + 1) as f64)).collect()
    }

    /// Σ|terms|/|w| at x when the series is summed around its centre: how many times rounding is amplified.
    pub fn condition(&self, x: f64) -> f64 {
        let from = x - self.centre;
        self.horner_magnitude(from) / self.accurate(x).abs().max(f64::MIN_POSITIVE)
    }

    /// The same when it is summed in powers of x, as a state does.
    pub fn state_condition(&self, x: f64) -> f64 {
        let terms = self.centre_expanded();
        let magnitude = terms.iter().enumerate().rev().fold(0.0, |sum, (n, a)| a.abs() + sum * x.abs() / (n + 1) as f64);
        magnitude / self.accurate(x).abs().max(f64::MIN_POSITIVE)
    }

    /// Distance from the centre beyond which the highest order outweighs all others together (Fujiwara's bound of the roots).
    pub(super) fn reach(&self) -> f64 {
        let p = self.degree();
        let lead = self.dense[p].abs();
        let ratio = |(n, c): (usize, &f64)| (c.abs() / lead).powf(1.0 / (p - n) as f64);
        let bound = self.dense[..p].iter().enumerate().map(ratio).fold(0.0, f64::max);
        if bound.is_finite() { 2.0 * bound } else { 2.0 * p as f64 + 4.0 }
    }

    /// Whether w is above zero at samples of the whole line x = c + r·tan θ, on which w·cosᵖ θ is a trigonometric polynomial of degree p, and
    /// at the lowest point between any three of them. Odd degrees never are.
    pub(super) fn is_positive(&self) -> bool {
        let p = self.degree();
        if p % 2 == 1 || self.dense[p] <= 0.0 {
            return false;
        }
        let (count, scale) = (SAMPLES * (p + 1), (self.reach() / 2.0).max(f64::MIN_POSITIVE));
        let angle = |i: f64| (i / count as f64 - 0.5) * std::f64::consts::PI;
        // With cosᵖ θ taken in, so that nothing overflows.
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

/// The least value between a and b of a function with one minimum there, by golden section.
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
