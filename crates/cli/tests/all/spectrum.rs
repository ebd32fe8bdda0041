//! `termwise spectrum`: output, files and errors.

use std::fs;
use std::path::{Path, PathBuf};

use predicates::prelude::*;
use predicates::str::contains;
use serde_json::{Value, json};
use termwise_model::weights::WriteOptions;
use termwise_model::{Config, Model};

use crate::support::{json as output, termwise};

fn small(attention: &str) -> Model {
    let text = format!(
        r#"{{"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4,
            "attention_variant": "{attention}"}}"#
    );
    Model::fresh(Config::from_json_str(&text, "test").expect("a configuration"), 1).expect("a model")
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().expect("a folder"));
        fs::write(place.path("text.txt"), "To be, or not to be, that is the question. ".repeat(30)).expect("a text");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn model(&self, name: &str, model: &Model, options: &WriteOptions) -> String {
        fs::create_dir(self.path(name)).expect("a folder");
        model.write(self.path(name), options).expect("a model");
        self.text(name)
    }
}

#[test]
fn a_model_is_measured_printed_and_drawn() {
    let place = Place::new();
    let model = place.model("tiny", &small("softmax"), &WriteOptions::default());
    let (data, cache) = (place.text("text.txt"), place.text("cache"));
    let arguments = ["spectrum", &model, "--data", &data, "--cache", &cache, "--tokens", "200", "--queries", "20"];
    let folder = place.path("out");
    let out = folder.display().to_string();
    termwise(&[&arguments[..], &["--out", &out, "--details"]].concat()).assert().success().stdout(
        contains("Term spectrum of tiny")
            .and(contains("2 layers, 4 heads over 2 KV heads of dimension 4"))
            .and(contains("80 of 256 rows, drawn with seed 1"))
            .and(contains("Dominant orders"))
            .and(contains("order for an error of 1 %")),
    );
    assert!(folder.join("index.html").is_file() && folder.join("figures/order-map.png").is_file());
    let written: Value = serde_json::from_slice(&fs::read(folder.join("spectrum.json")).expect("a file")).expect("JSON");
    assert_eq!((&written["rows"]["sampled"], &written["rows"]["of"], &written["timing"]), (&json!(80), &json!(256), &Value::Null));

    // The same numbers on standard output, and no folder without --out.
    let mut found = output(&[&arguments[..], &["--json", "--threads", "1"]].concat());
    // Both have the provenance, with different command lines.
    found["made_by"]["command"] = written["made_by"]["command"].clone();
    assert_eq!(found, written);
    let all = output(&[&arguments[..8], &["--queries", "all", "--max-order", "6", "--json", "--timing", "--length", "32"]].concat());
    assert_eq!((&all["rows"]["sampled"], &all["text"]["length"], &all["orders"]), (&json!(224), &json!(32), &json!([0, 2, 4, 6])));
    assert!(all["timing"]["forward"].as_f64().is_some_and(|seconds| seconds > 0.0));
}

#[test]
fn models_of_other_attentions_are_measured() {
    let place = Place::new();
    for (i, attention) in ["gated_softmax", "norm", "taylor=0..4", "gated_softmax_decay"].into_iter().enumerate() {
        let model = place.model(&format!("model{i}"), &small(attention), &WriteOptions::default());
        let found = output(&["spectrum", &model, "--data", &place.text("text.txt"), "--cache", &place.text("cache"), "--json"]);
        assert!(found["layers"][1]["heads"][3]["cut"].is_object(), "{attention}");
    }
    let linear = place.model("linear", &small("linear_cosine"), &WriteOptions::default());
    let words = ["spectrum", &linear, "--data", &place.text("text.txt"), "--cache", &place.text("cache")];
    termwise(&words).assert().code(2).stdout("").stderr(contains("needs an `exp` or `taylor` kernel").and(contains("`feature=l2")));
}

#[test]
fn a_real_model_on_its_own_text() {
    let Some(shared) = termwise_base::test_skip::shared("data") else { return };
    let place = Place::new();
    let (model, data) = (shared.join("stories260K").display().to_string(), shared.join("tinystories-2MiB.txt").display().to_string());
    let arguments = [
        "spectrum",
        &model,
        "--data",
        &data,
        "--documents",
        "separator:<|endoftext|>",
        "--cache",
        &place.text("cache"),
        "--tokens",
        "512",
        "--json",
    ];
    let found = output(&arguments);
    assert_eq!((&found["text"]["length"], found["layers"].as_array().map(Vec::len)), (&json!(512), Some(5)));
    // Its first layers have small scores, its last ones scores up to two hundred.
    let most = |layer: usize| {
        let heads = found["layers"][layer]["heads"].as_array().expect("heads").iter();
        heads.map(|head| head["scores"]["max"].as_f64().expect("a number")).fold(f64::NEG_INFINITY, f64::max)
    };
    assert!((0..5).map(most).fold(0.0, f64::max) > 20.0, "{:?}", (0..5).map(most).collect::<Vec<_>>());
}

fn edit(folder: &Path, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    change(config.as_object_mut().expect("an object"));
    fs::write(path, config.to_string()).expect("a file");
}

#[test]
fn invalid_model_folders_are_reported_in_one_sentence() {
    type Break = fn(&Path);
    let cases: [(&str, bool, Break, &str); 17] = [
        ("absent", false, |folder| fs::remove_dir_all(folder).expect("removed"), "no model"),
        ("no config", false, |folder| fs::remove_file(folder.join("config.json")).expect("removed"), "config.json"),
        ("config is not JSON", false, |folder| fs::write(folder.join("config.json"), "{").expect("a file"), "config.json"),
        (
            "not a Llama",
            false,
            |folder| edit(folder, |config| _ = config.insert("model_type".into(), json!("gpt2"))),
            "which is not supported",
        ),
        ("biased attention", false, |folder| edit(folder, |config| _ = config.insert("attention_bias".into(), json!(true))), "q_proj.bias"),
        ("biased MLP", false, |folder| edit(folder, |config| _ = config.insert("mlp_bias".into(), json!(true))), "gate_proj.bias"),
        (
            "window",
            false,
            |folder| edit(folder, |config| _ = config.insert("sliding_window".into(), json!(4096))),
            "this family has no window",
        ),
        (
            "unknown rope",
            false,
            |folder| edit(folder, |config| _ = config.insert("rope_scaling".into(), json!({"rope_type": "ntk", "factor": 4.0}))),
            "supported RoPE types",
        ),
        (
            "quantised",
            false,
            |folder| edit(folder, |config| _ = config.insert("quantization_config".into(), json!({"bits": 4}))),
            "not quantized",
        ),
        ("wrong width", false, |folder| edit(folder, |config| _ = config.insert("intermediate_size".into(), json!(24))), "[24, 16]"),
        ("more layers", false, |folder| edit(folder, |config| _ = config.insert("num_hidden_layers".into(), json!(3))), "model.layers.2"),
        ("fewer layers", false, |folder| edit(folder, |config| _ = config.insert("num_hidden_layers".into(), json!(1))), "model.layers.1"),
        ("no weights", false, |folder| fs::remove_file(folder.join("model.safetensors")).expect("removed"), "safetensors"),
        (
            "truncated",
            false,
            |folder| {
                let path = folder.join("model.safetensors");
                let bytes = fs::read(&path).expect("a file");
                fs::write(path, &bytes[..bytes.len() - 100]).expect("a file");
            },
            "truncated",
        ),
        ("no tensors", false, |folder| fs::write(folder.join("model.safetensors"), "<html>").expect("a file"), "model.safetensors"),
        ("missing shard", true, |folder| fs::remove_file(shard(folder)).expect("removed"), "-of-"),
        (
            "truncated shard",
            true,
            |folder| {
                let path = shard(folder);
                let bytes = fs::read(&path).expect("a file");
                fs::write(path, &bytes[..bytes.len() / 2]).expect("a file");
            },
            "-of-",
        ),
    ];
    let place = Place::new();
    let model = small("softmax");
    for (name, sharded, damage, message) in cases {
        let options = if sharded { WriteOptions::default().max_shard_bytes(Some(4096)) } else { WriteOptions::default() };
        let folder = place.model(name, &model, &options);
        damage(Path::new(&folder));
        let run = termwise(&["spectrum", &folder, "--data", &place.text("text.txt")]).assert().failure().get_output().clone();
        let text = String::from_utf8_lossy(&run.stderr);
        println!("{name}: {text}");
        assert!(text.starts_with("error: ") && text.trim_end().lines().count() == 1, "{name}: {text}");
        assert!(text.contains(message), "{name}: {text}");
        assert!(run.stdout.is_empty(), "{name}");
    }
}

/// The first shard of a folder.
fn shard(folder: &Path) -> PathBuf {
    let names = fs::read_dir(folder).expect("a listing").map(|entry| entry.expect("an entry").path());
    names.filter(|path| path.display().to_string().contains("-of-")).min().expect("a shard")
}

#[test]
fn mistakes_are_named() {
    let place = Place::new();
    let model = place.model("tiny", &small("softmax"), &WriteOptions::default());
    for (arguments, code, message) in [
        (vec!["spectrum"], 2, "no model was named"),
        (vec!["spectrum", &model], 2, "pass --data"),
        (vec!["spectrum", &model, "--queries", "none"], 2, "`all` or a number"),
        (vec!["spectrum", &model, "--max-order", "7"], 2, "even number"),
        (vec!["spectrum", &model, "--data", "absent.txt"], 2, "no such file"),
        #[cfg(feature = "hub")]
        (vec!["spectrum", "hf://owner"], 1, "hf://<owner>/<name>"),
        #[cfg(not(feature = "hub"))]
        (vec!["spectrum", "hf://owner"], 2, "which this build does not include"),
    ] {
        termwise(&arguments).assert().code(code).stderr(contains(message));
    }
}
