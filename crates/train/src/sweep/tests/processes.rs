use super::*;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The directory of the run in the arguments.
const FOLDER: &str = r#"if [ "$8" = --resume ]; then F="$9"; else F="$9/${11}"; fi; mkdir -p "$F""#;

/// A fake `termwise`: `$F` is the directory of the run.
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

/// A command that appends a training line.
fn trained(step: u64, loss: f64) -> String {
    let line = format!(r#"{{"kind":"train","step":{step},"time":0,"loss":{loss:?},"lr":0.1,"tokens":1,"tokens_per_second":9.0}}"#);
    format!("echo '{line}' >> \"$F/metrics.jsonl\"")
}

/// A command that appends an evaluation line.
fn evaluated(step: u64, found: &str) -> String {
    format!(r#"echo '{{"kind":"held_out","step":{step},"time":0,{found}}}' >> "$F/metrics.jsonl""#)
}

const MEASURED: &str = r#""tokens":90,"loss":2.75,"perplexity":15.6,"recall":{"loss":0.5,"tokens":9}"#;
const NOT_FINITE: &str = r#""loss":null,"finite":false"#;

#[test]
fn the_last_metrics_of_a_process_are_its_result() {
    let script = [trained(5, 3.0), trained(10, 2.5), evaluated(10, MEASURED)].join("\n");
    let state = state(&script, &AtomicBool::new(false), &mut |_| {});
    let expected = [
        ("held_out.loss", 2.75),
        ("held_out.perplexity", 15.6),
        ("held_out.recall.loss", 0.5),
        ("train.loss", 2.5),
        ("train.tokens_per_second", 9.0),
    ];
    let State::Ended(Record { status: Status::Finished { metrics }, .. }) = &state else { panic!("{state:?}") };
    assert_eq!(*metrics, expected.map(|(name, x)| (name.to_string(), x)).into());
}

#[test]
fn an_earlier_evaluation_never_replaces_the_last_one() {
    let outcome = |end: &[String]| {
        let script = [&[trained(5, 3.0), evaluated(5, MEASURED), trained(10, 2.5)], end].concat().join("\n");
        match state(&script, &AtomicBool::new(false), &mut |_| {}) {
            State::Ended(record) => record.status,
            other => panic!("{other:?}"),
        }
    };
    let reason = "diverged: the held-out loss at step 10 is not finite".to_owned();
    assert_eq!(outcome(&[evaluated(10, NOT_FINITE)]), Status::Failed { reason });
    // A lost line: no value rather than that of step 5.
    let Status::Finished { metrics } = outcome(&[]) else { panic!("it finished") };
    assert!(metrics.keys().all(|name| !name.starts_with("held_out")) && metrics["train.loss"] == 2.5, "{metrics:?}");
}

#[test]
fn the_error_of_a_failed_process_is_recorded() {
    let failed = |script: &str| match state(script, &AtomicBool::new(false), &mut |_| {}) {
        State::Ended(Record { status: Status::Failed { reason }, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(failed("echo training; echo 'error: no such file' >&2; exit 1"), "no such file");
    assert!(failed("exit 3").contains("exit status: 3"));
    assert_eq!(failed(&trained(4, 3.0)), "ended after step 4 of 10");
}

/// Appends a line of metrics, which shows that the process has started.
fn begun() -> String {
    trained(4, 3.0)
}

/// The state of a run whose process was stopped after it had started, and the content of its file `said`.
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

/// A process that ignores its input. Each wait is short, so a shell can handle a signal.
const WAIT: &str = "while true; do sleep 0.05; done";

#[test]
fn closing_the_input_stops_a_process() {
    assert_eq!(stopped(&format!("{}; cat; echo asked > $F/said; exit 130", begun())), (State::Open, "asked\n".into()));
}

#[test]
fn a_process_that_does_not_stop_is_terminated_and_then_killed() {
    assert_eq!(stopped(&format!("trap 'echo terminated > $F/said; exit 1' TERM; {}", begun())), (State::Open, "terminated\n".into()));
    assert_eq!(stopped(&format!("trap 'echo refused >> $F/said' TERM; {}", begun())), (State::Open, "refused\n".into()));
}

#[test]
fn a_process_stopped_externally_can_be_resumed() {
    assert_eq!(state("exit 130", &AtomicBool::new(false), &mut |_| {}), State::Open);
}

#[test]
fn a_locked_directory_is_retried_while_other_runs_proceed() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = trained(10, 3.0);
    let runner = ProcessRunner::new([program(folder.path(), &line)], Arc::default());
    let plan = plan(
        "[axes]
seed = [1, 2, 3]",
    );
    let run_folder = plan.jobs[0].path(folder.path(), "");
    std::fs::create_dir_all(&run_folder).expect("a folder");
    let lock = std::fs::File::create(run_folder.join("run.lock")).expect("a lock");
    lock.lock().expect("a lock");
    let finished = |state: &State| matches!(state, State::Ended(Record { status: Status::Finished { .. }, .. }));
    let others = Others { wait: false, ..Others::DEFAULT };
    let states = go(&plan, folder.path(), &runner, Options { others, ..ONE });
    assert_eq!(states.iter().map(finished).collect::<Vec<_>>(), [false, true, true]);
    assert_eq!(states[0], State::Open);
    let leaving = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(lock);
    });
    assert!(go(&plan, folder.path(), &runner, ONE).iter().all(finished));
    leaving.join().expect("a thread");
}

#[test]
fn a_run_whose_directory_was_locked_is_retried() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = trained(10, 3.0);
    let script = format!("if [ -e \"$F/twice\" ]; then {line}; else touch \"$F/twice\"; exit 75; fi");
    let runner = ProcessRunner::new([program(folder.path(), &script)], Arc::default());
    let states = go(&plan("[axes]\nseed = [1, 2]"), folder.path(), &runner, ONE);
    assert!(states.iter().all(|state| matches!(state, State::Ended(Record { status: Status::Finished { .. }, .. }))), "{states:?}");
}

#[test]
fn a_run_that_has_started_is_resumed() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = trained(10, 1.0);
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
