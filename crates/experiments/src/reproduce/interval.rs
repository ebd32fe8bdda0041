//! The difference of two means over seeds, with its 95 % confidence interval.
//!
//! Runs of one task with the same seed see the same documents in the same order, and tensors that their models share have the same initial
//! values. Sides with the same seeds are compared seed by seed; otherwise they are independent samples with unequal variances:
//!
//! ```text
//! paired    d_i = a_i − b_i                       half = t(n − 1) · s_d / √n
//! Welch     v = s_a²/n_a + s_b²/n_b               half = t(ν) · √v
//!           ν = v² / ((s_a²/n_a)²/(n_a − 1) + (s_b²/n_b)²/(n_b − 1))        Welch–Satterthwaite, a fraction
//! ```
//!
//! with t the 0.975 quantile of Student's distribution. No variances are pooled: sides whose deviations are 0.06 and 1.5 are common here.

use serde::{Deserialize, Serialize};
use termwise_base::statistics::{t_quantile_975, t_two_sided};
use termwise_train::sweep::Statistic;

/// A value per seed.
pub type Numbers = Vec<(u64, f64)>;

/// The method of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Paired by seed.
    Paired,
    /// Independent samples with unequal variances.
    Welch,
    /// One side against a fixed number.
    OneSample,
}

/// The difference of two means.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// First minus second.
    pub value: f64,
    /// Half the 95 % interval.
    pub half_interval: f64,
    /// The method.
    pub method: Method,
    /// Degrees of freedom.
    pub freedom: f64,
    /// The larger of the two standard deviations over seeds.
    pub deviation: f64,
}

impl Difference {
    /// Of two sides with at least two seeds each.
    pub fn of(a: &Numbers, b: &Numbers) -> Difference {
        let sorted = |side: &Numbers| {
            let mut side = side.clone();
            side.sort_by_key(|&(seed, _)| seed);
            side
        };
        let (a, b) = (sorted(a), sorted(b));
        let [of_a, of_b] = [&a, &b].map(|side| moments(side.iter().map(|&(_, x)| x)));
        let deviation = of_a.1.sqrt().max(of_b.1.sqrt());
        let value = of_a.0 - of_b.0;
        if a.iter().map(|pair| pair.0).eq(b.iter().map(|pair| pair.0)) {
            let (_, variance) = moments(a.iter().zip(&b).map(|((_, a), (_, b))| a - b));
            let freedom = (a.len() - 1) as f64;
            let half_interval = t_quantile_975(freedom) * (variance / a.len() as f64).sqrt();
            return Difference { value, half_interval, method: Method::Paired, freedom, deviation };
        }
        let (v_a, v_b) = (of_a.1 / a.len() as f64, of_b.1 / b.len() as f64);
        let v = v_a + v_b;
        let shares = v_a * v_a / (a.len() - 1) as f64 + v_b * v_b / (b.len() - 1) as f64;
        // Without any variance there is no interval to have degrees of freedom.
        let freedom = if shares > 0.0 { v * v / shares } else { (a.len() + b.len() - 2) as f64 };
        Difference { value, half_interval: t_quantile_975(freedom) * v.sqrt(), method: Method::Welch, freedom, deviation }
    }

    /// Of a mean and a fixed number; the side has at least two seeds.
    pub fn from(bound: f64, a: &Numbers) -> Difference {
        let (mean, variance) = moments(a.iter().map(|&(_, x)| x));
        let freedom = (a.len() - 1) as f64;
        let half_interval = t_quantile_975(freedom) * (variance / a.len() as f64).sqrt();
        Difference { value: mean - bound, half_interval, method: Method::OneSample, freedom, deviation: variance.sqrt() }
    }

    /// Second minus first.
    pub fn reversed(self) -> Difference {
        Difference { value: -self.value, ..self }
    }

    /// The standard error of the value.
    fn error(self) -> f64 {
        self.half_interval / t_quantile_975(self.freedom)
    }

    /// The two-sided p-value of the hypothesis that the value is 0.
    pub fn p_value(self) -> f64 {
        p_value(self.value.abs(), self.error(), self.freedom)
    }

    /// The smallest level at which all of this interval is beyond a share of another difference, with the interval of both; the whole interval is within where
    /// `within` is set.
    pub fn p_against(self, share: f64, gap: Difference, within: bool) -> f64 {
        let distance = self.value.abs() - share * gap.value;
        p_value(if within { -distance } else { distance }, self.error() + share * gap.error(), self.freedom.min(gap.freedom))
    }

    /// Whether the interval is above 0 and the value above `least` and both standard deviations.
    pub fn counts(self, least: f64) -> bool {
        self.value > least && self.value > self.half_interval && self.value > self.deviation
    }
}

/// `+2.385, 95 % interval −1.283 to +6.053 (paired by seed, t(2))`.
impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [value, low, high] = [self.value, self.value - self.half_interval, self.value + self.half_interval].map(signed);
        let (method, freedom) = match self.method {
            Method::Paired => ("paired by seed", format!("{:.0}", self.freedom)),
            Method::Welch => ("Welch", format!("{:.2}", self.freedom)),
            Method::OneSample => ("one sample", format!("{:.0}", self.freedom)),
        };
        write!(f, "{value}, 95 % interval {low} to {high} ({method}, t({freedom}))")
    }
}

/// Three decimals with a sign, except where they are all zero.
fn signed(x: f64) -> String {
    let rounded = (x * 1000.0).round() / 1000.0;
    match rounded {
        0.0 => "0.000".into(),
        x if x < 0.0 => format!("−{:.3}", -x),
        x => format!("+{x:.3}"),
    }
}

/// The p-value of a distance that is at most 0 under the hypothesis.
fn p_value(distance: f64, error: f64, freedom: f64) -> f64 {
    match () {
        () if distance <= 0.0 => 1.0,
        () if error == 0.0 => 0.0,
        () => t_two_sided(distance / error, freedom),
    }
}

/// Mean, and variance with n − 1.
fn moments(numbers: impl Iterator<Item = f64>) -> (f64, f64) {
    let found = Statistic::of(&numbers.collect::<Vec<f64>>());
    found.map_or((0.0, 0.0), |found| (found.mean, found.deviation.unwrap_or(0.0).powi(2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(first_seed: u64, numbers: &[f64]) -> Numbers {
        (first_seed..).zip(numbers.iter().copied()).collect()
    }

    /// Numbers of `scipy.stats` 1.17.1: `ttest_ind(a, b, equal_var=False)` and `ttest_rel(a, b)`, their `df` and half of their
    /// `confidence_interval(0.95)`.
    #[test]
    fn intervals_are_those_of_welch_and_of_pairs() {
        let (relu, gate) = ([1.657, 4.159, 1.549], [0.052, 0.023, 0.137]);
        let (linear, softmax) = ([1.99, 3.578, 2.83], [0.0, 0.0, 0.021]);
        type Case<'a> = (&'a [f64], &'a [f64], Method, f64, f64);
        let cases: [Case; 6] = [
            // Deviations 1.477 and 0.059. Pooled, with t(4), half the interval would be 2.369, and the difference of 2.384 would count.
            (&relu, &gate, Method::Welch, 2.0064391069667966, 3.6599976231630107),
            (&relu, &gate, Method::Paired, 2.0, 3.776023604548606),
            (&linear, &softmax, Method::Welch, 2.000931645476294, 1.9728578204732001),
            (&linear, &softmax, Method::Paired, 2.0, 1.972731215888887),
            (&[10.0, 11.0, 12.0, 13.0], &[0.0, 0.1], Method::Welch, 3.03578013574534, 2.046743558768492),
            (&[2.0, 2.5, 2.2], &[1.0, 2.0, 3.0, 4.5, 0.5], Method::Welch, 4.320142145190827, 1.974846205746989),
        ];
        for (a, b, method, freedom, half) in cases {
            let other = if method == Method::Paired { 1 } else { 101 };
            let found = Difference::of(&side(1, a), &side(other, b));
            assert_eq!(found.method, method);
            assert!((found.freedom - freedom).abs() < 1e-9 && (found.half_interval - half).abs() < 1e-9, "{a:?} {b:?}: {found:?}");
        }
    }

    /// The quantile is that of the test above.
    #[test]
    fn a_mean_against_a_number_has_the_interval_of_one_sample() {
        let found = Difference::from(2.0, &side(1, &[1.657, 4.159, 1.549]));
        assert!((found.value - 0.455).abs() < 1e-12 && found.freedom == 2.0 && found.method == Method::OneSample, "{found:?}");
        assert!((found.half_interval - 4.302652729749462 * 1.476694958344478 / 3f64.sqrt()).abs() < 1e-9, "{found:?}");
        assert!(found.to_string().ends_with("(one sample, t(2))"));
    }

    #[test]
    fn pairs_are_found_by_seed() {
        let (a, mut b) = (side(1, &[1.0, 5.0, 3.0]), side(1, &[2.0, 6.0, 4.0]));
        b.reverse();
        let found = Difference::of(&a, &b);
        // Every seed differs by exactly one, however much seeds differ.
        assert_eq!((found.value, found.half_interval, found.method), (-1.0, 0.0, Method::Paired));
        assert_eq!(found.to_string(), "−1.000, 95 % interval −1.000 to −1.000 (paired by seed, t(2))");
        // One seed more on one side: no pairs.
        b.push((9, 5.0));
        assert_eq!(Difference::of(&a, &b).method, Method::Welch);
        // Without any variance nothing is divided by zero.
        let flat = Difference::of(&side(1, &[1.0, 1.0]), &side(7, &[0.5, 0.5]));
        assert_eq!((flat.value, flat.half_interval, flat.method), (0.5, 0.0, Method::Welch));
    }
}
