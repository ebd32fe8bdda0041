//! Random combinations of parts.

use termwise_attention::{Rescale, Variant};

use termwise_base::rng::Rng;

/// Kernels whose weights are above zero.
const POSITIVE: &[&str] = &["exp", "exp", "exp", "taylor=0..2", "taylor=0..8", "taylor=0..12", "feature=elu"];
/// Kernels whose weights can be zero or of either sign.
const OTHER: &[&str] = &[
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

/// A random variant in which every part can occur.
///
/// What is known to fail is left out, since it would say nothing about an engine: a sum that can come near zero has a floor, and an
/// exponential that nothing scales down again has a clamp.
pub fn random_variant(rng: &mut Rng) -> Variant {
    let positive = rng.chance(0.55);
    let mut words = vec![rng.pick(if positive { POSITIVE } else { OTHER }).to_string()];
    if rng.chance(0.35) {
        words.push(format!("clamp={:?}", rng.pick(&[0.3, 1.0, 5.0])));
    }
    if rng.chance(0.35) {
        words.push(format!("scale={:?}", rng.pick(&[1.0, 0.4, 0.7])));
    }
    let sums: &[&str] = match positive {
        true => &["sum", "sum", "sum,floor=1.0", "sum,eps=0.5", "sum,detached", "sum,floor=2.0,eps=0.1,detached"],
        false => &["sum,floor=1.0", "sum,floor=2.0,eps=0.1", "sum,floor=1.0,detached"],
    };
    let over = if rng.chance(0.5) { rng.pick(sums) } else { rng.pick(&["length", "none", "position"]) };
    words.push(format!("over={over}"));
    words.extend(rng.chance(0.4).then(|| "in".into()));
    let mut shared = false;
    if rng.chance(0.5) {
        words.push(rng.pick(&["out", "out", "out=cumulative"]).into());
        shared = rng.chance(0.3);
        words.extend(shared.then(|| "post=out".into()));
    }
    words.extend((!shared && rng.chance(0.2)).then(|| "post".into()));
    words.extend(rng.chance(0.4).then(|| rng.pick(&["decay=linear", "decay=softplus"]).into()));
    words.extend(rng.chance(0.5).then(|| format!("norm={}", rng.pick(&["l2", "scaled_l2", "rms", "layer"]))));
    words.extend(rng.chance(0.3).then(|| "rope=off".into()));
    words.extend(rng.chance(0.25).then(|| format!("conv={}", rng.pick(&[1, 2, 3, 6]))));
    let mut variant: Variant = words.join(" ").parse().expect("words of the grammar; a test draws many");
    if variant.kernel.rescale() == Rescale::SubtractMax && !variant.shifts() {
        variant.clamp = variant.clamp.or(Some(5.0));
    }
    variant
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use termwise_attention::Kernel;
    use termwise_attention::variant::text::KEYS;

    use super::*;

    #[test]
    fn every_part_is_drawn() {
        let mut rng = Rng::new(1);
        let texts: Vec<String> = (0..500).map(|_| random_variant(&mut rng).to_string()).collect();
        let words: BTreeSet<&str> = texts.iter().flat_map(|text| text.split([' ', '=', ','])).collect();
        let parts = KEYS.iter().flat_map(|key| key.parts).chain(Kernel::PARTS).map(|info| info.word);
        // Bare words stand for the sigmoid.
        for word in KEYS.iter().map(|key| key.word).chain(parts).filter(|word| *word != "sigmoid") {
            assert!(words.contains(word), "`{word}` is never drawn");
        }
    }
}
