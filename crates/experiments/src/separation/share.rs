//! Success rates of draws.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Draw, Pair};

/// A success rate with its Wilson interval of 95 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// Fraction of successful draws.
    pub success: f64,
    /// The interval's lower end.
    pub low: f64,
    /// The interval's upper end.
    pub high: f64,
    /// Number of draws.
    pub draws: u64,
}

impl Share {
    /// This many successes out of at least one draw.
    pub fn new(successes: u64, draws: u64) -> Share {
        /// The normal distribution's 97.5 % quantile.
        const Z: f64 = 1.959_963_984_540_054;
        let (n, p) = (draws as f64, successes as f64 / draws as f64);
        let middle = (p + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
        let half = Z / (1.0 + Z * Z / n) * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
        // Rounding must not exclude the rate itself.
        let low = if successes == 0 { 0.0 } else { (middle - half).max(0.0) };
        let high = if successes == draws { 1.0 } else { (middle + half).min(1.0) };
        Share { success: p, low, high, draws }
    }

    /// Whether a probability is in the interval.
    pub fn holds(&self, probability: f64) -> bool {
        (self.low..=self.high).contains(&probability)
    }
}

impl Pair {
    /// The success rate of draws 0, 1, … of this seed, in the current thread pool; the same for any number of threads.
    pub fn simulate(&self, draws: u64, seed: u64) -> Share {
        let successes = (0..draws).into_par_iter().filter(|&index| self.succeeds(&Draw::new(&self.setting, seed, index))).count();
        Share::new(successes as u64, draws)
    }
}
