//! Attention of one query over one block of keys: scores, weights, U += Σ_s w_s·v_s and z += Σ_s w_s.
//!
//! Keys are transposed, [width, pitch], so the scores of a block are sums of vectors over keys; values are rows, [keys, ep]. Weights are computed by
//! the row kernels of the fused engine, so clamp, decay and kernel have the same meaning there.

use crate::Kernel;
use termwise_kernels::real::larger;
use termwise_kernels::score_rows::{DecayRow, ForwardRow, Rescale, Visible, soft_cap};
use termwise_kernels::simd::{Simd, Task};

/// Keys of a block: the tile of the fused engine, whose row kernels have their fastest form for it.
pub(crate) const BLOCK: usize = 128;

/// Data of one head for each key, in addition to the shared key and value; empty if its variant has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PerKey {
    /// I_s·κ_s
    pub weights: Vec<f32>,
    /// c_s
    pub log_decay: Vec<f64>,
}

impl PerKey {
    pub fn bytes(&self) -> usize {
        4 * self.weights.len() + 8 * self.log_decay.len()
    }

    pub fn clear(&mut self) {
        self.weights.clear();
        self.log_decay.clear();
    }

    /// The weight of the key at index `at`, 1 if keys have none.
    pub fn weight(&self, at: usize) -> f32 {
        self.weights.get(at).copied().unwrap_or(1.0)
    }

    /// e^{c − c_s} of the key at index `at`, 1 if it does not decay.
    pub fn decay(&self, at: usize, c: f64) -> f32 {
        self.log_decay.get(at).map_or(1.0, |c_s| (c - c_s).exp() as f32)
    }

    /// Sets the weight and c of the key at index `at`; `None` if keys have none.
    pub fn set(&mut self, at: usize, weight: Option<f32>, log_decay: Option<f64>) {
        if let Some(weight) = weight {
            put(&mut self.weights, at, weight);
        }
        if let Some(c) = log_decay {
            put(&mut self.log_decay, at, c);
        }
    }
}

fn put<T: Copy + Default>(values: &mut Vec<T>, at: usize, value: T) {
    if values.len() <= at {
        values.resize(at + 1, T::default());
    }
    values[at] = value;
}

/// One block of keys and values.
pub(crate) struct KeyBlock<'a> {
    /// [width, pitch]; readable for whole vectors after the last key.
    pub keys: &'a [f32],
    pub pitch: usize,
    /// [keys, ep]
    pub values: &'a [f32],
    /// Keys that the query sees.
    pub visible: Visible,
    /// Per-key data of the query's head, and the index of the first key of the block in it.
    pub per_key: &'a PerKey,
    pub first: usize,
}

/// One query of one head, and its sums over the blocks so far.
pub(crate) struct Query<'a> {
    /// The prepared query.
    pub q: &'a [f32],
    /// With the learned coefficients of the head.
    pub kernel: &'a Kernel,
    /// Soft cap of scores.
    pub cap: Option<f32>,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// How the row is kept within float32.
    pub rescale: Rescale,
    /// c_t
    pub log_decay: f64,
    /// U [ep], zero before the first block.
    pub u: &'a mut [f32],
    /// z, ρ and the largest score.
    pub sums: &'a mut QuerySums,
}

/// The sums of one query other than U.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuerySums {
    /// z spread over the lanes of a vector.
    pub lanes: [f32; 16],
    /// ρ
    pub rho: f32,
    /// The largest |score| before the clamp.
    pub largest: f32,
}

impl QuerySums {
    /// Before the first key. A sink b acts like a key: the running maximum starts with it.
    pub fn new(rescale: Rescale, sink: Option<f32>) -> QuerySums {
        let rho = sink.filter(|_| rescale == Rescale::SubtractMax).unwrap_or(rescale.start());
        QuerySums { lanes: [0.0; 16], rho, largest: 0.0 }
    }

    pub fn z(&self) -> f32 {
        self.lanes.iter().sum()
    }
}

impl Query<'_> {
    /// Adds one block to U and z. Leaves the weights of the block in `x`.
    #[inline(always)]
    pub fn attend<S: Simd>(&mut self, simd: S, block: &KeyBlock, x: &mut [f32; BLOCK]) {
        simd.call(Attend { query: self, block, x });
    }
}

/// [`Query::attend`], compiled once for all callers.
struct Attend<'a, 'b> {
    query: &'a mut Query<'b>,
    block: &'a KeyBlock<'a>,
    x: &'a mut [f32; BLOCK],
}

impl Task for Attend<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Attend { query, block, x } = self;
        let (first, n) = (block.first, block.visible.until);
        if n == 0 {
            return;
        }
        if block.pitch == BLOCK && n == BLOCK {
            whole_scores(simd, query.q, block.keys, x);
        } else {
            scores(simd, query.q, block, x);
        }
        query.sums.largest = largest_score(simd, block.visible, x, query.sums.largest);
        let mut differences = [0.0f32; BLOCK];
        let PerKey { weights, log_decay } = block.per_key;
        let mut decay = None;
        if !log_decay.is_empty() {
            for (difference, c) in differences.iter_mut().zip(&log_decay[first..first + n]) {
                *difference = (c - query.log_decay) as f32;
            }
            decay = Some(DecayRow { row: 0.0, columns: &differences });
        }
        let mut padded = [0.0f32; BLOCK];
        let key_weights = match weights.get(first..first + BLOCK) {
            _ if weights.is_empty() => None,
            Some(whole) => Some(whole),
            None => {
                padded[..n].copy_from_slice(&weights[first..first + n]);
                Some(&padded[..])
            }
        };
        if let Some(cap) = query.cap {
            soft_cap(simd, x, cap);
        }
        let rho = query.rescale.of(query.sums.rho);
        let sums = &mut query.sums.lanes;
        let row = ForwardRow { x: &mut *x, visible: block.visible, clamp: query.clamp, decay, rho, sums, key_weights };
        if let Some((now, factor)) = query.kernel.forward_row(simd, row) {
            query.sums.rho = now;
            query.u.iter_mut().for_each(|u| *u *= factor);
        }
        weighted_sum(simd, &x[..n], block.values, query.u);
    }
}

/// x_s = Σ_j q_j·K_js over a whole block [width, BLOCK].
#[inline(always)]
fn whole_scores<S: Simd>(simd: S, q: &[f32], keys: &[f32], x: &mut [f32; BLOCK]) {
    // Half of the block at a time keeps every accumulator in a register, whatever the vectors' width.
    const HALF: usize = BLOCK / 2;
    for half in [0, HALF] {
        let mut sums = [simd.splat(0.0); HALF / 8];
        let vectors = HALF / S::LANES;
        for (j, &q) in q.iter().enumerate() {
            let (q, row) = (simd.splat(q), &keys[j * BLOCK + half..][..HALF]);
            for (i, sum) in sums[..vectors].iter_mut().enumerate() {
                *sum = simd.fma(q, simd.load_at(row, i * S::LANES), *sum);
            }
        }
        for (i, &sum) in sums[..vectors].iter().enumerate() {
            simd.store_at(x, half + i * S::LANES, sum);
        }
    }
}

/// x_s = Σ_j q_j·K_js over the first keys of a block, 0 after them.
#[inline(always)]
fn scores<S: Simd>(simd: S, q: &[f32], block: &KeyBlock, x: &mut [f32; BLOCK]) {
    let (keys, pitch, n) = (block.keys, block.pitch, block.visible.until);
    x[n / S::LANES * S::LANES..].fill(0.0);
    for start in (0..n).step_by(4 * S::LANES) {
        let vectors = (n - start).div_ceil(S::LANES).min(4);
        let mut sums = [simd.splat(0.0); 4];
        if vectors == 4 {
            for (j, &q) in q.iter().enumerate() {
                let (q, row) = (simd.splat(q), &keys[j * pitch + start..][..4 * S::LANES]);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.fma(q, simd.load_at(row, i * S::LANES), *sum);
                }
            }
        } else {
            for (j, &q) in q.iter().enumerate() {
                let (q, row) = (simd.splat(q), &keys[j * pitch + start..][..vectors * S::LANES]);
                for (i, sum) in sums[..vectors].iter_mut().enumerate() {
                    *sum = simd.fma(q, simd.load_at(row, i * S::LANES), *sum);
                }
            }
        }
        for (i, &sum) in sums[..vectors].iter().enumerate() {
            simd.store_at(x, start + i * S::LANES, sum);
        }
    }
}

/// The largest |x| of the visible keys and of `so_far`; NaN if any is NaN.
#[inline(always)]
fn largest_score<S: Simd>(simd: S, seen: Visible, x: &[f32; BLOCK], so_far: f32) -> f32 {
    // `max` returns its second argument if one is NaN: it keeps a NaN of `so_far` and drops one of x, which the sum of 0·x finds.
    let (mut largest, mut zeros) = (simd.splat(so_far), simd.splat(0.0));
    for i in (0..seen.until).step_by(S::LANES) {
        let x = seen.select(simd, i, simd.load_at(x, i), simd.splat(0.0));
        largest = simd.max(simd.abs(x), largest);
        zeros = simd.fma(x, simd.splat(0.0), zeros);
    }
    if simd.sum(zeros).is_nan() {
        return x.iter().enumerate().filter(|(s, _)| seen.contains(*s)).fold(so_far, |largest, (_, x)| larger(largest, x.abs()));
    }
    simd.maximum(largest)
}

/// u += Σ_s w_s·V_s
#[inline(always)]
fn weighted_sum<S: Simd>(simd: S, weights: &[f32], values: &[f32], u: &mut [f32]) {
    let ep = u.len();
    let mut column = 0;
    while column < ep {
        let vectors = ((ep - column) / S::LANES).min(4);
        match vectors {
            4 => panel::<S, 4>(simd, weights, values, ep, column, u),
            2 | 3 => panel::<S, 2>(simd, weights, values, ep, column, u),
            _ => panel::<S, 1>(simd, weights, values, ep, column, u),
        }
        column += if vectors == 3 { 2 } else { vectors } * S::LANES;
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "constant bounds and plain indices keep every accumulator in a register")]
fn panel<S: Simd, const P: usize>(simd: S, weights: &[f32], values: &[f32], ep: usize, column: usize, u: &mut [f32]) {
    let mut sums = [[simd.splat(0.0); P]; 2];
    for (s, pair) in weights.chunks(2).enumerate() {
        for (lane, &w) in pair.iter().enumerate() {
            let row = &values[(2 * s + lane) * ep + column..][..P * S::LANES];
            let w = simd.splat(w);
            for p in 0..P {
                sums[lane][p] = simd.fma(w, simd.load_at(row, p * S::LANES), sums[lane][p]);
            }
        }
    }
    for p in 0..P {
        let at = column + p * S::LANES;
        let sum = simd.add(sums[0][p], sums[1][p]);
        simd.store_at(u, at, simd.add(simd.load_at(u, at), sum));
    }
}
