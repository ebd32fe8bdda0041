//! Student's t distribution, for confidence intervals and tests of means, and Holm's correction.

/// The 0.975 quantile of Student's t distribution with `df` ≥ 1 degrees of freedom, to about 12 digits.
///
/// P(|T| > t) = I_x(df/2, 1/2) with x = df/(df + t²); x is found by bisection.
pub fn t_quantile_975(df: f64) -> f64 {
    let (mut low, mut high) = (0.0f64, 1.0f64);
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        *(if incomplete_beta(0.5 * df, 0.5, middle) < 0.05 { &mut low } else { &mut high }) = middle;
    }
    (df * (1.0 - low) / low).sqrt()
}

/// P(|T| > |t|), the two-sided p-value of t with `df` ≥ 1 degrees of freedom.
pub fn t_two_sided(t: f64, df: f64) -> f64 {
    match t.abs() {
        0.0 => 1.0,
        t if t.is_finite() => incomplete_beta(0.5 * df, 0.5, df / (df + t * t)),
        _ => 0.0,
    }
}

/// Holm's step-down adjustment of the p-values of one family. A hypothesis is rejected at level α if its adjusted p-value is at most α. The
/// probability of any false rejection in the family is then at most α.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&i, &j| p[i].total_cmp(&p[j]));
    let (mut adjusted, mut largest) = (vec![1.0; p.len()], 0.0f64);
    for (rank, &i) in order.iter().enumerate() {
        largest = largest.max((p.len() - rank) as f64 * p[i]).min(1.0);
        adjusted[i] = largest;
    }
    adjusted
}

/// The regularised incomplete beta function I_x(a, b) for 0 < x < 1 by its continued fraction (NIST Digital Library of Mathematical
/// Functions, 8.17.22). It converges quickly for x < (a + 1)/(a + b + 2). Above that, I_x(a, b) = 1 − I_{1−x}(b, a).
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    // From the innermost term outwards. 200 terms are enough for any a below 10 000.
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

    /// Textbook tables with three decimals.
    #[test]
    fn quantiles_match_textbook_tables() {
        for (df, expected) in [
            (1.0, 12.706),
            (2.0, 4.303),
            (3.0, 3.182),
            (4.0, 2.776),
            (5.0, 2.571),
            (10.0, 2.228),
            (20.0, 2.086),
            (60.0, 2.000),
            (120.0, 1.980),
        ] {
            let found = t_quantile_975(df);
            assert!((found - expected).abs() < 5.1e-4, "t({df}) = {found}, not {expected}");
            assert!((t_two_sided(found, df) - 0.05).abs() < 1e-12 && (t_two_sided(-found, df) - 0.05).abs() < 1e-12);
        }
        // t(1) is the Cauchy distribution: P(|T| > t) = 1 − 2·atan(t)/π.
        for t in [0.1, 1.0, 3.0, 1e6] {
            let expected = 1.0 - 2.0 * f64::atan(t) / std::f64::consts::PI;
            assert!((t_two_sided(t, 1.0) - expected).abs() < 1e-12, "{t}");
        }
        assert_eq!((t_two_sided(0.0, 3.0), t_two_sided(f64::INFINITY, 3.0)), (1.0, 0.0));
    }

    /// The example of `statsmodels.stats.multitest.multipletests(p, method="holm")`, by hand: 4·0.01, 3·0.02, then the largest so far, 2·0.03.
    #[test]
    fn holm_steps_down() {
        let close = |found: Vec<f64>, expected: &[f64]| found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15);
        assert!(close(holm(&[0.04, 0.01, 0.03, 0.02]), &[0.06, 0.04, 0.06, 0.06]), "{:?}", holm(&[0.04, 0.01, 0.03, 0.02]));
        assert!(close(holm(&[1.0, 0.001, 1.0]), &[1.0, 0.003, 1.0]));
        assert!(holm(&[]).is_empty());
    }

    /// Reference values from `scipy.stats` 1.17.1.
    #[test]
    fn quantiles_match_scipy() {
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
            let found = t_quantile_975(freedom);
            assert!((found / expected - 1.0).abs() < 1e-11, "t({freedom}) = {found}, not {expected}");
        }
    }
}
