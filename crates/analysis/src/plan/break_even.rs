//! Break-even contexts of recurrent states and KV caches.

use serde::{Deserialize, Serialize};

use super::count::{Attention, Work};
use super::hardware::Hardware;

/// Break-even context lengths in tokens; absent without a state, or if a cache is always better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BreakEven {
    /// Where a cache has the size of the state, to the nearest token; its blocks of 128 tokens are not rounded up.
    pub memory: Option<u64>,
    /// From which a decoding step with the state is not slower than with a cache, for attention only.
    pub decode: Option<u64>,
    /// From which prefill in chunks is not slower than in parallel mode, for attention only.
    pub chunk: Option<u64>,
    /// From which [`Mode::Auto`](termwise_attention::Mode::Auto) trains in chunks, by rates measured forward and backward; only if all heads have one variant.
    pub auto: Option<u64>,
}

/// Upper bound of contexts.
const MAX_CONTEXT: u64 = 1 << 40;

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
            // A prompt within one chunk is computed in parallel and also produces a state.
            chunk: first(|t| t > chunk && no_longer(counts.chunk(t, chunk), counts.parallel(t))),
            auto,
        }
    }
}

/// The smallest number for which a monotonic predicate is true.
fn first(holds: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut low, mut high) = (0, 1);
    while !holds(high) {
        if high >= MAX_CONTEXT {
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
    fn the_smallest_number_is_found() {
        for n in [1, 2, 3, 4, 5, 1000, 1089, MAX_CONTEXT] {
            assert_eq!(first(|t| t >= n), Some(n));
        }
        assert_eq!(first(|_| false), None);
    }
}
