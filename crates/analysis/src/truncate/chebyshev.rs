//! Polynomials in the Chebyshev basis, T_n((x − middle)/half): well-conditioned on the interval of a head's scores.

use termwise_attention::combinatorics::factorial;

/// An interval of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Its middle.
    pub middle: f64,
    /// Half its width, positive.
    pub half: f64,
}

impl Interval {
    /// From the lowest to the highest score; the middle is a multiple of 1/16.
    pub fn around(low: f64, high: f64) -> Interval {
        let middle = sixteenth((low + high) / 2.0);
        // An interval of equal scores still needs a width.
        Interval { middle, half: (high - middle).max(middle - low).max(1e-3) }
    }

    /// T_0..T_p at x, as many as `out` has elements.
    pub fn values(&self, x: f64, out: &mut [f64]) {
        chebyshev((x - self.middle) / self.half, out);
    }

    /// P(x) from its coefficients, by the Clenshaw recurrence.
    pub fn evaluate(&self, c: &[f64], x: f64) -> f64 {
        let u = (x - self.middle) / self.half;
        let (mut b1, mut b2) = (0.0, 0.0);
        for &c in c.iter().skip(1).rev() {
            (b1, b2) = (2.0 * u * b1 - b2 + c, b1);
        }
        c.first().copied().unwrap_or(0.0) + u * b1 - b2
    }

    /// The coefficients a_n of the same polynomial as Σ a_n·x^n/n!.
    pub fn series(&self, c: &[f64]) -> Vec<f64> {
        let p = c.len().saturating_sub(1);
        let mut powers = vec![0.0; p + 1];
        // T_n in powers of u, by T_n = 2u·T_{n−1} − T_{n−2}.
        let (mut before, mut here) = (vec![0.0; p + 2], vec![0.0; p + 2]);
        here[0] = 1.0;
        for (n, &c) in c.iter().enumerate() {
            powers.iter_mut().zip(&here).for_each(|(power, t)| *power += c * t);
            let factor = if n == 0 { 1.0 } else { 2.0 };
            let next: Vec<f64> = (0..p + 2).map(|k| factor * if k > 0 { here[k - 1] } else { 0.0 } - before[k]).collect();
            before = std::mem::replace(&mut here, next);
        }
        // In powers of x − middle, then of x: Horner over m of a_m·(−middle)^{m−n}/(m−n)!.
        let a: Vec<f64> = powers.iter().enumerate().map(|(n, a)| a * factorial(n) / self.half.powi(n as i32)).collect();
        (0..=p).map(|n| (n..=p).rev().fold(0.0, |sum, m| a[m] - sum * self.middle / (m - n + 1) as f64)).collect()
    }

    /// The coefficients of a polynomial of degree p from its values: interpolation at Chebyshev nodes.
    pub fn interpolate(&self, p: usize, f: impl Fn(f64) -> f64) -> Vec<f64> {
        let n = p + 1;
        let angle = |j: usize| (j as f64 + 0.5) * std::f64::consts::PI / n as f64;
        let values: Vec<f64> = (0..n).map(|j| f(self.middle + self.half * angle(j).cos())).collect();
        let coefficient = |k: usize| {
            let sum: f64 = values.iter().enumerate().map(|(j, v)| v * (k as f64 * angle(j)).cos()).sum();
            sum * if k == 0 { 1.0 } else { 2.0 } / n as f64
        };
        (0..n).map(coefficient).collect()
    }
}

/// T_0..T_p at u.
pub fn chebyshev(u: f64, out: &mut [f64]) {
    let (mut here, mut next) = (1.0, u);
    for out in out {
        *out = here;
        (here, next) = (next, 2.0 * u * next - here);
    }
}

/// The nearest multiple of 1/16.
pub fn sixteenth(x: f64) -> f64 {
    (x * 16.0).round() / 16.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_evaluations_agree() {
        let interval = Interval::around(-5.3, 9.1);
        assert_eq!(interval.middle * 16.0, (interval.middle * 16.0).round());
        assert!(interval.middle - interval.half <= -5.3 && interval.middle + interval.half >= 9.1);
        let f = |x: f64| 2.0 - x + 0.25 * x * x - 0.125 * x.powi(3) + 0.01 * x.powi(4);
        let c = interval.interpolate(4, f);
        let a = interval.series(&c);
        let mut values = [0.0; 5];
        for x in [-7.0, -5.0, -1.3, 0.0, 2.0, 8.0, 12.0] {
            interval.values(x, &mut values);
            let sum: f64 = values.iter().zip(&c).map(|(t, c)| t * c).sum();
            let series: f64 = a.iter().enumerate().map(|(n, a)| a * x.powi(n as i32) / factorial(n)).sum();
            for found in [sum, series, interval.evaluate(&c, x)] {
                assert!((found - f(x)).abs() < 1e-11 * (1.0 + f(x).abs()), "{x}: {found} {}", f(x));
            }
        }
        assert_eq!((chebyshev_at(3, 0.5), chebyshev_at(2, -1.0), chebyshev_at(0, 7.0)), (-1.0, 1.0, 1.0));
    }

    fn chebyshev_at(n: usize, u: f64) -> f64 {
        let mut out = vec![0.0; n + 1];
        chebyshev(u, &mut out);
        out[n]
    }

    #[test]
    fn an_interval_of_one_score_has_a_width() {
        let interval = Interval::around(2.0, 2.0);
        assert!(interval.half > 0.0 && interval.series(&[1.0, 1.0]).iter().all(|a| a.is_finite()));
    }
}
