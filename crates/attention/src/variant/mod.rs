//! A variant: one choice of parts for the formula of attention.

mod canonical;
pub mod combinations;
mod formula;
pub mod presets;
mod score_fn;
pub mod string;
mod validate;

use crate::parts::denominator::sum::Sum;
use crate::parts::distance::Distance;
use crate::parts::gate::{InGate, OutGate, PostGate};
use crate::parts::heavy_hitters::HeavyHitters;
use crate::parts::kernel::Sign;
use crate::parts::norm::none::NoNorm;
use crate::parts::qk_norm::QkNorm;
use crate::parts::quantize::CacheBits;
use crate::parts::write::Delta;
use crate::{Decay, Denominator, Kernel, KeyRange, Map, Norm};
use termwise_kernels::score_rows::Rescale;

pub use crate::variant::score_fn::ScoreFn;

/// The parts of one attention. It is parsed from and printed as a variant string, which [`crate::variant::string`] describes.
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
#[non_exhaustive]
pub struct Variant {
    /// w of near keys: those in the window and the sinks, or all keys if there is no window.
    pub near: ScoreFn,
    /// w of far keys; `None` if they are masked.
    pub far: Option<ScoreFn>,
    /// W: keys with t − s < W are near; `None` if all keys are.
    pub window: Option<usize>,
    /// S: keys with s < S are near.
    pub sinks: Option<usize>,
    /// Keys outside the window that are kept for their accumulated attention.
    pub heavy_hitters: Option<HeavyHitters>,
    /// Bits of the KV cache of the window; `None` for float32.
    pub bits: Option<CacheBits>,
    /// u, the write rule.
    pub write: Option<Delta>,
    /// The denominator D.
    pub denominator: Denominator,
    /// The input gate I.
    pub in_gate: Option<InGate>,
    /// The output gate O.
    pub out_gate: Option<OutGate>,
    /// The post gate P.
    pub post_gate: Option<PostGate>,
    /// The decay M.
    pub decay: Option<Decay>,
    /// The norm of q and k.
    pub qk_norm: Option<QkNorm>,
    /// The output norm N.
    pub norm: Norm,
    /// RoPE on q and k.
    pub rope: bool,
    /// Width of the short convolution over q, k and v.
    pub conv: Option<usize>,
}

impl Default for Variant {
    /// Softmax with RoPE.
    fn default() -> Self {
        Variant {
            near: ScoreFn::default(),
            far: None,
            window: None,
            sinks: None,
            heavy_hitters: None,
            bits: None,
            write: None,
            denominator: Denominator::Sum(Sum::default()),
            in_gate: None,
            out_gate: None,
            post_gate: None,
            decay: None,
            qk_norm: None,
            norm: Norm::NoNorm(NoNorm),
            rope: true,
            conv: None,
        }
    }
}

/// Defines methods that replace one field: a value, or `None` if the field is optional.
macro_rules! builders {
    ($($(#[$doc:meta])* $method:ident: $field:ident, $type:ty;)*) => {
        $($(#[$doc])* #[must_use] pub fn $method(mut self, $field: impl Into<$type>) -> Self {
            self.$field = $field.into();
            self
        })*
    };
}
pub(crate) use builders;

impl Variant {
    /// Softmax with this kernel, or this [`ScoreFn`], in place of exp. The `with_…` methods replace further parts.
    ///
    /// ```
    /// use termwise_attention::parts::kernel::taylor::Taylor;
    /// use termwise_attention::{Kernel, Variant};
    ///
    /// let variant = Variant::new(Kernel::Taylor(Taylor::up_to(2)?)).with_window(64).with_rope(false);
    /// assert_eq!(variant, "taylor=0..2 window=64 rope=off".parse()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(near: impl Into<ScoreFn>) -> Variant {
        Variant { near: near.into(), ..Variant::default() }
    }

    /// Replaces the kernel of near keys; clamp, scale, cap and dim are kept.
    #[must_use]
    pub fn with_kernel(mut self, kernel: Kernel) -> Variant {
        self.near.kernel = kernel;
        self
    }

    builders! {
        /// Replaces w of near keys.
        with_near: near, ScoreFn;
        /// Replaces w of far keys.
        with_far: far, Option<ScoreFn>;
        /// Replaces the window.
        with_window: window, Option<usize>;
        /// Replaces the number of sinks.
        with_sinks: sinks, Option<usize>;
        /// Replaces the heavy hitters.
        with_heavy_hitters: heavy_hitters, Option<HeavyHitters>;
        /// Replaces the bits of the KV cache.
        with_bits: bits, Option<CacheBits>;
        /// Replaces the write rule.
        with_write: write, Option<Delta>;
        /// Replaces the denominator.
        with_denominator: denominator, Denominator;
        /// Replaces the input gate.
        with_in_gate: in_gate, Option<InGate>;
        /// Replaces the output gate.
        with_out_gate: out_gate, Option<OutGate>;
        /// Replaces the post gate.
        with_post_gate: post_gate, Option<PostGate>;
        /// Replaces the decay.
        with_decay: decay, Option<Decay>;
        /// Replaces the norm of q and k.
        with_qk_norm: qk_norm, Option<QkNorm>;
        /// Replaces the output norm.
        with_norm: norm, Norm;
        /// Turns RoPE on or off.
        with_rope: rope, bool;
        /// Replaces the width of the short convolution.
        with_conv: conv, Option<usize>;
    }

    /// w of near or far keys; `None` if far keys are masked.
    pub fn score_fn(&self, range: KeyRange) -> Option<&ScoreFn> {
        match range {
            KeyRange::Near => Some(&self.near),
            KeyRange::Far => self.far.as_ref(),
        }
    }

    /// The range of near keys.
    pub fn distance(&self) -> Distance {
        Distance { window: self.window.unwrap_or(usize::MAX), sinks: self.sinks.unwrap_or(0) }
    }

    /// S_t: number of keys visible at position t.
    pub fn visible(&self, t: usize) -> usize {
        let behind = self.distance().far(t).len();
        if self.far.is_some() {
            t + 1
        } else {
            t + 1 - behind + behind.min(self.heavy_hitters.map_or(0, |heavy_hitters| heavy_hitters.keys))
        }
    }

    /// The rescaling that keeps rows within float32. It needs a denominator or norm that cancels the factor.
    pub fn rescale(&self) -> Rescale {
        if !(self.denominator.sums() || self.norm.scale_free()) {
            return Rescale::None;
        }
        let kinds = KeyRange::ALL.map(|range| self.score_fn(range).map(|score_fn| score_fn.kernel.rescale()));
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

    /// Whether rows are still rescaled when the norm reads them.
    pub(crate) fn norm_restores_scale(&self) -> bool {
        self.rescale() != Rescale::None && !self.denominator.sums()
    }

    /// Whether the window is a ring buffer of unchanged keys: no projection or feature map, and no weights of keys other than scores.
    pub fn is_pooled(&self) -> bool {
        let plain = self.near.kernel.map() == Map::Identity && !self.near.kernel.has_learned_map() && self.near.dim.is_none();
        let unweighed = self.decay.is_none() && self.in_gate.is_none() && !self.denominator.key_side() && self.write.is_none();
        let finite = self.far.as_ref().is_none_or(ScoreFn::has_finite_map);
        self.window.is_some() && plain && unweighed && finite
    }

    /// Whether positions are evaluated sequentially because eviction depends on the data.
    pub fn is_sequential(&self) -> bool {
        self.heavy_hitters.is_some()
    }

    /// Whether it has a decay per head.
    pub(crate) fn decays_by_head(&self) -> bool {
        self.decay.as_ref().is_some_and(|decay| !decay.by_channel())
    }

    /// Whether it has a decay per channel of q and k.
    pub(crate) fn decays_by_channel(&self) -> bool {
        self.decay.as_ref().is_some_and(Decay::by_channel)
    }

    /// Warnings: numerical risks and missing recurrent forms.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let sign = self.sign();
        if self.denominator.sums() && !self.denominator.has_sink() && sign != Sign::Positive {
            let why = match (&self.near.kernel, sign) {
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
        match self.near.kernel.rescale() {
            Rescale::SubtractMax if !self.shifts() && !self.bounds_scores() => {
                warnings.push("no clamp, no sum and no scale-free norm: e^x overflows float32 for scores above 88".into());
            }
            Rescale::Multiply if self.rescale() == Rescale::None && !self.bounds_scores() => {
                warnings
                    .push("no clamp, no sum and no scale-free norm: a polynomial of this degree overflows float32 for large scores".into());
            }
            _ => {}
        }
        if matches!(self.near.kernel, Kernel::Taylor(_) | Kernel::Power(_)) && (self.near.clamp.is_some() || self.near.cap.is_some()) {
            warnings.push("a clamped polynomial has no finite feature map: no recurrent form".into());
        }
        if self.far.as_ref().is_some_and(|far| !far.has_finite_map()) {
            warnings.push("the far kernel has no finite feature map: generation keeps all keys instead of a state".into());
        }
        if let Some(delta) = self.write
            && self.has_unit_keys()
        {
            let largest: f64 = self.near.kernel.value(delta.scale);
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

    /// The possible signs of weights of near and far keys.
    fn sign(&self) -> Sign {
        match (self.near.kernel.sign(), self.far.as_ref().map_or(Sign::Positive, |far| far.kernel.sign())) {
            (Sign::Mixed, _) | (_, Sign::Mixed) => Sign::Mixed,
            // The position itself is near: its weight alone keeps the sum above zero.
            (near, _) => near,
        }
    }

    /// Whether scores cannot grow without bound.
    fn bounds_scores(&self) -> bool {
        self.near.clamp.is_some() || self.near.cap.is_some() || self.has_unit_keys()
    }

    /// Whether the keys that the kernel reads have length 1.
    fn has_unit_keys(&self) -> bool {
        let by_norm =
            matches!(self.qk_norm, Some(QkNorm::QkL2(_))) && self.near.dim.is_none() && matches!(self.near.kernel.map(), Map::Identity);
        matches!(&self.near.kernel, Kernel::Feature(feature) if feature.map == Map::L2) || (by_norm && !self.near.kernel.has_learned_map())
    }

    /// w of the keys in the recurrent state: far keys if there is a window, else all keys. `None` if far keys are masked.
    pub fn remembered(&self) -> Option<&ScoreFn> {
        if self.window.is_some() { self.far.as_ref() } else { Some(&self.near) }
    }

    /// Rows of the recurrent state for head dimension d: the size of the feature map of [`Variant::remembered`], 0 if far keys are masked.
    /// `None` if there is no finite feature map.
    pub fn state_rows(&self, d: usize) -> Option<u128> {
        self.remembered().map_or(Some(0), |score_fn| score_fn.state_rows(d))
    }

    /// Values per key in a cache for head dimension d: the key of the near branch, and that of the far branch if it differs.
    pub fn kept_width(&self, d: usize) -> usize {
        // A ring buffer computes the far key when a key is evicted.
        if self.is_pooled() { d } else { self.near.kept_width(self.far.as_ref(), d) }
    }

    /// float32 values in the recurrent state of one head: the state with its denominator, and the keys and values of
    /// the window and the sinks. `None` if there is no finite state.
    pub fn state_size(&self, d: usize, e: usize) -> Option<u128> {
        let columns = e as u128 + self.denominator.sums() as u128;
        let rows = self.state_rows(d)?.saturating_mul(columns);
        let keys = |window: usize| {
            window as u128 + self.sinks.unwrap_or(0) as u128 + self.heavy_hitters.map_or(0, |heavy_hitters| heavy_hitters.keys) as u128
        };
        // Quantized values, counted in float32.
        let [of_key, of_value] = self.bits.map_or([32, 32], |bits| [u128::from(bits.keys), u128::from(bits.values)]);
        let exact = self.window.map_or(0, |window| {
            let key_bits = of_key * self.kept_width(d) as u128 + of_value * e as u128;
            keys(window).saturating_mul(key_bits).div_ceil(32)
        });
        Some(rows.saturating_add(exact))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    fn variant(text: &str) -> Variant {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn a_maximum_is_subtracted_if_it_cancels() {
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
    fn warnings_name_numerical_risks() {
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
    fn state_sizes_match_the_specification() {
        assert_eq!(variant("taylor=0..2 over=sum").state_size(64, 64), Some(139_425));
        assert_eq!(variant("taylor=0..2 over=length").state_size(64, 64), Some(139_425 / 65 * 64));
        assert_eq!(variant("taylor=0..4 over=sum").state_size(16, 16), Some(82_365));
        assert_eq!(variant("feature=elu over=sum").state_size(64, 64), Some(64 * 65));
        assert_eq!(variant("power=2 over=none").state_rows(3), Some(6));
        assert_eq!(variant("softmax").state_rows(64), None);
        assert_eq!(variant("taylor=0..2 clamp=5").state_rows(64), None);
        assert_eq!(variant("taylor=0..150").state_size(256, 256), Some(u128::MAX));
    }
}
