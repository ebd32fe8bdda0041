//! The learning rate schedule.

use serde::{Deserialize, Serialize};

/// Decay of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Linear.
    Linear,
    /// Cosine.
    Cosine,
    /// Constant.
    Constant,
}

/// Linear warm-up, then decay to a fraction of the peak.
///
/// For the update with index s from 0, with W warm-up steps and horizon H:
///
/// ```text
/// s < W:   peak · (s + 1)/W
/// s ≥ W:   peak · (last + (1 − last)·f(p)),  p = min(1, (s − W)/(H − W)),  f = 1 − p, (1 + cos πp)/2 or 1
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Peak learning rate.
    pub peak: f64,
    /// W, number of warm-up steps.
    pub warmup: u64,
    /// f, shape of the decay.
    pub decay: Decay,
    /// H, which may exceed the number of steps of a run.
    pub horizon: u64,
    /// Final learning rate as a fraction of the peak, at the horizon and beyond.
    pub last: f64,
}

impl Schedule {
    /// The learning rate of the update with this index, counted from 0.
    pub fn rate(&self, index: u64) -> f64 {
        if index < self.warmup {
            return self.peak * ((index + 1) as f64 / self.warmup as f64);
        }
        let fall = self.horizon.saturating_sub(self.warmup);
        let progress = if fall == 0 { 1.0 } else { ((index - self.warmup) as f64 / fall as f64).min(1.0) };
        let height = match self.decay {
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            Decay::Constant => return self.peak,
        };
        self.peak * (self.last + (1.0 - self.last) * height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{a} {b}");
    }

    #[test]
    fn the_schedule_of_the_paper_ends_at_0_91_of_its_peak() {
        let schedule = Schedule { peak: 1e-4, warmup: 10_000, decay: Decay::Linear, horizon: 1_000_000, last: 0.0 };
        near(schedule.rate(0) * 1e4, 1e-4);
        near(schedule.rate(4_999) * 1e4, 0.5);
        near(schedule.rate(9_999) * 1e4, 1.0);
        near(schedule.rate(10_000) * 1e4, 1.0);
        near(schedule.rate(100_000) * 1e4, 900_000.0 / 990_000.0);
        near(schedule.rate(999_999) * 1e4, 1.0 / 990_000.0);
        assert_eq!(schedule.rate(1_000_000), 0.0);
        assert_eq!(schedule.rate(5_000_000), 0.0);
    }

    #[test]
    fn cosine_and_constant_follow_their_formulas() {
        let cosine = Schedule { peak: 2.0, warmup: 10, decay: Decay::Cosine, horizon: 110, last: 0.1 };
        for s in 10..200u64 {
            let p = ((s - 10) as f64 / 100.0).min(1.0);
            near(cosine.rate(s), 2.0 * (0.1 + 0.9 * (1.0 + (std::f64::consts::PI * p).cos()) / 2.0));
        }
        near(cosine.rate(60), 2.0 * (0.1 + 0.9 * 0.5));
        let constant = Schedule { decay: Decay::Constant, ..cosine };
        assert_eq!(constant.rate(4), 1.0);
        assert_eq!(constant.rate(10), 2.0);
        assert_eq!(constant.rate(100_000), 2.0);
    }

    #[test]
    fn horizons_within_the_warm_up_do_not_divide_by_zero() {
        for decay in [Decay::Linear, Decay::Cosine, Decay::Constant] {
            for (warmup, horizon) in [(0, 1), (10, 10), (10, 3), (0, 0)] {
                let schedule = Schedule { peak: 1.0, warmup, decay, horizon, last: 0.0 };
                assert!((0..30).all(|s| (0.0..=1.0).contains(&schedule.rate(s))), "{schedule:?}");
            }
        }
    }
}
