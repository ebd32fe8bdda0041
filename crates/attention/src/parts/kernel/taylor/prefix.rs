//! Prefixes of the exponential series without cancellation.

use crate::parts::kernel::taylor::MAX_ORDER;

/// Σ_{n≤p} x^n/n!: for scores in (−p−1, 0) as e^x minus the remainder, whose terms decrease from the first on.
pub(super) fn prefix(p: usize, x: f64) -> f64 {
    if x >= 0.0 || -x >= (p + 1) as f64 {
        return (1..=p).rev().fold(1.0, |sum, n| 1.0 + sum * x / n as f64);
    }
    let mut term = (1..=p + 1).fold(1.0, |term, n| term * x / n as f64);
    let mut remainder = 0.0f64;
    let mut n = p + 1;
    while term.abs() > 1e-18 * remainder.abs() && term != 0.0 {
        remainder += term;
        n += 1;
        term *= x / n as f64;
    }
    x.exp() - remainder
}

/// 1/n
const INVERSE: [f64; 4 * MAX_ORDER] = {
    let mut inverse = [0.0; 4 * MAX_ORDER];
    let mut n = 1;
    while n < inverse.len() {
        inverse[n] = 1.0 / n as f64;
        n += 1;
    }
    inverse
};

/// [`prefix`] of many scores: the same two formulas in branch-free arithmetic, which compiles to float64 vectors.
#[inline(always)]
pub(super) fn prefixes<const N: usize>(p: usize, x: [f64; N]) -> [f64; N] {
    let mut sums = [1.0; N];
    for n in (1..=p).rev() {
        for i in 0..N {
            sums[i] = 1.0 + sums[i] * x[i] * INVERSE[n];
        }
    }
    let lossy = |x: f64| x < 0.0 && -x < (p + 1) as f64;
    if !x.iter().any(|&x| lossy(x)) {
        return sums;
    }
    // The remainder as its first term times 1 + x/(p+2)·(1 + x/(p+3)·(…)).
    let (mut first, mut rest) = ([1.0; N], [1.0; N]);
    for inverse in &INVERSE[1..=p + 1] {
        for i in 0..N {
            first[i] *= x[i] * inverse;
        }
    }
    for inverse in INVERSE[p + 2..p + 2 + tail(p)].iter().rev() {
        for i in 0..N {
            rest[i] = 1.0 + rest[i] * x[i] * inverse;
        }
    }
    for i in 0..N {
        if lossy(x[i]) {
            sums[i] = x[i].exp() - first[i] * rest[i];
        }
    }
    sums
}

/// Number of terms of the remainder that matter if it decreases slowest: Π_{k≤K} (p+1)/(p+1+k) is below 1e-18 from about K = 9·√(p+1) + 20 on.
const fn tail(p: usize) -> usize {
    let mut root = 1;
    while root * root < p + 1 {
        root += 1;
    }
    9 * root + 20
}

/// The scores for which Σ_{n≤p} x^n/n! and its derivative are e^x within a quarter of float32 rounding.
pub(super) fn exponential_range(p: usize) -> (f64, f64) {
    let close = |x: f64| [p, p.saturating_sub(1)].iter().all(|&p| (prefix(p, x) / x.exp() - 1.0).abs() < 1.5e-8);
    let reach = |sign: f64| (1..=8 * 150).map(|i| sign * i as f64 / 8.0).take_while(|&x| x.abs() < 80.0 && close(x)).last().unwrap_or(0.0);
    (reach(-1.0), reach(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectorized_prefixes_match_scalar_ones() {
        for p in [1, 2, 9, 20, 79, MAX_ORDER] {
            let reach = 2.0 * p as f64 + 30.0;
            for i in -500..500 {
                let x = reach * i as f64 / 500.0;
                let [found, _] = prefixes(p, [x, 1.0]);
                let expected = prefix(p, x);
                // The residual cancellation at the lower end of each formula's range.
                let magnitude = prefix(p, x.abs()).min(expected.abs().max(x.exp()) * 1e3);
                assert!((found - expected).abs() <= 1e-13 * magnitude, "order {p} at {x}: {found:e}, expected {expected:e}");
            }
        }
    }

    #[test]
    fn the_tail_is_long_enough() {
        for p in 0..=MAX_ORDER {
            let last: f64 = (1..=tail(p)).map(|k| (p + 1) as f64 / (p + 1 + k) as f64).product();
            assert!(last < 1e-18 && p + 2 + tail(p) <= INVERSE.len(), "order {p}: {last:e}");
        }
    }
}
