//! Tiny models of other families, made and computed elsewhere: logits, loss, every gradient, generation, and their files written back.

use crate::common;

use std::path::Path;

use common::plain::argmax;
use half::bf16;
use termwise_attention::relative_rms;
use termwise_llama::generate::{Decoder, DecoderOptions};
use termwise_llama::weights::{Checkpoint, FloatType};
use termwise_llama::{Batch, Engine, Model, Options};

/// What may be left of gradients that are zero by construction: rounding is all there is.
const ZERO: f64 = 1e-6;

#[test]
fn families_agree_with_their_reference() {
    let Some(folder) = termwise_unrun::shared("families") else { return };
    agree_all(&folder);
}

/// Cases of the same form in any folder, such as those that `bench/families.py` makes.
#[test]
fn other_families_agree_with_their_reference() {
    let named = std::env::var_os("TERMWISE_FAMILIES");
    let Some(folder) = termwise_unrun::need("families", "folder of more families, which TERMWISE_FAMILIES would name", named) else {
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
    for engine in [Engine::Reference, Engine::Fused] {
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

/// The most probable tokens with a cache are those of running the whole text again for each.
fn generates_as_recomputed(name: &str, model: &Model, prompt: &[u32], total: usize) {
    let mut ids = prompt.to_vec();
    ids.resize(total, 0);
    let mut session = model.session(1, total, Options::default()).expect("a session");
    let mut logits = vec![0.0; model.config.vocab_size];
    for length in prompt.len()..total {
        session.run(&model.params, &ids, Some(&[length])).expect("a run");
        session.logits(&model.params, length - 1..length, &mut logits).expect("logits");
        ids[length] = argmax(&logits);
    }
    let mut decoder = Decoder::new(model.clone(), DecoderOptions::default()).expect("a decoder");
    assert_eq!(common::greedy(&mut decoder, prompt, total), ids, "{name}: generated");
    // bfloat16 is that of the rounded matrices: norms and biases stay as they are.
    let half = DecoderOptions { weights: FloatType::Bf16, ..DecoderOptions::default() };
    let mut decoder = Decoder::new(model.clone(), half).expect("a decoder");
    decoder.read(0, &ids).expect("a text");
    let mut rounded = model.clone();
    for entry in model.params.layout().entries().iter().filter(|entry| entry.is_matrix()) {
        rounded.params.values_mut()[entry.range()].iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
    session.run(&rounded.params, &ids, None).expect("a run");
    session.logits(&rounded.params, total - 1..total, &mut logits).expect("logits");
    let error = relative_rms(decoder.logits(0).expect("a row"), &logits);
    assert!(error < 1e-4, "{name}, bfloat16: relative RMS {error:.1e}");
}

/// Written back, both files say the same, under the family's own names.
fn survives_writing(folder: &Path, model: &Model) {
    let copy = tempfile::tempdir().expect("a folder");
    model.write(copy.path(), &Default::default()).expect("written");
    let again = Model::read(copy.path()).expect("read");
    assert_eq!((&again.config, again.params.values()), (&model.config, model.params.values()));
    let [file, written] = [folder, copy.path()].map(|folder| Checkpoint::open(folder).expect("weights"));
    assert!(file.names().eq(written.names()), "{}: other tensors", folder.display());
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
