//! w(x) = Σ_{n ∈ orders} a_n · x^n / n!
//!
//! Negative scores cancel: at x = −10 the terms of a long series reach 2.8e3 while their sum is 4.5e-5. So a series is
//! summed in float32 only where that is harmless; a long plain series is exp itself where the two differ by less than
//! rounding, and the rest is summed in float64.

use super::kernel::{KernelPart, Sign};
use super::slot::{Info, Part, number, short};
use crate::Real;
use crate::simd::Simd;

/// The highest order: 1/n! is still a normal float64 there.
pub const MAX_ORDER: usize = 150;

/// The numbers a_n in front of the terms.
#[derive(Clone, Debug, PartialEq)]
pub enum Coefficients {
    /// Taylor's: a_n = 1.
    Ones,
    /// Given, one for each order.
    Given(Vec<f64>),
    /// Learned per head, starting at 1.
    Learned,
}

/// A sum of terms of the exponential series.
#[derive(Clone, Debug)]
pub struct Taylor {
    /// The orders, ascending.
    pub orders: Vec<usize>,
    /// Their coefficients.
    pub coefficients: Coefficients,
    /// a_n/n! for n = 0..=p, zero where an order is absent.
    dense: Vec<f64>,
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
            return Err(format!("order {order} is beyond {MAX_ORDER}, the highest that float64 can hold"));
        }
        if let Coefficients::Given(given) = &coefficients
            && given.len() != orders.len()
        {
            return Err(format!("{} coefficients for {} orders: give one for each", given.len(), orders.len()));
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
        let mut taylor = Taylor { orders, coefficients, dense: Vec::new(), method: Method::Wide };
        match taylor.coefficients.clone() {
            Coefficients::Given(given) => taylor.bind(&given),
            Coefficients::Ones | Coefficients::Learned => taylor.bind(&ones),
        }
        taylor.method = taylor.choose_method();
        Ok(taylor)
    }

    /// Takes the numbers a_n in, one for each order.
    pub fn bind(&mut self, learned: &[f64]) {
        let highest = *self.orders.last().expect("at least one order");
        self.dense.resize(highest + 1, 0.0);
        for (&n, a) in self.orders.iter().zip(learned) {
            self.dense[n] = a / factorial(n);
        }
    }

    /// a_n, zero where the order is absent.
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
        // From 1/34! on, coefficients lie below the normal range of float32.
        if self.dense.iter().any(|c| *c != 0.0 && c.abs() < f32::MIN_POSITIVE as f64) {
            return Method::Wide;
        }
        // Σ|terms| / |Σ terms| over the scores where terms still compete; beyond, the highest dominates.
        let reach = 2.0 * self.degree() as f64 + 4.0;
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

    /// w(x) in float64 without cancellation, where that can be had.
    fn accurate(&self, x: f64) -> f64 {
        if self.is_prefix() { prefix(self.degree(), x) } else { self.horner(x) }
    }

    /// w'(x) likewise.
    fn accurate_slope(&self, x: f64) -> f64 {
        match self.degree() {
            0 => 0.0,
            p if self.is_prefix() => prefix(p - 1, x),
            _ => self.horner_slope(x),
        }
    }
}

/// Σ_{n≤p} x^n/n!: for scores in (−p−1, 0) as e^x less the remainder, whose terms shrink from the first on.
fn prefix(p: usize, x: f64) -> f64 {
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
fn exponential_range(p: usize) -> (f64, f64) {
    let close = |x: f64| [p, p.saturating_sub(1)].iter().all(|&p| (prefix(p, x) / x.exp() - 1.0).abs() < 1.5e-8);
    let reach = |sign: f64| (1..=8 * 150).map(|i| sign * i as f64 / 8.0).take_while(|&x| x.abs() < 80.0 && close(x)).last().unwrap_or(0.0);
    (reach(-1.0), reach(1.0))
}

impl Part for Taylor {
    const INFO: Info = Info {
        word: "taylor",
        usage: "taylor=ORDERS[,coef=learned|A:B:...]",
        formula: "w(x) = Σ_n a_n·x^n/n!, n ∈ orders",
        about: "Any set of orders of the exponential series: `0..4`, `1`, `0,2,4`; coefficients 1, given, or learned per head.",
        examples: &["0..4", "1", "0..2,5", "0..2,coef=learned", "0..2,coef=1.0:0.9:0.5", "0..79"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        let mut orders = Vec::new();
        let mut coefficients = Coefficients::Ones;
        let order = |text: &str| match text.trim().parse::<usize>() {
            Ok(n) if n <= MAX_ORDER => Ok(n),
            _ => Err(format!("an order is a whole number from 0 to {MAX_ORDER}, found `{text}`")),
        };
        for item in args.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            if let Some(value) = item.strip_prefix("coef=") {
                coefficients = match value {
                    "learned" => Coefficients::Learned,
                    "1" => Coefficients::Ones,
                    list => Coefficients::Given(list.split(':').map(|x| number("a coefficient", x, false)).collect::<Result<_, _>>()?),
                };
            } else if let Some((first, last)) = item.split_once("..") {
                let (first, last) = (order(first)?, order(last.trim_start_matches('='))?);
                if first > last {
                    return Err(format!("the range `{item}` runs backwards"));
                }
                orders.extend(first..=last);
            } else {
                orders.push(order(item)?);
            }
        }
        Taylor::new(orders, coefficients)
    }

    fn args(&self) -> String {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for &n in &self.orders {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == n => *last = n,
                _ => runs.push((n, n)),
            }
        }
        let mut items: Vec<String> =
            runs.iter().map(|&(first, last)| if first == last { first.to_string() } else { format!("{first}..{last}") }).collect();
        match &self.coefficients {
            Coefficients::Ones => {}
            Coefficients::Learned => items.push("coef=learned".into()),
            Coefficients::Given(given) => {
                items.push(format!("coef={}", given.iter().map(|&x| short(x)).collect::<Vec<_>>().join(":")));
            }
        }
        items.join(",")
    }
}

impl KernelPart for Taylor {
    fn sign(&self) -> Sign {
        let plain = self.is_prefix() || (self.coefficients == Coefficients::Ones && self.orders.iter().all(|n| n % 2 == 0));
        match (plain, self.degree() % 2, self.dense[0]) {
            (true, 0, c) if c > 0.0 => Sign::Positive,
            (true, 0, _) => Sign::Nonnegative,
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
    fn value<R: Real>(&self, x: R) -> R {
        R::of(self.accurate(x.wide()))
    }

    #[inline(always)]
    fn slope<R: Real>(&self, x: R) -> R {
        R::of(self.accurate_slope(x.wide()))
    }

    #[inline(always)]
    fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V {
        match self.method {
            Method::Narrow => self.dense.iter().rev().fold(simd.splat(0.0), |w, &c| simd.fma(w, x, simd.splat(c as f32))),
            Method::Wide => lanes_from(simd, wide(&self.dense, simd.to_array(x)).0),
            Method::Exponential { low, high } => {
                let w = simd.exp(x);
                if !beyond(simd, x, low, high) {
                    return w;
                }
                replace_beyond(simd, x, w, low, high, |x| self.accurate(x))
            }
        }
    }

    #[inline(always)]
    fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V) {
        match self.method {
            Method::Narrow => {
                let (mut w, mut slope) = (simd.splat(0.0), simd.splat(0.0));
                for &c in self.dense.iter().rev() {
                    slope = simd.fma(slope, x, w);
                    w = simd.fma(w, x, simd.splat(c as f32));
                }
                (w, slope)
            }
            Method::Wide => {
                let (w, slope) = wide(&self.dense, simd.to_array(x));
                (lanes_from(simd, w), lanes_from(simd, slope))
            }
            Method::Exponential { low, high } => {
                let w = simd.exp(x);
                if !beyond(simd, x, low, high) {
                    return (w, w);
                }
                (
                    replace_beyond(simd, x, w, low, high, |x| self.accurate(x)),
                    replace_beyond(simd, x, w, low, high, |x| self.accurate_slope(x)),
                )
            }
        }
    }
}

#[inline(always)]
fn beyond<S: Simd>(simd: S, x: S::V, low: f32, high: f32) -> bool {
    simd.any(simd.gt(simd.splat(low), x)) || simd.any(simd.gt(x, simd.splat(high)))
}

/// w with the lanes beyond the bounds computed by f. A lane's result depends on that lane alone.
#[inline(always)]
fn replace_beyond<S: Simd>(simd: S, x: S::V, w: S::V, low: f32, high: f32, f: impl Fn(f64) -> f64) -> S::V {
    let mut lanes = simd.to_array(w);
    for (w, &x) in lanes.iter_mut().zip(&simd.to_array(x)).take(S::LANES) {
        if x < low || x > high {
            *w = f(x as f64) as f32;
        }
    }
    lanes_from(simd, lanes)
}

#[inline(always)]
fn lanes_from<S: Simd>(simd: S, lanes: [f32; 16]) -> S::V {
    // SAFETY: no vector has more than 16 lanes.
    unsafe { simd.load(lanes.as_ptr()) }
}

/// Value and slope by Horner in float64, lane by lane; plain arithmetic, which compiles to vectors of float64.
#[inline(always)]
fn wide(dense: &[f64], x: [f32; 16]) -> ([f32; 16], [f32; 16]) {
    let x = x.map(|x| x as f64);
    let (mut w, mut slope) = ([0.0f64; 16], [0.0f64; 16]);
    for &c in dense.iter().rev() {
        for i in 0..16 {
            slope[i] = slope[i] * x[i] + w[i];
            w[i] = w[i] * x[i] + c;
        }
    }
    (w.map(|w| w as f32), slope.map(|s| s as f32))
}

/// n!
pub fn factorial(n: usize) -> f64 {
    (1..=n).fold(1.0, |product, i| product * i as f64)
}

#[cfg(test)]
mod tests;
