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
use termwise_llama::{Config, Model};

use crate::calibrate::{Gathered, Moments, NEAR, QUERIES, pass, sampled, view};
use crate::kinds::{FAR_DIM, Kind, SINKS};
use crate::linalg::{eigen, nonnegative, product, roots};
use crate::rivals::{Rival, RivalTensors};
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
    /// A of queries, the scale of scores in it, [G, d, d]: the first rows are the projection to so many dimensions.
    pub q_dim: Vec<f32>,
    /// A of keys, [G, d, d].
    pub k_dim: Vec<f32>,
    /// Covariance of keys times the squared scale of scores, [G, d, d]; a projection holds a part of it.
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fits {
    /// Of the model and the contexts.
    pub identity: String,
    /// By layer.
    pub layers: Vec<LayerTensors>,
    /// Positions that codes were made to hold, where that is more than was fitted to.
    #[serde(skip)]
    pub(crate) reach: Option<usize>,
    /// Tensors of rivals, as far as they were asked for.
    #[serde(skip)]
    pub rivals: Vec<Rival>,
}

/// Projections of one kv head, in float64.
pub(crate) struct Projection {
    /// [d, d], for scaled queries and for keys; the first rows are the projection to so many dimensions.
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    /// Covariance of keys [d, d].
    spread: Vec<f64>,
}

impl Projection {
    pub fn new(moments: &Moments, d: usize) -> Projection {
        let spread: Vec<f64> = moments.key_spread.iter().map(|x| x / moments.keys.max(1.0)).collect();
        let (root, inverse) = roots(&spread, d, 1e-6);
        let (_, v) = eigen(&product(&product(&root, &moments.queries, d), &root, d), d);
        Projection { q: product(&v, &root, d), k: product(&v, &inverse, d), spread }
    }

    /// What the first so many dimensions leave out of the covariance.
    fn left(&self, dim: usize, d: usize) -> Vec<f64> {
        let mut left = self.spread.clone();
        for row in self.q.chunks_exact(d).take(dim) {
            for (to, x) in left.chunks_exact_mut(d).zip(row) {
                to.iter_mut().zip(row).for_each(|(to, y)| *to -= x * y);
            }
        }
        left
    }
}

/// The first so many coordinates of a projection.
pub(crate) fn apply(matrix: &[f64], dim: usize, x: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(x.len()).take(dim).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
}

/// Which keys of a position are far, and in how many dimensions they are seen.
#[derive(Clone, Copy)]
struct Places {
    sinks: usize,
    near: usize,
    dim: usize,
}

/// What queries of one kv head share: its keys projected [T, dim], sums of keys up to each position [T + 1, d], and what the projection leaves out.
struct Shared<'a> {
    projection: &'a Projection,
    left: Vec<f64>,
    projected: Vec<f64>,
    prefix: Vec<f64>,
}

impl<'a> Shared<'a> {
    fn new(view: &View, projection: &'a Projection, dim: usize) -> Shared<'a> {
        let d = view.d;
        let projected = view.k.chunks_exact(d).flat_map(|k| apply(&projection.k, dim, k)).collect();
        let mut prefix = vec![0.0; d];
        for (s, k) in view.k.chunks_exact(d).enumerate() {
            let last: Vec<f64> = prefix[s * d..].iter().zip(k).map(|(sum, k)| sum + k).collect();
            prefix.extend(last);
        }
        Shared { projection, left: projection.left(dim, d), projected, prefix }
    }
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
    /// Query t of a head; `None` where it has no far key.
    fn new(view: &View, t: usize, shared: &Shared, places: Places) -> Option<Row> {
        let (d, e, dim) = (view.d, view.e, places.dim);
        let Shared { projection, left, projected, prefix } = shared;
        let far = places.sinks.min(t + 1)..(t + 1).saturating_sub(places.near);
        if far.is_empty() {
            return None;
        }
        let q = &view.q[t * d..][..d];
        let n = far.len() as f64;
        let mean: Vec<f64> = (0..d).map(|i| (prefix[far.end * d + i] - prefix[far.start * d + i]) / n).collect();
        let centre: f64 = q.iter().zip(&mean).map(|(q, m)| q * m).sum();
        let (own, shift) = (apply(&projection.q, dim, q), apply(&projection.k, dim, &mean));
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
            let keys = &projected[s * dim..][..dim];
            let y: f64 = own.iter().zip(keys).zip(&shift).map(|((q, k), shift)| q * (k - shift)).sum();
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
        let variance = left.chunks_exact(d).zip(q).map(|(row, x)| x * row.iter().zip(q).map(|(a, b)| a * b).sum::<f64>()).sum();
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

/// Rows of sampled queries of every head, [layers·H].
fn gather_rows(
    model: &Model,
    contexts: &[Vec<u32>],
    projections: &[Projection],
    (places, queries): (Places, usize),
    stop: &AtomicBool,
    (tell, what): (Tell, &str),
) -> Result<Vec<Vec<Row>>, Error> {
    let config = &model.config;
    let (layers, h, g) = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads);
    let mut rows: Vec<Vec<Row>> = (0..layers * h).map(|_| Vec::new()).collect();
    pass(model, contexts, stop, tell, what, &mut |index, seen| {
        let sample = sampled(index, contexts[index].len(), queries);
        let found: Result<Vec<Vec<Vec<Row>>>, Error> = (0..g)
            .into_par_iter()
            .map(|kv_head| -> Result<Vec<Vec<Row>>, Error> {
                let projection = &projections[seen.layer * g + kv_head];
                let mut shared: Option<Shared> = None;
                (kv_head * (h / g)..(kv_head + 1) * (h / g))
                    .map(|head| -> Result<Vec<Row>, Error> {
                        let view = view(seen, head)?;
                        let shared = shared.get_or_insert_with(|| Shared::new(&view, projection, places.dim));
                        Ok(sample.iter().filter_map(|&t| Row::new(&view, t, shared, places)).collect())
                    })
                    .collect()
            })
            .collect();
        for (head, own) in found?.into_iter().flatten().enumerate() {
            rows[seen.layer * h + head].extend(own);
        }
        Ok(())
    })?;
    Ok(rows)
}

/// The projections of all kv heads.
pub(crate) fn projections(gathered: &Gathered, d: usize) -> Vec<Projection> {
    gathered.moments.par_iter().map(|moments| Projection::new(moments, d)).collect()
}

fn narrow(x: &[f64], factor: f64) -> Vec<f32> {
    x.iter().map(|x| (x * factor) as f32).collect()
}

/// Fits every head of the model: a second pass over the contexts that were gathered from.
pub fn fit(model: &Model, contexts: &[Vec<u32>], gathered: &Gathered, stop: &AtomicBool, tell: Tell) -> Result<Fits, Error> {
    let config = &model.config;
    let (layers, h, g, d) = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let projections = projections(gathered, d);
    let places = Places { sinks: SINKS, near: NEAR, dim: FAR_DIM.min(d) };
    let rows = gather_rows(model, contexts, &projections, (places, QUERIES), stop, (tell, "fitting far states"))?;
    let solved: Vec<[(f64, Vec<f64>); 2]> = rows.par_iter().map(|rows| [solve(rows, ORDERS), solve(rows, 1)]).collect();
    let layers = (0..layers).map(|layer| {
        let (own, heads) = (&projections[layer * g..(layer + 1) * g], &solved[layer * h..(layer + 1) * h]);
        let moments = &gathered.moments[layer * g..(layer + 1) * g];
        // Queries come without the scale of scores, which is in these numbers.
        let scale = 1.0 / (d as f64).sqrt();
        let (code_centre, code_range) =
            codes(moments.iter().flat_map(|moments| moments.low.iter().copied().zip(moments.high.iter().copied())));
        LayerTensors {
            q_dim: own.iter().flat_map(|projection| narrow(&projection.q, scale)).collect(),
            k_dim: own.iter().flat_map(|projection| narrow(&projection.k, 1.0)).collect(),
            spread: own.iter().flat_map(|projection| narrow(&projection.spread, scale * scale)).collect(),
            gamma: heads.iter().map(|[(gamma, _), _]| *gamma as f32).collect(),
            coefficients: heads.iter().flat_map(|[(_, a), _]| narrow(a, 1.0)).collect(),
            mean_gamma: heads.iter().map(|[_, (gamma, _)]| *gamma as f32).collect(),
            mean_coefficient: heads.iter().map(|[_, (_, a)]| a[0] as f32).collect(),
            code_centre,
            code_range,
        }
    });
    Ok(Fits { identity: gathered.identity.clone(), layers: layers.collect(), reach: None, rivals: Vec::new() })
}

/// The middle and half the width of ranges, with a margin.
fn codes(ranges: impl Iterator<Item = (f32, f32)>) -> (Vec<f32>, Vec<f32>) {
    ranges.map(|(low, high)| (0.5 * (low + high), (0.5 * MARGIN * (high - low)).max(1e-3))).unzip()
}

impl Fits {
    /// Lets codes hold the keys of so many positions, where that is more than the contexts had that were fitted to.
    pub fn reach(&mut self, config: &Config, gathered: &Gathered, fitted: usize, positions: usize) -> Result<(), Error> {
        if positions <= fitted {
            return Ok(());
        }
        let g = config.num_key_value_heads;
        for (layer, own) in self.layers.iter_mut().enumerate() {
            let rope = config.rope(layer, positions)?;
            let rotated = config.heads(layer).iter().any(|head| head.rope);
            let moments = &gathered.moments[layer * g..(layer + 1) * g];
            let ranges = moments.iter().flat_map(|moments| moments.ranges(if rotated { rope.frequencies() } else { &[] }, positions));
            (own.code_centre, own.code_range) = codes(ranges);
        }
        self.reach = Some(positions);
        Ok(())
    }

    /// What measurements with these kinds depend on.
    pub fn identity_for(&self, kinds: &[Kind]) -> String {
        let coded = self.reach.filter(|_| kinds.iter().any(|kind| kind.bits < 32));
        coded.map_or(self.identity.clone(), |positions| format!("{} codes of {positions} positions", self.identity))
    }
}

/// Fits γ and coefficients of a polynomial over all positions but the query's own, by layer: as those of far states, by fewer queries.
pub(crate) fn fit_all_positions(
    model: &Model,
    contexts: &[Vec<u32>],
    gathered: &Gathered,
    dim: usize,
    stop: &AtomicBool,
    tell: Tell,
) -> Result<Vec<RivalTensors>, Error> {
    let config = &model.config;
    let projections = projections(gathered, config.head_dim);
    let places = Places { sinks: 0, near: 1, dim };
    let what = format!("fitting polynomials in {dim} dimensions");
    let rows = gather_rows(model, contexts, &projections, (places, QUERIES / 4), stop, (tell, &what))?;
    let solved: Vec<(f64, Vec<f64>)> = rows.par_iter().map(|rows| solve(rows, ORDERS)).collect();
    let of_layer = |heads: &[(f64, Vec<f64>)]| RivalTensors {
        gamma: heads.iter().map(|(gamma, _)| *gamma as f32).collect(),
        coefficients: heads.iter().flat_map(|(_, a)| narrow(a, 1.0)).collect(),
        ..RivalTensors::default()
    };
    Ok(solved.chunks_exact(config.num_attention_heads).map(of_layer).collect())
}
