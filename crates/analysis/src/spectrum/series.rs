//! All truncations of a kernel's series at once: w_p(x) = Σ_{n≤p} a_n·x^n/n! at every requested order p, in float64 without cancellation.
//!
//! For Taylor coefficients two orders are added together: i_p = x^{p−1}/(p−1)! · (1 + x/p), p even. Then
//!
//! ```text
//! w_p = 1 + i_2 + i_4 + … + i_p             for x ≥ 0 and for x ≤ −p: every i here is positive
//! w_p = e^x − (i_{p+2} + i_{p+4} + …)       for −p < x < 0: every i here is negative
//! ```
//!
//! so terms of opposite sign are never added. The second sum ends where the remainder is below rounding. Given and learned coefficients have
//! no such form; their terms are added in order.

use termwise_attention::Kernel;
use termwise_attention::parts::kernel::taylor::Taylor;

use super::lanes::{Lane, exp, map, splat, zip, zip_three};

/// The highest truncation order.
pub const MAX_CUT: usize = 100;
/// Maximum number of pairs of orders, including the tail.
const MAX_STEPS: usize = 200;
/// Above this score the plain sum loses less than a digit.
const PLAIN_SUM_MIN: f64 = -1.0;

/// A kernel with a Taylor series in the score.
#[derive(Clone, Debug, PartialEq)]
enum Series {
    /// e^x
    Exp,
    /// Σ_{n≤D} x^n/n!
    Prefix(usize),
    /// a_n for n = 0..=D, zero for absent orders.
    Terms(Vec<f64>),
}

/// The truncations of one kernel.
#[derive(Clone, Debug)]
pub struct Cuts {
    series: Series,
    /// Even orders, ascending, below the degree if the kernel is a polynomial.
    orders: Vec<usize>,
    /// 1/n
    inverse: Vec<f64>,
    /// Pairs to add for −x up to the index to make the remainder smaller than rounding at every order.
    steps: Vec<usize>,
}

/// Buffer that is reused across calls: the pairs i_p of one vector.
#[derive(Clone, Debug)]
pub struct Pairs(Vec<Lane>);

impl Default for Pairs {
    fn default() -> Pairs {
        Pairs(vec![splat(0.0); MAX_STEPS + 1])
    }
}

/// Destination of weights. A trait, so implementations can be inlined per instruction set.
pub trait Sink {
    /// Weights of the order with this index.
    fn put(&mut self, index: usize, w: Lane);
}

impl<F: FnMut(usize, Lane)> Sink for F {
    #[inline(always)]
    fn put(&mut self, index: usize, w: Lane) {
        self(index, w);
    }
}

impl Cuts {
    /// Truncations at these even orders, ascending and at most [`MAX_CUT`]; `None` for a kernel without a series.
    pub fn new(kernel: &Kernel, orders: &[usize]) -> Option<Cuts> {
        let (series, degree) = match kernel {
            Kernel::Exp(_) => (Series::Exp, usize::MAX),
            Kernel::Taylor(taylor) if taylor.is_prefix() => (Series::Prefix(taylor.degree()), taylor.degree()),
            Kernel::Taylor(taylor) => (Series::Terms(dense(taylor)), taylor.degree()),
            _ => return None,
        };
        let orders: Vec<usize> = orders.iter().copied().filter(|&p| p < degree).collect();
        // The highest even order that is computed.
        let top = match series {
            Series::Prefix(degree) => degree & !1,
            _ => orders.last().copied().unwrap_or(0),
        };
        let inverse = (0..=2 * MAX_STEPS + 2).map(|n| 1.0 / n as f64).collect();
        Some(Cuts { series, orders, inverse, steps: (0..=top).map(|x| steps(top, x)).collect() })
    }

    /// Orders at which truncation changes the kernel.
    pub fn orders(&self) -> &[usize] {
        &self.orders
    }

    /// a_n of an order.
    pub fn coefficient(&self, n: usize) -> f64 {
        match &self.series {
            Series::Exp => 1.0,
            Series::Prefix(degree) => f64::from(u8::from(n <= *degree)),
            Series::Terms(terms) => terms.get(n).copied().unwrap_or(0.0),
        }
    }

    /// Whether the full kernel is e^x.
    pub fn is_exp(&self) -> bool {
        self.series == Series::Exp
    }

    /// Passes w_p(x) of each order, in order, then the full kernel with the next index. The caller computes e^x itself, with another log scale.
    #[inline(always)]
    pub fn values(&self, x: Lane, pairs: &mut Pairs, sink: &mut impl Sink) {
        match &self.series {
            Series::Terms(terms) => self.added(terms, x, sink),
            Series::Exp => self.paired(x, None, &mut pairs.0, sink),
            Series::Prefix(0) => sink.put(0, splat(1.0)),
            Series::Prefix(degree) => self.paired(x, Some(*degree), &mut pairs.0, sink),
        }
    }

    #[inline(always)]
    fn added(&self, terms: &[f64], x: Lane, sink: &mut impl Sink) {
        let (mut term, mut w, mut next) = (splat(1.0), splat(terms[0]), 0);
        for (n, &a) in terms.iter().enumerate() {
            if n > 0 {
                term = zip(term, x, |term, x| term * (x * self.inverse[n]));
                w = zip(w, term, |w, term| w + a * term);
            }
            if self.orders.get(next) == Some(&n) {
                sink.put(next, w);
                next += 1;
            }
        }
        sink.put(next, w);
    }

    #[inline(always)]
    fn paired(&self, x: Lane, degree: Option<usize>, pairs: &mut [Lane], sink: &mut impl Sink) {
        let top = self.steps.len() - 1;
        let within = |x: f64| x < PLAIN_SUM_MIN && -x < top as f64;
        let deepest = x.iter().fold(0.0, |most: f64, &x| if within(x) { most.max(-x) } else { most });
        let steps = if deepest > 0.0 { self.steps[deepest.ceil() as usize].min(MAX_STEPS) } else { top / 2 };
        let square = map(x, |x| x * x);
        let mut term = x;
        // Pair number `step` is i_p with p = 2·step; there is none of number 0.
        for (step, pair) in pairs.iter_mut().enumerate().take(steps + 1).skip(1) {
            let (one, two) = (self.inverse[2 * step], self.inverse[2 * step + 1]);
            *pair = zip(term, x, |term, x| term * (1.0 + x * one));
            term = zip(term, square, |term, square| term * (square * (one * two)));
        }
        let (mut w, mut next) = (splat(1.0), 0);
        if self.orders.first() == Some(&0) {
            sink.put(0, w);
            next = 1;
        }
        if deepest == 0.0 {
            for (step, &pair) in pairs.iter().enumerate().take(top / 2 + 1).skip(1) {
                w = zip(w, pair, |w, pair| w + pair);
                if self.orders.get(next) == Some(&(2 * step)) {
                    sink.put(next, w);
                    next += 1;
                }
            }
        } else {
            // From the top down: if a score is in (−p, 0), the remainder of order p replaces its pair.
            let mut rest = splat(0.0);
            for step in (1..=steps).rev() {
                let (pair, p) = (pairs[step], (2 * step) as f64);
                if step <= top / 2 {
                    pairs[step] = zip_three(x, pair, rest, |x, pair, rest| if is_inside(x, p) { rest } else { pair });
                }
                rest = zip(rest, pair, |rest, pair| rest + pair);
            }
            let whole = exp(x);
            for (step, &part) in pairs.iter().enumerate().take(top / 2 + 1).skip(1) {
                let p = (2 * step) as f64;
                let (less, more) = (zip(whole, part, |whole, rest| whole - rest), zip(w, part, |w, pair| w + pair));
                // Once a score is inside the interval it remains inside, so its sum is not read again.
                w = zip_three(x, less, more, |x, less, more| if is_inside(x, p) { less } else { more });
                if self.orders.get(next) == Some(&(2 * step)) {
                    sink.put(next, w);
                    next += 1;
                }
            }
        }
        if let Some(degree) = degree {
            sink.put(next, if degree % 2 == 0 { w } else { self.odd(x, w, degree) });
        }
    }

    /// Adds the last term of an odd degree.
    #[inline(always)]
    fn odd(&self, x: Lane, w: Lane, degree: usize) -> Lane {
        let mut term = splat(1.0);
        for n in 1..=degree {
            term = zip(term, x, |term, x| term * (x * self.inverse[n]));
        }
        zip(w, term, |w, term| w + term)
    }
}

/// Whether w_p(x) is computed as e^x minus a remainder.
#[inline(always)]
fn is_inside(x: f64, p: f64) -> bool {
    x < 0.0 && -x < p
}

/// a_n of a set of orders.
fn dense(taylor: &Taylor) -> Vec<f64> {
    use termwise_attention::parts::kernel::KernelPart;
    let mut terms = vec![0.0; taylor.degree() + 1];
    taylor.polynomial().into_iter().flatten().for_each(|(n, a)| terms[n] = a);
    terms
}

/// Number of pairs of terms after which the remaining terms for scores down to −x, x ≤ `top`, are below rounding of e^x and of the remainder of order `top`.
fn steps(top: usize, x: usize) -> usize {
    let (x, mut ln_term) = (x.max(1) as f64, 0.0);
    let mut ln_kept = -x;
    for n in 1.. {
        // |x|^n/n! bounds the remainder of an alternating series with decreasing terms.
        ln_term += (x / n as f64).ln();
        if n == top + 1 {
            // The remainder of order `top` is at least half of its first pair.
            ln_kept = f64::max(ln_kept, ln_term + (1.0 - x / (top + 2) as f64).ln() - std::f64::consts::LN_2);
        }
        let even = n % 2 == 1 && n > top;
        if even && (ln_term < ln_kept - 40.0 || n / 2 >= MAX_STEPS) {
            return n / 2;
        }
    }
    MAX_STEPS
}

#[cfg(test)]
mod tests;
