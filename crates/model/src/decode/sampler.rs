//! Sampling a token from logits, with the filters of Hugging Face Transformers in the same order: repetition penalty, temperature, top-k, top-p,
//! min-p.
//!
//! ```text
//! x_v ← x_v/r if x_v > 0, else x_v·r       for tokens v of the prompt and of the generated text
//! x_v ← (x_v − max x)/temperature
//! top-k   keeps x_v ≥ the k-th largest
//! top-p   keeps v while the probabilities of all larger tokens sum to less than p
//! min-p   keeps p_v ≥ min_p · max p
//! ```
//!
//! Each filter uses the probabilities of the tokens that the previous filters kept. The most probable token is always kept.

use crate::error::{Error, Result};
use crate::rng::IndexedRng;

/// Options of a [`Sampler`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SamplingOptions {
    /// Divisor of the logits. At 0, decoding is greedy: the most probable token is chosen, of equally probable ones the lowest id.
    pub temperature: f64,
    /// Number of tokens to keep, plus tokens with the same logit as the last one. 0 keeps all.
    pub top_k: usize,
    /// Cumulative probability to keep, above 0. 1 keeps all.
    pub top_p: f64,
    /// Tokens with a probability below this fraction of the largest are dropped. 0 keeps all.
    pub min_p: f64,
    /// Penalty for tokens that occurred before. 1 disables it.
    pub repetition_penalty: f64,
    /// The sampled token is a function of the seed, the number of the draw, and the logits.
    pub seed: u64,
}

/// Greedy decoding.
impl Default for SamplingOptions {
    fn default() -> SamplingOptions {
        SamplingOptions { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

setters!(SamplingOptions { temperature: f64, top_k: usize, top_p: f64, min_p: f64, repetition_penalty: f64, seed: u64 });

impl SamplingOptions {
    /// Checks that every value is in its range.
    pub fn validate(&self) -> Result<()> {
        let bad = |name: &'static str, found: f64, expected: &'static str| Err(Error::Sampling { name, found, expected });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return bad("temperature", self.temperature, "0 or a positive number");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top-p", self.top_p, "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return bad("min-p", self.min_p, "between 0 and 1");
        }
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return bad("repetition penalty", self.repetition_penalty, "a positive number");
        }
        Ok(())
    }
}

/// Samples the tokens of one sequence. It allocates only in [`Sampler::new`].
///
/// ```
/// use termwise_model::decode::{Sampler, SamplingOptions};
///
/// let mut greedy = Sampler::new(SamplingOptions::default(), 3)?;
/// assert_eq!(greedy.sample(&[0.5, 2.0, 1.0]), 1);
/// let mut varied = Sampler::new(SamplingOptions::default().temperature(1.0).repetition_penalty(4.0), 3)?;
/// varied.mark_seen(&[1]);
/// assert!(varied.sample(&[0.5, 2.0, 1.0]) < 3);
/// # Ok::<(), termwise_model::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    rng: IndexedRng,
    /// Number of random draws.
    draws: u64,
    /// Whether each token occurred before. [V]
    seen: Vec<bool>,
    /// All tokens after the penalty, then the tokens that the filters keep.
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    token: u32,
    logit: f64,
    /// e^(logit − largest logit)
    weight: f64,
}

impl Sampler {
    /// A sampler for a vocabulary of V tokens.
    pub fn new(options: SamplingOptions, vocabulary: usize) -> Result<Sampler> {
        options.validate()?;
        Ok(Sampler {
            options,
            rng: IndexedRng::new(options.seed),
            draws: 0,
            seen: vec![false; vocabulary],
            candidates: Vec::with_capacity(vocabulary),
        })
    }

    /// Marks tokens for the repetition penalty, such as those of the prompt. [`Sampler::sample`] marks the tokens that it returns.
    pub fn mark_seen(&mut self, tokens: &[u32]) {
        for &token in tokens {
            if let Some(seen) = self.seen.get_mut(token as usize) {
                *seen = true;
            }
        }
    }

    /// The number of random draws so far. [`Sampler::skip_to`] resumes from it.
    pub fn draws(&self) -> u64 {
        self.draws
    }

    /// Resumes after this many draws of a sampler with the same seed.
    pub fn skip_to(&mut self, draws: u64) {
        self.draws = draws;
    }

    /// Samples the next token from logits [V], which must be finite.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let SamplingOptions { temperature, repetition_penalty, .. } = self.options;
        self.candidates.clear();
        for (token, (&logit, &seen)) in logits.iter().zip(&self.seen).enumerate() {
            let mut logit = logit as f64;
            if seen && repetition_penalty != 1.0 {
                logit = if logit > 0.0 { logit / repetition_penalty } else { logit * repetition_penalty };
                // Stays finite for any penalty.
                logit = logit.clamp(f64::MIN, f64::MAX);
            }
            self.candidates.push(Candidate { token: token as u32, logit, weight: 0.0 });
        }
        let token = if temperature == 0.0 {
            largest(&self.candidates)
        } else {
            self.filter();
            self.draws += 1;
            pick(&self.candidates, self.rng.unit(self.draws - 1))
        };
        self.mark_seen(&[token]);
        token
    }

    /// Reduces `candidates` to the tokens that all filters keep, most probable first.
    fn filter(&mut self) {
        let SamplingOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        let kept = &mut self.candidates;
        // Relative to the largest, which stays finite at any temperature. Others may become −∞, with probability zero.
        let max = kept.iter().map(|c| c.logit).fold(f64::NEG_INFINITY, f64::max);
        kept.iter_mut().for_each(|c| c.logit = (c.logit - max) / temperature);
        if (1..kept.len()).contains(&top_k) {
            kept.select_nth_unstable_by(top_k - 1, order);
            let least = kept[top_k - 1].logit;
            kept.retain(|c| c.logit >= least);
        }
        // Always sorted, so the sampled token does not depend on the order that the selection left.
        kept.sort_unstable_by(order);
        kept.iter_mut().for_each(|c| c.weight = c.logit.exp());
        if top_p < 1.0 {
            let total: f64 = kept.iter().map(|c| c.weight).sum();
            let mut before = 0.0;
            let count = kept.iter().take_while(|c| {
                let keep = before < top_p * total;
                before += c.weight;
                keep
            });
            let count = count.count().max(1);
            kept.truncate(count);
        }
        if min_p > 0.0 {
            // The largest weight is 1.
            let count = kept.partition_point(|c| c.weight >= min_p);
            kept.truncate(count.max(1));
        }
    }
}

/// Descending by logit, then ascending by token.
fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// The first candidate with the largest logit.
fn largest(candidates: &[Candidate]) -> u32 {
    candidates
        .iter()
        .fold(None, |best: Option<&Candidate>, c| if best.is_none_or(|best| c.logit > best.logit) { Some(c) } else { best })
        .map_or(0, |c| c.token)
}

/// Inverse transform sampling: the candidate at `unit`, in [0, 1), of the cumulative weights.
fn pick(kept: &[Candidate], unit: f64) -> u32 {
    let total: f64 = kept.iter().map(|c| c.weight).sum();
    let mut rest = unit * total;
    for candidate in kept {
        if rest < candidate.weight {
            return candidate.token;
        }
        rest -= candidate.weight;
    }
    // Rounding can move the point past the last candidate.
    kept.last().map_or(0, |c| c.token)
}

#[cfg(test)]
mod tests;
