//! `termwise truncate`, and `eval`, `generate` and `plan` on the saved model.

use std::path::Path;

use predicates::str::contains;
use termwise_model::{Config, Model};

use crate::support::{json, termwise};

/// A folder with a small model of bytes, and two texts.
fn folder() -> tempfile::TempDir {
    let text = r#"{"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.4, "max_position_embeddings": 512, "tie_word_embeddings": true}"#;
    let model = Model::fresh(Config::from_json_str(text, "bytes").expect("valid"), 3).expect("a model");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("model")).expect("a folder");
    model.write(folder.path().join("model"), &Default::default()).expect("written");
    let line = |i: usize| {
        format!("{} walked {} miles and met {} friends on the way to town {}.\n", ["Tom", "Ann", "Sue"][i % 3], i, i * 7 % 11, i * i % 17)
    };
    for (name, from) in [("a.txt", 0), ("b.txt", 1000)] {
        std::fs::write(folder.path().join(name), (from..from + 60).map(line).collect::<String>()).expect("a file");
    }
    folder
}

fn at(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().expect("a plain path").to_owned()
}

#[test]
fn numbers_are_those_of_eval_and_the_saved_model_works() {
    let folder = folder();
    let path = |name: &str| at(folder.path(), name);
    let (model, data, other, cache) = (path("model"), path("a.txt"), path("b.txt"), path("cache"));
    let windows = ["--length", "32", "--batch", "4", "--cache", &cache];
    let common = [&["truncate", &model, "--data", &data, "--calibration", &other, "--orders", "2,4"], &windows[..]].concat();
    let (out, saved) = (path("out"), path("saved"));
    let report = json(&[&common[..], &["--out", &out, "--save", &saved, "--budget", "50%", "--json", "--context", "1024"]].concat());
    let eval = |model: &str, more: &[&str]| json(&[&["eval", model, "--data", &data, "--json"], more, &windows].concat());
    assert_eq!(report["uncut"]["loss"], eval(&model, &[])["loss"]);
    for (i, order) in ["2", "4"].iter().enumerate() {
        let found = eval(&model, &["--order", order]);
        assert_eq!(report["curves"][0]["coefficients"], "taylor");
        assert_eq!(report["curves"][0]["points"][i]["loss"], found["loss"]);
        assert_eq!(report["curves"][0]["points"][i]["bits_per_byte"], found["bits_per_byte"]);
    }
    assert_eq!(report["plan"]["measured"]["loss"], eval(&saved, &[])["loss"]);
    assert!(report["plan"]["cuts"].as_array().is_some_and(|cuts| !cuts.is_empty()));
    let written = std::fs::read_to_string(Path::new(&out).join("cut.json")).expect("a file");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&written).expect("JSON"), report);
    for name in ["index.html", "figures/loss-by-order.svg", "figures/one-layer.png", "tables/plan.csv"] {
        assert!(Path::new(&out).join(name).is_file(), "{name}");
    }
    termwise(&["generate", &saved, "--prompt", "Tom", "--max-tokens", "20"]).assert().success();
    assert!(
        json(&["plan", &saved, "--json", "--hardware", "a100"])["model"]["attention"].as_str().is_some_and(|text| text.contains("mixed"))
    );
    // Rerun from the journal, as tables.
    let lines = || std::fs::read_to_string(Path::new(&out).join("losses.jsonl")).expect("a journal").lines().count();
    let before = lines();
    termwise(&[&common[..], &["--out", &out, "--budget", "50%", "--context", "1024", "--details"]].concat())
        .assert()
        .success()
        .stdout(contains("calibrated"))
        .stdout(contains("One layer truncated"))
        .stdout(contains("\nPlan\n"));
    assert_eq!(lines(), before);
}

#[test]
fn invalid_requests_are_reported() {
    let folder = folder();
    let path = |name: &str| at(folder.path(), name);
    let (model, data, cache) = (path("model"), path("a.txt"), path("cache"));
    termwise(&["truncate", &model]).assert().failure().stderr(contains("--data"));
    termwise(&["truncate", &model, "--data", &data, "--length", "4096", "--cache", &cache])
        .assert()
        .failure()
        .code(2)
        .stderr(contains("at least 3"));
    termwise(&["truncate", &model, "--data", &data, "--orders", "two"]).assert().failure().code(2).stderr(contains("whole number"));
    termwise(&["truncate", &model, "--data", &data, "--budget", "lots"]).assert().failure().code(2).stderr(contains("1%"));
    let small = ["--length", "16", "--batch", "4", "--cache", &cache, "--orders", "2", "--no-map", "--coefficients", "taylor"];
    let own = [&["truncate", &model, "--data", &data, "--no-plan", "--save", &model, "--save-order", "2"], &small[..]].concat();
    termwise(&own).assert().failure().stderr(contains("directory of the model"));
}

/// Known losses of a trained model: the Taylor series gets worse with the order, because large negative scores have the weight x^p/p!; fitted
/// coefficients do not.
#[test]
fn stories260k() {
    let Some(shared) = termwise_base::test_skip::shared("data") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let text = std::fs::read_to_string(shared.join("tinystories-2MiB.txt")).expect("text");
    let end = (0..=120_000).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    std::fs::write(folder.path().join("text.txt"), &text[..end]).expect("a file");
    let (data, cache, saved) = (at(folder.path(), "text.txt"), at(folder.path(), "cache"), at(folder.path(), "saved"));
    let model = at(&shared, "stories260K");
    let common = ["--documents", "separator:<|endoftext|>", "--layout", "padded", "--cache", &cache, "--length", "256"];
    let report = json(
        &[
            &[
                "cut",
                &model,
                "--data",
                &data,
                "--orders",
                "2,4,8",
                "--no-map",
                "--no-plan",
                "--json",
                "--queries",
                "600",
                "--save",
                &saved,
                "--save-order",
                "4",
            ],
            &common[..],
        ]
        .concat(),
    );
    let loss = |kind: usize, i: usize| report["curves"][kind]["points"][i]["loss"].as_f64().expect("a loss");
    for i in 0..3 {
        assert!(loss(1, i) < loss(0, i), "calibrated {} and Taylor's {}", loss(1, i), loss(0, i));
    }
    assert!(loss(1, 1) < loss(0, 1) - 0.5 && loss(1, 2) < loss(1, 0), "{report}");
    let written = termwise(&["generate", &saved, "--max-tokens", "40"]).assert().success().get_output().stdout.clone();
    assert!(written.len() > 20);
}
