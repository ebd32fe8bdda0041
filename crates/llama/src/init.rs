//! How fresh models start: Hugging Face's start of a Llama.
//!
//! Numbers are a function of (seed, name of the tensor, index): not of threads, of the platform or of other tensors, so that two
//! variants of one model start with the same values wherever they have the same tensors.

use rayon::prelude::*;

use crate::config::{Config, ParamInit};
use crate::ops::vector::PIECE;
use crate::params::Params;
use crate::splitmix::{RANGE, bits, mix};

/// Linear weights and the embedding normal with `initializer_range`, biases 0, norms 1, additional parameters as their parts say.
pub fn initialize(params: &mut Params, config: &Config, seed: u64) {
    let layout = params.layout().clone();
    for entry in layout.entries() {
        let stream = Stream::new(seed, &entry.spec.name);
        let values = &mut params.values_mut()[entry.range()];
        match entry.spec.init {
            ParamInit::Normal => stream.normal(values, config.initializer_range),
            ParamInit::Constant(value) => values.fill(value as f32),
            ParamInit::Uniform(bound) => stream.uniform(values, bound),
        }
    }
}

/// A sequence of random numbers in which every element is computed from its index: SplitMix64 with a key.
#[derive(Clone, Copy)]
struct Stream(u64);

impl Stream {
    fn new(seed: u64, name: &str) -> Stream {
        // FNV-1a, then mixed with the seed: names that differ in one letter get unrelated keys.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3));
        Stream(mix(mix(seed) ^ hash))
    }

    /// Uniform above 0 and at most 1, in steps of 2^−53.
    fn unit(self, index: u64) -> f64 {
        (bits(self.0, index) + 1) as f64 / RANGE
    }

    fn normal(self, values: &mut [f32], deviation: f64) {
        // Box and Muller: two numbers from two. Logarithm and cosine come from `libm`, whose bits are the same on every platform.
        values.par_chunks_mut(PIECE).enumerate().for_each(|(piece, values)| {
            for (pair, values) in values.chunks_mut(2).enumerate() {
                let index = (piece * PIECE + 2 * pair) as u64;
                let radius = deviation * (-2.0 * libm::log(self.unit(index))).sqrt();
                let angle = std::f64::consts::TAU * self.unit(index + 1);
                for (value, direction) in values.iter_mut().zip([libm::cos(angle), libm::sin(angle)]) {
                    *value = (radius * direction) as f32;
                }
            }
        });
    }

    fn uniform(self, values: &mut [f32], bound: f64) {
        values.iter_mut().enumerate().for_each(|(i, value)| *value = (bound * (2.0 * self.unit(i as u64) - 1.0)) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::with_threads;

    #[test]
    fn normal_numbers_have_the_right_moments() {
        let mut values = vec![0.0; 200_001];
        Stream::new(7, "w").normal(&mut values, 0.02);
        let moment = |n: i32| values.iter().map(|&x| (x as f64 / 0.02).powi(n)).sum::<f64>() / values.len() as f64;
        assert!(moment(1).abs() < 0.01, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.02, "variance {}", moment(2));
        assert!(moment(3).abs() < 0.05, "skewness {}", moment(3));
        assert!((moment(4) - 3.0).abs() < 0.1, "kurtosis {}", moment(4));
        let neighbours = values.windows(2).map(|w| w[0] as f64 * w[1] as f64 / 4e-4).sum::<f64>() / values.len() as f64;
        assert!(neighbours.abs() < 0.01, "correlation of neighbours {neighbours}");
    }

    #[test]
    fn uniform_numbers_fill_their_range() {
        let mut values = vec![0.0; 10_000];
        Stream::new(7, "w").uniform(&mut values, 0.5);
        let (low, high) = values.iter().fold((0.0f32, 0.0f32), |(low, high), &x| (low.min(x), high.max(x)));
        assert!(low < -0.49 && high > 0.49 && low >= -0.5 && high <= 0.5, "{low} {high}");
    }

    #[test]
    fn numbers_depend_on_seed_and_name_but_not_on_threads() {
        let run = |seed, name: &'static str, threads| {
            with_threads(threads, move || {
                let mut values = vec![0.0; 3 * PIECE + 5];
                Stream::new(seed, name).normal(&mut values, 1.0);
                values
            })
        };
        assert_eq!(run(1, "a", 1), run(1, "a", 3));
        assert_ne!(run(1, "a", 1), run(2, "a", 1));
        assert_ne!(run(1, "a", 1), run(1, "b", 1));
        // Pinned: a change of these digits changes every run that starts from a seed.
        assert_eq!(run(1, "a", 1)[..3], PINNED);
    }

    const PINNED: [f32; 3] = [-0.17961474, -0.41067076, -0.1741243];
}
