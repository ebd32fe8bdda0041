//! Which builds worked on a run.
//!
//! A run's folder keeps `provenance.json`: one entry for the command that began it, and another for each build or instruction set that
//! took it up again. Checkpoints have a copy, outside their manifest: what a model computes does not depend on it.

use std::path::Path;

use termwise_base::files::{self, write_whole};
pub use termwise_base::provenance::{Build, Provenance, names};

use crate::error::{Error, Result};

/// Name of the file in folders of runs and checkpoints.
pub const FILE: &str = "provenance.json";

/// Where the content of a folder comes from; nothing where it does not say, as those of earlier builds.
pub fn read(folder: &Path) -> Vec<Provenance> {
    files::read(&folder.join(FILE), files::TEXT).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Notes in the folder of a run who works on it now, unless the last to do so agrees with it. What is there in the end as bytes.
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
        let build = Build { version: "1.2.3".into(), commit: Some(commit.into()), modified: false };
        Provenance { build, instructions: "avx2".into(), processor: "some".into(), command: command.into() }
    }

    #[test]
    fn a_run_keeps_the_command_that_began_it_and_every_further_build() {
        let folder = tempfile::tempdir().expect("a folder");
        note(folder.path(), &made_by("a", "begin")).expect("written");
        note(folder.path(), &made_by("a", "resume")).expect("written");
        let bytes = note(folder.path(), &made_by("b", "resume")).expect("written");
        let all = read(folder.path());
        assert_eq!(all, [made_by("a", "begin"), made_by("b", "resume")]);
        assert_eq!(serde_json::from_slice::<Vec<Provenance>>(&bytes).expect("JSON"), all);
    }
}
