//! Spectra against closed forms, against plain loops in float64, and against themselves with other tiles, threads and rows.

mod closed;
mod naive;
mod same;
mod shared;

use termwise_analysis::spectrum::{Options, RowChoice, Spectrum, measure};
use termwise_model::{Config, Model};

/// 2 layers, 4 heads over `kv_heads` of dimension 6, weights large enough for scores of some size.
fn model(attention: &str, kv_heads: usize, deviation: f64) -> Model {
    let text = format!(
        r#"{{"vocab_size": 29, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": {kv_heads}, "head_dim": 6, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
            "tie_word_embeddings": true, "initializer_range": {deviation}, "attention_variant": {attention}}}"#
    );
    let mut model = Model::fresh(Config::from_json_str(&text, "test").expect("a configuration"), 1).expect("a model");
    // Away from the values at which norms and gates start, where errors could cancel.
    let layout = model.params.layout().clone();
    for entry in layout.entries().iter().filter(|entry| !entry.is_matrix()) {
        let values = &mut model.params.values_mut()[entry.range()];
        values.iter_mut().enumerate().for_each(|(i, x)| *x += 0.1 * ((i * 37 % 101) as f32 / 50.0 - 1.0));
    }
    model
}

/// Windows of these lengths.
fn texts(lengths: &[usize]) -> Vec<Vec<u32>> {
    let token = |i: usize, seed: usize| ((i * i * 7 + i * 13 * (seed + 1) + seed * 5 + 3) % 29) as u32;
    lengths.iter().enumerate().map(|(seed, &length)| (0..length).map(|i| token(i, seed)).collect()).collect()
}

fn all_rows() -> Options {
    Options { rows: RowChoice::All, ..Options::default() }
}

fn spectrum(model: &Model, windows: &[Vec<u32>], options: &Options) -> Spectrum {
    let mut found = measure(model, windows, options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    found.timing = None;
    found
}

fn quoted(attention: &str) -> String {
    format!("\"{attention}\"")
}
