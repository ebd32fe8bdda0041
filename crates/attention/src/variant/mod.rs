//! One attention as a value.

pub mod presets;
pub mod text;
mod weighing;

use crate::kernels::score_rows::Rescale;
use crate::parts::bits;
use crate::parts::chosen::Chosen;
use crate::parts::conv;
use crate::parts::denominator::none::NoDenominator;
use crate::parts::distance::Distance;
use crate::parts::gate::{InGate, OutGate, PostGate};
use crate::parts::kernel::Sign;
use crate::parts::kernel::taylor::{Coefficients, Taylor};
use crate::parts::qk_norm::QkNorm;
use crate::parts::write::Delta;
use crate::{Decay, Denominator, Error, Kernel, Norm, Shape};

pub use crate::variant::weighing::Weighing;

/// The parts of one attention. Its text form ([`std::str::FromStr`], [`std::fmt::Display`]) is described in [`crate::variant::text`].
///
/// ```
/// use termwise_attention::Variant;
///
/// let variant: Variant = "taylor=0..4 norm=l2".parse()?;
/// assert_eq!(variant.to_string(), "taylor=0..4 over=sum norm=l2");
/// assert_eq!("softmax".parse::<Variant>()?, "exp over=sum".parse()?);
/// # Ok::<(), termwise_attention::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// w
    pub kernel: Kernel,
    /// Scores are replaced by min(x, clamp) before w.
    pub clamp: Option<f64>,
    /// What q·k is multiplied by; 1/√d where absent, or 1/√dim.
    pub scale: Option<f64>,
    /// Scores are replaced by cap·tanh(x/cap), before the clamp.
    pub cap: Option<f64>,
    /// q and k are projected to this many dimensions before the scores.
    pub dim: Option<usize>,
    /// W: keys with t − s < W are near; all are where absent.
    pub window: Option<usize>,
    /// S: keys with s < S are near, too.
    pub sinks: Option<usize>,
    /// Keys behind the window that are near for what they received.
    pub chosen: Option<Chosen>,
    /// Bits in which keys and values of the window are kept; float32 where absent.
    pub bits: Option<u32>,
    /// How far keys are weighed; they are not seen where absent.
    pub far: Option<Weighing>,
    /// How values are written: u.
    pub write: Option<Delta>,
    /// D
    pub denominator: Denominator,
    /// I
    pub in_gate: Option<InGate>,
    /// O
    pub out_gate: Option<OutGate>,
    /// P
    pub post_gate: Option<PostGate>,
    /// M
    pub decay: Option<Decay>,
    /// The norm of q and k.
    pub qk_norm: Option<QkNorm>,
    /// N
    pub norm: Norm,
    /// RoPE on q and k.
    pub rope: bool,
    /// Width of the short convolution over q, k and v.
    pub conv: Option<usize>,
}

impl Variant {
    /// The scale of scores for head dimension d.
    pub fn scale_for(&self, d: usize) -> f64 {
        weighing::scale(self.scale, self.dim, d)
    }

    /// How near keys are weighed.
    pub fn near(&self) -> Weighing {
        let Variant { kernel, clamp, scale, cap, dim, .. } = self.clone();
        Weighing { kernel, clamp, scale, cap, dim }
    }

    /// Which keys are near.
    pub fn distance(&self) -> Distance {
        Distance { window: self.window.unwrap_or(usize::MAX), sinks: self.sinks.unwrap_or(0) }
    }

    /// S_t: how many keys position t sees.
    pub fn visible(&self, t: usize) -> usize {
        let behind = self.distance().far(t).len();
        if self.far.is_some() { t + 1 } else { t + 1 - behind + behind.min(self.chosen.map_or(0, |chosen| chosen.keys)) }
    }

    /// How its rows are kept within float32: as the kernels allow, where something later cancels it.
    pub fn rescale(&self) -> Rescale {
        if !(self.denominator.sums() || self.norm.scale_free()) {
            return Rescale::None;
        }
        let kinds = [Some(&self.kernel), self.far.as_ref().map(|far| &far.kernel)].map(|kernel| kernel.map(Kernel::rescale));
        match kinds {
            kinds if kinds.contains(&Some(Rescale::SubtractMax)) => Rescale::SubtractMax,
            kinds if kinds.contains(&Some(Rescale::Multiply)) => Rescale::Multiply,
            _ => Rescale::None,
        }
    }

    /// Whether the row maximum is subtracted from the scores.
    pub fn shifts(&self) -> bool {
        self.rescale() == Rescale::SubtractMax
    }

    /// Whether what was subtracted is still missing when the norm is reached.
    pub(crate) fn norm_restores_scale(&self) -> bool {
        self.rescale() != Rescale::None && !self.denominator.sums()
    }

    /// Checks that the parts can stand together.
    pub fn validate(&self) -> Result<(), Error> {
        let impossible = |reason: String| Err(Error::Combination { variant: self.to_string(), reason });
        if matches!(self.post_gate, Some(PostGate::Shared(_))) && self.out_gate.is_none() {
            return impossible(
                "`post=out` uses the output gate again, and there is none; add `out`, or write `post` for a gate of its own".into(),
            );
        }
        if let Some(width) = self.conv
            && !(1..=conv::MAX_WIDTH).contains(&width)
        {
            return impossible(format!("a short convolution has a width from 1 to {}, found {width}", conv::MAX_WIDTH));
        }
        if let Some(c) = self.clamp.filter(|c| !c.is_finite()) {
            return impossible(format!("a clamp is a finite number, found {c}"));
        }
        if let Some(c) = self.scale.filter(|c| !c.is_finite()) {
            return impossible(format!("a scale is a finite number, found {c}"));
        }
        for (word, number) in [("window", self.window), ("sinks", self.sinks)] {
            if number == Some(0) {
                return impossible(format!("`{word}=0` holds no key; write 1 or more, or leave `{word}` out"));
            }
        }
        if self.window.is_none() && self.sinks.is_some() {
            return impossible("with `sinks` alone a position would not see itself; add `window=W`".into());
        }
        if self.window.is_none() && self.far.is_some() {
            return impossible("without a window no key is far; add `window=W`, or make the far kernel the only one".into());
        }
        if let Some(reason) = self.memory_problem() {
            return impossible(reason);
        }
        let near = self.near();
        for weighing in [Some(&near), self.far.as_ref()].into_iter().flatten() {
            if let Some(reason) = weighing.problem() {
                return impossible(reason);
            }
        }
        if let Some(far) = &self.far
            && self.decay.as_ref().is_some_and(Decay::by_channel)
            && (far.dim != self.dim || far.kernel.has_learned_map() != self.kernel.has_learned_map())
        {
            return impossible(
                "a decay by channel has one gate for each channel, so near and far keys need the same `dim` and features".into(),
            );
        }
        if let Some(reason) = self.write_problem() {
            return impossible(reason);
        }
        if let Denominator::Sum(sum) = &self.denominator
            && sum.sink
            && sum.detached
        {
            return impossible("a learned sink in a detached sum would never learn; leave `sink` or `detached` out".into());
        }
        // Parts may have been built by hand: each must be one that its own text could have given.
        let readable = [
            Kernel::parse(self.kernel.info().word, &self.kernel.args()).map(|part| part.map(drop)),
            self.far.as_ref().and_then(|far| Kernel::parse(far.kernel.info().word, &far.kernel.args())).map(|part| part.map(drop)),
            Denominator::parse(self.denominator.info().word, &self.denominator.args()).map(|part| part.map(drop)),
            Norm::parse(self.norm.info().word, &self.norm.args()).map(|part| part.map(drop)),
            self.decay.as_ref().and_then(|decay| Decay::parse(decay.info().word, &decay.args())).map(|part| part.map(drop)),
            self.qk_norm.as_ref().and_then(|norm| QkNorm::parse(norm.info().word, &norm.args())).map(|part| part.map(drop)),
            self.write.map(|delta| Delta::parse(&delta.args()).map(drop)),
        ];
        match readable.into_iter().flatten().find_map(Result::err) {
            Some(reason) => impossible(reason),
            None => Ok(()),
        }
    }

    /// Whether queries and keys meet as they are in its window, and nothing but their scores weighs keys: then its exact keys have a memory of fixed size.
    pub fn is_pooled(&self) -> bool {
        let plain = self.kernel.map() == crate::Map::Identity && !self.kernel.has_learned_map() && self.dim.is_none();
        let unweighed = self.decay.is_none() && self.in_gate.is_none() && !self.denominator.key_side() && self.write.is_none();
        let finite = self.far.as_ref().is_none_or(Weighing::has_finite_map);
        self.window.is_some() && plain && unweighed && finite
    }

    /// Whether what is far depends on more than the distance, so that positions are taken one after another.
    pub fn is_walked(&self) -> bool {
        self.chosen.is_some()
    }

    /// Why exact keys cannot be kept like this.
    fn memory_problem(&self) -> Option<String> {
        let word = self.inference_only()?;
        if self.window.is_none() {
            return Some(format!("`{word}` is about the keys of a window; add `window=W`"));
        }
        if let Some(bits) = self.bits.filter(|bits| !bits::WIDTHS.contains(bits)) {
            return Some(format!("`bits` is 4 or 8, found {bits}; leave it out for float32"));
        }
        if !self.is_pooled() {
            return Some(format!(
                "`{word}` needs a window whose keys are kept as they are: no features, projection, decay, input gate or weights by position there, and a far kernel with a finite map, if any"
            ));
        }
        if self.chosen.is_some() && !self.kernel.is_exp() {
            return Some("keys are chosen by the weights that they received, which only `exp` makes positive".into());
        }
        None
    }

    /// The part of the variant that has no backward pass, by its key: eviction and quantization are for inference alone.
    pub fn inference_only(&self) -> Option<&'static str> {
        [(self.chosen.is_some(), "chosen"), (self.bits.is_some(), "bits")].into_iter().find_map(|(there, key)| there.then_some(key))
    }

    /// Why the write rule cannot stand with the other parts.
    fn write_problem(&self) -> Option<String> {
        self.write?;
        let reason = if self.denominator.sums() {
            "what the write rule leaves in a state are differences, which have no sum of weights to be divided by; write `over=none` or `over=length`"
        } else if self.denominator.key_side() || self.in_gate.is_some() {
            "β is the weight of a key when it is written; leave the input gate or `over=position` out"
        } else if self.window.is_some() {
            "the write rule reads all earlier keys by one kernel, and takes back only what it reads; leave the window out"
        } else {
            return None;
        };
        Some(reason.into())
    }

    /// Whether it has a decay of one number for a position.
    pub(crate) fn decays_by_head(&self) -> bool {
        self.decay.as_ref().is_some_and(|decay| !decay.by_channel())
    }

    /// Whether it has a decay of one number for each channel of q and k.
    pub(crate) fn decays_by_channel(&self) -> bool {
        self.decay.as_ref().is_some_and(Decay::by_channel)
    }

    /// Checks that this variant can run at this shape.
    pub fn validate_for(&self, shape: &Shape) -> Result<(), Error> {
        self.validate()?;
        let impossible = |reason: String| Err(Error::Combination { variant: self.to_string(), reason });
        if self.rope && shape.d % 2 == 1 {
            return impossible(format!("RoPE turns pairs of coordinates and the head dimension {} is odd; write `rope=off`", shape.d));
        }
        let dims = [self.dim, self.far.as_ref().and_then(|far| far.dim)];
        if let Some(dim) = dims.into_iter().flatten().find(|&dim| dim > shape.d) {
            return impossible(format!(
                "`dim={dim}` is more than the head dimension {} that it projects from; write at most that",
                shape.d
            ));
        }
        Ok(())
    }

    /// The first part, as it is written, that the naive engine alone computes so far: fused engines and states refuse it.
    pub fn naive_only(&self) -> Option<&'static str> {
        let channels = self.decays_by_channel();
        [
            (channels && self.far.is_some(), "decay=…,channel with far keys"),
            (channels && self.dim.is_some(), "decay=…,channel with dim"),
            (channels && self.kernel.has_learned_map(), "decay=…,channel with feature=hedgehog"),
        ]
        .into_iter()
        .find_map(|(there, word)| there.then_some(word))
    }

    /// What a user should know before spending time on this variant.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let sign = self.sign();
        if self.denominator.sums() && !self.denominator.has_sink() && sign != Sign::Positive {
            let why = match (&self.kernel, sign) {
                (Kernel::Taylor(t), _) if t.degree() % 2 == 1 => {
                    format!("the highest order {} is odd, so weights can be negative", t.degree())
                }
                (_, Sign::Nonnegative) => "all weights of a row can be zero".to_string(),
                _ => "weights can be negative".to_string(),
            };
            let guarded = matches!(&self.denominator, Denominator::Sum(sum) if sum.floor.is_some() || (sum.eps.is_some() && sign == Sign::Nonnegative));
            if !guarded {
                warnings.push(format!("{why} and the sum denominator can reach zero"));
            }
        }
        match self.kernel.rescale() {
            Rescale::SubtractMax if !self.shifts() && !self.bounds_scores() => {
                warnings.push("no clamp, no sum and no scale-free norm: e^x overflows float32 for scores above 88".into());
            }
            Rescale::Multiply if self.rescale() == Rescale::None && !self.bounds_scores() => {
                warnings
                    .push("no clamp, no sum and no scale-free norm: a polynomial of this degree overflows float32 for large scores".into());
            }
            _ => {}
        }
        if matches!(self.kernel, Kernel::Taylor(_) | Kernel::Power(_)) && (self.clamp.is_some() || self.cap.is_some()) {
            warnings.push("a clamped polynomial has no finite feature map: no recurrent form".into());
        }
        if self.far.as_ref().is_some_and(|far| !far.has_finite_map()) {
            warnings.push("the far kernel has no finite feature map: generation keeps all keys instead of a state".into());
        }
        if let Some(delta) = self.write
            && self.has_unit_keys()
        {
            let largest: f64 = self.kernel.value(delta.scale);
            if largest * delta.range > 2.0 {
                warnings.push(format!(
                    "for unit keys w(k·k) = {largest} and β reaches {}: above 2/β = {} the write rule grows without bound; make `scale` of the write rule smaller",
                    delta.range,
                    2.0 / delta.range
                ));
            }
        }
        warnings
    }

    /// The signs that weights can have, far ones included.
    fn sign(&self) -> Sign {
        match (self.kernel.sign(), self.far.as_ref().map_or(Sign::Positive, |far| far.kernel.sign())) {
            (Sign::Mixed, _) | (_, Sign::Mixed) => Sign::Mixed,
            // The position itself is near: its weight alone keeps the sum above zero.
            (near, _) => near,
        }
    }

    /// Whether scores cannot grow without bound.
    fn bounds_scores(&self) -> bool {
        self.clamp.is_some() || self.cap.is_some() || self.has_unit_keys()
    }

    /// Whether keys have length 1 when they meet the kernel.
    fn has_unit_keys(&self) -> bool {
        let by_norm =
            matches!(self.qk_norm, Some(QkNorm::QkL2(_))) && self.dim.is_none() && matches!(self.kernel.map(), crate::Map::Identity);
        matches!(&self.kernel, Kernel::Feature(feature) if feature.map == crate::Map::L2) || (by_norm && !self.kernel.has_learned_map())
    }

    /// How keys are weighed that only a state remembers: far keys where there is a window, all elsewhere. `None` where none is left.
    pub fn remembered(&self) -> Option<Weighing> {
        if self.window.is_some() { self.far.clone() } else { Some(self.near()) }
    }

    /// Rows of the finite feature map of the state for head dimension d; `None` where there is no finite map. With a window these are those
    /// of the far kernel, none where far keys are not seen.
    pub fn state_rows(&self, d: usize) -> Option<u128> {
        self.remembered().map_or(Some(0), |weighing| weighing.state_rows(d))
    }

    /// Numbers of a key in a cache, for head dimension d: as near queries meet it, and as far queries do where that is another.
    pub fn kept_width(&self, d: usize) -> usize {
        // A pool computes what far queries meet when a key leaves it.
        if self.is_pooled() { d } else { self.near().kept_width(self.far.as_ref(), d) }
    }

    /// float32 numbers in the recurrent state of one head: the state with its denominator, and the keys and values of
    /// the window and the sinks; `None` where there is no finite state.
    pub fn state_size(&self, d: usize, e: usize) -> Option<u128> {
        let columns = e as u128 + self.denominator.sums() as u128;
        let rows = self.state_rows(d)?.saturating_mul(columns);
        let keys = |window: usize| window as u128 + self.sinks.unwrap_or(0) as u128 + self.chosen.map_or(0, |chosen| chosen.keys) as u128;
        let exact = self.window.map_or(0, |window| keys(window).saturating_mul((self.kept_width(d) + e) as u128));
        // What is kept of codes, in numbers of float32.
        let exact = self.bits.map_or(exact, |bits| exact.saturating_mul(u128::from(bits)).div_ceil(32));
        Some(rows.saturating_add(exact))
    }

    /// The simplest variant with the same output up to eps: two variants are equal in this sense if these are equal.
    ///
    /// A scale-free norm cancels every positive factor of a row: the denominator (a sum only if it cannot change sign)
    /// and the output gate. Kernels that are the same function are written in one way.
    pub fn canonical(&self) -> Variant {
        let mut v = self.clone();
        // Classes that are weighed alike are one, unless each has tensors of its own.
        if v.far.as_ref().is_some_and(|far| *far == v.near() && far.has_no_tensors()) && v.bits.is_none() {
            v.chosen = None;
            (v.window, v.sinks, v.far) = (None, None, None);
        }
        if v.norm.scale_free() {
            let positive = v.sign() != Sign::Mixed;
            if !v.denominator.key_side() && (positive || !v.denominator.sums()) {
                v.denominator = Denominator::NoDenominator(NoDenominator);
            }
            if !matches!(v.post_gate, Some(PostGate::Shared(_))) {
                v.out_gate = None;
            }
        }
        v.kernel = match &v.kernel {
            Kernel::Power(power) => plain_order(power.p as usize, &v),
            Kernel::Feature(feature) if feature.map == crate::Map::Identity => plain_order(1, &v),
            Kernel::Taylor(taylor) if taylor.orders().len() == 1 && *taylor.coefficients() == Coefficients::Ones => {
                plain_order(taylor.orders()[0], &v)
            }
            kernel => kernel.clone(),
        };
        v
    }

    /// The formula of this variant in the symbols of the legend.
    pub fn formula(&self) -> String {
        let weight = match &self.far {
            None => self.near().formula(),
            Some(far) => format!("(near: {}; far: {})", self.near().formula(), far.formula()),
        };
        let keys = match (self.window, self.sinks, &self.far) {
            (Some(w), None, None) => format!("Σ_{{t−s<{w}}}"),
            (Some(w), Some(s), None) => format!("Σ_{{t−s<{w} or s<{s}}}"),
            _ => "Σ_s".to_string(),
        };
        let keys = match self.chosen.filter(|_| self.far.is_none()) {
            Some(chosen) => keys.replace('}', &format!(" or among {} chosen}}", chosen.keys)),
            None => keys,
        };
        let decay = if self.decay.as_ref().is_some_and(|decay| !decay.by_channel()) { "e^(c_t−c_s)·" } else { "" };
        let value = if self.write.is_some() { "u_s" } else { "v_s" };
        let in_gate = if self.in_gate.is_some() { "·I_s" } else { "" };
        let key = if self.denominator.key_side() { "·S_s^−σ(m)" } else { "" };
        let sum = format!("{keys} {decay}{weight}{in_gate}{key}·{value}");
        let divided = match &self.denominator {
            Denominator::Sum(part) => {
                let mut d = format!("Σ_s {decay}w");
                if part.sink {
                    d = format!("({d} + e^b)");
                }
                if let Some(floor) = part.floor {
                    d = format!("max({d}, {floor})");
                }
                if part.detached {
                    d = format!("detach({d})");
                }
                if let Some(eps) = part.eps {
                    d = format!("({d} + {eps})");
                }
                format!("{sum} / {d}")
            }
            Denominator::Length(_) => format!("{sum} / S_t"),
            Denominator::NoDenominator(_) | Denominator::Position(_) => sum,
        };
        let gated = if self.out_gate.is_some() { format!("O_t·{divided}") } else { divided };
        let normed = match self.norm.info().word {
            "none" => gated,
            word => format!("{word}({gated})"),
        };
        match &self.post_gate {
            Some(PostGate::Shared(_)) => format!("y = O_t·{normed}"),
            Some(gate) if gate.by_channel() => format!("y = P_t⊙{normed}"),
            Some(_) => format!("y = P_t·{normed}"),
            None => format!("y = {normed}"),
        }
    }
}

/// Order n alone. Its 1/n! cancels under a plain sum, or under a norm with nothing between that compares it with a
/// fixed number, with other weights or with itself; elsewhere x^n and x^n/n! are different attentions.
fn plain_order(n: usize, v: &Variant) -> Kernel {
    let alone = v.far.is_none() && v.write.is_none();
    let cancels = alone
        && match &v.denominator {
            Denominator::Sum(sum) => sum.floor.is_none() && sum.eps.is_none() && !sum.sink,
            _ => v.norm.scale_free(),
        };
    match &v.kernel {
        kernel @ Kernel::Power(_) if !cancels && n > 1 => kernel.clone(),
        _ => Kernel::Taylor(Taylor::new(vec![n], Coefficients::Ones).expect("an order that was valid before")),
    }
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
    fn a_maximum_is_subtracted_where_something_cancels_it() {
        for (text, shifts, restores) in [
            ("exp over=sum", true, false),
            ("exp over=sum norm=l2", true, false),
            ("exp over=none norm=l2", true, true),
            ("exp over=length norm=layer", true, true),
            ("exp over=position norm=rms", true, true),
            ("exp over=length", false, false),
            ("exp over=none", false, false),
            ("taylor=0..4 over=sum", false, false),
            ("taylor=0..20 over=sum", false, false),
            ("taylor=0..20 over=none norm=l2", false, true),
            ("feature=elu norm=l2", false, false),
        ] {
            assert_eq!((variant(text).shifts(), variant(text).norm_restores_scale()), (shifts, restores), "{text}");
        }
    }

    #[test]
    fn warnings_name_what_can_go_wrong() {
        for (text, expected) in [
            ("taylor=0..3 over=sum", "odd"),
            ("feature=relu over=sum", "zero"),
            ("feature=identity over=sum", "negative"),
            ("exp over=length", "overflows"),
            ("taylor=0..2 clamp=5", "recurrent"),
        ] {
            assert!(variant(text).warnings().iter().any(|warning| warning.contains(expected)), "{text}: {:?}", variant(text).warnings());
        }
        for text in [
            "softmax",
            "norm",
            "gate",
            "taylor=0..4 over=sum",
            "taylor=0..3 over=length",
            "linear_elu",
            "linear_relu",
            "feature=identity over=sum,floor=1",
        ] {
            assert_eq!(variant(text).warnings(), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn states_of_the_specification() {
        assert_eq!(variant("taylor=0..2 over=sum").state_size(64, 64), Some(139_425));
        assert_eq!(variant("taylor=0..2 over=length").state_size(64, 64), Some(139_425 / 65 * 64));
        assert_eq!(variant("taylor=0..4 over=sum").state_size(16, 16), Some(82_365));
        assert_eq!(variant("feature=elu over=sum").state_size(64, 64), Some(64 * 65));
        assert_eq!(variant("power=2 over=none").state_rows(3), Some(6));
        assert_eq!(variant("softmax").state_rows(64), None);
        assert_eq!(variant("taylor=0..2 clamp=5").state_rows(64), None);
        assert_eq!(variant("taylor=0..150").state_size(256, 256), Some(u128::MAX));
    }

    #[test]
    fn one_over_n_factorial_cancels_only_where_nothing_fixed_is_compared_with_it() {
        let same = |a: &str, b: &str| variant(a).canonical() == variant(b).canonical();
        assert!(same("power=3 over=sum", "taylor=3 over=sum"));
        assert!(same("power=2 over=sum,eps=1 norm=l2", "taylor=2 over=length norm=l2"));
        assert!(same("power=1 over=length", "feature=identity over=length"));
        assert!(!same("power=3 over=length", "taylor=3 over=length"));
        assert!(!same("power=3 over=sum,eps=1", "taylor=3 over=sum,eps=1"));
        // A sum of weights of either sign stays under the norm, and its eps decides where the sign turns.
        assert!(!same("power=3 over=sum,eps=1 norm=l2", "taylor=3 over=sum,eps=1 norm=l2"));
        assert!(!same("taylor=3 over=sum norm=l2", "taylor=3 over=none norm=l2"));
        // The shared gate still acts after the norm.
        assert!(!same("exp out post=out norm=l2", "exp norm=l2"));
    }

    #[test]
    fn odd_dimensions_have_no_rope() {
        let shape = Shape { batch: 1, time: 1, heads: 1, kv_heads: 1, d: 3, e: 3 };
        assert!(variant("exp").validate_for(&shape).is_err());
        assert_eq!(variant("exp rope=off").validate_for(&shape), Ok(()));
        assert_eq!(variant("exp").validate_for(&Shape { d: 4, ..shape }), Ok(()));
        let endless = Variant { clamp: Some(f64::INFINITY), ..Variant::default() };
        for kernel in [Kernel::Power(Power { p: 1000 }), Kernel::Power(Power { p: 151 })] {
            assert!(Variant { kernel, ..Variant::default() }.validate().is_err());
        }
        for sum in [Sum { floor: Some(f64::NAN), ..Sum::default() }, Sum { eps: Some(-1.0), ..Sum::default() }] {
            assert!(Variant { denominator: Denominator::Sum(sum), ..Variant::default() }.validate().is_err());
        }
        assert!(endless.validate().is_err() && Variant { scale: Some(f64::NAN), ..Variant::default() }.validate().is_err());
    }

    #[test]
    fn formulas() {
        assert_eq!(variant("softmax").formula(), "y = Σ_s exp(x)·v_s / Σ_s w");
        assert_eq!(variant("gated_softmax").formula(), "y = layer(O_t·Σ_s exp(min(x, 5))·I_s·v_s / S_t)");
        assert_eq!(variant("taylor=0..2,coef=1:1:0.9 over=none").formula(), "y = Σ_s Σ_{n∈{0..2}} a_n·x^n/n!·v_s");
        assert_eq!(variant("taylor=0..2,5 over=none out post=out norm=l2").formula(), "y = O_t·l2(O_t·Σ_s Σ_{n∈{0..2,5}} x^n/n!·v_s)");
    }
}
