//! Checkpoints: damage is detected and reported, temporary files are removed, and the newest and the best are kept.

use crate::common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Walk, options, run, settings, weights};
use proptest::prelude::*;
use termwise_model::Model;
use termwise_train::checkpoint::{self, Checkpoints, Loaded};
use termwise_train::{Error, Settings, Start, train};

const FILES: [&str; 6] = ["config.json", "model.safetensors", "optimizer.safetensors", "state.json", "settings.toml", "manifest.json"];

fn newest(folder: &Path) -> PathBuf {
    Checkpoints::new(folder.join("checkpoints")).list().expect("checkpoints").pop().expect("a checkpoint").1
}

#[test]
fn a_flipped_bit_in_any_file_is_detected_and_the_older_checkpoint_is_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = settings("");
    let whole = run(&settings, folder.path(), Start::Fresh);
    let expected = weights(&whole);
    let place = newest(folder.path());
    for name in FILES {
        let path = place.join(name);
        let good = fs::read(&path).expect("a file");
        // The first, the last and some in between.
        for at in [0, good.len() / 3, good.len() / 2, good.len() - 1] {
            for bit in [0, 5] {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                fs::write(&path, &bad).expect("a damaged file");
                let error = checkpoint::read(&place).expect_err("damage");
                assert!(error.to_string().contains(name), "{name} at {at}: {error}");
            }
        }
        fs::write(&path, &good[..good.len() - 1]).expect("a short file");
        let error = train(&settings, &Walk::default(), &options(folder.path(), Start::At(place.clone()))).expect_err("damage");
        let text = error.to_string();
        assert!(matches!(error, Error::OlderIsGood { .. }) && text.contains(name) && text.contains("step-00000009"), "{text}");
        let resumed = run(&settings, folder.path(), Start::Resume);
        assert!(resumed.warnings > 0, "skipped checkpoints are reported");
        assert!(weights(&resumed) == expected, "{name}");
        checkpoint::verify(&place).expect("the damaged checkpoint is replaced");
    }
    for name in FILES {
        let good = fs::read(place.join(name)).expect("a file");
        fs::remove_file(place.join(name)).expect("a file");
        assert!(checkpoint::read(&place).expect_err("damage").to_string().contains(name));
        fs::write(place.join(name), good).expect("a file");
    }
}

#[test]
fn a_run_without_a_valid_checkpoint_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = settings("");
    run(&settings, folder.path(), Start::Fresh);
    for (_, path) in Checkpoints::new(folder.path().join("checkpoints")).list().expect("checkpoints") {
        fs::write(path.join("state.json"), "{}").expect("damage");
    }
    let error = train(&settings, &Walk::default(), &options(folder.path(), Start::Resume)).expect_err("no valid checkpoint");
    assert!(matches!(error, Error::NoCheckpoint { .. }) && error.to_string().contains("state.json"), "{error}");
}

#[test]
fn the_newest_and_the_best_are_kept_and_temporary_files_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let inside = folder.path().join("checkpoints");
    run(&settings("steps = 1"), folder.path(), Start::Fresh);
    fs::create_dir_all(inside.join(".step-00000005.part")).expect("a leftover");
    fs::create_dir_all(inside.join(".step-00000001.old")).expect("a leftover");
    fs::create_dir_all(inside.join("notes")).expect("something else");
    run(&settings("steps = 1"), folder.path(), Start::Resume);
    assert!(!inside.join(".step-00000005.part").exists() && !inside.join(".step-00000001.old").exists());

    let checkpoints = Checkpoints::new(&inside);
    let steps = || checkpoints.list().expect("checkpoints").into_iter().map(|(step, _)| step).collect::<Vec<u64>>();
    let Loaded { learner, mut state, settings } = checkpoint::read(&checkpoints.place(1)).expect("a checkpoint");
    for (step, held_out) in [(2, None), (3, Some(1.0)), (4, Some(1.0)), (5, Some(2.0)), (6, None), (7, Some(3.0))] {
        (state.step, state.held_out) = (step, held_out);
        checkpoints.save(&*learner, &state, &settings, &[]).expect("a checkpoint");
        checkpoints.prune(step, 2).expect("room");
    }
    assert_eq!(steps(), [3, 6, 7], "two newest, and the earliest of the best");
    // An incomplete checkpoint is not counted.
    fs::remove_file(checkpoints.place(7).join("manifest.json")).expect("a manifest");
    (state.step, state.held_out) = (8, None);
    checkpoints.save(&*learner, &state, &settings, &[]).expect("a checkpoint");
    checkpoints.prune(8, 2).expect("room");
    assert_eq!(steps(), [3, 6, 7, 8]);
    // Later checkpoints, of a run resumed from an earlier one, are not removed.
    checkpoints.prune(3, 1).expect("room");
    assert_eq!(steps(), [3, 6, 7, 8]);
    assert!(inside.join("notes").is_dir());
}

#[test]
fn a_checkpoint_is_a_hugging_face_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut more = options(folder.path(), Start::Fresh);
    more.files = vec![("tokenizer.json".into(), b"{}".to_vec())];
    let outcome = train(&settings("steps = 2"), &Walk::default(), &more).expect("a run");
    let model = Model::read(&outcome.checkpoint).expect("a model");
    assert_eq!(model.config.vocab_size, common::VOCABULARY);
    assert_eq!(fs::read(outcome.checkpoint.join("tokenizer.json")).expect("the tokenizer"), b"{}");
    // Another run can start from it.
    let from = settings(&format!("steps = 1\nfrom = '{}'\nlr = 0.0\nwarmup = 0", outcome.checkpoint.display()));
    let second = run(&from, &folder.path().join("second"), Start::Fresh);
    assert_eq!(fs::read(second.checkpoint.join("model.safetensors")).ok(), fs::read(outcome.checkpoint.join("model.safetensors")).ok());
}

fn small_checkpoint() -> &'static (tempfile::TempDir, PathBuf) {
    static MADE: std::sync::OnceLock<(tempfile::TempDir, PathBuf)> = std::sync::OnceLock::new();
    MADE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let place = run(&settings("steps = 1"), folder.path(), Start::Fresh).checkpoint;
        (folder, place)
    })
}

fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().expect("a folder");
    for name in FILES {
        fs::copy(from.join(name), to.path().join(name)).expect("a copy");
    }
    to
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_file_contents_never_panic(file in 0..FILES.len(), bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let folder = copy(&small_checkpoint().1);
        fs::write(folder.path().join(FILES[file]), bytes).expect("a file");
        prop_assert!(checkpoint::read(folder.path()).is_err());
    }

    /// Readers must also handle invalid content with valid hashes: these files match their manifest.
    #[test]
    fn invalid_files_with_valid_hashes_never_panic(file in 0..FILES.len() - 1, edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let folder = copy(&small_checkpoint().1);
        let path = folder.path().join(FILES[file]);
        let mut bytes = fs::read(&path).expect("a file");
        for (at, byte) in edits {
            let at = at.index(bytes.len().min(2000));
            bytes[at] = byte;
        }
        fs::write(&path, bytes).expect("a file");
        let _ = checkpoint::read_state(folder.path());
        let _ = Model::read(folder.path());
        if let Ok(text) = fs::read_to_string(folder.path().join("settings.toml")) {
            let _ = Settings::from_toml(&text, "settings.toml");
        }
    }

    #[test]
    fn states_of_any_shape_never_panic(text in "[{}\\[\\]\":,0-9a-z_.eE+-]{0,120}") {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("state.json"), &text).expect("a file");
        fs::write(folder.path().join("manifest.json"), &text).expect("a file");
        prop_assert!(checkpoint::read_state(folder.path()).is_err());
        prop_assert!(checkpoint::verify(folder.path()).is_err());
    }
}

#[test]
fn a_kill_during_a_write_never_loses_the_only_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = settings("steps = 3\nkeep = 1");
    let place = run(&settings, folder.path(), Start::Fresh).checkpoint;
    let inside = folder.path().join("checkpoints");
    let (part, old, gone) = (inside.join(".step-00000003.part"), inside.join(".step-00000003.old"), inside.join(".step-00000003.gone"));
    let checkpoints = Checkpoints::new(&inside);
    let names = || {
        let mut names: Vec<String> = fs::read_dir(&inside)
            .expect("a list")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    let copy = |to: &Path| {
        fs::create_dir(to).expect("a folder");
        for name in FILES {
            fs::copy(place.join(name), to.join(name)).expect("a copy");
        }
    };
    // Killed after the old one was renamed and before the new one was; and after both.
    copy(&part);
    fs::rename(&place, &old).expect("moved");
    let messages = checkpoints.clean().expect("clean");
    assert_eq!((names(), messages.len()), (vec!["step-00000003".to_owned()], 2), "{messages:?}");
    checkpoint::verify(&place).expect("it is complete");
    copy(&old);
    checkpoints.clean().expect("clean");
    assert_eq!(names(), ["step-00000003"]);
    // An incomplete new one is discarded, the old one is kept.
    copy(&part);
    fs::rename(&place, &old).expect("moved");
    fs::remove_file(part.join("manifest.json")).expect("a file");
    checkpoints.clean().expect("clean");
    assert_eq!(names(), ["step-00000003"]);
    // A removal that was started is completed.
    fs::rename(&place, &gone).expect("moved");
    assert!(checkpoints.clean().expect("clean")[0].contains("removed") && names().is_empty());
}

#[test]
fn steps_are_compared_numerically() {
    let folder = tempfile::tempdir().expect("a folder");
    run(&settings("steps = 1"), folder.path(), Start::Fresh);
    let checkpoints = Checkpoints::new(folder.path().join("checkpoints"));
    let Loaded { learner, mut state, settings } = checkpoint::read(&checkpoints.place(1)).expect("a checkpoint");
    // One more digit than the default name width.
    for step in [99_999_998, 99_999_999, 100_000_000, 100_000_001] {
        (state.step, state.held_out) = (step, None);
        checkpoints.save(&*learner, &state, &settings, &[]).expect("a checkpoint");
        checkpoints.prune(step, 2).expect("room");
    }
    let steps: Vec<u64> = checkpoints.list().expect("checkpoints").into_iter().map(|(step, _)| step).collect();
    assert!(steps.ends_with(&[100_000_000, 100_000_001]) && steps.iter().all(|&step| step == 1 || step >= 100_000_000), "{steps:?}");
}
