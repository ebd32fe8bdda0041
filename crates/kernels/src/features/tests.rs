use super::*;
use crate::simd::{Isa, dispatch_on};
use crate::testing::{derivative, uniform};

/// Columns of a state, and columns that are not padding.
const EP: usize = 32;
const E: usize = 21;

/// A tile with its basis, and operands of every task. Values past the valid positions are zero.
struct Case {
    basis: Basis,
    len: usize,
    count: usize,
    x: Vec<f32>,
    factors: Vec<f32>,
    /// [len, EP]
    rows: Vec<f32>,
    /// [len]
    weights: Vec<f32>,
    /// [N, EP]
    h: Vec<f32>,
    /// [N]
    z: Vec<f32>,
}

impl Case {
    fn all() -> Vec<Case> {
        let mut cases = Vec::new();
        for (d, orders) in [(3, &[0, 1, 2][..]), (8, &[0, 1, 2, 3]), (5, &[1, 3]), (4, &[0]), (12, &[2])] {
            for (len, count) in [(16, 16), (32, 19), (128, 128)] {
                let basis = Basis::new(d, orders).expect("a small basis");
                let (n, valid) = (basis.rows(), |i: usize| i < count);
                let numbers = |len: usize, seed| uniform(len, seed);
                let x = numbers(d * len, 1).into_iter().enumerate().map(|(i, x)| if valid(i % len) { x } else { 0.0 }).collect();
                let rows = numbers(len * EP, 2).into_iter().enumerate().map(|(i, x)| if valid(i / EP) && i % EP < E { x } else { 0.0 });
                let weights = numbers(len, 3).into_iter().enumerate().map(|(i, x)| if valid(i) { x } else { 0.0 });
                let h = numbers(n * EP, 5).into_iter().enumerate().map(|(i, x)| if i % EP < E { x } else { 0.0 });
                let (rows, weights, h) = (rows.collect(), weights.collect(), h.collect());
                cases.push(Case { len, count, x, factors: numbers(n, 4), rows, weights, h, z: numbers(n, 6), basis });
            }
        }
        cases
    }

    /// Φ [N, len] in float64, without factors.
    fn monomials(&self, x: impl Fn(usize) -> f64) -> Vec<f64> {
        let n = self.basis.rows();
        let mut phi = vec![0.0; n * self.len];
        for t in 0..self.len {
            let at: Vec<f64> = (0..self.basis.d()).map(|i| x(i * self.len + t)).collect();
            let mut one = vec![0.0; n];
            self.basis.of_one(&at, &mut vec![0.0; self.basis.lower_order_rows()], &mut one);
            one.iter().enumerate().for_each(|(row, &value)| phi[row * self.len + t] = value);
        }
        phi
    }

    /// Σ Φ ∘ (H·Rᵀ + z·fᵀ) with the factors.
    fn objective(&self, x: impl Fn(usize) -> f64) -> f64 {
        let phi = self.monomials(x);
        let term = |row: usize, t: usize| {
            let inner: f64 = (0..EP).map(|j| self.h[row * EP + j] as f64 * self.rows[t * EP + j] as f64).sum();
            (inner + self.z[row] as f64 * self.weights[t] as f64) * self.factors[row] as f64 * phi[row * self.len + t]
        };
        (0..self.basis.rows()).map(|row| (0..self.count).map(|t| term(row, t)).sum::<f64>()).sum()
    }

    fn name(&self, isa: Isa) -> String {
        format!("{}, d {}, orders {:?}, {} of {}", isa.name(), self.basis.d(), self.basis.orders(), self.count, self.len)
    }
}

/// The results of all tasks of a case.
#[derive(Default)]
struct Results {
    accumulated: (Vec<f32>, Vec<f32>),
    read: (Vec<f32>, Vec<f32>),
    dx: Vec<f32>,
    parts: Vec<f32>,
}

struct RunAll<'a>(&'a Case);

impl Task for RunAll<'_> {
    type Output = Results;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Results {
        let case = self.0;
        let (n, m, len, d) = (case.basis.rows(), case.basis.lower_order_rows(), case.len, case.basis.d());
        let (mut lower_orders, mut block, mut gradient) =
            (vec![f32::NAN; m * len], vec![f32::NAN; BLOCK * len], vec![f32::NAN; BLOCK * len]);
        let features = FeatureTile::new(simd, &case.basis, (len, case.count), &case.x, &mut lower_orders, &case.factors);
        let mut out = Results { accumulated: (case.h.clone(), case.z.clone()), ..Results::default() };
        let (h, z) = (&mut out.accumulated.0, &mut out.accumulated.1);
        simd.call(AccumulateState { features, keep: 0.5, rows: &case.rows, ep: EP, weights: &case.weights, h, z, block: &mut block });
        out.read = (vec![f32::NAN; len * EP], vec![f32::NAN; len]);
        let (rows, weights) = (&mut out.read.0, &mut out.read.1);
        simd.call(ReadState { features, h: &case.h, z: &case.z, ep: EP, rows, weights, block: &mut block });
        let mut columns = vec![f32::NAN; EP * len];
        simd.call(Transpose { rows: &case.rows, stride: EP, count: case.count, dim: E, columns: &mut columns, len });
        out.dx = vec![f32::NAN; d * len];
        out.parts = vec![0.0; case.basis.orders().len() * len];
        simd.call(FeatureGradient {
            features,
            h: &case.h,
            z: &case.z,
            ep: EP,
            columns: &columns,
            e: E,
            weights: &case.weights,
            dx: &mut out.dx,
            dlower_orders: &mut vec![f32::NAN; m * len],
            gradient: &mut gradient,
            block: &mut block,
            parts: &mut out.parts,
        });
        assert_eq!(out.accumulated.1.len(), n);
        out
    }
}

#[track_caller]
fn close(found: f32, expected: f64, what: &str) {
    assert!((found as f64 - expected).abs() <= 2e-5 * (1.0 + expected.abs()), "{what}: found {found}, expected {expected}");
}

#[test]
fn state_tasks_equal_the_formulas_on_every_instruction_set() {
    for case in Case::all() {
        let phi = case.monomials(|i| case.x[i] as f64);
        let (n, len) = (case.basis.rows(), case.len);
        let weighted = |row: usize, t: usize| case.factors[row] as f64 * phi[row * len + t];
        for isa in Isa::available() {
            let found = dispatch_on(isa, RunAll(&case));
            let what = case.name(isa);
            for row in 0..n {
                for j in 0..EP {
                    let sum: f64 = (0..case.count).map(|t| weighted(row, t) * case.rows[t * EP + j] as f64).sum();
                    close(found.accumulated.0[row * EP + j], 0.5 * case.h[row * EP + j] as f64 + sum, &format!("{what}: H {row} {j}"));
                }
                let sum: f64 = (0..case.count).map(|t| weighted(row, t) * case.weights[t] as f64).sum();
                close(found.accumulated.1[row], 0.5 * case.z[row] as f64 + sum, &format!("{what}: z {row}"));
            }
            for t in 0..case.count {
                for j in 0..EP {
                    let expected: f64 = (0..n).map(|row| weighted(row, t) * case.h[row * EP + j] as f64).sum();
                    close(found.read.0[t * EP + j], expected, &format!("{what}: R {t} {j}"));
                }
                let expected: f64 = (0..n).map(|row| weighted(row, t) * case.z[row] as f64).sum();
                close(found.read.1[t], expected, &format!("{what}: f {t}"));
                for order in 0..case.basis.orders().len() {
                    let term = |row: usize| {
                        let inner: f64 = (0..EP).map(|j| case.h[row * EP + j] as f64 * case.rows[t * EP + j] as f64).sum();
                        let both = inner + case.z[row] as f64 * case.weights[t] as f64;
                        both * phi[row * len + t] * case.basis.wide_inverse_factorials()[row]
                    };
                    let expected: f64 = case.basis.order_range(order).map(term).sum();
                    close(found.parts[order * len + t], expected, &format!("{what}: order {order}, position {t}"));
                }
            }
        }
    }
}

#[test]
fn feature_gradient_equals_central_differences() {
    for case in Case::all().into_iter().filter(|case| case.len == 32) {
        for isa in Isa::available() {
            let found = dispatch_on(isa, RunAll(&case)).dx;
            for at in (0..found.len()).step_by(7).filter(|at| at % case.len < case.count) {
                let along = |value: f64| case.objective(|i| if i == at { value } else { case.x[i] as f64 });
                close(found[at], derivative(along, case.x[at] as f64), &format!("{}: dx {at}", case.name(isa)));
            }
        }
    }
}

struct RoundTrip<'a> {
    rows: &'a [f32],
    columns: &'a mut [f32],
    back: &'a mut [f32],
    count: usize,
    dim: usize,
}

impl Task for RoundTrip<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let RoundTrip { rows, columns, back, count, dim } = self;
        simd.call(Transpose { rows, stride: 48, count, dim, columns: &mut *columns, len: 32 });
        simd.call(AddTransposed { columns, len: 32, rows: back, stride: 48, count, dim });
    }
}

#[test]
fn transposition_writes_columns_and_adds_them_back() {
    let rows = uniform(32 * 48, 1);
    for isa in Isa::available() {
        for (count, dim) in [(32, 48), (32, 21), (19, 40), (1, 1)] {
            let padded = usize::next_multiple_of(dim, PAD);
            let (mut columns, mut back) = (vec![f32::NAN; padded * 32], vec![1.0; 32 * 48]);
            dispatch_on(isa, RoundTrip { rows: &rows, columns: &mut columns, back: &mut back, count, dim });
            for t in 0..32 {
                for j in 0..48 {
                    let what = format!("{} {count} {dim} at {t}, {j}", isa.name());
                    if j < padded {
                        assert_eq!(columns[j * 32 + t], if t < count { rows[t * 48 + j] } else { 0.0 }, "{what}");
                    }
                    let added = if t < count && j < dim { rows[t * 48 + j] } else { 0.0 };
                    assert_eq!(back[t * 48 + j], 1.0 + added, "{what}");
                }
            }
        }
    }
}

/// A safe task must refuse sizes that do not fit, also in release builds.
struct Misfit {
    len: usize,
    count: usize,
    ep: usize,
    h: usize,
}

impl Task for Misfit {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let basis = Basis::new(2, &[0, 1]).expect("a small basis");
        let (x, mut lower_orders, mut block) = (vec![0.0; 2 * self.len], vec![0.0; self.len], vec![0.0; BLOCK * self.len]);
        let features = FeatureTile::new(simd, &basis, (self.len, self.count), &x, &mut lower_orders, &[]);
        let (rows, weights) = (vec![0.0; self.len * self.ep], vec![0.0; self.len]);
        let (mut h, z) = (vec![0.0; self.h], &mut []);
        simd.call(AccumulateState { features, keep: 1.0, rows: &rows, ep: self.ep, weights: &weights, h: &mut h, z, block: &mut block });
        let (mut rows, mut weights) = (rows, weights);
        simd.call(ReadState { features, h: &h, z: &[], ep: self.ep, rows: &mut rows, weights: &mut weights, block: &mut block });
    }
}

#[test]
fn tasks_refuse_sizes_that_do_not_fit() {
    for isa in Isa::available() {
        let refused = |len, count, ep, h| std::panic::catch_unwind(|| dispatch_on(isa, Misfit { len, count, ep, h })).is_err();
        assert!(!refused(16, 16, 32, 3 * 32), "{}", isa.name());
        for (len, count, ep, h) in [(16, 17, 32, 3 * 32), (12, 12, 32, 3 * 32), (16, 16, 12, 3 * 12), (16, 16, 32, 3 * 32 - 1)] {
            assert!(refused(len, count, ep, h), "{} {len} {count} {ep} {h}", isa.name());
        }
    }
}
