//! `termwise train`: flags and files, resumption, steps that are not finite, and errors.

use std::fs;

use predicates::prelude::*;
use predicates::str::{contains, is_empty};

use crate::support::Place;

#[test]
fn flags_stand_above_files_and_files_above_defaults() {
    let place = Place::new();
    fs::write(place.path("more.toml"), "seed = 7\nlr = 0.002\n").expect("a file");
    let out = place.train(&["--config", "more.toml", "--name", "a", "--lr", "0.003", "--json"]).assert().success().get_output().clone();
    let outcome: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!((outcome["step"].as_u64(), outcome["finished"].as_bool()), (Some(6), Some(true)));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("step 6/6") && said.contains("held-out loss"), "{said}");
    let settings: toml::Table = fs::read_to_string(place.path("runs/a/settings.toml")).expect("settings").parse().expect("TOML");
    assert_eq!(settings["seed"].as_integer(), Some(7));
    assert_eq!(settings["lr"].as_float(), Some(0.003));
    assert_eq!(settings["hidden"].as_integer(), Some(16));
    assert!(place.path("runs/a/checkpoints/step-00000006/model.safetensors").is_file());
    place.train(&["--name", "b", "--quiet"]).assert().success().stderr(is_empty()).stdout(contains("finished: after step 6"));
    place.train(&["--name", "b"]).assert().code(1).stderr(contains("already contains a run"));
}

#[test]
fn a_run_starts_with_a_description() {
    let place = Place::new();
    let words = [
        "parameters: 1 layer, width 16, 2 heads, 257 tokens",
        "attention  softmax (exp over=sum)",
        "text.txt",
        "6 steps of 32 tokens, 192 tokens",
        "runs/a",
    ];
    let started = place.train(&["--name", "a"]).assert().success();
    let text = String::from_utf8_lossy(&started.get_output().stderr).into_owned();
    assert!(words.iter().all(|part| text.contains(part)), "{text}");
    place.train(&["--name", "b", "--quiet"]).assert().success().stderr("");
}

#[test]
fn a_run_is_resumed_by_folder_and_by_checkpoint() {
    let place = Place::new();
    // Only training lines: a run that ended at step 6 was evaluated there.
    let steps = |run: &str| place.metrics(run).into_iter().filter(|line| line["kind"] == "train").collect::<Vec<_>>();
    place.train(&["--name", "whole", "--steps", "9", "--horizon", "9"]).assert().success();
    place.train(&["--name", "a", "--horizon", "9"]).assert().success();
    place.command(&["train", "--resume", "runs/a", "--steps", "9"]).assert().success().stderr(contains("resuming at step 6"));
    assert_eq!(steps("runs/a"), steps("runs/whole"));
    place.command(&["train", "--resume", "runs/a/checkpoints/step-00000006"]).assert().success().stderr(contains("resuming at step 6"));
    assert_eq!(steps("runs/a"), steps("runs/whole"));
    let weights = |run: &str| fs::read(place.path(run).join("checkpoints/step-00000009/model.safetensors")).expect("weights");
    assert_eq!(weights("runs/a"), weights("runs/whole"));
    // By name, as in other commands.
    place.command(&["train", "--resume", "a"]).assert().success().stderr(contains("resuming at step 9"));
    place.command(&["train", "--resume", "none"]).assert().code(2).stderr(contains("there is no run `none`"));
    place.command(&["train", "--resume", "runs/none"]).assert().code(2).stderr(contains("there is no run `runs/none`"));
    place.command(&["train", "--resume", "runs/a", "--lr", "0.5"]).assert().code(1).stderr(contains("with different settings"));
}

#[test]
fn a_checkpoint_outside_of_its_run_is_left_as_it_is() {
    let place = Place::new();
    place.train(&["--name", "a"]).assert().success();
    for copy in ["best", "elsewhere/step-00000006"] {
        fs::create_dir_all(place.path(copy)).expect("a folder");
        for entry in fs::read_dir(place.path("runs/a/checkpoints/step-00000006")).expect("a listing") {
            let entry = entry.expect("an entry");
            fs::copy(entry.path(), place.path(copy).join(entry.file_name())).expect("a copy");
        }
        let refused = place.command(&["train", "--resume", copy, "--steps", "8"]).assert().code(1);
        refused.stderr(contains(copy)).stderr(contains("outside of its run").and(contains("--from")));
        termwise_train::checkpoint::verify(&place.path(copy)).expect("the copy is as it was");
    }
}

#[test]
fn without_checkpoints_metrics_are_not_erased() {
    let place = Place::new();
    place.train(&["--name", "a"]).assert().success();
    let before = fs::read(place.path("runs/a/metrics.jsonl")).expect("metrics");
    fs::rename(place.path("runs/a/checkpoints"), place.path("moved")).expect("another place");
    let refused = place.command(&["train", "--resume", "runs/a", "--steps", "8"]).assert().code(1);
    refused.stderr(contains("metrics end at step 6").and(contains("put the folder `checkpoints` back")));
    assert_eq!(fs::read(place.path("runs/a/metrics.jsonl")).expect("metrics"), before);
    fs::rename(place.path("moved"), place.path("runs/a/checkpoints")).expect("its place");
    place.command(&["train", "--resume", "runs/a", "--steps", "8"]).assert().success();
}

#[test]
fn a_refused_start_leaves_nothing_behind() {
    let place = Place::new();
    // Too short for the language, which is detected when the first batch is drawn.
    let small = ["train", "--layers", "1", "--hidden", "16", "--heads", "1", "--mlp", "16", "--batch", "2", "--name", "a", "--steps", "1"];
    place.command(&[&small[..], &["--length", "64"]].concat()).assert().code(2).stderr(contains("length"));
    assert!(!place.path("runs/a").exists(), "{:?}", fs::read_dir(place.path("runs/a")).map(Iterator::collect::<Vec<_>>));
    fs::create_dir_all(place.path("runs/a")).expect("a folder");
    fs::write(place.path("runs/a/notes.txt"), "mine").expect("a file");
    place.command(&[&small[..], &["--length", "64"]].concat()).assert().code(2);
    place.command(&[&small[..], &["--length", "128"]].concat()).assert().success();
    assert!(place.path("runs/a/notes.txt").is_file());
}

#[test]
fn invalid_settings_are_rejected_in_one_sentence() {
    let place = Place::new();
    for (arguments, code, said) in [
        (&["--name", ""][..], 2, "a run's name is that of a folder"),
        (&["--name", ".."], 2, "a run's name is that of a folder"),
        (&["--mlp", "4294967296"], 2, "`mlp` is 4294967296, but it must be at most"),
        (&["--vocab", "4294967296"], 2, "`vocab` is 4294967296"),
        (&["--layers", "1000000000000"], 2, "`layers` is 1000000000000"),
        (&["--vocab", "268435456", "--hidden", "4096", "--heads", "32"], 1, "need at least"),
        (&["--batch", "16777216", "--length", "16777216"], 1, "need at least"),
        (&["--lr", "-1"], 2, "`lr` is -1"),
        (&["--nonsense"], 2, "--nonsense"),
        (&["--config", "absent.toml"], 2, "absent.toml"),
        (&["--attention", "softmacks"], 2, "softmacks"),
    ] {
        let output = place.train(arguments).assert().code(code).stderr(contains(said)).get_output().clone();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!text.contains("panicked"), "{arguments:?}: {text}");
    }
    assert!(!place.path("runs").exists() || fs::read_dir(place.path("runs")).expect("a listing").next().is_none());
}

#[test]
fn a_run_that_diverges_is_reported() {
    let place = Place::new();
    let words = ["--name", "a", "--lr", "50", "--clip", "0", "--steps", "20"];
    let output = place.train(&words).assert().success().stdout(contains("finished, but diverged")).get_output().clone();
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("training diverged") && text.contains("reduce --lr"), "{text}");
    // ln 257, of bytes and the end of a document.
    assert!(text.contains("that of a uniform prediction is 5.549"), "{text}");
    assert!(text.split(|c: char| !c.is_ascii_digit()).all(|digits| digits.len() < 20), "{text}");
    assert!(fs::read_to_string(place.path("runs/a/warnings.log")).expect("warnings").contains("diverged"));
    place.train(&["--name", "b"]).assert().success().stdout(contains("diverged").not());
}

#[test]
fn a_warmup_beyond_the_last_step_is_reported() {
    let place = Place::new();
    let said = contains("the warmup of 100 steps is longer than the run of 6");
    place.train(&["--name", "a", "--warmup", "100"]).assert().success().stderr(said.clone());
    place.train(&["--name", "b", "--warmup", "6"]).assert().success().stderr(said.not());
}

#[test]
fn a_printed_configuration_can_be_edited() {
    let place = Place::new();
    let print = |words: &[&str]| {
        let output = place.command(&[&["config"], words].concat()).assert().success().get_output().stdout.clone();
        String::from_utf8(output).expect("text")
    };
    let text = print(&[]).replace("steps = 800", "steps = 60").replace("heads = 4\n", "heads = 2\n");
    let settings = termwise_train::Settings::from_toml(&text, "the file").expect("settings");
    assert_eq!((settings.steps, settings.horizon, settings.kv_heads, settings.head_dim), (60, 60, 2, 32));
    // A given value is kept.
    let asked: toml::Table = print(&["--horizon", "900", "--kv-heads", "1"]).parse().expect("TOML");
    assert_eq!((asked["horizon"].as_integer(), asked["kv_heads"].as_integer()), (Some(900), Some(1)));
    assert!(print(&["--recipe", "paper"]).contains("horizon = 1000000"));
}

#[test]
fn a_step_that_is_not_finite_ends_the_run_with_a_diagnosis() {
    let place = Place::new();
    // At this learning rate the weights overflow float32 immediately.
    let failed = place.train(&["--name", "a", "--lr", "1e30", "--clip", "0"]).assert().code(1).get_output().clone();
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    let file = text.trim_end().rsplit("; the diagnosis is in ").next().expect("the file is named").to_owned();
    let diagnosis: serde_json::Value = serde_json::from_slice(&fs::read(place.path(&file)).expect("the diagnosis")).expect("JSON");
    let step = diagnosis["step"].as_u64().expect("a step");
    assert!(
        file == format!("runs/a/nonfinite-step-{step}/diagnosis.json") && text.contains(&format!("step {step}: the loss is ")),
        "{text}"
    );
    place.command(&["train", "--replay", "runs/a"]).assert().code(2).stderr(contains("--replay"));
}
