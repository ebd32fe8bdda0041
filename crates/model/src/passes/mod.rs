//! The forward and backward passes of a model.
//!
//! [`forward`] and [`backward`] contain the outline of a pass, written out layer by layer without an autograd tape. [`Session`] owns the
//! buffers of both, so a training step does not allocate. Decoding ([`crate::decode`]) uses the same forward pass.

pub(crate) mod activations;
mod backward;
pub(crate) mod batch;
pub(crate) mod forward;
mod session;
pub(crate) mod timing;
pub(crate) mod weight_view;

use crate::error::Result;
use crate::params::Params;

pub use batch::{Batch, Loss, NonpositiveDenominator};
pub use session::{AttentionEngine, ObservedAttention, Session, SessionOptions};
pub use timing::{Stage, StageTiming};

/// A training objective: the loss of a batch and its gradient, in the parameter layout of [`crate::ParamLayout`]. The native [`Session`]
/// implements it; other backends can.
pub trait Objective {
    /// The loss of a batch.
    fn loss(&mut self, params: &Params, batch: &Batch) -> Result<Loss>;

    /// The loss of a batch. Adds the gradient of the mean loss to `grads`.
    fn loss_and_grad(&mut self, params: &Params, batch: &Batch, grads: &mut Params) -> Result<Loss>;
}
