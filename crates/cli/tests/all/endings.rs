//! Training with a closed or full standard error, signals, and a killed parent process.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, kill, signal as set_handler};
use nix::unistd::Pid;

use crate::support::Place;

/// Timeout, longer than any step on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(240);

/// Steps that take some seconds, so signals arrive during the run.
const STEPS: &str = "3000";

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The program, started by a shell after this script. Signals have their default handlers, which a shell could not restore.
fn program_after(script: &str, place: &Place, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{script}; exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_termwise")).args(["--threads", "1"]);
    command.args(arguments).current_dir(place.path("")).env("XDG_CACHE_HOME", place.path("cache"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: between fork and exec only signal handlers are set, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            for each in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
                set_handler(each, SigHandler::SigDfl)?;
            }
            Ok(())
        });
    }
    command
}

fn program(place: &Place, arguments: &[&str]) -> Command {
    program_after("true", place, arguments)
}

/// The arguments of a training that writes checkpoints only when it ends.
fn training<'a>(place: &Place, name: &'a str, steps: &'a str) -> Vec<&'a str> {
    fs::write(place.path("small.toml"), place.settings("")).expect("a file");
    vec!["train", "--config", "small.toml", "--checkpoint-every", "0", "--eval-every", "0", "--name", name, "--steps", steps]
}

fn lines(metrics: &Path) -> usize {
    fs::read_to_string(metrics).map_or(0, |text| text.lines().count())
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).expect("a signal");
}

#[test]
fn training_continues_if_standard_error_is_closed_or_full() {
    let place = Place::new();
    let mut child = program(&place, &training(&place, "a", "40")).stderr(Stdio::piped()).spawn().expect("the program");
    // The reader exits after the first line.
    drop(child.stderr.take());
    assert!(child.wait().expect("an end").success());
    if Path::new("/dev/full").exists() {
        let full = fs::File::options().write(true).open("/dev/full").expect("a device");
        let status = program(&place, &training(&place, "b", "40")).stderr(full).status().expect("an end");
        assert!(status.success(), "{status}");
        assert_eq!(place.metrics("runs/a"), place.metrics("runs/b"));
    }
    // A shell can close it.
    assert!(program_after("exec 2>&-", &place, &training(&place, "c", "40")).status().expect("an end").success());
    assert_eq!(place.metrics("runs/a"), place.metrics("runs/c"));
}

#[test]
fn interrupts_terminations_and_hangups_leave_a_checkpoint() {
    let place = Place::new();
    for (name, sent) in [("a", Signal::SIGINT), ("b", Signal::SIGTERM), ("c", Signal::SIGHUP)] {
        // SIGINT may be ignored from the start, as in background jobs of shells.
        let script = if name == "a" { "trap '' INT" } else { "true" };
        let mut child = program_after(script, &place, &training(&place, name, STEPS)).stderr(Stdio::null()).spawn().expect("the program");
        wait_for("the first steps", || lines(&place.path("runs").join(name).join("metrics.jsonl")) > 2);
        signal(&child, sent);
        assert_eq!(child.wait().expect("an end").code(), Some(130), "{sent}");
        let checkpoints = fs::read_dir(place.path("runs").join(name).join("checkpoints")).expect("checkpoints").count();
        assert_eq!(checkpoints, 1, "{sent}");
    }
}

#[test]
fn a_run_started_with_nohup_outlives_its_terminal() {
    let place = Place::new();
    let mut child = program_after("trap '' HUP", &place, &training(&place, "a", "400")).stderr(Stdio::null()).spawn().expect("the program");
    wait_for("the first steps", || lines(&place.path("runs/a/metrics.jsonl")) > 2);
    signal(&child, Signal::SIGHUP);
    assert!(child.wait().expect("an end").success(), "it goes on");
    assert_eq!(place.metrics("runs/a").len(), 400);
}

/// The processes that work in a folder below this one.
fn at_work(place: &Place) -> bool {
    let runs = fs::read_dir(place.path("o/runs")).into_iter().flatten().flatten();
    runs.filter(|entry| entry.path().is_dir()).any(|entry| termwise_train::run::is_locked(&entry.path()))
}

#[test]
fn an_interrupted_sweep_leaves_no_process_and_resumes_exactly() {
    let place = Place::new();
    let base = place.settings("steps = 400");
    fs::write(place.path("s.toml"), format!("[base]\n{base}\n[axes]\nseed = [1]\n")).expect("a file");
    let whole = program(&place, &["sweep", "s.toml", "--out", "whole"]).stderr(Stdio::null()).status().expect("an end");
    assert!(whole.success());
    let runs = fs::read_dir(place.path("whole/runs")).expect("runs").flatten().find(|entry| entry.path().is_dir());
    let hash = runs.expect("a run").file_name().to_string_lossy().into_owned();
    let metrics = format!("o/runs/{hash}/metrics.jsonl");
    for (sent, code) in [(Signal::SIGINT, Some(130)), (Signal::SIGTERM, Some(130)), (Signal::SIGHUP, Some(130)), (Signal::SIGKILL, None)] {
        let before = lines(&place.path(&metrics));
        let mut child = program(&place, &["sweep", "s.toml", "--out", "o"]).stderr(Stdio::null()).spawn().expect("the program");
        wait_for("the first steps", || lines(&place.path(&metrics)) > before + 2);
        signal(&child, sent);
        assert_eq!(child.wait().expect("an end").code(), code, "{sent}");
        if sent != Signal::SIGKILL {
            assert!(!at_work(&place), "{sent}: a process is left behind");
        }
        assert!(!place.path(&format!("o/runs/{hash}.json")).exists(), "{sent}: a run that was stopped has not ended");
    }
    // Immediately: the remaining process of the killed sweep may still write its checkpoint, and is waited for.
    let last = program(&place, &["sweep", "s.toml", "--out", "o"]).stderr(Stdio::null()).status().expect("an end");
    assert!(last.success(), "{last}");
    assert!(!at_work(&place));
    assert_eq!(place.metrics(&format!("o/runs/{hash}")), place.metrics(&format!("whole/runs/{hash}")));
    let weights = |folder: &str| {
        fs::read(place.path(folder).join(format!("runs/{hash}/checkpoints/step-00000400/model.safetensors"))).expect("weights")
    };
    assert_eq!(weights("o"), weights("whole"));
}
