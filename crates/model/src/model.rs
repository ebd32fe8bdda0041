//! A model: its configuration and its parameters.

use std::path::Path;
use std::sync::Arc;

use crate::config::{AttentionMap, Config};
use crate::error::{Error, NAMES_LISTED, Result};
use crate::init;
use crate::params::{ParamLayout, Params};
use crate::passes::{Session, SessionOptions};
use crate::weights::{self, Checkpoint, NamedTensor, WriteOptions};

/// A configuration and the parameters that belong to it.
#[derive(Clone, Debug)]
pub struct Model {
    /// The configuration.
    pub config: Config,
    /// The parameters.
    pub params: Params,
}

impl Model {
    /// A model with all parameters zero.
    pub fn zeros(config: Config) -> Result<Model> {
        config.validate()?;
        let layout = ParamLayout::new(&config)?;
        Ok(Model { params: Params::zeros(Arc::new(layout))?, config })
    }

    /// A randomly initialized model ([`init::initialize`]). The result depends only on the configuration and the seed.
    pub fn fresh(config: Config, seed: u64) -> Result<Model> {
        let mut model = Model::zeros(config)?;
        init::initialize(&mut model.params, &model.config, seed);
        Ok(model)
    }

    /// Reads the model in a directory: `config.json`, and weights in any float type that match the configuration exactly.
    pub fn read(folder: impl AsRef<Path>) -> Result<Model> {
        let folder = folder.as_ref();
        Model::with_weights(Config::read(folder)?, &Checkpoint::open(folder)?)
    }

    /// A model of this configuration with the weights of a checkpoint, which must match the configuration exactly.
    pub fn with_weights(config: Config, weights: &Checkpoint) -> Result<Model> {
        // Before the allocation, since a wrong size in the configuration could be huge.
        weights.check(&config.parameter_list()?)?;
        let mut model = Model::zeros(config)?;
        let layout = model.params.layout().clone();
        for entry in layout.entries() {
            weights.read_into(&entry.spec.name, &entry.spec.shape, &mut model.params.values_mut()[entry.range()])?;
        }
        Ok(model)
    }

    /// This model with another attention. Fails if the attention needs a tensor that the model does not have in the same shape. Tensors that it
    /// does not need are dropped.
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

    /// Writes weights and then the configuration into an existing directory.
    pub fn write(&self, folder: impl AsRef<Path>, options: &WriteOptions) -> Result<()> {
        let tensors = self.params.iter().map(|(entry, data)| NamedTensor { name: &entry.spec.name, shape: &entry.spec.shape, data });
        weights::write(&folder, tensors, options)?;
        self.config.write(&folder)
    }

    /// A session for batches of B rows of T positions.
    pub fn session(&self, batch: usize, time: usize, options: SessionOptions) -> Result<Session> {
        Session::new(&self.config, self.params.layout(), batch, time, options)
    }
}
