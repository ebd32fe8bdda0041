//! The success probability in closed form.
//!
//! F > 0 if any y_i responds. Given the column of row j3, the y_i are independent. With p_0 the probability that one responds on
//! D_0, and p_01 that it responds on either,
//!
//! P(success) = (1 − p_0)^m − (1 − p_01)^m.
//!
//! A response depends on three signs and on the number of rows with −1. Columns of the identity have q or q + 1 rows, so this is a sum
//! over two binomial counts. The response decreases with the count, so the inner sum is one value of a distribution function.

use super::{Pair, Setting, Signs};

impl Pair {
    /// The probability of success over y and j3.
    pub fn exact(&self) -> f64 {
        let Setting { n, d, .. } = self.setting;
        let (copies, extra) = self.setting.copies();
        let short = d - 2 - extra;
        // Row j3 is in a column with one more row, or in another.
        let long_rows = extra as u64 * (copies + 1);
        let mut probability = 0.0;
        if long_rows > 0 {
            probability += long_rows as f64 / n as f64 * self.given(copies, extra - 1, short, copies);
        }
        if n > long_rows {
            probability += (n - long_rows) as f64 / n as f64 * self.given(copies, extra, short - 1, copies - 1);
        }
        probability
    }

    /// Given that row j3 shares its column with `own` rows, with `long` other columns of `copies` + 1 rows and `short` ones of `copies`.
    fn given(&self, copies: u64, long: usize, short: usize, own: u64) -> f64 {
        let (long, short) = (binomial(long), binomial(short));
        // Distribution function of the short columns: P(count < k).
        let below: Vec<f64> = std::iter::once(0.0)
            .chain(short.iter().scan(0.0, |sum, p| {
                *sum += p;
                Some(*sum)
            }))
            .collect();
        let (mut null, mut either) = (0.0, 0.0);
        for signs in 0..8u8 {
            let [spike, constant, of_own] = [1, 2, 4].map(|flag| signs & flag != 0);
            for (k, p) in long.iter().enumerate() {
                let rows = |j: usize| (copies + 1) * k as u64 + copies * j as u64 + if of_own { own } else { 0 };
                let responding = |side: usize| {
                    let responds = |j: usize| self.sides[side].response(Signs { spike, constant, own: of_own, others: rows(j) }) > 0.0;
                    first_false(short.len(), responds)
                };
                let counts = [responding(0), responding(1)];
                null += p / 8.0 * below[counts[0]];
                either += p / 8.0 * below[counts[0].max(counts[1])];
            }
        }
        let none = |p: f64| (self.setting.m as f64 * (-p.min(1.0)).ln_1p()).exp();
        none(null) - none(either)
    }
}

/// The first index below `count` at which a monotonic predicate is false.
fn first_false(count: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = (low + high) / 2;
        if holds(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

/// Probabilities of 0..=n heads of n fair coins.
fn binomial(n: usize) -> Vec<f64> {
    // In logarithms, since 2^−n underflows.
    let first = -(n as f64) * std::f64::consts::LN_2;
    let rest = (1..=n).scan(first, |ln, k| {
        *ln += ((n - k + 1) as f64 / k as f64).ln();
        Some(*ln)
    });
    std::iter::once(first).chain(rest).map(f64::exp).collect()
}
