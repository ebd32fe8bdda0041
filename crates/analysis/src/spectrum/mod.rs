//! Magnitudes of the terms of the exponential series in a trained model, and the Taylor orders that its heads need.
//!
//! With x the score of a pair of a query t and a key s ≤ t, over the sampled rows of each head:
//!
//! - magnitude of order n: mean over visible pairs of |a_n·x^n/n!|, n = 0..99. It differs from the published metric in two ways: absolute
//!   values are taken at every order, and masked pairs are not counted. It peaks at n ≈ |x|, so large negative scores, which softmax ignores,
//!   inflate it. It is therefore also given separately for x ≥ 0 and x < 0. A layer has the mean over its heads;
//! - entropy: mean over rows of −Σ p ln p, p = M·w/Σ M·w, and the same divided by ln S_t;
//! - share of order p: mean over rows of Σ_s M·w_p / Σ_s M·w, w_p(x) = Σ_{n≤p} a_n·x^n/n!;
//! - error of order p: RMS(y_p − y)/RMS(y) over rows and coordinates. y_p is the head's output with w_p in place of w, and with its own
//!   denominator, gates, decay and norm. Where a shift of a row's scores cancels, the error is also measured for the series around the mean
//!   score of the row, w_p(x − mean).
//!
//! Activations are from the model's float32 forward pass; everything after is float64. Memory is linear in the length. On one instruction
//! set results are bit-identical for any number of threads and ranks.

mod block;
mod figures;
mod head;
mod lanes;
mod meter;
mod powers;
mod request;
mod result;
mod series;
mod sums;
mod windows;

use std::time::Instant;

use termwise_attention::Kernel;
use termwise_model::{Model, ObservedAttention, Precision, SessionOptions};
use termwise_train::collective::{Alone, Collective};

use crate::Error;
use head::HeadStatistics;
pub use meter::Meter;
pub use request::{Request, of_model};
pub use result::*;
pub use series::MAX_CUT;
pub use windows::{RowChoice, sample, windows};

/// Orders whose magnitude is measured.
pub const ORDERS: usize = 100;
/// Tokens per batch of windows.
const TOKENS_AT_ONCE: usize = 4096;

/// Options of [`measure`].
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Even truncation orders, ascending, at most [`MAX_CUT`].
    pub orders: Vec<usize>,
    /// The queries to measure.
    pub rows: RowChoice,
    /// Seed of the sampled queries.
    pub seed: u64,
    /// Tile sizes; results depend on them only by rounding.
    pub tiles: Tiles,
    /// Precision of linear layers and products of attention.
    pub precision: Precision,
}

/// Tile sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Rows per block.
    pub rows: usize,
    /// Keys per tile.
    pub keys: usize,
}

impl Default for Options {
    /// Orders 0, 2, …, 32; 256 rows per window; the analysis then takes about as long as the forward pass at any length.
    fn default() -> Options {
        // Weights of 18 orders, 16 rows and 128 keys take 300 KB and fit into the L2 cache.
        let tiles = Tiles { rows: 16, keys: 128 };
        Options { orders: (0..=32).step_by(2).collect(), rows: RowChoice::Sampled(256), seed: 0, tiles, precision: Precision::F32 }
    }
}

/// Progress of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Completed layers, over all batches.
    pub done: u64,
    /// Number of layers, over all batches.
    pub of: u64,
}

/// The spectrum of a model on windows of tokens, none of them empty. The caller sets the names of model and data.
pub fn measure(model: &Model, windows: &[Vec<u32>], options: &Options, progress: &mut dyn FnMut(Progress)) -> Result<Spectrum, Error> {
    measure_with(model, windows, options, &Alone, progress)
}

/// As [`measure`]; ranks share the batches of windows. Rank 0 has the result, the same for any number of them.
pub fn measure_with(
    model: &Model,
    windows: &[Vec<u32>],
    options: &Options,
    collective: &dyn Collective,
    progress: &mut dyn FnMut(Progress),
) -> Result<Spectrum, Error> {
    check(windows, options)?;
    check_kernels(model)?;
    let config = &model.config;
    let (layers, vocabulary) = (config.num_hidden_layers, config.vocab_size);
    if let Some(id) = windows.iter().flatten().find(|&&id| id as usize >= vocabulary) {
        return Err(Error::Sizes(format!("the text has the token {id}, the model knows {vocabulary}; use the model's own tokenizer")));
    }
    let began = Instant::now();
    let length = windows.iter().map(Vec::len).max().unwrap_or(1);
    let batch = (TOKENS_AT_ONCE / length).clamp(1, windows.len());
    let mut session = model.session(batch, length, SessionOptions::default().precision(options.precision).forward_only(true))?;
    // Angles are looked up once for all heads and rows.
    let plans = config.attention_layers(length)?;
    let mut meter = Meter::new(options.clone())?;
    let mut state = Progress { done: 0, of: (windows.len().div_ceil(batch) * layers) as u64 };
    progress(state);
    let (mut forward, mut failure, mut ids) = (0.0, None, vec![0; batch * length]);
    let (rank, ranks) = (collective.rank(), collective.size());
    let groups = windows.len().div_ceil(batch);
    // Statistics of this rank's batch, in the order in which they are added.
    let mut found: Vec<(usize, usize, HeadStatistics)> = Vec::new();
    for (index, group) in windows.chunks(batch).enumerate() {
        if ranks > 1 && index % ranks != rank {
            meter.begin(&group.iter().map(Vec::len).collect::<Vec<_>>());
            state.done += layers as u64;
            if index % ranks == ranks - 1 || index + 1 == groups {
                exchange(collective, &mut meter, &mut found)?;
            }
            continue;
        }
        ids.fill(0);
        // Rows without a window contain one position of padding and are not measured.
        let mut lengths = vec![1; batch];
        for (row, window) in group.iter().enumerate() {
            ids[row * length..][..window.len()].copy_from_slice(window);
            lengths[row] = window.len();
        }
        meter.begin(&lengths[..group.len()]);
        let lengths = lengths.iter().any(|&own| own < length).then_some(&lengths[..]);
        let (start, mut away) = (Instant::now(), 0.0);
        session.observe(&model.params, &ids, lengths, &mut |ObservedAttention { layer, shape, inputs, .. }| {
            let start = Instant::now();
            if failure.is_none() {
                match meter.look(layer, &plans[layer], &shape, inputs) {
                    Ok(own) if ranks == 1 => own.into_iter().for_each(|(head, own)| meter.add(layer, head, own)),
                    Ok(own) => found.extend(own.into_iter().map(|(head, own)| (layer, head, own))),
                    Err(error) => failure = Some(error),
                }
            }
            state.done += 1;
            progress(state);
            away += start.elapsed().as_secs_f64();
        })?;
        forward += start.elapsed().as_secs_f64() - away;
        if let Some(error) = failure {
            return Err(error);
        }
        if ranks > 1 && (index % ranks == ranks - 1 || index + 1 == groups) {
            exchange(collective, &mut meter, &mut found)?;
        }
    }
    let facts = ModelFacts {
        name: String::new(),
        parameters: config.parameter_count()? as u64,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
    };
    let spectrum = meter.finish(facts, Vec::new());
    Ok(Spectrum { timing: Some(Timing { forward, analysis: began.elapsed().as_secs_f64() - forward }), ..spectrum })
}

/// Adds the statistics of one batch per rank, in the order of batches.
fn exchange(collective: &dyn Collective, meter: &mut Meter, found: &mut Vec<(usize, usize, HeadStatistics)>) -> Result<(), Error> {
    let own: Vec<u64> = found.iter().flat_map(|(layer, head, own)| [vec![*layer as u64, *head as u64], own.to_words()].concat()).collect();
    let mut own_found = std::mem::take(found).into_iter();
    for (rank, words) in collective.gather_words(&own)?.iter().enumerate() {
        if rank == collective.rank() {
            own_found.by_ref().for_each(|(layer, head, own)| meter.add(layer, head, own));
            continue;
        }
        let mut rest = &words[..];
        while let Some((&[layer, head], behind)) = rest.split_first_chunk() {
            rest = behind;
            let found =
                HeadStatistics::of_words(&mut rest).ok_or_else(|| Error::Sizes(format!("the message of rank {rank} is incomplete")))?;
            meter.add(layer as usize, head as usize, found);
        }
    }
    Ok(())
}

/// Rejects a model with heavy hitters or a quantized cache, which has no scores of evicted keys.
pub fn check_scores(model: &Model, what: &str) -> Result<(), Error> {
    let config = &model.config;
    let mut heads = (0..config.num_hidden_layers).flat_map(|layer| config.heads(layer));
    match heads.find(|head| head.inference_only().is_some()) {
        None => Ok(()),
        Some(head) => Err(Error::Sizes(format!(
            "{what} needs the scores of all keys in full precision, and this model has heads with fixed-size KV memory, such as `{head}`; name the \
             original model"
        ))),
    }
}

/// Rejects a model without an `exp` or `taylor` kernel, which has no terms to measure, and a model with fixed-size KV memory.
pub fn check_kernels(model: &Model) -> Result<(), Error> {
    check_scores(model, "a spectrum")?;
    let config = &model.config;
    let mut heads = (0..config.num_hidden_layers).flat_map(|layer| config.heads(layer));
    if heads.any(|head| matches!(head.near.kernel, Kernel::Exp(_) | Kernel::Taylor(_))) {
        return Ok(());
    }
    let attention = config.attention.head(0, 0);
    Err(Error::Sizes(format!(
        "a spectrum needs an `exp` or `taylor` kernel, and no head of this model has one: its attention is `{attention}`; \
         name another model, such as a run that was trained with softmax"
    )))
}

fn check(windows: &[Vec<u32>], options: &Options) -> Result<(), Error> {
    if windows.is_empty() || windows.iter().any(Vec::is_empty) {
        return Err(Error::Sizes("no text: a spectrum needs at least one token".into()));
    }
    check_options(options)
}

fn check_options(options: &Options) -> Result<(), Error> {
    let Options { orders, rows, tiles, .. } = options;
    if !orders.is_sorted_by(|a, b| a < b) || orders.iter().any(|&p| p % 2 == 1 || p > MAX_CUT) {
        return Err(Error::Sizes(format!("truncation orders must be even, ascending and at most {MAX_CUT}, found {orders:?}")));
    }
    if *rows == RowChoice::Sampled(0) || tiles.rows == 0 || tiles.keys == 0 {
        return Err(Error::Sizes("sampled queries, rows per block and keys per tile must be at least 1".into()));
    }
    Ok(())
}
