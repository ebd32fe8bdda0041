//! Loss and KL to the original model, by position.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use termwise_model::{Model, Session, SessionOptions};

use crate::kv::Error;
use crate::kv::journal::Journal;

/// Rows of logits per matrix product: enough to reuse the weights of the vocabulary.
const ROWS: usize = 512;
/// Loss and KL in nats if logits are NaN or infinite.
const INVALID_LOSS: f64 = 100.0;
/// Values per partial sum in float32; partial sums are added in float64.
const BLOCK: usize = 1024;
/// Parallel partial sums, which compilers vectorize.
const LANES: usize = 16;
/// First position of each bucket. The bucket from 1,536 is the end of a context of 2,048 tokens.
pub const BUCKETS: [usize; 7] = [0, 64, 256, 1024, 1536, 2048, 4096];

/// The original model on one context: the log of its predictions, [T, V], and their losses.
pub struct Reference {
    /// The context.
    pub ids: Vec<u32>,
    vocabulary: usize,
    logs: Vec<f32>,
    /// −ln p of the next token, at all positions but the last.
    pub losses: Vec<f64>,
}

/// Sums over some positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sums {
    /// Positions.
    pub count: u64,
    /// Sum of −ln p, nats.
    pub loss: f64,
    /// The same of the original model.
    pub original: f64,
    /// Sum of KL(original ‖ this).
    pub kl: f64,
}

impl Sums {
    /// Adds another.
    pub fn add(&mut self, other: &Sums) {
        self.count += other.count;
        self.loss += other.loss;
        self.original += other.original;
        self.kl += other.kl;
    }

    /// Mean loss increase, nats per token.
    pub fn rise(&self) -> f64 {
        (self.loss - self.original) / self.count.max(1) as f64
    }

    /// Mean KL, nats per token.
    pub fn mean_kl(&self) -> f64 {
        self.kl / self.count.max(1) as f64
    }
}

/// Sums per bucket of positions, up to the length of the context.
pub type ByPosition = Vec<Sums>;

/// The journal's sums of a context, if their number matches its length.
pub(crate) fn known(journal: &Journal, key: &str, context: &[u32]) -> Option<ByPosition> {
    journal.get(key).filter(|found: &ByPosition| found.len() == buckets(context.len().saturating_sub(1)))
}

/// Number of buckets for a number of positions.
fn buckets(positions: usize) -> usize {
    BUCKETS.iter().filter(|&&first| first < positions).count()
}

/// Sum over all positions.
pub fn whole(buckets: &[Sums]) -> Sums {
    buckets.iter().fold(Sums::default(), |mut all, one| {
        all.add(one);
        all
    })
}

fn session(model: &Model, ids: &[u32]) -> Result<Session, Error> {
    let mut session = model.session(1, ids.len(), SessionOptions::default().forward_only(true))?;
    session.run(&model.params, ids, None)?;
    Ok(session)
}

/// e^x for x ≤ 0 with a relative error of 2e-7, branch-free for vectorization.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // x = n·ln 2 + r; adding 1.5·2²³ leaves n in the low bits.
    const ROUNDING_OFFSET: f32 = 12_582_912.0;
    let x = x.max(-87.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUNDING_OFFSET;
    let n = shifted - ROUNDING_OFFSET;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let p = 1.0 + r * (1.0 + r * (0.5 + r * (1.666_665_8e-1 + r * (4.166_579_6e-2 + r * (8.369_09e-3 + r * 1.381_6e-3)))));
    f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDING_OFFSET.to_bits()).wrapping_add(127) << 23) * p
}

/// Σ f(x, y) in lanes and blocks.
#[inline(always)]
fn sum(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f64 {
    let block = |(x, y): (&[f32], &[f32])| {
        let mut sums = [0.0f32; LANES];
        let ((x, rest_x), (y, rest_y)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
        for (x, y) in x.iter().zip(y) {
            (0..LANES).for_each(|i| sums[i] += f(x[i], y[i]));
        }
        f64::from(sums.iter().sum::<f32>() + rest_x.iter().zip(rest_y).map(|(x, y)| f(*x, *y)).sum::<f32>())
    };
    x.chunks(BLOCK).zip(y.chunks(BLOCK)).map(block).sum()
}

/// ln Σ e^x of logits; `None` if one is NaN or infinite.
fn log_sum(row: &[f32]) -> Option<f32> {
    let mut most = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = row.as_chunks::<LANES>();
    for x in whole {
        (0..LANES).for_each(|i| most[i] = if x[i] > most[i] { x[i] } else { most[i] });
    }
    let most = most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    // 0 · NaN and 0 · ∞ are NaN.
    if !sum(row, row, |x, _| x * 0.0).is_finite() {
        return None;
    }
    Some((f64::from(most) + sum(row, row, |x, _| exp(x - most)).ln()) as f32)
}

impl Reference {
    /// Runs the original model.
    pub fn new(model: &Model, ids: &[u32]) -> Result<Reference, Error> {
        let (v, count) = (model.config.vocab_size, ids.len() - 1);
        let mut session = session(model, ids)?;
        let mut logs = vec![0.0f32; count * v];
        for first in (0..count).step_by(ROWS) {
            let last = (first + ROWS).min(count);
            let block = &mut logs[first * v..last * v];
            session.logits(&model.params, first..last, block)?;
            block.par_chunks_exact_mut(v).for_each(|row| {
                // Invalid logits of the original are reported below, by their loss.
                let log = log_sum(row).unwrap_or(f32::NAN);
                row.iter_mut().for_each(|x| *x -= log);
            });
        }
        let losses = (0..count).map(|t| -f64::from(logs[t * v + ids[t + 1] as usize])).collect::<Vec<f64>>();
        if let Some(t) = losses.iter().position(|loss| !loss.is_finite()) {
            return Err(Error::NoNumbers(t));
        }
        Ok(Reference { ids: ids.to_vec(), vocabulary: v, logs, losses })
    }

    /// Compares another model on the same context.
    pub fn compare(&self, model: &Model) -> Result<ByPosition, Error> {
        let (v, count) = (self.vocabulary, self.losses.len());
        let mut session = session(model, &self.ids)?;
        let mut logits = vec![0.0f32; ROWS.min(count) * v];
        let mut found = vec![Sums::default(); buckets(count)];
        for first in (0..count).step_by(ROWS) {
            let last = (first + ROWS).min(count);
            let block = &mut logits[..(last - first) * v];
            session.logits(&model.params, first..last, block)?;
            let rows: Vec<(f64, f64)> = block
                .par_chunks_exact(v)
                .zip(self.logs[first * v..last * v].par_chunks_exact(v))
                .enumerate()
                .map(|(i, (row, own))| {
                    let Some(log) = log_sum(row) else { return (INVALID_LOSS, INVALID_LOSS) };
                    let kl = sum(own, row, |p, q| exp(p) * (p - (q - log)));
                    (-f64::from(row[self.ids[first + i + 1] as usize] - log), kl)
                })
                .collect();
            for (t, (loss, kl)) in (first..).zip(rows) {
                let bucket = BUCKETS.iter().rposition(|&start| start <= t).unwrap_or(0);
                found[bucket].add(&Sums { count: 1, loss, original: self.losses[t], kl });
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_and_sums_are_those_of_float64() {
        for i in 0..8700 {
            let x = -f64::from(i) * 0.01;
            let found = f64::from(exp(x as f32));
            assert!((found / f64::from(x as f32).exp() - 1.0).abs() < 3e-7, "{x}: {found}");
        }
        assert_eq!(exp(0.0), 1.0);
        let row: Vec<f32> = (0..5003).map(|i| ((i * 7919) % 1000) as f32 * 0.03 - 12.0).collect();
        let expected = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        assert!(log_sum(&row).is_some_and(|log| (f64::from(log) - expected).abs() < 2e-6));
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = row.clone();
            row[4999] = wrong;
            assert_eq!(log_sum(&row), None);
        }
    }
}
