//! Commands in sequence, as typed by a new user: runs of `train` are accepted by the other commands.

use std::path::Path;

use predicates::prelude::*;
use predicates::str::contains;

use crate::support::termwise;

const LANGUAGE: &str = "length=32 facts=2 keys=4 values=4 words=4 held_out=8";

/// Runs a command in this folder.
fn at(folder: &Path, arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = termwise(arguments);
    command.current_dir(folder).env("XDG_CACHE_HOME", folder.join("cache")).assert()
}

fn train(folder: &Path, name: &str) {
    let sizes = ["--hidden", "16", "--mlp", "16", "--heads", "2", "--layers", "1", "--length", "32", "--batch", "2"];
    let run = ["train", "--quiet", "--name", name, "--language", LANGUAGE, "--steps", "4", "--warmup", "1", "--eval-every", "2"];
    at(folder, &[&run[..], &sizes].concat()).success().stdout(contains("termwise generate runs/"));
}

#[test]
fn default_commands_compose() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    for command in ["generate", "eval", "spectrum", "cut"] {
        at(here, &[command]).failure().stderr(contains("no model was named").and(contains("termwise train")));
    }
    train(here, "first");

    let asked = at(here, &["generate"]).success();
    let output = String::from_utf8(asked.get_output().stdout.clone()).expect("text");
    let words: Vec<&str> = output.split_whitespace().collect();
    // The document as text, the question, and one token as answer.
    assert!(words.len() >= 7 && words[words.len() - 3] == "?" && words[words.len() - 2].starts_with('k'), "{output}");
    asked.stderr(contains("of runs/first, the only run in runs/").and(contains("held-out document 1 queries k")));
    at(here, &["generate", "first", "--prompt", "k1 v2 k3 v0 ? k1", "--max-tokens", "1", "--quiet"]).success().stderr("");
    // The answer is the first token after the question.
    let mut differ = false;
    for seed in ["1", "2", "3", "4"] {
        let answer = |tokens: &str| {
            let asked = at(here, &["generate", "--seed", seed, "--temperature", "2", "--ignore-end", "--max-tokens", tokens]).success();
            let output = String::from_utf8(asked.get_output().stdout.clone()).expect("text");
            (
                output.split_whitespace().next_back().expect("a word").to_owned(),
                String::from_utf8_lossy(&asked.get_output().stderr).into_owned(),
            )
        };
        let ((first, _), (last, verdict)) = (answer("1"), answer("6"));
        assert!(verdict.contains(&format!("the model predicts {first}: ")), "{first} {last} {verdict}");
        differ |= first != last;
    }
    assert!(differ, "the last token was always the first");
    // A custom question is printed and answered with one token.
    let own = at(here, &["generate", "first", "--prompt", "k1 v2 k3 v0 ? k1", "--ignore-end"]).success().get_output().stdout.clone();
    let own = String::from_utf8(own).expect("text");
    assert!(own.starts_with("k1 v2 k3 v0 ? k1 ") && own.split_whitespace().count() == 7, "{own}");
    at(here, &["generate", "--prompt", "? cat"]).failure().stderr(contains("no token for `cat`"));

    at(here, &["eval"]).success().stdout(contains("held-out tokens").and(contains("recall")));
    at(here, &["spectrum", "--json"]).success().stdout(contains("\"layers\""));
    at(here, &["truncate", "--orders", "2", "--batch", "2"]).success().stdout(contains("order"));
    for name in ["runs/first", "first"] {
        at(here, &["report", name]).success().stderr(contains("index.html"));
    }
    at(here, &["plan", "first", "--hardware", "a100"]).success().stdout(contains("first"));
    at(here, &["data", "show"]).success().stdout(contains("? k").and(contains("<|endoftext|>")));
    at(here, &["data", "show", "--language", "facts=1 keys=1 length=8", "--batch", "1"]).success().stdout(contains("k0 v"));
    at(here, &["data", "prepare"]).failure().stderr(contains("name files"));

    // The newest run is selected and named.
    train(here, "second");
    at(here, &["eval"]).success().stderr(contains("runs/second, the newest of 2 runs"));
}

#[test]
fn every_command_calls_models_by_the_same_names() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    train(here, "first");
    for model in ["first", "runs/first", "runs/first/checkpoints", "runs/first/checkpoints/step-00000004"] {
        at(here, &["generate", model, "--max-tokens", "1"]).success();
        at(here, &["eval", model]).success();
        at(here, &["spectrum", model, "--json"]).success();
        at(here, &["plan", model, "--hardware", "a100"]).success();
    }
    for command in ["generate", "eval", "spectrum", "cut", "plan"] {
        let error = at(here, &[command, "frist"]).failure().get_output().stderr.clone();
        let error = String::from_utf8(error).expect("text");
        assert!(
            error.contains("frist/config.json does not exist") && error.contains("runs/frist/checkpoints is not a directory"),
            "{error}"
        );
    }
    at(here, &["generate", "tiny"]).failure().stderr(contains("a preset, which has sizes but no weights"));
    at(here, &["generate", "hf://no-owner"]).failure().stderr(contains("hf://no-owner"));
}

#[test]
fn runs_record_their_build() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    train(here, "first");
    for place in ["runs/first", "runs/first/checkpoints/step-00000004"] {
        let text = std::fs::read_to_string(here.join(place).join("provenance.json")).expect("a file");
        let found: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(found[0]["version"], env!("CARGO_PKG_VERSION"));
        assert!(found[0]["command"].as_str().is_some_and(|command| command.contains("train --quiet --name first")), "{text}");
        assert!(!found[0]["instructions"].as_str().expect("a text").is_empty());
    }
    // Results also compose: printed and written ones.
    std::fs::write(here.join("text.txt"), "a text of some words\n".repeat(50)).expect("a file");
    for (arguments, kind) in [
        (&["train", "--resume", "runs/first"][..], ""),
        (&["eval"], "evaluation"),
        (&["spectrum"], "spectrum"),
        (&["cut", "--orders", "2", "--batch", "2", "--no-map", "--no-plan"], "cut"),
        (&["plan", "tiny", "--hardware", "a100"], "plan"),
        (&["runs"], "runs"),
        (&["bench", "gemm", "--repeat", "1"], "bench-gemm"),
        (&["data", "prepare", "text.txt"], "data"),
    ] {
        let check = |text: &[u8]| {
            let found: serde_json::Value = serde_json::from_slice(text).expect("JSON");
            let made_by = &found["made_by"];
            assert_eq!(made_by["version"], env!("CARGO_PKG_VERSION"), "{arguments:?}");
            assert!(made_by["modified"].is_boolean() && made_by.get("commit").is_some(), "{made_by}");
            assert!(made_by["instructions"].as_str().is_some_and(|text| !text.is_empty()) && made_by["processor"].is_string(), "{made_by}");
            assert!(made_by["command"].as_str().is_some_and(|text| text.contains(&arguments.join(" "))), "{made_by}");
        };
        check(&at(here, &[arguments, &["--json"]].concat()).success().get_output().stdout);
        if !kind.is_empty() {
            let out = here.join(format!("results-{kind}"));
            at(here, &[arguments, &["--out", &out.display().to_string()]].concat()).success();
            check(&std::fs::read(out.join(format!("{kind}.json"))).expect("a file"));
            assert!(std::fs::read_to_string(out.join("index.html")).expect("a page").contains("Made by termwise "), "{kind}");
        }
    }
    at(here, &["--version"]).success().stdout(contains(env!("CARGO_PKG_VERSION")).and(contains("commit unknown").or(contains(" ("))));
    // Folders of earlier builds, without provenance, still load.
    std::fs::remove_file(here.join("runs/first/checkpoints/step-00000004/provenance.json")).expect("removed");
    std::fs::remove_file(here.join("runs/first/provenance.json")).expect("removed");
    at(here, &["eval", "runs/first/checkpoints/step-00000004"]).success();
    for name in ["runs/first", "first"] {
        at(here, &["report", name]).success().stderr(contains("index.html"));
    }
    let page = std::fs::read_to_string(here.join("report/index.html")).expect("a page");
    assert!(page.contains("build unknown") && page.contains("Made by termwise "), "builds of the runs and of the page");
}
