//! One row of a tile: scores become weights, and back.
//!
//! A row holds the scores of one query with the keys of a tile, of which the first `visible` count. Lanes behind them
//! are neutral: they never enter a maximum, a sum or the choice of a method, so that later tokens cannot change
//! a bit of an earlier output.

use super::layout::TILE;
use crate::parts::kernel::KernelPart;
use crate::simd::Simd;

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
    /// ρ so far, where one is subtracted; −∞ at first.
    pub shift: Option<f32>,
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
    pub fn run<S: Simd, K: KernelPart>(self, simd: S, kernel: &K) -> Option<(f32, f32)> {
        // Most rows of most variants are whole and plain; compiled apart, their loops are straight lines.
        if self.x.len() == TILE && self.visible >= TILE {
            if self.decay.is_none() && self.key_weights.is_none() {
                self.pass::<S, K, true, true>(simd, kernel)
            } else {
                self.pass::<S, K, true, false>(simd, kernel)
            }
        } else {
            self.pass::<S, K, false, false>(simd, kernel)
        }
    }

    #[inline(always)]
    fn pass<S: Simd, K: KernelPart, const WHOLE: bool, const PLAIN: bool>(self, simd: S, kernel: &K) -> Option<(f32, f32)> {
        let lanes = S::LANES;
        let n = if WHOLE { TILE } else { self.x.len() };
        let visible = if WHOLE { TILE } else { self.visible.min(n) };
        let vectors = visible.div_ceil(lanes);
        let (clamp, zero) = (simd.splat(self.clamp), simd.splat(0.0));
        let x = self.x.as_mut_ptr();
        let decay = if PLAIN { None } else { self.decay.as_ref() };
        let key_weights = if PLAIN { None } else { self.key_weights };
        let masked = |j: usize, v: S::V, other: S::V| if WHOLE { v } else { simd.select(simd.first(visible - j), v, other) };
        // SAFETY: j + LANES ≤ n in every call, since n is a multiple of LANES; columns and weights are as long as the row.
        let log_decay = |decay: &DecayRow, j: usize| unsafe { simd.sub(simd.splat(decay.row), simd.load(decay.columns.as_ptr().add(j))) };
        // SAFETY: as above.
        let score = |j: usize| unsafe { simd.min(clamp, simd.load(x.add(j))) };
        let finish = |j: usize, w: S::V| {
            // SAFETY: as above.
            unsafe { simd.store(x.add(j), key_weights.map_or(w, |weights| simd.mul(w, simd.load(weights.as_ptr().add(j))))) };
        };
        // SAFETY: the array holds 16 ≥ LANES values.
        let mut sum = unsafe { simd.load(self.sums.as_ptr()) };
        let mut change = None;
        if let Some(before) = self.shift.filter(|_| K::SHIFTS) {
            let shifted = |j: usize| decay.map_or(score(j), |decay| simd.add(score(j), log_decay(decay, j)));
            let lowest = simd.splat(f32::NEG_INFINITY);
            let mut highest = lowest;
            for i in 0..vectors {
                highest = simd.max(masked(i * lanes, shifted(i * lanes), lowest), highest);
            }
            let mut rho = before;
            if simd.any(simd.gt(highest, simd.splat(before + SLACK))) {
                rho = simd.maximum(highest);
                let factor = (before - rho).exp();
                sum = simd.mul(sum, simd.splat(factor));
                change = Some((rho, factor));
            }
            let rho = simd.splat(rho);
            for i in 0..vectors {
                let w = masked(i * lanes, kernel.values(simd, simd.sub(shifted(i * lanes), rho)), zero);
                sum = simd.add(sum, w);
                finish(i * lanes, w);
            }
        } else {
            for i in 0..vectors {
                let j = i * lanes;
                let mut w = kernel.values(simd, masked(j, score(j), zero));
                if let Some(decay) = decay {
                    w = simd.mul(w, simd.exp(log_decay(decay, j)));
                }
                let w = masked(j, w, zero);
                sum = simd.add(sum, w);
                finish(j, w);
            }
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

/// The decay of a row, with the place for its gradient.
pub struct DecayGrad<'a> {
    /// The decay.
    pub decay: DecayRow<'a>,
    /// −Σ_t ∂/∂log M_ts is added here, for each key of the tile.
    pub dcolumns: &'a mut [f32],
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
    /// The row maximum, where one was subtracted.
    pub shift: Option<f32>,
    /// The gradient of the sum of weights.
    pub dz: f32,
    /// What else multiplies each key's value.
    pub key_weights: Option<&'a [f32]>,
}

impl BackwardRow<'_> {
    /// Σ_s ∂/∂log M_ts.
    #[inline(always)]
    pub fn run<S: Simd, K: KernelPart>(self, simd: S, kernel: &K) -> f32 {
        if self.x.len() == TILE && self.visible >= TILE {
            if self.decay.is_none() && self.key_weights.is_none() {
                self.pass::<S, K, true, true>(simd, kernel)
            } else {
                self.pass::<S, K, true, false>(simd, kernel)
            }
        } else {
            self.pass::<S, K, false, false>(simd, kernel)
        }
    }

    #[inline(always)]
    fn pass<S: Simd, K: KernelPart, const WHOLE: bool, const PLAIN: bool>(mut self, simd: S, kernel: &K) -> f32 {
        let lanes = S::LANES;
        let n = if WHOLE { TILE } else { self.x.len() };
        let visible = if WHOLE { TILE } else { self.visible.min(n) };
        let vectors = visible.div_ceil(lanes);
        let (clamp, zero) = (simd.splat(self.clamp), simd.splat(0.0));
        let dz = simd.splat(self.dz);
        let shift = self.shift.filter(|_| K::SHIFTS);
        let rho = simd.splat(shift.unwrap_or(0.0));
        let (x, dp) = (self.x.as_mut_ptr(), self.dp.as_mut_ptr());
        let mut decay = if PLAIN { None } else { self.decay.as_mut() };
        let key_weights = if PLAIN { None } else { self.key_weights };
        let mut total = zero;
        for i in 0..vectors {
            let j = i * lanes;
            let masked = |v: S::V| if WHOLE { v } else { simd.select(simd.first(visible - j), v, zero) };
            // SAFETY: j + LANES ≤ n, since n is a multiple of LANES; all slices are as long as the row.
            unsafe {
                let raw = simd.load(x.add(j));
                let mut v = masked(simd.min(clamp, raw));
                let log = decay.as_ref().map(|d| simd.sub(simd.splat(d.decay.row), simd.load(d.decay.columns.as_ptr().add(j))));
                let (mut w, mut slope);
                if shift.is_some() {
                    if let Some(log) = log {
                        v = simd.add(v, log);
                    }
                    (w, slope) = kernel.values_and_slopes(simd, simd.sub(v, rho));
                } else {
                    (w, slope) = kernel.values_and_slopes(simd, v);
                    if let Some(log) = log {
                        let m = simd.exp(log);
                        (w, slope) = (simd.mul(w, m), simd.mul(slope, m));
                    }
                }
                let mut g = simd.load(dp.add(j));
                if let Some(weights) = key_weights {
                    g = simd.mul(g, simd.load(weights.as_ptr().add(j)));
                }
                g = simd.add(g, dz);
                let dx = simd.select(simd.gt(raw, clamp), zero, simd.mul(g, slope));
                w = masked(w);
                simd.store(x.add(j), w);
                simd.store(dp.add(j), masked(dx));
                if let Some(d) = &mut decay {
                    let a = masked(simd.mul(g, w));
                    let dcolumns = d.dcolumns.as_mut_ptr().add(j);
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
        if decay.is_some() { simd.sum(total) } else { 0.0 }
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
    /// The gradient of the sum of weights.
    pub dz: f32,
    /// What else multiplies each key's value.
    pub key_weights: Option<&'a [f32]>,
}

impl CoefficientRow<'_> {
    /// Adds Σ_s ∂/∂a_n to `grads`, one for each order.
    #[inline(always)]
    pub fn run(self, kernel: &crate::Kernel, grads: &mut [f64]) {
        let mut slopes = [0.0; crate::parts::taylor::MAX_ORDER + 1];
        let slopes = &mut slopes[..grads.len()];
        for s in 0..self.visible.min(self.x.len()) {
            let weight = self.key_weights.map_or(1.0, |weights| weights[s]);
            let m = self.decay.as_ref().map_or(1.0, |decay| (decay.row - decay.columns[s]).exp());
            let g = ((self.dp[s] * weight + self.dz) * m) as f64;
            let x = if self.x[s] > self.clamp { self.clamp } else { self.x[s] };
            kernel.learned_slopes(x as f64, slopes);
            for (grad, slope) in grads.iter_mut().zip(&*slopes) {
                *grad += g * slope;
            }
        }
    }
}
