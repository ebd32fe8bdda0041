//! A run that replaces another one: the old one is removed only after the new one has a checkpoint.

use std::fs;
use std::path::Path;

use crate::common::{Walk, options, run, settings, weights};
use crate::ranks::together;
use termwise_train::{Error, RunOptions, Start, provenance, train};

/// Every file below a directory with its content, except the lock.
fn content(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        let name = entry.file_name().expect("a name").to_string_lossy().into_owned();
        match entry.is_dir() {
            true => found.extend(content(&entry).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes))),
            false if name == "run.lock" => {}
            false => found.push((name, fs::read(&entry).expect("a file"))),
        }
    }
    found.sort();
    found
}

fn neighbours(folder: &Path) -> usize {
    fs::read_dir(folder).expect("a folder").count()
}

#[test]
fn the_new_run_has_nothing_of_the_old_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let (place, fresh) = (folder.path().join("a"), folder.path().join("fresh"));
    let by = |command: &str| provenance::Provenance { command: command.into(), ..provenance::Provenance::default() };
    let begun = |place: &Path, start, text: &str, command: &str| {
        let how = RunOptions { provenance: by(command), ..options(place, start) };
        train(&settings(text), &Walk::default(), &how).expect("a run")
    };
    begun(&place, Start::Fresh, "steps = 8\nlog_every = 1", "old");
    for name in ["metrics.later.jsonl", "warnings.log", "nonfinite-step-3/batch.json", "notes.txt"] {
        let path = place.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, "old").expect("a file");
    }
    let new = "steps = 4\nlr = 0.01";
    let outcome = begun(&place, Start::Replace, new, "new");
    assert_eq!((outcome.step, weights(&outcome)), (4, weights(&begun(&fresh, Start::Fresh, new, "new"))));
    assert_eq!((neighbours(folder.path()), fs::read(place.join("notes.txt")).expect("kept")), (2, b"old".to_vec()));
    for of in [place.clone(), outcome.checkpoint] {
        let commands: Vec<String> = provenance::read(&of).into_iter().map(|one| one.command).collect();
        assert_eq!(commands, ["new"]);
    }
    let names =
        |place: &Path| content(place).into_iter().map(|(name, _)| name).filter(|name| !name.contains("tfevents")).collect::<Vec<_>>();
    let mut expected = names(&fresh);
    expected.push("notes.txt".into());
    expected.sort();
    assert_eq!(names(&place), expected);
    // Without an existing run, it is an ordinary start.
    assert!(run(&settings("steps = 1"), &folder.path().join("b"), Start::Replace).finished);
}

#[test]
fn a_run_that_fails_before_its_first_checkpoint_leaves_the_old_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("a");
    run(&settings("steps = 4"), &place, Start::Fresh);
    let before = content(&place);
    for broken in 0..6 {
        let source = Walk { broken_from: Some(broken), ..Walk::default() };
        train(&settings("steps = 9\ncheckpoint_every = 7"), &source, &options(&place, Start::Replace)).expect_err("the source breaks");
        assert_eq!((content(&place) == before, neighbours(folder.path())), (true, 1), "broken at batch {broken}");
    }
    // After its first checkpoint, the replacement is committed.
    let source = Walk { broken_from: Some(6), ..Walk::default() };
    train(&settings("steps = 9\ncheckpoint_every = 3"), &source, &options(&place, Start::Replace)).expect_err("the source breaks");
    assert_eq!((run(&settings("steps = 9\ncheckpoint_every = 3"), &place, Start::Resume).step, neighbours(folder.path())), (9, 1));
}

#[test]
fn the_diagnosis_of_a_failed_step_is_kept_next_to_the_old_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("a");
    run(&settings("steps = 4"), &place, Start::Fresh);
    let before = content(&place);
    let wild = settings("steps = 9\nlr = 1e30\nclip = 0\nwarmup = 0\ncheckpoint_every = 0");
    match train(&wild, &Walk::default(), &options(&place, Start::Replace)) {
        Err(Error::NonFinite { file: Some(saved), .. }) => {
            assert!(saved.starts_with(folder.path().canonicalize().expect("a path").join("a.failed")) && saved.is_file());
        }
        other => panic!("{other:?}"),
    }
    assert!(content(&place) == before);
}

#[test]
fn a_run_can_start_from_a_checkpoint_of_the_run_that_it_replaces() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = run(&settings("steps = 4"), &folder.path().join("source"), Start::Fresh).checkpoint;
    let from = |checkpoint: &Path| settings(&format!("from = '{}'\nsteps = 3\nmicro_batches = 2", checkpoint.display()));
    let expected = weights(&run(&from(&source), &folder.path().join("expected"), Start::Fresh));
    for ranks in [1, 2] {
        let place = folder.path().join(format!("a-{ranks}"));
        let own = run(&settings("steps = 4"), &place, Start::Fresh).checkpoint;
        let outcomes = together(ranks, &from(&own), &place, Start::Replace);
        assert!(weights(outcomes[0].as_ref().expect("a run"))[0] == expected[0], "{ranks} ranks");
        assert!(!own.exists());
    }
}

#[test]
fn remains_of_a_run_without_settings_are_not_continued() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("a");
    run(&settings("steps = 4"), &place, Start::Fresh);
    fs::remove_file(place.join("settings.toml")).expect("settings");
    let error = train(&settings("steps = 2"), &Walk::default(), &options(&place, Start::Fresh)).expect_err("checkpoints are there");
    assert!(matches!(error, Error::RunExists { .. }), "{error}");
    let outcome = run(&settings("steps = 2"), &place, Start::Replace);
    let steps = fs::read_dir(place.join("checkpoints")).expect("a list").map(|entry| entry.expect("an entry").path()).collect::<Vec<_>>();
    assert!(steps.iter().all(|path| path <= &outcome.checkpoint), "{steps:?}");
}
