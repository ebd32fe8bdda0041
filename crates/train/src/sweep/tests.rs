use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use toml::{Table, Value};

use super::*;
use crate::error::{Error, Result};

/// Settings of a made-up program.
struct Plain;

impl Schema for Plain {
    fn keys(&self) -> Vec<String> {
        ["steps", "seed", "optimizer.lr", "model.attention", "model.width", "data.width", "log"].map(String::from).into()
    }

    fn resolve(&self, asked: &Table) -> std::result::Result<Table, String> {
        let mut table: Table = toml::from_str("steps = 10\nseed = 1\n[model]\nwidth = 64\n").expect("TOML");
        for (key, value) in asked {
            match (table.get_mut(key), value) {
                (Some(Value::Table(inner)), Value::Table(above)) => inner.extend(above.clone()),
                _ => {
                    table.insert(key.clone(), value.clone());
                }
            }
        }
        if table["steps"].as_integer() == Some(0) { Err("`steps` is 0; it must be positive".into()) } else { Ok(table) }
    }

    fn decides(&self, key: &str) -> bool {
        key != "log"
    }
}

fn parse(text: &str) -> Result<Plan> {
    Plan::parse(text, Path::new("sweep.toml"), &Plain, "loss")
}

fn plan(text: &str) -> Plan {
    parse(text).unwrap_or_else(|error| panic!("{error}"))
}

const GRID: &str = r#"
[axes]
attention = ["softmax", "norm"]
lr = [0.001, 0.003]
seed = [1, 2]
"#;

/// Ends each job as a function says, and remembers which were run and with how many threads.
struct Fake<F> {
    end: F,
    ran: Mutex<Vec<(String, usize)>>,
    at_once: AtomicUsize,
    most: AtomicUsize,
}

fn fake<F: Fn(&Job, &Control) -> Outcome + Sync>(end: F) -> Fake<F> {
    Fake { end, ran: Mutex::default(), at_once: AtomicUsize::new(0), most: AtomicUsize::new(0) }
}

impl<F: Fn(&Job, &Control) -> Outcome + Sync> Runner for Fake<F> {
    fn run(&self, job: &Job, control: &Control) -> Result<Outcome> {
        let now = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.ran.lock().expect("a lock").push((job.hash.clone(), control.threads));
        assert_eq!(std::fs::read_to_string(control.settings).expect("settings").parse::<Table>().expect("TOML"), job.settings);
        (control.report)(0.5);
        let outcome = (self.end)(job, control);
        self.at_once.fetch_sub(1, Ordering::SeqCst);
        Ok(outcome)
    }
}

impl<F> Fake<F> {
    fn count(&self) -> usize {
        self.ran.lock().expect("a lock").len()
    }
}

fn number(job: &Job, key: &str) -> f64 {
    let value = key.split('.').fold(Value::Table(job.settings.clone()), |value, part| value[part].clone());
    value.as_float().or(value.as_integer().map(|n| n as f64)).expect("a number")
}

fn loss(x: f64) -> Outcome {
    Outcome::Finished(BTreeMap::from([("loss".to_string(), x), ("speed".to_string(), 10.0)]))
}

const ONE: Options = Options { parallel: 1, threads: 1, retry: false, skip_equal: false };

fn go(plan: &Plan, folder: &Path, runner: &dyn Runner, options: Options) -> Vec<State> {
    run(plan, folder, runner, &options, &AtomicBool::new(false), &mut |_| {}).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn axes_expand_to_every_combination_once() {
    let plan = plan(GRID);
    assert_eq!(plan.axes.iter().map(|axis| axis.key.as_str()).collect::<Vec<_>>(), ["model.attention", "optimizer.lr", "seed"]);
    assert_eq!(plan.jobs.len(), 8);
    let mut hashes: Vec<&str> = plan.jobs.iter().map(|job| job.hash.as_str()).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 8);
    assert_eq!(plan.name(&plan.jobs[0]), "attention=softmax, lr=0.001, seed=1");
    assert_eq!(plan.name(&plan.jobs[7]), "attention=norm, lr=0.003, seed=2");
    assert_eq!(plan.jobs[7].settings["model"]["attention"].as_str(), Some("norm"));
    assert_eq!(plan.jobs[7].settings["model"]["width"].as_integer(), Some(64), "defaults stay");
}

#[test]
fn equal_settings_are_one_run_however_they_are_written() {
    assert_eq!(plan("[axes]\nseed = [1, 2, 1]").jobs.len(), 2);
    let hash = |text: &str| plan(text).jobs[0].hash.clone();
    assert_eq!(hash(""), hash("[axes]\nseed = [1]"));
    assert_eq!(hash("[base]\nseed = 3\nsteps = 4"), hash("[base]\nsteps = 4\nseed = 3"));
    assert_eq!(hash("[base]\nlog = 3"), hash(""), "what does not decide the outcome does not count");
    assert_ne!(hash("[base]\nseed = 3"), hash(""));
    assert_ne!(hash("[base]\nname = \"a\"\n"), hash("[base]\nname = \"b\"\n"));
}

#[test]
fn a_base_can_be_a_file_beside_the_sweep() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("base.toml"), "steps = 77").expect("a file");
    std::fs::write(folder.path().join("sweep.toml"), "base = \"base.toml\"\n[axes]\nseed = [5]").expect("a file");
    let plan = Plan::read(&folder.path().join("sweep.toml"), &Plain, "loss").expect("a plan");
    assert_eq!((number(&plan.jobs[0], "steps"), number(&plan.jobs[0], "seed")), (77.0, 5.0));
}

#[test]
fn mistakes_in_the_file_are_named() {
    for (text, expected) in [
        ("[axes]\natention = [\"softmax\"]", "did you mean `attention`"),
        ("[axes]\n\"optimizer.rl\" = [1]", "did you mean `optimizer.lr`"),
        ("[axes]\nfoobarbaz = [1]", "there are steps"),
        ("[axes]\nwidth = [1]", "model.width or data.width"),
        ("[axes]\nseed = []", "at least one"),
        ("[axes]\nseed = 1", "a list"),
        ("[axes]\nlr = [1]\n\"optimizer.lr\" = [2]", "two axes"),
        ("[axes]\nsteps = [1, 0]", "steps=0: `steps` is 0"),
        ("[base]\nmodel = 3\n[axes]\nattention = [\"softmax\"]", "make it a table"),
        ("axis = 1", "unknown field"),
        ("base = \"absent.toml\"", "cannot read"),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let many: Vec<String> = (0..400).map(|n| n.to_string()).collect();
    let text = format!("[axes]\nseed = [{0}]\nsteps = [{0}]", many.join(", "));
    assert!(parse(&text).expect_err("too many").to_string().contains("100000"));
}

#[test]
fn dotted_axes_need_no_quotes() {
    let plan = plan("[axes]\nmodel.width = [1, 2]\noptimizer.lr = [0.1]");
    assert_eq!(plan.jobs.iter().map(|job| number(job, "model.width")).collect::<Vec<_>>(), [1.0, 2.0]);
}

#[test]
fn finished_runs_are_not_run_again_even_if_the_sweep_grows() {
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
}

#[test]
fn a_sweep_that_was_stopped_goes_on_where_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let stop = AtomicBool::new(false);
    let ended = AtomicUsize::new(0);
    // The fourth run is asked to stop in its midst.
    let first = fake(|_, control| {
        if ended.fetch_add(1, Ordering::SeqCst) == 3 {
            stop.store(true, Ordering::SeqCst);
        }
        if control.stop.load(Ordering::SeqCst) { Outcome::Stopped } else { loss(1.0) }
    });
    let mut events = Vec::new();
    let states = run(&plan(GRID), folder.path(), &first, &ONE, &stop, &mut |event| events.push(event.clone())).expect("a sweep");
    assert_eq!(states.iter().filter(|state| matches!(state, State::Ended(_))).count(), 3);
    assert_eq!(first.count(), 4, "nothing begins after a stop");
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
fn runs_that_fail_are_reported_and_retried_when_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan(GRID);
    let bad = fake(|job, _| if number(job, "seed") == 2.0 { Outcome::Failed("diverged".into()) } else { loss(1.0) });
    let states = go(&plan, folder.path(), &bad, ONE);
    let summary = Summary::new(&plan, &states);
    assert_eq!(summary.groups.iter().map(|group| (group.finished, group.failed)).collect::<Vec<_>>(), [(1, 1); 4]);
    assert!(summary.runs.iter().filter(|run| run.status == "failed").all(|run| run.note == "diverged"));
    let good = fake(|_, _| loss(1.0));
    go(&plan, folder.path(), &good, ONE);
    assert_eq!(good.count(), 0, "not asked for");
    let states = go(&plan, folder.path(), &good, Options { retry: true, ..ONE });
    assert_eq!(good.count(), 4);
    assert_eq!(Summary::new(&plan, &states).groups.iter().map(|group| group.finished).sum::<usize>(), 8);
}

#[test]
fn threads_are_shared_by_runs_side_by_side() {
    let both = std::sync::Barrier::new(2);
    let folder = tempfile::tempdir().expect("a folder");
    let runner = fake(|_, _| {
        // Ends only if two runs are under way together.
        both.wait();
        loss(1.0)
    });
    go(&plan(GRID), folder.path(), &runner, Options { parallel: 2, threads: 5, ..ONE });
    assert_eq!(runner.most.load(Ordering::SeqCst), 2);
    assert!(runner.ran.lock().expect("a lock").iter().all(|(_, threads)| *threads == 2));
    let folder = tempfile::tempdir().expect("a folder");
    let runner = fake(|_, _| {
        // Long enough for others to begin, if there were any.
        std::thread::sleep(std::time::Duration::from_millis(20));
        loss(1.0)
    });
    go(&plan(GRID), folder.path(), &runner, Options { parallel: 8, threads: 1, ..ONE });
    assert_eq!(runner.most.load(Ordering::SeqCst), 1, "never more runs than threads");
}

#[test]
fn numbers_are_those_found_by_hand() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan("[axes]\nattention = [\"softmax\", \"norm\", \"gate\"]\nlr = [0.001, 0.003, 0.01]\nseed = [1, 2, 3]");
    // softmax: 2, 4, 9 at the first rate (mean 5, deviation √13), 1, 2, 3 at the second, and a seed diverges at the third.
    let runner = fake(|job, _| {
        let (seed, lr) = (number(job, "seed"), number(job, "optimizer.lr"));
        match (job.settings["model"]["attention"].as_str(), lr) {
            (Some("softmax"), 0.001) => loss([2.0, 4.0, 9.0][seed as usize - 1]),
            (Some("softmax"), 0.003) => loss(seed),
            (Some("softmax"), _) => loss(if seed == 2.0 { f64::NAN } else { 0.5 }),
            (Some("norm"), _) => loss(10.0 - 100.0 * lr + seed),
            _ => Outcome::Failed("always".into()),
        }
    });
    let states = go(&plan, folder.path(), &runner, ONE);
    let summary = Summary::new(&plan, &states);
    let first = summary.groups[0].metrics["loss"];
    assert!((first.mean - 5.0).abs() < 1e-12 && (first.deviation.expect("of three") - 13f64.sqrt()).abs() < 1e-12, "{first:?}");
    assert_eq!(first.to_string(), "5.0000 ± 3.6056");
    assert_eq!((summary.groups[2].finished, summary.groups[2].failed, summary.groups[2].metrics["loss"].count), (3, 1, 2));
    assert_eq!(summary.groups[8].metrics.len(), 0);

    // The gate never finished; the third rate of softmax has a lower mean and a failure.
    assert_eq!(summary.best.len(), 2);
    let [softmax, norm] = &summary.best[..] else { panic!("{:?}", summary.best) };
    assert_eq!((softmax.learning_rate.as_deref(), softmax.at_edge, softmax.metric.mean, softmax.behind), (Some("0.003"), false, 2.0, 0.0));
    assert_eq!((norm.learning_rate.as_deref(), norm.at_edge, norm.metric.mean), (Some("0.01"), true, 11.0));
    assert_eq!((norm.behind, norm.beyond_spread, softmax.beyond_spread), (9.0, Some(true), Some(false)));

    summary.write(folder.path()).expect("files");
    let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a file");
    let best = text("best.csv");
    assert_eq!(
        best.lines().next(),
        Some("model.attention,learning_rate,at_edge,runs,failed,loss mean,loss deviation,behind,beyond_spread")
    );
    assert_eq!(best.lines().nth(1), Some("softmax,0.003,false,3,0,2,1,0,false"));
    assert_eq!(text("summary.csv").lines().count(), 10);
    assert_eq!(text("runs.csv").lines().count(), 28);
    let json: serde_json::Value = serde_json::from_str(&text("summary.json")).expect("JSON");
    assert_eq!(json["best"][0]["metric"]["mean"], 2.0);
}

#[test]
fn text_with_commas_and_quotes_stays_one_cell() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan("[axes]\nattention = [\"exp over=sum,eps=1\"]");
    let states = go(&plan, folder.path(), &fake(|_, _| Outcome::Failed("a \"bad\"\nend".into())), ONE);
    Summary::new(&plan, &states).write(folder.path()).expect("files");
    let text = std::fs::read_to_string(folder.path().join("runs.csv")).expect("a file");
    assert!(text.contains("\"exp over=sum,eps=1\"") && text.contains("\"a \"\"bad\"\"\nend\""), "{text}");
}

#[test]
fn equal_variants_are_pointed_out_and_left_out_when_asked() {
    let text = "[axes]\nattention = [\"norm\", \"exp over=length out norm=l2\", \"softmax\", \"exp over=sum\", \"gate\"]\nseed = [1, 2]";
    let plan = plan(text);
    let found: Vec<String> = equalities(&plan).iter().map(ToString::to_string).collect();
    assert_eq!(
        found,
        [
            "model.attention: `norm` and `exp over=length out norm=l2` have the same output up to rounding and eps",
            "model.attention: `softmax` and `exp over=sum` are the same attention",
        ]
    );
    let folder = tempfile::tempdir().expect("a folder");
    let runner = fake(|job, _| loss(number(job, "seed")));
    let options = Options { skip_equal: true, ..ONE };
    let states = go(&plan, folder.path(), &runner, options);
    assert_eq!(runner.count(), 6);
    assert_eq!(states[2..4], [State::Equal(0), State::Equal(1)]);
    let summary = Summary::new(&plan, &states);
    assert_eq!(summary.groups[1].metrics, summary.groups[0].metrics, "its equal stands for it");
    assert_eq!((summary.runs[2].status, &summary.runs[2].note), ("equal", &plan.jobs[0].hash));
    go(&plan, folder.path(), &runner, ONE);
    assert_eq!(runner.count(), 10, "without the wish all are run");
}

#[test]
fn an_error_beyond_one_run_ends_the_sweep_and_keeps_what_had_ended() {
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

#[test]
fn a_folder_is_for_one_sweep_at_a_time_and_damaged_records_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = plan("");
    let inner = fake(|_, _| loss(1.0));
    let outer = fake(|_, _| {
        let error = run(&plan, folder.path(), &inner, &ONE, &AtomicBool::new(false), &mut |_| {}).expect_err("a second sweep");
        assert!(error.to_string().contains("another sweep"), "{error}");
        loss(1.0)
    });
    go(&plan, folder.path(), &outer, ONE);
    let record = folder.path().join("runs").join(format!("{}.json", plan.jobs[0].hash));
    std::fs::write(&record, "{").expect("a file");
    let error = states(&plan, folder.path(), false).expect_err("damaged").to_string();
    assert!(error.contains(&plan.jobs[0].hash) && error.contains("delete"), "{error}");
}

#[cfg(unix)]
mod processes {
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
}
