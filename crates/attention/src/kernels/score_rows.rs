//! One row of a tile: scores become weights, and back.
//!
//! A row holds the scores of one query with the keys of a tile, of which those of [`Visible`] count. The other lanes
//! are neutral: they never enter a maximum, a sum or the choice of a method, so that later tokens cannot change
//! a bit of an earlier output.

use crate::kernels::TILE;
use crate::kernels::simd::Simd;

/// How the weights of a row, which float32 may not hold, become w(x)·e^{−ρ}, which it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rescale {
    /// They are as they are.
    None,
    /// ρ is subtracted from the scores: w(x)·e^{−ρ} = w(x − ρ). Follows the row maximum.
    SubtractMax,
    /// Weights are multiplied by e^{−ρ}. Zero until scores are so large that weights would come near the end of float32.
    Multiply,
}

/// Weights up to e^40 are left as they are: their squares and long sums of them are still within float32.
pub(crate) const UNSCALED_LOG_LIMIT: f32 = 40.0;

/// Polynomials of lower degree reach e^40 only for scores beyond 300, and are left as they are.
pub(crate) const SCALED_FROM: usize = 8;

impl Rescale {
    /// ρ before the first key.
    pub(crate) fn start(self) -> f32 {
        if self == Rescale::SubtractMax { f32::NEG_INFINITY } else { 0.0 }
    }

    /// ρ, where there is one.
    pub(crate) fn of(self, rho: f32) -> Option<f32> {
        (self != Rescale::None).then_some(rho)
    }
}

/// What the rows of a kernel need of it, in vectors.
pub trait ScoreKernel {
    /// How its rows are rescaled, where a variant has something that cancels it.
    const RESCALE: Rescale = Rescale::None;

    /// w of a vector.
    fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V;
    /// w and w' of a vector.
    fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V);

    /// For [`Rescale::Multiply`]: the largest |x| for which ρ = 0 will do.
    fn unscaled_limit(&self) -> f32 {
        f32::INFINITY
    }
    /// For [`Rescale::Multiply`]: log of a bound of |w| for |x| up to `reach`.
    fn log_bound(&self, _reach: f32) -> f32 {
        0.0
    }
    /// For [`Rescale::Multiply`]: w·e^{−ρ} and w'·e^{−ρ} of a vector.
    fn scaled<S: Simd>(&self, simd: S, x: S::V, _rho: f32) -> (S::V, S::V) {
        self.values_and_slopes(simd, x)
    }
}

/// Which keys of a tile count in a row: those from `from` up to `until`, and those before `sinks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visible {
    /// Where the window starts.
    pub from: usize,
    /// The first key that the row does not see.
    pub until: usize,
    /// Where the sinks end, at most at `until`.
    pub sinks: usize,
}

impl Visible {
    /// The first n.
    pub fn first(n: usize) -> Visible {
        Visible { from: 0, until: n, sinks: 0 }
    }

    /// Those among the first n.
    #[inline(always)]
    fn within(self, n: usize) -> Visible {
        Visible { until: self.until.min(n), ..self }
    }

    /// Whether key s counts.
    pub fn contains(self, s: usize) -> bool {
        s < self.until && (s >= self.from || s < self.sinks)
    }

    /// `v` in the lanes from j < `until` on that count, and `other` elsewhere.
    #[inline(always)]
    pub fn select<S: Simd>(self, simd: S, j: usize, v: S::V, other: S::V) -> S::V {
        let v = simd.select(simd.first(self.until - j), v, other);
        if self.from <= j.max(self.sinks) {
            return v;
        }
        let sinks = simd.select(simd.first(self.sinks.saturating_sub(j)), v, other);
        simd.select(simd.first(self.from - j), sinks, v)
    }

    /// Whether all keys of a whole tile count.
    fn is_whole(self) -> bool {
        self.until >= TILE && self.from <= self.sinks
    }
}

/// log M of a row: `row` − `columns[s]`.
pub struct DecayRow<'a> {
    /// c_t less the tile's base.
    pub row: f32,
    /// c_s less the tile's base, for each key of the tile.
    pub columns: &'a [f32],
}

/// The forward pass over one row.
pub struct ForwardRow<'a> {
    /// Scores; become the weights of the values. A multiple of the vector length.
    pub x: &'a mut [f32],
    /// Keys that count.
    pub visible: Visible,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayRow<'a>>,
    /// ρ so far, where the row has one.
    pub rho: Option<f32>,
    /// The sum of weights so far, spread over the lanes of a vector.
    pub sums: &'a mut [f32; 16],
    /// What else multiplies each key's value.
    pub key_weights: Option<&'a [f32]>,
}

/// ρ follows the row maximum only when that has grown by more than this: weights up to e^8 do no harm, and most tiles
/// then need no maximum over lanes and no rescaling.
const SLACK: f32 = 8.0;

impl ForwardRow<'_> {
    /// Where ρ has changed: its new value, and the factor e^{ρ before − ρ now} by which earlier sums are to be multiplied.
    #[inline(always)]
    pub fn run<S: Simd, K: ScoreKernel>(self, simd: S, kernel: &K) -> Option<(f32, f32)> {
        // Most rows of most variants are whole and plain; compiled apart, their loops are straight lines.
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
        let scores = Scores::<WHOLE, PLAIN> { x, clamp: self.clamp, visible, decay: if PLAIN { None } else { self.decay.as_ref() } };
        let key_weights = if PLAIN { None } else { self.key_weights };
        // SAFETY: the array holds 16 ≥ LANES values.
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
                // SAFETY: j + LANES ≤ n, since n is a multiple of LANES, and weights are as long as the row.
                w = simd.mul(w, unsafe { simd.load(weights.as_ptr().add(j)) });
            }
            // SAFETY: as above.
            unsafe { simd.store(x.add(j), w) };
        }
        // SAFETY: as for the load.
        unsafe { simd.store(self.sums.as_mut_ptr(), sum) };
        for j in (vectors * lanes..n).step_by(lanes) {
            // SAFETY: j + LANES ≤ n.
            unsafe { simd.store(x.add(j), zero) };
        }
        change
    }
}

/// Rows are read by vectors: whole ones, from slices at least as long as the row, which is no longer than a tile.
#[inline(always)]
fn check_row<S: Simd>(len: usize, others: [Option<&[f32]>; 3]) {
    assert!(
        len <= TILE && len.is_multiple_of(S::LANES) && others.iter().flatten().all(|other| other.len() >= len),
        "rows of a tile differ in length"
    );
}

/// Whether ρ is subtracted from scores, and whether weights are scaled by it; of one kernel only one can be true.
#[inline(always)]
fn shifts_and_scales<K: ScoreKernel>(rho: Option<f32>) -> (bool, bool) {
    (K::RESCALE == Rescale::SubtractMax && rho.is_some(), K::RESCALE == Rescale::Multiply && rho.is_some())
}

/// The scores of a row, by vectors.
#[derive(Clone, Copy)]
struct Scores<'a, const WHOLE: bool, const PLAIN: bool> {
    x: *const f32,
    clamp: f32,
    visible: Visible,
    decay: Option<&'a DecayRow<'a>>,
}

impl<const WHOLE: bool, const PLAIN: bool> Scores<'_, WHOLE, PLAIN> {
    /// `v`, and `other` in the lanes from j on that do not count.
    #[inline(always)]
    fn mask<S: Simd>(&self, simd: S, j: usize, v: S::V, other: S::V) -> S::V {
        if WHOLE { v } else { self.visible.select(simd, j, v, other) }
    }

    /// min(x, c)
    #[inline(always)]
    fn clamped<S: Simd>(&self, simd: S, j: usize) -> S::V {
        // SAFETY: rows are multiples of LANES long, and j + LANES is within.
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
    #[inline(always)]
    fn log<S: Simd>(&self, simd: S, j: usize) -> S::V {
        // SAFETY: columns are as long as the row, and j + LANES is within.
        simd.sub(simd.splat(self.row), unsafe { simd.load(self.columns.as_ptr().add(j)) })
    }
}

/// The decay of a row, with the place for its gradient.
pub struct DecayGrad<'a> {
    /// The decay.
    pub decay: DecayRow<'a>,
    /// −Σ_t ∂/∂log M_ts is added here, for each key of the tile.
    pub dcolumns: &'a mut [f32],
    /// The last visible key is the query's own position. There log M is zero whatever c is: its two equal contributions are
    /// left out, since in float32 they would not cancel.
    pub own: bool,
}

/// The backward pass over one row.
pub struct BackwardRow<'a> {
    /// Scores; become the weights M·w.
    pub x: &'a mut [f32],
    /// dU·v for each key; becomes the gradient of the scores.
    pub dp: &'a mut [f32],
    /// Keys that count.
    pub visible: Visible,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayGrad<'a>>,
    /// ρ, where the row has one.
    pub rho: Option<f32>,
    /// The gradient of the sum of weights.
    pub dz: f32,
    /// What else multiplies each key's value.
    pub key_weights: Option<&'a [f32]>,
}

impl BackwardRow<'_> {
    /// Σ_s ∂/∂log M_ts.
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
            // Neutral scores in lanes that do not count.
            let row = Scores::<WHOLE, PLAIN> {
                x,
                clamp: self.clamp,
                visible,
                decay: if PLAIN { None } else { self.decay.as_ref().map(|d| &d.decay) },
            };
            // SAFETY: j + LANES ≤ n, since n is a multiple of LANES; all slices are as long as the row.
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
                if !PLAIN && let Some(decay) = &mut self.decay {
                    let others = simd.first((visible.until - decay.own as usize).saturating_sub(j));
                    let a = simd.select(others, simd.mul(g, w), zero);
                    let dcolumns = decay.dcolumns.as_mut_ptr().add(j);
                    simd.store(dcolumns, simd.sub(simd.load(dcolumns), a));
                    total = simd.add(total, a);
                }
            }
        }
        for j in (vectors * lanes..n).step_by(lanes) {
            // SAFETY: j + LANES ≤ n.
            unsafe {
                simd.store(x.add(j), zero);
                simd.store(dp.add(j), zero);
            }
        }
        if PLAIN || self.decay.is_none() { 0.0 } else { simd.sum(total) }
    }
}

/// The gradient of learned coefficients over one row; reads what [`BackwardRow`] is about to overwrite.
pub struct CoefficientRow<'a> {
    /// Scores.
    pub x: &'a [f32],
    /// dU·v for each key.
    pub dp: &'a [f32],
    /// Keys that count.
    pub visible: Visible,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayRow<'a>>,
    /// ρ, where the row has one.
    pub rho: Option<f32>,
    /// The gradient of the sum of weights.
    pub dz: f32,
    /// What else multiplies each key's value.
    pub key_weights: Option<&'a [f32]>,
}

impl CoefficientRow<'_> {
    /// Adds Σ_s ∂/∂a_n = Σ_s g_s·x_s^n/n! to `grads`, one for each of the orders, which ascend. In float64, since x^n/n! of a high order and
    /// e^{−ρ} each are beyond float32.
    #[inline(always)]
    pub fn run<S: Simd>(self, simd: S, orders: &[usize], grads: &mut [f64]) {
        let visible = self.visible.within(self.x.len());
        check_row::<S>(self.x.len(), [Some(self.dp), self.decay.as_ref().map(|decay| decay.columns), self.key_weights]);
        let scores = Scores::<false, false> { x: self.x.as_ptr(), clamp: self.clamp, visible, decay: self.decay.as_ref() };
        let (zero, dz) = (simd.splat(0.0), simd.splat(self.dz));
        let scale = self.rho.map_or(1.0, |rho| (-rho as f64).exp());
        // x, and g·x^n/n! from one order to the next.
        let (mut x, mut terms) = ([0.0; TILE], [0.0; TILE]);
        for j in (0..visible.until).step_by(S::LANES) {
            // SAFETY: j + LANES is within the row, a multiple of LANES, and all slices are as long.
            let mut g = unsafe { simd.load(self.dp.as_ptr().add(j)) };
            if let Some(weights) = self.key_weights {
                // SAFETY: as above.
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

/// Scores x become c·tanh(x/c).
#[inline(always)]
pub fn soft_cap<S: Simd>(simd: S, x: &mut [f32], c: f32) {
    let (cap, inverse) = (simd.splat(c), simd.splat(1.0 / c));
    for j in (0..x.len()).step_by(S::LANES) {
        let ratio = simd.mul(simd.load_at(x, j), inverse);
        simd.store_at(x, j, simd.mul(cap, tanh(simd, ratio)));
    }
}

/// The slopes of the cap at scores that are not capped yet: 1/cosh²(x/c) = 4·σ(2x/c)·σ(−2x/c). The relative error is that of the exponential however far
/// x is beyond the cap; 1 − tanh² of capped scores cancels there, and lost gradients of saturated rows to rounding.
#[inline(always)]
pub fn soft_cap_slopes<S: Simd>(simd: S, x: &[f32], c: f32, slopes: &mut [f32]) {
    let (four, twice) = (simd.splat(4.0), simd.splat(2.0 / c));
    for j in (0..x.len()).step_by(S::LANES) {
        let u = simd.mul(simd.load_at(x, j), twice);
        let both = simd.mul(simd.sigmoid(u), simd.sigmoid(simd.sub(simd.splat(0.0), u)));
        simd.store_at(slopes, j, simd.mul(four, both));
    }
}

/// tanh within 5e-7, relative: near zero by its series, elsewhere from the exponential.
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

/// The coefficients of x^13, x^11, …, x^3 in tanh.
const TANH: [f32; 6] = [21844.0 / 6_081_075.0, -1382.0 / 155_925.0, 62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::simd::{Isa, Task, dispatch_on};

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
                    // Relative, however far beyond the cap: an argument of 2u that is rounded moves e^−2u by 2u·ε. Below are no normal numbers.
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

    struct Coefficients<'a>(CoefficientRow<'a>, &'a [usize]);

    impl Task for Coefficients<'_> {
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
            // What does not count must not even be a number.
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
                    let found = dispatch_on(isa, Coefficients(row, &orders));
                    for (&n, found) in orders.iter().zip(found) {
                        let mut expected = [0.0; 2];
                        for s in (0..len).filter(|&s| visible.contains(s)) {
                            let m = if decays { (-1.5 - columns[s] as f64).exp() } else { 1.0 };
                            let g = (dp[s] as f64 * if weighted { weights[s] as f64 } else { 1.0 } + 0.3f32 as f64) * m;
                            let power = (1..=n).fold(1.0, |power, i| power * x[s].min(clamp) as f64 / i as f64);
                            let term = g * power * rho.map_or(1.0, |rho: f32| (-rho as f64).exp());
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
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| dispatch_on(Isa::Portable, Coefficients(row, &[0]))));
        assert!(result.is_err());
    }
}
