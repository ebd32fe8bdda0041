//! Time and memory of training.

use serde::{Deserialize, Serialize};

use super::{Column, Hardware, Model, Place};

/// Training on a number of tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Training {
    /// Number of tokens.
    pub tokens: u64,
    /// Tokens per step: all positions of all rows.
    pub tokens_a_step: u64,
    /// Bytes of weights, gradients and AdamW's two moments, float32.
    pub parameter_bytes: u64,
    /// Per machine and column.
    pub times: Vec<TrainingTime>,
    #[serde(skip)]
    pub(super) hardware: Vec<Hardware>,
    #[serde(skip)]
    pub(super) assumptions: Vec<String>,
}

/// One attention on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingTime {
    /// The machine's name.
    pub hardware: String,
    /// The column's label.
    pub column: String,
    /// `parallel` or `chunk`, whichever is faster.
    pub mode: String,
    /// Operations per token.
    pub flops_a_token: f64,
    /// Tokens per second.
    pub tokens_a_second: f64,
    /// Seconds for all tokens.
    pub seconds: f64,
    /// Bytes of parameters and of a step's activations.
    pub memory: u64,
    /// Whether that exceeds the machine's memory.
    pub too_large: bool,
}

/// Ratio of forward plus backward to forward operations of matrices: one product forward, two backward.
const MATRICES: f64 = 3.0;
/// The same for attention: two products per pair forward, five backward, since scores or states are recomputed.
const ATTENTION: f64 = 3.5;
/// Weights, gradient, and two moments.
const PARAMETER_COPIES: u64 = 4;
/// AdamW reads these four and writes three of them.
const OPTIMIZER_PASSES: f64 = 7.0;
/// Default number of tokens per parameter.
const TOKENS_PER_PARAMETER: u64 = 20;

/// Bytes moved by an update.
pub(super) fn optimizer_bytes(model: &Model) -> f64 {
    OPTIMIZER_PASSES * 4.0 * model.parameters as f64
}

pub(super) fn plan(place: &Place, columns: &[Column], hardware: &[Hardware], tokens: Option<u64>) -> Training {
    let model = place.model;
    let requested = tokens;
    let tokens = requested.unwrap_or(model.parameters.saturating_mul(TOKENS_PER_PARAMETER));
    let tokens_a_step = place.tokens_a_step();
    let parameter_bytes = model.parameters.saturating_mul(4 * PARAMETER_COPIES);
    let optimizer_bytes = optimizer_bytes(model);
    let mut times = Vec::new();
    for machine in hardware {
        for column in columns {
            let matrices = machine.compute_seconds(MATRICES * 2.0 * model.multiplied as f64);
            let modes = [("parallel", Some(column.parallel)), ("chunk", column.chunk)];
            let modes = modes.into_iter().filter_map(|(mode, cost)| cost.map(|cost| (mode, ATTENTION * cost.attention_flops)));
            let Some((mode, attention)) = modes.min_by(|a, b| a.1.total_cmp(&b.1)) else { continue };
            let update = machine.memory_seconds(optimizer_bytes) / tokens_a_step as f64;
            let a_token = matrices + machine.compute_seconds(attention) + update;
            let activations = model.activations.saturating_mul(machine.activation_bytes()).saturating_mul(tokens_a_step);
            let memory = parameter_bytes.saturating_add(activations);
            times.push(TrainingTime {
                hardware: machine.name.clone(),
                column: column.label.clone(),
                mode: mode.into(),
                flops_a_token: MATRICES * 2.0 * model.multiplied as f64 + attention,
                tokens_a_second: 1.0 / a_token,
                seconds: a_token * tokens as f64,
                memory,
                too_large: machine.memory.is_some_and(|available| memory > available),
            });
        }
    }
    let mut assumptions = vec![
        format!(
            "training: 6 operations per token and matrix parameter, {ATTENTION} times the forward pass for attention, in the faster mode"
        ),
        "training: AdamW moves 28 bytes per parameter and step; weights, gradients and moments are float32".to_owned(),
        "training: activations are stored for the backward pass, without recomputation, in the machine's precision".to_owned(),
    ];
    if requested.is_none() {
        assumptions.push(format!("training: {TOKENS_PER_PARAMETER} tokens per parameter, the default"));
    }
    Training { tokens, tokens_a_step, parameter_bytes, times, hardware: hardware.to_vec(), assumptions }
}
