//! Agreement of reference formula, full-sequence forward, prefill in chunks and token-by-token decoding.

use std::sync::Arc;

use crate::plan::count::{Attention, Sizes};
use termwise_model::decode::{Decoder, DecoderOptions};
use termwise_model::{AttentionEngine, Model, SessionOptions};

use super::{Between, Check};
use crate::kv::Error;
use crate::kv::convert::overhead;

/// Tolerance of logits relative to the largest.
const ROUNDING_TOLERANCE: f64 = 2e-3;
/// Tolerance with a quantized cache, in which rounding can change a stored value to its neighbor, or the effect of quantization if that is larger.
const QUANTIZED_TOLERANCE: f64 = 2e-2;
/// Share of positions within the tolerance.
const POSITION_SHARE: f64 = 0.9;
/// Positions evaluated by the reference formula.
const REFERENCE_POSITIONS: usize = 192;
/// Positions of the other comparisons: their logits are in memory.
const MAX_POSITIONS: usize = 1024;
/// Lengths of prefill chunks.
const CHUNK_LENGTHS: [usize; 3] = [16, 64, 144];

const RULE: &str = "logits differ by less than 2e-3 of the largest; with quantized keys, at nine of ten positions by less than 2e-2 or by less than the effect of quantization";

/// Maximum difference of two rows of logits relative to the largest of the first.
fn difference(expected: &[f32], found: &[f32]) -> f64 {
    let size = expected.iter().fold(0.0f32, |size, x| size.max(x.abs()));
    let worst = expected.iter().zip(found).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs()));
    // NaN counts as disagreement.
    if found.iter().all(|x| x.is_finite()) { f64::from(worst) / f64::from(size.max(f32::MIN_POSITIVE)) } else { f64::INFINITY }
}

fn logits(model: &Model, ids: &[u32], engine: AttentionEngine) -> Result<Vec<f32>, Error> {
    let mut session = model.session(1, ids.len(), SessionOptions::default().engine(engine).forward_only(true))?;
    session.run(&model.params, ids, None)?;
    let mut logits = vec![0.0; ids.len() * model.config.vocab_size];
    session.logits(&model.params, 0..ids.len(), &mut logits)?;
    Ok(logits)
}

/// Logits of the full-sequence forward, up to the compared length.
pub fn full_sequence_logits(model: &Model, ids: &[u32]) -> Result<Vec<f32>, Error> {
    logits(model, &ids[..MAX_POSITIONS.min(ids.len())], AttentionEngine::Fused)
}

/// Difference per row.
fn differences(expected: &[f32], found: &[f32], v: usize) -> Vec<f64> {
    expected.chunks_exact(v).zip(found.chunks_exact(v)).map(|(a, b)| difference(a, b)).collect()
}

/// The 90 % quantile.
fn position_quantile(mut differences: Vec<f64>) -> f64 {
    differences.sort_by(f64::total_cmp);
    let at = ((differences.len() as f64 * POSITION_SHARE) as usize).min(differences.len().saturating_sub(1));
    differences.get(at).copied().unwrap_or(0.0)
}

/// Tolerance of rounding.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// At every position.
    Everywhere,
    /// With a quantized cache: at nine of ten positions.
    Mostly(f64),
}

impl Limit {
    /// `unquantized` is the model without quantization; `None` if the model has no quantized cache.
    pub fn new(unquantized: Option<&Model>, ids: &[u32], expected: &[f32]) -> Result<Limit, Error> {
        let Some(unquantized) = unquantized else { return Ok(Limit::Everywhere) };
        let change = position_quantile(differences(expected, &full_sequence_logits(unquantized, ids)?, unquantized.config.vocab_size));
        // NaN is excluded.
        Ok(Limit::Mostly(if change.is_finite() { QUANTIZED_TOLERANCE.max(change) } else { QUANTIZED_TOLERANCE }))
    }

    /// The relevant difference, and whether it is within the tolerance.
    fn judge(self, differences: Vec<f64>) -> (f64, bool) {
        match self {
            Limit::Everywhere => {
                let worst = differences.into_iter().fold(0.0, f64::max);
                (worst, worst < ROUNDING_TOLERANCE)
            }
            Limit::Mostly(limit) => {
                let counts = position_quantile(differences);
                (counts, counts < limit)
            }
        }
    }
}

/// The fused engine against the reference formula, which evaluates `reference`: the same model, except in tests.
pub fn formula(reference: &Model, model: &Model, ids: &[u32], limit: Limit) -> Result<Check, Error> {
    let ids = &ids[..REFERENCE_POSITIONS.min(ids.len())];
    let plain = logits(reference, ids, AttentionEngine::Reference)?;
    let fused = logits(model, ids, AttentionEngine::Fused)?;
    let (worst, same) = limit.judge(differences(&plain, &fused, model.config.vocab_size));
    let found = format!("logits of {} positions differ by at most {worst:.1e} of the largest", ids.len());
    Ok(Check::new("full-sequence evaluation matches the reference formula", RULE, found, Some(same)))
}

/// Differences of chunked prefill and of decoding, bytes of the state, their growth, and whether the context is unlimited.
struct Stepped {
    prompts: [Vec<f64>; CHUNK_LENGTHS.len()],
    tokens: Vec<f64>,
    bytes: usize,
    grown: usize,
    endless: bool,
}

fn step(model: &Arc<Model>, ids: &[u32], expected: &[f32], between: Between) -> Result<Stepped, Error> {
    let v = model.config.vocab_size;
    let row = |t: usize| &expected[t * v..(t + 1) * v];
    let prompt = ids.len() / 2;
    let mut found = Stepped { prompts: Default::default(), tokens: Vec::new(), bytes: 0, grown: 0, endless: false };
    let mut decoder = Decoder::new(model.clone(), DecoderOptions::default().prefill_chunk(64))?;
    for (differences, length) in found.prompts.iter_mut().zip(CHUNK_LENGTHS) {
        decoder.clear(0)?;
        let mut end = 0;
        for part in ids[..prompt].chunks(length) {
            between(end, &mut decoder)?;
            decoder.prefill(0, part)?;
            end += part.len();
            differences.push(difference(row(end - 1), decoder.logits(0)?));
        }
    }
    for (t, &token) in ids.iter().enumerate().skip(prompt) {
        between(t, &mut decoder)?;
        decoder.step(&[Some(token)])?;
        found.tokens.push(difference(row(t), decoder.logits(0)?));
        let now = decoder.state_bytes(0)?;
        if t == prompt + (ids.len() - prompt) / 2 {
            found.bytes = now;
        }
        found.grown = now.saturating_sub(found.bytes);
    }
    found.endless = decoder.remaining_context(0)?.is_none();
    Ok(found)
}

/// Bytes of the memory of all layers with full windows.
fn full_bytes(model: &Model) -> Result<u64, Error> {
    let config = &model.config;
    let sizes = Sizes { kv_heads: config.num_key_value_heads, d: config.head_dim };
    let memories: u64 = (0..config.num_hidden_layers).map(|layer| Attention::of_layer(&config.heads(layer), sizes).kept_bytes(0)).sum();
    Ok(memories + overhead(config)?)
}

/// Chunked prefill and token-by-token decoding against the full-sequence forward; also the bytes of the state, if decoding is possible.
pub fn tokens(
    model: &Arc<Model>,
    ids: &[u32],
    expected: &[f32],
    limit: Limit,
    between: Between,
) -> Result<(Vec<Check>, Option<usize>), Error> {
    let ids = &ids[..MAX_POSITIONS.min(ids.len())];
    let name = "token by token";
    let found = match step(model, ids, expected, between) {
        Ok(found) => found,
        Err(Error::Model(error)) => return Ok((vec![Check::new(name, RULE, format!("the engine failed: {error}"), Some(false))], None)),
        Err(error) => return Err(error),
    };
    let agreement = |name: &str, differences: &[Vec<f64>]| {
        let judged: Vec<(f64, bool)> = differences.iter().map(|differences| limit.judge(differences.clone())).collect();
        let words: Vec<String> = judged.iter().map(|(worst, _)| format!("{worst:.1e}")).collect();
        let found = format!("logits differ from full-sequence evaluation by at most {} of the largest", words.join(", "));
        Check::new(name, RULE, found, Some(judged.iter().all(|(_, same)| *same)))
    };
    let Stepped { prompts, tokens, bytes, grown, endless } = found;
    // Windows longer than the text are still filling.
    let full = full_bytes(model)?;
    let constant = endless && (grown == 0 || (bytes + grown) as u64 <= full);
    let text = match (constant, grown) {
        (true, 0) => format!("{bytes} bytes, constant"),
        (true, _) => format!("{} bytes, and at most {full} once all windows are full", bytes + grown),
        _ => format!("{bytes} bytes, and {grown} more in the last quarter of the text"),
    };
    let rule = "no growth after three quarters of the text, or at most the bytes of full windows; and no limit of the context";
    let checks = vec![
        agreement(&format!("prefill in chunks of {CHUNK_LENGTHS:?}"), &prompts),
        agreement(name, &[tokens]),
        Check::new("memory is constant", rule, text, Some(constant)),
    ];
    Ok((checks, Some(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::assemble::assemble;
    use crate::kv::kinds::Kind;
    use termwise_model::Config;

    #[test]
    fn an_engine_with_another_window_is_found() {
        let text = r#"{"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.25}"#;
        let model = Model::fresh(Config::from_json_str(text, "test").expect("a configuration"), 3).expect("a model");
        let of = |window| assemble(&model, &[Some(Kind::window(window))]).expect("a model");
        let ids: Vec<u32> = (0..64).map(|t| t * t % 31).collect();
        let check = |reference: usize| formula(&of(reference), &of(12), &ids, Limit::Everywhere).expect("a check");
        assert_eq!(check(12).passed, Some(true));
        assert_eq!(check(11).passed, Some(false), "{}", check(11).found);
    }
}
