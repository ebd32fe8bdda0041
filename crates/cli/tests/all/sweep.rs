//! `termwise sweep`: list, run, rerun, and errors.

use std::fs;

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::Place;

fn file(place: &Place, head: &str, axes: &str) {
    let base = place.settings("steps = 4");
    fs::write(place.path("s.toml"), format!("{head}\n[base]\n{base}\n[axes]\n{axes}\n")).expect("a file");
}

#[test]
fn every_combination_is_run_once_and_compared() {
    let place = Place::new();
    file(&place, "", "attention = [\"softmax\", \"norm\"]\nlr = [0.001, 0.003]");
    let list = ["sweep", "s.toml", "--out", "o", "--list"];
    place.command(&list).assert().success().stdout(contains("4 runs").and(contains("open")));
    let first = place.command(&["sweep", "s.toml", "--out", "o", "--json"]).assert().success().get_output().clone();
    let summary: serde_json::Value = serde_json::from_slice(&first.stdout).expect("JSON");
    assert_eq!(summary["runs"].as_array().map(Vec::len), Some(4));
    assert!(String::from_utf8_lossy(&first.stderr).contains("finished  "));
    place.command(&list).assert().success().stdout(contains("finished").and(contains("open").not()));
    // No run is repeated, and the summary is the same.
    let again = place.command(&["sweep", "s.toml", "--out", "o", "--json"]).assert().success().get_output().clone();
    assert_eq!(again.stdout, first.stdout);
    assert!(!String::from_utf8_lossy(&again.stderr).contains("started"));
    for name in ["runs.csv", "summary.csv", "best.csv", "summary.json"] {
        assert!(place.path("o").join(name).is_file(), "{name}");
    }
    place.command(&["show", "o", "--details"]).assert().success().stdout(contains("held_out.loss").and(contains("Made by")));
}

#[test]
fn a_failed_run_is_reported_and_rerun_with_retry() {
    let place = Place::new();
    file(&place, "", "lr = [0.001, 1e30]");
    place.command(&["sweep", "s.toml", "--out", "o"]).assert().code(1).stdout(contains("✗ run"));
    let second = place.command(&["sweep", "s.toml", "--out", "o"]).assert().code(1).get_output().clone();
    assert!(!String::from_utf8_lossy(&second.stderr).contains("started"));
    place.command(&["sweep", "s.toml", "--out", "o", "--retry"]).assert().code(1).stderr(contains("started").count(1));
}

#[test]
fn a_finished_run_without_a_finite_metric_has_failed() {
    let place = Place::new();
    file(&place, "", "seed = [1, 2]");
    let said = place.command(&["sweep", "s.toml", "--out", "o", "--json"]).assert().success().get_output().clone();
    let summary: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
    let record = place.path("o/runs").join(format!("{}.json", summary["runs"][0]["hash"].as_str().expect("a hash")));
    let mut found: serde_json::Value = serde_json::from_slice(&fs::read(&record).expect("a record")).expect("JSON");
    found["metrics"].as_object_mut().expect("metrics").remove("held_out.loss").expect("a loss");
    fs::write(&record, found.to_string()).expect("a file");
    let said = place.command(&["sweep", "s.toml", "--out", "o"]).assert().code(1);
    said.stdout(contains("✗ run").and(contains("no finite held_out.loss at its end")));
}

#[test]
fn an_unknown_metric_is_an_error() {
    let place = Place::new();
    file(&place, "metric = \"held_out.los\"", "seed = [1]");
    let said = place.command(&["sweep", "s.toml", "--out", "o"]).assert().code(1);
    said.stderr(contains("`held_out.los`").and(contains("held_out.loss")));
}

#[test]
fn invalid_sweeps_are_reported() {
    let place = Place::new();
    for (text, said) in [
        ("[axes]\nlearning = [1]", "axis `learning` is not a setting"),
        ("[axes]\nlr = []", "has no values"),
        ("[axes]\nlr = 3", "give a list"),
        ("axis = 3", "axis"),
        ("[base]\nmlp = 4294967296", "mlp"),
        ("[base]\nattention = '{\"a\": 1}'", "one variant for all heads"),
    ] {
        fs::write(place.path("s.toml"), text).expect("a file");
        place.command(&["sweep", "s.toml", "--list"]).assert().code(1).stderr(contains(said));
    }
    place.command(&["sweep", "absent.toml"]).assert().code(2).stderr(contains("absent.toml"));
    assert!(!place.path("sweeps").exists());
}

#[test]
fn runs_on_changed_text_are_not_compared_with_earlier_ones() {
    let place = Place::new();
    file(&place, "", "lr = [0.001]");
    place.command(&["sweep", "s.toml", "--out", "o"]).assert().success();
    let text = fs::read_to_string(place.path("text.txt")).expect("a text");
    fs::write(place.path("text.txt"), text.replace("miles", "steps")).expect("a file");
    file(&place, "", "lr = [0.001, 0.003]");
    let refused = place.command(&["sweep", "s.toml", "--out", "o"]).assert().code(1);
    refused.stderr(contains("runs on different data cannot be compared").and(contains("1 finished run")).and(contains("--out")));
    place.command(&["sweep", "s.toml", "--out", "o", "--list"]).assert().success().stdout(contains("open"));
    place.command(&["sweep", "s.toml", "--out", "other"]).assert().success();
    fs::write(place.path("text.txt"), text).expect("a file");
    place.command(&["sweep", "s.toml", "--out", "o"]).assert().success();
}

#[test]
fn a_run_that_another_process_works_on_does_not_end_the_sweep() {
    let place = Place::new();
    file(&place, "", "lr = [0.001, 0.003]");
    let list = place.command(&["sweep", "s.toml", "--out", "o", "--list", "--json"]).assert().success().get_output().stdout.clone();
    let list: serde_json::Value = serde_json::from_slice(&list).expect("JSON");
    let hash = list["runs"][0]["hash"].as_str().expect("a hash").to_owned();
    let folder = place.path("o/runs").join(hash);
    fs::create_dir_all(&folder).expect("a folder");
    let lock = fs::File::create(folder.join("run.lock")).expect("a file");
    lock.lock().expect("a lock");
    place.command(&["sweep", "s.toml", "--out", "o", "--no-wait"]).assert().code(1);
    let list = ["sweep", "s.toml", "--out", "o", "--list"];
    place.command(&list).assert().success().stdout(contains("finished").and(contains("open")));
    drop(lock);
    place.command(&["sweep", "s.toml", "--out", "o"]).assert().success();
}
