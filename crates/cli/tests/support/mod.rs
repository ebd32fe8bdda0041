//! Shared by the tests of the command line.
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

/// The reference files; the test is skipped if they are missing.
pub fn golden() -> Option<PathBuf> {
    termwise_base::test_skip::shared("golden")
}

/// A folder with a text, for runs of a very small model.
pub struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// The lines of the text are distinct.
    pub fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let line = |i: usize| format!("{} walked {i} miles and met {} friends.\n", ["Tom", "Ann", "Sue"][i % 3], i * 7 % 11);
        std::fs::write(folder.path().join("text.txt"), (0..60).map(line).collect::<String>()).expect("a file");
        Place { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn at(&self, name: &str) -> String {
        self.path(name).to_str().expect("a plain path").to_owned()
    }

    /// Training settings as TOML: a model with some thousand parameters, on bytes.
    pub fn settings(&self, more: &str) -> String {
        format!(
            "data = ['{}']\ntokenizer = 'bytes'\nheld_out = 0.2\nlayers = 1\nhidden = 16\nheads = 2\nmlp = 16\nbatch = 2\nlength = 16\n\
             warmup = 0\nlog_every = 1\neval_every = 4\neval_batches = 2\ncheckpoint_every = 3\n{more}\n",
            self.at("text.txt")
        )
    }

    /// The program in this folder, with a separate cache, on one thread.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = termwise(&["--threads", "1"]);
        command.args(arguments).current_dir(self.folder.path()).env("XDG_CACHE_HOME", self.path("cache"));
        command
    }

    /// `termwise train` with the small settings.
    pub fn train(&self, arguments: &[&str]) -> Command {
        // Written once: another process may be reading it.
        if !self.path("small.toml").exists() {
            std::fs::write(self.path("small.toml"), self.settings("steps = 6")).expect("a file");
        }
        self.command(&[&["train", "--config", "small.toml"], arguments].concat())
    }

    /// The lines of a run's metrics without what depends on the clock.
    pub fn metrics(&self, run: &str) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).expect("metrics");
        let line = |line: &str| {
            let mut value: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let map = value.as_object_mut().expect("an object");
            map.remove("time");
            map.remove("tokens_per_second");
            value
        };
        text.lines().map(line).collect()
    }
}
