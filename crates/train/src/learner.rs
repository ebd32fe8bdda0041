//! What training sees of an engine: gradients, updates, losses, and files for checkpoints. Parameters and moments live where the engine lives.

use std::path::Path;

use crate::AdamW;
use crate::checkpoint::State;
use crate::collective::Collective;
use crate::error::Result;
use crate::eval::Sums;
use crate::native::Native;
use crate::nonfinite::Diagnosis;
use crate::settings::Settings;
use crate::step::Computed;
use termwise_data::{Rows, Source};
use termwise_model::params::ParamRole;
use termwise_model::{Config, Model, ParamLayout};

/// A model that learns. One step is [`Learner::gradient`], [`Learner::reduce`], [`Learner::norm`], [`Learner::update`], in this order; every rank
/// makes the same calls and holds the same parameters after each update.
pub trait Learner: std::fmt::Debug {
    /// Makes room for the batches of these settings, as one of these ranks. Before it, there are only parameters and moments.
    fn prepare(&mut self, settings: &Settings, collective: &dyn Collective) -> Result<()>;

    /// The gradient of the mean loss over all tokens of a step's batches, as far as this rank computes it.
    fn gradient(&mut self, batches: &[Rows]) -> Result<()>;

    /// Adds up what all ranks have found; the loss, the same on all of them. Its norm is still to be taken.
    fn reduce(&mut self, collective: &dyn Collective) -> Result<Computed>;

    /// The norm of the whole gradient; not finite where a value of it is not.
    fn norm(&self) -> Result<f64>;

    /// One update at this learning rate with the gradient times `scale`.
    fn update(&mut self, learning_rate: f64, scale: f64) -> Result<()>;

    /// Updates made so far.
    fn updates(&self) -> u64;

    /// The losses of a batch.
    fn loss(&mut self, rows: &Rows) -> Result<Sums>;

    /// Whether all ranks have to measure every batch, since none has the whole model.
    fn measures_together(&self) -> bool {
        false
    }

    /// Operations of a step.
    fn operations(&self, settings: &Settings) -> f64;

    /// What was not finite in the step that was just reduced; `step` counts from 1.
    fn diagnose(&self, computed: &Computed, batches: &[Rows], step: u64) -> Diagnosis;

    /// Brings together what is spread over ranks; every rank calls it before rank 0 writes.
    fn collect(&mut self) -> Result<()> {
        Ok(())
    }

    /// Writes the model into a folder that is there, as Hugging Face's tools read it, flushed to the disk; the names of its files.
    fn write_model(&self, folder: &Path) -> Result<Vec<&'static str>>;

    /// Writes the moments into `optimizer.safetensors` of a folder that is there, flushed to the disk.
    fn write_moments(&self, folder: &Path) -> Result<()>;
}

/// Another engine than the native one: it takes over a model and its moments, fresh or from a checkpoint, and gives them back for checkpoints.
pub trait Engine: std::fmt::Debug + Send + Sync {
    /// Its name in settings.
    fn name(&self) -> &'static str;

    /// A learner with these weights and moments.
    fn adopt(&self, model: Model, optimizer: AdamW, settings: &Settings) -> Result<Box<dyn Learner>>;
}

/// A model that has not learned yet.
pub fn fresh(settings: &Settings, source: &dyn Source) -> Result<Box<Native>> {
    Ok(Box::new(Native::fresh(settings, source.vocabulary())?))
}

/// The model and the moments of a checkpoint.
pub fn read(folder: &Path, settings: &Settings, state: &State) -> Result<Box<Native>> {
    Ok(Box::new(Native::read(folder, settings.adamw(), state.updates)?))
}

/// Operations of a step: 6·tokens·numbers in matrices besides the embedding, and attention.
pub fn operations(layout: &ParamLayout, config: &Config, settings: &Settings) -> f64 {
    let matrices = layout.entries().iter().filter(|entry| entry.is_matrix() && entry.spec.role != ParamRole::Embedding);
    let numbers: usize = matrices.map(|entry| entry.spec.len()).sum();
    let rows = (settings.batch * settings.accumulate) as f64;
    let time = settings.length as f64;
    let attention = (config.num_hidden_layers * config.num_attention_heads * config.head_dim) as f64 * 2.0 * time * (time + 1.0);
    rows * (6.0 * time * numbers as f64 + 3.5 * attention)
}
