//! Commands with several MPI processes. `bench/ranks.py` runs longer ones.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::Place;

/// `mpirun` with this many ranks of the program; the test is skipped without mpirun.
fn ranks(place: &Place, count: usize, arguments: &[&str]) -> Option<Command> {
    let found = Command::new("mpirun").arg("--version").output().is_ok_and(|output| output.status.success());
    termwise_base::test_skip::need("mpi", "mpirun", found.then_some(()))?;
    let mut command = Command::new("mpirun");
    command.args(["-n", &count.to_string()]).arg(assert_cmd::cargo::cargo_bin("termwise")).args(["--threads", "1"]).args(arguments);
    command.current_dir(place.path("")).env("XDG_CACHE_HOME", place.path("cache"));
    // By default, Open MPI rejects more ranks than cores, and root.
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1").env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.stdin(Stdio::null());
    Some(command)
}

fn output(command: &mut Command) -> (bool, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("mpirun");
    (status.success(), String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8_lossy(&stderr).into_owned())
}

fn bytes(run: &Path) -> Vec<Vec<u8>> {
    let mut steps: Vec<_> = std::fs::read_dir(run.join("checkpoints")).expect("checkpoints").flatten().map(|entry| entry.path()).collect();
    steps.sort();
    let last = steps.pop().expect("a checkpoint");
    ["model.safetensors", "optimizer.safetensors", "state.json"].map(|name| std::fs::read(last.join(name)).expect("a file")).to_vec()
}

/// A training with enough rows to share.
fn settings(place: &Place, name: &str, more: &str) -> String {
    std::fs::write(place.path(name), place.settings(&format!("steps = 12\n{more}")).replace("batch = 2\n", "batch = 8\n")).expect("a file");
    place.at(name)
}

#[test]
fn any_number_of_processes_leaves_the_same_bytes_and_results() {
    let place = Place::new();
    let config = settings(&place, "a.toml", "attention = \"norm conv=3\"");
    for count in [1, 3, 4] {
        let name = format!("r{count}");
        let Some(mut command) = ranks(&place, count, &["train", "--quiet", "--config", &config, "--name", &name]) else { return };
        let (good, out, err) = output(&mut command);
        assert!(good && out.matches("step-00000012").count() == 1, "rank 0 alone speaks: {out} {err}");
        assert!(bytes(&place.path("runs").join(name)) == bytes(&place.path("runs/r1")), "{count} ranks");
    }
    // Long enough for several batches of windows.
    let line =
        |i: usize| format!("{} saw {i} boats and {} gulls near the harbour of the town.\n", ["Tom", "Ann", "Sue"][i % 3], i * 7 % 11);
    std::fs::write(place.path("long.txt"), (0..220).map(line).collect::<String>()).expect("a file");
    place.command(&["train", "--quiet", "--config", &config, "--name", "alone", "--micro-batches", "8"]).assert().success();
    assert!(bytes(&place.path("runs/alone")) == bytes(&place.path("runs/r1")), "without MPI, cut into as many micro-batches");

    let (text, long) = (place.at("text.txt"), place.at("long.txt"));
    for arguments in [
        &["eval", "runs/r1", "--data", &text, "--length", "16", "--batch", "2", "--json"][..],
        &["eval", "runs/r1", "--data", &text, "--length", "16", "--stride", "5", "--batch", "2", "--json"],
        &["spectrum", "runs/r1", "--data", &long, "--length", "64", "--tokens", "12288", "--max-order", "4", "--json"],
        &["cut", "runs/r1", "--data", &text, "--orders", "2", "--batch", "1", "--length", "16", "--batches", "12", "--json"],
    ] {
        let result = |count: usize| {
            let (good, out, err) = output(&mut ranks(&place, count, arguments).expect("mpirun is here"));
            assert!(good, "{arguments:?}: {err}");
            // A result contains the command line of the program, without mpirun.
            out
        };
        let one = result(1);
        assert!(!one.is_empty() && result(3) == one, "{arguments:?}");
    }
}

fn descendants(of: u32) -> Vec<u32> {
    let parent = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    all.filter(|&pid| parent(pid) == Some(of)).collect()
}

fn wait(child: &mut Child) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        if let Some(status) = child.try_wait().expect("a status") {
            return status.success();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("mpirun does not end");
}

#[test]
fn a_lost_rank_ends_all_and_the_run_resumes_with_fewer() {
    let place = Place::new();
    let config = settings(&place, "b.toml", "horizon = 200\nkeep = 50");
    let longer = ["train", "--quiet", "--config", &config, "--steps", "200", "--checkpoint-every", "1"];
    let run = |place_of: [&'static str; 2], count| ranks(&place, count, &[&longer[..], &place_of].concat());
    let Some(mut whole) = run(["--name", "whole"], 2) else { return };
    assert!(output(&mut whole).0);
    let mut process =
        run(["--name", "killed"], 3).expect("mpirun is here").stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("mpirun");
    let place_of = place.path("runs/killed/checkpoints");
    let begun = Instant::now();
    while !std::fs::read_dir(&place_of).is_ok_and(|entries| entries.count() > 1) {
        assert!(begun.elapsed() < Duration::from_secs(60) && process.try_wait().expect("a status").is_none(), "it has ended early");
        std::thread::sleep(Duration::from_millis(2));
    }
    let victim = *descendants(process.id()).last().expect("a rank");
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().expect("kill").success());
    assert!(!wait(&mut process), "a lost rank is a failure");
    assert!(output(&mut run(["--resume", "runs/killed"], 2).expect("mpirun is here")).0);
    assert!(bytes(&place.path("runs/killed")) == bytes(&place.path("runs/whole")));
}

#[test]
fn an_error_is_printed_once() {
    let place = Place::new();
    let Some(mut command) = ranks(&place, 3, &["train", "--quiet", "--data", "missing.txt", "--tokenizer", "bytes"]) else { return };
    let (good, _, err) = output(&mut command);
    assert!(!good && err.matches("missing.txt").count() == 1, "{err}");
    let config = settings(&place, "c.toml", "");
    for _ in 0..2 {
        let (good, _, err) =
            output(&mut ranks(&place, 2, &["train", "--quiet", "--config", &config, "--name", "twice"]).expect("mpirun is here"));
        if !good {
            assert_eq!(err.matches("already contains a run").count(), 1, "{err}");
            return;
        }
    }
    panic!("the second one begins anew");
}
