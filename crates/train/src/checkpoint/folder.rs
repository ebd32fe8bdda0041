//! The checkpoints of a run: listing, validation, pruning.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Loaded, State, manifest, read, read_state, write};
use crate::error::{Error, Result};
use crate::learner::Learner;
use crate::settings::Settings;
use termwise_base::files::{create_folder, hidden_sibling, sync_folder};

/// Suffixes of hidden directories: being written, being replaced, being removed.
const WRITING: &str = "part";
const REPLACED: &str = "old";
const REMOVED: &str = "gone";

/// A directory of checkpoints named `step-N`.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// The newest valid checkpoint.
#[derive(Debug)]
pub struct LocatedCheckpoint {
    /// Its directory.
    pub path: PathBuf,
    /// Its content.
    pub loaded: Loaded,
    /// The problems of newer checkpoints.
    pub skipped: Vec<Error>,
}

impl Checkpoints {
    /// The checkpoints in this directory. It is created with the first checkpoint.
    pub fn new(folder: impl Into<PathBuf>) -> Checkpoints {
        Checkpoints { folder: folder.into() }
    }

    /// Path of the checkpoint of a step.
    pub fn place(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:08}"))
    }

    /// Every checkpoint, including damaged ones, ascending by step.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>> {
        let mut found = Vec::new();
        for path in self.entries()? {
            let step = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("step-"));
            if let Some(step) = step.and_then(|digits| digits.parse().ok()) {
                found.push((step, path));
            }
        }
        found.sort();
        Ok(found)
    }

    fn entries(&self) -> Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(Error::io("list", &self.folder))?,
        };
        entries.map(|entry| Ok(entry.map_err(Error::io("list", &self.folder))?.path())).collect()
    }

    /// Recovers from interrupted writes and removals. A complete checkpoint whose step is missing is renamed to its final name; everything
    /// else is removed. Returns one message per action.
    pub fn clean(&self) -> Result<Vec<String>> {
        let left = |path: PathBuf| {
            let name = path.file_name()?.to_str()?;
            let (step, ending) = name.strip_prefix(".step-")?.rsplit_once('.')?;
            [WRITING, REPLACED, REMOVED].contains(&ending).then(|| (step.parse::<u64>().ok(), ending == REMOVED, path.clone()))
        };
        let mut leftovers: Vec<_> = self.entries()?.into_iter().filter_map(left).collect();
        // A new checkpoint is considered before the one it replaces.
        leftovers.sort_by(|a, b| b.2.cmp(&a.2));
        let mut messages = Vec::new();
        for (step, gone, path) in leftovers {
            match step.map(|step| self.place(step)).filter(|place| !gone && !place.exists() && manifest::verify(&path).is_ok()) {
                Some(place) => {
                    fs::rename(&path, &place).map_err(Error::io("replace", &place))?;
                    messages.push(format!("recovered {}: it was complete when the write was interrupted", place.display()));
                }
                None => {
                    fs::remove_dir_all(&path).map_err(Error::io("remove the temporary directory", &path))?;
                    messages.push(format!("removed {}, left by an interrupted write", path.display()));
                }
            }
        }
        if !messages.is_empty() {
            sync_folder(&self.folder)?;
        }
        Ok(messages)
    }

    /// Writes a checkpoint atomically and replaces an older one of the same step. At any time one of the two is
    /// complete, under its final name or where [`Checkpoints::clean`] recovers it.
    pub fn save(&self, learner: &dyn Learner, state: &State, settings: &Settings, extra: &[(String, Vec<u8>)]) -> Result<PathBuf> {
        create_folder(&self.folder)?;
        let place = self.place(state.step);
        let (part, old) = (hidden_sibling(&place, WRITING), hidden_sibling(&place, REPLACED));
        remove_if_there(&part)?;
        if let Err(error) = write(&part, learner, state, settings, extra) {
            // Frees space on a full disk. The first error is returned.
            let _ = fs::remove_dir_all(&part);
            return Err(error);
        }
        // A directory cannot be renamed over another; the older one is removed last.
        remove_if_there(&old)?;
        move_away(&place, &old)?;
        fs::rename(&part, &place).map_err(Error::io("replace", &place))?;
        sync_folder(&self.folder)?;
        remove_if_there(&old)?;
        Ok(place)
    }

    /// Removes a checkpoint, if it exists. It is renamed first, so an incomplete checkpoint never has the final name.
    fn remove(&self, place: &Path) -> Result<()> {
        let gone = hidden_sibling(place, REMOVED);
        remove_if_there(&gone)?;
        move_away(place, &gone)?;
        remove_if_there(&gone)
    }

    /// Removes checkpoints up to `step`, except the newest `keep` complete ones and the one with the best held-out loss.
    pub fn prune(&self, step: u64, keep: usize) -> Result<()> {
        let list: Vec<_> = self.list()?.into_iter().filter(|(at, _)| *at <= step).collect();
        let complete: Vec<&(u64, PathBuf)> = list.iter().filter(|(_, path)| manifest::looks_complete(path)).collect();
        let Some((oldest, _)) = complete.iter().rev().nth(keep.saturating_sub(1)) else { return Ok(()) };
        let loss = |path: &Path| read_state(path).ok().and_then(|state| state.held_out);
        let measured = complete.iter().filter_map(|(step, path)| Some((loss(path)?, *step)));
        // The earliest of equal losses.
        let best = measured.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, step)| step);
        for (_, path) in list.iter().filter(|(step, _)| step < oldest && Some(*step) != best) {
            self.remove(path)?;
        }
        Ok(())
    }

    /// Whether any checkpoint has files of the expected sizes.
    pub fn has_complete(&self) -> Result<bool> {
        Ok(self.list()?.iter().any(|(_, path)| manifest::looks_complete(path)))
    }

    /// The newest valid checkpoint and the problems of newer ones; `None` if there are no checkpoints.
    /// An error if none of them is valid.
    pub fn newest(&self) -> Result<Option<LocatedCheckpoint>> {
        self.newest_before(u64::MAX)
    }

    fn newest_before(&self, step: u64) -> Result<Option<LocatedCheckpoint>> {
        let mut skipped = Vec::new();
        for (_, path) in self.list()?.into_iter().rev().filter(|(at, _)| *at < step) {
            match read(&path) {
                Ok(loaded) => return Ok(Some(LocatedCheckpoint { path, loaded, skipped })),
                Err(error) => skipped.push(error),
            }
        }
        match skipped.first() {
            None => Ok(None),
            Some(first) => {
                let problem = format!("none of its {} checkpoints is valid; the newest one: {first}", skipped.len());
                Err(Error::NoCheckpoint { folder: self.folder.clone(), problem })
            }
        }
    }

    /// This checkpoint. If it is damaged, the error names the newest valid checkpoint before it.
    pub fn exactly(&self, path: &Path) -> Result<LocatedCheckpoint> {
        let error = match read(path) {
            Ok(loaded) => return Ok(LocatedCheckpoint { path: path.into(), loaded, skipped: Vec::new() }),
            Err(error) => error,
        };
        let step = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("step-")).and_then(|s| s.parse().ok());
        match self.newest_before(step.unwrap_or(u64::MAX)) {
            Ok(Some(good)) => Err(Error::OlderIsGood { error: Box::new(error), good: good.path }),
            _ => Err(error),
        }
    }
}

/// Renames a directory, if it exists.
fn move_away(place: &Path, to: &Path) -> Result<()> {
    match fs::rename(place, to) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", place)(error)),
        _ => Ok(()),
    }
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    }
}
