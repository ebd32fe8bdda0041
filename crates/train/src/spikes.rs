//! Loss spike detection: a loss above the running mean by more than six running standard deviations.
//!
//! Mean and variance are exponential averages over about fifty steps, m ← m + (x − m)/50, v ← (1 − 1/50)·(v + (x − m)²/50). There are no spikes
//! in the first fifty steps, and a spike must exceed the mean by at least 0.05 nats. In the averages, a spike is clamped to
//! the detection threshold, so that a second spike is also detected.

use serde::{Deserialize, Serialize};

const STEPS: f64 = 50.0;
const DEVIATIONS: f64 = 6.0;
const MIN_JUMP: f64 = 0.05;

/// Running mean and variance of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spikes {
    mean: f64,
    variance: f64,
    count: u64,
}

impl Spikes {
    /// Adds the next loss and returns whether it is a spike.
    pub fn is_spike(&mut self, loss: f64) -> bool {
        let limit = self.mean + (DEVIATIONS * self.variance.sqrt()).max(MIN_JUMP);
        let spike = self.count >= STEPS as u64 && loss > limit;
        let loss = if spike { limit } else { loss };
        // The first steps have equal weights.
        let share = 1.0 / STEPS.min(self.count as f64 + 1.0);
        let change = loss - self.mean;
        self.mean += share * change;
        self.variance = (1.0 - share) * (self.variance + share * change * change);
        self.count += 1;
        spike
    }

    /// The running mean.
    pub fn mean(&self) -> f64 {
        self.mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(i: u64) -> f64 {
        let z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    }

    #[test]
    fn a_jump_is_a_spike_and_noise_is_not() {
        let mut spikes = Spikes::default();
        for i in 0..500 {
            let loss = 3.0 + 0.2 * noise(i) + 5.0 * (-(i as f64) / 40.0).exp();
            assert!(!spikes.is_spike(loss), "step {i}");
        }
        assert!(spikes.is_spike(4.0));
        assert!(spikes.is_spike(5.0), "the first spike must not hide the second");
        assert!(!spikes.is_spike(3.0));
    }

    #[test]
    fn there_are_no_spikes_in_the_first_steps() {
        let mut spikes = Spikes::default();
        assert!(!(0..20).any(|i| spikes.is_spike(if i == 10 { 100.0 } else { 1.0 })));
    }
}
