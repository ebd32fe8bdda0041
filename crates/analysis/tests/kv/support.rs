//! A small model, text, and memories for it.

use std::sync::atomic::AtomicBool;

use termwise_analysis::kv::assemble::assemble;
use termwise_analysis::kv::convert::{Prepared, bytes_of, overhead};
use termwise_analysis::kv::frontier::{ALL, Method};
use termwise_analysis::kv::kinds::{Family, Kind};
use termwise_analysis::kv::{Text, Texts};
use termwise_base::rng::Rng;
use termwise_model::{Config, Model};

pub const LENGTH: usize = 160;

/// A model whose heads look at some keys more than at others.
pub fn model() -> Model {
    let text = r#"{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.25}"#;
    Model::fresh(Config::from_json_str(text, "test").expect("a configuration"), 5).expect("a model")
}

pub fn contexts(count: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| (0..LENGTH).map(|_| rng.below(61) as u32).collect()).collect()
}

/// Two calibration contexts of one text, and these texts for evaluation.
pub fn texts(evaluation: Vec<Text>) -> Texts {
    Texts { calibration: contexts(2, 1), calibration_texts: 1, evaluation }
}

pub fn prepared(model: &Model, folder: Option<&std::path::Path>) -> Prepared {
    let never = AtomicBool::new(false);
    Prepared::new(model, &texts(Vec::new()), &every(), folder, &never, &mut |_, _, _| {}).expect("it can be prepared")
}

pub fn every() -> Vec<Family> {
    Method::families(&Method::named(&[]).expect("all methods"))
}

pub fn families() -> Vec<Family> {
    let mut all = ALL.to_vec();
    all.push(Family { heavy_hitters: true, fade: true, ..Family::WINDOW });
    all
}

pub fn converted(model: &Model, kind: Kind) -> Model {
    assemble(model, &[Some(kind); 4]).unwrap_or_else(|error| panic!("{kind:?}: {error}"))
}

/// Bytes of the model with this kind in all KV heads.
pub fn promised(model: &Model, kind: Kind) -> u64 {
    bytes_of(&[kind; 4], 16, overhead(&model.config).expect("states"))
}
