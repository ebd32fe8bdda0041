//! The kinds of memory that a KV head can have.

use std::fmt;

use crate::plan::count::{Attention, Sizes};
use serde::{Deserialize, Serialize};
use termwise_attention::Variant;
use termwise_attention::parts::heavy_hitters::HeavyHitters;
use termwise_attention::parts::quantize::CacheBits;

use crate::kv::Error;

/// Number of sinks of every kind: keys at the start of the sequence.
pub const SINKS: usize = 4;
/// Time constant of fading accumulated attention, in queries.
pub const FADE: usize = 64;

/// A kind of memory: sinks, window and heavy hitters, and the bits in which they are stored.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Kind {
    /// Length of the window.
    pub window: usize,
    /// Number of sinks.
    pub sinks: usize,
    /// Number of heavy hitters.
    #[serde(alias = "chosen")]
    pub heavy_hitters: usize,
    /// Whether accumulated attention fades.
    pub fade: bool,
    /// Bits of keys: 16, 8 or 4.
    pub key_bits: u32,
    /// Bits of values: 16, 8 or 4.
    pub value_bits: u32,
}

/// Keys of journals and checksums of records contain this text, so it has the field names of the builds that wrote them.
impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Kind { window, sinks, heavy_hitters, fade, key_bits, value_bits } = self;
        let mut fields = f.debug_struct("Kind");
        fields.field("window", window).field("sinks", sinks).field("chosen", heavy_hitters).field("fade", fade);
        fields.field("key_bits", key_bits).field("value_bits", value_bits).finish()
    }
}

impl Kind {
    /// A window and the usual sinks in 16 bits.
    pub fn window(window: usize) -> Kind {
        Family::WINDOW.of(window)
    }

    /// The variant of a head with this memory; `own` must be softmax over all keys.
    pub fn variant(&self, own: &Variant) -> Result<Variant, Error> {
        if !is_convertible(own) {
            return Err(Error::Request(format!("`{own}` is not softmax over all keys: its memory cannot be replaced")));
        }
        let heavy_hitters = HeavyHitters { keys: self.heavy_hitters, fade: self.fade.then_some(FADE) };
        let variant = own
            .clone()
            .with_window(self.window.max(1))
            .with_sinks(Some(self.sinks).filter(|&sinks| sinks > 0))
            .with_heavy_hitters(Some(heavy_hitters).filter(|heavy_hitters| heavy_hitters.keys > 0))
            .with_bits(Some(CacheBits { keys: self.key_bits, values: self.value_bits }));
        variant.validate()?;
        Ok(variant)
    }

    /// Bytes of one KV head of dimension d, as counted by `plan`.
    pub fn bytes(&self, d: usize) -> u64 {
        let variant = self.variant(&Variant::default()).expect("a kind is a variant of softmax");
        let counted = Attention::of_layer(&[variant], Sizes { kv_heads: 1, d });
        if counted.growth() > 0 { u64::MAX } else { counted.kept_bytes(0) }
    }

    /// Description in tables.
    pub fn label(&self) -> String {
        let heavy_hitters = match (self.heavy_hitters, self.fade) {
            (0, _) => String::new(),
            (keys, false) => format!(", {keys} heavy hitters"),
            (keys, true) => format!(", {keys} recent heavy hitters"),
        };
        let bits = match (self.key_bits, self.value_bits) {
            (keys, values) if keys == values => format!("{keys} bits"),
            (keys, values) => format!("{keys}-bit keys, {values}-bit values"),
        };
        format!("window {}{heavy_hitters}, {bits}", self.window)
    }
}

/// Whether the memory of a head can be replaced: softmax over all keys, with unmodified keys.
pub fn is_convertible(own: &Variant) -> bool {
    own.window.is_none() && own.far.is_none() && own.clone().with_window(1).is_pooled() && own.near.kernel == Variant::default().near.kernel
}

/// Bytes of one key and value of dimension d in 16 bits: the unit of budgets in keys.
pub fn key_bytes(d: usize) -> u64 {
    4 * d as u64
}

/// Kinds that differ only in their number of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Family {
    /// Whether half of the keys are heavy hitters.
    #[serde(alias = "chosen")]
    pub heavy_hitters: bool,
    /// Whether accumulated attention fades.
    pub fade: bool,
    /// Bits of keys and values.
    pub bits: [u32; 2],
}

impl Family {
    /// A window in 16 bits.
    pub const WINDOW: Family = Family { heavy_hitters: false, fade: false, bits: [16, 16] };

    /// The member with this number of keys in addition to the sinks.
    pub fn of(self, keys: usize) -> Kind {
        let heavy_hitters = if self.heavy_hitters { keys / 2 } else { 0 };
        let [key_bits, value_bits] = self.bits;
        Kind {
            window: (keys - heavy_hitters).max(1),
            sinks: SINKS,
            heavy_hitters,
            fade: self.fade && heavy_hitters > 0,
            key_bits,
            value_bits,
        }
    }

    /// Its largest member for heads of dimension d within a byte budget; `None` if the smallest does not fit.
    pub fn largest(self, d: usize, bytes: u64) -> Option<Kind> {
        let fits = |keys: usize| self.of(keys).bytes(d) <= bytes;
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
        Some(self.of(low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_earlier_builds_load() {
        let text = r#"{"window": 8, "sinks": 4, "chosen": 3, "fade": true, "key_bits": 8, "value_bits": 4}"#;
        let kind: Kind = serde_json::from_str(text).expect("a kind");
        assert_eq!(kind, Kind { window: 8, sinks: 4, heavy_hitters: 3, fade: true, key_bits: 8, value_bits: 4 });
        assert_eq!(format!("{kind:?}"), "Kind { window: 8, sinks: 4, chosen: 3, fade: true, key_bits: 8, value_bits: 4 }");
        let written = serde_json::to_string(&kind).expect("JSON");
        assert!(written.contains("\"heavy_hitters\":3") && !written.contains("chosen"), "{written}");
    }

    #[test]
    fn kinds_are_variants_within_their_budget() {
        let own = Variant::default();
        for bits in [[16, 16], [8, 8], [8, 4], [4, 4]] {
            for (heavy_hitters, fade) in [(false, false), (true, false), (true, true)] {
                let family = Family { heavy_hitters, fade, bits };
                for keys in [1, 2, 64, 333] {
                    let kind = family.of(keys);
                    let variant = kind.variant(&own).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
                    assert_eq!(variant.to_string().parse::<Variant>().as_ref(), Ok(&variant));
                    assert!(!is_convertible(&variant));
                }
                for budget in [64u64, 512] {
                    let bytes = budget * key_bytes(64);
                    let kind = family.largest(64, bytes).expect("it fits");
                    assert!(kind.bytes(64) <= bytes && kind.bytes(64) > bytes * 9 / 10, "{kind:?} {} of {bytes}", kind.bytes(64));
                }
            }
        }
        assert!(Family::WINDOW.largest(64, 100).is_none());
        assert!(is_convertible(&own) && !is_convertible(&"taylor=0..2".parse().expect("a variant")));
    }
}
