//! The interface of training engines: gradients, updates, losses and checkpoint files. The engine owns parameters and moments.

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

/// A trainable model. One step calls [`Learner::gradient`], [`Learner::reduce`], [`Learner::norm`] and [`Learner::update`], in this order. Every rank
/// makes the same calls and has the same parameters after each update.
pub trait Learner: std::fmt::Debug {
    /// Allocates buffers for the batches of these settings on this rank. Before, there are only parameters and moments.
    fn prepare(&mut self, settings: &Settings, collective: &dyn Collective) -> Result<()>;

    /// Computes this rank's share of the gradient of the mean loss over all tokens of a step's batches.
    fn gradient(&mut self, batches: &[Rows]) -> Result<()>;

    /// Adds the gradients of all ranks and returns the loss, the same on all ranks. The norm is not computed yet.
    fn reduce(&mut self, collective: &dyn Collective) -> Result<Computed>;

    /// The norm of the complete gradient; NaN or infinite if any value is.
    fn norm(&self) -> Result<f64>;

    /// One update at this learning rate with the gradient times `scale`.
    fn update(&mut self, learning_rate: f64, scale: f64) -> Result<()>;

    /// Number of updates so far.
    fn updates(&self) -> u64;

    /// The losses of a batch.
    fn loss(&mut self, rows: &Rows) -> Result<Sums>;

    /// Whether all ranks must evaluate every batch because none has the complete model.
    fn measures_together(&self) -> bool {
        false
    }

    /// Floating-point operations of a step.
    fn operations(&self, settings: &Settings) -> f64;

    /// Diagnoses the NaN or infinity in the step that was just reduced; `step` counts from 1.
    fn diagnose(&self, computed: &Computed, batches: &[Rows], step: u64) -> Diagnosis;

    /// Gathers parameters that are sharded over ranks. Every rank calls it before rank 0 writes.
    fn collect(&mut self) -> Result<()> {
        Ok(())
    }

    /// Writes the model in Hugging Face format to an existing directory, syncs it to disk and returns the file names.
    fn write_model(&self, folder: &Path) -> Result<Vec<&'static str>>;

    /// Writes the moments to `optimizer.safetensors` in an existing directory and syncs it to disk.
    fn write_moments(&self, folder: &Path) -> Result<()>;
}

/// An engine other than the native one. It takes over a model and its moments, new or from a checkpoint, and returns them for checkpoints.
pub trait Engine: std::fmt::Debug + Send + Sync {
    /// Its name in settings.
    fn name(&self) -> &'static str;

    /// A learner with these weights and moments.
    fn adopt(&self, model: Model, optimizer: AdamW, settings: &Settings) -> Result<Box<dyn Learner>>;
}

/// A new, untrained model.
pub fn fresh(settings: &Settings, source: &dyn Source) -> Result<Box<Native>> {
    Ok(Box::new(Native::fresh(settings, source.vocabulary())?))
}

/// The model and the optimizer state of a checkpoint.
pub fn read(folder: &Path, settings: &Settings, state: &State) -> Result<Box<Native>> {
    Ok(Box::new(Native::read(folder, settings.adamw(), state.updates)?))
}

/// Floating-point operations of a step: 6·tokens·(matrix parameters without the embedding), and attention.
pub fn operations(layout: &ParamLayout, config: &Config, settings: &Settings) -> f64 {
    let matrices = layout.entries().iter().filter(|entry| entry.is_matrix() && entry.spec.role != ParamRole::Embedding);
    let numbers: usize = matrices.map(|entry| entry.spec.len()).sum();
    let rows = (settings.batch * settings.accumulate) as f64;
    let time = settings.length as f64;
    let attention = (config.num_hidden_layers * config.num_attention_heads * config.head_dim) as f64 * 2.0 * time * (time + 1.0);
    rows * (6.0 * time * numbers as f64 + 3.5 * attention)
}
