//! Output error of each KV head with each kind of memory: W_o·(y' − y), computed by the engine from the original model's activations.
//!
//! Errors are summed over the second half of each context. In the first half, large memories are not full yet, so a mean over all positions would
//! underestimate their errors in long texts.

use std::sync::atomic::AtomicBool;

use rayon::prelude::*;
use termwise_attention::{Attention, FusedOptions, Scratch};
use termwise_model::params::ParamRole;
use termwise_model::{Model, ObservedAttention};

use crate::kv::calibrate::pass;
use crate::kv::journal::{Journal, digest};
use crate::kv::kinds::Kind;
use crate::kv::{Error, ProgressFn};

/// Squared errors relative to the squared output of the whole layer, [layers·G, kinds].
pub struct Errors {
    /// The kinds, in the order of columns.
    pub kinds: Vec<Kind>,
    /// [layers·G, kinds]
    pub values: Vec<f64>,
}

impl Errors {
    /// The error of a KV head, counted over layers, with the kind of a column.
    pub fn get(&self, unit: usize, kind: usize) -> f64 {
        self.values[unit * self.kinds.len() + kind]
    }
}

/// W_oᵀ·W_o of the columns of each KV head, [G, w, w] with w = d·(H/G).
fn grams(model: &Model, layer: usize) -> Result<Vec<f32>, Error> {
    let config = &model.config;
    let (h, g, d, c) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size);
    let outputs = model.params.layout().entries().iter().filter(|entry| entry.spec.role == ParamRole::AttentionOutput && entry.is_matrix());
    let place = outputs.clone().nth(layer).expect("every layer has an output projection").range();
    let weight = &model.params.values()[place];
    let w = d * (h / g);
    let mut out = vec![0.0f32; g * w * w];
    out.par_chunks_exact_mut(w * w).enumerate().for_each(|(kv_head, to)| {
        for row in 0..c {
            let own = &weight[row * h * d + kv_head * w..][..w];
            for (to, x) in to.chunks_exact_mut(w).zip(own) {
                to.iter_mut().zip(own).for_each(|(to, y)| *to += x * y);
            }
        }
    });
    Ok(out)
}

/// Stride between evaluated positions; an error is an average over thousands.
const STRIDE: usize = 4;

/// Σ_t δᵀMδ of the columns of each KV head in rows [T, H·d], over every STRIDE-th row of the second half.
fn squares(delta: &[f32], width: usize, gram: &[f32], w: usize) -> Vec<f64> {
    let second_half = &delta[delta.len() / width / 2 * width..];
    gram.par_chunks_exact(w * w)
        .enumerate()
        .map(|(kv_head, m)| {
            let rows = second_half.chunks_exact(width).skip(STRIDE - 1).step_by(STRIDE).map(|row| &row[kv_head * w..][..w]);
            rows.map(|own| m.chunks_exact(w).zip(own).map(|(line, &x)| f64::from(x * dot(line, own))).sum::<f64>()).sum()
        })
        .collect()
}

/// Dot product with 16 partial sums, which compilers vectorize.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (whole_a, rest_a) = a.as_chunks::<16>();
    let (whole_b, rest_b) = b.as_chunks::<16>();
    for (a, b) in whole_a.iter().zip(whole_b) {
        (0..16).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum::<f32>() + rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum::<f32>()
}

/// Measures all kinds on these contexts, except values in the journal.
pub fn measure(
    model: &Model,
    identity: &str,
    contexts: &[Vec<u32>],
    kinds: &[Kind],
    journal: &mut Journal,
    stop: &AtomicBool,
    progress: ProgressFn,
) -> Result<Errors, Error> {
    let config = &model.config;
    let (layers, h, g, d) = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let (width, w) = (h * d, d * (h / g));
    let key =
        |context: &[u32], layer: usize, kind: &Kind| digest(&format!("error in the second half {identity} {context:?} {layer} {kind:?}"));
    let mut values = vec![0.0; layers * g * kinds.len()];
    let mut missing: Vec<Vec<u32>> = Vec::new();
    // A value for each KV head.
    let known = |journal: &Journal, context: &[u32], layer: usize, kind: &Kind| {
        journal.get::<Vec<f64>>(&key(context, layer, kind)).filter(|found| found.len() == g)
    };
    for context in contexts {
        if (0..layers).any(|layer| kinds.iter().any(|kind| known(journal, context, layer, kind).is_none())) {
            missing.push(context.clone());
        }
    }
    let scratch = Scratch::default();
    pass(model, &missing, stop, progress, "output errors of KV heads", &mut |index, seen: &ObservedAttention| {
        let (layer, context) = (seen.layer, &missing[index]);
        let gram = grams(model, layer)?;
        let whole: f64 = squares(seen.y, width, &gram, w).iter().sum();
        let own = &seen.attention.heads()[0];
        let unknown: Vec<&Kind> = kinds.iter().filter(|kind| known(journal, context, layer, kind).is_none()).collect();
        // Parallel over kinds: a layer has few KV heads, and some kinds are sequential in time.
        let found = unknown.par_iter().with_max_len(1).map(|kind| -> Result<Vec<f64>, Error> {
            let heads = (0..h).map(|_| kind.variant(own)).collect::<Result<Vec<_>, Error>>()?;
            let attention = seen.attention.with_heads(heads)?;
            let mut y = vec![0.0f32; seen.y.len()];
            attention.fused_with(1, seen.shape.time, FusedOptions::default().scratch(&scratch))?.infer(seen.inputs, &mut y)?;
            y.iter_mut().zip(seen.y).for_each(|(y, full)| *y -= full);
            Ok(squares(&y, width, &gram, w).iter().map(|error| error / whole.max(f64::MIN_POSITIVE)).collect())
        });
        for (kind, found) in unknown.iter().zip(found.collect::<Result<Vec<_>, Error>>()?) {
            journal.put(&key(context, layer, kind), &format!("layer {layer}, {}", kind.label()), &found);
        }
        Ok(())
    })?;
    for context in contexts {
        for layer in 0..layers {
            for (column, kind) in kinds.iter().enumerate() {
                let found = known(journal, context, layer, kind).unwrap_or_default();
                for (kv_head, error) in found.iter().enumerate() {
                    values[(layer * g + kv_head) * kinds.len() + column] += error / contexts.len() as f64;
                }
            }
        }
    }
    Ok(Errors { kinds: kinds.to_vec(), values })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_second_half_of_a_context_counts() {
        let (width, w, time) = (4, 2, 32);
        // δᵀMδ of each of two KV heads with M = diag(1, 2).
        let gram = [1.0, 0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 2.0];
        let mut delta = vec![0.0; time * width];
        delta[..time / 2 * width].fill(7.0);
        assert_eq!(squares(&delta, width, &gram, w), [0.0, 0.0]);
        delta[time / 2 * width..].chunks_exact_mut(width).for_each(|row| row.copy_from_slice(&[1.0, 1.0, 0.0, 3.0]));
        let rows = (time / 2 / STRIDE) as f64;
        assert_eq!(squares(&delta, width, &gram, w), [3.0 * rows, 18.0 * rows]);
    }
}
