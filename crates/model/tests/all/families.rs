//! Tiny models of other families with reference values from Transformers: logits, loss, every gradient, generation, and writing.

use crate::common;

use std::path::Path;

use common::plain::argmax;
use half::bf16;
use termwise_attention::relative_rms;
use termwise_model::decode::{Decoder, DecoderOptions};
use termwise_model::weights::{self, Checkpoint, FloatType, NamedTensor, WriteOptions};
use termwise_model::{AttentionEngine, Batch, Config, Model, SessionOptions};

/// Bound of gradients that are zero by construction: rounding errors only.
const ZERO: f64 = 1e-6;

#[test]
fn families_match_the_reference() {
    let Some(folder) = termwise_base::test_skip::shared("families") else { return };
    agree_all(&folder);
}

/// Cases of the same format in any directory, such as those made by `bench/families.py`.
#[test]
fn other_families_match_the_reference() {
    let named = std::env::var_os("TERMWISE_FAMILIES");
    let Some(folder) = termwise_base::test_skip::need("families", "directory of further families, named by TERMWISE_FAMILIES", named)
    else {
        return;
    };
    agree_all(Path::new(&folder));
}

fn agree_all(folder: &Path) {
    let mut cases: Vec<_> = std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path()).collect();
    cases.retain(|path| path.join("config.json").is_file());
    cases.sort();
    assert!(!cases.is_empty(), "no case in {}", folder.display());
    let mut problems = Vec::new();
    cases.iter().for_each(|case| agree(case, &mut problems));
    assert!(problems.is_empty(), "{} problems in {} cases:\n{}", problems.len(), cases.len(), problems.join("\n"));
}

fn agree(folder: &Path, problems: &mut Vec<String>) {
    let name = folder.file_name().expect("a name").to_string_lossy();
    let model = match Model::read(folder) {
        Ok(model) => model,
        Err(error) => return problems.push(error.to_string()),
    };
    let case = Checkpoint::open(folder.join("expected.safetensors")).expect("expected values");
    let (shape, ids) = case.read_i64("ids").expect("ids");
    let [rows, time] = shape[..] else { panic!("{name}: ids of shape {shape:?}") };
    let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
    let last = |at: usize| at % time + 1 == time;
    let labels: Vec<i32> = (0..ids.len()).map(|at| if last(at) { -100 } else { ids[at + 1] as i32 }).collect();
    for engine in [AttentionEngine::Reference, AttentionEngine::Fused] {
        let (mut worst, mut logits) = (0f64, 0f64);
        let mut check = |what: &str, found: &[f32]| {
            let expected = case.read(what).unwrap_or_else(|error| panic!("{error}")).1;
            let (error, largest) = (relative_rms(found, &expected), expected.iter().fold(0.0, |max: f32, x| max.max(x.abs())) as f64);
            let absolute = found.iter().zip(&expected).fold(0.0, |max: f32, (a, b)| max.max((a - b).abs())) as f64;
            if error <= 1e-4 {
                if what == "logits" { logits = error } else { worst = worst.max(error) }
            } else if !(largest < ZERO && absolute < ZERO) {
                problems.push(format!("{name}, {engine:?}, {what}: relative RMS {error:.2e}"));
            }
        };
        check("logits", &common::logits(&model, &ids, None, rows, engine));
        let (loss, grads) = common::loss_and_grad(&model, &Batch::new(&ids, &labels), rows, engine);
        grads.iter().for_each(|(entry, values)| check(&format!("grad:{}", entry.spec.name), values));
        let expected = case.read("loss").expect("a loss").1[0] as f64;
        let difference = (loss.mean() - expected).abs();
        println!("{name}, {engine:?}: logits {logits:.1e}, worst gradient {worst:.1e}, loss {difference:.1e}");
        if difference > 1e-5 || difference.is_nan() {
            problems.push(format!("{name}, {engine:?}: loss {} instead of {expected}", loss.mean()));
        }
        let listed = case.names().filter(|name| name.starts_with("grad:")).count();
        assert_eq!(listed, grads.layout().entries().len(), "{name}: gradients in the case and in the model");
    }
    generates_as_recomputed(&name, &model, &ids[..5], model.config.context().min(40));
    survives_writing(folder, &model);
}

/// Greedy decoding with a cache gives the same tokens as recomputing the whole sequence for each.
fn generates_as_recomputed(name: &str, model: &Model, prompt: &[u32], total: usize) {
    let mut ids = prompt.to_vec();
    ids.resize(total, 0);
    let mut session = model.session(1, total, SessionOptions::default()).expect("a session");
    let mut logits = vec![0.0; model.config.vocab_size];
    for length in prompt.len()..total {
        session.run(&model.params, &ids, Some(&[length])).expect("a run");
        session.logits(&model.params, length - 1..length, &mut logits).expect("logits");
        ids[length] = argmax(&logits);
    }
    let mut decoder = Decoder::new(model.clone(), DecoderOptions::default()).expect("a decoder");
    assert_eq!(common::greedy(&mut decoder, prompt, total), ids, "{name}: generated");
    // bfloat16 gives the result of rounded matrices; norms and biases are unchanged.
    let half = DecoderOptions::default().weights(FloatType::Bf16);
    let mut decoder = Decoder::new(model.clone(), half).expect("a decoder");
    decoder.prefill(0, &ids).expect("a text");
    let mut rounded = model.clone();
    for entry in model.params.layout().entries().iter().filter(|entry| entry.is_matrix()) {
        rounded.params.values_mut()[entry.range()].iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
    session.run(&rounded.params, &ids, None).expect("a run");
    session.logits(&rounded.params, total - 1..total, &mut logits).expect("logits");
    let error = relative_rms(decoder.logits(0).expect("a row"), &logits);
    assert!(error < 1e-4, "{name}, bfloat16: relative RMS {error:.1e}");
}

/// Written files have the same content, under the names of the family.
fn survives_writing(folder: &Path, model: &Model) {
    let copy = tempfile::tempdir().expect("a folder");
    model.write(copy.path(), &Default::default()).expect("written");
    let again = Model::read(copy.path()).expect("read");
    assert_eq!((&again.config, again.params.values()), (&model.config, model.params.values()));
    let [file, written] = [folder, copy.path()].map(|folder| Checkpoint::open(folder).expect("weights"));
    assert!(file.names().eq(written.names()), "{}: different tensors", folder.display());
    for name in file.names() {
        assert_eq!(file.bytes(name).expect("bytes"), written.bytes(name).expect("bytes"), "{}: {name}", folder.display());
    }
    let json = |folder: &Path| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).expect("a file")).expect("JSON")
    };
    let (before, after) = (json(folder), json(copy.path()));
    assert_eq!(before["model_type"], after["model_type"]);
    let lost = |key: &&String| after.get(key.as_str()).is_none() && !["dtype", "rope_parameters"].contains(&key.as_str());
    assert_eq!(before.as_object().expect("keys").keys().find(lost), None, "a key that was not written back");
}

/// Published Pythia checkpoints name the output projection `embed_out`, contain buffers, and have older keys for the rotary embedding.
#[test]
fn published_pythia_checkpoints_are_read() {
    let text = r#"{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 16,
        "initializer_range": 0.02, "intermediate_size": 24, "layer_norm_eps": 1e-05, "max_position_embeddings": 64, "model_type": "gpt_neox",
        "num_attention_heads": 2, "num_hidden_layers": 2, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false,
        "torch_dtype": "float16", "use_cache": true, "use_parallel_residual": true, "vocab_size": 29}"#;
    let model = Model::fresh(Config::from_json_str(text, "published").expect("a configuration"), 1).expect("a model");
    assert_eq!((model.config.head_dim, model.config.rotary_dim(), model.config.rope_theta), (8, 2, 1e4));
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), text).expect("written");
    let buffers = ["rotary_emb.inv_freq", "bias", "masked_bias"].map(|name| format!("gpt_neox.layers.1.attention.{name}"));
    let parameters = model.params.iter().map(|(entry, data)| {
        let name = entry.spec.name.as_str();
        NamedTensor { name: if name == "lm_head.weight" { "embed_out.weight" } else { name }, shape: &entry.spec.shape, data }
    });
    let buffers = buffers.iter().map(|name| NamedTensor { name, shape: &[1], data: &[0.5] });
    weights::write(folder.path(), parameters.chain(buffers), &WriteOptions::default()).expect("written");
    let read = Model::read(folder.path()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((&read.config, read.params.values()), (&model.config, model.params.values()));
}
