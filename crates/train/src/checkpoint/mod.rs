//! Checkpoints: directories that Hugging Face tools can open, with everything needed to resume a run bit for bit.
//!
//! ```text
//! checkpoints/step-00000500/
//!     config.json  model.safetensors     the model
//!     optimizer.safetensors              both moments of AdamW, as `first.NAME` and `second.NAME` for each parameter
//!     state.json                         step, position in the data and other training state
//!     settings.toml                      the settings of the run
//!     manifest.json                      size and BLAKE3 hash of every file above
//!     provenance.json                    the builds that wrote it: [`crate::provenance`]
//! ```
//!
//! A checkpoint is written to a hidden directory next to its destination, synced to disk and renamed. It is valid only if its manifest
//! and every file are unchanged.

mod folder;
mod manifest;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::learner::{self, Learner};
use crate::native::Native;
use crate::provenance;
use crate::settings::Settings;
use crate::spikes::Spikes;
use termwise_base::files::{create_folder, read_text, sync_folder, write_synced};

pub use folder::{Checkpoints, LocatedCheckpoint};
pub use manifest::{MANIFEST, verify};

/// The smallest directory that is a complete checkpoint.
#[cfg(test)]
pub(crate) fn write_empty_manifest(folder: &Path) -> Result<()> {
    manifest::write(folder, &[])
}

/// Name of the file with the state.
pub const STATE: &str = "state.json";
/// Name of the file with the settings.
pub const SETTINGS: &str = "settings.toml";
/// Name of the file with the optimizer state.
pub const OPTIMIZER: &str = "optimizer.safetensors";

/// Training state other than weights and moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Steps done, including skipped ones.
    pub step: u64,
    /// AdamW updates done.
    pub updates: u64,
    /// Updates skipped because of a loss or gradient that was NaN or infinite.
    pub skipped: u64,
    /// The run's seed.
    pub seed: u64,
    /// Index of the next batch.
    pub data_index: u64,
    /// Tokens seen that contribute to the loss.
    pub tokens: u64,
    /// Sum of the losses since the last line of metrics.
    pub window_loss: f64,
    /// Steps since the last line of metrics.
    pub window_steps: u64,
    /// Whether one of them was a loss spike.
    pub window_spike: bool,
    /// State of the loss spike detector.
    pub spikes: Spikes,
    /// Held-out loss at this step, if it was measured.
    pub held_out: Option<f64>,
    /// The best held-out loss so far.
    pub best: Option<Best>,
    /// [`Settings::hash`].
    pub settings: String,
    /// Fingerprint of the data.
    pub source: String,
}

/// A held-out loss and its step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Step.
    pub step: u64,
    /// Loss in nats per token.
    pub loss: f64,
}

/// The content of a checkpoint.
#[derive(Debug)]
pub struct Loaded {
    /// The model and the optimizer state.
    pub learner: Box<Native>,
    /// The training state.
    pub state: State,
    /// The run's settings.
    pub settings: Settings,
}

/// Writes all files of a checkpoint to `folder`, which must not exist. The manifest is written last, and everything is synced to disk.
/// `extra` are additional files by name, such as a tokenizer.
pub fn write(folder: &Path, learner: &dyn Learner, state: &State, settings: &Settings, extra: &[(String, Vec<u8>)]) -> Result<()> {
    create_folder(folder)?;
    let mut names = learner.write_model(folder)?;
    learner.write_moments(folder)?;
    let text = serde_json::to_vec_pretty(state).map_err(Error::json(folder.join(STATE)))?;
    write_synced(&folder.join(STATE), &text)?;
    write_synced(&folder.join(SETTINGS), settings.to_toml().as_bytes())?;
    names.extend([OPTIMIZER, STATE, SETTINGS]);
    for (name, bytes) in extra {
        write_synced(&folder.join(name), bytes)?;
        if name != provenance::FILE {
            names.push(name);
        }
    }
    manifest::write(folder, &names)?;
    Ok(sync_folder(folder)?)
}

/// Reads a checkpoint after checking every file against the manifest.
pub fn read(folder: &Path) -> Result<Loaded> {
    verify(folder)?;
    let state = read_state(folder)?;
    let text = read_text(&folder.join(SETTINGS)).map_err(Error::io("read", folder.join(SETTINGS)))?;
    let settings = Settings::from_checkpoint(&text, &folder.join(SETTINGS).display().to_string())?;
    Ok(Loaded { learner: learner::read(folder, &settings, &state)?, state, settings })
}

/// Reads the training state of a checkpoint.
pub fn read_state(folder: &Path) -> Result<State> {
    let path = folder.join(STATE);
    let text = read_text(&path).map_err(Error::io("read", &path))?;
    serde_json::from_str(&text).map_err(Error::json(path))
}

fn damaged(path: PathBuf, problem: impl Into<String>) -> Error {
    Error::Damaged { path, problem: problem.into() }
}
