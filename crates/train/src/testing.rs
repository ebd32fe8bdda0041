//! Shared test utilities.

use termwise_model::{Config, Model, Params};

/// A model with parameters of every kind, larger than one unit of parallel work.
pub fn model() -> Model {
    let text = r#"{"model_type": "llama", "vocab_size": 300, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 2,
        "num_attention_heads": 3, "head_dim": 10, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "attention_variant": "gated_softmax"}"#;
    Model::fresh(Config::from_json_str(text, "test").expect("a configuration"), 1).expect("a model")
}

/// Values between −1 and 1 for every parameter, zero in the padding.
pub fn filled(params: &Params, seed: u64) -> Params {
    let mut filled = params.zeros_like().expect("memory");
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let layout = params.layout().clone();
    for entry in layout.entries() {
        for value in &mut filled.values_mut()[entry.range()] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *value = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        }
    }
    filled
}

/// Runs in a separate thread pool.
pub fn with_threads<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads").install(run)
}
