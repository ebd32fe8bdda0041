//! Contexts from which a state is worth it.

use serde::{Deserialize, Serialize};

use super::count::{Attention, Work};
use super::hardware::Hardware;

/// Tokens of context; absent where there is no state, or where a cache stays better for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BreakEven {
    /// At which a cache is as large as the state, to the nearest token; its blocks of 128 tokens are not rounded up.
    pub memory: Option<u64>,
    /// From which on a token with the state takes no longer than with a cache, attention alone.
    pub decode: Option<u64>,
    /// From which on a prompt in chunks takes no longer than in parallel, attention alone.
    pub chunk: Option<u64>,
    /// From which on this engine trains in chunks by itself (`auto`): rates measured forward and backward; for one variant alone.
    pub auto: Option<u64>,
}

/// No context is longer.
const LONGEST: u64 = 1 << 40;

impl BreakEven {
    pub(super) fn of(counts: &Attention, chunk: u64, hardware: &Hardware, auto: Option<u64>) -> BreakEven {
        if !counts.has_state() {
            return BreakEven { memory: None, decode: None, chunk: None, auto: None };
        }
        let saved = counts.cache_growth().saturating_sub(counts.growth());
        let no_longer = |ours: Work, theirs: Work| hardware.seconds(ours) <= hardware.seconds(theirs);
        BreakEven {
            memory: (saved > 0).then(|| (4.0 * counts.state as f64 / saved as f64).round() as u64),
            decode: first(|t| no_longer(counts.recurrent(t), counts.cached(t))),
            // A prompt within one chunk is computed in parallel, and leaves a state behind as well.
            chunk: first(|t| t > chunk && no_longer(counts.chunk(t, chunk), counts.parallel(t))),
            auto,
        }
    }
}

/// The least number for which this holds; it must hold for all larger ones too.
fn first(holds: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut low, mut high) = (0, 1);
    while !holds(high) {
        if high >= LONGEST {
            return None;
        }
        (low, high) = (high, high * 2);
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    Some(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_found_whatever_it_is() {
        for n in [1, 2, 3, 4, 5, 1000, 1089, LONGEST] {
            assert_eq!(first(|t| t >= n), Some(n));
        }
        assert_eq!(first(|_| false), None);
    }
}
