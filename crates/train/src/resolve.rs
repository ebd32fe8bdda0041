//! Resolution of model names, the same for every command.
//!
//! ```text
//! (nothing)                       the newest run in `runs/`
//! hf://owner/name[@revision]      the hub, through its cache
//! path/to/model                   a directory with a config.json: a checkpoint, or any Llama model in Hugging Face format
//! runs/first, first               a run: its checkpoint with the best held-out loss, or the last one if none was measured
//! ```

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use termwise_base::nearest;

use crate::checkpoint::{Checkpoints, MANIFEST, read_state};
use crate::error::{Error, Result};
use crate::runs::is_hidden;
use crate::settings::presets;

/// Default directory of `termwise train` for runs.
pub const RUNS: &str = "runs";
const CONFIG: &str = "config.json";

/// A model on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// A directory with a `config.json` and weights.
    pub folder: PathBuf,
    /// Description of the selected checkpoint, if the name does not identify it.
    pub taken: Option<String>,
}

/// The `config.json` of `hf://owner/name`, without the weights.
pub fn hub_config(requested: &str) -> Result<PathBuf> {
    Ok(termwise_data::hub::config(requested)?)
}

/// The model of this name; without a name, that of the newest run in `runs/`.
pub fn model(requested: Option<&str>) -> Result<Named> {
    model_in(Path::new(RUNS), requested)
}

/// [`model`] with another directory of runs.
pub fn model_in(runs: &Path, requested: Option<&str>) -> Result<Named> {
    let Some(name) = requested else { return newest(runs) };
    if name.starts_with("hf://") {
        return Ok(Named { folder: termwise_data::hub::folder(name)?, taken: None });
    }
    let path = Path::new(name);
    let mut tried = Vec::new();
    if path.is_file() && path.with_file_name(CONFIG).is_file() {
        return Ok(Named { folder: path.parent().unwrap_or(Path::new("")).to_owned(), taken: None });
    }
    if path.is_file() {
        let hint = format!("name a directory with a {CONFIG}; text is given with --data, as in `termwise train --data {name}`");
        return Err(Error::NoModel { requested: name.into(), tried: vec!["it is a file".into()], hint });
    }
    if path.join(CONFIG).is_file() {
        return Ok(Named { folder: path.to_owned(), taken: None });
    }
    tried.push(format!("{} does not exist", path.join(CONFIG).display()));
    // A run, its directory of checkpoints, or only its name.
    let mut places = vec![path.join("checkpoints")];
    if path.file_name().is_some_and(|last| last == "checkpoints") {
        places.push(path.to_owned());
    }
    if path.components().count() == 1 {
        places.push(runs.join(path).join("checkpoints"));
    }
    for place in places {
        match checkpoint(&place)? {
            Some((folder, which)) => return Ok(Named { taken: Some(format!("{}, {which}", folder.display())), folder }),
            None if let Some(old) = place.parent().and_then(crate::run::replaced_by) => tried.push(format!(
                "{} contains no complete checkpoint; the replaced run is kept in {} until then",
                place.display(),
                old.display()
            )),
            None if place.is_dir() => tried.push(format!("{} contains no complete checkpoint", place.display())),
            None => tried.push(format!("{} is not a directory", place.display())),
        }
    }
    let presets = || presets::MODELS.iter().map(|model| model.0);
    let hint = if presets().any(|preset| preset == name) {
        format!("{name} is a preset, which has sizes but no weights: train it with `termwise train --model {name}`")
    } else {
        let known: Vec<String> = runs_in(runs).into_iter().map(|(_, run, _)| run.display().to_string()).collect();
        let close = nearest(name, known.iter().map(String::as_str)).map(|close| format!("did you mean {close}? "));
        format!("{}name a directory with a {CONFIG}, a run, a checkpoint or hf://OWNER/NAME", close.unwrap_or_default())
    };
    Err(Error::NoModel { requested: name.into(), tried, hint })
}

fn newest(runs: &Path) -> Result<Named> {
    let mut found = runs_in(runs);
    found.sort();
    let count = found.len();
    let Some((_, run, checkpoints)) = found.pop() else {
        let tried = vec![format!("no run in {}/ has a checkpoint", runs.display())];
        return Err(Error::NoModel { requested: String::new(), tried, hint: "name one, or train one with `termwise train`".into() });
    };
    let (folder, which) = checkpoint(&checkpoints)?.ok_or(Error::Internal("the checkpoints of a run were removed while it was read"))?;
    let of = if count == 1 {
        format!("the only run in {}/", runs.display())
    } else {
        format!("the newest of {count} runs in {}/", runs.display())
    };
    Ok(Named { taken: Some(format!("{} of {}, {of}", which, run.display())), folder })
}

/// Time of the newest checkpoint, the run, and its directory of checkpoints.
fn runs_in(runs: &Path) -> Vec<(SystemTime, PathBuf, PathBuf)> {
    let entries =
        std::fs::read_dir(runs).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).filter(|path| !is_hidden(path));
    let run = |run: PathBuf| {
        let checkpoints = run.join("checkpoints");
        let written = |path: &Path| path.join(MANIFEST).metadata().and_then(|file| file.modified()).ok();
        let times = Checkpoints::new(&checkpoints).list().ok()?.into_iter().filter_map(|(_, path)| written(&path));
        Some((times.max()?, run, checkpoints))
    };
    entries.filter_map(run).collect()
}

/// The best or last checkpoint of a run, with a description.
fn checkpoint(checkpoints: &Path) -> Result<Option<(PathBuf, String)>> {
    let list = Checkpoints::new(checkpoints).list()?;
    let complete = list.into_iter().filter(|(_, path)| path.join(MANIFEST).is_file() && path.join(CONFIG).is_file());
    let all: Vec<(u64, PathBuf, Option<f64>)> =
        complete.map(|(step, path)| (step, path.clone(), read_state(&path).ok().and_then(|state| state.held_out))).collect();
    let best = all.iter().filter_map(|(step, path, loss)| Some((*step, path, (*loss)?))).min_by(|a, b| a.2.total_cmp(&b.2));
    Ok(match (best, all.last()) {
        (Some((step, path, loss)), _) => Some((path.clone(), format!("the best checkpoint, step {step} with held-out loss {loss:.4}"))),
        (None, Some((step, path, _))) => Some((path.clone(), format!("the last checkpoint, step {step}"))),
        (None, None) => None,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::checkpoint::{STATE, State};

    /// A minimal checkpoint.
    fn write(runs: &Path, run: &str, step: u64, held_out: Option<f64>) -> PathBuf {
        let folder = runs.join(run).join(format!("checkpoints/step-{step:08}"));
        fs::create_dir_all(&folder).expect("a folder");
        for name in [CONFIG, MANIFEST] {
            fs::write(folder.join(name), "{}").expect("a file");
        }
        let state = State { step, held_out, ..State::default() };
        fs::write(folder.join(STATE), serde_json::to_vec(&state).expect("JSON")).expect("a file");
        folder
    }

    #[test]
    fn every_name_of_a_run_resolves_to_its_best_checkpoint() {
        let folder = tempfile::tempdir().expect("a folder");
        let runs = folder.path().join("runs");
        let best = write(&runs, "first", 10, Some(1.0));
        let last = write(&runs, "first", 20, Some(2.0));
        for name in [runs.join("first"), runs.join("first/checkpoints"), "first".into()] {
            let found = model_in(&runs, name.to_str()).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(found.folder, best, "{}", name.display());
            assert!(found.taken.expect("said").contains("the best checkpoint, step 10 with held-out loss 1.0000"));
        }
        // A checkpoint resolves to itself, and so does its configuration.
        for name in [last.clone(), last.join(CONFIG)] {
            assert_eq!(model_in(&runs, name.to_str()).expect("a checkpoint"), Named { folder: last.clone(), taken: None });
        }
        let unmeasured = write(&runs, "second", 7, None);
        let found = model_in(&runs, Some("second")).expect("a run");
        assert_eq!((found.folder, found.taken.map(|taken| taken.contains("the last checkpoint, step 7"))), (unmeasured, Some(true)));
    }

    #[test]
    fn without_a_name_the_newest_run_is_selected_and_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let runs = folder.path().join("runs");
        let error = model_in(&runs, None).expect_err("no runs").to_string();
        assert!(error.contains("no run in") && error.contains("termwise train"), "{error}");
        write(&runs, "old", 1, None);
        let long_ago = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000);
        let manifest = fs::File::options().write(true).open(runs.join("old/checkpoints/step-00000001").join(MANIFEST)).expect("a file");
        manifest.set_modified(long_ago).expect("a time");
        // Without a manifest a checkpoint is not complete.
        fs::create_dir_all(runs.join("empty/checkpoints/step-00000009")).expect("a folder");
        assert!(model_in(&runs, None).expect("a run").taken.expect("said").contains("the only run in"));
        let new = write(&runs, "a-new", 1, None);
        let found = model_in(&runs, None).expect("a run");
        assert_eq!(found.folder, new);
        assert!(found.taken.expect("said").contains("a-new, the newest of 2 runs"));
    }

    #[test]
    fn errors_list_the_searched_places() {
        let folder = tempfile::tempdir().expect("a folder");
        let runs = folder.path().join("runs");
        write(&runs, "first", 1, None);
        let error = |name: &str| model_in(&runs, Some(name)).expect_err("no model").to_string();
        let text = error("frist");
        for part in [
            "`frist`",
            "frist/config.json does not exist",
            "frist/checkpoints is not a directory",
            "runs/frist/checkpoints is not a directory",
        ] {
            assert!(text.replace('\\', "/").contains(part), "{text}");
        }
        assert!(error("tiny").contains("tiny is a preset, which has sizes but no weights"), "{}", error("tiny"));
        let book = folder.path().join("book.txt");
        fs::write(&book, "text").expect("a file");
        let text = error(&book.display().to_string());
        assert!(text.contains("it is a file") && text.contains("train --data"), "{text}");
        fs::create_dir_all(runs.join("begun/checkpoints")).expect("a folder");
        assert!(error("begun").contains("contains no complete checkpoint"), "{}", error("begun"));
    }
}
