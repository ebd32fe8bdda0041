//! Runs that are killed with SIGKILL. TERMWISE_KILLS sets the number of kills.
#![cfg(unix)]

use crate::common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Walk, options, run, settings, timeless, weights};
use termwise_train::{Settings, Start, train};

const FOLDER: &str = "TERMWISE_TEST_FOLDER";
const THREADS: &str = "TERMWISE_TEST_THREADS";

fn long(threads: u64) -> Settings {
    settings(&format!("steps = 400\ncheckpoint_every = 4\neval_every = 20\nlog_every = 1\nthreads = {threads}"))
}

/// Started as a separate process by the other tests.
#[test]
#[ignore = "started by the other tests"]
fn child() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let threads = std::env::var(THREADS).ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let start = if Path::new(&folder).join("settings.toml").exists() { Start::Resume } else { Start::Fresh };
    if let Err(error) = train(&long(threads), &Walk::default(), &options(Path::new(&folder), start)) {
        eprintln!("error: {error}");
        std::process::exit(3);
    }
}

fn command(program: &str, folder: &Path, threads: u64) -> Command {
    let mut command = Command::new(program);
    command.env(FOLDER, folder).env(THREADS, threads.to_string()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn this() -> String {
    std::env::current_exe().expect("this test").display().to_string()
}

fn spawn(folder: &Path, threads: u64) -> Child {
    command(&this(), folder, threads).args(["--exact", "kill::child", "--ignored", "--nocapture"]).spawn().expect("a process")
}

#[test]
fn a_run_killed_at_random_and_resumed_ends_with_the_same_bytes() {
    let kills: u64 = std::env::var("TERMWISE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let folder = tempfile::tempdir().expect("a folder");
    let begun = Instant::now();
    let whole = run(&long(1), &folder.path().join("whole"), Start::Fresh);
    let length = begun.elapsed();
    let (expected, lines) = (weights(&whole), timeless(&folder.path().join("whole")));
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let (mut killed, mut rounds) = (0, 0u64);
    while killed < kills {
        let place = folder.path().join(format!("killed-{rounds}"));
        loop {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let mut child = spawn(&place, 1 + random % 3);
            // From the very start to about half a run.
            let patience = length.mul_f64((random >> 11) as f64 / (1u64 << 53) as f64 * 0.5) + Duration::from_millis(5);
            std::thread::sleep(patience);
            if let Some(status) = child.try_wait().expect("a status") {
                assert!(status.success(), "{status}");
                break;
            }
            child.kill().expect("SIGKILL");
            child.wait().expect("an end");
            killed += 1;
            if killed >= kills {
                assert!(spawn(&place, 2).wait().expect("an end").success());
                break;
            }
        }
        let last = run(&long(1), &place, Start::Resume);
        assert!(last.finished && weights(&last) == expected, "round {rounds}: other bytes");
        assert_eq!(timeless(&place), lines, "round {rounds}: other metrics");
        rounds += 1;
    }
    println!("{killed} kills over {rounds} runs");
}

#[test]
fn a_full_disk_is_reported_and_the_older_checkpoint_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("run");
    let small = settings("steps = 4");
    run(&small, &place, Start::Fresh);
    let before = run(&small, &place, Start::Resume);
    // Files may not exceed 32 blocks of 512 or 1024 bytes: writing fails midway, as on a full disk.
    let script = "trap '' XFSZ; ulimit -f 32; exec \"$0\" --exact kill::full_child --ignored --nocapture";
    let output = command("sh", &place, 1).args(["-c", script, &this()]).output().expect("a process");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("model.safetensors"), "the file is named: {text}");
    assert!(
        std::fs::read_dir(place.join("checkpoints")).expect("a list").all(|e| !e
            .expect("an entry")
            .file_name()
            .to_string_lossy()
            .starts_with('.'))
    );
    let after = run(&settings("steps = 6\nhorizon = 4"), &place, Start::Resume);
    assert_eq!((before.step, after.step), (4, 6));
}

/// Like [`child`], with two more steps.
#[test]
#[ignore = "started by the other tests"]
fn full_child() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    if let Err(error) = train(&settings("steps = 6\nhorizon = 4"), &Walk::default(), &options(Path::new(&folder), Start::Resume)) {
        eprintln!("error: {error}");
        std::process::exit(3);
    }
}
