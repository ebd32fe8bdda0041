//! The checkpoints of one run: which there are, which are good, which may go.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Loaded, State, manifest, read, read_state, write};
use crate::error::{Error, Result};
use crate::learner::Learner;
use crate::settings::Settings;
use termwise_base::files::{beside, create_folder, sync_folder};

/// Endings of hidden folders: what is being written, what it replaces, what is being removed.
const PART: &str = "part";
const OLD: &str = "old";
const GONE: &str = "gone";

/// A folder of checkpoints named `step-N`.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// The newest good checkpoint.
#[derive(Debug)]
pub struct Found {
    /// Its folder.
    pub path: PathBuf,
    /// What it holds.
    pub loaded: Loaded,
    /// What is wrong with newer ones.
    pub skipped: Vec<Error>,
}

impl Checkpoints {
    /// The checkpoints in this folder, which is created with the first.
    pub fn new(folder: impl Into<PathBuf>) -> Checkpoints {
        Checkpoints { folder: folder.into() }
    }

    /// Where the checkpoint of a step belongs.
    pub fn place(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:08}"))
    }

    /// Every checkpoint, damaged ones too, ascending by step.
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

    /// Sees to what interrupted writes and removals have left behind: a complete checkpoint whose step is missing is put in place, everything
    /// else is removed. Says what was done.
    pub fn clean(&self) -> Result<Vec<String>> {
        let left = |path: PathBuf| {
            let name = path.file_name()?.to_str()?;
            let (step, ending) = name.strip_prefix(".step-")?.rsplit_once('.')?;
            [PART, OLD, GONE].contains(&ending).then(|| (step.parse::<u64>().ok(), ending == GONE, path.clone()))
        };
        let mut leftovers: Vec<_> = self.entries()?.into_iter().filter_map(left).collect();
        // What was to replace a checkpoint comes before what it was to replace.
        leftovers.sort_by(|a, b| b.2.cmp(&a.2));
        let mut told = Vec::new();
        for (step, gone, path) in leftovers {
            match step.map(|step| self.place(step)).filter(|place| !gone && !place.exists() && manifest::verify(&path).is_ok()) {
                Some(place) => {
                    fs::rename(&path, &place).map_err(Error::io("put in place", &place))?;
                    told.push(format!("{} was complete when its writing was interrupted, and is put in its place", place.display()));
                }
                None => {
                    fs::remove_dir_all(&path).map_err(Error::io("remove the leftover", &path))?;
                    told.push(format!("removed what an interrupted write left at {}", path.display()));
                }
            }
        }
        if !told.is_empty() {
            sync_folder(&self.folder)?;
        }
        Ok(told)
    }

    /// Writes a checkpoint; it appears whole or not at all, in place of an older one of the same step. At every moment one of the two is
    /// complete, under its name or where [`Checkpoints::clean`] finds it.
    pub fn save(&self, learner: &dyn Learner, state: &State, settings: &Settings, extra: &[(String, Vec<u8>)]) -> Result<PathBuf> {
        create_folder(&self.folder)?;
        let place = self.place(state.step);
        let (part, old) = (beside(&place, PART), beside(&place, OLD));
        remove_if_there(&part)?;
        if let Err(error) = write(&part, learner, state, settings, extra) {
            // Room on a full disk; the error that matters is the first one.
            let _ = fs::remove_dir_all(&part);
            return Err(error);
        }
        // A folder cannot be renamed over another; the older one goes last.
        remove_if_there(&old)?;
        move_away(&place, &old)?;
        fs::rename(&part, &place).map_err(Error::io("put in place", &place))?;
        sync_folder(&self.folder)?;
        remove_if_there(&old)?;
        Ok(place)
    }

    /// Removes a checkpoint, if there is one. It leaves its name first, so that half a checkpoint is never found under it.
    fn remove(&self, place: &Path) -> Result<()> {
        let gone = beside(place, GONE);
        remove_if_there(&gone)?;
        move_away(place, &gone)?;
        remove_if_there(&gone)
    }

    /// Removes checkpoints up to `step` except for the newest `keep` complete ones and the one with the best held-out loss.
    pub fn prune(&self, step: u64, keep: usize) -> Result<()> {
        let list: Vec<_> = self.list()?.into_iter().filter(|(at, _)| *at <= step).collect();
        let complete: Vec<&(u64, PathBuf)> = list.iter().filter(|(_, path)| manifest::looks_complete(path)).collect();
        let Some((oldest, _)) = complete.iter().rev().nth(keep.saturating_sub(1)) else { return Ok(()) };
        let loss = |path: &Path| read_state(path).ok().and_then(|state| state.held_out);
        let measured = complete.iter().filter_map(|(step, path)| Some((loss(path)?, *step)));
        // Of equal ones the earliest.
        let best = measured.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, step)| step);
        for (_, path) in list.iter().filter(|(step, _)| step < oldest && Some(*step) != best) {
            self.remove(path)?;
        }
        Ok(())
    }

    /// Whether there is a checkpoint whose files have the right sizes.
    pub fn has_complete(&self) -> Result<bool> {
        Ok(self.list()?.iter().any(|(_, path)| manifest::looks_complete(path)))
    }

    /// The newest good checkpoint, and what is wrong with newer ones; `None` where there is no checkpoint at all.
    /// An error where there are some and none is good.
    pub fn newest(&self) -> Result<Option<Found>> {
        self.newest_before(u64::MAX)
    }

    fn newest_before(&self, step: u64) -> Result<Option<Found>> {
        let mut skipped = Vec::new();
        for (_, path) in self.list()?.into_iter().rev().filter(|(at, _)| *at < step) {
            match read(&path) {
                Ok(loaded) => return Ok(Some(Found { path, loaded, skipped })),
                Err(error) => skipped.push(error),
            }
        }
        match skipped.first() {
            None => Ok(None),
            Some(first) => {
                let problem = format!("none of its {} checkpoints is good, the newest because: {first}", skipped.len());
                Err(Error::NoCheckpoint { folder: self.folder.clone(), problem })
            }
        }
    }

    /// Exactly this checkpoint. Where it is damaged the error says which earlier one is good.
    pub fn exactly(&self, path: &Path) -> Result<Found> {
        let error = match read(path) {
            Ok(loaded) => return Ok(Found { path: path.into(), loaded, skipped: Vec::new() }),
            Err(error) => error,
        };
        let step = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("step-")).and_then(|s| s.parse().ok());
        match self.newest_before(step.unwrap_or(u64::MAX)) {
            Ok(Some(good)) => Err(Error::OlderIsGood { error: Box::new(error), good: good.path }),
            _ => Err(error),
        }
    }
}

/// Gives a folder another name, if it is there.
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
