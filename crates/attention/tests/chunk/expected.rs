//! What float32 can be held to: relative RMS errors of 1e-5 for outputs and 1e-4 for gradients, or four times what the naive float32
//! computation has where a case is worse conditioned than that. Once in a thousand random layers the naive one is lucky, and weights
//! that nearly cancel are off by more in every other order of summation: there parallel mode, which has tests of its own,
//! says what can be had. Twice its error counts, but never more than ten times the bound without it.

use termwise_attention::{Mode, Real, Report, Scratch, relative_rms};

use crate::support::{Case, Tensors};

pub struct Results<R> {
    pub y: Vec<R>,
    pub report: Report,
    pub gradients: Tensors<R>,
}

fn reference<R: Real>(case: &Case<R>) -> Results<R> {
    let mut engine = case.naive();
    let (y, report) = case.forward(&mut engine);
    Results { y, report, gradients: case.backward(&mut engine) }
}

/// The engine in this mode.
pub fn fused(case: &Case<f32>, scratch: &Scratch, mode: Mode) -> Results<f32> {
    let mut engine = case.fused(mode, scratch).unwrap_or_else(|error| panic!("{case}: {error}"));
    let (y, report) = case.forward(&mut engine);
    Results { y, report, gradients: case.backward(&mut engine) }
}

fn rms<R: Real>(x: &[R]) -> f64 {
    (x.iter().map(|x| x.wide().powi(2)).sum::<f64>() / x.len() as f64).sqrt()
}

pub struct Expected {
    wide: Results<f64>,
    narrow: Results<f32>,
    parallel: Results<f32>,
}

/// The bound where parallel mode is off by so much.
fn allowed(bound: f64, parallel: f64) -> f64 {
    bound.max((2.0 * parallel).min(10.0 * bound))
}

impl Expected {
    pub fn of(case: &Case<f32>) -> Expected {
        Expected { wide: reference(&case.cast()), narrow: reference(case), parallel: fused(case, &Scratch::default(), Mode::Parallel) }
    }

    #[track_caller]
    pub fn compare_outputs(&self, y: &[f32], label: &str) {
        // Outputs that are zero by construction, such as those of a power of the distance to the mean of one key, are rounding alone.
        let off = |y: &[f32]| if rms(&self.wide.y) < 1e-6 { rms(y) } else { relative_rms(y, &self.wide.y) };
        let bound = allowed(1e-5f64.max(4.0 * off(&self.narrow.y)), off(&self.parallel.y));
        let error = off(y);
        assert!(error < bound, "{label}: outputs differ by {error:e}, bound {bound:e}");
    }

    #[track_caller]
    pub fn compare(&self, found: &Results<f32>, label: &str) {
        let Expected { wide, narrow, parallel } = self;
        self.compare_outputs(&found.y, label);
        let place = |report: &Report| report.nonpositive.map(|n| (n.row, n.head, n.position));
        assert_eq!(place(&found.report), place(&narrow.report), "{label}");
        let others = narrow.gradients.iter().zip(&parallel.gradients);
        for (((name, found), (_, expected)), ((_, naive), (_, parallel))) in found.gradients.iter().zip(&wide.gradients).zip(others) {
            // Zero by construction or but for eps, such as a gate's before a norm: what is left is rounding.
            let scale = rms(expected);
            let floor = if scale < 1e-3 { 1e-5 * rms(&wide.gradients[2].1).max(1.0) } else { 0.0 };
            let off = |x: &[f32]| x.iter().zip(expected).map(|(x, e)| (x.wide() - e).powi(2)).sum::<f64>().sqrt() / (x.len() as f64).sqrt();
            // Of one number per head or so, which sums over all positions and may nearly cancel, the size says little about its rounding.
            let relative = if expected.len() < 16 { 3e-4 } else { 1e-4 };
            let bound = allowed((relative * scale).max(4.0 * off(naive)).max(floor), off(parallel));
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
