//! A trained model: its logits and its generated text.

use crate::common;

use common::plain::argmax;
use termwise_attention::relative_rms;
use termwise_model::decode::{Decoder, DecoderOptions};
use termwise_model::{AttentionEngine, Model, SessionOptions};

/// The prompt and its greedy continuation, recomputing the whole sequence for every token.
fn recompute(model: &Model, prompt: &[u32], total: usize, engine: AttentionEngine) -> Vec<u32> {
    let mut session = model.session(1, total, SessionOptions::default().engine(engine)).expect("a session");
    let mut logits = vec![0.0; model.config.vocab_size];
    let mut ids = prompt.to_vec();
    ids.resize(total, 0);
    for length in prompt.len()..total {
        session.run(&model.params, &ids, Some(&[length])).expect("a run");
        session.logits(&model.params, length - 1..length, &mut logits).expect("logits");
        ids[length] = argmax(&logits);
    }
    ids
}

#[test]
fn stories260k_matches_the_reference_completion() {
    let Some(folder) = termwise_base::test_skip::shared("data/stories260K") else { return };
    let model = Model::read(&folder).expect("the model");
    let text = std::fs::read_to_string(folder.join("expected.json")).expect("expected.json");
    let expected: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let numbers = |key: &str| expected[key].as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect::<Vec<_>>();
    let ids: Vec<u32> = numbers("greedy_200_ids").iter().map(|&id| id as u32).collect();
    for engine in [AttentionEngine::Reference, AttentionEngine::Fused] {
        let logits = common::logits(&model, &ids[..1], None, 1, engine);
        let error = relative_rms(&logits, &numbers("logits_after_bos"));
        assert!(error <= 1e-4, "{engine:?}: relative RMS of the logits {error:.2e}");
        assert_eq!(recompute(&model, &ids[..1], ids.len(), engine), ids, "{engine:?}");
    }
    let mut decoder = Decoder::new(model.clone(), DecoderOptions::default()).expect("a decoder");
    for prompt in [1, 2, 100] {
        decoder.clear(0).expect("cleared");
        decoder.prefill(0, &ids[..prompt]).expect("a prompt");
        let mut written = ids[..prompt].to_vec();
        while written.len() < ids.len() {
            written.push(argmax(decoder.logits(0).expect("a row")));
            decoder.step(&[written.last().copied()]).expect("a step");
        }
        assert_eq!(written, ids, "with a cache, {prompt} tokens read");
    }
}

#[test]
fn a_model_round_trips_through_files() {
    let Some(folder) = termwise_base::test_skip::shared("data/stories260K") else { return };
    let model = Model::read(&folder).expect("the model");
    let copy = tempfile::tempdir().expect("a folder");
    model.write(copy.path(), &Default::default()).expect("written");
    let again = Model::read(copy.path()).expect("read");
    assert_eq!(again.config, model.config);
    assert_eq!(again.params.values(), model.params.values());
}
