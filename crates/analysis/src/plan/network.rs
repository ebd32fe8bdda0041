//! A training step shared by ranks over a network.
//!
//! Each of R ranks computes its part of a step's tokens, sends 2·(R − 1)/R float32 gradients (reduce-scatter, then all-gather),
//! and makes the whole update. Communication does not overlap with computation.

use serde::{Deserialize, Serialize};

use super::training::Training;
use super::{Model, Place};

/// A network.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// R, number of ranks.
    pub ranks: u64,
    /// Bandwidth per rank in bytes per second, in each direction.
    pub bandwidth: f64,
    /// Latency of a message in seconds.
    pub latency: f64,
}

/// The cost of a step over a network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shared {
    /// The network.
    #[serde(flatten)]
    pub network: Network,
    /// Bytes that each rank sends and receives per step.
    pub bytes: u64,
    /// Seconds for communication.
    pub seconds: f64,
    /// Per machine, with the model's own attention.
    pub steps: Vec<SharedStep>,
}

/// A step on one kind of machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharedStep {
    /// The machine's name.
    pub hardware: String,
    /// Seconds of a step on one machine.
    pub alone: f64,
    /// Seconds of a step on all ranks: computation, communication, update.
    pub shared: f64,
    /// Time of a step on one machine divided by that on all ranks.
    pub speedup: f64,
}

/// Values summed at a time: [`termwise_train::collective`].
const BLOCK: f64 = (1 << 22) as f64;

pub(super) fn share(network: Network, place: &Place, training: &Training) -> Shared {
    let ranks = network.ranks.max(1) as f64;
    let Model { parameters, .. } = *place.model;
    let bytes = if network.ranks < 2 { 0.0 } else { 2.0 * 4.0 * parameters as f64 * (ranks - 1.0) / ranks };
    // A message to and from each other rank per block; losses and stop requests in a tree.
    let messages =
        if network.ranks < 2 { 0.0 } else { 2.0 * (ranks - 1.0) * (parameters as f64 / BLOCK).ceil() + 3.0 * ranks.log2().ceil() };
    let seconds = bytes / network.bandwidth + messages * network.latency;
    let own = place.tokens_a_step() as f64;
    let step = |machine: &super::Hardware| {
        let time = training.times.iter().find(|time| time.hardware == machine.name)?;
        let alone = own / time.tokens_a_second;
        let update = machine.memory_seconds(super::training::optimizer_bytes(place.model));
        let shared = (alone - update).max(0.0) / ranks + update + seconds;
        Some(SharedStep { hardware: machine.name.clone(), alone, shared, speedup: alone / shared })
    };
    Shared { network, bytes: bytes as u64, seconds, steps: training.hardware.iter().filter_map(step).collect() }
}

#[cfg(test)]
mod tests {
    use crate::plan::{Network, Options, plan};

    fn shared(ranks: u64, bandwidth: f64, latency: f64) -> super::Shared {
        let network = Some(Network { ranks, bandwidth, latency });
        let options = Options { model: "paper-small".into(), batch: 64, hardware: vec!["xeon-8480".into()], network, ..Options::default() };
        plan(&options).expect("a plan").network.expect("a network")
    }

    #[test]
    fn communication_time_matches_the_bytes() {
        let (endless, parameters) = (f64::INFINITY, 275e6);
        // A single rank sends nothing and has no speedup.
        let one = shared(1, 1e9, 1e-3);
        assert!((one.bytes, one.seconds) == (0, 0.0) && (one.steps[0].speedup - 1.0).abs() < 1e-12, "{one:?}");
        // With a free network, everything but the update is shared.
        let ideal = shared(4, endless, 0.0);
        assert!(ideal.steps[0].speedup > 3.5 && ideal.steps[0].speedup < 4.0, "{ideal:?}");
        // 2·4·P·3/4 bytes.
        assert!((ideal.bytes as f64 / (6.0 * parameters) - 1.0).abs() < 0.05, "{}", ideal.bytes);
        let slow = shared(4, 1e9, 0.0);
        assert!((slow.seconds - slow.bytes as f64 / 1e9).abs() < 1e-9);
        assert!((slow.steps[0].shared - ideal.steps[0].shared - slow.seconds).abs() < 1e-9, "communication adds to the step");
        let late = shared(4, endless, 1e-3);
        let blocks = (ideal.bytes as f64 / 6.0 / (1 << 22) as f64).ceil();
        assert!((late.seconds - 1e-3 * (6.0 * blocks + 6.0)).abs() < 1e-9, "{}", late.seconds);
    }
}
