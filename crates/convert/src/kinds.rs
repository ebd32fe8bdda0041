//! The kinds of memory that a kv head can have.

use serde::{Deserialize, Serialize};
use termwise_attention::Variant;
use termwise_lab::plan::count::{Attention, Sizes};

use crate::Error;

/// Dimensions of the scores of far keys.
pub const FAR_DIM: usize = 4;
/// Keys at the start that every kind keeps.
pub const SINKS: usize = 4;
/// Queries by which chosen keys are chosen, where these fade.
pub const FADE: usize = 64;

/// What remains of far keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Far {
    /// Nothing.
    #[default]
    None,
    /// The mean of their values, by a weight.
    Mean,
    /// Moments of orders 0 to 2 in few dimensions around the mean key.
    State,
    /// Learned features φ(q)·φ(k), trained on the same contexts.
    Hedgehog,
    /// The far state over all positions: no exact key but the position's own.
    Polynomial,
    /// Orders 0 and 1 of e^x over all positions, and no exact key.
    Taylor1,
    /// Orders 0 to 2.
    Taylor2,
}

impl Far {
    /// Whether it stands for all positions, so that its memory grows by its dimensions and not by exact keys.
    pub fn over_all(self) -> bool {
        matches!(self, Far::Polynomial | Far::Taylor1 | Far::Taylor2)
    }

    /// Whether its tensors are fitted only where it is asked for.
    pub fn is_rival(self) -> bool {
        matches!(self, Far::Hedgehog | Far::Polynomial)
    }
}

/// A memory: the last keys, the first ones, some between that are chosen, in so many bits, and what remains of the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Kind {
    /// W
    pub window: usize,
    /// S
    pub sinks: usize,
    /// N
    pub chosen: usize,
    /// Whether what keys received fades.
    pub fade: bool,
    /// Bits of keys and values; 32 for float32.
    pub bits: u32,
    /// Far keys.
    pub far: Far,
    /// Dimensions of the scores of rivals of the far state; 0 for all that there are, without a projection.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dim: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl Kind {
    /// A window and the usual sinks in float32.
    pub fn window(window: usize) -> Kind {
        Kind { window, sinks: SINKS, bits: 32, ..Kind::default() }
    }

    /// The attention of a head that is a plain softmax so far.
    pub fn variant(&self, own: &Variant) -> Result<Variant, Error> {
        if !is_convertible(own) {
            return Err(Error::Asked(format!("`{own}` is no softmax over all keys: its memory cannot be exchanged")));
        }
        let dim = if self.dim > 0 { format!(" dim={}", self.dim) } else { String::new() };
        if let Some(orders) = match self.far {
            Far::Taylor1 => Some("0..1"),
            Far::Taylor2 => Some("0..2"),
            _ => None,
        } {
            // The scale of scores is in the projection, where there is one.
            let series: Variant = format!("taylor={orders}{dim}{}", if self.dim > 0 { " scale=1" } else { "" }).parse()?;
            return Ok(Variant { kernel: series.kernel, dim: series.dim, scale: series.scale.or(own.scale), ..own.clone() });
        }
        let mut text = format!("{own} window={}", self.window.max(1));
        if self.sinks > 0 {
            text += &format!(" sinks={}", self.sinks);
        }
        if self.chosen > 0 {
            text += &format!(" chosen={}", self.chosen);
            if self.fade {
                text += &format!(",fade={FADE}");
            }
        }
        if self.bits < 32 {
            text += &format!(" bits={}", self.bits);
        }
        match self.far {
            Far::Hedgehog => text += &format!(" far(feature=hedgehog scale=1{dim})"),
            Far::Polynomial => text += &format!(" far(taylor=0..2,coef=learned scale=1{dim} centre=whole,gauss)"),
            Far::None | Far::Taylor1 | Far::Taylor2 => {}
            Far::Mean => text += &format!(" far(taylor=0,coef=learned scale=1 dim={FAR_DIM} centre=whole,gauss)"),
            Far::State => text += &format!(" far(taylor=0..2,coef=learned scale=1 dim={FAR_DIM} centre=whole,gauss)"),
        }
        Ok(text.parse()?)
    }

    /// Bytes that one kv head of dimension d keeps, from the counter that knows the buffers.
    pub fn bytes(&self, d: usize) -> u64 {
        let variant = self.variant(&Variant::default()).expect("a kind is a variant of softmax");
        let counted = Attention::of_layer(&[variant], Sizes { kv_heads: 1, d });
        if counted.growth() > 0 { u64::MAX } else { counted.kept_bytes(0) }
    }

    /// Dimensions of far scores of the heads of dimension d.
    pub fn far_dim(&self, d: usize) -> usize {
        match self.far {
            Far::Mean | Far::State => FAR_DIM.min(d),
            _ if self.dim == 0 => d,
            _ => self.dim,
        }
    }

    /// The largest of a family, by its window and what follows from that, within so many bytes; `None` where not even the smallest fits.
    pub fn largest(d: usize, bytes: u64, family: impl Fn(usize) -> Kind) -> Option<Kind> {
        let fits = |size: usize| family(size).bytes(d) <= bytes;
        if !fits(1) {
            return None;
        }
        let (mut low, mut high) = (1, 2);
        while high < 1 << 24 && fits(high) {
            (low, high) = (high, 2 * high);
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle) { low = middle } else { high = middle }
        }
        Some(family(low))
    }

    /// For tables.
    pub fn label(&self) -> String {
        let dim = if self.dim > 0 { format!(" in {} dimensions", self.dim) } else { String::new() };
        match self.far {
            Far::Polynomial => return format!("polynomial over all positions{dim}"),
            Far::Taylor1 => return format!("Taylor's orders 0 and 1 over all positions{dim}"),
            Far::Taylor2 => return format!("Taylor's orders 0 to 2 over all positions{dim}"),
            _ => {}
        }
        let mut words = vec![format!("window {}", self.window)];
        if self.chosen > 0 {
            words.push(format!("{} chosen{}", self.chosen, if self.fade { " lately" } else { "" }));
        }
        if self.bits < 32 {
            words.push(format!("{} bits", self.bits));
        }
        match self.far {
            Far::None => {}
            Far::Mean => words.push("far mean".into()),
            Far::Hedgehog => words.push(format!("learned features{dim}")),
            _ => words.push("far state".into()),
        }
        words.join(", ")
    }
}

/// Whether a head's memory can be exchanged: a softmax over all keys, whose keys are kept as they are.
pub fn is_convertible(own: &Variant) -> bool {
    own.window.is_none()
        && own.far.is_none()
        && Variant { window: Some(1), ..own.clone() }.is_pooled()
        && own.kernel == Variant::default().kernel
}

/// Bytes of one key and value of dimension d in float32: what budgets in keys are counted in.
pub fn key_bytes(d: usize) -> u64 {
    8 * d as u64
}

/// A way to choose memories for all kv heads from a few numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Family {
    /// Whether half of the keys are chosen ones.
    pub chosen: bool,
    /// Whether what keys received fades.
    pub fade: bool,
    /// Bits.
    pub bits: u32,
    /// Far keys.
    pub far: Far,
    /// The head dimension is divided by this for learned features.
    pub divisor: usize,
}

impl Family {
    /// A window and nothing else.
    pub const WINDOW: Family = Family { chosen: false, fade: false, bits: 32, far: Far::None, divisor: 1 };

    /// Its member with so many exact keys besides the sinks.
    pub fn of(self, keys: usize) -> Kind {
        let chosen = if self.chosen { keys / 2 } else { 0 };
        Kind { window: (keys - chosen).max(1), sinks: SINKS, chosen, fade: self.fade && chosen > 0, bits: self.bits, far: self.far, dim: 0 }
    }

    /// Its largest member for heads of dimension d within so many bytes: by its exact keys, or by the dimensions of what stands for all positions. Learned
    /// features have all dimensions, divided by `divisor`, halved while they take more than 55 % of the bytes.
    pub fn largest(self, d: usize, bytes: u64) -> Option<Kind> {
        let reduced = |dim: usize| if dim == d && self.far != Far::Polynomial { 0 } else { dim };
        if self.far.over_all() {
            let window = usize::from(self.far == Far::Polynomial);
            let of = |dim: usize| Kind { window, bits: 32, far: self.far, dim: reduced(dim), ..Kind::default() };
            return (1..=d).rev().map(of).find(|kind| kind.bytes(d) <= bytes);
        }
        let mut dim = 0;
        if self.far == Far::Hedgehog {
            let features =
                |dim: usize| Kind { far: Far::Hedgehog, dim: reduced(dim), ..Kind::window(1) }.bytes(d) - Kind::window(1).bytes(d);
            let mut wanted = (d / self.divisor.max(1)).max(1);
            while wanted > 1 && features(wanted) as f64 > 0.55 * bytes as f64 {
                wanted /= 2;
            }
            dim = reduced(wanted);
        }
        Kind::largest(d, bytes, |keys| Kind { dim, ..self.of(keys) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_variants_and_budgets_are_kept() {
        let own = Variant::default();
        for bits in [32, 8, 4] {
            for far in [Far::None, Far::Mean, Far::State] {
                for (chosen, fade) in [(false, false), (true, false), (true, true)] {
                    let family = Family { chosen, fade, bits, far, divisor: 1 };
                    for keys in [1, 2, 64, 333] {
                        let kind = family.of(keys);
                        let variant = kind.variant(&own).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
                        assert_eq!(variant.to_string().parse::<Variant>().as_ref(), Ok(&variant));
                        assert!(!is_convertible(&variant));
                    }
                    for budget in [64u64, 512] {
                        let bytes = budget * key_bytes(64);
                        let kind = Kind::largest(64, bytes, |keys| family.of(keys)).expect("it fits");
                        assert!(kind.bytes(64) <= bytes && kind.bytes(64) > bytes * 9 / 10, "{kind:?} {} of {bytes}", kind.bytes(64));
                    }
                }
            }
        }
        assert!(Kind::largest(64, 100, Kind::window).is_none());
        for far in [Far::Hedgehog, Far::Polynomial, Far::Taylor1, Far::Taylor2] {
            for (divisor, budget) in [(1, 64u64), (4, 64), (1, 512)] {
                let bytes = budget * key_bytes(64);
                let kind = Family { far, divisor, ..Family::WINDOW }.largest(64, bytes).expect("it fits");
                let variant = kind.variant(&own).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
                assert_eq!(variant.to_string().parse::<Variant>().as_ref(), Ok(&variant));
                assert!(
                    kind.bytes(64) <= bytes && (kind.bytes(64) > bytes * 4 / 5 || kind.dim == 0),
                    "{kind:?} {} of {bytes}",
                    kind.bytes(64)
                );
            }
        }
        let (small, large) = (64 * key_bytes(64), 512 * key_bytes(64));
        let dims = |far: Far, bytes: u64| Family { far, ..Family::WINDOW }.largest(64, bytes).map(|kind| kind.dim);
        assert_eq!((dims(Far::Taylor1, small), dims(Far::Taylor2, large)), (Some(0), Some(43)));
        assert_eq!((dims(Far::Hedgehog, small), dims(Far::Hedgehog, large)), (Some(32), Some(0)));
        assert_eq!(dims(Far::Hedgehog, 100 * key_bytes(64)), Some(32));
        assert!(is_convertible(&own) && !is_convertible(&"taylor=0..2".parse().expect("a variant")));
    }
}
