//! Prefixes of the exponential series without cancellation.

/// Σ_{n≤p} x^n/n!: for scores in (−p−1, 0) as e^x less the remainder, whose terms shrink from the first on.
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

/// The scores for which Σ_{n≤p} x^n/n! and its derivative are e^x within a quarter of float32 rounding.
pub(super) fn exponential_range(p: usize) -> (f64, f64) {
    let close = |x: f64| [p, p.saturating_sub(1)].iter().all(|&p| (prefix(p, x) / x.exp() - 1.0).abs() < 1.5e-8);
    let reach = |sign: f64| (1..=8 * 150).map(|i| sign * i as f64 / 8.0).take_while(|&x| x.abs() < 80.0 && close(x)).last().unwrap_or(0.0);
    (reach(-1.0), reach(1.0))
}
