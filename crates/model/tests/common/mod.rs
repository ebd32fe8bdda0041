//! Shared utilities for tests of whole models.

#![allow(dead_code, reason = "each test program uses some of it")]

pub mod plain;

use termwise_model::decode::Decoder;
use termwise_model::{AttentionEngine, Batch, Config, Loss, Model, Objective, Params, SessionOptions};

/// Tolerance of float32 logits relative to float64: relative RMS error.
pub const TOLERANCE: f64 = 2e-5;

/// A small model with this attention: 2 layers, width 24, 4 heads over `kv_heads`, vocabulary 29.
pub fn tiny(attention: &str, kv_heads: usize, tied: bool) -> Model {
    let text = format!(
        r#"{{"model_type": "llama", "vocab_size": 29, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": {kv_heads}, "head_dim": 6, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 64, "tie_word_embeddings": {tied}, "hidden_act": "silu", "initializer_range": 0.2,
            "attention_variant": "{attention}"}}"#
    );
    let config = Config::from_json_str(&text, "tiny").expect("a valid configuration");
    let mut model = Model::fresh(config, 1).expect("a fresh model");
    // Away from the initial values of norms and gates, where errors could cancel.
    let wobble = |i: usize| 0.1 * ((i * 37 % 101) as f32 / 50.0 - 1.0);
    let entries = model.params.layout().clone();
    for entry in entries.entries().iter().filter(|entry| !entry.is_matrix()) {
        model.params.values_mut()[entry.range()].iter_mut().enumerate().for_each(|(i, x)| *x += wobble(i));
    }
    model
}

/// Tokens with some repetitions.
pub fn tokens(n: usize, vocabulary: u32, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * i * 7 + i * 13 * seed + seed * 5 + 3) % vocabulary).collect()
}

/// Loss and gradient of a batch of B rows.
pub fn loss_and_grad(model: &Model, batch: &Batch, rows: usize, engine: AttentionEngine) -> (Loss, Params) {
    let mut session = model.session(rows, batch.ids.len() / rows, SessionOptions::default().engine(engine)).expect("a session");
    let mut grads = model.params.zeros_like().expect("memory");
    let loss = session.loss_and_grad(&model.params, batch, &mut grads).expect("a loss");
    (loss, grads)
}

/// All logits of a batch of B rows.
pub fn logits(model: &Model, ids: &[u32], lengths: Option<&[usize]>, rows: usize, engine: AttentionEngine) -> Vec<f32> {
    let options = SessionOptions::default().engine(engine).forward_only(true);
    let mut session = model.session(rows, ids.len() / rows, options).expect("a session");
    session.run(&model.params, ids, lengths).expect("a run");
    let mut logits = vec![f32::NAN; ids.len() * model.config.vocab_size];
    session.logits(&model.params, 0..ids.len(), &mut logits).expect("logits");
    logits
}

/// The prompt and its greedy continuation.
pub fn greedy(decoder: &mut Decoder, prompt: &[u32], total: usize) -> Vec<u32> {
    decoder.prefill(0, prompt).expect("a prompt");
    let mut ids = prompt.to_vec();
    while ids.len() < total {
        ids.push(plain::argmax(decoder.logits(0).expect("a row")));
        if ids.len() < total {
            decoder.step(&[Some(ids[ids.len() - 1])]).expect("a step");
        }
    }
    ids
}
