//! From logits to a token, with the filters of Hugging Face in its order: repetition penalty, temperature, top-k, top-p, min-p.
//!
//! ```text
//! x_v ← x_v/r where x_v > 0, x_v·r elsewhere       for tokens v of the prompt and of what was written
//! x_v ← (x_v − max x)/temperature
//! top-k   keeps x_v ≥ the k-th largest
//! top-p   keeps v while the probabilities of all larger ones add up to less than p
//! min-p   keeps p_v ≥ min_p · max p
//! ```
//!
//! Each filter sees the probabilities of what the ones before it kept. The largest logit always stays.

use crate::error::{Error, Result};
use crate::rng::Rng;

/// How a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// What logits are divided by; at 0 the most probable token is taken, of equals the lowest, and nothing is drawn.
    pub temperature: f64,
    /// Tokens to keep, those equal to the last one included; 0 for all.
    pub top_k: usize,
    /// Probability to keep, above 0; 1 for all.
    pub top_p: f64,
    /// Share of the largest probability below which tokens are dropped; 0 for none.
    pub min_p: f64,
    /// Factor against tokens that were there before; 1 for none.
    pub repetition_penalty: f64,
    /// What is drawn is a function of this number, the number of the draw, and the logits.
    pub seed: u64,
}

/// The most probable token, always.
impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Checks that every number can be what it is for.
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

/// Chooses the tokens of one text. Allocates nothing after it is built.
///
/// ```
/// use termwise_llama::generate::{Sampler, Sampling};
///
/// let mut greedy = Sampler::new(Sampling::default(), 3)?;
/// assert_eq!(greedy.choose(&[0.5, 2.0, 1.0]), 1);
/// let mut varied = Sampler::new(Sampling { temperature: 1.0, repetition_penalty: 4.0, ..Sampling::default() }, 3)?;
/// varied.see(&[1]);
/// assert!(varied.choose(&[0.5, 2.0, 1.0]) < 3);
/// # Ok::<(), termwise_llama::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
    /// Draws made.
    draws: u64,
    /// Which tokens were there before, [V].
    seen: Vec<bool>,
    /// Token and logit after the penalty, then those that are kept.
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    token: u32,
    logit: f64,
    /// e^logit, after the largest was subtracted
    weight: f64,
}

impl Sampler {
    /// For a vocabulary of V.
    pub fn new(sampling: Sampling, vocabulary: usize) -> Result<Sampler> {
        sampling.validate()?;
        Ok(Sampler {
            sampling,
            rng: Rng::new(sampling.seed),
            draws: 0,
            seen: vec![false; vocabulary],
            candidates: Vec::with_capacity(vocabulary),
        })
    }

    /// Tokens that the repetition penalty counts: the prompt, and each token once it is chosen, which [`Sampler::choose`] does itself.
    pub fn see(&mut self, tokens: &[u32]) {
        for &token in tokens {
            if let Some(seen) = self.seen.get_mut(token as usize) {
                *seen = true;
            }
        }
    }

    /// Tokens drawn so far; with the same seed, a sampler that is given this number goes on where another stopped.
    pub fn draws(&self) -> u64 {
        self.draws
    }

    /// Goes on after that many draws.
    pub fn skip_to(&mut self, draws: u64) {
        self.draws = draws;
    }

    /// The next token from logits [V], which are finite.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty, .. } = self.sampling;
        self.candidates.clear();
        for (token, (&logit, &seen)) in logits.iter().zip(&self.seen).enumerate() {
            let mut logit = logit as f64;
            if seen && repetition_penalty != 1.0 {
                logit = if logit > 0.0 { logit / repetition_penalty } else { logit * repetition_penalty };
                // A penalty of any size leaves a number.
                logit = logit.clamp(f64::MIN, f64::MAX);
            }
            self.candidates.push(Candidate { token: token as u32, logit, weight: 0.0 });
        }
        let token = if temperature == 0.0 {
            largest(&self.candidates)
        } else {
            self.filter(temperature, top_k, top_p, min_p);
            self.draws += 1;
            pick(&self.candidates, self.rng.unit(self.draws - 1))
        };
        self.see(&[token]);
        token
    }

    /// Leaves what all filters keep, with its weights, most probable first.
    fn filter(&mut self, temperature: f64, top_k: usize, top_p: f64, min_p: f64) {
        let kept = &mut self.candidates;
        // Below the largest, so that it stays a number at any temperature; the others may become −∞, whose probability is zero.
        let max = kept.iter().map(|c| c.logit).fold(f64::NEG_INFINITY, f64::max);
        kept.iter_mut().for_each(|c| c.logit = (c.logit - max) / temperature);
        if (1..kept.len()).contains(&top_k) {
            kept.select_nth_unstable_by(top_k - 1, order);
            let least = kept[top_k - 1].logit;
            kept.retain(|c| c.logit >= least);
        }
        // Also without filters, so that a draw means the same token whatever order a selection left behind.
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
            // The first has weight 1: the largest probability over itself.
            let count = kept.partition_point(|c| c.weight >= min_p);
            kept.truncate(count.max(1));
        }
    }
}

/// Larger logits first, of equals the lower token.
fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// The first of the largest.
fn largest(candidates: &[Candidate]) -> u32 {
    candidates
        .iter()
        .fold(None, |best: Option<&Candidate>, c| if best.is_none_or(|best| c.logit > best.logit) { Some(c) } else { best })
        .map_or(0, |c| c.token)
}

/// The candidate at this point, from 0 below 1, of the line on which each is as long as its weight.
fn pick(kept: &[Candidate], unit: f64) -> u32 {
    let total: f64 = kept.iter().map(|c| c.weight).sum();
    let mut rest = unit * total;
    for candidate in kept {
        if rest < candidate.weight {
            return candidate.token;
        }
        rest -= candidate.weight;
    }
    // Rounding can leave a crumb behind the last one.
    kept.last().map_or(0, |c| c.token)
}

#[cfg(test)]
mod tests;
