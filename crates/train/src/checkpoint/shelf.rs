//! The checkpoints of one run: which there are, which are good, which may go.

use std::fs;
use std::path::{Path, PathBuf};

use termwise_llama::Model;

use super::{Loaded, State, manifest, read, read_state, write};
use crate::AdamW;
use crate::error::{Error, Result};
use crate::settings::Settings;
use termwise_base::files::{beside, create_folder, sync_folder};

/// A folder of checkpoints named `step-N`.
#[derive(Clone, Debug)]
pub struct Shelf {
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

impl Shelf {
    /// The checkpoints in this folder, which is created with the first.
    pub fn new(folder: impl Into<PathBuf>) -> Shelf {
        Shelf { folder: folder.into() }
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

    /// Removes what interrupted writes and removals have left behind.
    pub fn clean(&self) -> Result<Vec<PathBuf>> {
        let left = |path: &PathBuf| {
            let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            name.starts_with(".step-") && (name.ends_with(".part") || name.ends_with(".old"))
        };
        let leftovers: Vec<PathBuf> = self.entries()?.into_iter().filter(left).collect();
        for path in &leftovers {
            fs::remove_dir_all(path).map_err(Error::io("remove the leftover", path))?;
        }
        Ok(leftovers)
    }

    /// Writes a checkpoint; it appears whole or not at all, in place of an older one of the same step.
    pub fn save(
        &self,
        model: &Model,
        optimizer: &AdamW,
        state: &State,
        settings: &Settings,
        extra: &[(String, Vec<u8>)],
    ) -> Result<PathBuf> {
        create_folder(&self.folder)?;
        let place = self.place(state.step);
        let part = beside(&place, "part");
        remove_if_there(&part)?;
        if let Err(error) = write(&part, model, optimizer, state, settings, extra) {
            // Room on a full disk; the error that matters is the first one.
            let _ = fs::remove_dir_all(&part);
            return Err(error);
        }
        // A folder cannot be renamed over another.
        self.remove(&place)?;
        fs::rename(&part, &place).map_err(Error::io("put in place", &place))?;
        sync_folder(&self.folder)?;
        Ok(place)
    }

    /// Removes a checkpoint, if there is one. It leaves its name first, so that half a checkpoint is never found under it.
    fn remove(&self, place: &Path) -> Result<()> {
        let old = beside(place, "old");
        remove_if_there(&old)?;
        match fs::rename(place, &old) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Error::io("remove", place)(error)),
            Ok(()) => fs::remove_dir_all(&old).map_err(Error::io("remove", old)),
        }
    }

    /// Removes checkpoints up to `step` except for the newest `keep` complete ones and the one with the best held-out loss.
    pub fn prune(&self, step: u64, keep: usize) -> Result<()> {
        let list: Vec<_> = self.list()?.into_iter().filter(|(at, _)| *at <= step).collect();
        let complete: Vec<&PathBuf> = list.iter().map(|(_, path)| path).filter(|path| manifest::looks_complete(path)).collect();
        let Some(oldest) = complete.iter().rev().nth(keep.saturating_sub(1)) else { return Ok(()) };
        let loss = |path: &&PathBuf| read_state(path).ok().and_then(|state| state.held_out);
        let measured = complete.iter().filter_map(|path| Some((loss(path)?, *path)));
        // Of equal ones the earliest.
        let best = measured.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, path)| path);
        for (_, path) in list.iter().filter(|(_, path)| path < *oldest && Some(path) != best) {
            self.remove(path)?;
        }
        Ok(())
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

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    }
}
