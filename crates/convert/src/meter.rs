//! Loss and KL to the original model, by position.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use termwise_llama::{Model, Options, Session};

use crate::Error;

/// Rows of logits at once.
const ROWS: usize = 128;
/// Where buckets of positions begin.
pub const BUCKETS: [usize; 6] = [0, 64, 256, 1024, 2048, 4096];

/// The original model on one context: the log of its predictions, [T, V], and their losses.
pub struct Reference {
    /// The context.
    pub ids: Vec<u32>,
    vocabulary: usize,
    logs: Vec<f32>,
    /// −ln p of the token that came, of all positions but the last.
    pub losses: Vec<f64>,
}

/// Sums over some positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sums {
    /// Positions.
    pub count: u64,
    /// Of −ln p, nats.
    pub loss: f64,
    /// The same of the original model.
    pub original: f64,
    /// Of KL(original ‖ this).
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

    /// Mean rise of the loss, nats per token.
    pub fn rise(&self) -> f64 {
        (self.loss - self.original) / self.count.max(1) as f64
    }

    /// Mean KL, nats per token.
    pub fn mean_kl(&self) -> f64 {
        self.kl / self.count.max(1) as f64
    }
}

/// By bucket of positions, as many as the context reaches.
pub type ByPosition = Vec<Sums>;

/// All positions together.
pub fn whole(buckets: &[Sums]) -> Sums {
    buckets.iter().fold(Sums::default(), |mut all, one| {
        all.add(one);
        all
    })
}

fn session(model: &Model, ids: &[u32]) -> Result<Session, Error> {
    let mut session = model.session(1, ids.len(), Options { forward_only: true, ..Options::default() })?;
    session.run(&model.params, ids, None)?;
    Ok(session)
}

/// Logits become the logs of probabilities.
fn normalize(row: &mut [f32]) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = row.chunks(1024).map(|part| part.iter().map(|x| (x - most).exp()).sum::<f32>()).sum();
    let log = most + sum.ln();
    row.iter_mut().for_each(|x| *x -= log);
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
            block.par_chunks_exact_mut(v).for_each(normalize);
        }
        let losses = (0..count).map(|t| -f64::from(logs[t * v + ids[t + 1] as usize])).collect();
        Ok(Reference { ids: ids.to_vec(), vocabulary: v, logs, losses })
    }

    /// Compares another model on the same context.
    pub fn compare(&self, model: &Model) -> Result<ByPosition, Error> {
        let (v, count) = (self.vocabulary, self.losses.len());
        let mut session = session(model, &self.ids)?;
        let mut logits = vec![0.0f32; ROWS * v];
        let reached = BUCKETS.iter().filter(|&&first| first < count).count();
        let mut found = vec![Sums::default(); reached];
        for first in (0..count).step_by(ROWS) {
            let last = (first + ROWS).min(count);
            let block = &mut logits[..(last - first) * v];
            session.logits(&model.params, first..last, block)?;
            let rows: Vec<(f64, f64)> = block
                .par_chunks_exact_mut(v)
                .zip(self.logs[first * v..last * v].par_chunks_exact(v))
                .enumerate()
                .map(|(i, (row, own))| {
                    normalize(row);
                    let part = |(p, q): (&[f32], &[f32])| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f32>();
                    let kl: f64 = own.chunks(1024).zip(row.chunks(1024)).map(|parts| f64::from(part(parts))).sum();
                    (-f64::from(row[self.ids[first + i + 1] as usize]), kl)
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
