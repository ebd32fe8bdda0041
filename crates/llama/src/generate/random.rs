//! Random numbers that are computed from their index, so that what is drawn for one text does not depend on any other.

use crate::splitmix::{RANGE, bits, mix};

/// A sequence of numbers, with the seed mixed into a key. The same on every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed; those of neighbouring seeds are unrelated.
    pub fn new(seed: u64) -> Random {
        Random(mix(mix(seed ^ 0x7465_726d_7769_7365)))
    }

    /// Element `index`, uniform from 0 below 1, in steps of 2^−53.
    pub fn unit(self, index: u64) -> f64 {
        bits(self.0, index) as f64 / RANGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fill_the_unit_interval_evenly() {
        let n = 100_000;
        let mut counts = [0; 20];
        for i in 0..n {
            let (a, b) = (Random::new(5).unit(i), Random::new(i).unit(5));
            assert!((0.0..1.0).contains(&a) && (0.0..1.0).contains(&b));
            counts[(a * 10.0) as usize] += 1;
            counts[10 + (b * 10.0) as usize] += 1;
        }
        // 10,000 expected in each, with a deviation of 95.
        assert!(counts.iter().all(|&count: &i32| (count - 10_000).abs() < 500), "{counts:?}");
    }

    #[test]
    fn neighbours_are_not_related() {
        let n = 100_000;
        let product = |f: &dyn Fn(u64) -> (f64, f64)| (0..n).map(f).map(|(a, b)| (a - 0.5) * (b - 0.5)).sum::<f64>() / n as f64 * 12.0;
        assert!(product(&|i| (Random::new(1).unit(i), Random::new(1).unit(i + 1))).abs() < 0.02);
        assert!(product(&|i| (Random::new(i).unit(0), Random::new(i + 1).unit(0))).abs() < 0.02);
        assert!(product(&|i| (Random::new(i).unit(1), Random::new(i + 1).unit(0))).abs() < 0.02);
    }

    #[test]
    fn pinned() {
        // Another digit here changes what every seed writes.
        assert_eq!([0, 1].map(|i| (Random::new(0).unit(i) * 1e6) as u32), PINNED);
    }

    const PINNED: [u32; 2] = [150_037, 692_630];
}
