//! Random layers: every part with every other, mixed heads included.

use termwise_attention::{Real, Shape, Variant};

use super::{Case, Rng, oracle, shape};

/// The text of a random variant; `rope` says whether the head dimension allows it.
pub fn random_text(rope: bool, rng: &mut Rng) -> String {
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
        "taylor=0..4,at=-0.75",
        "taylor=0..2,at=0.5,coef=1.0:0.9:0.7",
        "taylor=0,3,at=0.25",
        "taylor=0..3,coef=learned",
        "taylor=0..2,4,coef=learned",
        "power=1",
        "power=2",
        "power=3",
        "feature=elu",
        "feature=relu",
        "feature=l2",
        "feature=identity",
    ]);
    let mut words = vec![kernel.to_string()];
    if rng.chance(0.35) {
        words.push(format!("clamp={:?}", rng.pick(&[0.3, 1.0, 5.0])));
    }
    if rng.chance(0.35) {
        words.push(format!("scale={:?}", rng.pick(&[1.0, 0.4, -0.5])));
    }
    let sums = ["sum", "sum", "sum,floor=1.0", "sum,eps=0.5", "sum,detached", "sum,floor=2.0,eps=0.1,detached"];
    words.push(format!("over={}", if rng.chance(0.5) { rng.pick(&sums) } else { rng.pick(&["length", "none", "position"]) }));
    words.extend(rng.chance(0.4).then(|| "in".into()));
    if rng.chance(0.5) {
        words.push(rng.pick(&["out", "out", "out=cumulative"]).into());
        words.extend(rng.chance(0.3).then(|| "post=out".into()));
    }
    if !words.iter().any(|word| word == "post=out") {
        words.extend(rng.chance(0.2).then(|| "post".into()));
    }
    words.extend(rng.chance(0.4).then(|| rng.pick(&["decay=linear", "decay=softplus"]).into()));
    words.extend(rng.chance(0.6).then(|| format!("norm={}", rng.pick(&["l2", "scaled_l2", "rms", "layer"]))));
    words.extend((!rope || rng.chance(0.3)).then(|| "rope=off".into()));
    words.extend(rng.chance(0.25).then(|| format!("conv={}", rng.pick(&[1, 2, 3, 6]))));
    words.join(" ")
}

/// One variant for each head: the same for all, or mixed as far as they can share their tensors.
pub fn random_heads(shape: &Shape, rng: &mut Rng) -> Vec<Variant> {
    let rope = shape.d.is_multiple_of(2);
    let mixed = rng.chance(0.4);
    let mut draw = || random_text(rope, rng).parse::<Variant>().unwrap_or_else(|error| panic!("{error}"));
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

/// Sizes small enough for derivatives entry by entry.
pub fn small_shape(rng: &mut Rng) -> Shape {
    let (heads, kv_heads) = rng.pick(&[(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]);
    shape(rng.pick(&[1, 1, 2]), rng.pick(&[1, 2, 3, 4, 5, 7]), heads, kv_heads, rng.pick(&[1, 2, 3, 4, 6]), rng.pick(&[1, 2, 3, 5]))
}

pub fn random_lengths(shape: &Shape, rng: &mut Rng) -> Option<Vec<usize>> {
    rng.chance(0.4).then(|| (0..shape.batch).map(|_| 1 + rng.below(shape.time)).collect())
}

/// A random layer with inputs at which no sum of weights nearly cancels: there the output is as steep as 1/x at zero
/// and neither differences nor float32 say anything.
pub fn random_case<R: Real>(shape: Shape, steadiness: f64, rng: &mut Rng) -> Case<R> {
    loop {
        let heads = random_heads(&shape, rng);
        let lengths = random_lengths(&shape, rng);
        for _ in 0..4 {
            let case = Case::<R>::random(&heads, shape, lengths.clone(), 1.0, rng);
            let output = oracle::forward(&case.cast(), None);
            if output.steadiness > steadiness && output.y.iter().all(|y| y.is_finite()) {
                return case;
            }
        }
    }
}
