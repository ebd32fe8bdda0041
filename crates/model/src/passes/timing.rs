//! Time per stage of a pass.

use std::time::{Duration, Instant};

/// A stage of a forward or backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Token embedding and its gradient.
    Embedding,
    /// Norms and residual additions.
    Norm,
    /// Projections to q, k, v and gate logits, and the output projection of attention.
    Projections,
    /// Attention.
    Attention,
    /// Matrix products of the MLP.
    Mlp,
    /// Activation function of the MLP.
    Activation,
    /// Output projection and loss.
    LmHead,
}

impl Stage {
    /// All stages, in the order of the forward pass.
    pub const ALL: [Stage; 7] =
        [Stage::Embedding, Stage::Norm, Stage::Projections, Stage::Attention, Stage::Mlp, Stage::Activation, Stage::LmHead];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Embedding => "embedding",
            Stage::Norm => "norm",
            Stage::Projections => "projections",
            Stage::Attention => "attention",
            Stage::Mlp => "mlp",
            Stage::Activation => "activation",
            Stage::LmHead => "lm_head",
        }
    }
}

/// Time per stage since the session was created or since [`StageTiming::reset`].
#[derive(Clone, Debug)]
pub struct StageTiming {
    last: Instant,
    forward: [Duration; Stage::ALL.len()],
    backward: [Duration; Stage::ALL.len()],
}

impl StageTiming {
    pub(crate) fn new() -> StageTiming {
        StageTiming { last: Instant::now(), forward: Default::default(), backward: Default::default() }
    }

    /// The forward and backward time of a stage. Training fuses both passes of the LM head; their time is counted as backward.
    pub fn spent(&self, stage: Stage) -> (Duration, Duration) {
        (self.forward[stage as usize], self.backward[stage as usize])
    }

    /// Resets all times to zero.
    pub fn reset(&mut self) {
        *self = StageTiming::new();
    }

    pub(crate) fn start(&mut self) {
        self.last = Instant::now();
    }

    /// Adds the time since the last call to the forward time of a stage.
    pub(crate) fn forward(&mut self, stage: Stage) {
        let lap = self.lap();
        self.forward[stage as usize] += lap;
    }

    /// Adds the time since the last call to the backward time of a stage.
    pub(crate) fn backward(&mut self, stage: Stage) {
        let lap = self.lap();
        self.backward[stage as usize] += lap;
    }

    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now.duration_since(std::mem::replace(&mut self.last, now))
    }
}
