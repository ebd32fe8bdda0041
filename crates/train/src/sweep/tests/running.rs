use std::time::Duration;

use super::*;

#[test]
fn finished_runs_are_not_repeated_in_an_extended_sweep() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = fake(|_, _| loss(1.0));
    go(&plan(GRID), folder.path(), &first, ONE);
    assert_eq!(first.count(), 8);
    let again = fake(|_, _| loss(2.0));
    let states = go(&plan(GRID), folder.path(), &again, ONE);
    assert_eq!(again.count(), 0);
    assert!(
        states
            .iter()
            .all(|state| matches!(state, State::Ended(Record { status: Status::Finished { metrics }, .. }) if metrics["loss"] == 1.0))
    );
    go(&plan(&GRID.replace("[1, 2]", "[1, 2, 3]")), folder.path(), &again, ONE);
    assert_eq!(again.count(), 4, "only the new seed");
    go(&plan(&format!("{GRID}\n[base]\nsteps = 11")), folder.path(), &again, ONE);
    assert_eq!(again.count(), 4 + 8, "the same names, but other runs");
}

#[test]
fn a_stopped_sweep_resumes() {
    let folder = tempfile::tempdir().expect("a folder");
    let stop = AtomicBool::new(false);
    let ended = AtomicUsize::new(0);
    // The fourth run is stopped midway.
    let first = fake(|_, control| {
        if ended.fetch_add(1, Ordering::SeqCst) == 3 {
            stop.store(true, Ordering::SeqCst);
        }
        if control.stop.load(Ordering::SeqCst) { Outcome::Stopped } else { loss(1.0) }
    });
    let mut events = Vec::new();
    let states = run(&plan(GRID), folder.path(), &first, &ONE, &stop, &mut |event| events.push(event.clone())).expect("a sweep");
    assert_eq!(states.iter().filter(|state| matches!(state, State::Ended(_))).count(), 3);
    assert_eq!(first.count(), 4, "no run starts after a stop");
    assert!(events.contains(&Event::Stopped(3)));
    let last = events.iter().rev().find_map(|event| if let Event::Progress(progress) = event { Some(*progress) } else { None });
    let last = last.expect("progress");
    assert_eq!((last.total, last.finished, last.failed, last.running), (8, 3, 0, 0));
    assert!((last.fraction - 3.5 / 8.0).abs() < 1e-12 && last.remaining.is_some(), "{last:?}");
    let second = fake(|_, _| loss(1.0));
    let states = go(&plan(GRID), folder.path(), &second, ONE);
    assert_eq!(second.count(), 5);
    assert!(states.iter().all(|state| matches!(state, State::Ended(_))));
}

#[test]
fn failed_runs_are_reported_and_retried_on_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan(GRID);
    let bad = fake(|job, _| if number(job, "seed") == 2.0 { Outcome::Failed("diverged".into()) } else { loss(1.0) });
    let states = go(&plan, folder.path(), &bad, ONE);
    let summary = Summary::new(&plan, &states);
    assert_eq!(summary.groups.iter().map(|group| (group.finished, group.failed)).collect::<Vec<_>>(), [(1, 1); 4]);
    assert!(summary.runs.iter().filter(|run| run.status == "failed").all(|run| run.note == "diverged"));
    let good = fake(|_, _| loss(1.0));
    go(&plan, folder.path(), &good, ONE);
    assert_eq!(good.count(), 0, "not requested");
    let states = go(&plan, folder.path(), &good, Options { retry: true, ..ONE });
    assert_eq!(good.count(), 4);
    assert_eq!(Summary::new(&plan, &states).groups.iter().map(|group| group.finished).sum::<usize>(), 8);
}

#[test]
fn concurrent_runs_share_the_threads() {
    let both = std::sync::Barrier::new(2);
    let folder = tempfile::tempdir().expect("a folder");
    let runner = fake(|_, _| {
        // Ends only if two runs are in progress concurrently.
        both.wait();
        loss(1.0)
    });
    go(&plan(GRID), folder.path(), &runner, Options { parallel: 2, threads: 5, ..ONE });
    assert_eq!(runner.most.load(Ordering::SeqCst), 2);
    assert!(runner.ran.lock().expect("a lock").iter().all(|(_, threads)| *threads == 2));
    let folder = tempfile::tempdir().expect("a folder");
    let runner = fake(|_, _| {
        // Long enough for others to start, if there were any.
        std::thread::sleep(std::time::Duration::from_millis(20));
        loss(1.0)
    });
    go(&plan(GRID), folder.path(), &runner, Options { parallel: 8, threads: 1, ..ONE });
    assert_eq!(runner.most.load(Ordering::SeqCst), 1, "never more runs than threads");
}

#[test]
fn a_global_error_ends_the_sweep_and_keeps_finished_runs() {
    struct Breaks(AtomicUsize);
    impl Runner for Breaks {
        fn run(&self, _: &Job, _: &Control) -> Result<Outcome> {
            match self.0.fetch_add(1, Ordering::SeqCst) {
                0 => Ok(loss(1.0)),
                _ => Err(Error::Sweep { path: "disk".into(), problem: "full".into() }),
            }
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan(GRID);
    let runner = Breaks(AtomicUsize::new(0));
    let error = run(&plan, folder.path(), &runner, &ONE, &AtomicBool::new(false), &mut |_| {}).expect_err("it breaks");
    assert_eq!((error.to_string(), runner.0.load(Ordering::SeqCst)), ("disk: full".into(), 2));
    assert_eq!(states(&plan, folder.path(), false).expect("states").iter().filter(|state| **state != State::Open).count(), 1);
}

/// [`ONE`] with short polling intervals.
fn quick(shard: &str) -> Options {
    let timing = Timing { heartbeat: Duration::from_millis(20), dead_after: Duration::from_millis(300), look: Duration::from_millis(10) };
    Options { others: Others { shard: shard.parse().ok(), wait: true, timing }, ..ONE }
}

#[test]
fn several_processes_share_a_directory_and_run_every_job_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan(GRID);
    // The first two of each process wait for each other: both processes work concurrently.
    let both = std::sync::Barrier::new(2);
    let runners: Vec<_> = (0..2)
        .map(|_| {
            let first = AtomicBool::new(true);
            let both = &both;
            fake(move |job, _| {
                if first.swap(false, Ordering::SeqCst) {
                    both.wait();
                }
                loss(number(job, "seed"))
            })
        })
        .collect();
    let found: Vec<Vec<State>> = std::thread::scope(|scope| {
        let (plan, folder) = (&plan, folder.path());
        let processes: Vec<_> =
            runners.iter().zip(["1/2", "2/2"]).map(|(runner, shard)| scope.spawn(move || go(plan, folder, runner, quick(shard)))).collect();
        processes.into_iter().map(|process| process.join().expect("an end")).collect()
    });
    let ran: Vec<String> = runners.iter().flat_map(|runner| runner.ran.lock().expect("a lock").clone()).map(|(hash, _)| hash).collect();
    assert_eq!(ran.iter().collect::<std::collections::BTreeSet<_>>().len(), 8);
    assert_eq!(ran.len(), 8, "every run once");
    assert!(found.iter().all(|states| states.iter().all(|state| matches!(state, State::Ended(_)))), "each waits for the other");
    assert_eq!(Summary::new(&plan, &found[0]).groups, Summary::new(&plan, &found[1]).groups);
    let left = std::fs::read_dir(folder.path().join("runs")).expect("a folder").flatten();
    assert!(left.map(|entry| entry.file_name().to_string_lossy().into_owned()).all(|name| !name.contains("claim")), "claims are gone");
}

#[test]
fn runs_of_dead_processes_are_taken_over_and_live_ones_are_skipped_without_waiting() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan(GRID);
    std::fs::create_dir_all(folder.path().join("runs")).expect("a folder");
    let claim = folder.path().join("runs").join(format!("{}.claim-0", plan.jobs[3].hash));
    std::fs::write(&claim, "{\"host\": \"far away\", \"pid\": 1}").expect("a claim");
    let runner = fake(|_, _| loss(1.0));
    let short = quick("1/1");
    let mut waited = Vec::new();
    let no_wait = Options { others: Others { wait: false, ..short.others }, ..short.clone() };
    let states = run(&plan, folder.path(), &runner, &no_wait, &AtomicBool::new(false), &mut |event| {
        if let Event::Waiting(count) = event {
            waited.push(*count);
        }
    });
    assert_eq!(states.expect("a sweep").iter().filter(|state| **state == State::Open).count(), 1);
    assert_eq!((runner.count(), waited), (7, vec![1]));
    let states = go(&plan, folder.path(), &runner, short);
    assert_eq!(runner.count(), 8, "its heartbeat was not seen for long enough");
    assert!(states.iter().all(|state| matches!(state, State::Ended(_))) && !claim.exists());
}

#[test]
fn runs_retried_by_another_process_are_not_retried_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan("");
    go(&plan, folder.path(), &fake(|_, _| Outcome::Failed("first".into())), ONE);
    let retry = || Options { retry: true, ..quick("1/1") };
    // While one process retries, the other has seen the same record and waits.
    let begun = std::sync::Barrier::new(2);
    let slow = fake(|_, _| {
        begun.wait();
        std::thread::sleep(Duration::from_millis(100));
        Outcome::Failed("second".into())
    });
    let other = fake(|_, _| loss(1.0));
    std::thread::scope(|scope| {
        scope.spawn(|| go(&plan, folder.path(), &slow, retry()));
        begun.wait();
        go(&plan, folder.path(), &other, retry());
    });
    assert_eq!((slow.count(), other.count()), (1, 0));
}

#[test]
fn damaged_records_are_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan("");
    go(&plan, folder.path(), &fake(|_, _| loss(1.0)), ONE);
    let record = folder.path().join("runs").join(format!("{}.json", plan.jobs[0].hash));
    std::fs::write(&record, "{").expect("a file");
    let error = states(&plan, folder.path(), false).expect_err("damaged").to_string();
    assert!(error.contains(&plan.jobs[0].hash) && error.contains("delete"), "{error}");
}

#[test]
fn finished_runs_of_other_builds_are_detected_and_rerun_on_request() {
    use crate::provenance::{self, Build, Provenance};
    let build = |commit: &str| {
        let build = Build { version: "1".into(), commit: Some(commit.into()), modified: false };
        Provenance { build, instructions: "avx2".into(), ..Provenance::default() }
    };
    /// Like `termwise train`, which would resume an earlier run in the directory.
    fn made(job: &Job, control: &Control, by: &Provenance) -> Outcome {
        assert!(!control.folder.exists(), "an incomplete run of another build must not be resumed");
        std::fs::create_dir_all(control.folder).expect("a folder");
        provenance::note(control.folder, by).expect("written");
        loss(number(job, "seed"))
    }
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan(GRID);
    let (old, new) = (build("a"), build("b"));
    // Records of earlier versions have no build and count as those of another build.
    let unknown = fake(|job, _| loss(number(job, "seed")));
    let first = super::plan(&GRID.replace("[1, 2]", "[1]"));
    go(&first, folder.path(), &unknown, ONE);
    let begun = fake(|job, control| made(job, control, &old));
    go(&plan, folder.path(), &begun, ONE);
    assert_eq!((unknown.count(), begun.count()), (4, 4));
    let states = states(&plan, folder.path(), false).expect("records");
    let records = |states: &[State]| {
        states.iter().filter_map(|state| if let State::Ended(record) = state { Some(record.clone()) } else { None }).collect::<Vec<_>>()
    };
    assert_eq!(records(&states).iter().filter(|record| record.is_of_another(&old)).count(), 4);
    assert_eq!(records(&states).iter().filter(|record| record.is_of_another(&new)).count(), 8);
    assert_eq!(Summary::new(&plan, &states).runs.iter().filter(|run| run.build == "1 (a) avx2").count(), 4);
    let again = fake(|job, control| made(job, control, &new));
    go(&plan, folder.path(), &again, ONE);
    assert_eq!(again.count(), 0, "not requested");
    let states = go(&plan, folder.path(), &again, Options { only: Some(new.clone()), ..ONE });
    assert_eq!(again.count(), 8);
    assert!(records(&states).iter().all(|record| !record.is_of_another(&new)));
    go(&plan, folder.path(), &again, Options { only: Some(new.clone()), ..ONE });
    assert_eq!(again.count(), 8);
}

#[test]
fn runs_on_different_data_are_not_mixed() {
    /// Trains on data that may change.
    struct Changing(Mutex<&'static str>);
    impl Runner for Changing {
        fn run(&self, _: &Job, control: &Control) -> Result<Outcome> {
            let checkpoint = control.folder.join("checkpoints/step-00000010");
            std::fs::create_dir_all(&checkpoint).expect("a folder");
            let state = crate::checkpoint::State { source: (*self.0.lock().expect("a lock")).into(), ..Default::default() };
            std::fs::write(checkpoint.join("state.json"), serde_json::to_vec(&state).expect("JSON")).expect("a file");
            Ok(loss(1.0))
        }

        fn fingerprint(&self, _: &Job) -> Option<String> {
            Some((*self.0.lock().expect("a lock")).into())
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let runner = Changing(Mutex::new("first"));
    let (one, two) = (plan("[axes]\nseed = [1]"), plan("[axes]\nseed = [1, 2]"));
    let other = plan("[base.data]\nwidth = 3\n[axes]\nseed = [3]");
    let sweep = |plan: &Plan| run(plan, folder.path(), &runner, &ONE, &AtomicBool::new(false), &mut |_| {});
    assert!(matches!(&sweep(&one).expect("a sweep")[0], State::Ended(record) if record.data.as_deref() == Some("first")));
    *runner.0.lock().expect("a lock") = "second";
    let error = sweep(&two).expect_err("other data").to_string();
    assert!(error.contains("first (1 finished run), second (the current data)") && error.contains("--out"), "{error}");
    assert_eq!(states(&two, folder.path(), false).expect("states")[1], State::Open, "nothing was trained");
    // Finished runs, and runs with other data settings, are not affected.
    sweep(&one).expect("nothing to train");
    sweep(&other).expect("other settings");
    // Records of earlier builds have no fingerprint; their runs do.
    let path = one.jobs[0].path(folder.path(), "json");
    let text = std::fs::read_to_string(&path).expect("a record");
    std::fs::write(&path, text.lines().filter(|line| !line.contains("\"data\"")).collect::<String>()).expect("a record");
    sweep(&two).expect_err("other data");
    *runner.0.lock().expect("a lock") = "first";
    assert_eq!(sweep(&two).expect("the same data again").len(), 2);
}
