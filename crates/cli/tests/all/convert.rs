//! `termwise convert`, `audit`, `frontier` and `atlas` on a small model of bytes.

use std::fs;
use std::path::Path;

use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;
use termwise_model::{Config, Model};

use crate::support::{json, termwise};

/// A folder with a model and a text.
fn folder() -> tempfile::TempDir {
    let text = r#"{"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 256, "tie_word_embeddings": true}"#;
    let model = Model::fresh(Config::from_json_str(text, "bytes").expect("valid"), 3).expect("a model");
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("model")).expect("a folder");
    model.write(folder.path().join("model"), &Default::default()).expect("written");
    let line = |i: usize| format!("{} walked {} miles and met {} friends.\n", ["Tom", "Ann", "Sue"][i % 3], i, i * 7 % 11);
    fs::write(folder.path().join("a.txt"), (0..60).map(line).collect::<String>()).expect("a file");
    folder
}

/// The arguments of a command on that model and text, and more of them.
fn arguments(folder: &Path, command: &str, more: &[&str]) -> Vec<String> {
    let at = |name: &str| folder.join(name).display().to_string();
    let mut all = vec![command.to_owned(), at("model"), "--data".into(), at("a.txt"), "--cache".into(), at("cache"), "--quiet".into()];
    all.extend(["--calibration-length", "96", "--calibration-contexts", "2"].map(String::from));
    all.extend(more.iter().map(ToString::to_string));
    all
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn a_budget_in_bytes_is_kept_and_audited() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (small, cutting) = (at("small"), ["--length", "96", "--contexts", "1"]);
    for budget in ["4000", "6000"] {
        let more = [&cutting[..], &["--bytes", budget, "--save", &small, "--json"]].concat();
        let found = json(&words(&arguments(folder.path(), "convert", &more)));
        let (bytes, kinds) = (found["bytes"].as_u64().expect("bytes"), found["kinds"].as_array().expect("kinds"));
        assert!(bytes <= budget.parse().expect("a number") && kinds.len() == 4, "{bytes} of {budget}");
        let audit = ["audit", &small, "--against", &at("model"), "--data", &at("a.txt"), "--cache", &at("cache"), "--quiet", "--json"];
        let run = termwise(&[&audit[..], &["--length", "192", "--tokens", "8"]].concat()).output().expect("it runs");
        let found: Value = serde_json::from_slice(&run.stdout).expect("JSON");
        for name in ["weights", "memory is the recorded one", "bytes are those of the record", "token by token", "memory is constant"] {
            let check = found["checks"].as_array().and_then(|checks| checks.iter().find(|check| check["name"] == name));
            assert_eq!(check.map(|check| &check["passed"]), Some(&Value::Bool(true)), "{name}: {check:?}");
        }
    }
    // Finished measurements are kept with checksums: the same command refuses numbers that were edited.
    let path = folder.path().join("small/measurements/journal.jsonl");
    let text = fs::read_to_string(&path).expect("a journal");
    fs::write(&path, text.replacen("\"value\":[", "\"value\":[7.0,", 1)).expect("an edit");
    let more = [&cutting[..], &["--keys", "24", "--save", &small]].concat();
    termwise(&words(&arguments(folder.path(), "convert", &more))).assert().code(2).stderr(contains("was edited"));
    // The folder has the report next to the model. The record of an earlier build is refused.
    assert!(folder.path().join("small/index.html").is_file() && folder.path().join("small/conversion.json").is_file());
    fs::remove_file(folder.path().join("small/kv_memory.json")).expect("a record");
    fs::write(folder.path().join("small/conversion.json"), r#"{"original": "model", "tensors": "0"}"#).expect("a record");
    termwise(&["audit", &small, "--against", &at("model"), "--data", &at("a.txt")])
        .assert()
        .code(2)
        .stderr(contains("earlier build").and(contains("e9b2d07")));
    termwise(&words(&arguments(folder.path(), "convert", &["--loss", "+0.000000001%", "--length", "96", "--contexts", "1"])))
        .assert()
        .code(2)
        .stderr(contains("increases the loss by").and(contains("allow more")));
    termwise(&words(&arguments(folder.path(), "convert", &["--bytes", "100", "--length", "96"])))
        .assert()
        .code(2)
        .stderr(contains("100 bytes").and(contains("allow more")));
}

#[test]
fn every_command_accepts_the_folder_of_a_conversion() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let small = at("small");
    termwise(&["kv", "convert", &at("model"), "--data", &at("a.txt"), "--bytes", "6000", "--save", &small, "--quiet"]).assert().success();
    let text = ["--data", &at("a.txt"), "--cache", &at("cache"), "--quiet", "--json"];
    let found = json(&[&["eval", &small][..], &text].concat());
    assert!(found["loss"].as_f64().is_some_and(f64::is_finite), "{found}");
    let found = json(&["generate", &small, "--prompt", "Tom", "--max-tokens", "8", "--quiet", "--json"]);
    assert_eq!(found["tokens"], 8, "{found}");
    // Beyond the context of the model, 256 tokens, in constant bytes.
    let bytes = |tokens: &str| {
        let run = termwise(&["generate", &small, "--prompt", "Tom", "--max-tokens", tokens, "--ignore-end", "--json"]).assert().success();
        let (printed, message) = (run.get_output().stdout.clone(), String::from_utf8_lossy(&run.get_output().stderr).into_owned());
        assert!(message.contains("constant from token"), "{message}");
        serde_json::from_slice::<Value>(&printed).expect("JSON")["state_bytes"].as_u64().expect("bytes")
    };
    assert_eq!(bytes("500"), bytes("1500"));
    assert!(bytes("500") <= 6000);
    // Spectra and truncation need the scores of all keys.
    for command in
        [&["spectrum", &small][..], &["truncate", &small, "--orders", "2", "--no-map", "--no-plan", "--length", "8", "--batch", "2"]]
    {
        termwise(&[command, &text].concat())
            .assert()
            .code(2)
            .stderr(contains("fixed-size KV memory").and(contains("name the original model")));
    }
}

#[test]
fn key_ranges_of_earlier_builds_are_refused() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let path = folder.path().join("model/model.safetensors");
    let bytes = fs::read(&path).expect("weights");
    let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    let end = data.len();
    header["model.layers.0.self_attn.codes.centre"] = serde_json::json!({"dtype": "F32", "shape": [2, 8], "data_offsets": [end, end + 64]});
    let mut text = header.to_string();
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
    fs::write(&path, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), data, &[0; 64]].concat()).expect("written");
    for command in [&["eval", "model"][..], &["generate", "model", "--prompt", "Tom"]] {
        termwise(&[command, &["--quiet"]].concat())
            .args(if command[0] == "eval" { vec!["--data".to_owned(), at("a.txt")] } else { Vec::new() })
            .current_dir(folder.path())
            .assert()
            .failure()
            .stderr(contains("calibrated key range").and(contains("e9b2d07")).and(contains("convert the original model again")));
    }
}

#[test]
fn models_are_not_saved_over_runs_or_other_files() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::create_dir_all(folder.path().join("run/checkpoints/step-00000010")).expect("a folder");
    for file in ["run/settings.toml", "run/metrics.jsonl", "run/checkpoints/step-00000010/manifest.json"] {
        fs::write(folder.path().join(file), "mine").expect("a file");
    }
    fs::create_dir(folder.path().join("notes")).expect("a folder");
    fs::write(folder.path().join("notes/a"), "mine").expect("a file");
    let (run, checkpoint, notes) = (at("run"), at("run/checkpoints/step-00000010"), at("notes"));
    for (command, more) in [("convert", &["--keys", "24"][..]), ("cut", &["--orders", "2", "--no-map"][..])] {
        let saved = |to: &str, overwrite: &[&str]| {
            let own =
                [command, &at("model"), "--data", &at("a.txt"), "--cache", &at("cache"), "--length", "96", "--save", to].map(String::from);
            let all: Vec<String> = own.into_iter().chain(more.iter().chain(overwrite).map(ToString::to_string)).collect();
            termwise(&words(&all)).assert()
        };
        for overwrite in [&[][..], &["--overwrite"]] {
            saved(&run, overwrite).failure().stderr(contains("directory of a run"));
            saved(&checkpoint, overwrite).failure().stderr(contains("directory of a run"));
        }
        saved(&notes, &[]).failure().stderr(contains("is not empty").and(contains("--overwrite")));
    }
    // A conversion of another model is not replaced, one of the same model is.
    let other = at("other");
    fs::create_dir(&other).expect("a folder");
    for entry in fs::read_dir(at("model")).expect("the model") {
        let entry = entry.expect("a file");
        fs::copy(entry.path(), Path::new(&other).join(entry.file_name())).expect("a copy");
    }
    let convert = |model: &str| {
        let own = ["convert", model, "--data", &at("a.txt"), "--keys", "24", "--length", "96", "--contexts", "1", "--save", &at("small")];
        termwise(&[&own[..], &["--calibration-length", "96", "--calibration-contexts", "2", "--quiet"]].concat()).assert()
    };
    convert(&at("model")).success();
    convert(&other).failure().stderr(contains("contains a model").and(contains("--overwrite")));
    convert(&at("model")).success();
    for file in ["run/settings.toml", "run/metrics.jsonl", "run/checkpoints/step-00000010/manifest.json", "notes/a"] {
        assert_eq!(fs::read_to_string(folder.path().join(file)).expect("kept"), "mine", "{file}");
    }
    assert!(!folder.path().join("run/config.json").exists() && !folder.path().join("notes/config.json").exists());
}

#[test]
fn frontiers_refuse_budgets_that_nothing_fits_into() {
    let folder = folder();
    let refused = |keys: &str| {
        let run = termwise(&words(&arguments(folder.path(), "frontier", &["--keys", keys, "--length", "96"]))).assert().code(2);
        String::from_utf8_lossy(&run.get_output().stderr).into_owned()
    };
    let least: Vec<String> = ["0", "1", "2", "64,1"].map(refused).into_iter().collect();
    for message in &least {
        assert!(message.contains("is too small") && message.contains("or more"), "{message}");
    }
    let number = least[0].split("use --keys ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a minimum");
    let more = ["--keys", number, "--length", "96", "--contexts", "1", "--json"];
    let found = json(&words(&arguments(folder.path(), "frontier", &more)));
    assert_eq!((&found["finished"], found["points"].as_array().map(Vec::is_empty)), (&Value::Bool(true), Some(false)));
}

#[test]
fn an_atlas_has_every_head() {
    let folder = folder();
    let found = json(&words(&arguments(folder.path(), "atlas", &["--removal", "--json"])));
    let heads = found["heads"].as_array().expect("heads");
    assert_eq!(heads.len(), 8);
    for head in heads {
        let share = |name: &str| head[name].as_f64().expect("a number");
        assert!((0.0..=1.0).contains(&share("far_mass")) && (0.0..=1.0).contains(&share("sink_mass")) && share("kl") > 0.0, "{head}");
    }
}
