//! What float32 can be held to.
//!
//! 1e-5 for outputs, 1e-4 for gradients, relative RMS. Some layers are worse conditioned than that, whoever computes them: powers of
//! large scores, gradients that a norm cancels up to its eps, a score that lies on a clamp. What they allow is measured: how far the
//! naive float32 computation is off, at the inputs and at inputs that are moved by a little more than float32 rounding.

use termwise_attention::{Error, Real, relative_rms};

use super::outcome::{Case, Unit};
use crate::layer::{Layer, Results};
use termwise_base::rng::Rng;

const OUTPUTS: f64 = 1e-5;
const GRADIENTS: f64 = 1e-4;
/// Relative step of the inputs: larger than the rounding of a score, far smaller than what the bounds allow.
const STEP: f32 = 1e-6;
/// Moved inputs, each there and back, so that one of the two crosses a kink that lies near.
const MOVES: usize = 3;
/// How much further off the fused engine may be than the worst of the naive results.
const SLACK: f64 = 4.0;
/// Gradients below this are zero by construction or but for eps, such as a gate's before a norm; they are held to an absolute bound.
const ZERO: f64 = 1e-4;
const ZERO_BOUND: f64 = 1e-5;

/// The float64 result of a layer, and naive float32 results that show how far others may be off.
pub struct Expected {
    wide: Results<f64>,
    naive: Vec<Results<f32>>,
}

impl Expected {
    /// Of this layer.
    pub fn of(layer: &Layer<f32>, rng: &mut Rng) -> Result<Expected, Error> {
        let wide = layer.cast::<f64>().run(&mut layer.cast::<f64>().naive()?)?;
        let run = |layer: &Layer<f32>| layer.run(&mut layer.naive()?);
        let mut naive = vec![run(layer)?];
        for _ in 0..MOVES {
            let mut steps = |x: &[f32]| x.iter().map(|x| if rng.chance(0.5) { STEP * x } else { -STEP * x }).collect::<Vec<f32>>();
            let steps: Vec<Vec<f32>> = layer.tensors.iter().map(|(_, x)| steps(x)).collect();
            for sign in [1.0, -1.0] {
                let mut moved = layer.clone();
                for ((_, values), steps) in moved.tensors.iter_mut().zip(&steps) {
                    values.iter_mut().zip(steps).for_each(|(x, step)| *x += sign * step);
                }
                naive.push(run(&moved)?);
            }
        }
        Ok(Expected { wide, naive })
    }

    /// Adds how far `found` is off to the case, with `prefix` before the names.
    pub fn compare(&self, found: &Results<f32>, prefix: &str, case: &mut Case) {
        let Expected { wide, naive } = self;
        let conditioned = naive.iter().map(|other| relative_rms(&other.y, &wide.y)).fold(0.0, f64::max);
        case.measure(format!("{prefix}y"), relative_rms(&found.y, &wide.y), OUTPUTS.max(SLACK * conditioned), Unit::RelativeRms);
        let values = rms(&wide.gradients[2].1);
        for (index, ((name, expected), (_, found))) in wide.gradients.iter().zip(&found.gradients).enumerate() {
            let scale = rms(expected);
            let conditioned = naive.iter().map(|other| distance(&other.gradients[index].1, expected)).fold(0.0, f64::max);
            let error = distance(found, expected);
            let what = format!("{prefix}d{name}");
            if scale < ZERO {
                case.measure(what, error, (ZERO_BOUND * values.max(1.0)).max(SLACK * conditioned), Unit::Rms);
            } else {
                case.measure(what, error / scale, GRADIENTS.max(SLACK * conditioned / scale), Unit::RelativeRms);
            }
        }
    }
}

fn rms<R: Real>(x: &[R]) -> f64 {
    (x.iter().map(|x| x.wide().powi(2)).sum::<f64>() / x.len() as f64).sqrt()
}

fn distance<A: Real, B: Real>(a: &[A], b: &[B]) -> f64 {
    (a.iter().zip(b).map(|(a, b)| (a.wide() - b.wide()).powi(2)).sum::<f64>() / a.len() as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::engines::run_fused;
    use super::super::outcome::Identity;
    use super::*;
    use termwise_attention::{Shape, Variant};

    fn layer(text: &str) -> Layer<f32> {
        let shape = Shape { batch: 1, time: 30, heads: 2, kv_heads: 1, d: 8, e: 6 };
        let variant: Variant = text.parse().expect("a variant");
        Layer::uniform(&variant, shape, 1.0, &mut Rng::new(5)).expect("possible")
    }

    fn compared(found: &Results<f32>, expected: &Expected) -> Case {
        let mut case = Case::new(Identity::Fused, "test");
        expected.compare(found, "", &mut case);
        case
    }

    /// What a broken engine would look like must not pass: one value off by 1%, one lost, one NaN.
    #[test]
    fn wrong_results_miss() {
        let layer = layer("gated_softmax");
        let expected = Expected::of(&layer, &mut Rng::new(1)).expect("possible");
        let right = run_fused(&layer).expect("possible");
        assert!(compared(&right, &expected).passed());
        for wrong in [|x: f32| x * 1.01, |_: f32| 0.0, |_: f32| f32::NAN] {
            let mut found = right.clone();
            let largest = |x: &[f32]| (0..x.len()).max_by(|&a, &b| x[a].abs().total_cmp(&x[b].abs())).expect("values");
            let place = largest(&found.y);
            found.y[place] = wrong(found.y[place]);
            assert!(!compared(&found, &expected).passed(), "y");
            for tensor in 0..found.gradients.len() {
                let mut found = right.clone();
                let (name, gradient) = &mut found.gradients[tensor];
                let (name, place) = (*name, largest(gradient));
                // The output gate's gradient is zero but for eps; there 1% is nothing.
                let cancelled = name.to_string() == "out gate" && wrong(1.0).is_finite();
                gradient[place] = wrong(gradient[place]);
                assert!(cancelled || !compared(&found, &expected).passed(), "{name}");
            }
        }
    }

    #[test]
    fn another_variant_misses() {
        let expected = Expected::of(&layer("exp over=sum"), &mut Rng::new(1)).expect("possible");
        let found = run_fused(&layer("exp over=sum,eps=0.01")).expect("possible");
        assert!(!compared(&found, &expected).passed());
    }
}
