//! A counter-based random number generator: SplitMix64 (Steele, Lea and Flood 2014) with a key. Results are the same on every platform and for any
//! number of threads.

use rayon::prelude::*;
use termwise_base::rng::{GOLDEN, mix};

use crate::ops::chunks::CHUNK_LEN;

/// 2^53
const RANGE: f64 = (1u64 << 53) as f64;

/// A sequence of random numbers. Each number is a function of a key and its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexedRng(u64);

impl IndexedRng {
    /// The sequence of a seed. Sequences of neighbouring seeds are independent.
    pub fn new(seed: u64) -> IndexedRng {
        IndexedRng(mix(mix(seed ^ 0x7465_726d_7769_7365)))
    }

    /// The sequence of a seed and a name. Sequences of similar names are independent.
    pub fn named(seed: u64, name: &str) -> IndexedRng {
        // FNV-1a.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3));
        IndexedRng(mix(mix(seed) ^ hash))
    }

    /// Element `index`, uniform in [0, 1), a multiple of 2^−53.
    pub fn unit(self, index: u64) -> f64 {
        self.bits(index) as f64 / RANGE
    }

    /// Fills `values` with normal numbers with mean zero.
    pub fn normal(self, values: &mut [f32], deviation: f64) {
        // Box-Muller transform. The functions of `libm` are bit-identical on every platform.
        values.par_chunks_mut(CHUNK_LEN).enumerate().for_each(|(chunk, values)| {
            for (pair, values) in values.chunks_mut(2).enumerate() {
                let index = (chunk * CHUNK_LEN + 2 * pair) as u64;
                let radius = deviation * (-2.0 * libm::log(self.positive(index))).sqrt();
                let angle = std::f64::consts::TAU * self.positive(index + 1);
                for (value, direction) in values.iter_mut().zip([libm::cos(angle), libm::sin(angle)]) {
                    *value = (radius * direction) as f32;
                }
            }
        });
    }

    /// Fills `values` with uniform numbers in [−`bound`, `bound`].
    pub fn uniform(self, values: &mut [f32], bound: f64) {
        values.iter_mut().enumerate().for_each(|(i, value)| *value = (bound * (2.0 * self.positive(i as u64) - 1.0)) as f32);
    }

    /// Element `index`, uniform in (0, 1], so its logarithm is finite.
    fn positive(self, index: u64) -> f64 {
        (self.bits(index) + 1) as f64 / RANGE
    }

    /// 53 random bits.
    fn bits(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN))) >> 11
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::with_threads;

    #[test]
    fn numbers_are_uniform_on_the_unit_interval() {
        let n = 100_000;
        let mut counts = [0; 20];
        for i in 0..n {
            let (a, b) = (IndexedRng::new(5).unit(i), IndexedRng::new(i).unit(5));
            assert!((0.0..1.0).contains(&a) && (0.0..1.0).contains(&b));
            counts[(a * 10.0) as usize] += 1;
            counts[10 + (b * 10.0) as usize] += 1;
        }
        // 10,000 expected in each, with a deviation of 95.
        assert!(counts.iter().all(|&count: &i32| (count - 10_000).abs() < 500), "{counts:?}");
    }

    #[test]
    fn neighbouring_numbers_are_uncorrelated() {
        let n = 100_000;
        let product = |f: &dyn Fn(u64) -> (f64, f64)| (0..n).map(f).map(|(a, b)| (a - 0.5) * (b - 0.5)).sum::<f64>() / n as f64 * 12.0;
        assert!(product(&|i| (IndexedRng::new(1).unit(i), IndexedRng::new(1).unit(i + 1))).abs() < 0.02);
        assert!(product(&|i| (IndexedRng::new(i).unit(0), IndexedRng::new(i + 1).unit(0))).abs() < 0.02);
        assert!(product(&|i| (IndexedRng::new(i).unit(1), IndexedRng::new(i + 1).unit(0))).abs() < 0.02);
    }

    #[test]
    fn normal_numbers_have_the_right_moments() {
        let mut values = vec![0.0; 200_001];
        IndexedRng::named(7, "w").normal(&mut values, 0.02);
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
        IndexedRng::named(7, "w").uniform(&mut values, 0.5);
        let (low, high) = values.iter().fold((0.0f32, 0.0f32), |(low, high), &x| (low.min(x), high.max(x)));
        assert!(low < -0.49 && high > 0.49 && low >= -0.5 && high <= 0.5, "{low} {high}");
    }

    #[test]
    fn numbers_depend_on_seed_and_name_but_not_on_threads() {
        let run = |seed, name: &'static str, threads| {
            with_threads(threads, move || {
                let mut values = vec![0.0; 3 * CHUNK_LEN + 5];
                IndexedRng::named(seed, name).normal(&mut values, 1.0);
                values
            })
        };
        assert_eq!(run(1, "a", 1), run(1, "a", 3));
        assert_ne!(run(1, "a", 1), run(2, "a", 1));
        assert_ne!(run(1, "a", 1), run(1, "b", 1));
        // Pinned values: a change would change every seeded initialization and every sampled text.
        assert_eq!(run(1, "a", 1)[..3], [-0.17961474, -0.41067076, -0.1741243]);
        assert_eq!([0, 1].map(|i| (IndexedRng::new(0).unit(i) * 1e6) as u32), [150_037, 692_630]);
    }
}
