//! What training sees of an engine: gradients, updates, losses, and files for checkpoints. Parameters and moments live where the engine lives.

use std::path::Path;

use crate::checkpoint::State;
use crate::collective::Collective;
use crate::error::Result;
use crate::eval::Sums;
use crate::native::Native;
use crate::nonfinite::Diagnosis;
use crate::settings::Settings;
use crate::step::Computed;
use termwise_data::{Rows, Source};

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
    fn norm(&self) -> f64;

    /// One update at this learning rate with the gradient times `scale`.
    fn update(&mut self, learning_rate: f64, scale: f64);

    /// Updates made so far.
    fn updates(&self) -> u64;

    /// The losses of a batch.
    fn loss(&mut self, rows: &Rows) -> Result<Sums>;

    /// Operations of a step.
    fn operations(&self, settings: &Settings) -> f64;

    /// What was not finite in the step that was just reduced; `step` counts from 1.
    fn diagnose(&self, computed: &Computed, batches: &[Rows], step: u64) -> Diagnosis;

    /// Writes the model into a folder that is there, as Hugging Face's tools read it, flushed to the disk; the names of its files. Without weights where
    /// they are no numbers.
    fn write_model(&self, folder: &Path, weights: bool) -> Result<Vec<&'static str>>;

    /// Writes the moments into `optimizer.safetensors` of a folder that is there, flushed to the disk.
    fn write_moments(&self, folder: &Path) -> Result<()>;
}

/// A model that has not learned yet.
pub fn fresh(settings: &Settings, source: &dyn Source) -> Result<Box<dyn Learner>> {
    Ok(Box::new(Native::fresh(settings, source.vocabulary())?))
}

/// The model and the moments of a checkpoint.
pub fn read(folder: &Path, settings: &Settings, state: &State) -> Result<Box<dyn Learner>> {
    Ok(Box::new(Native::read(folder, settings.adamw(), state.updates)?))
}
