//! `termwise train --overwrite`: the old run is removed only after the new one has a checkpoint.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::Place;

/// Every file below a folder, except the lock.
fn content(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in fs::read_dir(folder).into_iter().flatten().map(|entry| entry.expect("an entry").path()) {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        match path.is_dir() {
            true => found.extend(content(&path).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes))),
            false if name == "run.lock" => {}
            false => _ = found.insert(name, fs::read(&path).expect("a file")),
        }
    }
    found
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn the_new_run_takes_the_place_of_the_old_one() {
    let place = Place::new();
    place.train(&["--name", "a", "--lr", "0.001", "--steps", "9"]).assert().success();
    fs::write(place.path("runs/a/metrics.later.jsonl"), "{}\n").expect("a file");
    fs::write(place.path("runs/a/notes.txt"), "mine").expect("a file");
    place.train(&["--name", "a", "--lr", "0.01"]).assert().code(1).stderr(contains("already contains a run").and(contains("--overwrite")));
    place.train(&["--name", "a", "--lr", "0.01", "--overwrite"]).assert().success();
    place.train(&["--name", "b", "--lr", "0.01"]).assert().success();
    assert_eq!(names(&place.path("runs")), ["a", "b"]);
    let compared = |run: &str| {
        let mut all = content(&place.path(run));
        all.retain(|name, _| !name.contains("tfevents") && !name.contains("provenance") && name != "metrics.jsonl" && name != "notes.txt");
        all
    };
    assert_eq!((compared("runs/a"), place.metrics("runs/a")), (compared("runs/b"), place.metrics("runs/b")));
    assert_eq!(fs::read(place.path("runs/a/notes.txt")).expect("kept"), b"mine");
    for file in ["runs/a/provenance.json", "runs/a/checkpoints/step-00000006/provenance.json"] {
        let text = fs::read_to_string(place.path(file)).expect("provenance");
        assert!(text.contains("--lr 0.01") && !text.contains("0.001"), "{file}: {text}");
    }
    // Without a run of this name it is an ordinary start.
    place.train(&["--name", "c", "--overwrite"]).assert().success();
}

#[test]
fn a_refused_run_leaves_the_old_one() {
    let place = Place::new();
    place.train(&["--name", "a"]).assert().success();
    fs::create_dir_all(place.path("cut")).expect("a folder");
    for entry in fs::read_dir(place.path("runs/a/checkpoints/step-00000006")).expect("a checkpoint") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), place.path("cut").join(entry.file_name())).expect("a copy");
    }
    let weights = fs::read(place.path("cut/model.safetensors")).expect("weights");
    fs::write(place.path("cut/model.safetensors"), &weights[..weights.len() / 2]).expect("half of it");
    let before = content(&place.path("runs/a"));
    let small = ["--layers", "1", "--hidden", "16", "--heads", "2", "--mlp", "16", "--batch", "2"];
    for (arguments, said) in [
        // Too short for the language, which is detected when the first batch is drawn.
        (&["--length", "8"][..], "length"),
        (&["--length", "1000000", "--data", "text.txt"], "a row needs 1000000"),
        (&["--length", "16", "--data", "text.txt", "--vocab", "3"], "vocab"),
        (&["--length", "16", "--data", "text.txt", "--from", "cut"], "model.safetensors"),
        (&["--length", "16777216", "--batch", "16777216"], "need at least"),
    ] {
        let own: &[&str] = if arguments.contains(&"--from") { &["--batch", "2"] } else { &small };
        let own: Vec<&str> = if arguments.contains(&"--batch") { own[..8].to_vec() } else { own.to_vec() };
        let words = [&["train", "--name", "a", "--overwrite"], &own[..], arguments].concat();
        let output = place.command(&words).assert().failure().get_output().clone();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(said) && !text.contains("panicked"), "{arguments:?}: {text}");
        assert!(content(&place.path("runs/a")) == before, "{arguments:?}");
        assert_eq!(names(&place.path("runs")), ["a"], "{arguments:?}");
    }
    // The run can be used and resumed as before.
    place.command(&["train", "--resume", "a", "--steps", "8"]).assert().success();
}

#[test]
fn a_run_starts_from_its_own_checkpoint() {
    let place = Place::new();
    place.train(&["--name", "a"]).assert().success();
    let own = "runs/a/checkpoints/step-00000006";
    let (_, expected) =
        (place.train(&["--name", "b", "--from", own]).assert().success(), "runs/b/checkpoints/step-00000006/model.safetensors");
    place.train(&["--name", "a", "--from", own, "--overwrite"]).assert().success();
    let weights = |name: &str| fs::read(place.path(name)).expect("weights");
    assert!(weights("runs/a/checkpoints/step-00000006/model.safetensors") == weights(expected));
}

#[test]
fn racing_replacements_leave_one_complete_run() {
    let place = Place::new();
    place.train(&["--name", "a"]).assert().success();
    let rates = ["0.001", "0.002", "0.003", "0.004"];
    let codes: Vec<i32> = std::thread::scope(|scope| {
        let threads: Vec<_> = rates
            .map(|rate| {
                let mut command = place.train(&["--name", "a", "--overwrite", "--lr", rate]);
                scope.spawn(move || command.output().expect("a process").status.code().expect("a code"))
            })
            .into();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
    });
    assert!(codes.contains(&0) && codes.iter().all(|code| [0, 75].contains(code)), "{codes:?}");
    assert_eq!(names(&place.path("runs")), ["a"]);
    let settings: toml::Table = fs::read_to_string(place.path("runs/a/settings.toml")).expect("settings").parse().expect("TOML");
    let rate = settings["lr"].as_float().expect("a number").to_string();
    place.train(&["--name", "b", "--lr", &rate]).assert().success();
    assert_eq!(place.metrics("runs/a"), place.metrics("runs/b"));
}

#[cfg(unix)]
mod killed {
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    /// A process that replaces the run `a` and writes its first checkpoint after this many steps.
    fn replacing(place: &Place, checkpoint_every: &str) -> Child {
        let words = ["train", "--config", "small.toml", "--name", "a", "--overwrite", "--lr", "0.01", "--steps", "40"];
        Command::new(assert_cmd::cargo::cargo_bin("termwise"))
            .args(["--threads", "1"])
            .args(words)
            .args(["--checkpoint-every", checkpoint_every])
            .current_dir(place.path(""))
            .env("XDG_CACHE_HOME", place.path("cache"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a process")
    }

    /// Kills a replacement when `moment` returns true, unless it has ended. Either run must be complete afterwards, and another replacement must work.
    fn kill(checkpoint_every: &str, moment: &dyn Fn(&Place) -> bool) -> &'static str {
        let place = Place::new();
        place.train(&["--name", "a"]).assert().success();
        let old = content(&place.path("runs/a"));
        let mut child = replacing(&place, checkpoint_every);
        let begun = Instant::now();
        while !moment(&place) && child.try_wait().expect("a status").is_none() && begun.elapsed() < Duration::from_secs(60) {
            std::hint::spin_loop();
        }
        child.kill().expect("SIGKILL");
        child.wait().expect("an end");
        let (now, kept) = (content(&place.path("runs/a")), content(&place.path("runs/.a.replaced")));
        let is_new = |files: &BTreeMap<String, Vec<u8>>| String::from_utf8_lossy(&files["settings.toml"]).contains("steps = 40");
        let state = if now == old {
            "old"
        } else {
            assert!(is_new(&now), "{:?}", now.keys());
            match now.contains_key(".replaces") {
                true => {
                    assert!(kept == old, "{:?}", kept.keys());
                    place.command(&["generate", "a", "--max-tokens", "1"]).assert().failure().stderr(contains(".a.replaced"));
                    place.command(&["runs"]).assert().success().stdout(contains(".a.replaced").not());
                    "new without checkpoint"
                }
                false => "new",
            }
        };
        // After resumption the existing run continues; after another replacement only the last run is left.
        match state {
            "old" => place.command(&["train", "--resume", "a"]).assert().success().stdout(contains("after step 6")),
            _ => place.command(&["train", "--resume", "a"]).assert().success().stdout(contains("after step 40")),
        };
        assert_eq!(names(&place.path("runs")), ["a"], "{state}");
        replacing(&place, checkpoint_every).wait().expect("an end");
        place.train(&["--name", "b", "--lr", "0.01", "--steps", "40"]).assert().success();
        assert_eq!((place.metrics("runs/a"), names(&place.path("runs"))), (place.metrics("runs/b"), vec!["a".to_owned(), "b".into()]));
        state
    }

    #[test]
    fn at_any_moment_nothing_is_lost() {
        let exists = |name: &'static str| move |place: &Place| place.path(name).exists();
        let mut seen = vec![
            kill("3", &|_| true),
            kill("3", &exists("runs/.a.replaced")),
            kill("1000", &exists("runs/a/.replaces")),
            kill("1000", &|place| {
                fs::metadata(place.path("runs/a/metrics.jsonl")).is_ok_and(|file| file.len() > 0) && place.path("runs/a/.replaces").exists()
            }),
            kill("3", &|place| {
                !place.path("runs/a/.replaces").exists()
                    && place.path("runs/a/checkpoints/step-00000003").exists()
                    && !place.path("runs/a/checkpoints/step-00000006").exists()
            }),
            kill("3", &exists("runs/.a.gone")),
        ];
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, ["new", "new without checkpoint", "old"]);
    }

    #[test]
    fn a_replacement_from_its_own_checkpoint_can_be_repeated_and_resumed() {
        for resume in [false, true] {
            let place = Place::new();
            place.train(&["--name", "a"]).assert().success();
            let own = "runs/a/checkpoints/step-00000006";
            fs::write(place.path("from.toml"), format!("from = '{own}'\n")).expect("a file");
            place.train(&["--name", "b", "--from", own, "--lr", "0.01", "--steps", "40"]).assert().success();
            let mut child = Command::new(assert_cmd::cargo::cargo_bin("termwise"))
                .args(["--threads", "1", "train", "--config", "small.toml", "--config", "from.toml", "--name", "a", "--overwrite"])
                .args(["--lr", "0.01", "--steps", "40", "--checkpoint-every", "1000"])
                .current_dir(place.path(""))
                .env("XDG_CACHE_HOME", place.path("cache"))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("a process");
            while !place.path("runs/a/.replaces").exists() && child.try_wait().expect("a status").is_none() {
                std::hint::spin_loop();
            }
            child.kill().expect("SIGKILL");
            child.wait().expect("an end");
            match resume {
                true => place.command(&["train", "--resume", "a"]).assert().success(),
                false => place.train(&["--name", "a", "--from", own, "--lr", "0.01", "--steps", "40", "--overwrite"]).assert().success(),
            };
            assert_eq!(place.metrics("runs/a"), place.metrics("runs/b"), "resumed: {resume}");
            assert_eq!(names(&place.path("runs")), ["a", "b"]);
        }
    }
}
