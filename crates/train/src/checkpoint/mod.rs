//! Checkpoints: folders that Hugging Face's tools open, with all that a run needs to go on bit for bit.
//!
//! ```text
//! checkpoints/step-00000500/
//!     config.json  model.safetensors     the model
//!     optimizer.safetensors              both moments of AdamW, `first.` and `second.` before each parameter's name
//!     state.json                         step, position in the data and everything else that changes from step to step
//!     settings.toml                      the settings of the run
//!     manifest.json                      size and BLAKE3 hash of every file above
//!     provenance.json                    which builds made it: [`crate::provenance`]
//! ```
//!
//! A checkpoint is written into a hidden folder beside its place, flushed to the disk and renamed. It counts only if its manifest
//! and every file are as they were written.

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

pub use folder::{Checkpoints, Found};
pub use manifest::{MANIFEST, verify};

/// The smallest folder that counts as complete.
#[cfg(test)]
pub(crate) fn write_empty_manifest(folder: &Path) -> Result<()> {
    manifest::write(folder, &[])
}

/// Name of the file with the state.
pub const STATE: &str = "state.json";
/// Name of the file with the settings.
pub const SETTINGS: &str = "settings.toml";
/// Name of the file with the moments.
pub const OPTIMIZER: &str = "optimizer.safetensors";

/// What changes from step to step besides weights and moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Steps done, skipped ones included.
    pub step: u64,
    /// Updates done, AdamW's count.
    pub updates: u64,
    /// Updates skipped because something was not finite.
    pub skipped: u64,
    /// The run's seed.
    pub seed: u64,
    /// Index of the next batch.
    pub data_index: u64,
    /// Tokens seen that counted.
    pub tokens: u64,
    /// Sum of the losses since the last line of metrics.
    pub window_loss: f64,
    /// Steps since the last line of metrics.
    pub window_steps: u64,
    /// Whether one of them was a spike.
    pub window_spike: bool,
    /// What spikes of the loss are measured by.
    pub spikes: Spikes,
    /// Held-out loss at this step, where it was measured.
    pub held_out: Option<f64>,
    /// The best held-out loss so far.
    pub best: Option<Best>,
    /// [`Settings::hash`].
    pub settings: String,
    /// Fingerprint of the data.
    pub source: String,
}

/// A held-out loss and when it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Step.
    pub step: u64,
    /// Loss in nats per token.
    pub loss: f64,
}

/// What a checkpoint holds.
#[derive(Debug)]
pub struct Loaded {
    /// The model and its moments.
    pub learner: Box<Native>,
    /// Where the run was.
    pub state: State,
    /// The run's settings.
    pub settings: Settings,
}

/// Writes all files of a checkpoint into `folder`, which must not exist, manifest last, everything flushed to the disk.
/// `extra` are further files by name, such as a tokenizer.
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

/// The state in a checkpoint.
pub fn read_state(folder: &Path) -> Result<State> {
    let path = folder.join(STATE);
    let text = read_text(&path).map_err(Error::io("read", &path))?;
    serde_json::from_str(&text).map_err(Error::json(path))
}

fn damaged(path: PathBuf, problem: impl Into<String>) -> Error {
    Error::Damaged { path, problem: problem.into() }
}
