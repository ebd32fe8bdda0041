//! The far states in closed form.
//!
//! ```text
//! projection    V the top eigenvectors of Sk^½·Sq·Sk^½,   k' = Vᵀ·Sk^−½·k,   q' = Vᵀ·Sk^½·q/√d        so that q'·k' ≈ q·k/√d where it matters
//! spread        Σ = Sk^½·(1 − V·Vᵀ)·Sk^½/d: what the projection leaves out
//! weights       w = e^{q·μ/√d + g(γ·qᵀΣq, n)} · Σ_j a_j·y^j/j!,   y = q'·(k' − μ')
//! a, γ          non-negative least squares on the output: with near sums N, Z, far sums U_j, z_j and the true output y*,
//!               y − y* = (R + Σ_j a_j·R_j)/D,   R = N − Z·y*,  R_j = U_j − z_j·y*,  D = Z + Σ_j a_j·z_j, of which D is taken from the step before
//! ```

use std::sync::atomic::AtomicBool;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use termwise_attention::View;
use termwise_llama::Model;

use crate::calibrate::{Gathered, Moments, NEAR, QUERIES, pass, sampled, view};
use crate::kinds::{FAR_DIM, SINKS};
use crate::linalg::{eigen, nonnegative, product, roots};
use crate::{Error, Tell};

/// Orders of a far state.
const ORDERS: usize = 3;
/// γ that are tried.
const GAMMAS: [f64; 5] = [0.0, 0.25, 0.5, 0.75, 1.0];
/// Rounds in which the denominator is taken from the step before.
const ROUNDS: usize = 4;
/// Codes reach a little beyond the keys that were seen.
const MARGIN: f32 = 1.05;

/// The tensors that conversion adds to a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerTensors {
    /// [H, dim, d]
    pub q_dim: Vec<f32>,
    /// [G, dim, d]
    pub k_dim: Vec<f32>,
    /// [G, d, d]
    pub spread: Vec<f32>,
    /// γ of far states, [H].
    pub gamma: Vec<f32>,
    /// a of far states, [H, 3].
    pub coefficients: Vec<f32>,
    /// γ of far means, [H].
    pub mean_gamma: Vec<f32>,
    /// a of far means, [H].
    pub mean_coefficient: Vec<f32>,
    /// The middle of keys by channel, [G, d].
    pub code_centre: Vec<f32>,
    /// Half their range.
    pub code_range: Vec<f32>,
}

/// All that was fitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fits {
    /// Of the model and the contexts.
    pub identity: String,
    /// By layer.
    pub layers: Vec<LayerTensors>,
}

/// Projections of one kv head, in float64.
struct Projection {
    /// [dim, d], for scaled queries and for keys.
    q: Vec<f64>,
    k: Vec<f64>,
    /// For scaled queries [d, d].
    spread: Vec<f64>,
}

impl Projection {
    fn new(moments: &Moments, d: usize) -> Projection {
        let spread: Vec<f64> = moments.key_spread.iter().map(|x| x / moments.keys.max(1.0)).collect();
        let (root, inverse) = roots(&spread, d, 1e-6);
        let (_, vectors) = eigen(&product(&product(&root, &moments.queries, d), &root, d), d);
        let v = &vectors[..FAR_DIM.min(d) * d];
        let times = |matrix: &[f64]| {
            let mut out = vec![0.0; v.len()];
            for (v, to) in v.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
                v.iter().zip(matrix.chunks_exact(d)).for_each(|(v, row)| to.iter_mut().zip(row).for_each(|(to, m)| *to += v * m));
            }
            out
        };
        let q = times(&root);
        let mut left = spread;
        for row in q.chunks_exact(d) {
            for (to, x) in left.chunks_exact_mut(d).zip(row) {
                to.iter_mut().zip(row).for_each(|(to, y)| *to -= x * y);
            }
        }
        Projection { q, k: times(&inverse), spread: left }
    }
}

fn apply(matrix: &[f64], x: &[f64]) -> [f64; FAR_DIM] {
    let mut y = [0.0; FAR_DIM];
    y.iter_mut().zip(matrix.chunks_exact(x.len())).for_each(|(y, row)| *y = row.iter().zip(x).map(|(a, b)| a * b).sum());
    y
}

/// What the fit knows of one query.
struct Row {
    /// Products of R, R_0, R_1, R_2.
    gram: [[f64; ORDERS + 1]; ORDERS + 1],
    /// Z, z_0, z_1, z_2.
    sums: [f64; ORDERS + 1],
    /// qᵀΣq and the number of far keys.
    variance: f64,
    far: usize,
}

impl Row {
    /// Query t of a head; `None` where it has no far key. `prefix` are sums of keys up to each position, of the keys after the sinks.
    fn new(view: &View, t: usize, projection: &Projection, projected: &[[f64; FAR_DIM]], prefix: &[f64]) -> Option<Row> {
        let (d, e) = (view.d, view.e);
        let far = SINKS.min(t + 1)..(t + 1).saturating_sub(NEAR);
        if far.is_empty() {
            return None;
        }
        let q = &view.q[t * d..][..d];
        let n = far.len() as f64;
        let mean: Vec<f64> = (0..d).map(|i| (prefix[far.end * d + i] - prefix[far.start * d + i]) / n).collect();
        let centre: f64 = q.iter().zip(&mean).map(|(q, m)| q * m).sum();
        let (own, shift) = (apply(&projection.q, q), apply(&projection.k, &mean));
        let scores: Vec<f64> = view.k[..(t + 1) * d].chunks_exact(d).map(|k| q.iter().zip(k).map(|(q, k)| q * k).sum()).collect();
        let rho = scores.iter().copied().fold(centre, f64::max);
        // Near, then the orders of far keys; true sums beside.
        let (mut u, mut sums) = (vec![0.0; (ORDERS + 1) * e], [0.0; ORDERS + 1]);
        let (mut truth, mut z) = (vec![0.0; e], 0.0);
        for (s, &x) in scores.iter().enumerate() {
            let (value, weight) = (&view.v[s * e..][..e], (x - rho).exp());
            z += weight;
            truth.iter_mut().zip(value).for_each(|(to, v)| *to += weight * v);
            if !far.contains(&s) {
                sums[0] += weight;
                u[..e].iter_mut().zip(value).for_each(|(to, v)| *to += weight * v);
                continue;
            }
            let y: f64 = (0..FAR_DIM).map(|i| own[i] * (projected[s][i] - shift[i])).sum();
            let base = (centre - rho).exp();
            for (order, term) in [base, base * y, base * y * y / 2.0].into_iter().enumerate() {
                sums[order + 1] += term;
                u[(order + 1) * e..][..e].iter_mut().zip(value).for_each(|(to, v)| *to += term * v);
            }
        }
        for (u, sum) in u.chunks_exact_mut(e).zip(&sums) {
            u.iter_mut().zip(&truth).for_each(|(u, y)| *u -= sum * y / z);
        }
        let mut gram = [[0.0; ORDERS + 1]; ORDERS + 1];
        for (i, a) in u.chunks_exact(e).enumerate() {
            for (j, b) in u.chunks_exact(e).enumerate() {
                gram[i][j] = a.iter().zip(b).map(|(a, b)| a * b).sum();
            }
        }
        let variance =
            projection.spread.chunks_exact(d).zip(q).map(|(row, x)| x * row.iter().zip(q).map(|(a, b)| a * b).sum::<f64>()).sum();
        Some(Row { gram, sums, variance, far: far.len() })
    }

    /// What the far weights are multiplied by with this γ.
    fn factor(&self, gamma: f64) -> f64 {
        let (v, most) = (gamma * self.variance, 2.0 * (self.far as f64).ln());
        (if v <= most { 0.5 * v } else { (v * most).sqrt() - 0.5 * most }).exp()
    }

    fn denominator(&self, factor: f64, a: &[f64]) -> f64 {
        self.sums[0] + factor * a.iter().zip(&self.sums[1..]).map(|(a, z)| a * z).sum::<f64>()
    }

    /// ‖y − y*‖²
    fn error(&self, gamma: f64, a: &[f64]) -> f64 {
        let factor = self.factor(gamma);
        let with = |i: usize| if i == 0 { 1.0 } else { factor * a.get(i - 1).copied().unwrap_or(0.0) };
        let sum: f64 = (0..=ORDERS).flat_map(|i| (0..=ORDERS).map(move |j| (i, j))).map(|(i, j)| with(i) * with(j) * self.gram[i][j]).sum();
        sum / self.denominator(factor, a).powi(2)
    }
}

/// γ and a of the first so many orders, chosen on rows that were not fitted to.
fn solve(rows: &[Row], orders: usize) -> (f64, Vec<f64>) {
    let held_back = |i: usize| i % 4 == 3;
    let mut best = (f64::INFINITY, 0.0, vec![0.0; orders]);
    for gamma in GAMMAS {
        let mut a = vec![0.0; orders];
        a[0] = 1.0;
        for _ in 0..ROUNDS {
            let (mut g, mut b) = (vec![0.0; orders * orders], vec![0.0; orders]);
            for (_, row) in rows.iter().enumerate().filter(|(i, _)| !held_back(*i)) {
                let factor = row.factor(gamma);
                let weight = 1.0 / row.denominator(factor, &a).powi(2);
                for i in 0..orders {
                    b[i] -= weight * factor * row.gram[0][i + 1];
                    (0..orders).for_each(|j| g[i * orders + j] += weight * factor * factor * row.gram[i + 1][j + 1]);
                }
            }
            a = nonnegative(&g, &b);
        }
        let error: f64 = rows.iter().enumerate().filter(|(i, _)| held_back(*i)).map(|(_, row)| row.error(gamma, &a)).sum();
        if error < best.0 {
            best = (error, gamma, a);
        }
    }
    (best.1, best.2)
}

/// Fits every head of the model: a second pass over the contexts that were gathered from.
pub fn fit(model: &Model, contexts: &[Vec<u32>], gathered: &Gathered, stop: &AtomicBool, tell: Tell) -> Result<Fits, Error> {
    let config = &model.config;
    let (layers, h, g, d) = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let projections: Vec<Projection> = gathered.moments.par_iter().map(|moments| Projection::new(moments, d)).collect();
    let mut rows: Vec<Vec<Row>> = (0..layers * h).map(|_| Vec::new()).collect();
    pass(model, contexts, stop, tell, "fitting far states", &mut |index, seen| {
        let sample = sampled(index, contexts[index].len(), QUERIES);
        let found: Result<Vec<Vec<Vec<Row>>>, Error> = (0..g)
            .into_par_iter()
            .map(|kv_head| -> Result<Vec<Vec<Row>>, Error> {
                let projection = &projections[seen.layer * g + kv_head];
                let mut shared: Option<(Vec<[f64; FAR_DIM]>, Vec<f64>)> = None;
                (kv_head * (h / g)..(kv_head + 1) * (h / g))
                    .map(|head| -> Result<Vec<Row>, Error> {
                        let view = view(seen, head)?;
                        let (projected, prefix) = shared.get_or_insert_with(|| {
                            let projected = view.k.chunks_exact(d).map(|k| apply(&projection.k, k)).collect();
                            let mut prefix = vec![0.0; d];
                            for (s, k) in view.k.chunks_exact(d).enumerate() {
                                let last: Vec<f64> = prefix[s * d..].iter().zip(k).map(|(sum, k)| sum + k).collect();
                                prefix.extend(last);
                            }
                            (projected, prefix)
                        });
                        Ok(sample.iter().filter_map(|&t| Row::new(&view, t, projection, projected, prefix)).collect())
                    })
                    .collect()
            })
            .collect();
        for (head, own) in found?.into_iter().flatten().enumerate() {
            rows[seen.layer * h + head].extend(own);
        }
        Ok(())
    })?;
    let solved: Vec<[(f64, Vec<f64>); 2]> = rows.par_iter().map(|rows| [solve(rows, ORDERS), solve(rows, 1)]).collect();
    let narrow = |x: &[f64], factor: f64| x.iter().map(|x| (x * factor) as f32).collect::<Vec<f32>>();
    let layers = (0..layers).map(|layer| {
        let (own, heads) = (&projections[layer * g..(layer + 1) * g], &solved[layer * h..(layer + 1) * h]);
        let moments = &gathered.moments[layer * g..(layer + 1) * g];
        // Queries come without the scale of scores, which is in these numbers.
        let scale = 1.0 / (d as f64).sqrt();
        let ranges = || moments.iter().flat_map(|moments| moments.low.iter().zip(&moments.high));
        LayerTensors {
            q_dim: (0..h).flat_map(|head| narrow(&own[head / (h / g)].q, scale)).collect(),
            k_dim: own.iter().flat_map(|projection| narrow(&projection.k, 1.0)).collect(),
            spread: own.iter().flat_map(|projection| narrow(&projection.spread, scale * scale)).collect(),
            gamma: heads.iter().map(|[(gamma, _), _]| *gamma as f32).collect(),
            coefficients: heads.iter().flat_map(|[(_, a), _]| narrow(a, 1.0)).collect(),
            mean_gamma: heads.iter().map(|[_, (gamma, _)]| *gamma as f32).collect(),
            mean_coefficient: heads.iter().map(|[_, (_, a)]| a[0] as f32).collect(),
            code_centre: ranges().map(|(low, high)| 0.5 * (low + high)).collect(),
            code_range: ranges().map(|(low, high)| (0.5 * MARGIN * (high - low)).max(1e-3)).collect(),
        }
    });
    Ok(Fits { identity: gathered.identity.clone(), layers: layers.collect() })
}
