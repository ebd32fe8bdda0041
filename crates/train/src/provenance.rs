//! The builds that worked on a run.
//!
//! A run's directory contains `provenance.json`: one entry for the command that started the run, and one for each build or instruction set that
//! resumed it. Checkpoints have a copy, which is not in their manifest because it does not affect the computation.

use std::path::Path;

use termwise_base::files::{self, write_whole};
pub use termwise_base::provenance::{Build, Provenance, names};

use crate::error::{Error, Result};

/// Name of the file in run and checkpoint directories.
pub const FILE: &str = "provenance.json";

/// The provenance of a directory; empty if it has none, as with earlier builds.
pub fn read(folder: &Path) -> Vec<Provenance> {
    files::read(&folder.join(FILE), files::TEXT).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Appends this build to the provenance of a run, unless the last entry agrees with it. Returns the content of the file.
pub(crate) fn note(folder: &Path, now: &Provenance) -> Result<Vec<u8>> {
    let mut all = read(folder);
    if !all.last().is_some_and(|last| last.agrees(now)) {
        all.push(now.clone());
    }
    let path = folder.join(FILE);
    let bytes = serde_json::to_vec_pretty(&all).map_err(Error::json(path.clone()))?;
    write_whole(&path, &bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_by(commit: &str, command: &str) -> Provenance {
        let build = Build { commit: Some(commit.into()), ..Build::default() };
        Provenance { build, command: command.into(), ..Provenance::default() }
    }

    #[test]
    fn provenance_keeps_the_first_command_and_every_new_build() {
        let folder = tempfile::tempdir().expect("a folder");
        note(folder.path(), &made_by("a", "begin")).expect("written");
        note(folder.path(), &made_by("a", "resume")).expect("written");
        let bytes = note(folder.path(), &made_by("b", "resume")).expect("written");
        let all = read(folder.path());
        assert_eq!(all, [made_by("a", "begin"), made_by("b", "resume")]);
        assert_eq!(serde_json::from_slice::<Vec<Provenance>>(&bytes).expect("JSON"), all);
    }
}
