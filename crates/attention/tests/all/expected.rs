//! Error bounds of float32 computations: relative RMS errors of 1e-5 for outputs and 1e-4 for gradients, or four times the error of the naive
//! float32 computation for cases that are worse conditioned. In about one random layer in a thousand the naive error is small by chance while
//! any other order of summation has a larger one. The bound is then twice the error of parallel mode, which has its own tests, but at most
//! ten times the other bound.

use termwise_attention::{Attention, AuxKind, Mode, Real, Report, Scratch, relative_rms};

use crate::support::{Case, Name, Tensors};

pub struct Results<R> {
    pub y: Vec<R>,
    pub report: Report,
    pub gradients: Tensors<R>,
}

/// Where a denominator was not positive.
pub fn place(report: &Report) -> Option<(usize, usize, usize)> {
    report.nonpositive.map(|n| (n.row, n.head, n.position))
}

impl<R> Results<R> {
    /// Where a denominator was not positive.
    pub fn place(&self) -> Option<(usize, usize, usize)> {
        place(&self.report)
    }
}

/// Outputs, report and gradients of an engine.
pub fn run<R: Real>(case: &Case<R>, mut engine: impl Attention<R>) -> Results<R> {
    let (y, report) = case.forward(&mut engine);
    Results { y, report, gradients: case.backward(&mut engine) }
}

pub fn reference<R: Real>(case: &Case<R>) -> Results<R> {
    run(case, case.naive())
}

/// Results of the fused engine in this mode.
pub fn fused(case: &Case<f32>, scratch: &Scratch, mode: Mode) -> Results<f32> {
    run(case, case.fused(mode, scratch).unwrap_or_else(|error| panic!("{case}: {error}")))
}

pub fn rms<R: Real>(x: &[R]) -> f64 {
    (x.iter().map(|x| x.wide().powi(2)).sum::<f64>() / x.len() as f64).sqrt()
}

pub struct Expected {
    wide: Results<f64>,
    pub narrow: Results<f32>,
    parallel: Option<Results<f32>>,
    /// Absolute bound for a gradient that is zero by construction, for dy of size 1.
    floor: f64,
}

impl Expected {
    /// Bounds for chunk mode and states.
    pub fn of(case: &Case<f32>) -> Expected {
        let parallel = fused(case, &Scratch::default(), Mode::Parallel);
        Expected { wide: reference(&case.cast()), narrow: reference(case), parallel: Some(parallel), floor: 1e-5 }
    }

    /// Bounds for parallel mode.
    pub fn of_parallel(case: &Case<f32>) -> Expected {
        Expected { wide: reference(&case.cast()), narrow: reference(case), parallel: None, floor: 2e-5 }
    }

    /// The bound, given the error of parallel mode.
    fn allowed(&self, bound: f64, parallel: impl Fn(&Results<f32>) -> f64) -> f64 {
        self.parallel.as_ref().map_or(bound, |found| bound.max((2.0 * parallel(found)).min(10.0 * bound)))
    }

    #[track_caller]
    pub fn compare_outputs(&self, y: &[f32], label: &str) {
        self.outputs_within(y, 1e-5, label);
    }

    #[track_caller]
    fn outputs_within(&self, y: &[f32], bound: f64, label: &str) {
        // Outputs that are zero by construction consist of rounding errors only.
        let off = |y: &[f32]| if rms(&self.wide.y) < 1e-6 { rms(y) } else { relative_rms(y, &self.wide.y) };
        let bound = self.allowed(bound.max(4.0 * off(&self.narrow.y)), |parallel| off(&parallel.y));
        let error = off(y);
        assert!(error < bound, "{label}: outputs differ by {error:e}, bound {bound:e}");
    }

    #[track_caller]
    pub fn compare(&self, found: &Results<f32>, label: &str) {
        self.compare_within(found, 1e-5, 1e-4, label);
        assert_eq!(found.place(), self.narrow.place(), "{label}");
    }

    #[track_caller]
    pub fn compare_within(&self, found: &Results<f32>, outputs: f64, gradients: f64, label: &str) {
        let Expected { wide, narrow, .. } = self;
        self.outputs_within(&found.y, outputs, label);
        for (i, (name, found)) in found.gradients.iter().enumerate() {
            let expected = &wide.gradients[i].1;
            // Zero by construction or up to eps, such as the gradient of a gate before a norm: rounding errors with an absolute bound.
            let scale = rms(expected);
            let floor = if scale < 1e-3 { self.floor * rms(&wide.gradients[2].1).max(1.0) } else { 0.0 };
            let off = |x: &[f32]| x.iter().zip(expected).map(|(x, e)| (x.wide() - e).powi(2)).sum::<f64>().sqrt() / (x.len() as f64).sqrt();
            // A gradient with few entries is a sum over all positions that may nearly cancel: its size does not bound its rounding error.
            let (gradients, floor) = if expected.len() < 16 { (3.0 * gradients, 3.0 * floor) } else { (gradients, floor) };
            // The gradient of a decay rate is a sum over the gradients of its gates: their size bounds its rounding error.
            let gates = wide.gradients.iter().find(|(other, _)| *other == Name::aux(AuxKind::DecayGate));
            let terms = gates.filter(|_| *name == Name::aux(AuxKind::DecayRate));
            let terms = terms.map_or(0.0, |(_, x)| rms(x) * (x.len() as f64 / expected.len() as f64).sqrt());
            let bound = (gradients * scale.max(terms)).max(4.0 * off(&narrow.gradients[i].1)).max(floor);
            let bound = self.allowed(bound, |parallel| off(&parallel.gradients[i].1));
            let error = off(found);
            assert!(error <= bound, "{label}: gradients of {name:?} differ by {error:e} of {scale:e}, bound {bound:e}");
        }
    }
}

#[track_caller]
pub fn assert_same_bits(a: &Results<f32>, b: &Results<f32>, label: &str) {
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same(&a.y, &b.y), "{label}: outputs differ");
    for ((name, a), (_, b)) in a.gradients.iter().zip(&b.gradients) {
        assert!(same(a, b), "{label}: gradients of {name:?} differ");
    }
}
