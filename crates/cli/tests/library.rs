//! The program as a function that another program calls.
#![cfg(unix)]

mod support;

use std::ffi::OsString;
use std::fs;

use support::Place;

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

#[test]
fn sweeps_start_runs_with_the_given_argv() {
    let place = Place::new();
    let base = place.settings("steps = 2");
    fs::write(place.path("s.toml"), format!("[base]\n{base}\n[axes]\nseed = [1]\n")).expect("a file");
    let mark = place.at("mark");
    let program = env!("CARGO_BIN_EXE_termwise");
    let script = format!("echo \"$@\" >> '{mark}'; XDG_CACHE_HOME='{}' exec '{program}' \"$@\"", place.at("cache"));
    let call = || {
        let arguments = ["a caller", "--threads", "1", "sweep", &place.at("s.toml"), "--out", &place.at("o"), "--json", "--quiet"];
        termwise::run(words(&arguments), Some(words(&["/bin/sh", "-c", &script, "child"])))
    };
    assert_eq!([call(), call()], [0, 0]);
    let started = fs::read_to_string(&mark).expect("a run was started by these words");
    assert!(started.starts_with("--threads 1 train ") && started.lines().count() == 1, "{started}");
    // What it was called by, and not what this process was.
    let summary: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(place.path("o/summary.json")).expect("a file")).expect("JSON");
    let command = summary["made_by"]["command"].as_str().expect("text");
    assert!(command.starts_with("'a caller' --threads 1 sweep "), "{command}");
    assert_eq!(termwise::run(words(&["termwise", "sweep", &place.at("absent.toml")]), None), 2);
    assert_eq!(termwise::run(words(&["termwise", "train", "--no-such-flag"]), None), 2);
}
