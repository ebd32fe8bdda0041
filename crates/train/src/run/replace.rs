//! `train --overwrite`: a new run replaces an old one. If the process is killed at any point, no run is lost and no files are mixed.
//!
//! ```text
//! runs/NAME              the run
//! runs/.NAME.replaced    during a replacement: first the new run, then, after the exchange, the old one
//! ```
//!
//! The directory of the new run contains [`MARKER`] until its first checkpoint is complete, so the two runs can be distinguished at any time. Then the old run
//! is removed; files in its directory that are not part of a run are moved to the new one. If the new run fails before, the two are exchanged again.
//!
//! | `NAME` | `.NAME.replaced` | the process was killed | [`recover`] |
//! |---|---|---|---|
//! | old | new | before the exchange | removes the new run |
//! | new, without checkpoint | old | before the first checkpoint | keeps both, or restores the old run for another `--overwrite` |
//! | new, with checkpoint | old | before or during the removal of the old run | removes the old run |
//! | absent | old | between two renames, on a file system that cannot exchange directories | restores the old run |

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{is_run_file, lock};
use crate::checkpoint::{Checkpoints, SETTINGS};
use crate::error::{Error, Result};
use crate::provenance::{self, Provenance};
use termwise_base::files::{hidden_sibling, sync_folder, write_synced};

/// File in the directory of a run that replaces another one and has no checkpoint yet.
pub(super) const MARKER: &str = ".replaces";

/// The old run.
const REPLACED: &str = "replaced";
/// The old run between two renames, on a file system that cannot exchange directories.
const MOVING: &str = "moving";
/// A directory that is being removed. It is renamed first, so a partially removed run is never mistaken for a run.
const REMOVED: &str = "gone";

/// A run that replaces another one. On drop, it restores the old run unless [`Replacement::commit`] was called.
#[derive(Debug)]
pub(super) struct Replacement {
    run: PathBuf,
    /// Lock of the new run. The caller of [`Replacement::begin`] has the lock of the old one.
    _lock: Option<File>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The old run is restored if the new one fails.
    Revertible,
    /// A resumed run, whose first checkpoint completes the replacement that an earlier process started. If it fails, both runs are kept.
    Pending,
    /// The old run was removed or restored.
    Settled,
}

impl Replacement {
    /// Exchanges the run in `folder`, whose lock is taken, for a new one with only its settings and provenance.
    pub(super) fn begin(folder: &Path, settings: &str, made_by: &Provenance) -> Result<Replacement> {
        let run = folder.canonicalize().map_err(Error::io("find", folder))?;
        let staged = hidden_sibling(&run, REPLACED);
        fs::create_dir(&staged).map_err(Error::io("create the folder", &staged))?;
        let prepare = || -> Result<File> {
            let text = "This run replaces another one, which is kept in the directory .NAME.replaced until the first checkpoint.\n";
            write_synced(&staged.join(MARKER), text.as_bytes())?;
            let lock = lock(&staged)?;
            write_synced(&staged.join(SETTINGS), settings.as_bytes())?;
            provenance::note(&staged, made_by)?;
            sync_folder(&staged)?;
            exchange(&run, &staged)?;
            Ok(lock)
        };
        match prepare() {
            Ok(lock) => Ok(Replacement { run, _lock: Some(lock), state: State::Revertible }),
            Err(error) => {
                // This error is returned. A directory that remains is removed by the next command.
                let _ = remove_folder(&run, &staged);
                Err(error)
            }
        }
    }

    /// The replacement that [`recover`] found in the directory of a resumed run.
    pub(super) fn resume(folder: &Path) -> Result<Replacement> {
        let run = folder.canonicalize().map_err(Error::io("find", folder))?;
        Ok(Replacement { run, _lock: None, state: State::Pending })
    }

    /// Removes the old run after the first checkpoint of the new one. Later calls do nothing.
    pub(super) fn commit(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Settled) {
            State::Settled => Ok(()),
            State::Revertible | State::Pending => finish(&self.run),
        }
    }

    /// Restores the old run unless the replacement is committed. With `keep`, the new run is kept in a directory next to it, whose path is returned.
    pub(super) fn revert(&mut self, keep: bool) -> Result<Option<PathBuf>> {
        match std::mem::replace(&mut self.state, State::Settled) {
            State::Settled | State::Pending => Ok(None),
            State::Revertible => put_back(&self.run, keep),
        }
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        // After an error or a panic. The next command retries after a failure here.
        let _ = self.revert(false);
    }
}

/// The state of a directory after [`recover`].
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// The directory contains a run without a checkpoint that replaces the run in this directory.
    pub replaced: Option<PathBuf>,
    /// The actions taken.
    pub warnings: Vec<String>,
}

/// Restores the run of a missing directory, if a replacement has renamed it.
pub(super) fn recover_missing(folder: &Path) -> Result<()> {
    if folder.exists() {
        return Ok(());
    }
    for hidden in [hidden_sibling(folder, MOVING), hidden_sibling(folder, REPLACED)] {
        if hidden.join(SETTINGS).is_file() && !is_marked(&hidden) {
            return match fs::rename(&hidden, folder) {
                // Another process may have done it.
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("replace", folder)(error)),
                _ => Ok(()),
            };
        }
    }
    Ok(())
}

/// Completes or reverts an interrupted replacement in this directory. `held` is the directory's lock. Returns the lock of the remaining run. With
/// `restore`, the old run is restored if the new run has no checkpoint.
pub(super) fn recover(folder: &Path, held: File, restore: bool) -> Result<(File, Recovered)> {
    let run = folder.canonicalize().map_err(Error::io("find", folder))?;
    // A path such as `/` has no parent.
    if run.file_name().is_none() {
        return Ok((held, Recovered::default()));
    }
    let (replaced, moving) = (hidden_sibling(&run, REPLACED), hidden_sibling(&run, MOVING));
    remove_if_there(&hidden_sibling(&run, REMOVED))?;
    if moving.exists() && !replaced.exists() {
        fs::rename(&moving, &replaced).map_err(Error::io("rename", &moving))?;
    }
    let mut found = Recovered::default();
    if !replaced.exists() {
        return remove_marker(&run).map(|()| (held, found));
    }
    if is_marked(&replaced) {
        remove_folder(&run, &replaced)?;
        return Ok((held, found));
    }
    if is_marked(&run) {
        let checkpoints = Checkpoints::new(run.join("checkpoints"));
        found.warnings = checkpoints.clean()?;
        if !checkpoints.has_complete()? {
            if !restore {
                found.replaced = Some(replaced);
                return Ok((held, found));
            }
            let old = lock(&replaced)?;
            put_back(&run, false)?;
            let text = "an earlier replacement of this run was interrupted before its first checkpoint; the old run was restored first";
            return Ok((old, Recovered { replaced: None, warnings: vec![text.into()] }));
        }
    }
    finish(&run)?;
    Ok((held, found))
}

/// The run that the one in this directory replaces, if the latter has no checkpoint yet.
pub fn replaced_by(folder: &Path) -> Option<PathBuf> {
    let replaced = hidden_sibling(&folder.canonicalize().ok()?, REPLACED);
    (is_marked(folder) && replaced.is_dir() && !is_marked(&replaced)).then_some(replaced)
}

/// Resolves a path that may be in a run that is being replaced, such as a checkpoint to start from.
pub(crate) fn locate(path: &str) -> PathBuf {
    let path = Path::new(path);
    if !path.exists() {
        let moved = |ancestor: &Path| Some(replaced_by(ancestor)?.join(path.strip_prefix(ancestor).ok()?));
        if let Some(found) = path.ancestors().skip(1).filter(|ancestor| !ancestor.as_os_str().is_empty()).find_map(moved) {
            return found;
        }
    }
    path.to_owned()
}

fn is_marked(folder: &Path) -> bool {
    folder.join(MARKER).exists()
}

fn remove_marker(run: &Path) -> Result<()> {
    let marker = run.join(MARKER);
    match fs::remove_file(&marker) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => {
            removed.map_err(Error::io("remove", &marker))?;
            Ok(sync_folder(run)?)
        }
    }
}

/// Completes a replacement: files that are not part of the old run are moved to the new one, then the old one is removed.
fn finish(run: &Path) -> Result<()> {
    remove_marker(run)?;
    let replaced = hidden_sibling(run, REPLACED);
    for entry in fs::read_dir(&replaced).map_err(Error::io("list", &replaced))? {
        let entry = entry.map_err(Error::io("list", &replaced))?;
        let name = entry.file_name();
        if is_run_file(&name.to_string_lossy()) {
            continue;
        }
        let mut target = run.join(&name);
        while target.symlink_metadata().is_ok() {
            // The new directory already has a file of this name.
            target.as_mut_os_string().push(".old");
        }
        fs::rename(entry.path(), &target).map_err(Error::io("move", entry.path()))?;
    }
    sync_folder(run)?;
    remove_folder(run, &replaced)
}

/// Restores the old run and removes the new one, or keeps it as `NAME.failed`.
fn put_back(run: &Path, keep: bool) -> Result<Option<PathBuf>> {
    let replaced = hidden_sibling(run, REPLACED);
    exchange(run, &replaced)?;
    if !keep {
        return remove_folder(run, &replaced).map(|()| None);
    }
    let name = run.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let names = std::iter::once(format!("{name}.failed")).chain((2..).map(|n| format!("{name}.failed-{n}")));
    let free = names.map(|name| run.with_file_name(name)).find(|place| place.symlink_metadata().is_err());
    let place = free.ok_or(Error::Internal("there is no free name for a failed run"))?;
    remove_marker(&replaced)?;
    fs::rename(&replaced, &place).map_err(Error::io("rename", &replaced))?;
    Ok(Some(place))
}

/// Removes a directory next to a run.
fn remove_folder(run: &Path, folder: &Path) -> Result<()> {
    let gone = hidden_sibling(run, REMOVED);
    remove_if_there(&gone)?;
    fs::rename(folder, &gone).map_err(Error::io("remove", folder))?;
    remove_if_there(&gone)
}

fn remove_if_there(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", folder)(error)),
        _ => Ok(()),
    }
}

/// Exchanges the names of a run and its hidden sibling: atomically if the file system supports it, otherwise by three renames, from which [`recover`] can recover.
fn exchange(run: &Path, hidden: &Path) -> Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        use rustix::io::Errno;
        match renameat_with(CWD, run, CWD, hidden, RenameFlags::EXCHANGE) {
            // Network file systems and old kernels.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
            done => {
                done.map_err(|error| Error::io("replace", run)(error.into()))?;
                return Ok(sync_folder(run.parent().unwrap_or(Path::new("")))?);
            }
        }
    }
    exchange_by_renames(run, hidden)
}

fn exchange_by_renames(run: &Path, hidden: &Path) -> Result<()> {
    let moving = hidden_sibling(run, MOVING);
    fs::rename(run, &moving).map_err(Error::io("rename", run))?;
    if let Err(error) = fs::rename(hidden, run) {
        // This error is returned. The next command retries after a failure here.
        let _ = fs::rename(&moving, run);
        return Err(Error::io("rename", hidden)(error));
    }
    fs::rename(&moving, hidden).map_err(Error::io("rename", &moving))?;
    Ok(sync_folder(run.parent().unwrap_or(Path::new("")))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::LOCK;

    struct Place {
        folder: tempfile::TempDir,
    }

    impl Place {
        /// An old run `a` with a file that is not part of the run.
        fn new() -> Place {
            let place = Place { folder: tempfile::tempdir().expect("a folder") };
            place.write("a/settings.toml", "old");
            place.write("a/provenance.json", "[]");
            place.write("a/metrics.later.jsonl", "old");
            place.write("a/notes.txt", "mine");
            place.complete_checkpoint("a", 7);
            place
        }

        fn at(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn write(&self, name: &str, text: &str) {
            fs::create_dir_all(self.at(name).parent().expect("a folder")).expect("a folder");
            fs::write(self.at(name), text).expect("a file");
        }

        fn complete_checkpoint(&self, run: &str, step: u64) {
            let folder = self.at(&format!("{run}/checkpoints/step-{step:08}"));
            fs::create_dir_all(&folder).expect("a folder");
            crate::checkpoint::write_empty_manifest(&folder).expect("a manifest");
        }

        fn begin(&self) -> Replacement {
            Replacement::begin(&self.at("a"), "new", &Provenance::default()).expect("replaced")
        }

        fn recover(&self, restore: bool) -> Recovered {
            recover_missing(&self.at("a")).expect("recovered");
            let held = lock(&self.at("a")).expect("free");
            recover(&self.at("a"), held, restore).expect("recovered").1
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.folder.path()).expect("a folder");
            let mut names: Vec<String> = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        }

        fn settings(&self, run: &str) -> String {
            fs::read_to_string(self.at(run).join(SETTINGS)).expect("settings")
        }

        fn assert_old(&self) {
            assert_eq!((self.names(), self.settings("a").as_str()), (vec!["a".to_owned()], "old"));
            assert!(self.at("a/checkpoints/step-00000007/manifest.json").is_file() && self.at("a/notes.txt").is_file());
            assert!(!is_marked(&self.at("a")));
        }

        /// Nothing of the old run except the file that was not part of it.
        fn assert_new(&self) {
            assert_eq!((self.names(), self.settings("a").as_str()), (vec!["a".to_owned()], "new"));
            let entries = fs::read_dir(self.at("a")).expect("a folder");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            assert_eq!(names, ["checkpoints", "notes.txt", "provenance.json", LOCK, "settings.toml"]);
            assert!(!self.at("a/checkpoints/step-00000007").exists());
        }
    }

    #[test]
    fn the_old_run_is_removed_after_the_first_checkpoint_and_restored_before() {
        let place = Place::new();
        let replacement = place.begin();
        assert_eq!((place.settings("a").as_str(), place.settings(".a.replaced").as_str()), ("new", "old"));
        assert_eq!(replaced_by(&place.at("a")), Some(place.at("a").canonicalize().expect("a path").with_file_name(".a.replaced")));
        let inside = place.at("a/checkpoints/step-00000007");
        assert!(!inside.exists() && locate(inside.to_str().expect("a path")).join("manifest.json").is_file());
        drop(replacement);
        place.assert_old();
        let mut replacement = place.begin();
        place.complete_checkpoint("a", 3);
        replacement.commit().expect("removed");
        drop(replacement);
        place.assert_new();
        assert_eq!(replaced_by(&place.at("a")), None);
    }

    #[test]
    fn a_failed_run_is_kept_next_to_the_old_one_on_request() {
        let place = Place::new();
        for name in ["a.failed", "a.failed-2"] {
            let kept = place.begin().revert(true).expect("restored").expect("kept");
            assert_eq!((kept.file_name().expect("a name").to_str(), place.settings(name).as_str()), (Some(name), "new"));
            assert!(!is_marked(&kept) && place.settings("a") == "old");
        }
    }

    /// Every state in which a killed process can leave the directory.
    #[test]
    fn interrupted_replacements_are_recovered() {
        let killed = |place: &Place| std::mem::forget(place.begin());
        for restore in [false, true] {
            // Before the exchange.
            let place = Place::new();
            place.write(".a.replaced/.replaces", "");
            place.write(".a.replaced/settings.toml", "new");
            place.recover(restore);
            place.assert_old();
            // After the first checkpoint, before the old run is removed.
            let place = Place::new();
            killed(&place);
            place.complete_checkpoint("a", 3);
            fs::remove_file(place.at("a/run.lock")).expect("the lock of the process");
            place.recover(restore);
            place.assert_new();
            // While the old run is removed.
            place.write(".a.gone/settings.toml", "old");
            place.recover(restore);
            place.assert_new();
        }
        // Before the first checkpoint.
        let place = Place::new();
        killed(&place);
        fs::remove_file(place.at("a/run.lock")).expect("the lock of the process");
        assert!(place.recover(false).replaced.is_some_and(|old| old.ends_with(".a.replaced")));
        assert_eq!((place.settings("a").as_str(), place.settings(".a.replaced").as_str()), ("new", "old"));
        assert!(place.recover(true).warnings[0].contains("restored"));
        place.assert_old();
        // The old run is removed by hand.
        killed(&place);
        fs::remove_file(place.at("a/run.lock")).expect("the lock of the process");
        fs::remove_dir_all(place.at(".a.replaced")).expect("a folder");
        assert!(place.recover(false).replaced.is_none() && !is_marked(&place.at("a")));
        // The new run is removed by hand.
        let place = Place::new();
        killed(&place);
        fs::remove_dir_all(place.at("a")).expect("a folder");
        place.recover(false);
        place.assert_old();
    }

    #[test]
    fn three_rename_exchanges_are_recovered_at_every_point() {
        let rename = |place: &Place, from: &str, to: &str| fs::rename(place.at(from), place.at(to)).expect("renamed");
        // The new run replaces the old one.
        for renames in 1..=3 {
            let place = Place::new();
            place.write(".a.replaced/.replaces", "");
            place.write(".a.replaced/settings.toml", "new");
            for (from, to) in [("a", ".a.moving"), (".a.replaced", "a"), (".a.moving", ".a.replaced")].into_iter().take(renames) {
                rename(&place, from, to);
            }
            let found = place.recover(false);
            assert_eq!((found.replaced.is_some(), place.settings("a").as_str()), (renames > 1, if renames > 1 { "new" } else { "old" }));
            place.recover(true);
            place.assert_old();
        }
        // The old run is restored.
        for renames in 1..=3 {
            let place = Place::new();
            rename(&place, "a", ".a.replaced");
            place.write("a/.replaces", "");
            place.write("a/settings.toml", "new");
            for (from, to) in [("a", ".a.moving"), (".a.replaced", "a"), (".a.moving", ".a.replaced")].into_iter().take(renames) {
                rename(&place, from, to);
            }
            place.recover(false);
            place.assert_old();
        }
        let place = Place::new();
        place.write(".a.replaced/settings.toml", "new");
        exchange_by_renames(&place.at("a"), &place.at(".a.replaced")).expect("exchanged");
        assert_eq!((place.settings("a").as_str(), place.settings(".a.replaced").as_str()), ("new", "old"));
    }
}
