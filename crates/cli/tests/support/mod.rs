//! What the tests of the command line share.
#![allow(dead_code, reason = "each test binary uses its own share")]

use std::path::PathBuf;

use assert_cmd::Command;

/// The program under test.
pub fn termwise(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("termwise").expect("the program is built with its tests");
    command.args(arguments);
    command
}

/// Standard output of a run that must succeed, as JSON.
pub fn json(arguments: &[&str]) -> serde_json::Value {
    let output = termwise(arguments).assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).expect("valid JSON")
}

/// The reference files, or None and a line that says so.
pub fn golden() -> Option<PathBuf> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden");
    if !path.is_dir() {
        println!("skipped: no ../shared/golden");
        return None;
    }
    Some(path)
}
