//! Heavy hitters: outside the window, the N keys with the largest accumulated attention (H2O-style eviction)
//!
//! ```text
//! r_s ← e^{−1/L}·r_s + Σ_h w_ts / Σ_s' w_ts'        s' over the keys in the cache, h over the heads that share them; L = ∞ unless given
//! ```
//!
//! A key that leaves the window takes a free slot, or evicts the key with the smallest r if its own r is larger. Evicted keys are far.
//! Without `fade` all queries since a key was written have equal weight (H2O). With `fade=L` about the last L queries count (a moving
//! observation window, as in SnapKV).

/// Maximum number of heads of one kv head that can share heavy hitters.
pub(crate) const MAX_SHARING_HEADS: usize = 64;

/// The number of heavy hitters and the time constant of their accumulated attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeavyHitters {
    /// Number of keys, N.
    pub keys: usize,
    /// Time constant of the accumulated attention in queries, L; `None`: it does not fade.
    pub fade: Option<usize>,
}

impl HeavyHitters {
    /// The factor of r at each position.
    pub fn factor(self) -> f32 {
        self.fade.map_or(1.0, |fade| (-1.0 / fade as f32).exp())
    }

    /// The value in a variant string.
    pub fn text(self) -> String {
        match self.fade {
            Some(fade) => format!("{},fade={fade}", self.keys),
            None => self.keys.to_string(),
        }
    }

    /// Parses `N` or `N,fade=L`.
    pub fn read(text: &str) -> Result<HeavyHitters, String> {
        let wrong =
            || format!("`chosen` takes a number of keys and an optional fade, as in `chosen=32` or `chosen=32,fade=64`, found `{text}`");
        let (keys, fade) = match text.split_once(',') {
            Some((keys, fade)) => (keys, Some(fade.trim().strip_prefix("fade=").ok_or_else(wrong)?)),
            None => (text, None),
        };
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|&n| n > 0).ok_or_else(wrong);
        Ok(HeavyHitters { keys: number(keys)?, fade: fade.map(number).transpose()? })
    }

    /// The index of the smallest accumulated attention, the first of equal ones: the key to evict.
    pub fn evicted<R: PartialOrd + Copy>(accumulated: &[R]) -> usize {
        let mut least = 0;
        for (i, r) in accumulated.iter().enumerate() {
            if *r < accumulated[least] {
                least = i;
            }
        }
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_round_trip() {
        for text in ["1", "32", "32,fade=64"] {
            assert_eq!(HeavyHitters::read(text).map(HeavyHitters::text), Ok(text.to_string()));
        }
        for text in ["0", "", "x", "3,4", "3,fade=0", "3,fade=x", "-1"] {
            assert!(HeavyHitters::read(text).is_err(), "{text}");
        }
        assert_eq!((HeavyHitters::evicted(&[3.0, 1.0, 1.0, 2.0]), HeavyHitters::evicted(&[0.0])), (1, 0));
    }
}
