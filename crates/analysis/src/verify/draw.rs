//! Random combinations of parts.

use termwise_attention::{Norm, Rescale, Variant};

use termwise_base::rng::Rng;

/// Kernels with positive weights.
const POSITIVE: &[&str] = &["exp", "exp", "exp", "taylor=0..2", "taylor=0..8", "taylor=0..12", "feature=elu"];
/// Kernels with weights that can be zero or negative.
const SIGNED_KERNELS: &[&str] = &[
    "feature=relu",
    "power=2",
    "taylor=0..3",
    "taylor=1",
    "taylor=0,2,5",
    "taylor=0..2,coef=1.0:0.9:0.7",
    "taylor=0..3,coef=learned",
    "taylor=0..2,4,coef=learned",
    "power=1",
    "power=3",
    "feature=l2",
    "feature=identity",
];

/// A random variant of the parts that all engines compute.
///
/// Ill-conditioned combinations are omitted, because they test no engine: a sum that can be near zero has a floor, an exponential without
/// normalization has a clamp, and a delta rule has keys of unit length. Eviction and quantization are also omitted: the last bit of a score can
/// change a decision, so float32 and float64 cannot be compared value by value.
pub fn random_variant(rng: &mut Rng) -> Variant {
    loop {
        match random_text(rng).parse::<Variant>() {
            Ok(mut variant) if variant.inference_only().is_none() => {
                let overflows = variant.near.kernel.rescale() == Rescale::SubtractMax && !variant.shifts();
                variant.near.clamp = variant.near.clamp.or(overflows.then_some(5.0));
                return variant;
            }
            // Some parts cannot be combined.
            _ => {}
        }
    }
}

/// Words of the grammar; most can be combined.
fn random_text(rng: &mut Rng) -> String {
    let write = rng.chance(0.15);
    let positive = !write && rng.chance(0.55);
    let kernel = match write {
        true => rng.pick(&["power=1", "power=2", "feature=identity", "taylor=0..2"]),
        false => rng.pick(if positive { POSITIVE } else { SIGNED_KERNELS }),
    };
    let mut words = vec![kernel.to_string()];
    words.extend(write.then(|| rng.pick(&["write=delta,scale=0.5 qk_norm=l2", "write=delta,2,scale=0.4 qk_norm=l2"]).into()));
    if rng.chance(0.35) {
        words.push(format!("clamp={:?}", rng.pick(&[0.3, 1.0, 5.0])));
    }
    words.extend(rng.chance(0.15).then(|| format!("cap={:?}", rng.pick(&[1.0, 5.0]))));
    // Projected keys are not of unit length.
    words.extend((!write && rng.chance(0.15)).then(|| format!("dim={}", rng.pick(&[1, 2]))));
    if rng.chance(0.35) {
        words.push(format!("scale={:?}", rng.pick(&[1.0, 0.4, 0.7])));
    }
    if !write && rng.chance(0.3) {
        words.push(format!("window={}", rng.pick(&[1, 5, 20, 64, 90])));
        words.extend(rng.chance(0.5).then(|| format!("sinks={}", rng.pick(&[1, 4, 70]))));
        if rng.chance(0.6) {
            let kernel = rng.pick(&["taylor=0..2", "taylor=0..2 dim=2", "taylor=0..4", "feature=elu", "feature=hedgehog"]);
            words.push(format!("far({kernel})"));
        }
        words.extend(rng.chance(0.2).then(|| format!("chosen={}", rng.pick(&["4", "16,fade=8"]))));
        words.extend(rng.chance(0.2).then(|| format!("bits={}", rng.pick(&[4, 8]))));
    }
    let sums: &[&str] = match positive {
        true => &["sum", "sum", "sum,sink", "sum,floor=1.0", "sum,eps=0.5", "sum,detached", "sum,floor=2.0,eps=0.1,detached"],
        false => &["sum,floor=1.0", "sum,floor=2.0,eps=0.1", "sum,floor=1.0,detached"],
    };
    let over = match write {
        true => rng.pick(&["length", "none"]),
        false if rng.chance(0.5) => rng.pick(sums),
        false => rng.pick(&["length", "none", "position"]),
    };
    words.push(format!("over={over}"));
    words.extend((!write && rng.chance(0.4)).then(|| "in".into()));
    let mut shared = false;
    if rng.chance(0.5) {
        words.push(rng.pick(&["out", "out", "out=cumulative"]).into());
        shared = rng.chance(0.3);
        words.extend(shared.then(|| "post=out".into()));
    }
    let posts = ["post", "post=silu", "post=sigmoid,channel", "post=silu,channel"];
    words.extend((!shared && rng.chance(0.3)).then(|| rng.pick(&posts).into()));
    let decays = [
        "linear",
        "softplus",
        "linear",
        "softplus",
        "sigmoid",
        "sigmoid,16",
        "mamba",
        "fixed",
        "given",
        "softplus,channel",
        "sigmoid,16,channel",
        "mamba,channel",
    ];
    words.extend(rng.chance(0.4).then(|| format!("decay={}", rng.pick(&decays))));
    words.extend((!write && rng.chance(0.2)).then(|| format!("qk_norm={}", rng.pick(&["rms", "rms,all", "l2"]))));
    let norms: Vec<&str> = Norm::PARTS.iter().map(|info| info.word).filter(|word| *word != "none").collect();
    words.extend(rng.chance(0.5).then(|| format!("norm={}", rng.pick(&norms))));
    words.extend(rng.chance(0.3).then(|| "rope=off".into()));
    words.extend(rng.chance(0.25).then(|| format!("conv={}", rng.pick(&[1, 2, 3, 6]))));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use termwise_attention::Kernel;
    use termwise_attention::variant::string::KEYS;

    use super::*;

    #[test]
    fn every_part_is_drawn() {
        let mut rng = Rng::new(1);
        let possible = |rng: &mut Rng| std::iter::from_fn(|| Some(random_text(rng))).find_map(|text| text.parse::<Variant>().ok());
        let texts: Vec<String> = (0..500).filter_map(|_| possible(&mut rng)).map(|variant| variant.to_string()).collect();
        assert!((0..200).all(|_| random_variant(&mut rng).inference_only().is_none()));
        let words: BTreeSet<&str> = texts.iter().flat_map(|text| text.split([' ', '=', ',', '(', ')'])).collect();
        let parts = KEYS.iter().flat_map(|key| key.parts).chain(Kernel::PARTS).map(|info| info.word);
        // Bare words mean the sigmoid.
        for word in KEYS.iter().map(|key| key.word).chain(parts).filter(|word| *word != "sigmoid") {
            assert!(words.contains(word), "`{word}` is never drawn");
        }
    }
}
