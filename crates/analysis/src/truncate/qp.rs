//! Small dense quadratic programs, by a primal-dual interior-point method (Mehrotra's predictor-corrector).
//!
//! ```text
//! minimise ½·xᵀHx + gᵀx   subject to   a·x = b   (if there is an equation)   and   Cx ≥ d
//!
//! at the solution, with λ ≥ 0 for the inequalities and ν for the equation:
//! Hx + g − Cᵀλ − ν·a = 0,   a·x = b,   Cx ≥ d,   λ_i·(Cx − d)_i = 0
//! ```

/// A program with n unknowns.
#[derive(Clone, Debug)]
pub struct Program {
    /// H, symmetric and positive semidefinite, [n, n].
    pub hessian: Vec<f64>,
    /// g [n]
    pub gradient: Vec<f64>,
    /// a [n] and b.
    pub equation: Option<(Vec<f64>, f64)>,
    /// C [m, n]
    pub rows: Vec<f64>,
    /// d [m]
    pub bounds: Vec<f64>,
}

/// A solution.
#[derive(Clone, Debug)]
pub struct Solution {
    /// x
    pub x: Vec<f64>,
    /// λ
    pub multipliers: Vec<f64>,
    /// ν, zero without an equation.
    pub equation: f64,
}

const ITERATIONS: usize = 100;
/// Tolerance of residuals and of λ·slack, relative to their terms, at which iterations end.
const TOLERANCE: f64 = 1e-11;
/// The same for an accepted solution.
const ACCEPTED_TOLERANCE: f64 = 1e-8;

impl Program {
    /// The solution from a starting point that need not be feasible. Every returned point satisfies the optimality conditions to
    /// [`ACCEPTED_TOLERANCE`]; `None` if none was found, because the program is infeasible or unbounded or exceeds float64.
    pub fn solve(&self, start: &[f64]) -> Option<Solution> {
        let (n, m) = (self.gradient.len(), self.bounds.len());
        let k = n + usize::from(self.equation.is_some());
        let mut x = start.to_vec();
        let mut slack: Vec<f64> = (0..m).map(|i| (self.row(i, &x) - self.bounds[i]).max(1e-2)).collect();
        let size = self.hessian.iter().chain(&self.gradient).fold(1e-300f64, |size, h| size.max(h.abs()));
        let mut multipliers = vec![size.min(1.0); m];
        let mut nu = 0.0;
        let (mut matrix, mut right) = (vec![0.0; k * k], vec![0.0; k]);
        let mut best: Option<(f64, Solution)> = None;
        for _ in 0..ITERATIONS {
            let error = self.error(&x, &multipliers, nu);
            if best.as_ref().is_none_or(|(least, _)| error < *least) {
                best = Some((error, Solution { x: x.clone(), multipliers: multipliers.clone(), equation: nu }));
            }
            let dual = self.dual_residual(&x, &multipliers, nu);
            let primal: Vec<f64> = (0..m).map(|i| self.row(i, &x) - slack[i] - self.bounds[i]).collect();
            let equation = self.equation.as_ref().map_or(0.0, |(a, b)| dot(a, &x) - b);
            let gap = if m == 0 { 0.0 } else { dot(&slack, &multipliers) / m as f64 };
            let worst = |values: &[f64]| values.iter().fold(0.0f64, |worst, value| worst.max(value.abs()));
            if worst(&dual) <= TOLERANCE * size && worst(&primal).max(equation.abs()) <= TOLERANCE && gap <= TOLERANCE * size {
                break;
            }
            self.normal_matrix(&slack, &multipliers, k, &mut matrix);
            let factors = Factors::new(matrix.clone(), k)?;
            // The step for which λ_i·slack_i becomes target_i, to first order.
            let mut step = |target: &dyn Fn(usize) -> f64| {
                right[..n].iter_mut().zip(&dual).for_each(|(right, dual)| *right = -dual);
                for i in 0..m {
                    let weight = (target(i) - multipliers[i] * slack[i] - multipliers[i] * primal[i]) / slack[i];
                    self.rows[i * n..][..n].iter().zip(&mut right).for_each(|(c, right)| *right += c * weight);
                }
                if k > n {
                    right[n] = -equation;
                }
                let solved = factors.refined(&matrix, &right);
                let (dx, dnu) = (solved[..n].to_vec(), if k > n { -solved[n] } else { 0.0 });
                let ds: Vec<f64> = (0..m).map(|i| self.row(i, &dx) + primal[i]).collect();
                let dl: Vec<f64> = (0..m).map(|i| (target(i) - multipliers[i] * slack[i] - multipliers[i] * ds[i]) / slack[i]).collect();
                (dx, dnu, ds, dl)
            };
            let (_, _, ds, dl) = step(&|_| 0.0);
            let (ahead, ahead_dual) = (longest(&slack, &ds), longest(&multipliers, &dl));
            let after: f64 = (0..m).map(|i| (slack[i] + ahead * ds[i]) * (multipliers[i] + ahead_dual * dl[i])).sum();
            let sigma = if gap > 0.0 { (after / m as f64 / gap).clamp(0.0, 1.0).powi(3) } else { 0.0 };
            let (dx, dnu, ds, dl) = step(&|i| sigma * gap - ds[i] * dl[i]);
            if dx.iter().chain(&ds).chain(&dl).any(|value| !value.is_finite()) {
                break;
            }
            // One step length for both sides: if H couples them, two lengths need not converge.
            let length = (0.99 * longest(&slack, &ds).min(longest(&multipliers, &dl))).min(1.0);
            let advance = |values: &mut [f64], step: &[f64]| values.iter_mut().zip(step).for_each(|(value, step)| *value += length * step);
            advance(&mut x, &dx);
            advance(&mut slack, &ds);
            advance(&mut multipliers, &dl);
            nu += length * dnu;
        }
        let error = self.error(&x, &multipliers, nu);
        let best = best.filter(|(least, _)| *least <= error).unwrap_or((error, Solution { x, multipliers, equation: nu }));
        Some(best).filter(|(error, _)| *error <= ACCEPTED_TOLERANCE).map(|(_, solution)| solution)
    }

    /// The largest violation of the optimality conditions: stationarity and λ·slack relative to H and g, equation and inequalities relative to their own
    /// terms; NaN counts as infinite. The scale of stationarity does not grow with x, so points of an unbounded program never satisfy it.
    fn error(&self, x: &[f64], multipliers: &[f64], nu: f64) -> f64 {
        let size = self.hessian.iter().chain(&self.gradient).fold(1e-300f64, |size, h| size.max(h.abs()));
        let largest = |values: &[f64]| values.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
        let reach = largest(x).max(1.0);
        let mut errors: Vec<f64> = self.dual_residual(x, multipliers, nu).iter().map(|residual| residual.abs() / size).collect();
        if let Some((a, b)) = &self.equation {
            errors.push((dot(a, x) - b).abs() / (largest(a) * reach).max(b.abs()).max(1e-300));
        }
        for (i, (lambda, bound)) in multipliers.iter().zip(&self.bounds).enumerate() {
            let slack = self.row(i, x) - bound;
            let unit = (largest(&self.rows[i * x.len()..][..x.len()]) * reach).max(bound.abs()).max(1e-300);
            errors.extend([-slack / unit, -lambda / size, lambda * slack.abs() / (size * reach)]);
        }
        errors.iter().fold(0.0, |worst: f64, &error| if error.is_nan() { f64::INFINITY } else { worst.max(error) })
    }

    fn row(&self, i: usize, x: &[f64]) -> f64 {
        dot(&self.rows[i * x.len()..][..x.len()], x)
    }

    /// Hx + g − Cᵀλ − ν·a
    fn dual_residual(&self, x: &[f64], multipliers: &[f64], nu: f64) -> Vec<f64> {
        let n = x.len();
        let mut residual: Vec<f64> = (0..n).map(|i| dot(&self.hessian[i * n..][..n], x) + self.gradient[i]).collect();
        for (row, lambda) in self.rows.chunks_exact(n).zip(multipliers) {
            residual.iter_mut().zip(row).for_each(|(residual, c)| *residual -= lambda * c);
        }
        if let Some((a, _)) = &self.equation {
            residual.iter_mut().zip(a).for_each(|(residual, a)| *residual -= nu * a);
        }
        residual
    }

    /// H + Cᵀ·diag(λ/slack)·C, bordered by the equation.
    fn normal_matrix(&self, slack: &[f64], multipliers: &[f64], k: usize, matrix: &mut [f64]) {
        let n = self.gradient.len();
        matrix.fill(0.0);
        for i in 0..n {
            matrix[i * k..][..n].copy_from_slice(&self.hessian[i * n..][..n]);
        }
        for ((row, s), lambda) in self.rows.chunks_exact(n).zip(slack).zip(multipliers) {
            let weight = lambda / s;
            for i in 0..n {
                let factor = weight * row[i];
                matrix[i * k..][..n].iter_mut().zip(row).for_each(|(m, c)| *m += factor * c);
            }
        }
        if let Some((a, _)) = &self.equation {
            for i in 0..n {
                matrix[i * k + n] = a[i];
                matrix[n * k + i] = a[i];
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The largest step in this direction from positive values that keeps them nonnegative; at most 1/0.99, a full step.
fn longest(values: &[f64], step: &[f64]) -> f64 {
    values.iter().zip(step).filter(|(_, step)| **step < 0.0).map(|(value, step)| -value / step).fold(1.0 / 0.99, f64::min)
}

/// P·A = L·U with partial pivoting. A pivot of zero is regularized, which the factorizations of `faer` do not do.
struct Factors {
    lu: Vec<f64>,
    order: Vec<usize>,
}

impl Factors {
    fn new(mut a: Vec<f64>, k: usize) -> Option<Factors> {
        let mut order: Vec<usize> = (0..k).collect();
        let size = a.iter().fold(0.0f64, |size, a| size.max(a.abs()));
        for column in 0..k {
            let pivot = (column..k).max_by(|&i, &j| a[i * k + column].abs().total_cmp(&a[j * k + column].abs()))?;
            if a[pivot * k + column].abs().is_nan() || a[pivot * k + column] == 0.0 {
                // A singular direction: a small multiple of the identity regularizes it.
                a[column * k + column] = 1e-14 * size.max(f64::MIN_POSITIVE);
            } else if pivot != column {
                (0..k).for_each(|j| a.swap(pivot * k + j, column * k + j));
                order.swap(pivot, column);
            }
            for i in column + 1..k {
                let factor = a[i * k + column] / a[column * k + column];
                a[i * k + column] = factor;
                for j in column + 1..k {
                    a[i * k + j] -= factor * a[column * k + j];
                }
            }
        }
        size.is_finite().then_some(Factors { lu: a, order })
    }

    /// Like [`Factors::solve`], with one step of iterative refinement: λ/slack makes matrices ill-conditioned near the solution.
    fn refined(&self, matrix: &[f64], right: &[f64]) -> Vec<f64> {
        let mut x = self.solve(right);
        let residual: Vec<f64> = matrix.chunks_exact(right.len()).zip(right).map(|(row, right)| right - dot(row, &x)).collect();
        let correction = self.solve(&residual);
        if correction.iter().all(|value| value.is_finite()) {
            x.iter_mut().zip(correction).for_each(|(x, correction)| *x += correction);
        }
        x
    }

    fn solve(&self, right: &[f64]) -> Vec<f64> {
        let k = right.len();
        let mut x: Vec<f64> = self.order.iter().map(|&i| right[i]).collect();
        for i in 0..k {
            x[i] -= (0..i).map(|j| self.lu[i * k + j] * x[j]).sum::<f64>();
        }
        for i in (0..k).rev() {
            x[i] = (x[i] - (i + 1..k).map(|j| self.lu[i * k + j] * x[j]).sum::<f64>()) / self.lu[i * k + i];
        }
        x
    }
}

#[cfg(test)]
mod tests;
