//! Training of Llama models: settings, data, the training step, evaluation, and runs that can be killed at any time and resumed bit for bit.
#![forbid(unsafe_code)]

pub mod adamw;
pub mod batches;
pub mod checkpoint;
pub mod collective;
mod document;
pub mod error;
pub mod eval;
pub mod learner;
pub mod log;
mod memory;
pub mod metrics;
pub mod native;
pub mod nonfinite;
pub mod norm;
mod prefetch;
pub mod progress;
pub mod provenance;
pub mod resolve;
pub mod run;
pub mod runs;
pub mod schedule;
pub mod settings;
pub mod slices;
pub mod source;
pub mod spikes;
pub mod step;
pub mod sweep;
pub mod tensorboard;
#[cfg(test)]
mod testing;
pub mod torch;

pub use adamw::{AdamW, AdamWConfig};
pub use collective::Collective;
pub use document::Evaluated;
pub use error::{Error, Result};
pub use learner::{Engine, Learner};
pub use norm::{clip, gradient_norm};
pub use run::{Outcome, PlannedRun, RunOptions, Start, TrainRequest, train};
pub use settings::Settings;
