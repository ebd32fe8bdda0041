//! A Llama whose attention is exchangeable: parameters, and sessions that run it forward and backward.
//!
//! ```text
//! x = embedding(ids)
//! for each layer:  h = rmsnorm(x);  x += o_proj(attention(q, k, v and gates from h))
//!                  h = rmsnorm(x);  x += down(silu(gate(h))·up(h))
//! loss = cross-entropy(head(rmsnorm(x)), labels)
//! ```
//!
//! Forward and backward are written out, no tape: [`Session`] holds every buffer, so that a step allocates nothing of its own.

mod backward;
pub(crate) mod batch;
mod clock;
mod forward;
pub(crate) mod places;
mod session;

use std::path::Path;
use std::sync::Arc;

use crate::config::{AttentionMap, Config};
use crate::error::{Error, NAMES_LISTED, Result};
use crate::init;
use crate::params::{Layout, Params};
use crate::weights::{self, Checkpoint, Tensor, WriteOptions};

pub use batch::{Batch, Loss, Nonpositive};
pub use clock::{Clock, Stage};
pub use session::{Engine, Observed, Options, Session};

/// A configuration and the parameters that belong to it.
#[derive(Clone, Debug)]
pub struct Model {
    /// Sizes and choices.
    pub config: Config,
    /// Weights.
    pub params: Params,
}

impl Model {
    /// Parameters all zero.
    pub fn zeros(config: Config) -> Result<Model> {
        config.validate()?;
        let params = Params::zeros(Arc::new(Layout::new(&config)?));
        Ok(Model { config, params })
    }

    /// A fresh model, as [`init::initialize`] starts it: the same for the same configuration and seed, everywhere.
    pub fn fresh(config: Config, seed: u64) -> Result<Model> {
        let mut model = Model::zeros(config)?;
        init::initialize(&mut model.params, &model.config, seed);
        Ok(model)
    }

    /// The model in a folder: `config.json` and weights in any float type, which must be exactly those that the configuration asks for.
    pub fn read(folder: impl AsRef<Path>) -> Result<Model> {
        let folder = folder.as_ref();
        Model::with_weights(Config::read(folder)?, &Checkpoint::open(folder)?)
    }

    /// A model of this configuration with the weights of a checkpoint, which must be exactly those that it asks for.
    pub fn with_weights(config: Config, weights: &Checkpoint) -> Result<Model> {
        let mut model = Model::zeros(config)?;
        weights.check(&model.config.parameter_list()?)?;
        let layout = model.params.layout().clone();
        for entry in layout.entries() {
            weights.read_into(&entry.spec.name, &entry.spec.shape, &mut model.params.values_mut()[entry.range()])?;
        }
        Ok(model)
    }

    /// This model with another attention, where its weights suffice: every tensor that the attention asks for must be there in that
    /// shape; tensors that it has no use for are left out.
    pub fn with_attention(&self, attention: impl Into<AttentionMap>) -> Result<Model> {
        let mut config = self.config.clone();
        config.set_attention(attention)?;
        let mut model = Model::zeros(config)?;
        let layout = model.params.layout().clone();
        let mut missing = Vec::new();
        for entry in layout.entries() {
            match self.params.layout().find(&entry.spec.name) {
                Ok(found) if found.spec.shape == entry.spec.shape => {
                    model.params.values_mut()[entry.range()].copy_from_slice(&self.params.values()[found.range()]);
                }
                Ok(found) => {
                    let (name, expected, found) = (entry.spec.name.clone(), entry.spec.shape.clone(), found.spec.shape.clone());
                    return Err(Error::TensorShape { name, expected, found, more: 0 });
                }
                Err(_) => missing.push(entry.spec.name.clone()),
            }
        }
        if missing.is_empty() {
            return Ok(model);
        }
        let count = missing.len();
        missing.truncate(NAMES_LISTED);
        Err(Error::MissingTensors { count, names: missing, hint: "choose an attention that needs no weights beyond those of the model" })
    }

    /// Writes configuration and weights into a folder that exists, the configuration last.
    pub fn write(&self, folder: impl AsRef<Path>, options: &WriteOptions) -> Result<()> {
        let tensors = self.params.iter().map(|(entry, data)| Tensor { name: &entry.spec.name, shape: &entry.spec.shape, data });
        weights::write(&folder, tensors, options)?;
        self.config.write(&folder)
    }

    /// Room to run batches of B rows of T positions.
    pub fn session(&self, batch: usize, time: usize, options: Options) -> Result<Session> {
        Session::new(&self.config, self.params.layout(), batch, time, options)
    }
}

/// What trains a model: the loss of a batch and its gradient, on the one parameter layout, whatever hardware computes it.
pub trait Objective {
    /// The loss.
    fn loss(&mut self, params: &Params, batch: &Batch) -> Result<Loss>;

    /// The loss; the gradient of its mean is added to `grads`.
    fn loss_and_grad(&mut self, params: &Params, batch: &Batch, grads: &mut Params) -> Result<Loss>;
}
