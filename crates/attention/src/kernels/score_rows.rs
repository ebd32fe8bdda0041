//! One row of a tile: scores become weights, and back.
//!
//! A row holds the scores of one query with the keys of a tile, of which the first `visible` count. Lanes behind them
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
    pub visible: usize,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayRow<'a>>,
    /// ρ so far, where the row has a frame.
    pub frame: Option<f32>,
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
        if self.x.len() == TILE && self.visible >= TILE {
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
        let visible = if WHOLE { TILE } else { self.visible.min(n) };
        let vectors = visible.div_ceil(lanes);
        let zero = simd.splat(0.0);
        let x = self.x.as_mut_ptr();
        let scores = Scores::<WHOLE, PLAIN> { x, clamp: self.clamp, visible, decay: if PLAIN { None } else { self.decay.as_ref() } };
        let key_weights = if PLAIN { None } else { self.key_weights };
        // SAFETY: the array holds 16 ≥ LANES values.
        let mut sum = unsafe { simd.load(self.sums.as_ptr()) };
        let mut change = None;
        let (shifts, scales) = frames::<K>(self.frame);
        let mut rho = self.frame.unwrap_or(0.0);
        if shifts || scales {
            let lowest = simd.splat(f32::NEG_INFINITY);
            let mut highest = lowest;
            for i in 0..vectors {
                let j = i * lanes;
                let size = if shifts { scores.decayed(simd, j) } else { simd.abs(scores.clamped(simd, j)) };
                highest = simd.max(scores.mask(simd, j, size, lowest), highest);
            }
            let calm = if shifts { rho + SLACK } else { kernel.unscaled_limit() };
            if simd.any(simd.gt(highest, simd.splat(calm))) {
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

/// Whether ρ is subtracted from scores, and whether weights are scaled by it; of one kernel only one can be true.
#[inline(always)]
fn frames<K: ScoreKernel>(frame: Option<f32>) -> (bool, bool) {
    (K::RESCALE == Rescale::SubtractMax && frame.is_some(), K::RESCALE == Rescale::Multiply && frame.is_some())
}

/// The scores of a row, by vectors.
#[derive(Clone, Copy)]
struct Scores<'a, const WHOLE: bool, const PLAIN: bool> {
    x: *const f32,
    clamp: f32,
    visible: usize,
    decay: Option<&'a DecayRow<'a>>,
}

impl<const WHOLE: bool, const PLAIN: bool> Scores<'_, WHOLE, PLAIN> {
    /// `v`, and `other` in the lanes from j on that do not count.
    #[inline(always)]
    fn mask<S: Simd>(&self, simd: S, j: usize, v: S::V, other: S::V) -> S::V {
        if WHOLE { v } else { simd.select(simd.first(self.visible - j), v, other) }
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
    pub visible: usize,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayGrad<'a>>,
    /// ρ, where the row has a frame.
    pub frame: Option<f32>,
    /// The gradient of the sum of weights.
    pub dz: f32,
    /// What else multiplies each key's value.
    pub key_weights: Option<&'a [f32]>,
}

impl BackwardRow<'_> {
    /// Σ_s ∂/∂log M_ts.
    #[inline(always)]
    pub fn run<S: Simd, K: ScoreKernel>(self, simd: S, kernel: &K) -> f32 {
        if self.x.len() == TILE && self.visible >= TILE {
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
        let visible = if WHOLE { TILE } else { self.visible.min(n) };
        let vectors = visible.div_ceil(lanes);
        let (clamp, zero) = (simd.splat(self.clamp), simd.splat(0.0));
        let dz = simd.splat(self.dz);
        let (shifts, scales) = frames::<K>(self.frame);
        let rho = self.frame.unwrap_or(0.0);
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
                    let others = simd.first((visible - decay.own as usize).saturating_sub(j));
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
    pub visible: usize,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// The decay, if any.
    pub decay: Option<DecayRow<'a>>,
    /// ρ, where the row has a frame.
    pub frame: Option<f32>,
    /// The gradient of the sum of weights.
    pub dz: f32,
    /// What else multiplies each key's value.
    pub key_weights: Option<&'a [f32]>,
}

impl CoefficientRow<'_> {
    /// Adds Σ_s ∂/∂a_n to `grads`, one for each order; `slopes_at` gives ∂w/∂a_n at a score, into scratch as long as `grads`.
    #[inline(always)]
    pub fn run(self, slopes_at: impl Fn(f64, &mut [f64]), slopes: &mut [f64], grads: &mut [f64]) {
        let scale = (-self.frame.unwrap_or(0.0) as f64).exp();
        for s in 0..self.visible.min(self.x.len()) {
            let weight = self.key_weights.map_or(1.0, |weights| weights[s]);
            let m = self.decay.as_ref().map_or(1.0, |decay| (decay.row - decay.columns[s]).exp());
            let g = ((self.dp[s] * weight + self.dz) * m) as f64 * scale;
            let x = if self.x[s] > self.clamp { self.clamp } else { self.x[s] };
            slopes_at(x as f64, slopes);
            for (grad, slope) in grads.iter_mut().zip(&*slopes) {
                *grad += g * slope;
            }
        }
    }
}
