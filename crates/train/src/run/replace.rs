//! `train --overwrite`: a new run takes the place of an old one, and nothing of either is lost or mixed whenever the process is killed.
//!
//! ```text
//! runs/NAME              the run
//! runs/.NAME.replaced    during a replacement: first the new run, then, after both were exchanged, the old one
//! ```
//!
//! The folder of the new run contains [`MARKER`] until its first checkpoint is complete, so both can be told apart at any time. Then the old run is removed;
//! files in its folder that are not part of a run are moved to the new one. If the new run fails before, both are exchanged again.
//!
//! | `NAME` | `.NAME.replaced` | the process was killed | [`recover`] |
//! |---|---|---|---|
//! | old | new | before the exchange | removes the new run |
//! | new, without checkpoint | old | before the first checkpoint | keeps both, or puts the old run back for another `--overwrite` |
//! | new, with checkpoint | old | before or while the old run was removed | removes the old run |
//! | absent | old | between two renames, on a file system that cannot exchange folders | puts the old run back |

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{is_run_file, lock};
use crate::checkpoint::{Checkpoints, SETTINGS};
use crate::error::{Error, Result};
use crate::provenance::{self, Provenance};
use termwise_base::files::{beside, sync_folder, write_synced};

/// In the folder of a run that replaces another one and has no checkpoint yet.
pub(super) const MARKER: &str = ".replaces";

/// The old run.
const REPLACED: &str = "replaced";
/// The old run between two renames, on a file system that cannot exchange folders.
const MOVING: &str = "moving";
/// A folder that is being removed. It gets this name first, so that no part of a run is taken for a run.
const GONE: &str = "gone";

/// A run that replaces another one. Unless [`Replacement::commit`] was called, it puts the old run back when it is dropped.
#[derive(Debug)]
pub(super) struct Replacement {
    run: PathBuf,
    /// Of the new run, held as long as the process works on it; the caller of [`Replacement::begin`] holds that of the old one.
    _lock: Option<File>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The old run is put back if the new one fails.
    Revertible,
    /// A resumed run, whose first checkpoint completes the replacement that an earlier process began. If it fails, both runs are kept.
    Pending,
    /// The old run is removed, or was put back.
    Settled,
}

impl Replacement {
    /// Exchanges the run in `folder`, whose lock is held, for a new one that has only its settings and its provenance.
    pub(super) fn begin(folder: &Path, settings: &str, made_by: &Provenance) -> Result<Replacement> {
        let run = folder.canonicalize().map_err(Error::io("find", folder))?;
        let staged = beside(&run, REPLACED);
        fs::create_dir(&staged).map_err(Error::io("create the folder", &staged))?;
        let prepare = || -> Result<File> {
            let text = "This run replaces another one, which is kept in the folder that is named after it with the ending .replaced until the first checkpoint.\n";
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
                // The error that matters is this one; a folder that stays is removed by the next command.
                let _ = remove_folder(&run, &staged);
                Err(error)
            }
        }
    }

    /// The replacement that [`recover`] has found in the folder of a run that is resumed.
    pub(super) fn resume(folder: &Path) -> Result<Replacement> {
        let run = folder.canonicalize().map_err(Error::io("find", folder))?;
        Ok(Replacement { run, _lock: None, state: State::Pending })
    }

    /// Removes the old run, once the new one has a checkpoint. Later calls do nothing.
    pub(super) fn commit(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Settled) {
            State::Settled => Ok(()),
            State::Revertible | State::Pending => finish(&self.run),
        }
    }

    /// Puts the old run back unless the new one counts. With `keep`, the new one stays in a folder next to it, which is returned.
    pub(super) fn revert(&mut self, keep: bool) -> Result<Option<PathBuf>> {
        match std::mem::replace(&mut self.state, State::Settled) {
            State::Settled | State::Pending => Ok(None),
            State::Revertible => put_back(&self.run, keep),
        }
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        // After an error or a panic. What fails here is done by the next command.
        let _ = self.revert(false);
    }
}

/// The state of a folder after [`recover`].
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// The folder holds a run without a checkpoint that replaces the one in this folder.
    pub replaced: Option<PathBuf>,
    /// What was done.
    pub warnings: Vec<String>,
}

/// Puts back the run of a folder that does not exist, if it is found under a name that a replacement gives to it.
pub(super) fn recover_missing(folder: &Path) -> Result<()> {
    if folder.exists() {
        return Ok(());
    }
    for hidden in [beside(folder, MOVING), beside(folder, REPLACED)] {
        if hidden.join(SETTINGS).is_file() && !is_marked(&hidden) {
            return match fs::rename(&hidden, folder) {
                // Another process may have done so.
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("put in place", folder)(error)),
                _ => Ok(()),
            };
        }
    }
    Ok(())
}

/// Completes or reverts a replacement in this folder that was interrupted. `held` is the folder's lock; the lock of the run that is there in the end is returned. With
/// `restore`, a new run without a checkpoint gives way to the old one.
pub(super) fn recover(folder: &Path, held: File, restore: bool) -> Result<(File, Recovered)> {
    let run = folder.canonicalize().map_err(Error::io("find", folder))?;
    // A path such as `/` is not next to anything.
    if run.file_name().is_none() {
        return Ok((held, Recovered::default()));
    }
    let (replaced, moving) = (beside(&run, REPLACED), beside(&run, MOVING));
    remove_if_there(&beside(&run, GONE))?;
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
            let text = "an earlier replacement of this run was interrupted before its first checkpoint; the old run was put back first";
            return Ok((old, Recovered { replaced: None, warnings: vec![text.into()] }));
        }
    }
    finish(&run)?;
    Ok((held, found))
}

/// The run that the one in this folder replaces, if it has no checkpoint yet.
pub fn replaced_by(folder: &Path) -> Option<PathBuf> {
    let replaced = beside(&folder.canonicalize().ok()?, REPLACED);
    (is_marked(folder) && replaced.is_dir() && !is_marked(&replaced)).then_some(replaced)
}

/// Where a path is that may lie in a run that is being replaced, such as a checkpoint that the new run starts from.
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

/// The new run counts: files that are not part of the old one move to it, then the old one is removed.
fn finish(run: &Path) -> Result<()> {
    remove_marker(run)?;
    let replaced = beside(run, REPLACED);
    for entry in fs::read_dir(&replaced).map_err(Error::io("list", &replaced))? {
        let entry = entry.map_err(Error::io("list", &replaced))?;
        let name = entry.file_name();
        if is_run_file(&name.to_string_lossy()) {
            continue;
        }
        let mut target = run.join(&name);
        while target.symlink_metadata().is_ok() {
            // Of the same name as one that was put into the new folder.
            target.as_mut_os_string().push(".old");
        }
        fs::rename(entry.path(), &target).map_err(Error::io("move", entry.path()))?;
    }
    sync_folder(run)?;
    remove_folder(run, &replaced)
}

/// Puts the old run back and removes the new one, or keeps it as `NAME.failed`.
fn put_back(run: &Path, keep: bool) -> Result<Option<PathBuf>> {
    let replaced = beside(run, REPLACED);
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

/// Removes a folder next to a run.
fn remove_folder(run: &Path, folder: &Path) -> Result<()> {
    let gone = beside(run, GONE);
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

/// Exchanges the names of a run and of its hidden neighbour: atomically where the file system can, otherwise by three renames, from which [`recover`] finds its way.
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
    let moving = beside(run, MOVING);
    fs::rename(run, &moving).map_err(Error::io("rename", run))?;
    if let Err(error) = fs::rename(hidden, run) {
        // The error that matters is this one; what fails now is done by the next command.
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
        /// An old run `a` with a file that is not part of it.
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

        /// Nothing of the old run but the file that was not part of it.
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
    fn the_old_run_is_removed_after_the_first_checkpoint_and_put_back_before() {
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
    fn a_failed_run_is_kept_next_to_the_old_one_if_asked() {
        let place = Place::new();
        for name in ["a.failed", "a.failed-2"] {
            let kept = place.begin().revert(true).expect("put back").expect("kept");
            assert_eq!((kept.file_name().expect("a name").to_str(), place.settings(name).as_str()), (Some(name), "new"));
            assert!(!is_marked(&kept) && place.settings("a") == "old");
        }
    }

    /// Every state that a killed process can leave.
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
        assert!(place.recover(true).warnings[0].contains("put back"));
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
    fn file_systems_without_an_exchange_are_recovered_from_every_rename() {
        let rename = |place: &Place, from: &str, to: &str| fs::rename(place.at(from), place.at(to)).expect("renamed");
        // The new run is put in place.
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
        // The old run is put back.
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
