//! Rivals of the far state that are fitted where they are asked for: learned features and polynomials over all positions.
//!
//! ```text
//! features      φ(x) = softmax([2y, −2y]), y = W·x + b                    far weights w_s = S·φ(q)·φ(k_s)
//! loss          −Σ_far p_s·ln w_s + ln D,   D = Z + Σ_far w_s             cross entropy of attention; Z the near weights, p the attention of the original
//! dw_s          1/D − p_s/w_s
//! ```
//!
//! W, b and the size S are trained by Adam for each kv head on sampled queries and keys of the calibration contexts; a sampled key stands for its share of the
//! context. W begins as the projection of the far state, around the mean key.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use termwise_base::files::write_whole;
use termwise_llama::Model;

use crate::calibrate::{Gathered, NEAR, pass, sampled, view};
use crate::fit::{Fits, Projection, apply, fit_all_positions, projections};
use crate::kinds::{Far, Kind, SINKS};
use crate::{Error, Tell};

/// Queries of each head and keys of each kv head that a context gives.
const QUERIES: usize = 32;
const KEYS: usize = 384;
/// Steps of Adam, their first rate, and its moments.
const STEPS: usize = 160;
const RATE: f32 = 0.02;
const BETAS: (f32, f32) = (0.9, 0.98);
/// W begins as so much of the projection, whose keys have a variance of one.
const START: f32 = 0.25;
/// Weights below are taken as this.
const LEAST: f32 = 1e-30;

/// The tensors of a rival in one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RivalTensors {
    /// γ of polynomials, [H].
    pub gamma: Vec<f32>,
    /// a of polynomials, [H, 3].
    pub coefficients: Vec<f32>,
    /// W of queries, [H, n, n].
    pub q_feature: Vec<f32>,
    /// b of queries, [H, n].
    pub q_bias: Vec<f32>,
    /// W of keys, [G, n, n].
    pub k_feature: Vec<f32>,
    /// b of keys, [G, n].
    pub k_bias: Vec<f32>,
    /// S, [H].
    pub size: Vec<f32>,
}

/// One rival in all layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rival {
    /// Of the model and the contexts.
    pub identity: String,
    /// Which.
    pub far: Far,
    /// Its dimensions, as kinds have them.
    pub dim: usize,
    /// By layer.
    pub layers: Vec<RivalTensors>,
}

impl Fits {
    /// The rival that this kind needs.
    pub fn rival(&self, kind: &Kind) -> Option<&Rival> {
        self.rivals.iter().find(|rival| (rival.far, rival.dim) == (kind.far, kind.dim))
    }

    /// Fits what these kinds need and is not there; with a folder, each is kept there.
    pub fn add_rivals(
        &mut self,
        model: &Model,
        (contexts, gathered): (&[Vec<u32>], &Gathered),
        kinds: &[Kind],
        folder: Option<&Path>,
        stop: &AtomicBool,
        tell: Tell,
    ) -> Result<(), Error> {
        for kind in kinds.iter().filter(|kind| kind.far.is_rival()) {
            if self.rival(kind).is_some() {
                continue;
            }
            let (far, dim) = (kind.far, kind.dim);
            let name = if far == Far::Hedgehog { "features" } else { "polynomial" };
            let file = folder.map(|folder| folder.join(format!("fits-{name}-{dim}.json")));
            let known = file.as_ref().and_then(|path| serde_json::from_slice::<Rival>(&std::fs::read(path).ok()?).ok());
            if let Some(known) = known.filter(|known| known.identity == self.identity) {
                self.rivals.push(known);
                continue;
            }
            let layers = if far == Far::Hedgehog {
                train(model, contexts, gathered, dim, stop, tell)?
            } else {
                fit_all_positions(model, contexts, gathered, dim, stop, tell)?
            };
            let rival = Rival { identity: self.identity.clone(), far, dim, layers };
            if let Some(path) = file {
                write_whole(&path, &serde_json::to_vec(&rival).unwrap_or_default())?;
            }
            self.rivals.push(rival);
        }
        Ok(())
    }
}

/// What one context gives a kv head to train on.
struct Sample {
    /// Projected keys [K, n], the position of each, and how many keys each stands for.
    keys: Vec<f32>,
    places: Vec<usize>,
    share: f32,
    queries: Vec<Query>,
}

struct Query {
    /// Of the heads of the kv head.
    head: usize,
    /// Projected, [n].
    q: Vec<f32>,
    /// Its far keys are the sampled ones in this range.
    far: std::ops::Range<usize>,
    /// ln Z of near keys.
    near: f32,
    /// The attention of the original on the far keys, with what they stand for; the rest is near.
    p: Vec<f32>,
}

impl Sample {
    /// The queries of these views, which share their keys.
    fn new(views: &[termwise_attention::View], projection: &Projection, n: usize, index: usize) -> Sample {
        let (d, length) = (views[0].d, views[0].length);
        let places = sampled(index, length, KEYS);
        let share = length as f64 / places.len().max(1) as f64;
        let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<f32>>();
        let keys = places.iter().flat_map(|&s| narrow(apply(&projection.k, n, &views[0].k[s * d..][..d]))).collect();
        let mut queries = Vec::new();
        for (head, view) in views.iter().enumerate() {
            for t in sampled(index, length, QUERIES) {
                let q = &view.q[t * d..][..d];
                let score = |s: usize| -> f64 { q.iter().zip(&view.k[s * d..][..d]).map(|(q, k)| q * k).sum() };
                let (first, last) = (SINKS, (t + 1).saturating_sub(NEAR));
                let far = places.partition_point(|&s| s < first)..places.partition_point(|&s| s < last);
                if last <= first || far.is_empty() {
                    continue;
                }
                let near: Vec<f64> = (0..first).chain(last..=t).map(score).collect();
                let far_scores: Vec<f64> = places[far.clone()].iter().map(|&s| score(s)).collect();
                let most = near.iter().chain(&far_scores).copied().fold(f64::NEG_INFINITY, f64::max);
                let sum = |scores: &[f64]| scores.iter().map(|x| (x - most).exp()).sum::<f64>();
                let (z, all) = (sum(&near), sum(&near) + share * sum(&far_scores));
                let p = far_scores.iter().map(|x| (share * (x - most).exp() / all) as f32).collect();
                queries.push(Query { head, q: narrow(apply(&projection.q, n, q)), far, near: (z.ln() + most) as f32, p });
            }
        }
        Sample { keys, places, share: share as f32, queries }
    }
}

/// Parameters of one kv head in one row: for each query head W, b and ln S, then W and b of keys.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    n: usize,
}

impl Shape {
    fn map(self) -> usize {
        self.n * self.n + self.n
    }

    fn len(self) -> usize {
        self.heads * (self.map() + 1) + self.map()
    }

    /// Where W of a query head begins, its b and ln S following; of keys for `heads`.
    fn at(self, head: usize) -> usize {
        head * (self.map() + 1)
    }
}

/// φ of rows [rows, n] by the map at this place, [rows, 2n].
fn features(x: &[f32], map: &[f32], n: usize) -> Vec<f32> {
    let (weight, bias) = map.split_at(n * n);
    let mut phi = vec![0.0f32; 2 * x.len()];
    for (x, phi) in x.chunks_exact(n).zip(phi.chunks_exact_mut(2 * n)) {
        for (i, (row, bias)) in weight.chunks_exact(n).zip(bias).enumerate() {
            let y = 2.0 * (dot(row, x) + bias);
            (phi[i], phi[n + i]) = (y, -y);
        }
        let most = phi.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        phi.iter_mut().for_each(|y| *y = (*y - most).exp());
        let inverse = 1.0 / phi.iter().sum::<f32>();
        phi.iter_mut().for_each(|y| *y *= inverse);
    }
    phi
}

/// Adds the gradient of the map from that of φ.
fn features_backward(x: &[f32], phi: &[f32], dphi: &[f32], n: usize, grad: &mut [f32]) {
    let (dweight, dbias) = grad.split_at_mut(n * n);
    for ((x, phi), dphi) in x.chunks_exact(n).zip(phi.chunks_exact(2 * n)).zip(dphi.chunks_exact(2 * n)) {
        let along = dot(phi, dphi);
        for i in 0..n {
            let dy = 2.0 * (phi[i] * (dphi[i] - along) - phi[n + i] * (dphi[n + i] - along));
            dbias[i] += dy;
            dweight[i * n..(i + 1) * n].iter_mut().zip(x).for_each(|(to, x)| *to += dy * x);
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let ((whole_a, rest_a), (whole_b, rest_b)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in whole_a.iter().zip(whole_b) {
        (0..8).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum::<f32>() + rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum::<f32>()
}

/// Mean loss of a sample's queries, and its gradient.
fn loss_and_grad(sample: &Sample, shape: Shape, params: &[f32], grad: &mut [f32]) -> f32 {
    let Shape { heads, n } = shape;
    grad.fill(0.0);
    let keys_at = shape.at(heads);
    let phi_k = features(&sample.keys, &params[keys_at..], n);
    let mut dphi_k = vec![0.0f32; phi_k.len()];
    let (mut loss, each) = (0.0f32, 1.0 / sample.queries.len().max(1) as f32);
    for query in &sample.queries {
        let at = shape.at(query.head);
        let (map, log_size) = (&params[at..at + shape.map()], params[at + shape.map()]);
        let phi_q = features(&query.q, map, n);
        let far = &phi_k[query.far.start * 2 * n..query.far.end * 2 * n];
        // Everything relative to the near keys: their sum is 1.
        let size = (log_size - query.near).exp();
        let w: Vec<f32> = far.chunks_exact(2 * n).map(|phi| (size * dot(&phi_q, phi)).max(LEAST)).collect();
        let denominator = 1.0 + sample.share * w.iter().sum::<f32>();
        loss += each * (denominator.ln() - query.p.iter().zip(&w).map(|(p, w)| p * w.ln()).sum::<f32>());
        let mut dphi_q = vec![0.0f32; 2 * n];
        let to = &mut dphi_k[query.far.start * 2 * n..query.far.end * 2 * n];
        for (((phi, to), &w), &p) in far.chunks_exact(2 * n).zip(to.chunks_exact_mut(2 * n)).zip(&w).zip(&query.p) {
            let dw = each * (sample.share / denominator - p / w);
            grad[at + shape.map()] += dw * w;
            let factor = dw * size;
            dphi_q.iter_mut().zip(phi).for_each(|(to, phi)| *to += factor * phi);
            to.iter_mut().zip(&phi_q).for_each(|(to, phi)| *to += factor * phi);
        }
        features_backward(&query.q, &phi_q, &dphi_q, n, &mut grad[at..at + shape.map()]);
    }
    features_backward(&sample.keys, &phi_k, &dphi_k, n, &mut grad[keys_at..]);
    loss
}

/// Where training begins: the projection, around the mean key, of the size that far keys have on average.
fn start(samples: &[Sample], shape: Shape) -> Vec<f32> {
    let Shape { heads, n } = shape;
    let mut params = vec![0.0f32; shape.len()];
    for head in 0..=heads {
        (0..n).for_each(|i| params[shape.at(head) + i * n + i] = START);
    }
    let count = samples.iter().map(|sample| sample.places.len()).sum::<usize>().max(1) as f32;
    let bias = shape.at(heads) + n * n;
    samples.iter().flat_map(|sample| sample.keys.chunks_exact(n)).for_each(|k| {
        k.iter().enumerate().for_each(|(i, k)| params[bias + i] -= START * k / count);
    });
    for head in 0..heads {
        let at = shape.at(head);
        let (mut sum, mut rows) = (0.0f64, 0.0f64);
        for sample in samples {
            let phi_k = features(&sample.keys, &params[shape.at(heads)..], n);
            for query in sample.queries.iter().filter(|query| query.head == head) {
                let phi_q = features(&query.q, &params[at..at + shape.map()], n);
                let far = phi_k[query.far.start * 2 * n..query.far.end * 2 * n].chunks_exact(2 * n);
                let total = sample.share * far.map(|phi| dot(&phi_q, phi)).sum::<f32>();
                let mass: f32 = query.p.iter().sum::<f32>().clamp(1e-6, 1.0 - 1e-6);
                sum += f64::from(query.near + (mass / (1.0 - mass)).ln() - total.max(LEAST).ln());
                rows += 1.0;
            }
        }
        params[at + shape.map()] = (sum / rows.max(1.0)) as f32;
    }
    params
}

/// Trains one kv head; the parameters and the loss before and after.
fn descend(samples: &[Sample], shape: Shape) -> (Vec<f32>, [f32; 2]) {
    let mut params = start(samples, shape);
    let mut grad = vec![0.0f32; params.len()];
    let used: Vec<&Sample> = samples.iter().filter(|sample| !sample.queries.is_empty()).collect();
    if used.is_empty() {
        return (params, [0.0; 2]);
    }
    let whole = |params: &[f32], grad: &mut [f32]| {
        used.iter().map(|sample| loss_and_grad(sample, shape, params, grad)).sum::<f32>() / used.len() as f32
    };
    let before = whole(&params, &mut grad);
    let begun = params.clone();
    let (mut first, mut second) = (vec![0.0f32; params.len()], vec![0.0f32; params.len()]);
    let (b1, b2) = BETAS;
    for step in 0..STEPS {
        loss_and_grad(used[step % used.len()], shape, &params, &mut grad);
        let rate = RATE * (1.0 - step as f32 / STEPS as f32);
        let (c1, c2) = (1.0 - b1.powi(step as i32 + 1), 1.0 - b2.powi(step as i32 + 1));
        for (((x, g), m), v) in params.iter_mut().zip(&grad).zip(&mut first).zip(&mut second) {
            *m = b1 * *m + (1.0 - b1) * g;
            *v = b2 * *v + (1.0 - b2) * g * g;
            *x -= rate * (*m / c1) / ((*v / c2).sqrt() + 1e-8);
        }
    }
    let after = whole(&params, &mut grad);
    if after.is_finite() && after < before { (params, [before, after]) } else { (begun, [before, before]) }
}

/// Features in `dim` dimensions, all of them without a projection for 0, for every layer.
fn train(
    model: &Model,
    contexts: &[Vec<u32>],
    gathered: &Gathered,
    dim: usize,
    stop: &AtomicBool,
    tell: Tell,
) -> Result<Vec<RivalTensors>, Error> {
    let config = &model.config;
    let (layers, h, g, d) = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let n = if dim == 0 { d } else { dim };
    let shape = Shape { heads: h / g, n };
    let projections = projections(gathered, d);
    let mut samples: Vec<Vec<Sample>> = (0..layers * g).map(|_| Vec::new()).collect();
    pass(model, contexts, stop, tell, "what features are trained on", &mut |index, seen| {
        let found: Result<Vec<Sample>, Error> = (0..g)
            .into_par_iter()
            .map(|kv_head| {
                let views = (kv_head * (h / g)..(kv_head + 1) * (h / g)).map(|head| view(seen, head)).collect::<Result<Vec<_>, _>>()?;
                Ok(Sample::new(&views, &projections[seen.layer * g + kv_head], n, index))
            })
            .collect();
        found?.into_iter().enumerate().for_each(|(kv_head, sample)| samples[seen.layer * g + kv_head].push(sample));
        Ok(())
    })?;
    let scale = 1.0 / (d as f32).sqrt();
    let mut out = Vec::new();
    for layer in 0..layers {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        let trained: Vec<Vec<f32>> = samples[layer * g..(layer + 1) * g].par_iter().map(|samples| descend(samples, shape).0).collect();
        let mut tensors = RivalTensors::default();
        for (kv_head, params) in trained.iter().enumerate() {
            let projection = &projections[layer * g + kv_head];
            // Without a projection of its own, that of the start is part of W.
            let weight = |at: usize, matrix: &[f64], scale: f32| -> Vec<f32> {
                let own = &params[at..at + n * n];
                if dim > 0 {
                    return own.to_vec();
                }
                let mut to = vec![0.0f32; n * n];
                for (to, own) in to.chunks_exact_mut(n).zip(own.chunks_exact(n)) {
                    for (x, row) in own.iter().zip(matrix.chunks_exact(n)) {
                        to.iter_mut().zip(row).for_each(|(to, m)| *to += scale * x * *m as f32);
                    }
                }
                to
            };
            for head in 0..shape.heads {
                let at = shape.at(head);
                tensors.q_feature.extend(weight(at, &projection.q, scale));
                tensors.q_bias.extend(&params[at + n * n..at + shape.map()]);
                tensors.size.push(params[at + shape.map()].clamp(-60.0, 60.0).exp());
            }
            let at = shape.at(shape.heads);
            tensors.k_feature.extend(weight(at, &projection.k, 1.0));
            tensors.k_bias.extend(&params[at + n * n..]);
        }
        out.push(tensors);
        tell(layer as u64 + 1, layers as u64, &format!("training features in {n} dimensions"));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_base::rng::Rng;

    fn sample(shape: Shape, seed: u64) -> Sample {
        let mut rng = Rng::new(seed);
        let mut numbers = |count: usize| (0..count).map(|_| rng.normal() as f32).collect::<Vec<f32>>();
        let keys = numbers(20 * shape.n);
        let queries = (0..6).map(|i| {
            let far = 0..10 + i;
            let weights: Vec<f32> = numbers(far.len()).iter().map(|x| (2.0 * x).exp()).collect();
            let all = weights.iter().sum::<f32>() + 3.0;
            Query { head: i % shape.heads, q: numbers(shape.n), p: weights.iter().map(|w| w / all).collect(), far, near: 1.1 }
        });
        let queries = queries.collect();
        Sample { keys, places: (0..20).collect(), share: 2.0, queries }
    }

    #[test]
    fn gradients_of_features_are_differences_of_the_loss() {
        let shape = Shape { heads: 2, n: 3 };
        let sample = sample(shape, 3);
        let mut params: Vec<f32> = start(std::slice::from_ref(&sample), shape);
        let mut rng = Rng::new(4);
        params.iter_mut().for_each(|x| *x += 0.3 * rng.normal() as f32);
        let mut grad = vec![0.0; params.len()];
        loss_and_grad(&sample, shape, &params, &mut grad);
        let size = grad.iter().fold(0.0f32, |size, x| size.max(x.abs()));
        let mut scratch = vec![0.0; params.len()];
        for i in 0..params.len() {
            let mut at = |step: f32| {
                let mut moved = params.clone();
                moved[i] += step;
                f64::from(loss_and_grad(&sample, shape, &moved, &mut scratch))
            };
            let expected = (at(1e-2) - at(-1e-2)) / 2e-2;
            assert!((expected - f64::from(grad[i])).abs() < 3e-3 * f64::from(size), "{i}: {expected} {}", grad[i]);
        }
    }

    #[test]
    fn training_lowers_the_cross_entropy() {
        let shape = Shape { heads: 2, n: 4 };
        let samples = [sample(shape, 5), sample(shape, 6)];
        let (params, [before, after]) = descend(&samples, shape);
        assert!(after < before - 0.05 && params.iter().all(|x| x.is_finite()), "{before} {after}");
    }
}
