//! A real trained model: its logits and what it writes.

mod common;

use termwise_attention::relative_rms;
use termwise_llama::{Engine, Model, Options, decode};

#[test]
fn stories260k_says_what_it_said_elsewhere() {
    let Some(folder) = common::shared("data/stories260K") else { return };
    let model = Model::read(&folder).expect("the model");
    let text = std::fs::read_to_string(folder.join("expected.json")).expect("expected.json");
    let expected: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let numbers = |key: &str| expected[key].as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect::<Vec<_>>();
    let ids: Vec<u32> = numbers("greedy_200_ids").iter().map(|&id| id as u32).collect();
    for engine in [Engine::Reference, Engine::Fused] {
        let logits = common::logits(&model, &ids[..1], None, 1, engine);
        let error = relative_rms(&logits, &numbers("logits_after_bos"));
        assert!(error <= 1e-4, "{engine:?}: relative RMS of the logits {error:.2e}");
        let written = decode::greedy(&model, &ids[..1], ids.len(), Options { engine }).expect("200 tokens");
        assert_eq!(written, ids, "{engine:?}");
    }
}

#[test]
fn a_model_written_and_read_again_is_the_same() {
    let Some(folder) = common::shared("data/stories260K") else { return };
    let model = Model::read(&folder).expect("the model");
    let copy = tempfile::tempdir().expect("a folder");
    model.write(copy.path(), &Default::default()).expect("written");
    let again = Model::read(copy.path()).expect("read");
    assert_eq!(again.config, model.config);
    assert_eq!(again.params.values(), model.params.values());
}
