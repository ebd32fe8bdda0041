//! The checks: every engine against the reference.
//!
//! float32 is held to a relative RMS of 1e-5 for outputs and 1e-4 for gradients. Some layers are conditioned worse: powers of large scores, gradients that
//! a norm cancels up to its eps, a score at a clamp. Their bound is measured: the error of the naive float32 computation, also at inputs that differ by a
//! little more than rounding.

use std::sync::{Mutex, MutexGuard};

use termwise_attention::simd::{self, Isa};
use termwise_attention::{Denominator, FusedOptions, Mode, Real, Rescale, Shape, Variant, relative_rms};
use termwise_base::rng::Rng;
use termwise_base::threads as pools;
use termwise_model::config::Config;
use termwise_model::decode::{Decoder, DecoderOptions};
use termwise_model::{Model, SessionOptions};

use super::case::{Case, Unit};
use crate::Error;
use crate::layer::{Layer, Results, Sizes};
use crate::plain_config::plain_config;

/// A check of variants.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// On the command line.
    pub name: &'static str,
    /// The property that it checks.
    pub statement: &'static str,
    /// Whether the check applies to a variant.
    pub(super) applies: fn(&Variant) -> bool,
    /// Adds comparisons to the case.
    pub(super) run: fn(&Variant, &mut Rng, &mut Case) -> Result<(), Error>,
}

/// All checks, in the order in which they run.
pub const CHECKS: [Check; 7] = [
    Check { name: "fused", statement: "fused float32 engine = float64 reference: outputs and gradients", applies: |_| true, run: fused },
    Check { name: "chunk", statement: "chunks with a carried state = float64 reference", applies: has_state, run: chunk },
    Check { name: "recurrent", statement: "decoding one token at a time = float64 reference", applies: decodes, run: recurrent },
    Check { name: "decoder", statement: "logits of the decoder of a model = those of its forward pass", applies: decodes, run: decoder },
    Check {
        name: "instruction-sets",
        statement: "every instruction set of this machine = float64 reference",
        applies: |_| true,
        run: instruction_sets,
    },
    Check { name: "threads", statement: "1, 2, 3 and 7 threads give the same bits", applies: |_| true, run: threads },
    Check {
        name: "differences",
        statement: "gradients of the reference = central differences in float64",
        applies: |variant| !matches!(&variant.denominator, Denominator::Sum(sum) if sum.detached),
        run: differences,
    },
];

const OUTPUTS: f64 = 1e-5;
const GRADIENTS: f64 = 1e-4;
/// For gradients of a decay per channel. The largest error seen is 1e-3.
const CANCELLED: f64 = 1e-2;
/// How much larger than the error of the naive computation an error may be.
const MAX_ERROR_RATIO: f64 = 4.0;
/// Relative change of inputs: larger than the rounding of a score, far smaller than the bounds allow.
const STEP: f32 = 1e-6;
/// Gradients below this are zero by construction, or but for eps, and have an absolute bound.
const ZERO: f64 = 1e-4;
const ZERO_BOUND: f64 = 1e-5;
/// Largest error of a derivative, |found − slope| / (|slope| + 0.01).
const SLOPE: f64 = 1e-5;

/// The instruction set is one for the whole process: checks that select one, or compare bits, take turns.
static INSTRUCTIONS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    INSTRUCTIONS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn layer<R: Real>(variant: &Variant, shape: Shape, spread: f64, rng: &mut Rng, case: &mut Case) -> Result<Layer<R>, Error> {
    case.detail = Sizes::from(shape).to_string();
    Ok(Layer::uniform(variant, shape, spread, rng)?)
}

/// The float64 result of a layer, and float32 results that show how well it is conditioned.
struct Expected {
    wide: Results<f64>,
    naive: Vec<Results<f32>>,
    /// Whether a decay per channel has a gradient: q∘dq − k∘dk, in which most of both terms cancels.
    cancels: bool,
}

impl Expected {
    fn of(layer: &Layer<f32>, rng: &mut Rng) -> Result<Expected, Error> {
        let wide = layer.cast::<f64>().run(&mut layer.cast::<f64>().naive()?)?;
        let mut naive = vec![layer.run(&mut layer.naive()?)?];
        for _ in 0..3 {
            let mut signs = |x: &[f32]| x.iter().map(|_| if rng.chance(0.5) { STEP } else { -STEP }).collect::<Vec<f32>>();
            let steps: Vec<Vec<f32>> = layer.tensors.iter().map(|(_, x)| signs(x)).collect();
            // In both directions: one of them crosses a nearby kink.
            for sign in [1.0, -1.0] {
                let mut moved = layer.clone();
                for ((_, values), steps) in moved.tensors.iter_mut().zip(&steps) {
                    values.iter_mut().zip(steps).for_each(|(x, step)| *x += sign * step * *x);
                }
                naive.push(moved.run(&mut moved.naive()?)?);
            }
        }
        let cancels = layer.heads.iter().any(|variant| variant.decay.as_ref().is_some_and(|decay| decay.by_channel()));
        Ok(Expected { wide, naive, cancels })
    }

    fn compare_output(&self, y: &[f32], prefix: &str, case: &mut Case) {
        let conditioned = self.naive.iter().map(|other| relative_rms(&other.y, &self.wide.y)).fold(0.0, f64::max);
        case.measure(format!("{prefix}y"), relative_rms(y, &self.wide.y), OUTPUTS.max(MAX_ERROR_RATIO * conditioned), Unit::RelativeRms);
    }

    /// Adds the errors of outputs and gradients to the case, with `prefix` before their names.
    fn compare(&self, found: &Results<f32>, prefix: &str, case: &mut Case) {
        self.compare_output(&found.y, prefix, case);
        let values = rms(&self.wide.gradients[2].1);
        for (index, ((name, expected), (_, found))) in self.wide.gradients.iter().zip(&found.gradients).enumerate() {
            let (scale, error) = (rms(expected), distance(found, expected));
            let conditioned =
                MAX_ERROR_RATIO * self.naive.iter().map(|other| distance(&other.gradients[index].1, expected)).fold(0.0, f64::max);
            let what = format!("{prefix}d{name}");
            let relative = if self.cancels && name.to_string().starts_with("decay") { CANCELLED } else { GRADIENTS };
            match scale < ZERO {
                true => case.measure(what, error, (ZERO_BOUND * values.max(1.0)).max(conditioned), Unit::Rms),
                false => case.measure(what, error / scale, relative.max(conditioned / scale), Unit::RelativeRms),
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

fn run_fused(layer: &Layer<f32>) -> Result<Results<f32>, Error> {
    Ok(layer.run(&mut layer.fused(FusedOptions::default())?)?)
}

/// Random sizes: shorter than a tile, at the border of one and beyond; grouped heads, padding.
fn fused(variant: &Variant, rng: &mut Rng, case: &mut Case) -> Result<(), Error> {
    let (heads, kv_heads) = rng.pick(&[(1, 1), (4, 2), (6, 3), (4, 1)]);
    let (d, e) = (rng.pick(&[2, 8, 16, 24, 32]), rng.pick(&[5, 16, 20, 48]));
    let time = rng.pick(&[1, 2, 5, 17, 63, 64, 65, 100, 131]);
    let shape = Shape { batch: rng.pick(&[1, 2]), time, heads, kv_heads, d, e };
    // A spread of 2 takes scores beyond the clamp of 5.
    let mut layer = layer::<f32>(variant, shape, 2.0, rng, case)?;
    if rng.chance(0.5) {
        layer.lengths = Some((0..shape.batch).map(|_| 1 + rng.below(time)).collect());
        case.detail += " padded";
    }
    let expected = Expected::of(&layer, rng)?;
    let _guard = alone();
    expected.compare(&run_fused(&layer)?, "", case);
    Ok(())
}

/// Head dimension of the model of [`decoder`].
const HEAD_DIM: usize = 8;
const SMALL_SHAPE: Shape = Shape { batch: 1, time: 70, heads: 2, kv_heads: 1, d: 6, e: 5 };

/// Whether keys have a state that float32 represents well, of moderate size.
fn has_state(variant: &Variant) -> bool {
    variant.remembered().is_some_and(|score| {
        let rows = score.state_rows(SMALL_SHAPE.d).unwrap_or(u128::MAX);
        score.has_finite_map() && score.kernel.rescale() == Rescale::None && rows < 5_000
    })
}

/// Whether a decoder can keep its keys: any number of them in a cache, or in a state that fits into memory.
fn decodes(variant: &Variant) -> bool {
    let fits = |rows: Option<u128>| rows.is_some_and(|rows| rows < 1_000_000);
    variant.remembered().is_none_or(|score| !score.has_finite_map() || fits(score.state_rows(HEAD_DIM)))
}

fn chunk(variant: &Variant, rng: &mut Rng, case: &mut Case) -> Result<(), Error> {
    let layer = layer::<f32>(variant, SMALL_SHAPE, 1.0, rng, case)?;
    let expected = Expected::of(&layer, rng)?;
    let _guard = alone();
    let mut engine = layer.fused(FusedOptions::default().mode(Mode::Chunk(Some(16))))?;
    expected.compare(&layer.run(&mut engine)?, "", case);
    Ok(())
}

fn recurrent(variant: &Variant, rng: &mut Rng, case: &mut Case) -> Result<(), Error> {
    let layer = layer::<f32>(variant, Shape { batch: 2, ..SMALL_SHAPE }, 1.0, rng, case)?;
    let expected = Expected::of(&layer, rng)?;
    let _guard = alone();
    expected.compare_output(&layer.token_by_token()?, "", case);
    Ok(())
}

/// A prompt of half of the tokens, then one token at a time.
fn decoder(variant: &Variant, rng: &mut Rng, case: &mut Case) -> Result<(), Error> {
    let (time, vocab) = (24, 32);
    let mut variant = variant.clone();
    for score in [Some(&mut variant.near), variant.far.as_mut()].into_iter().flatten() {
        score.dim = score.dim.map(|dim| dim.min(HEAD_DIM));
    }
    let config = Config { num_hidden_layers: 2, num_key_value_heads: 1, ..plain_config(vocab, 2 * HEAD_DIM, 2, time, variant) };
    let model = Model::fresh(config, rng.below(1 << 20) as u64)?;
    case.detail = format!("T{time} layers {} width {}", model.config.num_hidden_layers, model.config.hidden_size);
    let ids: Vec<u32> = (0..time).map(|_| rng.below(vocab) as u32).collect();
    let _guard = alone();
    let mut expected = vec![f32::NAN; time * vocab];
    let mut session = model.session(1, time, SessionOptions::default())?;
    session.run(&model.params, &ids, None)?;
    session.logits(&model.params, 0..time, &mut expected)?;
    drop(session);
    let mut decoder = Decoder::new(model, DecoderOptions::default())?;
    let (prompt, rest) = ids.split_at(time / 2);
    decoder.prefill(0, prompt)?;
    let mut found = decoder.logits(0)?.to_vec();
    for &id in rest {
        decoder.step(&[Some(id)])?;
        found.extend_from_slice(decoder.logits(0)?);
    }
    case.measure("logits", relative_rms(&found, &expected[(prompt.len() - 1) * vocab..]), GRADIENTS, Unit::RelativeRms);
    Ok(())
}

fn instruction_sets(variant: &Variant, rng: &mut Rng, case: &mut Case) -> Result<(), Error> {
    let layer = layer::<f32>(variant, Shape { d: 20, e: 12, ..SMALL_SHAPE }, 2.0, rng, case)?;
    let expected = Expected::of(&layer, rng)?;
    let _guard = alone();
    let before = simd::isa();
    for isa in Isa::available() {
        simd::choose(isa);
        let found = run_fused(&layer);
        simd::choose(before);
        expected.compare(&found?, &format!("{} ", isa.name()), case);
    }
    Ok(())
}

fn threads(variant: &Variant, rng: &mut Rng, case: &mut Case) -> Result<(), Error> {
    let shape = Shape { batch: 2, time: 150, heads: 4, kv_heads: 2, d: 16, e: 12 };
    let layer = layer::<f32>(variant, shape, 1.0, rng, case)?;
    let _guard = alone();
    let on = |threads: usize| -> Result<Results<f32>, Error> { pools::pool(threads)?.install(|| run_fused(&layer)) };
    let one = on(1)?;
    for threads in [2, 3, 7] {
        let other = on(threads)?;
        let tensors = one.gradients.iter().zip(&other.gradients).map(|((_, a), (_, b))| (a, b)).chain([(&one.y, &other.y)]);
        let count = tensors.map(|(a, b)| a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count()).sum::<usize>();
        case.measure(format!("values that differ on {threads} threads"), count as f64, 0.0, Unit::Count);
    }
    Ok(())
}

/// The derivative of Σ y·dy along a random direction of each tensor. A step that crosses a kink gives a wrong slope: then finer steps are tried. A wrong
/// gradient agrees with none of them.
fn differences(variant: &Variant, rng: &mut Rng, case: &mut Case) -> Result<(), Error> {
    let shape = Shape { batch: 1, time: 5, heads: 2, kv_heads: 1, d: 4, e: 3 };
    let layer = layer::<f64>(variant, shape, 1.5, rng, case)?;
    let mut engine = layer.naive()?;
    let results = layer.run(&mut engine)?;
    for (tensor, (name, gradient)) in results.gradients.iter().enumerate() {
        let direction: Vec<f64> = gradient.iter().map(|_| rng.normal()).collect();
        let found: f64 = gradient.iter().zip(&direction).map(|(g, x)| g * x).sum();
        let mut least = f64::INFINITY;
        for h in [1e-3, 1e-4, 1e-5, 1e-6] {
            let mut at = |steps: f64| -> Result<f64, Error> {
                let mut moved = layer.clone();
                moved.tensors[tensor].1.iter_mut().zip(&direction).for_each(|(x, step)| *x += steps * h * step);
                Ok(moved.forward(&mut engine)?.0.iter().zip(&layer.dy).map(|(y, dy)| y * dy).sum())
            };
            // The four-point rule has an error of h⁴/30 times the fifth derivative.
            let slope = (8.0 * (at(1.0)? - at(-1.0)?) - (at(2.0)? - at(-2.0)?)) / (12.0 * h);
            least = least.min((found - slope).abs() / (slope.abs() + 0.01));
            if least <= SLOPE {
                break;
            }
        }
        case.measure(format!("d{name}"), least, SLOPE, Unit::Absolute);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(text: &str) -> Layer<f32> {
        let variant: Variant = text.parse().expect("a variant");
        Layer::uniform(&variant, SMALL_SHAPE, 1.0, &mut Rng::new(5)).expect("possible")
    }

    fn passes(found: &Results<f32>, expected: &Expected) -> bool {
        let mut case = Case::new(&CHECKS[0], "test");
        expected.compare(found, "", &mut case);
        case.passed()
    }

    /// Results of a broken engine: one value off by 1%, one lost, one NaN, another variant.
    #[test]
    fn wrong_results_fail() {
        let layer = layer("gated_softmax");
        let expected = Expected::of(&layer, &mut Rng::new(1)).expect("possible");
        let right = run_fused(&layer).expect("possible");
        assert!(passes(&right, &expected));
        let largest = |x: &[f32]| (0..x.len()).max_by(|&a, &b| x[a].abs().total_cmp(&x[b].abs())).expect("values");
        for wrong in [|x: f32| x * 1.01, |_: f32| 0.0, |_: f32| f32::NAN] {
            let mut found = right.clone();
            let place = largest(&found.y);
            found.y[place] = wrong(found.y[place]);
            assert!(!passes(&found, &expected), "y");
            for tensor in 0..right.gradients.len() {
                let mut found = right.clone();
                let (name, gradient) = &mut found.gradients[tensor];
                let (name, place) = (*name, largest(gradient));
                // The gradient of the output gate is zero but for eps; 1% of it is within the bound.
                let cancelled = name.to_string() == "out gate" && wrong(1.0).is_finite();
                gradient[place] = wrong(gradient[place]);
                assert!(cancelled || !passes(&found, &expected), "{name}");
            }
        }
        let other = run_fused(&self::layer("gated_softmax over=sum,eps=0.01 norm=none")).expect("possible");
        assert!(!passes(&other, &expected));
    }
}
