//! A Llama whose attention is exchangeable: parameters, and sessions that run it forward and backward.
//!
//! `architecture` says what a model is made of, `forward` is the pass that training and decoding share, `backward` its reverse. Both are
//! written out, no tape: [`Session`] holds every buffer, so that a step allocates nothing of its own.

pub(crate) mod architecture;
mod backward;
pub(crate) mod batch;
pub(crate) mod forward;
pub(crate) mod layer;
mod session;
pub(crate) mod timing;

use std::path::Path;
use std::sync::Arc;

use crate::config::{AttentionMap, Config};
use crate::error::{Error, NAMES_LISTED, Result};
use crate::init;
use crate::params::{Layout, Params};
use crate::weights::{self, Checkpoint, Tensor, WriteOptions};

pub use batch::{Batch, Loss, Nonpositive};
pub use session::{Engine, Observed, Options, Session};
pub use timing::{Stage, Timing};

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
        let layout = Layout::new(&config)?;
        Ok(Model { params: Params::zeros(Arc::new(layout))?, config })
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
        // Before anything is allocated: sizes that are wrong in the configuration are not those of the file.
        weights.check(&config.parameter_list()?)?;
        let mut model = Model::zeros(config)?;
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
