//! Logits, loss and every gradient of the published code, for every published attention.

use crate::common;

use std::path::Path;

use termwise_attention::relative_rms;
use termwise_model::weights::Checkpoint;
use termwise_model::{AttentionEngine, Batch, Config, Model};

/// Bound of gradients that are zero by construction: rounding errors only.
const ZERO: f64 = 1e-6;

#[test]
fn every_published_case_matches() {
    let Some(folder) = termwise_base::test_skip::shared("golden") else { return };
    let mut files: Vec<_> = std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    assert!(!files.is_empty(), "no case in ../shared/golden");
    let mut problems = Vec::new();
    for file in &files {
        for engine in [AttentionEngine::Reference, AttentionEngine::Fused] {
            compare(file, engine, &mut problems);
        }
    }
    assert!(problems.is_empty(), "{} problems in {} cases:\n{}", problems.len(), files.len(), problems.join("\n"));
}

fn compare(file: &Path, engine: AttentionEngine, problems: &mut Vec<String>) {
    let case = Checkpoint::open(file).expect("a safetensors file");
    let text = |key: &str| case.metadata().get(key).unwrap_or_else(|| panic!("{}: no {key}", file.display())).as_str();
    let attention = text("attention_type");
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": {}, "hidden_size": {}, "intermediate_size": {}, "num_hidden_layers": {},
            "num_attention_heads": {}, "num_key_value_heads": {}, "rms_norm_eps": {}, "rope_theta": {}, "max_position_embeddings": 2048,
            "tie_word_embeddings": false, "hidden_act": "silu", "attention_variant": "{attention}"}}"#,
        text("vocab"),
        text("hidden"),
        text("inter"),
        text("layers"),
        text("heads"),
        case.metadata().get("kv_heads").map_or(text("heads"), String::as_str),
        text("rms_norm_eps"),
        text("rope_theta"),
    );
    let mut model = Model::zeros(Config::from_json_str(&config, attention).expect("a configuration")).expect("a model");
    let layout = model.params.layout().clone();
    for entry in layout.entries() {
        let name = format!("weight:{}", entry.spec.name);
        case.read_into(&name, &entry.spec.shape, model.params.get_mut(&entry.spec.name).expect("listed")).expect("a weight");
    }
    let weights = case.names().filter(|name| name.starts_with("weight:")).count();
    assert_eq!(weights, layout.entries().len(), "{attention}: tensors in the case and in the model");

    let rows: usize = text("batch").parse().expect("a number");
    let integers = |name| case.read_i64(name).expect("integers").1;
    let ids: Vec<u32> = integers("input_ids").iter().map(|&id| id as u32).collect();
    let labels: Vec<i32> = integers("labels").iter().map(|&label| label as i32).collect();
    let scale_free = model.config.heads(0)[0].norm.scale_free();
    let mut check = |what: &str, found: &[f32], expected: &[f32]| {
        let largest = expected.iter().fold(0.0, |max, x| x.abs().max(max)) as f64;
        let error = relative_rms(found, expected);
        let absolute = found.iter().zip(expected).fold(0.0, |max, (a, b)| (a - b).abs().max(max)) as f64;
        // A scale-free norm cancels the gate before it up to its eps: the result is a difference of numbers a thousand times larger.
        let zero = largest < ZERO || scale_free && what.contains("out_gate_proj");
        let good = error <= 1e-4 || zero && absolute <= ZERO;
        if !good {
            problems.push(format!("{attention}, {engine:?}, {what}: relative RMS {error:.2e}, largest difference {absolute:.2e}"));
        }
    };
    let found = common::logits(&model, &ids, None, rows, engine);
    check("logits", &found, &case.read("logits").expect("logits").1);
    let (loss, grads) = common::loss_and_grad(&model, &Batch::new(&ids, &labels), rows, engine);
    for (entry, values) in grads.iter() {
        let name = format!("grad:{}", entry.spec.name);
        check(&name, values, &case.read(&name).expect("a gradient").1);
    }
    let expected = case.read("loss").expect("a loss").1[0] as f64;
    if (loss.mean() - expected).abs() > 1e-5 {
        problems.push(format!("{attention}, {engine:?}: loss {} instead of {expected}", loss.mean()));
    }
}
