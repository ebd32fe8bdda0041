//! Sums of powers: Σ |x|^n over scores of one sign, for the mean magnitude of the terms |x^n/n!|.

use super::ORDERS;
use super::lanes::{LANES, Lane, load, map, splat, sum, zip};

/// Vectors of scores that are raised together, as independent chains of multiplications.
const CHAINS: usize = 4;

/// Σ (|x|/2^k)^n for n below [`ORDERS`], 2^k at least the largest |x|: no power overflows, and scaling by powers of two is exact.
#[derive(Clone, Debug, PartialEq)]
pub struct Powers {
    k: i32,
    sums: Vec<f64>,
    count: u64,
}

impl Default for Powers {
    fn default() -> Powers {
        Powers { k: i32::MIN, sums: vec![0.0; ORDERS], count: 0 }
    }
}

impl Powers {
    /// Number of scores.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Adds scores, which are finite and ≥ 0; `sums` has [`ORDERS`] vectors.
    #[inline(always)]
    pub fn add(&mut self, x: &[f64], sums: &mut [Lane]) {
        let largest = x.iter().fold(0.0, |most: f64, &x| most.max(x));
        self.count += x.len() as u64;
        self.sums[0] += x.len() as f64;
        if largest == 0.0 {
            return;
        }
        self.raise(exponent(largest));
        let scale = power_of_two(-self.k);
        let sums = &mut sums[..ORDERS];
        sums.fill(splat(0.0));
        for chunk in x.chunks(CHAINS * LANES) {
            let mut base = [splat(0.0); CHAINS];
            for (base, x) in base.iter_mut().zip(chunk.chunks(LANES)) {
                *base = map(load(x, 0.0), |x| x * scale);
            }
            let mut power = base;
            for sum in &mut sums[1..] {
                let both = |a: Lane, b: Lane| zip(a, b, |a, b| a + b);
                *sum = both(*sum, both(both(power[0], power[1]), both(power[2], power[3])));
                for (power, base) in power.iter_mut().zip(&base) {
                    *power = zip(*power, *base, |power, x| power * x);
                }
            }
        }
        for (own, lane) in self.sums.iter_mut().zip(sums).skip(1) {
            *own += sum(*lane);
        }
    }

    /// The sums as sent to other ranks.
    pub fn to_words(&self) -> Vec<u64> {
        let front = [self.k as u32 as u64, self.count];
        front.into_iter().chain(self.sums.iter().map(|sum| sum.to_bits())).collect()
    }

    /// Reads sums and advances; `None` if they are incomplete.
    pub fn of_words(words: &mut &[u64]) -> Option<Powers> {
        let own = words.split_off(..2 + ORDERS)?;
        Some(Powers { k: own[0] as u32 as i32, count: own[1], sums: own[2..].iter().map(|&word| f64::from_bits(word)).collect() })
    }

    /// Adds another accumulator.
    pub fn merge(&mut self, other: &Powers) {
        let mut other = other.clone();
        self.raise(other.k);
        other.raise(self.k);
        self.count += other.count;
        self.sums.iter_mut().zip(&other.sums).for_each(|(own, other)| *own += other);
    }

    /// ln of Σ |x|^n/n!, −∞ for zero.
    pub fn ln_sums(&self) -> Vec<f64> {
        let mut ln_factorial = 0.0;
        let scale = f64::from(self.k.max(MIN)) * std::f64::consts::LN_2;
        let term = |(n, &sum): (usize, &f64)| {
            ln_factorial += (n.max(1) as f64).ln();
            if sum == 0.0 { f64::NEG_INFINITY } else { sum.ln() + n as f64 * scale - ln_factorial }
        };
        self.sums.iter().enumerate().map(term).collect()
    }

    fn raise(&mut self, k: i32) {
        if k <= self.k {
            return;
        }
        if self.k > i32::MIN {
            for (n, sum) in self.sums.iter_mut().enumerate() {
                *sum *= power_of_two((i64::from(self.k - k) * n as i64).max(-2000) as i32);
            }
        }
        self.k = k;
    }
}

/// Scores below 2^MIN are rounded to it; their powers are negligible.
const MIN: i32 = -1000;

/// The smallest k with x ≤ 2^k, for positive x.
fn exponent(x: f64) -> i32 {
    let floor = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let exact = x.to_bits() << 12 == 0;
    (if exact { floor } else { floor + 1 }).max(MIN)
}

/// 2^k, exact; 0 if it underflows.
fn power_of_two(k: i32) -> f64 {
    2f64.powi(k.max(-1000)) * 2f64.powi((k + 1000).min(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spectrum::lanes::vectorized;

    fn powers(x: &[f64]) -> Powers {
        let (mut powers, mut sums) = (Powers::default(), vec![splat(0.0); ORDERS]);
        vectorized(|| powers.add(x, &mut sums));
        powers
    }

    /// ln Σ |x|^n/n! by adding logarithms.
    fn plain(x: &[f64], n: usize) -> f64 {
        let ln_factorial: f64 = (1..=n).map(|i| (i as f64).ln()).sum();
        let logs: Vec<f64> = x.iter().map(|x| if n == 0 { 0.0 } else { n as f64 * x.ln() - ln_factorial }).collect();
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if most == f64::NEG_INFINITY { most } else { most + logs.iter().map(|log| (log - most).exp()).sum::<f64>().ln() }
    }

    #[test]
    fn sums_of_any_size_have_the_right_logarithm() {
        let draws = |n: usize, scale: f64| (0..n).map(|i| scale * ((i * 37 % 101) as f64 + 0.5) / 101.0).collect::<Vec<f64>>();
        for x in [draws(1, 1.0), draws(31, 193.0), draws(77, 1e6), draws(64, 1e-6), draws(33, 1e250), vec![0.0; 9], vec![0.0, 2.0]] {
            let found = powers(&x);
            assert_eq!(found.count(), x.len() as u64);
            for (n, found) in found.ln_sums().into_iter().enumerate() {
                let expected = plain(&x, n);
                assert!(found == expected || (found - expected).abs() < 1e-12 * (1.0 + expected.abs()), "{n} of {x:?}: {found} {expected}");
            }
        }
    }

    #[test]
    fn sums_of_parts_are_the_sum() {
        let (a, b): (Vec<f64>, Vec<f64>) = ((1..50).map(|i| f64::from(i) * 0.01).collect(), (1..70).map(|i| f64::from(i) * 10.0).collect());
        let both = powers(&[a.clone(), b.clone()].concat());
        for (first, second) in [(&a, &b), (&b, &a)] {
            let mut merged = Powers::default();
            merged.merge(&powers(first));
            merged.merge(&powers(second));
            merged.merge(&Powers::default());
            assert_eq!(merged.count(), both.count());
            for (found, expected) in merged.ln_sums().iter().zip(both.ln_sums()) {
                assert!((found - expected).abs() < 1e-12 * (1.0 + expected.abs()), "{found} {expected}");
            }
        }
    }
}
