//! What intervals of means need.

/// The 0.975 quantile of Student's distribution with ν ≥ 1 degrees of freedom, to about 12 digits.
///
/// P(|T| > t) = I_x(ν/2, 1/2) with x = ν/(ν + t²); x is found by halving.
pub fn student(freedom: f64) -> f64 {
    let (mut low, mut high) = (0.0f64, 1.0f64);
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        *(if incomplete_beta(0.5 * freedom, 0.5, middle) < 0.05 { &mut low } else { &mut high }) = middle;
    }
    (freedom * (1.0 - low) / low).sqrt()
}

/// The regularised incomplete beta function I_x(a, b) for 0 < x < 1 by its continued fraction (NIST's Digital Library of Mathematical
/// Functions, 8.17.22), which converges quickly for x < (a + 1)/(a + b + 2); beyond it I_x(a, b) = 1 − I_{1−x}(b, a).
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    // From the innermost term outwards; 200 terms are enough for any a below 10 000.
    let fraction = (1..=200).rev().fold(1.0, |rest, term| {
        let m = f64::from(term / 2);
        let numerator = if term % 2 == 0 {
            m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m))
        } else {
            -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0))
        };
        1.0 + numerator / rest
    });
    let log_beta = libm::lgamma(a) + libm::lgamma(b) - libm::lgamma(a + b);
    (a * x.ln() + b * (1.0 - x).ln() - log_beta).exp() / (a * fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of `scipy.stats` 1.17.1.
    #[test]
    fn quantiles_are_students() {
        // t.ppf(0.975, nu)
        for (freedom, expected) in [
            (1.0, 12.706204736174694),
            (1.0035, 12.601956920886229),
            (1.5, 6.016663104427929),
            (2.0, 4.302652729749462),
            (2.0064, 4.2895273153867794),
            (3.7, 2.8675207071911895),
            (7.25, 2.348194849105371),
            (30.0, 2.0422724563012378),
            (198.5, 1.9719869338407243),
            (1e4, 1.960201239890626),
        ] {
            let found = student(freedom);
            assert!((found / expected - 1.0).abs() < 1e-11, "t({freedom}) = {found}, not {expected}");
        }
    }
}
