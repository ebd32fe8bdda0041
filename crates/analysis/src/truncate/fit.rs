//! Fit of a polynomial of order p to the output of a head.
//!
//! ```text
//! minimise  Σ_t ‖y'_t − y_t‖²   over c     subject to   mean weight 1,   P(x) ≥ floor where scores may occur
//! ```
//!
//! Gauss–Newton steps, each a quadratic program with p + 1 unknowns, with Levenberg damping. A step that does not lower the error is
//! rejected, so the result is never worse on its rows than the start. For even p the polynomial is constrained to be positive on the real
//! line, so no score makes a denominator vanish. For odd orders this is impossible; they are constrained on the observed scores and a margin.

use super::chebyshev::{Interval, chebyshev};
use super::qp::Program;
use super::rows::{Kind, Rows};

/// Lower bound of P(x), in units of the mean weight.
const FLOOR: f64 = 1e-4;
/// Lower bound of the leading coefficient of even orders: with a smaller one, the minimum could be so far away that rounding hides it.
const MIN_LEADING: f64 = 1e-7;
/// Half the margin beyond the observed scores, in units of half their range, for odd orders.
const MARGIN: f64 = 0.5;
const STEPS: usize = 24;
/// Maximum number of grid refinements.
const ROUNDS: usize = 6;
/// Relative decrease of the squared error at which the iteration stops.
const STOP_DECREASE: f64 = 1e-5;

/// Fits order p to rows, starting from the best of some polynomials of at most that order. `None` if there are no rows.
pub fn fit(rows: &Rows, order: usize, starts: &[Vec<f64>]) -> Option<Vec<f64>> {
    if rows.is_empty() {
        return None;
    }
    let n = order + 1;
    let sums = rows.mean_sums(n);
    // If sizes cancel, the mean weight is normalized to 1: the mean sum divided by the mean number of keys.
    let unit: Option<Vec<f64>> = (rows.kind == Kind::Ratio).then(|| sums.iter().map(|sum| sum / sums[0].abs().max(1e-300)).collect());
    let constant = std::iter::once(vec![1.0]);
    let mut candidates: Vec<(f64, Vec<f64>)> = constant
        .chain(starts.iter().cloned())
        .map(|mut c| {
            c.resize(n, 0.0);
            if let Some(unit) = &unit {
                let mean: f64 = unit.iter().zip(&c).map(|(u, c)| u * c).sum();
                c.iter_mut().for_each(|c| *c /= mean);
            }
            (rows.squared(&c), c)
        })
        .filter(|(error, _)| error.is_finite())
        .collect();
    candidates.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut constraints = Constraints::new(order, if rows.kind == Kind::Ratio { FLOOR } else { 0.0 });
    let fitted = candidates.into_iter().take(2).map(|(error, c)| {
        let mut best = descend(rows, c, error, unit.as_deref(), &constraints);
        // Between grid points it may fall below the floor: the minima are added to the grid.
        for _ in 0..ROUNDS {
            if !constraints.tighten(&best.1) {
                break;
            }
            best = descend(rows, best.1, best.0, unit.as_deref(), &constraints);
        }
        // A remaining violation from rounding is removed by an offset.
        let lift = constraints.missing(&best.1);
        if lift > 0.0 {
            best.1[0] += lift;
            best.0 = rows.squared(&best.1);
        }
        best
    });
    fitted.filter(|(error, _)| error.is_finite()).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, c)| c)
}

/// Steps from c while they lower the error.
fn descend(rows: &Rows, mut c: Vec<f64>, mut error: f64, unit: Option<&[f64]>, constraints: &Constraints) -> (f64, Vec<f64>) {
    let n = c.len();
    let mut damping = if unit.is_some() { 1e-3 } else { 0.0 };
    // A start that violates the floor is left however small its error.
    let mut allowed = constraints.met(&c);
    for _ in 0..STEPS {
        let (gradient, mut normal) = rows.model(&c);
        let size = (0..n).map(|i| normal[i * n + i]).sum::<f64>() / n as f64;
        if !size.is_finite() || size <= 0.0 {
            break;
        }
        let diagonal: Vec<f64> = (0..n).map(|i| normal[i * n + i]).collect();
        (0..n).for_each(|i| normal[i * n + i] += damping * diagonal[i] + 1e-13 * size);
        normal.iter_mut().for_each(|h| *h /= size);
        // ½·(c' − c)ᵀH(c' − c) + gradient·(c' − c), in powers of c'.
        let linear = (0..n).map(|i| gradient[i] / size - (0..n).map(|j| normal[i * n + j] * c[j]).sum::<f64>()).collect();
        let program = Program {
            hessian: normal,
            gradient: linear,
            equation: unit.map(|unit| (unit.to_vec(), 1.0)),
            rows: constraints.rows.clone(),
            bounds: constraints.bounds.clone(),
        };
        let next = program.solve(&c).map(|solution| solution.x);
        let reached = next.as_ref().map_or(f64::INFINITY, |next| rows.squared(next));
        match next {
            Some(next) if reached < error || !allowed => {
                let done = allowed && reached > error * (1.0 - STOP_DECREASE);
                (c, error, allowed) = (next, reached, true);
                damping /= 5.0;
                if done || unit.is_none() {
                    break;
                }
            }
            _ if damping > 1e6 || unit.is_none() => break,
            _ => damping = (damping * 10.0).max(1e-6),
        }
    }
    (error, c)
}

/// P ≥ floor at points of the real line, scaled so that each row has length 1, and a nonnegative leading coefficient.
struct Constraints {
    order: usize,
    floor: f64,
    rows: Vec<f64>,
    bounds: Vec<f64>,
}

impl Constraints {
    fn new(order: usize, floor: f64) -> Constraints {
        let mut constraints = Constraints { order, floor, rows: Vec::new(), bounds: Vec::new() };
        line(order, 8).into_iter().for_each(|u| constraints.add(u));
        if order.is_multiple_of(2) && order > 0 {
            let last = constraints.rows.len();
            constraints.rows.resize(last + order + 1, 0.0);
            constraints.rows[last + order] = 1.0;
            // Strictly positive: at zero the degree would become odd, and P would fall below the floor.
            constraints.bounds.push(MIN_LEADING);
        }
        constraints
    }

    fn add(&mut self, u: f64) {
        let mut row = vec![0.0; self.order + 1];
        chebyshev(u, &mut row);
        let length = row.iter().map(|t| t * t).sum::<f64>().sqrt();
        self.rows.extend(row.iter().map(|t| t / length));
        self.bounds.push(self.floor / length);
    }

    fn met(&self, c: &[f64]) -> bool {
        let value = |row: &[f64]| row.iter().zip(c).map(|(t, c)| t * c).sum::<f64>();
        self.rows.chunks_exact(c.len()).zip(&self.bounds).all(|(row, bound)| value(row) >= bound - 1e-9)
    }

    /// Violation of half the floor by P at its minimum.
    fn missing(&self, c: &[f64]) -> f64 {
        let lowest = valleys(c).into_iter().map(|(_, value)| value).fold(f64::INFINITY, f64::min);
        (0.5 * self.floor - lowest).max(0.0)
    }

    /// Adds every local minimum below half the floor; returns whether there was one.
    fn tighten(&mut self, c: &[f64]) -> bool {
        let low: Vec<f64> = valleys(c).into_iter().filter(|(_, value)| *value < 0.5 * self.floor).map(|(u, _)| u).collect();
        low.iter().for_each(|&u| self.add(u));
        !low.is_empty()
    }
}

/// The local minima of P, and the ends: position and value.
fn valleys(c: &[f64]) -> Vec<(f64, f64)> {
    let unit = Interval { middle: 0.0, half: 1.0 };
    let points = line(c.len() - 1, 50);
    let values: Vec<f64> = points.iter().map(|&u| unit.evaluate(c, u)).collect();
    let last = points.len() - 1;
    let lowest = |i: &usize| (*i == 0 || values[*i] <= values[i - 1]) && (*i == last || values[*i] <= values[i + 1]);
    let refine = |i: usize| {
        // Golden-section search between the neighbours.
        let (mut a, mut b) = (points[i.saturating_sub(1)], points[(i + 1).min(last)]);
        let mut best = (points[i], values[i]);
        for _ in 0..40 {
            let (left, right) = (b - 0.618 * (b - a), a + 0.618 * (b - a));
            let (at_left, at_right) = (unit.evaluate(c, left), unit.evaluate(c, right));
            for (u, value) in [(left, at_left), (right, at_right)] {
                best = if value < best.1 { (u, value) } else { best };
            }
            if at_left < at_right { b = right } else { a = left }
        }
        best
    };
    (0..points.len()).filter(lowest).map(refine).collect()
}

/// Points in ascending order, `density` per order in the interval from −1 to 1, dense at its ends; for even orders on the whole
/// line, u = 1/s outside; for odd ones within the margin.
fn line(order: usize, density: usize) -> Vec<f64> {
    let (even, n) = (order.is_multiple_of(2), order + 1);
    let count = density * n;
    let reach = if even { 1.0 } else { 1.0 + MARGIN };
    let inside = (0..=count).map(|i| -reach * (std::f64::consts::PI * i as f64 / count as f64).cos());
    let outside = |i: usize| (count / 4) as f64 / i as f64;
    let left = (1..count / 4).filter(|_| even).map(|i| -outside(i));
    let right = (1..count / 4).rev().filter(|_| even).map(outside);
    left.chain(inside).chain(right).collect()
}

/// The minimum of P on the observed scores.
pub fn lowest(interval: &Interval, c: &[f64]) -> f64 {
    let points = 64 * c.len();
    let at = |i: usize| interval.middle + interval.half * (std::f64::consts::PI * i as f64 / points as f64).cos();
    (0..=points).map(|i| interval.evaluate(c, at(i))).fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests;
