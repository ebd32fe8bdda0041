//! Spikes of the loss, found by a rule: a loss above the running mean by more than six running standard deviations.
//!
//! Mean and variance are exponential averages over about fifty steps, m ← m + (x − m)/50, v ← (1 − 1/50)·(v + (x − m)²/50). Nothing is called a
//! spike before fifty steps have been seen, nor below a rise of 0.05 nats, and a spike itself does not enter the averages with more than
//! the height at which it was noticed, so that a second one is noticed as well.

use serde::{Deserialize, Serialize};

const STEPS: f64 = 50.0;
const DEVIATIONS: f64 = 6.0;
const LEAST: f64 = 0.05;

/// Running mean and variance of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spikes {
    mean: f64,
    variance: f64,
    count: u64,
}

impl Spikes {
    /// Takes the next loss and says whether it is a spike.
    pub fn is_spike(&mut self, loss: f64) -> bool {
        let limit = self.mean + (DEVIATIONS * self.variance.sqrt()).max(LEAST);
        let spike = self.count >= STEPS as u64 && loss > limit;
        let loss = if spike { limit } else { loss };
        // The first steps weigh the same each.
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
    fn a_jump_is_a_spike_and_noise_is_none() {
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
    fn the_beginning_is_never_a_spike() {
        let mut spikes = Spikes::default();
        assert!(!(0..20).any(|i| spikes.is_spike(if i == 10 { 100.0 } else { 1.0 })));
    }
}
