//! Random y and j3.

use super::Setting;
use termwise_base::rng::Rng;

/// One draw of the readout and of the position of the spike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Row of the spike, counted from 0.
    pub j3: u64,
    /// Number of words of a vector.
    width: usize,
    /// One bit per column of each y_i, set for −1.
    bits: Vec<u64>,
}

impl Draw {
    /// Draw `index` of this seed: depends only on these and on n, d and m.
    pub fn new(setting: &Setting, seed: u64, index: u64) -> Draw {
        let key = Rng::named(seed, "separation").bits();
        // The output of one generator seeds another: neighbouring indices are independent.
        let mut rng = Rng::new(Rng::new(key.wrapping_add(index)).bits());
        let j3 = rng.bits() % setting.n;
        let width = setting.d.div_ceil(64);
        Draw { j3, width, bits: (0..width * setting.m).map(|_| rng.bits()).collect() }
    }

    /// A given draw: −1 where a vector is true, per column. Vectors have equal lengths.
    pub fn of(j3: u64, vectors: &[Vec<bool>]) -> Draw {
        let width = vectors.first().map_or(1, |y| y.len().div_ceil(64));
        let word = |y: &[bool]| y.iter().enumerate().fold(0u64, |word, (k, negative)| word | (*negative as u64) << k);
        Draw { j3, width, bits: vectors.iter().flat_map(|y| y.chunks(64).map(word)).collect() }
    }

    /// Whether y_i is −1 in this column, both counted from 0.
    pub fn negative(&self, i: usize, column: usize) -> bool {
        bit(&self.bits[i * self.width..], column)
    }

    /// The words of each y_i.
    pub(super) fn vectors(&self) -> impl Iterator<Item = &[u64]> {
        self.bits.chunks_exact(self.width)
    }
}

pub(super) fn bit(words: &[u64], column: usize) -> bool {
    words[column / 64] >> (column % 64) & 1 == 1
}
