//! What float32 can be held to.
//!
//! 1e-5 for outputs, 1e-4 for gradients, relative RMS. Some layers are worse conditioned than that, whoever computes them: powers of
//! large scores, norms of short vectors, a score that lies on a clamp. What they allow is measured: how far the naive float32
//! computation is off, and how far the float64 result moves when the inputs move by a little more than float32 rounding.

use termwise_attention::{Error, Real, Reference, relative_rms};

use super::outcome::{Case, Unit};
use crate::layer::{Layer, Results};
use crate::rng::Rng;

const OUTPUTS: f64 = 1e-5;
const GRADIENTS: f64 = 1e-4;
/// Relative step of the inputs: larger than the rounding of a score, far smaller than what the bounds allow.
const STEP: f64 = 1e-6;
/// Gradients below this are zero by construction or but for eps, such as a gate's before a norm; they are held to an absolute bound.
const ZERO: f64 = 1e-4;
const ZERO_BOUND: f64 = 1e-5;

/// The float64 result of a layer, and float32 or moved results to see how far others may be off.
pub struct Expected {
    wide: Results<f64>,
    others: Vec<Results<f64>>,
}

impl Expected {
    /// Of this layer.
    pub fn of(layer: &Layer<f32>, rng: &mut Rng) -> Result<Expected, Error> {
        let exact = layer.cast::<f64>();
        let run = |layer: &Layer<f64>| layer.run(&mut Reference::<f64>::new(&layer.heads, layer.shape)?);
        let wide = run(&exact)?;
        let mut others = vec![widened(layer.run(&mut Reference::<f32>::new(&layer.heads, layer.shape)?)?)];
        // There and back, so that one of the two crosses a kink that lies near.
        let steps: Vec<Vec<f64>> =
            exact.tensors.iter().map(|(_, x)| x.iter().map(|x| STEP * x * if rng.chance(0.5) { 1.0 } else { -1.0 }).collect()).collect();
        for sign in [1.0, -1.0] {
            let mut moved = exact.clone();
            for ((_, values), steps) in moved.tensors.iter_mut().zip(&steps) {
                values.iter_mut().zip(steps).for_each(|(x, step)| *x += sign * step);
            }
            others.push(run(&moved)?);
        }
        Ok(Expected { wide, others })
    }

    /// Adds how far `found` is off to the case, with `prefix` before the names.
    pub fn compare(&self, found: &Results<f32>, prefix: &str, case: &mut Case) {
        let Expected { wide, others } = self;
        let conditioned = others.iter().map(|other| relative_rms(&other.y, &wide.y)).fold(0.0, f64::max);
        case.measure(format!("{prefix}y"), relative_rms(&found.y, &wide.y), OUTPUTS.max(4.0 * conditioned), Unit::RelativeRms);
        let values = rms(&wide.gradients[2].1);
        for (index, ((name, expected), (_, found))) in wide.gradients.iter().zip(&found.gradients).enumerate() {
            let scale = rms(expected);
            let conditioned = others.iter().map(|other| distance(&other.gradients[index].1, expected)).fold(0.0, f64::max);
            let error = distance(found, expected);
            let what = format!("{prefix}d{name}");
            if scale < ZERO {
                case.measure(what, error, (ZERO_BOUND * values.max(1.0)).max(4.0 * conditioned), Unit::Rms);
            } else {
                case.measure(what, error / scale, GRADIENTS.max(4.0 * conditioned / scale), Unit::RelativeRms);
            }
        }
    }
}

fn widened(results: Results<f32>) -> Results<f64> {
    let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect();
    Results {
        y: wide(results.y),
        report: results.report,
        gradients: results.gradients.into_iter().map(|(name, x)| (name, wide(x))).collect(),
    }
}

fn rms<R: Real>(x: &[R]) -> f64 {
    (x.iter().map(|x| x.wide().powi(2)).sum::<f64>() / x.len() as f64).sqrt()
}

fn distance<A: Real, B: Real>(a: &[A], b: &[B]) -> f64 {
    (a.iter().zip(b).map(|(a, b)| (a.wide() - b.wide()).powi(2)).sum::<f64>() / a.len() as f64).sqrt()
}
