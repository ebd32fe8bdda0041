//! A training step: loss, gradient and AdamW.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use termwise_attention::Variant;
use termwise_model::config::Config;
use termwise_model::params::ParamRole;
use termwise_model::{Batch, Model, Objective, Precision, SessionOptions};
use termwise_model::{Stage, StageTiming};
use termwise_train::{AdamW, AdamWConfig, clip, gradient_norm};

use super::attention::{WITH_BACKWARD, attention_flops};
use super::{Job, Machine, Speed, measure, timed};
use termwise_base::rng::Rng;
use termwise_base::threads;

use crate::Error;
use crate::plain_config::plain_config;

/// Options.
#[derive(Clone, Debug)]
pub struct StepOptions {
    /// Vocabulary size, V.
    pub vocab: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key-value heads G; default: same as heads.
    pub kv_heads: Option<usize>,
    /// Layers.
    pub layers: usize,
    /// Intermediate size of the MLP.
    pub mlp: usize,
    /// Batch rows, B.
    pub batch: usize,
    /// Positions per row, T.
    pub length: usize,
    /// Variant of every head.
    pub attention: Variant,
    /// Precision of the products of linear layers.
    pub precision: Precision,
    /// Threads.
    pub threads: usize,
    /// Measured steps; the best counts.
    pub repeat: usize,
}

/// Result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepBench {
    /// The program.
    pub engine: String,
    /// Peak performance of the machine.
    pub machine: Machine,
    /// Formula of the operation count.
    pub flop_count: String,
    /// Variant string of every head.
    pub attention: String,
    /// Precision of the products of linear layers.
    #[serde(default)]
    pub precision: String,
    /// Vocabulary size, V.
    pub vocab: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Query heads, H.
    pub heads: usize,
    /// KV heads, G.
    pub kv_heads: usize,
    /// Layers.
    pub layers: usize,
    /// Intermediate size of the MLP.
    pub mlp: usize,
    /// Batch rows, B.
    pub batch: usize,
    /// Positions per row, T.
    pub length: usize,
    /// Number of parameters.
    pub parameters: usize,
    /// Parameters in matrices that multiply every token.
    pub matrix_parameters: usize,
    /// A whole step, the best.
    #[serde(flatten)]
    pub speed: Speed,
    /// A whole step, the median.
    pub median_ms: f64,
    /// The loss before the first step and after the last.
    pub losses: [f64; 2],
    /// Mean time per stage.
    pub times: StepTimes,
}

/// Mean milliseconds per stage of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepTimes {
    /// Stages of the model.
    pub stages: Vec<StageTime>,
    /// Zeroing of gradients.
    pub zero_ms: f64,
    /// Gradient norm, for clipping.
    pub norm_ms: f64,
    /// AdamW.
    pub optimizer_ms: f64,
}

/// One stage of the model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StageTime {
    /// Its name.
    pub stage: String,
    /// Forward.
    pub forward_ms: f64,
    /// Backward.
    pub backward_ms: f64,
}

/// Measures training steps of a fresh model on random tokens.
pub fn step(options: &StepOptions) -> Result<StepBench, Error> {
    let config = config(options)?;
    let pool = threads::pool(options.threads)?;
    pool.install(|| steps(options, config))
}

fn config(options: &StepOptions) -> Result<Config, Error> {
    let StepOptions { vocab, hidden, heads, kv_heads, layers, mlp, length, ref attention, .. } = *options;
    if heads == 0 || !hidden.is_multiple_of(heads) {
        return Err(Error::Sizes(format!("a width of {hidden} cannot be shared by {heads} heads: make it a multiple")));
    }
    let config = Config {
        intermediate_size: mlp,
        num_hidden_layers: layers,
        num_key_value_heads: kv_heads.unwrap_or(heads),
        ..plain_config(vocab, hidden, heads, length, attention.clone())
    };
    config.validate().map_err(|error| Error::Sizes(error.to_string()))?;
    Ok(config)
}

fn steps(options: &StepOptions, config: Config) -> Result<StepBench, Error> {
    let StepOptions { vocab, hidden, heads, layers, mlp, batch, length, .. } = *options;
    let tokens = batch * length;
    let kv_heads = config.num_key_value_heads;
    let head_dim = config.head_dim;
    let mut model = Model::fresh(config, 1)?;
    let mut session = model.session(batch, length, SessionOptions::default().precision(options.precision))?;
    let machine = Machine::measure();
    let mut grads = model.params.zeros_like()?;
    let mut optimizer = AdamW::new(&model.params, AdamWConfig::default())?;
    let mut rng = Rng::new(1);
    let ids: Vec<u32> = (0..tokens).map(|_| rng.below(vocab) as u32).collect();
    let labels: Vec<i32> = (0..tokens).map(|_| rng.below(vocab) as i32).collect();

    let mut losses: Vec<f64> = Vec::new();
    let job: Job<4> = Box::new(|| {
        // The first round is not counted.
        if losses.len() == 1 {
            session.timing.reset();
        }
        let ((), zero) = timed(|| grads.set_zero());
        let (loss, pass) = timed(|| session.loss_and_grad(&model.params, &Batch::new(&ids, &labels), &mut grads));
        losses.push(loss?.mean());
        let (scale, norm) = timed(|| clip(gradient_norm(&grads), 1.0));
        let (_, update) = timed(|| optimizer.step(&mut model.params, &grads, 1e-3, scale));
        Ok([zero, norm, update, zero + pass + norm + update])
    });
    let rounds = measure(options.repeat, &mut [job])?.remove(0);
    let mut times: Vec<Duration> = rounds.iter().map(|round| round[3]).collect();
    times.sort();
    let each = |total: Duration| total.as_secs_f64() * 1e3 / rounds.len() as f64;
    let average = |stage: usize| each(rounds.iter().map(|round| round[stage]).sum());

    let entries = model.params.layout().entries();
    let matrices = entries.iter().filter(|entry| entry.is_matrix() && entry.spec.role != ParamRole::Embedding);
    let matrix_parameters: usize = matrices.map(|entry| entry.spec.len()).sum();
    let attention = layers as f64 * attention_flops(batch, heads, length, head_dim);
    let flops = 6.0 * (tokens * matrix_parameters) as f64 + WITH_BACKWARD * attention;
    Ok(StepBench {
        engine: "termwise".into(),
        flop_count: "6·B·T·N, N = numbers in matrices without the embedding, + 3.5·layers·4·B·H·d·T(T+1)/2 for attention".into(),
        attention: options.attention.to_string(),
        precision: options.precision.to_string(),
        vocab,
        hidden,
        heads,
        kv_heads,
        layers,
        mlp,
        batch,
        length,
        parameters: entries.iter().map(|entry| entry.spec.len()).sum(),
        matrix_parameters,
        speed: Speed::new(times[0], flops, Some(tokens), &machine),
        median_ms: times[times.len() / 2].as_secs_f64() * 1e3,
        losses: [losses[0], losses[losses.len() - 1]],
        times: StepTimes { stages: stages(&session.timing, each), zero_ms: average(0), norm_ms: average(1), optimizer_ms: average(2) },
        machine,
    })
}

fn stages(timing: &StageTiming, each: impl Fn(Duration) -> f64) -> Vec<StageTime> {
    let time = |stage: Stage| {
        let (forward, backward) = timing.spent(stage);
        StageTime { stage: stage.name().to_owned(), forward_ms: each(forward), backward_ms: each(backward) }
    };
    Stage::ALL.into_iter().map(time).collect()
}
