//! Random numbers and permutations with random access by index.

use termwise_base::rng::{GOLDEN, mix};

/// A hash in which every bit depends on all of the words.
pub(super) fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0x243f_6a88_85a3_08d3, |state: u64, &word| mix((state ^ word).wrapping_add(GOLDEN)))
}

/// A number below `n` > 0 from 64 random bits, with a bias below n/2^64.
pub(super) fn below(bits: u64, n: u64) -> u64 {
    ((bits as u128 * n as u128) >> 64) as u64
}

/// Element `index` < `n` of a random permutation of 0..n that depends on the key.
///
/// A Feistel network permutes the next power of four; results beyond n are permuted again.
pub(super) fn permuted(key: u64, n: u64, index: u64) -> u64 {
    debug_assert!(index < n);
    if n <= 1 {
        return 0;
    }
    let half = (64 - (n - 1).leading_zeros()).div_ceil(2);
    let mask = (1u64 << half) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..6 {
            (left, right) = (right, left ^ (hash(&[key, round, right]) & mask));
        }
        value = left << half | right;
        if value < n {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_occurs_once() {
        for n in [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097] {
            let mut seen: Vec<u64> = (0..n).map(|i| permuted(7, n, i)).collect();
            assert!(n < 5 || !seen.is_sorted(), "the permutation of {n} does nothing");
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..n), "{n}");
        }
    }

    #[test]
    fn keys_give_unrelated_permutations_without_fixed_points() {
        let order = |key| (0..1000).map(|i| permuted(key, 1000, i)).collect::<Vec<_>>();
        assert_ne!(order(1), order(2));
        // Each position should have each value about equally often: the mean of the first element over keys is near the middle.
        let mean = (0..2000).map(|key| permuted(key, 1000, 0)).sum::<u64>() as f64 / 2000.0;
        assert!((mean - 499.5).abs() < 30.0, "{mean}");
    }

    #[test]
    fn values_are_pinned() {
        // A change of these values changes the batches of every run.
        assert_eq!((hash(&[1, 2, 3]), permuted(1, 1000, 0), below(1 << 63, 10)), PINNED);
    }

    const PINNED: (u64, u64, u64) = (14_811_618_279_488_048_801, 314, 5);
}
