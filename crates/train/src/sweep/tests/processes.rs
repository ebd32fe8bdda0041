use super::*;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Of the run that the arguments ask for.
const FOLDER: &str = r#"if [ "$8" = --resume ]; then F="$9"; else F="$9/${11}"; fi; mkdir -p "$F""#;

/// A program that stands for `termwise`: `$F` is the folder of the run.
fn program(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("program");
    std::fs::write(&path, format!("#!/bin/sh\n{FOLDER}\n{script}\n")).expect("a file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("permissions");
    path
}

fn state(script: &str, stop: &AtomicBool, observe: &mut dyn FnMut(&Event)) -> State {
    let folder = tempfile::tempdir().expect("a folder");
    let runner = ProcessRunner::new([program(folder.path(), script)], Arc::default());
    run(&plan(""), folder.path(), &runner, &ONE, stop, observe).expect("a sweep").remove(0)
}

#[test]
fn the_last_numbers_of_a_process_are_its_outcome() {
    let script = r#"echo '{"kind":"train","step":5,"loss":3.0}' > "$F/metrics.jsonl"
        echo '{"kind":"train","step":10,"loss":2.5,"lr":0.1}' >> "$F/metrics.jsonl"
        echo '{"kind":"held_out","step":10,"loss":2.75,"recall":{"loss":0.5,"tokens":9}}' >> "$F/metrics.jsonl""#;
    let state = state(script, &AtomicBool::new(false), &mut |_| {});
    let expected = [("held_out.loss", 2.75), ("held_out.recall.loss", 0.5), ("train.loss", 2.5)];
    let State::Ended(Record { status: Status::Finished { metrics }, .. }) = &state else { panic!("{state:?}") };
    assert_eq!(*metrics, expected.map(|(name, x)| (name.to_string(), x)).into());
}

#[test]
fn a_process_that_fails_says_why() {
    let failed = |script| match state(script, &AtomicBool::new(false), &mut |_| {}) {
        State::Ended(Record { status: Status::Failed { reason }, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(failed("echo training; echo 'error: no such file' >&2; exit 1"), "no such file");
    assert!(failed("exit 3").contains("exit status: 3"));
    assert_eq!(failed(r#"echo '{"kind":"train","step":4,"loss":3.0}' > "$F/metrics.jsonl""#), "ended after step 4 of 10");
}

/// A line of metrics, by which a process is known to have begun.
const BEGUN: &str = r#"echo '{"kind":"train","step":4,"loss":3.0}' > "$F/metrics.jsonl""#;

/// Where a run stands whose process was asked to stop once it had begun, and what it wrote into the file `said`.
fn stopped(script: &str) -> (State, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let short = Duration::from_millis(300);
    let runner = ProcessRunner::new([program(folder.path(), &format!("{script}\n{WAIT}"))], Arc::default()).with_patience(short, short);
    let (plan, stop) = (plan(""), AtomicBool::new(false));
    let states = run(&plan, folder.path(), &runner, &ONE, &stop, &mut |event| {
        if matches!(event, Event::Progress(progress) if progress.fraction > 0.3) {
            stop.store(true, Ordering::SeqCst);
        }
    });
    let said = std::fs::read_to_string(plan.jobs[0].path(folder.path(), "").join("said")).unwrap_or_default();
    (states.expect("a sweep").remove(0), said)
}

/// What a process does that pays no heed to its input: each wait is short, so that a shell can act on a signal.
const WAIT: &str = "while true; do sleep 0.05; done";

#[test]
fn a_process_is_asked_to_stop_by_the_end_of_its_input() {
    assert_eq!(stopped(&format!("{BEGUN}; cat; echo asked > $F/said; exit 130")), (State::Open, "asked\n".into()));
}

#[test]
fn a_process_that_does_not_stop_is_terminated_and_then_killed() {
    assert_eq!(stopped(&format!("trap 'echo terminated > $F/said; exit 1' TERM; {BEGUN}")), (State::Open, "terminated\n".into()));
    assert_eq!(stopped(&format!("trap 'echo refused >> $F/said' TERM; {BEGUN}")), (State::Open, "refused\n".into()));
}

#[test]
fn a_process_that_was_stopped_by_somebody_else_can_go_on() {
    assert_eq!(state("exit 130", &AtomicBool::new(false), &mut |_| {}), State::Open);
}

#[test]
fn a_locked_folder_is_waited_for_and_is_no_failure_of_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = BEGUN.replace("\"step\":4", "\"step\":10");
    let short = Duration::from_millis(100);
    let runner = |script: &str| ProcessRunner::new([program(folder.path(), script)], Arc::default());
    let plan = plan("");
    let run_folder = plan.jobs[0].path(folder.path(), "");
    std::fs::create_dir_all(&run_folder).expect("a folder");
    let sweep = |runner: ProcessRunner| run(&plan, folder.path(), &runner, &ONE, &AtomicBool::new(false), &mut |_| {});
    let record = || states(&plan, folder.path(), false).expect("states").remove(0);

    let lock = std::fs::File::create(run_folder.join("run.lock")).expect("a lock");
    lock.lock().expect("a lock");
    let error = sweep(runner(&line).with_patience(short, short)).expect_err("another process stays");
    assert!(matches!(error, Error::RunLocked { .. }), "{error}");
    assert_eq!(record(), State::Open);
    // It came between.
    let other = tempfile::tempdir().expect("a folder");
    let error = run(&plan, other.path(), &runner("exit 75"), &ONE, &AtomicBool::new(false), &mut |_| {}).expect_err("locked");
    assert!(matches!(error, Error::RunLocked { .. }), "{error}");
    assert_eq!(states(&plan, other.path(), false).expect("states"), [State::Open]);

    let leaving = std::thread::spawn(move || {
        std::thread::sleep(3 * short);
        drop(lock);
    });
    assert!(matches!(&sweep(runner(&line)).expect("a sweep")[0], State::Ended(Record { status: Status::Finished { .. }, .. })));
    leaving.join().expect("a thread");
}

#[test]
fn a_run_that_has_begun_is_resumed() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = r#"echo '{"kind":"train","step":10,"loss":1.0}' > "$F/metrics.jsonl""#;
    let script = format!(
        "echo \"$@\" >> \"$F/arguments\"; if [ -e \"$F/settings.toml\" ]; then {line}; else touch \"$F/settings.toml\"; exit 1; fi"
    );
    let runner = ProcessRunner::new([program(folder.path(), &script)], Arc::default());
    let plan = plan("");
    go(&plan, folder.path(), &runner, ONE);
    let states = go(&plan, folder.path(), &runner, Options { retry: true, ..ONE });
    assert!(matches!(&states[0], State::Ended(Record { status: Status::Finished { .. }, .. })), "{states:?}");
    let arguments = std::fs::read_to_string(folder.path().join("runs").join(&plan.jobs[0].hash).join("arguments")).expect("a file");
    let runs = folder.path().join("runs").display().to_string();
    let hash = &plan.jobs[0].hash;
    let front = format!("--threads 1 train --quiet --stop-with-input --config {runs}/{hash}.toml");
    let expected = [format!("{front} --runs {runs} --name {hash}"), format!("{front} --resume {runs}/{hash}")];
    assert_eq!(arguments.lines().collect::<Vec<_>>(), expected);
}
