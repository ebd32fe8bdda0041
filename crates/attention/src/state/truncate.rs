//! Truncation of exp at order p, with an error bound for the output
//!
//! Let w_p(x) = Σ_{n≤p} x^n/n! and ρ(x) = w_p(x)/e^x. Taylor's remainder in its integral form gives
//!
//! ```text
//! ρ(x) = 1 − ∫_0^x s^p/p!·e^{−s} ds,  which decreases for even p, so |x| ≤ r implies ρ(r) ≤ ρ(x) ≤ ρ(−r), and ρ(r) > 0.
//! ```
//!
//! Softmax has y = Σ p_s·v_s, truncated y' = Σ p_s·ρ_s·v_s / ρ̄ with ρ̄ = Σ p_s·ρ_s. Hence ‖y' − y‖ ≤ Σ p_s·|ρ_s/ρ̄ − 1| · max‖v_s‖, and the mean
//! absolute deviation of numbers in [a, b] is at most 2(b − ρ̄)(ρ̄ − a)/(b − a), which divided by ρ̄ is largest at ρ̄ = √(ab):
//!
//! ```text
//! ‖y' − y‖ ≤ 2·(√b − √a)/(√b + √a) · max_s ‖v_s‖,      a = ρ(r), b = ρ(−r)
//! ```
//!
//! Without a sum, U = Σ w_s·v_s, each weight has a relative error |ρ_s − 1| ≤ max(1 − a, b − 1), and so
//! ‖U' − U‖ ≤ max(1 − a, b − 1) · Σ_s w_s·‖v_s‖.

use crate::parts::kernel::taylor::Taylor;
use crate::{Error, Kernel, Variant};
use termwise_kernels::combinatorics::factorial;

/// Error bound of an exponential truncated at an even order, for scores within a bound.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Truncation {
    /// Truncation order p.
    pub order: usize,
    /// r, an upper bound of |score|; see [`crate::State::largest_score`].
    pub largest_score: f64,
    /// 1 − ρ(r): the largest missing fraction of a weight.
    pub missing: f64,
    /// ρ(−r) − 1: the largest excess fraction of a weight.
    pub excess: f64,
}

impl Truncation {
    /// For even p and scores |x| ≤ r. For odd orders weights may be negative, and there is no bound.
    pub fn new(order: usize, largest_score: f64) -> Result<Truncation, Error> {
        if order % 2 == 1 {
            return Err(Error::Shape(format!(
                "the exponential truncated at the odd order {order} has negative weights and no error bound; use order {} or {}",
                order - 1,
                order + 1
            )));
        }
        let r = largest_score.abs();
        // Both integrals from 0 to r of s^p/p!·e^∓s, as series with positive terms.
        let missing = (-r).exp() * tail(order, r, |n| r / n as f64);
        let first = r.powi(order as i32 + 1) / factorial(order);
        let mut power = 1.0;
        let mut excess = 0.0;
        for m in 0.. {
            let term = first * power / (order + 1 + m) as f64;
            excess += term;
            if term <= 1e-17 * excess || !excess.is_finite() {
                break;
            }
            power *= r / (m + 1) as f64;
        }
        // Rounded up, so it remains an upper bound. A NaN score has no bound.
        let up = |x: f64| if r.is_nan() { f64::INFINITY } else { x * (1.0 + 1e-12) };
        Ok(Truncation { order, largest_score: r, missing: up(missing).min(1.0), excess: up(excess) })
    }

    /// With a sum denominator: the largest ‖y' − y‖ in units of the largest ‖v_s‖. At most 2.
    pub fn of_sum(&self) -> f64 {
        let (a, b) = ((1.0 - self.missing).sqrt(), (1.0 + self.excess).sqrt());
        if b.is_finite() { 2.0 * ((self.excess + self.missing) / ((b + a) * (b + a))) } else { 2.0 }
    }
}

/// Σ_{n>p} r^n/n!, each term computed from the previous one by `ratio`.
fn tail(p: usize, r: f64, ratio: impl Fn(usize) -> f64) -> f64 {
    let mut term = (1..=p + 1).fold(1.0, |term, n| term * r / n as f64);
    let mut sum = 0.0;
    let mut n = p + 1;
    while term > 1e-17 * sum && term.is_finite() {
        sum += term;
        n += 1;
        term *= ratio(n);
    }
    sum
}

impl Variant {
    /// This variant with the exponential truncated at order p: taylor{0..p}, otherwise unchanged. Rejects other kernels, and clamps,
    /// which have no finite feature map.
    pub fn truncated(&self, p: usize) -> Result<Variant, Error> {
        let impossible = |reason: String| Err(Error::Combination { variant: self.to_string(), reason });
        if !matches!(self.near.kernel, Kernel::Exp(_)) {
            return impossible(format!("only `exp` can be truncated at order {p}: this kernel already has a finite number of orders"));
        }
        if self.near.clamp.is_some() {
            return impossible(format!(
                "a clamped score has no finite feature map, so it cannot be truncated at order {p}; remove the clamp"
            ));
        }
        match Taylor::up_to(p) {
            Ok(taylor) => Ok(self.clone().with_kernel(Kernel::Taylor(taylor))),
            Err(reason) => impossible(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::assert_close;

    fn ratio(p: usize, x: f64) -> f64 {
        (0..=p).map(|n| x.powi(n as i32) / factorial(n)).sum::<f64>() / x.exp()
    }

    #[test]
    fn closed_forms() {
        for p in [0, 2, 4, 8] {
            for r in [0.5, 1.0, 3.0, 6.0] {
                let cut = Truncation::new(p, r).expect("even");
                assert_close(1.0 - cut.missing, ratio(p, r), 1e-11);
                assert_close(1.0 + cut.excess, ratio(p, -r), 1e-10);
                let (a, b) = (ratio(p, r).sqrt(), ratio(p, -r).sqrt());
                assert_close(cut.of_sum(), 2.0 * (b - a) / (b + a), 1e-9);
            }
        }
    }

    #[test]
    fn edges() {
        let none = Truncation::new(4, 0.0).expect("even");
        assert_eq!((none.of_sum(), none.missing, none.excess), (0.0, 0.0, 0.0));
        assert!(Truncation::new(3, 1.0).is_err_and(|error| error.to_string().contains("order 2 or 4")));
        for r in [800.0, f64::INFINITY, f64::NAN] {
            let cut = Truncation::new(4, r).expect("even");
            assert!(cut.of_sum() <= 2.0 && cut.of_sum() > 1.9, "{cut:?}");
        }
    }

    #[test]
    fn truncatable_kernels() {
        let cut = |text: &str| text.parse::<Variant>().expect("a variant").truncated(4).map(|variant| variant.to_string());
        assert_eq!(cut("exp over=sum out"), Ok("taylor=0..4 over=sum out".into()));
        assert!(cut("exp clamp=5").is_err() && cut("taylor=0..2").is_err());
        assert!("softmax".parse::<Variant>().expect("a variant").truncated(1000).is_err());
    }
}
