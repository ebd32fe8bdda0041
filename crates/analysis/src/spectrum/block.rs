//! A block of rows of one head and their visible keys: scores, terms, entropy, and the output truncated at every order.
//!
//! All scores of the rows are stored, [rows, keys]: memory is linear in the length. Weights of all orders are computed for one tile of
//! keys at a time and multiplied with its values in one product.

use std::cell::Cell;
use std::ops::Range;

use termwise_attention::parts::kernel::Sign;
use termwise_attention::{Denominator, Kernel, ScaledSums, View};
use termwise_kernels::gemm::{Matrix, Write, sequential_product};

use super::ORDERS;
use super::lanes::{LANES, Lane, exp, load, map, splat, sum, vectorized, zip, zip_three};
use super::series::{Cuts, Pairs, Sink};
use super::sums::{Scores, Sums};

/// Inputs shared by all rows of a head.
pub struct Head<'a> {
    pub view: &'a View,
    /// `None` if the kernel has no Taylor series.
    pub cuts: Option<&'a Cuts>,
    /// Keys per tile, a multiple of [`LANES`].
    pub tile: usize,
}

thread_local! {
    /// Reused, because allocation would dominate short blocks.
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// Buffers that blocks reuse.
#[derive(Default)]
struct Scratch {
    q: Vec<f64>,
    scores: Vec<f64>,
    positive: Vec<f64>,
    negative: Vec<f64>,
    powers: Vec<Lane>,
    pairs: Pairs,
    weights: Vec<f64>,
    products: Vec<f64>,
    z: Vec<Lane>,
}

/// A score that is NaN or infinite, at this query and key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NotFinite {
    pub query: usize,
    pub key: usize,
}

/// Log scale and logarithmic sum of one row.
#[derive(Clone, Copy, Default)]
struct RowScale {
    /// Subtracted from exponents.
    rho: f64,
    /// Σ w·ln w, in the log scale ρ.
    logs: f64,
}

/// One block, as a value that is inlined per instruction set.
struct Work<'a> {
    head: &'a Head<'a>,
    rows: &'a [usize],
    scratch: &'a mut Scratch,
}

impl pulp::NullaryFnOnce for Work<'_> {
    type Output = Result<Sums, NotFinite>;

    #[inline(always)]
    fn call(self) -> Self::Output {
        self.head.run(self.rows, self.scratch)
    }
}

/// Whether a shift of all scores of a row cancels: exp divided by the sum of its weights, without floor, epsilon or sink.
pub fn shift_cancels(view: &View) -> bool {
    let plain = matches!(&view.variant.denominator, Denominator::Sum(sum) if sum.floor.is_none() && sum.eps.is_none() && !sum.sink);
    matches!(view.variant.near.kernel, Kernel::Exp(_)) && plain
}

impl Head<'_> {
    /// Sums over these positions, ascending.
    pub fn block(&self, rows: &[usize]) -> Result<Sums, NotFinite> {
        let mut scratch = SCRATCH.take();
        let result = vectorized(Work { head: self, rows, scratch: &mut scratch });
        SCRATCH.set(scratch);
        result
    }

    #[inline(always)]
    fn run(&self, rows: &[usize], scratch: &mut Scratch) -> Result<Sums, NotFinite> {
        let View { d, q, k, .. } = self.view;
        let reach = rows.iter().max().map_or(0, |last| last + 1);
        let Scratch { q: queries, scores, .. } = scratch;
        queries.clear();
        rows.iter().for_each(|&t| queries.extend_from_slice(&q[t * d..][..*d]));
        scores.resize(rows.len() * reach, 0.0);
        let (queries, keys) = (Matrix::new(queries, rows.len(), *d), Matrix::new(k, reach, *d));
        sequential_product(scores, reach, Write::Replace, queries, keys.transposed());
        let mut sums = Sums::new(self.cuts.map_or(0, |cuts| cuts.orders().len()));
        sums.rows = rows.len() as u64;
        for (row, &t) in rows.iter().enumerate() {
            let x = &mut scratch.scores[row * reach..][..=t];
            x.iter_mut().for_each(|x| *x = self.view.score(*x));
            // Sinks, then the window; without one, all keys and none.
            let hidden = self.view.hidden(t);
            for (first, seen) in [(0, 0..hidden.start), (hidden.end, hidden.end..t + 1)] {
                let x = &scratch.scores[row * reach..][seen];
                if x.is_empty() {
                    continue;
                }
                let found = describe(x);
                if !found.mean.is_finite() {
                    let key = first + x.iter().position(|x| !x.is_finite()).unwrap_or(0);
                    return Err(NotFinite { query: t, key });
                }
                sums.scores.merge(&found);
            }
            if self.cuts.is_some() {
                self.split(row, t, reach, scratch, &mut sums);
            }
        }
        match self.cuts {
            Some(cuts) => {
                self.cut(cuts, rows, reach, scratch, &mut sums);
                if shift_cancels(self.view) {
                    // Softmax is invariant to the mean score of a row; its truncated series is not.
                    for (row, &t) in rows.iter().enumerate() {
                        self.center(t, &mut scratch.scores[row * reach..][..=t]);
                    }
                    let mut centered = Sums::new(cuts.orders().len());
                    self.cut(cuts, rows, reach, scratch, &mut centered);
                    sums.centered_errors = centered.errors;
                }
            }
            None => self.plain_entropy(rows, reach, &scratch.scores, &mut sums),
        }
        Ok(sums)
    }

    /// Subtracts the mean over the visible keys of position t.
    fn center(&self, t: usize, x: &mut [f64]) {
        let hidden = self.view.hidden(t);
        let count = x.len() - hidden.len();
        let mean = x[..hidden.start].iter().chain(&x[hidden.end..]).sum::<f64>() / count.max(1) as f64;
        x.iter_mut().for_each(|x| *x -= mean);
    }

    /// Powers of a row's scores by their sign.
    #[inline(always)]
    fn split(&self, row: usize, t: usize, reach: usize, scratch: &mut Scratch, sums: &mut Sums) {
        let Scratch { scores, positive, negative, powers, .. } = scratch;
        positive.resize(t + 1, 0.0);
        negative.resize(t + 1, 0.0);
        powers.resize(ORDERS, splat(0.0));
        let (mut above, mut below) = (0, 0);
        let (hidden, x) = (self.view.hidden(t), &scores[row * reach..][..=t]);
        // Both lists are written without a branch; unused values are overwritten.
        for &x in x[..hidden.start].iter().chain(&x[hidden.end..]) {
            positive[above] = x;
            negative[below] = -x;
            let is_above = usize::from(x >= 0.0);
            above += is_above;
            below += 1 - is_above;
        }
        sums.positive.add(&positive[..above], powers);
        sums.negative.add(&negative[..below], powers);
    }

    /// Entropy of nonnegative weights of kernels without a Taylor series.
    #[inline(always)]
    fn plain_entropy(&self, rows: &[usize], reach: usize, scores: &[f64], sums: &mut Sums) {
        let View { variant, log_decay, .. } = self.view;
        if variant.near.kernel.sign() == Sign::Mixed {
            return;
        }
        for (row, &t) in rows.iter().enumerate() {
            let (mut z, mut logs) = (0.0, 0.0);
            for s in self.view.seen(t) {
                let w = (log_decay[t] - log_decay[s]).exp() * variant.near.kernel.value(scores[row * reach + s]);
                z += w;
                logs += if w > 0.0 { w * w.ln() } else { 0.0 };
            }
            if z > 0.0 {
                sums.entropy.add(z.ln() - logs / z, t + 1 - self.view.hidden(t).len());
            }
        }
    }

    /// Weights of all orders, tile by tile, and their outputs.
    #[inline(always)]
    fn cut(&self, cuts: &Cuts, rows: &[usize], reach: usize, scratch: &mut Scratch, sums: &mut Sums) {
        let View { e, v, variant, .. } = self.view;
        let (tile, slots) = (self.tile, cuts.orders().len() + 1);
        let Scratch { scores, pairs, weights, products, z, .. } = scratch;
        // Old values are overwritten before they are read.
        weights.resize(slots * rows.len() * tile, 0.0);
        products.clear();
        products.resize(slots * rows.len() * e, 0.0);
        z.clear();
        z.resize(slots * rows.len(), splat(0.0));
        let mut row_scales: Vec<RowScale> =
            rows.iter().enumerate().map(|(row, &t)| RowScale { rho: self.rho(cuts, t, &scores[row * reach..][..=t]), logs: 0.0 }).collect();
        for start in (0..reach).step_by(tile) {
            let width = tile.min(reach - start);
            for (row, &t) in rows.iter().enumerate() {
                let seen = (t + 1).saturating_sub(start).min(width);
                let x = &scores[row * reach + start..][..seen];
                let mut tile_scratch = TileScratch { weights, z, row, rows: rows.len(), tile };
                self.weigh(cuts, t, start, x, &mut row_scales[row], pairs, &mut tile_scratch);
                for slot in 0..slots {
                    tile_scratch.weights[(slot * rows.len() + row) * tile..][..width][seen..].fill(0.0);
                }
            }
            let (weights, values) = (Matrix::strided(weights, slots * rows.len(), width, tile), Matrix::new(&v[start * e..], width, *e));
            sequential_product(products, *e, Write::Add, weights, values);
        }
        let entropic = variant.near.kernel.sign() != Sign::Mixed;
        let (mut whole, mut part) = (vec![0.0; *e], vec![0.0; *e]);
        for (row, (&t, row_scale)) in rows.iter().zip(&row_scales).enumerate() {
            let at = |slot: usize| slot * rows.len() + row;
            let own = sum(z[at(slots - 1)]);
            if entropic && own > 0.0 {
                sums.entropy.add(own.ln() - row_scale.logs / own, t + 1 - self.view.hidden(t).len());
            }
            let u = &mut products[at(slots - 1) * e..][..*e];
            // The log scale is removed first if the variant does not cancel it.
            let (scale, rho) = if variant.shifts() { (1.0, row_scale.rho) } else { (row_scale.rho.exp(), 0.0) };
            u.iter_mut().for_each(|u| *u *= scale);
            self.view.finish(variant, t, ScaledSums { u, z: own * scale, rho }, &mut whole);
            sums.outputs += whole.iter().map(|y| y * y).sum::<f64>();
            for slot in 0..slots - 1 {
                let cut = sum(z[at(slot)]);
                sums.shares[slot] += cut * (-row_scale.rho).exp() / own;
                self.view.finish(variant, t, ScaledSums { u: &products[at(slot) * e..][..*e], z: cut, rho: 0.0 }, &mut part);
                sums.errors[slot] += part.iter().zip(&whole).map(|(part, whole)| (part - whole) * (part - whole)).sum::<f64>();
            }
        }
    }

    /// The largest exponent of a row, which the exponential subtracts; 0 for other kernels.
    #[inline(always)]
    fn rho(&self, cuts: &Cuts, t: usize, x: &[f64]) -> f64 {
        let View { log_decay, variant, .. } = self.view;
        if !cuts.is_exp() {
            return 0.0;
        }
        let hidden = self.view.hidden(t);
        let most = |seen: Range<usize>| match variant.decay.is_some() {
            false => x[seen].iter().fold(f64::NEG_INFINITY, |most, &x| if x > most { x } else { most }),
            true => seen.fold(f64::NEG_INFINITY, |most, s| most.max(x[s] + (log_decay[t] - log_decay[s]))),
        };
        most(0..hidden.start).max(most(hidden.end..t + 1))
    }

    /// Weights of one row and one tile at every order, the last slot the whole kernel.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "a tile's place and the scratch for it")]
    fn weigh(
        &self,
        cuts: &Cuts,
        t: usize,
        start: usize,
        x: &[f64],
        row_scale: &mut RowScale,
        pairs: &mut Pairs,
        scratch: &mut TileScratch,
    ) {
        let View { log_decay, variant, .. } = self.view;
        let slots = cuts.orders().len() + 1;
        let entropic = !cuts.is_exp() && variant.near.kernel.sign() != Sign::Mixed;
        let (decays, mut logs) = (variant.decay.is_some(), splat(0.0));
        let hidden = self.view.hidden(t);
        for (index, chunk) in x.chunks(LANES).enumerate() {
            let (place, count) = (index * LANES, chunk.len());
            let from = start + place;
            let within = |s: usize| s.clamp(from, from + count) - from;
            let hidden = within(hidden.start)..within(hidden.end);
            if hidden.len() == count {
                (0..slots).for_each(|slot| scratch.put(slot, place, splat(0.0)));
                continue;
            }
            let lane = load(chunk, 0.0);
            let mut exponent = splat(0.0);
            if decays {
                let c = load(&log_decay[start + place..][..count], log_decay[t]);
                exponent = map(c, |c| log_decay[t] - c);
            }
            let decay = decays.then(|| exp(exponent));
            let mut put =
                Put { scratch, place, count, hidden: hidden.clone(), decay, last: entropic.then_some(slots - 1), logs: &mut logs };
            cuts.values(lane, pairs, &mut put);
            if cuts.is_exp() {
                let exponent = zip(lane, exponent, |x, decay| x + decay - row_scale.rho);
                let w = seen(exp(exponent), count, &hidden);
                scratch.put(slots - 1, place, w);
                logs = zip_three(logs, w, exponent, |logs, w, exponent| logs + if w > 0.0 { w * exponent } else { 0.0 });
            }
        }
        row_scale.logs += sum(logs);
    }
}

/// Applies decay and mask to the weights of one vector of keys, and stores them.
struct Put<'a, 'b> {
    scratch: &'a mut TileScratch<'b>,
    place: usize,
    /// Keys of the vector up to the row's own position.
    count: usize,
    /// Masked keys among them.
    hidden: Range<usize>,
    decay: Option<Lane>,
    /// The slot of the full kernel, if its w·ln w is needed.
    last: Option<usize>,
    logs: &'a mut Lane,
}

impl Sink for Put<'_, '_> {
    #[inline(always)]
    fn put(&mut self, slot: usize, w: Lane) {
        let w = match self.decay {
            Some(decay) => zip(w, decay, |w, decay| w * decay),
            None => w,
        };
        let w = seen(w, self.count, &self.hidden);
        self.scratch.put(slot, self.place, w);
        if self.last == Some(slot) {
            // 0·ln 0 = 0
            *self.logs = zip(*self.logs, w, |logs, w| logs + if w > 0.0 { w * w.ln() } else { 0.0 });
        }
    }
}

/// The first `count` values without the masked ones; zeros elsewhere.
#[inline(always)]
fn seen(w: Lane, count: usize, hidden: &Range<usize>) -> Lane {
    let mut out = w;
    if !hidden.is_empty() {
        out[hidden.clone()].fill(0.0);
    }
    if count < LANES {
        out[count..].fill(0.0);
    }
    out
}

/// Destination of the weights of a row.
struct TileScratch<'a> {
    weights: &'a mut [f64],
    z: &'a mut [Lane],
    row: usize,
    rows: usize,
    tile: usize,
}

impl TileScratch<'_> {
    #[inline(always)]
    fn put(&mut self, slot: usize, place: usize, w: Lane) {
        let at = slot * self.rows + self.row;
        self.weights[at * self.tile + place..][..LANES].copy_from_slice(&w);
        self.z[at] = zip(self.z[at], w, |z, w| z + w);
    }
}

/// Mean, sum of squared deviations and bounds of a row.
#[inline(always)]
fn describe(x: &[f64]) -> Scores {
    let (mut total, mut low, mut high) = (splat(0.0), splat(f64::INFINITY), splat(f64::NEG_INFINITY));
    for chunk in x.chunks(LANES) {
        total = zip(total, load(chunk, 0.0), |a, b| a + b);
        low = zip(low, load(chunk, f64::INFINITY), |a, b| if b < a { b } else { a });
        high = zip(high, load(chunk, f64::NEG_INFINITY), |a, b| if b > a { b } else { a });
    }
    let mean = sum(total) / x.len() as f64;
    let mut squares = splat(0.0);
    for chunk in x.chunks(LANES) {
        squares = zip(squares, load(chunk, mean), |a, x| a + (x - mean) * (x - mean));
    }
    let (min, max) = (low.into_iter().fold(f64::INFINITY, f64::min), high.into_iter().fold(f64::NEG_INFINITY, f64::max));
    Scores { count: x.len() as u64, mean, squares: sum(squares), min, max }
}
