//! Random layers with all combinations of parts, including mixed heads.

use termwise_attention::parts::write::Delta;
use termwise_attention::{Error, Map, Norm, Real, Shape, Variant};

use super::{Case, Rng, oracle, shape};

/// A variant string that is valid in most cases; `rope` is whether the head dimension allows RoPE.
fn random_text(rope: bool, rng: &mut Rng) -> String {
    let kernel = rng.pick(&[
        "exp",
        "exp",
        "taylor=0..2",
        "taylor=0..3",
        "taylor=0..8",
        "taylor=0..12",
        "taylor=1",
        "taylor=0,2,5",
        "taylor=0..2,coef=1.0:0.9:0.7",
        "taylor=0..2,coef=1.5:-0.9:0.7",
        "taylor=0..3,coef=learned",
        "taylor=0..2,4,coef=learned",
        "power=1",
        "power=2",
        "power=3",
        "feature=elu",
        "feature=relu",
        "feature=l2",
        "feature=identity",
        "feature=hedgehog",
    ]);
    let mut words = vec![kernel.to_string()];
    let write = rng.chance(0.15);
    if write {
        // Keys of unit length: with longer ones the written values grow from position to position.
        words = vec![
            rng.pick(&["exp", "taylor=0..2", "taylor=0..3,coef=learned", "power=1", "power=2", "feature=identity", "feature=elu"]).into(),
        ];
        words.push(rng.pick(&["write=delta", "write=delta,2", "write=delta,scale=0.5", "write=delta,2,scale=-0.7"]).into());
        words.push("qk_norm=l2".into());
    }
    if rng.chance(0.25) {
        words.push(format!("clamp={:?}", rng.pick(&[0.3, 1.0, 5.0])));
    }
    words.extend(rng.chance(0.15).then(|| format!("cap={:?}", rng.pick(&[0.5, 2.0, 5.0]))));
    if rng.chance(0.35) {
        words.push(format!("scale={:?}", rng.pick(&[1.0, 0.4, -0.5])));
    }
    words.extend(rng.chance(0.2).then(|| format!("dim={}", rng.pick(&[1, 2, 3]))));
    if !write && rng.chance(0.35) {
        words.push(format!("window={}", rng.pick(&[1, 2, 3, 8])));
        words.extend(rng.chance(0.5).then(|| format!("sinks={}", rng.pick(&[1, 2, 3]))));
        if rng.chance(0.6) {
            let kernels = ["exp", "taylor=0..2", "taylor=0..2,coef=learned", "taylor=0..4", "power=2", "feature=elu", "feature=hedgehog"];
            let mut far = rng.pick(&kernels).to_string();
            far.push_str(rng.pick(&["", "", " scale=0.3", " cap=2", " clamp=0.5"]));
            far.push_str(rng.pick(&["", "", " dim=1", " dim=2"]));
            words.push(format!("far({far})"));
        }
    }
    let sums =
        ["sum", "sum", "sum,floor=1.0", "sum,eps=0.5", "sum,detached", "sum,floor=2.0,eps=0.1,detached", "sum,sink", "sum,eps=0.5,sink"];
    words.push(match write {
        true => rng.pick(&["over=none", "over=length"]).into(),
        false => format!("over={}", if rng.chance(0.5) { rng.pick(&sums) } else { rng.pick(&["length", "none", "position"]) }),
    });
    words.extend((!write && rng.chance(0.4)).then(|| "in".into()));
    if rng.chance(0.5) {
        words.push(rng.pick(&["out", "out", "out=cumulative"]).into());
        words.extend(rng.chance(0.3).then(|| "post=out".into()));
    }
    if !words.iter().any(|word| word == "post=out") {
        let gates = ["post", "post", "post=sigmoid,channel", "post=silu", "post=silu,channel"];
        words.extend(rng.chance(0.4).then(|| rng.pick(&gates).into()));
    }
    let decays = [
        "linear",
        "linear",
        "softplus",
        "softplus",
        "softplus,channel",
        "sigmoid",
        "sigmoid,16",
        "sigmoid,4,channel",
        "mamba",
        "mamba,channel",
        "fixed",
        "given",
        "given,channel",
    ];
    words.extend(rng.chance(0.5).then(|| format!("decay={}", rng.pick(&decays))));
    words.extend((!write && rng.chance(0.25)).then(|| format!("qk_norm={}", rng.pick(&["rms", "rms,all", "rms,eps=0.1", "l2"]))));
    let norms: Vec<&str> = Norm::PARTS.iter().map(|info| info.word).filter(|word| *word != "none").collect();
    words.extend(rng.chance(0.6).then(|| format!("norm={}", rng.pick(&norms))));
    words.extend((!rope || rng.chance(0.3)).then(|| "rope=off".into()));
    words.extend(rng.chance(0.25).then(|| format!("conv={}", rng.pick(&[1, 2, 3, 6]))));
    words.join(" ")
}

/// One variant per head: the same for all, or mixed as far as they can share their tensors. `fits` accepts the variants.
fn random_heads(shape: &Shape, fits: impl Fn(&Variant) -> bool, rng: &mut Rng) -> Vec<Variant> {
    let rope = shape.d.is_multiple_of(2);
    let mixed = rng.chance(0.4);
    let mut draw = || {
        loop {
            match random_text(rope, rng).parse::<Variant>() {
                Ok(variant) if fits(&variant) && variant.validate_for(shape).is_ok() => return variant,
                Ok(_) | Err(Error::Combination { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let mut heads = vec![draw(); shape.heads];
    for h in (1..shape.heads).filter(|_| mixed) {
        let before = heads[h].clone();
        heads[h] = draw();
        if super::planned(&heads, shape).is_err() {
            heads[h] = before;
        }
    }
    heads
}

/// Sizes small enough for central differences of every entry.
pub fn small_shape(rng: &mut Rng) -> Shape {
    let (heads, kv_heads) = rng.pick(&[(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]);
    shape(rng.pick(&[1, 1, 2]), rng.pick(&[1, 2, 3, 4, 5, 7]), heads, kv_heads, rng.pick(&[1, 2, 3, 4, 6]), rng.pick(&[1, 2, 3, 5]))
}

pub fn random_lengths(shape: &Shape, rng: &mut Rng) -> Option<Vec<usize>> {
    rng.chance(0.4).then(|| (0..shape.batch).map(|_| 1 + rng.below(shape.time)).collect())
}

/// A random layer that every engine supports, with inputs for which no sum of weights nearly cancels. Near cancellation neither central
/// differences nor float32 are accurate.
pub fn random_case<R: Real>(shape: Shape, steadiness: f64, rng: &mut Rng) -> Case<R> {
    random_case_of(shape, steadiness, |variant| writes_steadily(variant, &shape), rng)
}

/// Whether a write rule stays bounded, so that float32 can represent its state over many positions: w(k·k)·β ≤ 2 for unit keys, which a
/// projection does not keep. With one dimension such keys are signs, and the gradients of their inputs are rounding.
fn writes_steadily(variant: &Variant, shape: &Shape) -> bool {
    let bounded = |rule: Delta| rule.scale > 0.0 && variant.near.kernel.value(rule.scale) * rule.range <= 2.0;
    variant
        .write
        .is_none_or(|rule| shape.d > 1 && variant.near.dim.is_none() && variant.near.kernel.map() == Map::Identity && bounded(rule))
}

/// A random layer that the naive engine supports.
pub fn random_naive_case<R: Real>(shape: Shape, steadiness: f64, rng: &mut Rng) -> Case<R> {
    random_case_of(shape, steadiness, |_| true, rng)
}

/// A random layer of accepted variants.
pub fn random_case_of<R: Real>(shape: Shape, steadiness: f64, fits: impl Fn(&Variant) -> bool, rng: &mut Rng) -> Case<R> {
    loop {
        let heads = random_heads(&shape, &fits, rng);
        let lengths = random_lengths(&shape, rng);
        for _ in 0..4 {
            let case = Case::<R>::random(&heads, shape, lengths.clone(), 1.0, rng);
            let output = oracle::forward(&case.cast(), None);
            if output.steadiness > steadiness && output.y.iter().all(|y| y.abs() < 1e6) {
                return case;
            }
        }
    }
}
