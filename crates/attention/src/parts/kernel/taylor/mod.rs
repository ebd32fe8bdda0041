//! w(x) = Σ_{n ∈ orders} a_n · x^n / n!
//!
//! Negative scores cause cancellation: at x = −10 the terms of a long series reach 2.8e3 while their sum is 4.5e-5. A series is therefore
//! summed in float32 only if that is accurate. A long plain series is computed as exp if the two differ by less than
//! rounding, and all others are summed in float64.

mod bound;
mod lanes;
mod positive;
mod prefix;
mod text;

use crate::Real;
pub(super) use crate::parts::kernel::taylor::lanes::pair_from;
use crate::parts::kernel::taylor::lanes::{Wide, beyond, lanes_from, replace_beyond};
use crate::parts::kernel::taylor::prefix::{exponential_range, prefix};
use crate::parts::kernel::{KernelPart, Sign};
use termwise_kernels::combinatorics::factorial;
use termwise_kernels::score_rows::{CoefficientRow, Rescale, SCALED_FROM, ScoreKernel};
use termwise_kernels::simd::{Simd, Task};

/// The highest order: 1/n! is still a normal float64 there.
pub const MAX_ORDER: usize = 150;

/// The coefficients a_n of the terms.
#[derive(Clone, Debug, PartialEq)]
pub enum Coefficients {
    /// Taylor coefficients: a_n = 1.
    Ones,
    /// Given, one per order.
    Given(Vec<f64>),
    /// Learned per head, starting at 1.
    Learned,
}

/// A sum of terms of the exponential series.
#[derive(Clone, Debug)]
pub struct Taylor {
    /// Ascending.
    orders: Vec<usize>,
    coefficients: Coefficients,
    /// a_n/n! for n = 0..=p, zero for absent orders.
    dense: Vec<f64>,
    /// The same in float32, for [`Method::Narrow`].
    narrow: Vec<f32>,
    /// The largest |x| with Σ|a_n|·|x|^n/n! at most e^40; unused if rows have no ρ.
    unscaled_limit: f32,
    method: Method,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    /// Horner in float32.
    Narrow,
    /// Horner in float64.
    Wide,
    /// exp for scores within these bounds, float64 outside.
    Exponential { low: f32, high: f32 },
}

impl PartialEq for Taylor {
    fn eq(&self, other: &Self) -> bool {
        self.orders == other.orders && self.coefficients == other.coefficients
    }
}

impl Taylor {
    /// The series of these orders.
    pub fn new(mut orders: Vec<usize>, coefficients: Coefficients) -> Result<Taylor, String> {
        if orders.is_empty() {
            return Err("`taylor` needs at least one order, as in `taylor=0..4` or `taylor=1`".into());
        }
        if let Some(order) = orders.iter().find(|&&order| order > MAX_ORDER) {
            return Err(format!("order {order} exceeds {MAX_ORDER}, the highest that float64 can represent"));
        }
        if let Coefficients::Given(given) = &coefficients
            && given.len() != orders.len()
        {
            return Err(format!("{} coefficients for {} orders: give one per order", given.len(), orders.len()));
        }
        let sorted = orders.is_sorted_by(|a, b| a < b);
        if !sorted {
            if matches!(coefficients, Coefficients::Given(_)) {
                return Err("orders with given coefficients must ascend and not repeat".into());
            }
            orders.sort_unstable();
            orders.dedup();
        }
        let ones = vec![1.0; orders.len()];
        let mut taylor =
            Taylor { orders, coefficients, dense: Vec::new(), narrow: Vec::new(), unscaled_limit: f32::INFINITY, method: Method::Wide };
        match taylor.coefficients.clone() {
            Coefficients::Given(given) => taylor.bind(&given),
            Coefficients::Ones | Coefficients::Learned => taylor.bind(&ones),
        }
        taylor.method = taylor.choose_method();
        Ok(taylor)
    }

    /// The orders, ascending.
    pub fn orders(&self) -> &[usize] {
        &self.orders
    }

    /// The coefficients of the terms.
    pub fn coefficients(&self) -> &Coefficients {
        &self.coefficients
    }

    /// Binds the coefficients a_n, one per order.
    pub fn bind(&mut self, learned: &[f64]) {
        let highest = *self.orders.last().expect("at least one order");
        self.dense.resize(highest + 1, 0.0);
        for (&n, a) in self.orders.iter().zip(learned) {
            self.dense[n] = a / factorial(n);
        }
        self.narrow.clear();
        self.narrow.extend(self.dense.iter().map(|&c| c as f32));
        if self.rescale() == Rescale::Multiply {
            self.unscaled_limit = self.find_unscaled_limit();
        }
    }

    /// a_n, zero for absent orders.
    pub(crate) fn coefficient(&self, n: usize) -> f64 {
        self.dense.get(n).map_or(0.0, |c| c * factorial(n))
    }

    /// Orders 0..=p with Taylor's coefficients.
    pub fn up_to(p: usize) -> Result<Taylor, String> {
        Taylor::new((0..=p).collect(), Coefficients::Ones)
    }

    /// The highest order.
    pub fn degree(&self) -> usize {
        self.dense.len() - 1
    }

    /// 0..=p with all coefficients 1: a prefix of the exponential series.
    pub fn is_prefix(&self) -> bool {
        self.orders.len() == self.degree() + 1 && self.coefficients == Coefficients::Ones
    }

    fn choose_method(&self) -> Method {
        if self.coefficients == Coefficients::Learned {
            return if self.degree() <= 8 { Method::Narrow } else { Method::Wide };
        }
        if self.is_prefix() {
            let (low, high) = exponential_range(self.degree());
            if low <= -6.0 {
                return Method::Exponential { low: low as f32, high: high as f32 };
            }
        }
        // From 1/34! on, coefficients are below the normal range of float32.
        if self.dense.iter().any(|c| *c != 0.0 && c.abs() < f32::MIN_POSITIVE as f64) {
            return Method::Wide;
        }
        // Σ|terms| / |Σ terms| over the scores where terms are comparable; beyond, the highest dominates.
        let reach = match self.coefficients {
            Coefficients::Given(_) => self.reach().max(2.0 * self.degree() as f64 + 4.0),
            _ => 2.0 * self.degree() as f64 + 4.0,
        };
        let worst = (0..=1000)
            .map(|i| -reach + 2.0 * reach * i as f64 / 1000.0)
            .map(|x| self.horner_magnitude(x) / self.horner(x).abs().max(1e-3 * self.horner_magnitude(1.0)))
            .fold(0.0, f64::max);
        if worst < 500.0 { Method::Narrow } else { Method::Wide }
    }

    fn horner(&self, x: f64) -> f64 {
        self.dense.iter().rev().fold(0.0, |sum, c| sum * x + c)
    }

    fn horner_magnitude(&self, x: f64) -> f64 {
        self.dense.iter().rev().fold(0.0, |sum, c| sum * x.abs() + c.abs())
    }

    fn horner_slope(&self, x: f64) -> f64 {
        self.dense.iter().enumerate().skip(1).rev().fold(0.0, |sum, (n, c)| sum * x + n as f64 * c)
    }

    #[inline(always)]
    fn wide<S: Simd>(&self, simd: S, x: S::V, factor: f64) -> Wide<'_> {
        Wide { dense: &self.dense, x: simd.to_array(x), factor }
    }

    /// w(x) in float64, without cancellation if possible.
    fn accurate(&self, x: f64) -> f64 {
        if self.is_prefix() { prefix(self.degree(), x) } else { self.horner(x) }
    }

    /// w'(x), without cancellation if possible.
    fn accurate_slope(&self, x: f64) -> f64 {
        match self.degree() {
            0 => 0.0,
            p if self.is_prefix() => prefix(p - 1, x),
            _ => self.horner_slope(x),
        }
    }
}

impl KernelPart for Taylor {
    fn rescale(&self) -> Rescale {
        if self.degree() >= SCALED_FROM { Rescale::Multiply } else { Rescale::None }
    }

    fn sign(&self) -> Sign {
        let plain = self.is_prefix() || (self.coefficients == Coefficients::Ones && self.orders.iter().all(|n| n % 2 == 0));
        match (plain, self.degree() % 2, self.dense[0]) {
            (true, 0, c) if c > 0.0 => Sign::Positive,
            (true, 0, _) => Sign::Nonnegative,
            _ if matches!(self.coefficients, Coefficients::Given(_)) && self.is_positive() => Sign::Positive,
            _ => Sign::Mixed,
        }
    }

    fn polynomial(&self) -> Option<Vec<(usize, f64)>> {
        Some(self.orders.iter().map(|&n| (n, self.coefficient(n))).collect())
    }

    fn learned_slopes(&self, x: f64, slopes: &mut [f64]) {
        for (slope, &n) in slopes.iter_mut().zip(&self.orders) {
            *slope = x.powi(n as i32) / factorial(n);
        }
    }

    #[inline(always)]
    fn learned_row<S: Simd>(&self, simd: S, row: CoefficientRow, grads: &mut [f64]) {
        simd.call(Learned { row, orders: &self.orders, grads });
    }

    #[inline(always)]
    fn value<R: Real>(&self, x: R) -> R {
        R::of(self.accurate(x.wide()))
    }

    #[inline(always)]
    fn slope<R: Real>(&self, x: R) -> R {
        R::of(self.accurate_slope(x.wide()))
    }
}

struct Learned<'a> {
    row: CoefficientRow<'a>,
    orders: &'a [usize],
    grads: &'a mut [f64],
}

impl Task for Learned<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.row.run(simd, self.orders, self.grads);
    }
}

impl ScoreKernel for Taylor {
    const RESCALE: Rescale = Rescale::Multiply;

    #[inline(always)]
    fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V {
        match self.method {
            Method::Narrow => {
                let mut w = simd.splat(0.0);
                for &c in self.narrow.iter().rev() {
                    w = simd.fma(w, x, simd.splat(c));
                }
                w
            }
            Method::Wide => lanes_from(simd, self.wide(simd, x, 1.0).run(simd).0),
            Method::Exponential { low, high } => {
                let w = simd.exp(x);
                if !beyond(simd, x, low, high) {
                    return w;
                }
                replace_beyond(simd, x, w, (low, high), self.degree(), 1.0)
            }
        }
    }

    #[inline(always)]
    fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V) {
        match self.method {
            Method::Narrow => {
                let (mut w, mut slope) = (simd.splat(0.0), simd.splat(0.0));
                for &c in self.narrow.iter().rev() {
                    slope = simd.fma(slope, x, w);
                    w = simd.fma(w, x, simd.splat(c));
                }
                (w, slope)
            }
            Method::Wide => pair_from(simd, self.wide(simd, x, 1.0).run(simd)),
            Method::Exponential { low, high } => {
                let w = simd.exp(x);
                if !beyond(simd, x, low, high) {
                    return (w, w);
                }
                (
                    replace_beyond(simd, x, w, (low, high), self.degree(), 1.0),
                    replace_beyond(simd, x, w, (low, high), self.degree() - 1, 1.0),
                )
            }
        }
    }

    fn unscaled_limit(&self) -> f32 {
        self.unscaled_limit
    }

    fn log_bound(&self, reach: f32) -> f32 {
        self.log_magnitude(reach as f64) as f32
    }

    #[inline(always)]
    fn scaled<S: Simd>(&self, simd: S, x: S::V, rho: f32) -> (S::V, S::V) {
        let factor = (-rho as f64).exp();
        let Method::Exponential { low, high } = self.method else {
            return pair_from(simd, simd.call(self.wide(simd, x, factor)));
        };
        let w = simd.exp(simd.sub(x, simd.splat(rho)));
        (replace_beyond(simd, x, w, (low, high), self.degree(), factor), replace_beyond(simd, x, w, (low, high), self.degree() - 1, factor))
    }
}

#[cfg(test)]
mod tests;
