//! `termwise reproduce`: a few steps of every experiment, resumption, and the plan of the paper's runs.

use std::path::Path;
use std::time::SystemTime;

use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;

use crate::support::{json, termwise};

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("valid JSON")
}

/// When each record of a run was written.
fn records(folder: &Path) -> Vec<(String, SystemTime)> {
    let entries = std::fs::read_dir(folder.join("runs")).expect("runs").map(|entry| entry.expect("an entry"));
    let records = entries.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "json"));
    let mut records: Vec<_> = records
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.metadata().and_then(|m| m.modified()).expect("a time")))
        .collect();
    records.sort();
    records
}

#[test]
fn a_reproduction_runs_decides_claims_and_resumes() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("results");
    let place = out.display().to_string();
    let arguments = ["reproduce", "e1", "e6", "--scale", "test", "--seeds", "2", "--out", &place, "--details"];
    let run = termwise(&arguments).assert().success().stderr(contains("e1, e6 at scale test: 8 runs with 2 seeds each"));
    // Lines are broken by the width.
    let words_of = |output: &[u8]| String::from_utf8_lossy(output).split_whitespace().collect::<Vec<_>>().join(" ");
    let text = words_of(&run.get_output().stdout);
    for words in [
        "Norm coincides with softmax: ",
        "8 of 8 runs finished",
        "(paired by seed, t(1))",
        "Rule: Gate − softmax must be above 0.04 nats",
        "build of all finished runs:",
        "E6 ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    // Rendered again, the same, with the build.
    let shown = termwise(&["show", &place, "--details"]).assert().success();
    let rest = shown.get_output().stdout.strip_prefix(&run.get_output().stdout[..]).expect("the same");
    assert!(words_of(rest).starts_with("Made by termwise "), "{}", words_of(rest));
    let markdown = folder.path().join("results.md").display().to_string();
    termwise(&["report", &out.join("results.json").display().to_string(), "--markdown", &markdown]).assert().success();
    let markdown = std::fs::read_to_string(&markdown).expect("a page");
    assert!(markdown.contains("Norm − softmax = ") && markdown.contains("Rule: ") && !markdown.contains("figures/"), "{markdown}");
    // Without details: the verdicts per experiment, in one screen.
    let brief = termwise(&arguments[..arguments.len() - 1]).env("COLUMNS", "100").assert().success();
    let brief = String::from_utf8_lossy(&brief.get_output().stdout).into_owned();
    assert!(brief.lines().count() <= 25 && brief.contains("Verdicts per experiment") && brief.contains("E6"), "{brief}");
    // Runs of another build are named.
    let record = records(&out)[0].0.clone();
    let path = out.join("runs").join(&record);
    let text = std::fs::read_to_string(&path).expect("a record");
    let mut other: Value = serde_json::from_str(&text).expect("JSON");
    other["provenance"][0]["commit"] = "0123456789abcdef".into();
    std::fs::write(&path, other.to_string()).expect("a record");
    let mixed = termwise(&arguments).assert().success().stderr(contains("--rerun-other-builds reruns those of other builds"));
    let text = words_of(&mixed.get_output().stdout);
    for words in ["runs of several builds are mixed here", "1 by", "0123456789ab"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let page = std::fs::read_to_string(out.join("index.html")).expect("a page");
    assert!(page.contains("runs of several builds are mixed here"));
    let again: Vec<&str> = arguments.iter().copied().chain(["--rerun-other-builds"]).collect();
    let alone = words_of(&termwise(&again).assert().success().get_output().stdout);
    assert!(!alone.contains("mixed") && alone.contains("8 of 8 runs finished"), "{alone}");
    let results = read(&out.join("results.json"));
    assert_eq!((&results["format"], &results["scale"]), (&2.into(), &"test".into()));
    assert!(results["environment"]["cores"].as_u64().is_some_and(|cores| cores > 0));
    for made_by in [&results["environment"], &results["runs"][0]["provenance"][0]] {
        assert_eq!(made_by["version"], env!("CARGO_PKG_VERSION"));
        assert!(["instructions", "command"].iter().all(|key| made_by[key].as_str().is_some_and(|text| !text.is_empty())), "{made_by}");
    }
    let claim = &results["experiments"][0]["tasks"][0]["claims"][1];
    assert_eq!((&claim["difference"]["method"], &claim["difference"]["freedom"]), (&"paired".into(), &1.0.into()));
    assert!(claim["stated"].as_str().is_some_and(|rule| rule.contains("95 % interval above 0")));
    let task = &results["experiments"][0]["tasks"][0];
    assert_eq!(task["claims"].as_array().map(Vec::len), Some(3));
    for variant in task["variants"].as_array().expect("variants") {
        let runs: Vec<usize> = variant["runs"].as_array().expect("runs").iter().filter_map(|run| Some(run.as_u64()? as usize)).collect();
        assert_eq!((runs.len(), &variant["recall"]["count"]), (2, &2.into()));
        let mut sum = 0.0;
        for run in runs {
            let run = &results["runs"][run];
            // A number links to the folder of its run, which contains it.
            let metrics =
                std::fs::read_to_string(out.join(run["folder"].as_str().expect("a folder")).join("metrics.jsonl")).expect("metrics");
            let last: Value = serde_json::from_str(metrics.lines().last().expect("a line")).expect("JSON");
            assert_eq!(run["held_out"]["recall"]["loss"], last["recall"]["loss"]);
            assert_eq!(run["curve"].as_array().map(Vec::len), Some(2));
            sum += run["held_out"]["recall"]["loss"].as_f64().expect("a loss");
        }
        assert!((variant["recall"]["mean"].as_f64().expect("a mean") - sum / 2.0).abs() < 1e-12);
    }
    let models = results["inside"]["models"].as_array().expect("models that were looked into");
    assert_eq!(models.len(), 2);
    for model in models {
        assert!(out.join(model["checkpoint"].as_str().expect("a path")).join("model.safetensors").is_file());
        // The term of order 0 is 1 for every pair.
        assert_eq!(model["layers"][0]["log10"][0], 0.0);
    }
    assert_eq!(results["inside"]["claims"].as_array().map(Vec::len), Some(2));

    let before = records(&out);
    assert_eq!(before.len(), 8);
    let again = json(&["reproduce", "e1", "e4", "--scale", "test", "--seeds", "2", "--out", &place, "--json"]);
    assert_eq!((&again["timing"]["runs"], &again["timing"]["finished"]), (&20.into(), &20.into()));
    let after = records(&out);
    assert!(after.len() == 20 && before.iter().all(|record| after.contains(record)), "finished runs were run again");

    // As with other runs: seeds are grouped, and the page links to the runs.
    let report = folder.path().join("report");
    termwise(&["report", &place, "--out", &report.display().to_string()]).assert().success().stderr(contains("index.html"));
    let page = std::fs::read_to_string(report.join("index.html")).expect("a page");
    let run = again["runs"][0]["folder"].as_str().expect("a folder");
    assert!(page.contains("20 runs, 10 settings") && page.contains(&format!("../results/{run}/metrics.jsonl")));
    assert!(report.join("figures/recall-dots.png").is_file());
    let summary = std::fs::read_to_string(out.join("summary.md")).expect("a summary");
    assert!(summary.contains("| softmax | `softmax` |") && summary.contains("](figures/e4-dots.png)"), "{summary}");
}

#[test]
fn one_seed_gives_no_verdict() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().display().to_string();
    let found = json(&["reproduce", "e7", "--scale", "test", "--seeds", "1", "--out", &place, "--json"]);
    let claim = &found["experiments"][0]["tasks"][0]["claims"][0];
    assert_eq!(claim["verdict"], "undecided");
    assert!(claim["note"].as_str().is_some_and(|note| note.contains("one seed")));
}

#[test]
fn the_paper_is_planned_and_not_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().display().to_string();
    let arguments = ["reproduce", "e1", "e2", "--scale", "paper", "--out", &place];
    termwise(&[&arguments[..], &["--details"]].concat())
        .assert()
        .success()
        .stdout(contains("not started").and(contains("275,293,184")).and(contains("A100")));
    let plan = json(&[&arguments[..], &["--json"]].concat());
    let runs = plan["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 12);
    // 36 rows of 1024 for 100,000 steps.
    assert_eq!(runs[0]["tokens"], 36u64 * 1024 * 100_000);
    for run in runs {
        let settings = folder.path().join("runs").join(format!("{}.toml", run["hash"].as_str().expect("a hash")));
        assert!(std::fs::read_to_string(settings).expect("settings").contains("recipe = \"paper\""));
    }
    assert!(records(folder.path()).is_empty() && !folder.path().join("results.json").exists());
    // `sweep` accepts the written file, with the same runs.
    for (sweep, count) in [("e1.toml", 4), ("e2-1.toml", 4), ("e2-2.toml", 4)] {
        let file = folder.path().join(sweep).display().to_string();
        let listed = termwise(&["sweep", &file, "--list"]).current_dir(folder.path()).assert().success().get_output().stdout.clone();
        let listed = String::from_utf8(listed).expect("text");
        assert!(listed.contains(&format!("{count} runs")), "{listed}");
        if sweep == "e1.toml" {
            assert!(runs[..4].iter().all(|run| listed.contains(run["hash"].as_str().expect("a hash"))), "{listed}");
        }
    }
}

#[test]
fn mistakes_are_named() {
    for (arguments, message) in [
        (vec!["reproduce", "e9"], "there is no experiment `e9`"),
        (vec!["reproduce", "--scale", "hour"], "possible values: minute, laptop, text, mini, zoology, paper"),
        (vec!["reproduce", "--scale", "text"], "--scale text needs a text"),
        (vec!["reproduce", "--seeds", "0"], "--seeds"),
        (vec!["report"], "RUNS"),
        (vec!["report", "src"], "there is no run in src"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        termwise(&arguments).current_dir(folder.path()).assert().code(2).stderr(contains(message));
    }
}
