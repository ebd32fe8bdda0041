//! Validation of variants. A combination of parts that passes works in every engine: naive, fused in all modes, recurrent states and their
//! files, Python and checkpoints.

use crate::parts::conv;
use crate::parts::gate::PostGate;
use crate::parts::heavy_hitters::MAX_SHARING_HEADS;
use crate::parts::qk_norm::QkNorm;
use crate::parts::quantize;
use crate::parts::write::Delta;
use crate::{Decay, Denominator, Error, Kernel, KeyRange, Norm, ScoreFn, Shape, Variant};

impl Variant {
    /// Checks that the parts can be combined. Parsing and [`crate::Layer`] call it.
    pub fn validate(&self) -> Result<(), Error> {
        self.refuse_if(refusal(self))
    }

    /// Checks that this variant can run at this shape.
    pub fn validate_for(&self, shape: &Shape) -> Result<(), Error> {
        self.validate()?;
        let Shape { d, .. } = *shape;
        let dim = KeyRange::ALL.into_iter().filter_map(|range| self.score_fn(range)?.dim).find(|&dim| dim > d);
        self.refuse_if(if self.rope && d % 2 == 1 {
            Some(format!("RoPE rotates pairs of coordinates and the head dimension {d} is odd; write `rope=off`"))
        } else if let Some(dim) = dim {
            Some(format!("`dim={dim}` is larger than the head dimension {d} that it projects from; write at most {d}"))
        } else if self.heavy_hitters.is_some() && shape.group() > MAX_SHARING_HEADS {
            Some(format!("at most {MAX_SHARING_HEADS} heads can share heavy hitters, and {} heads share a KV head", shape.group()))
        } else {
            None
        })
    }

    /// Checks that the variant has a backward pass: heavy hitters and quantized caches are inference-only.
    pub fn validate_for_training(&self) -> Result<(), Error> {
        self.refuse_if(self.training_refusal())
    }

    /// Why the variant cannot be trained; `None` if it can.
    pub fn training_refusal(&self) -> Option<String> {
        self.inference_only().map(|key| format!("`{key}` is inference-only and has no backward pass; train without `{key}`"))
    }

    /// The key of the part that has no backward pass; `None` if the variant can be trained.
    pub fn inference_only(&self) -> Option<&'static str> {
        [(self.heavy_hitters.is_some(), "chosen"), (self.bits.is_some(), "bits")].into_iter().find_map(|(there, key)| there.then_some(key))
    }

    fn refuse_if(&self, reason: Option<String>) -> Result<(), Error> {
        reason.map_or(Ok(()), |reason| Err(Error::Combination { variant: self.to_string(), reason }))
    }
}

/// The first reason for which the parts cannot be combined, with a remedy.
fn refusal(v: &Variant) -> Option<String> {
    if let Some(reason) = out_of_range(v) {
        return Some(reason);
    }
    let rules = [
        (
            matches!(v.post_gate, Some(PostGate::Shared(_))) && v.out_gate.is_none(),
            "`post=out` reuses the output gate, and there is none; add `out`, or write `post` for a separate gate",
        ),
        // Windows and far keys.
        (v.window.is_none() && v.sinks.is_some(), "with `sinks` alone a position would not see itself; add `window=W`"),
        (v.window.is_none() && v.far.is_some(), "without a window no key is far; add `window=W`, or use the far kernel for all keys"),
        // Eviction and quantization.
        (v.window.is_none() && v.heavy_hitters.is_some(), "heavy hitters are kept in addition to a window; add `window=W`"),
        (v.window.is_none() && v.bits.is_some(), "a quantized cache is the cache of a window; add `window=W`"),
        (v.bits.is_some() && v.far.is_some(), "far keys are computed from float32 keys; leave out `bits` or `far`"),
        (
            v.inference_only().is_some() && !v.is_pooled(),
            "heavy hitters and quantized caches need a window of unchanged keys: no features, projection, decay, input gate or `position` denominator, and a far kernel with a finite feature map, if any",
        ),
        (
            v.heavy_hitters.is_some() && !v.near.kernel.is_exp(),
            "heavy hitters are selected by accumulated attention weights, which only `exp` makes positive",
        ),
        // Decay per channel: one gate for each channel of the plain q and k.
        (v.decays_by_channel() && v.far.is_some(), "a decay per channel has no far branch; use a decay per head, or leave out `far`"),
        (
            v.decays_by_channel() && v.near.dim.is_some(),
            "a decay per channel acts on channels that `dim` projects away; use a decay per head",
        ),
        (
            v.decays_by_channel() && v.near.kernel.has_learned_map(),
            "a decay per channel acts on channels that `feature=hedgehog` mixes; use a decay per head",
        ),
        // The write rule.
        (
            v.write.is_some() && v.denominator.sums(),
            "the write rule stores differences of values, whose weights have no sum; write `over=none` or `over=length`",
        ),
        (
            v.write.is_some() && (v.denominator.key_side() || v.in_gate.is_some()),
            "β of the write rule is the weight of a key; leave out the input gate and the `position` denominator",
        ),
        (v.write.is_some() && v.window.is_some(), "the write rule reads all earlier keys; leave out the window"),
        (
            matches!(&v.denominator, Denominator::Sum(sum) if sum.sink && sum.detached),
            "a learned sink in a detached sum has no gradient; leave out `sink` or `detached`",
        ),
    ];
    rules.into_iter().find_map(|(refused, reason)| refused.then(|| reason.to_string()))
}

/// Values outside their range. A variant built in code has the same ranges as a parsed one.
fn out_of_range(v: &Variant) -> Option<String> {
    if let Some(width) = v.conv.filter(|width| !(1..=conv::MAX_WIDTH).contains(width)) {
        return Some(format!("a short convolution has a width from 1 to {}, found {width}", conv::MAX_WIDTH));
    }
    for (key, number) in [("window", v.window), ("sinks", v.sinks)] {
        if number == Some(0) {
            return Some(format!("`{key}=0` contains no key; write 1 or more, or leave out `{key}`"));
        }
    }
    let widths = v.bits.map_or(Vec::new(), |bits| vec![bits.keys, bits.values]);
    if let Some(bits) = widths.into_iter().find(|bits| !quantize::WIDTHS.contains(bits)) {
        return Some(format!("`bits` is 16, 8 or 4, found {bits}; leave it out for float32"));
    }
    if let Some(reason) = KeyRange::ALL.into_iter().find_map(|range| score_fn_out_of_range(v.score_fn(range)?)) {
        return Some(reason);
    }
    let parts = [
        Denominator::parse(v.denominator.info().word, &v.denominator.args()).map(|part| part.map(drop)),
        Norm::parse(v.norm.info().word, &v.norm.args()).map(|part| part.map(drop)),
        v.decay.as_ref().and_then(|decay| Decay::parse(decay.info().word, &decay.args())).map(|part| part.map(drop)),
        v.qk_norm.as_ref().and_then(|norm| QkNorm::parse(norm.info().word, &norm.args())).map(|part| part.map(drop)),
        v.write.map(|delta| Delta::parse(&delta.args()).map(drop)),
    ];
    parts.into_iter().flatten().find_map(Result::err)
}

fn score_fn_out_of_range(score_fn: &ScoreFn) -> Option<String> {
    for (key, number) in [("clamp", score_fn.clamp), ("scale", score_fn.scale)] {
        if let Some(c) = number.filter(|c| !c.is_finite()) {
            return Some(format!("`{key}` is a finite number, found {c}"));
        }
    }
    if let Some(c) = score_fn.cap.filter(|c| !(c.is_finite() && *c > 0.0)) {
        return Some(format!("`cap` is a positive number, found {c}"));
    }
    if score_fn.dim == Some(0) {
        return Some("`dim=0` removes all of q and k; write 1 or more, or leave out `dim`".into());
    }
    Kernel::parse(score_fn.kernel.info().word, &score_fn.kernel.args())?.err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::denominator::sum::Sum;
    use crate::parts::kernel::power::Power;

    fn variant(text: &str) -> Variant {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn odd_head_dimensions_are_rejected_with_rope() {
        let shape = Shape { batch: 1, time: 1, heads: 1, kv_heads: 1, d: 3, e: 3 };
        assert!(variant("exp").validate_for(&shape).is_err());
        assert_eq!(variant("exp rope=off").validate_for(&shape), Ok(()));
        assert_eq!(variant("exp").validate_for(&Shape { d: 4, ..shape }), Ok(()));
        assert!(variant("exp dim=4 rope=off").validate_for(&shape).is_err());
    }

    #[test]
    fn heavy_hitters_are_shared_by_a_limited_number_of_heads() {
        let shape = |heads| Shape { batch: 1, time: 1, heads, kv_heads: 1, d: 4, e: 4 };
        assert_eq!(variant("exp window=4 chosen=2").validate_for(&shape(64)), Ok(()));
        assert!(variant("exp window=4 chosen=2").validate_for(&shape(65)).is_err());
        assert_eq!(variant("exp window=4").validate_for(&shape(65)), Ok(()));
    }

    #[test]
    fn parts_built_in_code_have_the_same_ranges() {
        for kernel in [Kernel::Power(Power { p: 1000 }), Kernel::Power(Power { p: 151 })] {
            assert!(Variant::new(kernel).validate().is_err());
        }
        for sum in [Sum { floor: Some(f64::NAN), ..Sum::default() }, Sum { eps: Some(-1.0), ..Sum::default() }] {
            assert!(Variant::default().with_denominator(Denominator::Sum(sum)).validate().is_err());
        }
        for near in
            [ScoreFn::default().with_clamp(f64::INFINITY), ScoreFn::default().with_scale(f64::NAN), ScoreFn::default().with_cap(-1.0)]
        {
            assert!(Variant::new(near.clone()).validate().is_err());
            assert!(Variant::default().with_window(4).with_far(near).validate().is_err());
        }
    }

    #[test]
    fn training_rejects_inference_only_parts() {
        for (text, key) in [("exp window=4 chosen=2", "`chosen`"), ("exp window=4 bits=8", "`bits`")] {
            let error = variant(text).validate_for_training().expect_err(text).to_string();
            assert!(error.contains(key) && error.contains("inference-only"), "{error}");
        }
        assert_eq!(variant("exp window=4 sinks=1 far(taylor=0..2)").validate_for_training(), Ok(()));
    }
}
