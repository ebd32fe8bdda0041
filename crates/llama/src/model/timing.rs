//! Where the time of a step goes.

use std::time::{Duration, Instant};

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Table lookups and their gradients.
    Embedding,
    /// RMSNorms with the residual additions.
    Norm,
    /// Projections into and out of attention, gates included.
    Projections,
    /// Attention itself.
    Attention,
    /// The three products of the MLP.
    Mlp,
    /// The nonlinearity of the MLP.
    Swiglu,
    /// Output projection and loss.
    Head,
}

impl Stage {
    /// All, in the order of the forward pass.
    pub const ALL: [Stage; 7] =
        [Stage::Embedding, Stage::Norm, Stage::Projections, Stage::Attention, Stage::Mlp, Stage::Swiglu, Stage::Head];
}

/// Time spent in each stage since the session began or [`Timing::reset`]. Reading the time costs nothing beside any stage.
#[derive(Clone, Debug)]
pub struct Timing {
    last: Instant,
    forward: [Duration; Stage::ALL.len()],
    backward: [Duration; Stage::ALL.len()],
}

impl Timing {
    pub(crate) fn new() -> Timing {
        Timing { last: Instant::now(), forward: Default::default(), backward: Default::default() }
    }

    /// Time spent going forward and backward. The head does both at once when it trains, counted as backward.
    pub fn spent(&self, stage: Stage) -> (Duration, Duration) {
        (self.forward[stage as usize], self.backward[stage as usize])
    }

    /// Forgets.
    pub fn reset(&mut self) {
        *self = Timing::new();
    }

    pub(crate) fn start(&mut self) {
        self.last = Instant::now();
    }

    /// What happened since the last call was this stage.
    pub(crate) fn forward(&mut self, stage: Stage) {
        let lap = self.lap();
        self.forward[stage as usize] += lap;
    }

    /// As [`Timing::forward`].
    pub(crate) fn backward(&mut self, stage: Stage) {
        let lap = self.lap();
        self.backward[stage as usize] += lap;
    }

    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now.duration_since(std::mem::replace(&mut self.last, now))
    }
}
