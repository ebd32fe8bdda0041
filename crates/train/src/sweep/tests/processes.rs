use super::*;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Of the run that the arguments ask for.
const FOLDER: &str = r#"if [ "$7" = --resume ]; then F="$8"; else F="$8/${10}"; fi; mkdir -p "$F""#;

/// A program that stands for `termwise`: `$F` is the folder of the run.
fn program(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("program");
    std::fs::write(&path, format!("#!/bin/sh\n{FOLDER}\n{script}\n")).expect("a file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("permissions");
    path
}

fn state(script: &str, stop: &AtomicBool, observe: &mut dyn FnMut(&Event)) -> State {
    let folder = tempfile::tempdir().expect("a folder");
    let runner = ProcessRunner::new(program(folder.path(), script), Arc::default());
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

#[test]
fn a_stop_is_passed_on_as_an_interrupt() {
    let stop = AtomicBool::new(false);
    let script = r#"trap 'exit 0' INT
        echo '{"kind":"train","step":4,"loss":3.0}' > "$F/metrics.jsonl"
        while true; do sleep 0.05; done"#;
    // Asked to stop once it is known to have begun.
    let state = state(script, &stop, &mut |event| {
        if matches!(event, Event::Progress(progress) if progress.fraction > 0.3) {
            stop.store(true, Ordering::SeqCst);
        }
    });
    assert_eq!(state, State::Open);
}

#[test]
fn a_run_that_has_begun_is_resumed() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = r#"echo '{"kind":"train","step":10,"loss":1.0}' > "$F/metrics.jsonl""#;
    let script = format!(
        "echo \"$@\" >> \"$F/arguments\"; if [ -e \"$F/settings.toml\" ]; then {line}; else touch \"$F/settings.toml\"; exit 1; fi"
    );
    let runner = ProcessRunner::new(program(folder.path(), &script), Arc::default());
    let plan = plan("");
    go(&plan, folder.path(), &runner, ONE);
    let states = go(&plan, folder.path(), &runner, Options { retry: true, ..ONE });
    assert!(matches!(&states[0], State::Ended(Record { status: Status::Finished { .. }, .. })), "{states:?}");
    let arguments = std::fs::read_to_string(folder.path().join("runs").join(&plan.jobs[0].hash).join("arguments")).expect("a file");
    let runs = folder.path().join("runs").display().to_string();
    let hash = &plan.jobs[0].hash;
    let front = format!("--threads 1 train --quiet --config {runs}/{hash}.toml");
    let expected = [format!("{front} --runs {runs} --name {hash}"), format!("{front} --resume {runs}/{hash}")];
    assert_eq!(arguments.lines().collect::<Vec<_>>(), expected);
}
