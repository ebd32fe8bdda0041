//! Random numbers, identical on every machine for the same seed.

/// 2^64 divided by the golden ratio: the increment of SplitMix64.
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every output bit depends on every bit of z.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// A generator that depends only on the seed and the name, so cases do not depend on the order in which they run.
    pub fn named(seed: u64, name: &str) -> Rng {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3));
        let mut rng = Rng(seed ^ hash);
        Rng(rng.bits())
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// Uniform on (0, 1), both ends excluded.
    pub fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Uniform on 0..n, for n much smaller than 2^64.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// True with probability p.
    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    /// One of the choices, drawn uniformly. `choices` must not be empty.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let mut rng = Rng::new(3);
        let x: Vec<f64> = (0..100_000).map(|_| rng.normal()).collect();
        let moment = |n: i32| x.iter().map(|x| x.powi(n)).sum::<f64>() / x.len() as f64;
        assert!(moment(1).abs() < 0.02 && (moment(2) - 1.0).abs() < 0.02, "{} {}", moment(1), moment(2));
    }

    #[test]
    fn names_give_independent_sequences() {
        assert_eq!(Rng::named(1, "a").bits(), Rng::named(1, "a").bits());
        assert_ne!(Rng::named(1, "a").bits(), Rng::named(1, "b").bits());
        assert_ne!(Rng::named(1, "a").bits(), Rng::named(2, "a").bits());
    }
}
