//! The table of combinations: one or two values of each slot, and the result of combining every two of them.

use crate::{Error, Variant};

/// A representative value of a slot.
#[derive(Debug)]
pub struct SlotValue {
    /// The slot: the key of a variant string, or `kernel`.
    pub slot: &'static str,
    /// The value as a word of a variant string.
    pub word: &'static str,
    /// Words of other slots that it needs; a slot that the other value of a pair sets is omitted.
    needs: &'static [(&'static str, &'static str)],
}

/// The values that are combined, in the order of the variant string.
pub static SLOT_VALUES: &[SlotValue] = &[
    value("kernel", "taylor=0..2"),
    value("kernel", "feature=elu"),
    value("kernel", "feature=hedgehog"),
    value("clamp", "clamp=2"),
    value("scale", "scale=0.3"),
    value("cap", "cap=2"),
    value("dim", "dim=2"),
    value("window", "window=3"),
    SlotValue { needs: WINDOW, ..value("sinks", "sinks=2") },
    SlotValue { needs: WINDOW, ..value("chosen", "chosen=2") },
    SlotValue { needs: WINDOW, ..value("bits", "bits=8") },
    SlotValue { needs: WINDOW, ..value("far", "far(taylor=0..2)") },
    SlotValue { needs: WINDOW, ..value("far", "far(exp dim=2)") },
    // Unit keys keep the write rule stable.
    SlotValue { needs: &[("over", "over=none"), ("qk_norm", "qk_norm=l2")], ..value("write", "write=delta,scale=0.5") },
    value("over", "over=length"),
    value("over", "over=position"),
    value("over", "over=sum,sink"),
    value("in", "in"),
    value("out", "out"),
    SlotValue { needs: &[("out", "out")], ..value("post", "post=out") },
    value("post", "post=silu,channel"),
    value("decay", "decay=sigmoid"),
    value("decay", "decay=sigmoid,channel"),
    value("qk_norm", "qk_norm=rms"),
    value("qk_norm", "qk_norm=l2"),
    value("norm", "norm=l2"),
    value("norm", "norm=layer"),
    value("rope", "rope=off"),
    value("conv", "conv=2"),
];

const WINDOW: &[(&str, &str)] = &[("window", "window=3")];

const fn value(slot: &'static str, word: &'static str) -> SlotValue {
    SlotValue { slot, word, needs: &[] }
}

/// The kernels with which a pair without a kernel is combined: one without and one with a finite feature map.
pub const BASE_KERNELS: [&str; 2] = ["exp", "taylor=0..2"];

/// The variant string of two values of different slots, on the base of this kernel.
pub fn combine(first: &SlotValue, second: &SlotValue, kernel: &str) -> String {
    let mut words: Vec<(&str, &str)> = vec![(first.slot, first.word), (second.slot, second.word)];
    for &(slot, word) in first.needs.iter().chain(second.needs).chain(&[("kernel", kernel)]) {
        if words.iter().all(|(other, _)| *other != slot) {
            words.push((slot, word));
        }
    }
    words.iter().map(|(_, word)| *word).collect::<Vec<_>>().join(" ")
}

/// The variant of a combination, or the reason for its rejection.
pub fn accepted(variant_string: &str) -> Result<Variant, String> {
    variant_string.parse().map_err(|error| match error {
        Error::Combination { reason, .. } => reason,
        error => error.to_string(),
    })
}
