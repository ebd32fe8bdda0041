//! Forward and backward pass of one row of scores within a tile.
//!
//! A row contains the scores of one query with the keys of a tile, masked by [`Visible`]. Masked lanes do not enter a maximum, a sum or a branch, so later
//! tokens cannot change the bits of an earlier output.

use crate::TILE;
use crate::simd::Simd;

/// Rescaling of the weights of a row to w(x)·e^{−ρ}, which does not overflow float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rescale {
    /// No rescaling.
    None,
    /// ρ is subtracted from the scores: w(x)·e^{−ρ} = w(x − ρ). ρ follows the row maximum, as in online softmax.
    SubtractMax,
    /// Weights are multiplied by e^{−ρ}. ρ is zero until weights approach the largest float32.
    Multiply,
}

/// Weights up to e^40 are not rescaled: float32 represents their squares and long sums of them.
pub const UNSCALED_LOG_LIMIT: f32 = 40.0;

/// Polynomials of lower degree are not rescaled: they reach e^40 only for scores above 300.
pub const SCALED_FROM: usize = 8;

impl Rescale {
    /// ρ before the first key.
    pub fn start(self) -> f32 {
        if self == Rescale::SubtractMax { f32::NEG_INFINITY } else { 0.0 }
    }

    /// `rho`, or None for [`Rescale::None`].
    pub fn of(self, rho: f32) -> Option<f32> {
        (self != Rescale::None).then_some(rho)
    }
}

/// A score function w(x) on vectors.
pub trait ScoreKernel {
    /// Rescaling of rows, if a denominator or norm of the variant cancels it.
    const RESCALE: Rescale = Rescale::None;

    /// w(x)
    fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V;
    /// w(x) and w'(x)
    fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V);

    /// For [`Rescale::Multiply`]: the largest |x| for which ρ = 0 suffices.
    fn unscaled_limit(&self) -> f32 {
        f32::INFINITY
    }
    /// For [`Rescale::Multiply`]: log of an upper bound of |w(x)| for |x| ≤ `reach`.
    fn log_bound(&self, _reach: f32) -> f32 {
        0.0
    }
    /// For [`Rescale::Multiply`]: w(x)·e^{−ρ} and w'(x)·e^{−ρ}
    fn scaled<S: Simd>(&self, simd: S, x: S::V, _rho: f32) -> (S::V, S::V) {
        self.values_and_slopes(simd, x)
    }
}

/// The visible keys of a row within a tile: `from..until`, and the attention sinks `0..sinks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visible {
    /// First key of the sliding window.
    pub from: usize,
    /// First key past the window.
    pub until: usize,
    /// End of the attention sinks, at most `until`.
    pub sinks: usize,
}

impl Visible {
    /// The first n keys.
    pub fn first(n: usize) -> Visible {
        Visible { from: 0, until: n, sinks: 0 }
    }

    /// The visible keys among the first n.
    #[inline(always)]
    fn within(self, n: usize) -> Visible {
        Visible { until: self.until.min(n), ..self }
    }

    /// Whether key s is visible.
    pub fn contains(self, s: usize) -> bool {
        s < self.until && (s >= self.from || s < self.sinks)
    }

    /// `v` in visible lanes and `other` in masked lanes, for the vector that starts at key j < `until`.
    #[inline(always)]
    pub fn select<S: Simd>(self, simd: S, j: usize, v: S::V, other: S::V) -> S::V {
        let v = simd.select(simd.first(self.until - j), v, other);
        if self.from <= j.max(self.sinks) {
            return v;
        }
        let sinks = simd.select(simd.first(self.sinks.saturating_sub(j)), v, other);
        simd.select(simd.first(self.from - j), sinks, v)
    }

    /// Whether all keys of a full tile are visible.
    fn is_whole(self) -> bool {
        self.until >= TILE && self.from <= self.sinks
    }
}

/// Decay of a row: log M_s = `row` − `columns[s]`.
pub struct DecayRow<'a> {
    /// c_t minus the base of the tile.
    pub row: f32,
    /// c_s minus the base of the tile, for each key of the tile.
    pub columns: &'a [f32],
}

/// The forward pass over one row.
pub struct ForwardRow<'a> {
    /// Scores; replaced by the weights of the values. The length is a multiple of the vector length.
    pub x: &'a mut [f32],
    /// Visible keys.
    pub visible: Visible,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayRow<'a>>,
    /// ρ so far, if the row is rescaled.
    pub rho: Option<f32>,
    /// Partial sums of the weights so far, one per lane.
    pub sums: &'a mut [f32; 16],
    /// Additional factor of each value.
    pub key_weights: Option<&'a [f32]>,
}

/// ρ follows the row maximum only if it has grown by more than this. Weights up to e^8 are harmless, and most tiles then need neither a maximum over lanes
/// nor rescaling.
const SLACK: f32 = 8.0;

impl ForwardRow<'_> {
    /// Runs the pass. If ρ changed, returns the new ρ and the factor e^{ρ before − ρ now} for earlier sums.
    ///
    /// # Panics
    /// If the row is longer than a tile or not a whole number of vectors, or another slice is shorter than the row.
    #[inline(always)]
    pub fn run<S: Simd, K: ScoreKernel>(self, simd: S, kernel: &K) -> Option<(f32, f32)> {
        // Most rows are full and have neither clamp nor decay. Compiled separately, their loops have no branches.
        if self.x.len() == TILE && self.visible.is_whole() {
            if self.clamp == f32::INFINITY && self.decay.is_none() && self.key_weights.is_none() {
                self.pass::<S, K, true, true>(simd, kernel)
            } else {
                self.pass::<S, K, true, false>(simd, kernel)
            }
        } else {
            self.pass::<S, K, false, false>(simd, kernel)
        }
    }

    #[inline(always)]
    fn pass<S: Simd, K: ScoreKernel, const WHOLE: bool, const PLAIN: bool>(self, simd: S, kernel: &K) -> Option<(f32, f32)> {
        let lanes = S::LANES;
        let n = if WHOLE { TILE } else { self.x.len() };
        check_row::<S>(n, if PLAIN { [None; 3] } else { [self.decay.as_ref().map(|decay| decay.columns), self.key_weights, None] });
        let visible = self.visible.within(n);
        let vectors = if WHOLE { TILE / lanes } else { visible.until.div_ceil(lanes) };
        let zero = simd.splat(0.0);
        let x = self.x.as_mut_ptr();
        let scores = RowScores::<WHOLE, PLAIN> { x, clamp: self.clamp, visible, decay: if PLAIN { None } else { self.decay.as_ref() } };
        let key_weights = if PLAIN { None } else { self.key_weights };
        // SAFETY: the array has 16 ≥ LANES values.
        let mut sum = unsafe { simd.load(self.sums.as_ptr()) };
        let mut change = None;
        let (shifts, scales) = shifts_and_scales::<K>(self.rho);
        let mut rho = self.rho.unwrap_or(0.0);
        if shifts || scales {
            let lowest = simd.splat(f32::NEG_INFINITY);
            let mut highest = lowest;
            for i in 0..vectors {
                let j = i * lanes;
                let size = if shifts { scores.decayed(simd, j) } else { simd.abs(scores.clamped(simd, j)) };
                highest = simd.max(scores.mask(simd, j, size, lowest), highest);
            }
            let unscaled_limit = if shifts { rho + SLACK } else { kernel.unscaled_limit() };
            if simd.any(simd.gt(highest, simd.splat(unscaled_limit))) {
                let highest = simd.maximum(highest);
                let now = if shifts { highest } else { kernel.log_bound(highest) };
                if shifts || now > rho + SLACK {
                    let factor = (rho - now).exp();
                    sum = simd.mul(sum, simd.splat(factor));
                    change = Some((now, factor));
                    rho = now;
                }
            }
        }
        for i in 0..vectors {
            let j = i * lanes;
            let mut w = if shifts {
                kernel.values(simd, simd.sub(scores.decayed(simd, j), simd.splat(rho)))
            } else {
                let x = scores.mask(simd, j, scores.clamped(simd, j), zero);
                let w = if scales && rho != 0.0 { kernel.scaled(simd, x, rho).0 } else { kernel.values(simd, x) };
                if PLAIN { w } else { simd.mul(w, scores.decay_factor(simd, j)) }
            };
            w = scores.mask(simd, j, w, zero);
            sum = simd.add(sum, w);
            if let Some(weights) = key_weights {
                // SAFETY: j + LANES ≤ n, because n is a multiple of LANES, and `check_row` ensures that `weights` has n values.
                w = simd.mul(w, unsafe { simd.load(weights.as_ptr().add(j)) });
            }
            // SAFETY: j + LANES ≤ n, the length of x.
            unsafe { simd.store(x.add(j), w) };
        }
        // SAFETY: the array has 16 ≥ LANES values.
        unsafe { simd.store(self.sums.as_mut_ptr(), sum) };
        for j in (vectors * lanes..n).step_by(lanes) {
            // SAFETY: j + LANES ≤ n, because n is a multiple of LANES.
            unsafe { simd.store(x.add(j), zero) };
        }
        change
    }
}

/// Checks that a row is a whole number of vectors, at most a tile, and that the other slices are at least as long.
#[inline(always)]
fn check_row<S: Simd>(len: usize, others: [Option<&[f32]>; 3]) {
    assert!(
        len <= TILE && len.is_multiple_of(S::LANES) && others.iter().flatten().all(|other| other.len() >= len),
        "a row of {len} scores is not a whole number of vectors of at most {TILE}, or its slices differ in length"
    );
}

/// Whether ρ is subtracted from scores, and whether weights are multiplied by e^{−ρ}. At most one of the two is true.
#[inline(always)]
fn shifts_and_scales<K: ScoreKernel>(rho: Option<f32>) -> (bool, bool) {
    (K::RESCALE == Rescale::SubtractMax && rho.is_some(), K::RESCALE == Rescale::Multiply && rho.is_some())
}

/// The scores of a row, read by vectors. `WHOLE` rows have no masked lanes; `PLAIN` rows have neither clamp nor decay.
///
/// Invariant: x and the columns of the decay are valid for every j + LANES that is passed to a method.
#[derive(Clone, Copy)]
struct RowScores<'a, const WHOLE: bool, const PLAIN: bool> {
    x: *const f32,
    clamp: f32,
    visible: Visible,
    decay: Option<&'a DecayRow<'a>>,
}

impl<const WHOLE: bool, const PLAIN: bool> RowScores<'_, WHOLE, PLAIN> {
    /// `v` in visible lanes and `other` in masked lanes.
    #[inline(always)]
    fn mask<S: Simd>(&self, simd: S, j: usize, v: S::V, other: S::V) -> S::V {
        if WHOLE { v } else { self.visible.select(simd, j, v, other) }
    }

    /// min(x, c)
    #[inline(always)]
    fn clamped<S: Simd>(&self, simd: S, j: usize) -> S::V {
        // SAFETY: the invariant of this type.
        let x = unsafe { simd.load(self.x.add(j)) };
        if PLAIN { x } else { simd.min(simd.splat(self.clamp), x) }
    }

    /// min(x, c) + log M
    #[inline(always)]
    fn decayed<S: Simd>(&self, simd: S, j: usize) -> S::V {
        match self.decay {
            Some(decay) => simd.add(self.clamped(simd, j), decay.log(simd, j)),
            None => self.clamped(simd, j),
        }
    }

    /// M
    #[inline(always)]
    fn decay_factor<S: Simd>(&self, simd: S, j: usize) -> S::V {
        match self.decay {
            Some(decay) => simd.exp(decay.log(simd, j)),
            None => simd.splat(1.0),
        }
    }
}

impl DecayRow<'_> {
    /// log M
    #[inline(always)]
    fn log<S: Simd>(&self, simd: S, j: usize) -> S::V {
        debug_assert!(j + S::LANES <= self.columns.len(), "vector {j} of {} decays", self.columns.len());
        // SAFETY: `check_row` ensures that columns are as long as the row, and j + LANES is within the row.
        simd.sub(simd.splat(self.row), unsafe { simd.load(self.columns.as_ptr().add(j)) })
    }
}

/// The decay of a row and its gradient.
pub struct DecayGrad<'a> {
    /// The decay.
    pub decay: DecayRow<'a>,
    /// −∂/∂log M_ts is added, for each key s of the tile.
    pub dcolumns: &'a mut [f32],
    /// Whether the last visible key is at the position of the query. Its log M is zero for every c. The two equal contributions are omitted, because in
    /// float32 they would not cancel.
    pub own: bool,
}

/// The backward pass over one row.
pub struct BackwardRow<'a> {
    /// Scores; replaced by the weights M·w.
    pub x: &'a mut [f32],
    /// dU·v for each key; replaced by the gradient of the scores.
    pub dp: &'a mut [f32],
    /// Visible keys.
    pub visible: Visible,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayGrad<'a>>,
    /// ρ, if the row is rescaled.
    pub rho: Option<f32>,
    /// The gradient of the sum of weights.
    pub dz: f32,
    /// Additional factor of each value.
    pub key_weights: Option<&'a [f32]>,
}

impl BackwardRow<'_> {
    /// Runs the pass. Returns Σ_s ∂/∂log M_ts.
    ///
    /// # Panics
    /// As [`ForwardRow::run`].
    #[inline(always)]
    pub fn run<S: Simd, K: ScoreKernel>(self, simd: S, kernel: &K) -> f32 {
        if self.x.len() == TILE && self.visible.is_whole() {
            if self.clamp == f32::INFINITY && self.decay.is_none() && self.key_weights.is_none() {
                self.pass::<S, K, true, true>(simd, kernel)
            } else {
                self.pass::<S, K, true, false>(simd, kernel)
            }
        } else {
            self.pass::<S, K, false, false>(simd, kernel)
        }
    }

    #[inline(always)]
    fn pass<S: Simd, K: ScoreKernel, const WHOLE: bool, const PLAIN: bool>(mut self, simd: S, kernel: &K) -> f32 {
        let lanes = S::LANES;
        let n = if WHOLE { TILE } else { self.x.len() };
        let decays = self.decay.as_ref().filter(|_| !PLAIN);
        check_row::<S>(n, [Some(&*self.dp), decays.map(|d| d.decay.columns), self.key_weights]);
        check_row::<S>(n, [decays.map(|d| &*d.dcolumns), None, None]);
        let visible = self.visible.within(n);
        let vectors = if WHOLE { TILE / lanes } else { visible.until.div_ceil(lanes) };
        let (clamp, zero) = (simd.splat(self.clamp), simd.splat(0.0));
        let dz = simd.splat(self.dz);
        let (shifts, scales) = shifts_and_scales::<K>(self.rho);
        let rho = self.rho.unwrap_or(0.0);
        let (x, dp) = (self.x.as_mut_ptr(), self.dp.as_mut_ptr());
        let key_weights = if PLAIN { None } else { self.key_weights };
        let mut total = zero;
        for i in 0..vectors {
            let j = i * lanes;
            let row = RowScores::<WHOLE, PLAIN> {
                x,
                clamp: self.clamp,
                visible,
                decay: if PLAIN { None } else { self.decay.as_ref().map(|d| &d.decay) },
            };
            // SAFETY: j + LANES ≤ n, because n is a multiple of LANES, and `check_row` ensures that all slices have n values.
            unsafe {
                let raw = simd.load(x.add(j));
                let (mut w, mut slope);
                if shifts {
                    let x = row.mask(simd, j, row.decayed(simd, j), zero);
                    (w, slope) = kernel.values_and_slopes(simd, simd.sub(x, simd.splat(rho)));
                } else {
                    let x = row.mask(simd, j, row.clamped(simd, j), zero);
                    (w, slope) = if scales && rho != 0.0 { kernel.scaled(simd, x, rho) } else { kernel.values_and_slopes(simd, x) };
                    if !PLAIN {
                        let m = row.decay_factor(simd, j);
                        (w, slope) = (simd.mul(w, m), simd.mul(slope, m));
                    }
                }
                let mut g = simd.load(dp.add(j));
                if let Some(weights) = key_weights {
                    g = simd.mul(g, simd.load(weights.as_ptr().add(j)));
                }
                g = simd.add(g, dz);
                let dx = simd.mul(g, slope);
                let dx = if PLAIN { dx } else { simd.select(simd.gt(raw, clamp), zero, dx) };
                w = row.mask(simd, j, w, zero);
                let dx = row.mask(simd, j, dx, zero);
                simd.store(x.add(j), w);
                simd.store(dp.add(j), dx);
                // Masked after the product: g of a masked key may be infinite or NaN.
                let product = row.mask(simd, j, simd.mul(g, w), zero);
                if !PLAIN && let Some(decay) = &mut self.decay {
                    let others = simd.first((visible.until - decay.own as usize).saturating_sub(j));
                    let a = simd.select(others, product, zero);
                    let dcolumns = decay.dcolumns.as_mut_ptr().add(j);
                    simd.store(dcolumns, simd.sub(simd.load(dcolumns), a));
                    total = simd.add(total, a);
                }
            }
        }
        for j in (vectors * lanes..n).step_by(lanes) {
            // SAFETY: j + LANES ≤ n, because n is a multiple of LANES; dp has n values.
            unsafe {
                simd.store(x.add(j), zero);
                simd.store(dp.add(j), zero);
            }
        }
        if PLAIN || self.decay.is_none() { 0.0 } else { simd.sum(total) }
    }
}

/// The gradient of learned coefficients over one row. Runs before [`BackwardRow`], which overwrites the inputs.
pub struct CoefficientRow<'a> {
    /// Scores.
    pub x: &'a [f32],
    /// dU·v for each key.
    pub dp: &'a [f32],
    /// Visible keys.
    pub visible: Visible,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayRow<'a>>,
    /// ρ, if the row is rescaled.
    pub rho: Option<f32>,
    /// The gradient of the sum of weights.
    pub dz: f32,
    /// Additional factor of each value.
    pub key_weights: Option<&'a [f32]>,
}

impl CoefficientRow<'_> {
    /// Adds ∂/∂a_n = Σ_s g_s·x_s^n/n! to `grads`, one value for each of the ascending orders. Computed in float64, because x^n/n! of a high order overflows
    /// float32 and e^{−ρ} underflows.
    ///
    /// # Panics
    /// As [`ForwardRow::run`].
    #[inline(always)]
    pub fn run<S: Simd>(self, simd: S, orders: &[usize], grads: &mut [f64]) {
        let visible = self.visible.within(self.x.len());
        check_row::<S>(self.x.len(), [Some(self.dp), self.decay.as_ref().map(|decay| decay.columns), self.key_weights]);
        let scores = RowScores::<false, false> { x: self.x.as_ptr(), clamp: self.clamp, visible, decay: self.decay.as_ref() };
        let (zero, dz) = (simd.splat(0.0), simd.splat(self.dz));
        let scale = (-self.rho.unwrap_or(0.0) as f64).exp();
        // x and g·x^n/n!, which is updated from order to order.
        let (mut x, mut terms) = ([0.0; TILE], [0.0; TILE]);
        for j in (0..visible.until).step_by(S::LANES) {
            // SAFETY: j + LANES is within the row, a multiple of LANES, and `check_row` ensures that dp is as long.
            let mut g = unsafe { simd.load(self.dp.as_ptr().add(j)) };
            if let Some(weights) = self.key_weights {
                // SAFETY: as above, for the key weights.
                g = simd.mul(g, unsafe { simd.load(weights.as_ptr().add(j)) });
            }
            g = simd.mul(simd.add(g, dz), scores.decay_factor(simd, j));
            let score = simd.to_array(scores.mask(simd, j, scores.clamped(simd, j), zero));
            let g = simd.to_array(scores.mask(simd, j, g, zero));
            for i in 0..S::LANES {
                (x[j + i], terms[j + i]) = (score[i] as f64, g[i] as f64 * scale);
            }
        }
        let used = visible.until.next_multiple_of(S::LANES);
        let mut power = 0;
        for (&order, grad) in orders.iter().zip(grads) {
            while power < order {
                power += 1;
                let inverse = 1.0 / power as f64;
                terms[..used].iter_mut().zip(&x[..used]).for_each(|(term, x)| *term *= x * inverse);
            }
            let mut sums = [0.0; 8];
            for terms in terms[..used].chunks_exact(8) {
                sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
            }
            *grad += sums.iter().sum::<f64>();
        }
    }
}

/// Replaces scores x by c·tanh(x/c).
#[inline(always)]
pub fn soft_cap<S: Simd>(simd: S, x: &mut [f32], c: f32) {
    let (cap, inverse) = (simd.splat(c), simd.splat(1.0 / c));
    for j in (0..x.len()).step_by(S::LANES) {
        let ratio = simd.mul(simd.load_at(x, j), inverse);
        simd.store_at(x, j, simd.mul(cap, tanh(simd, ratio)));
    }
}

/// Derivatives of [`soft_cap`] at scores x before the cap: 1/cosh²(x/c) = 4·σ(2x/c)·σ(−2x/c).
///
/// The relative error is that of the exponential for every x. 1 − tanh² of capped scores would cancel, and gradients of saturated rows would be lost.
#[inline(always)]
pub fn soft_cap_slopes<S: Simd>(simd: S, x: &[f32], c: f32, slopes: &mut [f32]) {
    let (four, twice) = (simd.splat(4.0), simd.splat(2.0 / c));
    for j in (0..x.len()).step_by(S::LANES) {
        let u = simd.mul(simd.load_at(x, j), twice);
        let both = simd.mul(simd.sigmoid(u), simd.sigmoid(simd.sub(simd.splat(0.0), u)));
        simd.store_at(slopes, j, simd.mul(four, both));
    }
}

/// tanh with relative error 5e-7: the Taylor series near zero, the exponential elsewhere.
#[inline(always)]
fn tanh<S: Simd>(simd: S, x: S::V) -> S::V {
    let (one, two) = (simd.splat(1.0), simd.splat(2.0));
    let square = simd.mul(x, x);
    let mut series = simd.splat(TANH[0]);
    for &a in &TANH[1..] {
        series = simd.fma(series, square, simd.splat(a));
    }
    let near = simd.fma(simd.mul(x, square), series, x);
    let far = simd.sub(simd.mul(two, simd.sigmoid(simd.mul(two, x))), one);
    simd.select(simd.gt(simd.splat(0.25), square), near, far)
}

/// Taylor coefficients of x^13, x^11, …, x^3 of tanh.
const TANH: [f32; 6] = [21844.0 / 6_081_075.0, -1382.0 / 155_925.0, 62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, Task, dispatch_on};

    struct Cap<'a>(&'a mut [f32], f32);

    impl Task for Cap<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vec<f32> {
            let mut slopes = vec![0.0; self.0.len()];
            soft_cap_slopes(simd, self.0, self.1, &mut slopes);
            soft_cap(simd, self.0, self.1);
            slopes
        }
    }

    #[test]
    fn capped_scores_and_their_slopes_equal_the_formula() {
        for isa in Isa::available() {
            for c in [0.5f32, 5.0, 50.0] {
                let from: Vec<f32> = (0..TILE).map(|i| (i as f32 - 64.0) * (i as f32 * 0.2).exp2() * 1e-6 * c).collect();
                let mut x = from.clone();
                let slopes = dispatch_on(isa, Cap(&mut x, c));
                for ((&from, &x), &slope) in from.iter().zip(&x).zip(&slopes) {
                    let tanh = (from as f64 / c as f64).tanh();
                    let what = format!("{} {c}·tanh({from}/{c})", isa.name());
                    assert!((x as f64 - c as f64 * tanh).abs() <= 5e-7 * (c as f64 * tanh).abs(), "{what}: {x}");
                    // Relative for every x: rounding the argument 2u changes e^−2u by a factor 1 + 2u·ε. The absolute term covers subnormal numbers.
                    let u = (from as f64 / c as f64).abs();
                    let exact = u.cosh().powi(-2);
                    assert!(
                        (slope as f64 - exact).abs() <= 1e-6 * (1.0 + u) * exact + 1e-37,
                        "{what}: slope {slope:e}, expected {exact:e}"
                    );
                }
            }
        }
    }

    /// w(x) = e^x, rescaled by subtraction.
    struct Exp;

    impl ScoreKernel for Exp {
        const RESCALE: Rescale = Rescale::SubtractMax;
        #[inline(always)]
        fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V {
            simd.exp(x)
        }
        #[inline(always)]
        fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V) {
            let w = simd.exp(x);
            (w, w)
        }
    }

    /// w(x) = 1 + x + x²/2, rescaled by multiplication above |x| = 20.
    struct Quadratic;

    impl ScoreKernel for Quadratic {
        const RESCALE: Rescale = Rescale::Multiply;
        #[inline(always)]
        fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V {
            self.values_and_slopes(simd, x).0
        }
        #[inline(always)]
        fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V) {
            let slope = simd.add(simd.splat(1.0), x);
            (simd.fma(simd.mul(x, simd.splat(0.5)), x, slope), slope)
        }
        fn unscaled_limit(&self) -> f32 {
            20.0
        }
        fn log_bound(&self, reach: f32) -> f32 {
            (1.0 + reach + 0.5 * reach * reach).ln()
        }
        #[inline(always)]
        fn scaled<S: Simd>(&self, simd: S, x: S::V, rho: f32) -> (S::V, S::V) {
            let (w, slope) = self.values_and_slopes(simd, x);
            let factor = simd.splat((-rho).exp());
            (simd.mul(w, factor), simd.mul(slope, factor))
        }
    }

    /// Options of a row.
    #[derive(Clone, Copy, Debug)]
    struct RowCase {
        quadratic: bool,
        len: usize,
        visible: Visible,
        clamp: f32,
        decays: bool,
        weighted: bool,
        scale: f32,
    }

    /// The results of both passes over one row.
    #[derive(Debug, Default)]
    struct RowResult {
        rho: f32,
        weights: Vec<f32>,
        sums: [f32; 16],
        backward_weights: Vec<f32>,
        dx: Vec<f32>,
        dcolumns: Vec<f32>,
        total: f32,
    }

    struct BothPasses<'a> {
        case: RowCase,
        x: &'a [f32],
        dp: &'a [f32],
        columns: &'a [f32],
        key_weights: &'a [f32],
    }

    const LOG_ROW: f32 = -1.5;
    const DZ: f32 = 0.3;

    impl Task for BothPasses<'_> {
        type Output = RowResult;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> RowResult {
            let RowCase { quadratic, len, visible, clamp, decays, weighted, .. } = self.case;
            let key_weights = weighted.then_some(self.key_weights);
            let mut out = RowResult { weights: self.x[..len].to_vec(), ..RowResult::default() };
            let decay = decays.then_some(DecayRow { row: LOG_ROW, columns: self.columns });
            let start = if quadratic { Quadratic::RESCALE } else { Exp::RESCALE }.start();
            let row = ForwardRow { x: &mut out.weights, visible, clamp, decay, rho: Some(start), sums: &mut out.sums, key_weights };
            let change = if quadratic { row.run(simd, &Quadratic) } else { row.run(simd, &Exp) };
            out.rho = change.map_or(start, |(rho, _)| rho);
            (out.backward_weights, out.dx, out.dcolumns) = (self.x[..len].to_vec(), self.dp[..len].to_vec(), vec![0.0; len]);
            let decay = decays.then_some(DecayGrad {
                decay: DecayRow { row: LOG_ROW, columns: self.columns },
                dcolumns: &mut out.dcolumns,
                own: true,
            });
            let (x, dp, rho) = (&mut out.backward_weights, &mut out.dx, Some(out.rho));
            let row = BackwardRow { x, dp, visible, clamp, decay, rho, dz: DZ, key_weights };
            out.total = if quadratic { row.run(simd, &Quadratic) } else { row.run(simd, &Exp) };
            out
        }
    }

    #[test]
    fn both_passes_equal_the_formula_on_every_instruction_set() {
        let wave = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
        let (columns, key_weights) = (wave(TILE, 0.3), wave(TILE, 0.9));
        let mut cases = Vec::new();
        for (len, visible) in [
            (TILE, Visible::first(TILE)),
            (TILE, Visible { from: 60, until: 90, sinks: 5 }),
            (48, Visible { from: 21, until: 37, sinks: 0 }),
            (16, Visible { from: 0, until: 1, sinks: 0 }),
        ] {
            for quadratic in [false, true] {
                for (clamp, decays, weighted) in [(f32::INFINITY, false, false), (12.0, true, true), (f32::INFINITY, true, false)] {
                    for scale in [2.0, 120.0] {
                        cases.push(RowCase { quadratic, len, visible, clamp, decays, weighted, scale });
                    }
                }
            }
        }
        for case in cases {
            let (mut x, mut dp) = (wave(TILE, 0.7), wave(TILE, 1.1));
            x.iter_mut().for_each(|x| *x *= case.scale);
            // Masked keys may be NaN.
            (0..TILE).filter(|&s| !case.visible.contains(s)).for_each(|s| (x[s], dp[s]) = (f32::NAN, f32::NAN));
            for isa in Isa::available() {
                let found = dispatch_on(isa, BothPasses { case, x: &x, dp: &dp, columns: &columns, key_weights: &key_weights });
                let what = format!("{} {case:?}", isa.name());
                let close = |found: f32, expected: f64, size: f64, name: &str| {
                    assert!((found as f64 - expected).abs() <= 2e-5 * (size + 1e-30), "{what}: {name} is {found:e}, expected {expected:e}");
                };
                let (rho, mut sum, mut total, mut total_size) = (found.rho as f64, 0.0, 0.0, 0.0);
                for s in 0..case.len {
                    let (mut w, mut value, mut dx, mut dcolumn) = (0.0, 0.0, 0.0, 0.0);
                    if case.visible.contains(s) {
                        let (clamped, free) = (x[s].min(case.clamp) as f64, x[s] <= case.clamp);
                        let m = if case.decays { (LOG_ROW as f64 - columns[s] as f64).exp() } else { 1.0 };
                        let slope = if case.quadratic { 1.0 + clamped } else { (clamped - rho).exp() };
                        let raw = if case.quadratic { 1.0 + clamped + 0.5 * clamped * clamped } else { slope };
                        let scale = m * if case.quadratic { (-rho).exp() } else { 1.0 };
                        let key_weight = if case.weighted { key_weights[s] as f64 } else { 1.0 };
                        let g = dp[s] as f64 * key_weight + DZ as f64;
                        w = raw * scale;
                        (value, dx) = (w * key_weight, if free { g * slope * scale } else { 0.0 });
                        dcolumn = if case.decays && s + 1 != case.visible.until { g * w } else { 0.0 };
                    }
                    (sum, total, total_size) = (sum + w, total + dcolumn, total_size + dcolumn.abs());
                    close(found.weights[s], value, w.abs(), "the weight of the value");
                    close(found.backward_weights[s], w, w.abs(), "the weight");
                    close(found.dx[s], dx, dx.abs() + w.abs(), "dx");
                    close(found.dcolumns[s], -dcolumn, dcolumn.abs() + w.abs(), "dcolumns");
                }
                close(found.sums.iter().sum(), sum, sum.abs(), "the sum");
                close(found.total, total, total_size, "the total");
                let rescaled = if case.quadratic { case.scale > 20.0 && case.clamp > 20.0 } else { true };
                assert!(!rescaled || case.visible.until < 3 || found.rho != 0.0, "{what}: ρ is {}", found.rho);
            }
        }
    }

    struct CoefficientTask<'a>(CoefficientRow<'a>, &'a [usize]);

    impl Task for CoefficientTask<'_> {
        type Output = Vec<f64>;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vec<f64> {
            let mut grads = vec![0.5; self.1.len()];
            self.0.run(simd, self.1, &mut grads);
            grads
        }
    }

    #[test]
    fn gradients_of_coefficients_equal_the_formula() {
        let wave = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
        let (columns, weights) = (wave(TILE, 0.3), wave(TILE, 0.9));
        let window = |from, until, sinks| Visible { from, until, sinks };
        for (visible, len) in [
            (Visible::first(TILE), TILE),
            (window(0, 100, 0), TILE),
            (window(60, 90, 5), TILE),
            (window(21, 37, 0), 48),
            (window(9, 12, 3), 16),
            (window(0, 1, 0), 16),
        ] {
            // Masked keys may be NaN.
            let (mut x, mut dp) = (wave(TILE, 0.7), wave(TILE, 1.1));
            x.iter_mut().for_each(|x| *x *= 30.0);
            (0..TILE).filter(|&s| !visible.contains(s)).for_each(|s| (x[s], dp[s]) = (f32::NAN, f32::NAN));
            for (clamp, decays, rho, weighted) in [
                (f32::INFINITY, false, None, false),
                (12.0, true, None, true),
                (f32::INFINITY, true, Some(90.0), false),
                (25.0, false, Some(0.0), true),
            ] {
                let orders = [0, 1, 2, 5, 30, 70];
                for isa in Isa::available() {
                    let row = CoefficientRow {
                        x: &x[..len],
                        dp: &dp[..len],
                        visible,
                        clamp,
                        decay: decays.then_some(DecayRow { row: -1.5, columns: &columns }),
                        rho,
                        dz: 0.3,
                        key_weights: weighted.then_some(&weights[..]),
                    };
                    let found = dispatch_on(isa, CoefficientTask(row, &orders));
                    for (&n, found) in orders.iter().zip(found) {
                        let mut expected = [0.0; 2];
                        for s in (0..len).filter(|&s| visible.contains(s)) {
                            let m = if decays { (-1.5 - columns[s] as f64).exp() } else { 1.0 };
                            let g = (dp[s] as f64 * if weighted { weights[s] as f64 } else { 1.0 } + 0.3f32 as f64) * m;
                            let power = (1..=n).fold(1.0, |power, i| power * x[s].min(clamp) as f64 / i as f64);
                            let term = g * power * (-rho.unwrap_or(0.0f32) as f64).exp();
                            expected = [expected[0] + term, expected[1] + term.abs()];
                        }
                        let what = format!("{} order {n}, {visible:?} of {len}, clamp {clamp}, ρ {rho:?}", isa.name());
                        assert!(
                            (found - 0.5 - expected[0]).abs() <= 1e-6 * expected[1] + 1e-15,
                            "{what}: {found}, expected {}",
                            0.5 + expected[0]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_different_lengths_are_refused() {
        let row = CoefficientRow {
            x: &[0.0; 32],
            dp: &[0.0; 16],
            visible: Visible::first(32),
            clamp: f32::INFINITY,
            decay: None,
            rho: None,
            dz: 0.0,
            key_weights: None,
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| dispatch_on(Isa::Portable, CoefficientTask(row, &[0]))));
        assert!(result.is_err());
    }
}
