//! What must hold between variants, whatever their numbers.

use std::ops::ControlFlow;

use termwise_attention::combinatorics::factorial;
use termwise_attention::presets;
use termwise_attention::{Attention, AuxKind, Error, FusedOptions, Real, Shape, Variant, relative_rms};

use super::engines::{Subject, alone, begin, layer};
use super::outcome::{Case, Identity, Unit};
use crate::layer::{Layer, Name, Sizes};
use termwise_base::rng::Rng;

/// New numbers from position t on leave every earlier output bit-identical, in the reference and in the fused engine.
pub fn causality(subject: &Subject, seed: u64) -> Case {
    let (case, mut rng) = begin(Identity::Causality, subject, seed);
    case.fill(|case| {
        let shape = Shape { batch: 2, time: 140, heads: 2, kv_heads: 1, d: 8, e: 6 };
        let layer = layer::<f32>(subject, shape, 1.0, &mut rng, case)?;
        let t = 1 + rng.below(shape.time - 1);
        let mut changed = layer.clone();
        change_from(&mut changed, t, &mut rng);
        let mut reference = layer.naive()?;
        let mut fused = layer.fused(FusedOptions::default())?;
        let _guard = alone();
        compare_rows("reference", &layer, &changed, t, &mut reference, case)?;
        compare_rows("fused", &layer, &changed, t, &mut fused, case)
    })
}

/// New numbers from position t on in every tensor that has a time axis.
fn change_from<R: Real>(layer: &mut Layer<R>, t: usize, rng: &mut Rng) {
    let (batch, time) = (layer.shape.batch, layer.shape.time);
    for (name, values) in &mut layer.tensors {
        if !matches!(name, Name::AuxTensor(extra) if !extra.is_gate_logits()) {
            let width = values.len() / (batch * time);
            for row in values.chunks_exact_mut(time * width) {
                row[t * width..].iter_mut().for_each(|x| *x = R::of(3.0 * rng.normal()));
            }
        }
    }
}

fn compare_rows(
    engine_name: &str,
    layer: &Layer<f32>,
    changed: &Layer<f32>,
    t: usize,
    engine: &mut impl Attention<f32>,
    case: &mut Case,
) -> Result<(), Error> {
    let (before, after) = (layer.forward(engine)?.0, changed.forward(engine)?.0);
    let Shape { time, heads, e, .. } = layer.shape;
    let differ = |later: bool| {
        let each = before.iter().zip(&after).enumerate();
        each.filter(|(i, (a, b))| (i / (heads * e) % time >= t) == later && a.to_bits() != b.to_bits()).count()
    };
    case.measure(format!("earlier values that change, {engine_name}"), differ(false) as f64, 0.0, Unit::Count);
    if differ(true) == 0 {
        case.problem = Some(format!("{engine_name}: new tokens from position {t} on change nothing at all"));
    }
    Ok(())
}

fn output(layer: &Layer<f64>) -> Result<Vec<f64>, Error> {
    Ok(layer.forward(&mut layer.naive()?)?.0)
}

/// With scores |x| ≤ r every weight of orders 0..p is off by at most δ = e^r·r^(p+1)/(p+1)! of itself, hence the output by
/// 2δ/(1−δ) of the largest value.
pub fn taylor_limit(seed: u64) -> Case {
    let mut rng = Rng::named(seed, "taylor limit");
    Case::new(Identity::TaylorLimit, "taylor=0..p rope=off").fill(|case| {
        let shape = Shape { batch: 1, time: 24, heads: 2, kv_heads: 1, d: 8, e: 6 };
        let softmax = Layer::<f64>::uniform(&"softmax rope=off".parse()?, shape, 0.6, &mut rng)?;
        let reach = largest_score(&softmax);
        case.detail = format!("{}, scores within ±{reach:.2}", Sizes::from(shape));
        let value = softmax.tensors[2].1.iter().fold(0f64, |max, v| max.max(v.abs()));
        let expected = output(&softmax)?;
        let mut before = f64::INFINITY;
        for p in (2..=78).step_by(4) {
            let taylor: Variant = format!("taylor=0..{p} rope=off").parse()?;
            let found = output(&softmax.with_variant(&taylor, &mut rng)?)?;
            let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, |max, x| if x <= max { max } else { x });
            let share = reach.exp() * reach.powi(p + 1) / factorial(p as usize + 1);
            if share < 0.5 {
                case.measure(format!("order {p}"), error, 2.0 * value * share / (1.0 - share) + 1e-13, Unit::Absolute);
            }
            if error >= before && error > 1e-12 {
                case.problem = Some(format!("order {p} is {error:.1e} off, more than the {before:.1e} of four orders less"));
            }
            before = error;
        }
        Ok::<(), Error>(())
    })
}

/// Without RoPE, over the pairs that a causal attention sees; both heads share one key head.
fn largest_score(layer: &Layer<f64>) -> f64 {
    let Shape { time, heads, d, .. } = layer.shape;
    let (q, k) = (&layer.tensors[0].1, &layer.tensors[1].1);
    let score = |t: usize, h: usize, s: usize| {
        let pairs = q[(t * heads + h) * d..][..d].iter().zip(&k[s * d..][..d]);
        pairs.map(|(q, k)| q * k).sum::<f64>().abs() / (d as f64).sqrt()
    };
    (0..time)
        .flat_map(|t| (0..heads).flat_map(move |h| (0..=t).map(move |s| (t, h, s))))
        .map(|(t, h, s)| score(t, h, s))
        .fold(0.0, f64::max)
}

/// Values so large that the eps of a norm is nothing beside them.
fn large_values(variant: &Variant, shape: Shape, rng: &mut Rng) -> Result<Layer<f64>, Error> {
    let mut layer = Layer::uniform(variant, shape, 1.0, rng)?;
    layer.tensors[2].1.iter_mut().for_each(|v| *v *= 1e6);
    Ok(layer)
}

const CANCELLED: f64 = 1e-9;

/// Under every scale-free norm: other denominators and output gates give the same output and the gate no gradient; and presets that
/// the catalogue calls equal are equal.
pub fn norm_cancels(seed: u64, tell: &mut impl FnMut(Case) -> ControlFlow<()>) -> ControlFlow<()> {
    let shape = Shape { batch: 2, time: 7, heads: 4, kv_heads: 2, d: 6, e: 5 };
    for norm in ["l2", "scaled_l2", "rms", "layer"] {
        for kernel in ["exp", "exp clamp=1", "taylor=0..4", "feature=elu", "exp decay=softplus in"] {
            let plain = format!("{kernel} over=none norm={norm}");
            let mut rng = Rng::named(seed, &plain);
            let mut case = Case::new(Identity::NormCancels, &plain);
            case.detail = Sizes::from(shape).to_string();
            tell(case.fill(|case| cancelled(kernel, norm, &large_values(&plain.parse()?, shape, &mut rng)?, &mut rng, case)))?;
        }
    }
    for (index, preset) in presets::all().iter().enumerate() {
        let equal = |other: &presets::Preset| other.parts() != preset.parts() && other.parts().canonical() == preset.parts().canonical();
        for other in presets::all()[..index].iter().filter(|other| equal(other)) {
            let subject = format!("{} = {}", preset.name, other.name);
            let mut rng = Rng::named(seed, &subject);
            let mut case = Case::new(Identity::NormCancels, subject);
            case.detail = Sizes::from(shape).to_string();
            tell(case.fill(|case| {
                let layer = large_values(&preset.parts(), shape, &mut rng)?;
                let error = relative_rms(&output(&layer.with_variant(&other.parts(), &mut rng)?)?, &output(&layer)?);
                case.measure("y", error, CANCELLED, Unit::RelativeRms);
                Ok::<(), Error>(())
            }))?;
        }
    }
    ControlFlow::Continue(())
}

fn cancelled(kernel: &str, norm: &str, layer: &Layer<f64>, rng: &mut Rng, case: &mut Case) -> Result<(), Error> {
    let expected = output(layer)?;
    for changed in ["over=sum", "over=length", "over=sum,floor=1", "over=sum,detached", "over=sum out", "over=length out=cumulative"] {
        let variant: Variant = format!("{kernel} {changed} norm={norm}").parse()?;
        let other = layer.with_variant(&variant, rng)?;
        let results = other.run(&mut other.naive()?)?;
        case.measure(changed, relative_rms(&results.y, &expected), CANCELLED, Unit::RelativeRms);
        if let Some((_, gate)) = results.gradients.iter().find(|(name, _)| *name == Name::aux(AuxKind::OutGate)) {
            let largest = gate.iter().fold(0.0, |max, g| if g.abs() <= max { max } else { g.abs() });
            case.measure(format!("gradient of the gate, {changed}"), largest, 1e-8, Unit::Absolute);
        }
    }
    Ok(())
}

/// q times 3.7 changes nothing where weights are powers of q·k and their size cancels; it does change softmax.
pub fn query_scale(seed: u64, tell: &mut impl FnMut(Case) -> ControlFlow<()>) -> ControlFlow<()> {
    // So wide that q and k share a positive coordinate: where all products are zero there is nothing to divide by.
    let shape = Shape { batch: 1, time: 8, heads: 2, kv_heads: 1, d: 64, e: 4 };
    let scaled_error = |variant: &Variant, rng: &mut Rng| -> Result<f64, Error> {
        let mut layer = Layer::<f64>::uniform(variant, shape, 1.0, rng)?;
        let before = output(&layer)?;
        layer.tensors[0].1.iter_mut().for_each(|q| *q *= 3.7);
        Ok(relative_rms(&output(&layer)?, &before))
    };
    for text in ["feature=relu over=sum", "feature=identity over=sum", "power=2 over=sum", "feature=relu over=none norm=l2"] {
        let mut rng = Rng::named(seed, text);
        let mut case = Case::new(Identity::QueryScale, text);
        case.detail = Sizes::from(shape).to_string();
        tell(case.fill(|case| {
            case.measure("y", scaled_error(&text.parse()?, &mut rng)?, 1e-10, Unit::RelativeRms);
            let softmax = scaled_error(&Variant::default(), &mut rng)?;
            if softmax < 0.01 {
                case.problem = Some(format!("softmax changes by {softmax:.1e} only: the scaling does not act"));
            }
            Ok::<(), Error>(())
        }))?;
    }
    ControlFlow::Continue(())
}
