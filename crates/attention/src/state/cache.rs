//! The memory of kernels without a finite map: keys and values, for exact decoding.
//!
//! All of them, or the sinks and a window: keys that no later query sees are forgotten in whole blocks, so that what a
//! cache holds is at most the sinks, the window and one block.
//!
//! Keys lie transposed in blocks, [blocks, d, BLOCK], so that the scores of a block are sums of vectors over keys; values by
//! rows, [keys, ep]. Decoding walks the blocks with a running maximum where the variant subtracts one, and finishes each row of
//! scores with the kernels of the fused engine, so that clamp, decay and kernel mean exactly the same.

use crate::kernels::score_rows::{DecayRow, ForwardRow, Rescale, Visible, soft_cap};
use crate::kernels::simd::{Simd, Task};
use crate::parts::distance::Distance;
use crate::real::larger;
use crate::{Buffer, Error, Kernel};

/// Keys of a block: the tile of the fused engine, whose row kernels have their fastest form for it.
pub(crate) const BLOCK: usize = 128;

/// What one head keeps for each key besides the shared key and value; empty where its variant has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Column {
    /// I_s·κ_s
    pub weights: Vec<f32>,
    /// c_s
    pub decay: Vec<f64>,
}

/// Keys and values of one state group of one batch row.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    pub d: usize,
    /// e in whole vectors.
    pub ep: usize,
    /// Which keys its heads see.
    pub distance: Distance,
    /// Keys held.
    pub len: usize,
    /// Keys forgotten between the sinks and the others.
    pub forgotten: usize,
    /// Where a key as far queries meet it starts among the d values of a key: 0 where it is the same as near queries meet.
    pub far_row: usize,
    /// Whether keys that have left the window are in a state of far keys, sinks aside.
    pub far_in_state: bool,
    /// [blocks, d, BLOCK]
    pub keys: Buffer,
    /// [blocks·BLOCK, ep]
    pub values: Buffer,
    /// One for each head of the group.
    pub columns: Vec<Column>,
}

impl Cache {
    pub fn new(d: usize, ep: usize, heads: usize, distance: Distance) -> Cache {
        let (keys, values) = (Buffer::default(), Buffer::default());
        Cache {
            d,
            ep,
            distance,
            len: 0,
            forgotten: 0,
            far_row: 0,
            far_in_state: false,
            keys,
            values,
            columns: vec![Column::default(); heads],
        }
    }

    pub fn bytes(&self) -> usize {
        let columns: usize = self.columns.iter().map(|c| 4 * c.weights.capacity() + 8 * c.decay.capacity()).sum();
        self.keys.bytes() + self.values.bytes() + columns
    }

    /// Makes room for `more` keys; grows by half at least, so that copying costs a constant per key.
    pub fn reserve(&mut self, more: usize) -> Result<(), Error> {
        let Distance { window, sinks } = self.distance;
        let most = sinks.saturating_add(window).saturating_add(BLOCK - 1);
        let held = self.values.len() / self.ep;
        let needed = (self.len + more).min(most);
        if needed <= held {
            return Ok(());
        }
        let blocks = needed.max(held + held / 2).min(most).div_ceil(BLOCK);
        let used = self.len.div_ceil(BLOCK);
        let grown = |old: &Buffer, block: usize| -> Result<Buffer, Error> {
            let missing = Error::Memory { values: usize::MAX, bytes: 4 };
            let mut new = Buffer::zeros(blocks.checked_mul(block).ok_or(missing)?)?;
            new[..used * block].copy_from_slice(&old[..used * block]);
            Ok(new)
        };
        let (keys, values) = (grown(&self.keys, self.d * BLOCK)?, grown(&self.values, BLOCK * self.ep)?);
        (self.keys, self.values) = (keys, values);
        Ok(())
    }

    /// The position of the next key.
    pub fn next_position(&self) -> usize {
        self.len + self.forgotten
    }

    /// Which keys of a block the query at position t sees with the near kernel, for this distance, which is the cache's or less.
    #[inline(always)]
    pub fn visible(&self, distance: Distance, block: usize, t: usize) -> Visible {
        let (first, Distance { window, sinks }) = (block * BLOCK, distance);
        let until = (self.len - first).min(BLOCK);
        let from = (t + 1).saturating_sub(window).saturating_sub(self.forgotten + first);
        Visible { from: from.min(until), until, sinks: sinks.saturating_sub(first).min(until) }
    }

    /// Which keys of a block the query at position t sees with the far kernel: those that have left the window and
    /// are in no state.
    #[inline(always)]
    pub fn far_visible(&self, distance: Distance, block: usize, t: usize) -> Visible {
        let first = block * BLOCK;
        let held = (self.len - first).min(BLOCK);
        let place = |position: usize| position.saturating_sub(self.forgotten + first).min(held);
        let until = place((t + 1).saturating_sub(distance.window));
        let entered = if self.far_in_state { self.next_position().saturating_sub(distance.window) } else { 0 };
        let from = place(entered).max(distance.sinks.saturating_sub(first).min(held));
        Visible { from: from.min(until), until, sinks: 0 }
    }

    /// Where the key of a position after the sinks is held.
    pub fn place(&self, position: usize) -> usize {
        position - self.forgotten
    }

    /// The key of a position after the sinks, as far queries meet it, into `key` [its width].
    pub fn far_key(&self, position: usize, key: &mut [f32]) {
        let s = self.place(position);
        let rows = &self.keys[(s / BLOCK * self.d + self.far_row) * BLOCK..];
        for (key, row) in key.iter_mut().zip(rows.chunks_exact(BLOCK)) {
            *key = row[s % BLOCK];
        }
    }

    /// The keys of a block as near or far queries of this width meet them.
    pub fn block_keys(&self, block: usize, far: bool, width: usize) -> &[f32] {
        let first = if far { self.far_row } else { 0 };
        &self.keys[(block * self.d + first) * BLOCK..][..width * BLOCK]
    }

    /// Forgets keys that queries from position t on do not see: as many whole blocks as there are, or all but the sinks.
    pub fn forget(&mut self, t: usize) {
        let sinks = self.distance.sinks.min(self.len);
        let unseen = (t + 1).saturating_sub(self.distance.window).saturating_sub(self.forgotten + sinks).min(self.len - sinks);
        let gone = if unseen == self.len - sinks { unseen } else { unseen / BLOCK * BLOCK };
        if gone == 0 {
            return;
        }
        let (d, ep, end) = (self.d, self.ep, self.len);
        if gone < end - sinks {
            // Whole blocks: every key stays in its lane.
            let lane = sinks % BLOCK;
            for to in sinks / BLOCK..(end - gone).div_ceil(BLOCK) {
                let lane = if to == sinks / BLOCK { lane } else { 0 };
                for row in 0..d {
                    let at = (to * d + row) * BLOCK;
                    let from = at + gone * d;
                    self.keys.copy_within(from + lane..from + BLOCK, at + lane);
                }
            }
            self.values.copy_within((sinks + gone) * ep..end * ep, sinks * ep);
        }
        for column in &mut self.columns {
            column.weights.drain(sinks.min(column.weights.len())..(sinks + gone).min(column.weights.len()));
            column.decay.drain(sinks.min(column.decay.len())..(sinks + gone).min(column.decay.len()));
        }
        self.len -= gone;
        self.forgotten += gone;
    }

    /// Whether a cache at this position can hold so many keys: all, or at least what the next query sees, and the one that it takes into a state.
    pub fn may_hold(&self, len: usize, position: usize) -> bool {
        let Distance { window, sinks } = self.distance;
        let most = sinks.saturating_add(window).saturating_add(BLOCK - 1);
        let least = sinks.saturating_add(window) - !self.far_in_state as usize;
        len == position || (len < position && len <= most && len >= least)
    }

    /// Whether the next key, if queries go on at position t, can be left out: none would see it, and nothing is held after the sinks.
    pub fn skips(&self, t: usize) -> bool {
        self.len == self.distance.sinks && self.next_position() + self.distance.window <= t
    }

    /// Appends a prepared key and value [e], for which there is room; `far` is the key as far queries meet it, where that is another. Both together
    /// have d values.
    pub fn push(&mut self, key: &[f32], far: &[f32], value: &[f32]) {
        let (block, lane) = (self.len / BLOCK, self.len % BLOCK);
        let keys = &mut self.keys[block * self.d * BLOCK..][..self.d * BLOCK];
        for (row, &key) in keys.chunks_exact_mut(BLOCK).zip(key.iter().chain(far)) {
            row[lane] = key;
        }
        self.values[self.len * self.ep..][..value.len()].copy_from_slice(value);
        self.len += 1;
    }

    /// Multiplies each channel of all keys.
    pub fn decay_keys(&mut self, m: &[f32]) {
        let used = self.blocks() * self.d * BLOCK;
        for (row, m) in self.keys[..used].chunks_exact_mut(BLOCK).zip(m.iter().cycle()) {
            row.iter_mut().for_each(|k| *k *= m);
        }
    }

    /// Key s into `key` [d].
    pub fn key(&self, s: usize, key: &mut [f32]) {
        let keys = &self.keys[s / BLOCK * self.d * BLOCK..][..self.d * BLOCK];
        for (key, row) in key.iter_mut().zip(keys.chunks_exact(BLOCK)) {
            *key = row[s % BLOCK];
        }
    }

    /// Value s, padded [ep].
    pub fn value(&self, s: usize) -> &[f32] {
        &self.values[s * self.ep..][..self.ep]
    }
}

/// One query of one head on its way through the blocks.
pub(crate) struct Query<'a> {
    /// The prepared query.
    pub q: &'a [f32],
    /// Which keys it meets.
    pub distance: Distance,
    pub far: bool,
    /// Bound with the coefficients of the head.
    pub kernel: &'a Kernel,
    /// Soft cap of scores.
    pub cap: Option<f32>,
    /// Upper bound of scores, +∞ for none.
    pub clamp: f32,
    /// How the row is kept within float32.
    pub rescale: Rescale,
    /// c_t
    pub log_decay: f64,
    /// U [ep], zero at first.
    pub u: &'a mut [f32],
    /// The rest of the row.
    pub sums: &'a mut Sums,
}

/// The numbers of a row besides U.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums {
    /// z spread over the lanes of a vector.
    pub lanes: [f32; 16],
    /// ρ
    pub rho: f32,
    /// The largest |score| before the clamp.
    pub largest: f32,
    /// z over far keys in a state.
    pub far_z: f32,
}

impl Sums {
    /// Before the first key. A sink b is as if it were one: the running maximum starts with it.
    pub fn new(rescale: Rescale, sink: Option<f32>) -> Sums {
        let rho = sink.filter(|_| rescale == Rescale::SubtractMax).unwrap_or(rescale.start());
        Sums { lanes: [0.0; 16], rho, largest: 0.0, far_z: 0.0 }
    }

    pub fn z(&self) -> f32 {
        self.lanes.iter().sum()
    }
}

impl Cache {
    pub fn blocks(&self) -> usize {
        self.len.div_ceil(BLOCK)
    }

    /// Adds one block of keys to U and z of one head's query.
    #[inline(always)]
    pub fn decode<S: Simd>(&self, simd: S, block: usize, column: usize, query: &mut Query) {
        simd.call(Decode { cache: self, block, column, query });
    }
}

/// [`Cache::decode`], compiled once for all who call it.
struct Decode<'a, 'b> {
    cache: &'a Cache,
    block: usize,
    column: usize,
    query: &'a mut Query<'b>,
}

impl Task for Decode<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Decode { cache, block, column, query } = self;
        let column = &cache.columns[column];
        let keys = cache.block_keys(block, query.far, query.q.len());
        let (first, t) = (block * BLOCK, cache.next_position() - 1);
        let seen = if query.far { cache.far_visible(query.distance, block, t) } else { cache.visible(query.distance, block, t) };
        let visible = seen.until;
        if visible == 0 {
            return;
        }
        let mut x = [0.0f32; BLOCK];
        scores(simd, query.q, keys, &mut x);
        query.sums.largest = largest_score(simd, seen, &x, query.sums.largest);
        let mut differences = [0.0f32; BLOCK];
        let mut decay = None;
        if !column.decay.is_empty() {
            for (difference, c) in differences.iter_mut().zip(&column.decay[first..first + visible]) {
                *difference = (c - query.log_decay) as f32;
            }
            decay = Some(DecayRow { row: 0.0, columns: &differences });
        }
        let mut padded = [0.0f32; BLOCK];
        let key_weights = match column.weights.get(first..first + BLOCK) {
            _ if column.weights.is_empty() => None,
            Some(whole) => Some(whole),
            None => {
                padded[..visible].copy_from_slice(&column.weights[first..first + visible]);
                Some(&padded[..])
            }
        };
        if let Some(cap) = query.cap {
            soft_cap(simd, &mut x, cap);
        }
        let rho = query.rescale.of(query.sums.rho);
        let row = ForwardRow { x: &mut x, visible: seen, clamp: query.clamp, decay, rho, sums: &mut query.sums.lanes, key_weights };
        if let Some((now, factor)) = query.kernel.forward_row(simd, row) {
            query.sums.rho = now;
            query.u.iter_mut().for_each(|u| *u *= factor);
        }
        weighted_sum(simd, &x[..visible], &cache.values[first * cache.ep..], query.u);
    }
}

/// x_s = Σ_j q_j·K_js over a block.
#[inline(always)]
fn scores<S: Simd>(simd: S, q: &[f32], keys: &[f32], x: &mut [f32; BLOCK]) {
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

/// The largest |x| of the keys that are seen and of those before, `so_far`; NaN where any is NaN.
#[inline(always)]
pub(crate) fn largest_score<S: Simd>(simd: S, seen: Visible, x: &[f32; BLOCK], so_far: f32) -> f32 {
    // `max` gives its second argument where one is NaN: it keeps a NaN so far, and drops one of x, which the sum of 0·x finds.
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
pub(crate) fn weighted_sum<S: Simd>(simd: S, weights: &[f32], values: &[f32], u: &mut [f32]) {
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

impl Cache {
    /// Forgets all keys; memory stays.
    pub fn clear(&mut self) {
        (self.len, self.forgotten) = (0, 0);
        for column in &mut self.columns {
            column.weights.clear();
            column.decay.clear();
        }
    }
}
