//! Generates tokens with a KV cache and with a recurrent state of constant size.
//!
//! ```text
//! cargo run --release -p termwise-model --example generate [FOLDER]
//! ```
//!
//! FOLDER contains a model in Hugging Face format. Without it, a tiny model with random weights is used.

use std::sync::Arc;

use termwise_model::decode::{Decoder, DecoderOptions, MemoryPolicy, Sampler, SamplingOptions};
use termwise_model::{Config, Model, Result};

fn main() -> Result<()> {
    let model = match std::env::args().nth(1) {
        Some(folder) => Model::read(folder)?,
        None => {
            let text = r#"{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "initializer_range": 0.3, "tie_word_embeddings": true}"#;
            Model::fresh(Config::from_json_str(text, "tiny")?, 1)?
        }
    };
    // Shared by both decoders; one in bfloat16 (`DecoderOptions::weights`) would copy the weights.
    let model = Arc::new(model);
    let prompt: Vec<u32> = (1..9).map(|token| token % model.config.vocab_size as u32).collect();
    for (what, memory) in [("keys and values", MemoryPolicy::Auto), ("a state of order 2", MemoryPolicy::Truncate(2))] {
        let mut decoder = Decoder::new(model.clone(), DecoderOptions::default().memory(memory))?;
        let mut sampler = Sampler::new(SamplingOptions::default(), model.config.vocab_size)?;
        decoder.prefill(0, &prompt)?;
        let mut written = Vec::new();
        for _ in 0..24 {
            let token = sampler.sample(decoder.logits(0)?);
            written.push(token);
            decoder.step(&[Some(token)])?;
        }
        println!("{what}, {} bytes after {} tokens: {written:?}", decoder.state_bytes(0)?, decoder.position(0)?);
    }
    Ok(())
}
