//! The forward pass over one tile of queries.

use std::ops::Range;

use rayon::prelude::*;

use crate::epilogue::{FarSums, join};
use crate::fused::blocks::{output_blocks, sum_blocks};
use crate::fused::call::Call;
use crate::fused::epilogue::{self, Outputs, RowSums};
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::CallPlan;
use crate::fused::prepare::channel_decay::ScoreRows;
use crate::fused::prepare::gates::decay_columns;
use crate::fused::prepared::Prepared;
use crate::fused::tiles::split;
use crate::parts::distance::Distance;
use crate::state::block::BLOCK;
use crate::state::kv_cache::KvCache;
use crate::{Buffer, Error, KeyRange, Report};
use termwise_kernels::bf16_tile::{TileBf16, TileF32, TilePrecision};
use termwise_kernels::real::larger;
use termwise_kernels::score_rows::{DecayRow, ForwardRow, Rescale, Visible, soft_cap};
use termwise_kernels::simd::{Simd, Task, dispatch};
use termwise_kernels::tile_gemm::multiply;
use termwise_kernels::{PAD, ROWS, TILE};

scratch_memory! {
    /// Results of tiles beyond y and the saved sums.
    TileScratch {
        /// The largest |score| of each tile of queries that reads a cache [N, tiles].
        largest: Buffer,
    }
}

impl TileScratch {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        Ok(self.largest.ensure(l.head_count() * l.tiles)?)
    }
}

/// Values of task memory that [`run`] needs.
pub fn task_len(l: &CallPlan) -> usize {
    l.branches() * TILE * (l.dp + l.ep + 2) + if l.bf16 { converted_len(l) } else { 0 }
}

/// Values of the converted operands of a tile: q, keys, weights and values, and twice the values that one row sees.
fn converted_len(l: &CallPlan) -> usize {
    TILE * (l.dp + l.width + ROWS + 3 * l.ep)
}

/// y of all heads that see every key, and their sums if they are saved. One task per head and tile of queries.
pub fn run(prepared: &Prepared, own: &mut TileScratch, saved: Option<[&mut [f32]; 3]>, y: &mut [f32]) -> Report {
    match prepared.call.plan.bf16 {
        true => run_in(TileBf16::selected(), prepared, own, saved, y),
        false => run_in(TileF32, prepared, own, saved, y),
    }
}

fn run_in<P: TilePrecision>(
    precision: P,
    prepared: &Prepared,
    own: &mut TileScratch,
    saved: Option<[&mut [f32]; 3]>,
    y: &mut [f32],
) -> Report {
    let (call, l, s) = (&prepared.call, prepared.call.plan, prepared.call.plan.shape);
    let [u, z, rho] = sum_blocks(l, saved, 1, &l.tile_bounds);
    let y = output_blocks(l, y, 1, &l.tile_bounds);
    // One head after another, so its keys and values stay in the second-level cache; long tiles first.
    let all = u.par().zip(z.par()).zip(rho.par()).zip(y.par()).zip(own.largest.par_iter_mut()).enumerate().rev().with_max_len(1);
    let reports = all.map(|(task, ((((mut u, mut z), mut rho), mut y), largest))| {
        let (n, tile) = (task / l.tiles, task % l.tiles);
        let (b, h) = (n / s.heads, n % s.heads);
        if l.runs_in_chunks(h) || l.heads[h].variant.is_sequential() {
            return Report::default();
        }
        call.tasks.with(|memory| {
            let (converted, memory) = memory.split_at_mut(if P::CONVERTS { converted_len(l) } else { 0 });
            let (q, memory) = memory.split_at_mut(TILE * l.dp);
            let rows = l.tile_bounds[tile + 1] - l.tile_bounds[tile];
            let (own, memory) = row_sums(l, memory);
            let sums = if u.is_empty() { own } else { RowSums { u: u.rows(0, 0, rows), z: z.rows(0, 0, rows), rho: rho.rows(0, 0, rows) } };
            let cached = CachedKeys::of(call, b, h, Some(largest));
            let keys = |q| SeenKeys { from: 0, begun: false, q: TileQueries::Scratch(q) };
            let (far, far_sums) = match l.far[h].is_some() {
                true => {
                    let (q, memory) = memory.split_at_mut(TILE * l.dp);
                    (Some(keys(q)), row_sums(l, memory).0)
                }
                false => (None, RowSums { u: &mut [], z: &mut [], rho: &mut [] }),
            };
            let (near, to) = (keys(q), Outputs { y: &mut y, head: 0, row: 0 });
            dispatch(CallTile(ForwardTile { precision, converted, prepared, b, h, tile, near, far, cached, sums, far_sums, to }))
        })
    });
    reports.reduce(Report::default, Report::or)
}

/// Memory for the sums of a tile, and the rest.
fn row_sums<'a>(l: &CallPlan, memory: &'a mut [f32]) -> (RowSums<'a>, &'a mut [f32]) {
    let (u, rest) = memory.split_at_mut(TILE * l.ep);
    let (z, rest) = rest.split_at_mut(TILE);
    let (rho, rest) = rest.split_at_mut(TILE);
    (RowSums { u, z, rho }, rest)
}

/// One tile of queries of one head: everything from scores to y.
pub struct ForwardTile<'a, 'b, P> {
    pub precision: P,
    /// Scratch for converted operands; empty in float32.
    pub converted: &'a mut [f32],
    pub prepared: &'a Prepared<'a>,
    pub b: usize,
    pub h: usize,
    pub tile: usize,
    /// The keys that it sees; all keys if there is no window.
    pub near: SeenKeys<'a>,
    /// Its far keys, if it sees any.
    pub far: Option<SeenKeys<'a>>,
    /// Keys and values cached by earlier calls, all of which it sees.
    pub cached: Option<CachedKeys<'a>>,
    pub sums: RowSums<'a>,
    /// Memory for the sums over far keys.
    pub far_sums: RowSums<'a>,
    pub to: Outputs<'a, 'b>,
}

/// The keys of one branch that a tile of queries sees.
pub struct SeenKeys<'a> {
    /// The first tile of keys.
    pub from: usize,
    /// Whether u and z already contain the contributions of keys before `from`.
    pub begun: bool,
    /// The queries [tile, dp].
    pub q: TileQueries<'a>,
}

/// The cache of a head, and where the largest |score| of a tile is stored, if requested.
pub struct CachedKeys<'a> {
    pub cache: &'a KvCache,
    /// The index of the head in its state group.
    pub index: usize,
    pub largest: Option<&'a mut f32>,
}

impl<'a> CachedKeys<'a> {
    /// The cache that head h of batch row b continues from.
    pub fn of(call: &Call<'a>, b: usize, h: usize, largest: Option<&'a mut f32>) -> Option<CachedKeys<'a>> {
        call.past?.of(b, h).map(|(cache, index)| CachedKeys { cache, index, largest })
    }

    /// c of a block's keys minus the first of them, that first, and the weights of its values, zero after the last key.
    fn block(&self, block: usize, columns: &mut [f32; TILE], weights: &mut [f32; TILE]) -> f64 {
        const { assert!(BLOCK == TILE, "blocks of a cache are read like tiles") };
        let per_key = &self.cache.per_key[self.index];
        let first = block * BLOCK;
        let count = (self.cache.len - first).min(BLOCK);
        weights.fill(0.0);
        if !per_key.weights.is_empty() {
            weights[..count].copy_from_slice(&per_key.weights[first..first + count]);
        }
        if per_key.log_decay.is_empty() { 0.0 } else { decay_columns(&per_key.log_decay[first..first + count], columns) }
    }
}

/// The tile code as a separate function, compiled once for all callers.
pub struct CallTile<'a, 'b, P>(pub ForwardTile<'a, 'b, P>);

impl<P: TilePrecision> Task for CallTile<'_, '_, P> {
    type Output = Report;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Report {
        simd.call(self.0)
    }
}

/// The visible keys of a tile.
#[derive(Clone, Copy)]
struct VisibleKeys<'a> {
    /// The block of a cache and the position of the first row, or the start and length of the tile.
    source: KeySource<'a>,
    distance: Distance,
    range: KeyRange,
}

#[derive(Clone, Copy)]
enum KeySource<'a> {
    Cached(&'a KvCache, usize, usize),
    Tile(usize, usize),
}

impl VisibleKeys<'_> {
    /// The keys visible to row r.
    #[inline(always)]
    fn row(self, r: usize) -> Visible {
        match (self.source, self.range) {
            (KeySource::Cached(cache, block, first), KeyRange::Near) => cache.near_visible(self.distance, block, first + r),
            (KeySource::Cached(cache, block, first), KeyRange::Far) => cache.far_visible(self.distance, block, first + r),
            (KeySource::Tile(start, tile), KeyRange::Near) => self.distance.visible(r, start, tile),
            (KeySource::Tile(start, tile), KeyRange::Far) => self.distance.far_visible(r, start, tile),
        }
    }

    /// Whether all of the rows see the same keys, starting with the first.
    fn all(self, rows: Range<usize>) -> bool {
        let (first, last) = (self.row(rows.start), self.row(rows.end - 1));
        first.until == last.until && last.from <= last.sinks
    }

    /// Number of keys, starting with the first, that any of the rows sees.
    #[inline(always)]
    fn rows(self, rows: Range<usize>) -> usize {
        let (first, last) = (self.row(rows.start), self.row(rows.end - 1));
        if first.from < last.until { last.until } else { last.sinks }
    }
}

/// Whether no value is NaN or infinite: a maximum of integers, which vectorizes.
#[inline(always)]
fn are_finite(values: &[f32]) -> bool {
    let mut largest = 0;
    for value in values {
        largest = largest.max(value.to_bits() & i32::MAX as u32);
    }
    largest < f32::INFINITY.to_bits()
}

/// U (+)= W·V of one row, only over its visible keys.
struct SeenProduct<'a> {
    seen: Visible,
    weights: &'a [f32],
    v: &'a [f32],
    /// Whether U already contains the sum over earlier keys.
    begun: bool,
    /// [ep]
    u: &'a mut [f32],
}

impl SeenProduct<'_> {
    #[inline(always)]
    fn multiply<S: Simd>(self, simd: S) {
        let SeenProduct { seen, weights, v, begun, u } = self;
        let ep = u.len();
        if !begun {
            u.fill(0.0);
        }
        for keys in [0..seen.sinks.min(seen.from), seen.from..seen.until] {
            if !keys.is_empty() {
                let sizes = [1, ep, keys.len()];
                multiply::<S, true>(simd, sizes, (&weights[keys.start..], TILE, 1), (&v[keys.start * ep..], ep), (&mut *u, ep));
            }
        }
    }

    /// The product of converted operands: values that the row does not see are replaced by zero, so the order of the sum does not depend on them.
    #[inline(always)]
    fn multiply_converted<S: Simd, P: TilePrecision>(self, simd: S, precision: P, [to_weights, to_v, to_right_v]: [&mut [f32]; 3]) {
        let SeenProduct { seen, weights, v, begun, u } = self;
        let (keys, ep) = (weights.len(), u.len());
        for (key, (to, v)) in to_v.chunks_exact_mut(ep).zip(v.chunks_exact(ep)).take(keys).enumerate() {
            if seen.contains(key) { to.copy_from_slice(v) } else { to.fill(0.0) }
        }
        let weights = precision.left(weights, TILE, [1, keys], to_weights);
        let v = precision.right(to_v, ep, [keys, ep], to_right_v);
        match begun {
            false => precision.multiply::<S, false>(simd, [1, ep, keys], (weights, TILE, 1), (v, ep), (u, ep)),
            true => precision.multiply::<S, true>(simd, [1, ep, keys], (weights, TILE, 1), (v, ep), (u, ep)),
        }
    }
}

/// The queries of a tile: scratch for them, or prepared rows.
pub enum TileQueries<'a> {
    Scratch(&'a mut [f32]),
    Prepared(&'a [f32]),
}

#[repr(align(64))]
struct ScoreTile([f32; ROWS * TILE]);

/// z of each row, spread over the lanes of a vector until the row is complete.
#[repr(align(64))]
struct LaneSums([[f32; 16]; TILE]);

impl<P: TilePrecision> Task for ForwardTile<'_, '_, P> {
    type Output = Report;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> Report {
        let (c, precision) = (self.prepared, self.precision);
        let l = c.call.plan;
        let s = l.shape;
        let n = self.b * s.heads + self.h;
        let lens = [l.dp, l.width, ROWS, l.ep, l.ep, l.ep].map(|width| if P::CONVERTS { TILE * width } else { 0 });
        let [to_q, to_kt, to_weights, to_v, to_seen_v, to_right_seen_v] = split(self.converted, lens);
        let g = self.h / s.group();
        let len = c.call.length(self.b);
        let (first, last) = (self.tile * l.tile, ((self.tile + 1) * l.tile).min(s.time));
        let counted = last.min(len).max(first);
        let mut scores = ScoreTile([0.0; ROWS * TILE]);
        let scores = &mut scores.0;
        let mut columns = [0.0; TILE];
        let channels = c.channels.head(l, self.b, self.h);
        let mut cached_weights = [0.0; TILE];
        let mut largest = 0.0f32;
        let begins = self.cached.as_ref().map_or(0, |cached| cached.cache.next_position());
        let distance = l.heads[self.h].variant.distance();
        let relative = distance.after(begins);
        let branches = [Some((self.near, &mut self.sums)), self.far.map(|far| (far, &mut self.far_sums))];
        for (range, branch) in KeyRange::ALL.into_iter().zip(branches) {
            let Some((keys, sums)) = branch else { continue };
            let (head, far) = (l.branch(self.h, range), range.is_far());
            let (kv, width) = (l.kv_index(head.key_transform, self.b, g), l.key_transforms[head.key_transform].width);
            let RowSums { u, z, rho } = sums;
            let (u, z, rho) = (&mut u[..(last - first) * l.ep], &mut z[..last - first], &mut rho[..last - first]);
            u[(counted - first) * l.ep..].fill(0.0);
            rho.fill(if far { head.rescale.start() } else { c.gates.first_rho(head, self.h) });
            rho[counted - first..].fill(0.0);

            let size = (counted - first) * l.dp;
            let q: &[f32] = match keys.q {
                TileQueries::Prepared(q) => &q[..size],
                TileQueries::Scratch(q) => {
                    let q = &mut q[..size];
                    c.sources.query(self.b, self.h, far).fill(simd, first, s.time, q, l.dp);
                    q
                }
            };
            let left_q = precision.left(q, l.dp, [counted - first, width], to_q);
            let mut sums = LaneSums([[0.0; 16]; TILE]);
            let sums = &mut sums.0;
            if keys.begun {
                sums.iter_mut().zip(&z[..counted - first]).for_each(|(sums, &z)| sums[0] = z);
            }
            let decay = head.variant.decays_by_head().then(|| &c.gates.decay[n * l.tp()..][..l.tp()]);
            let blocks = self.cached.as_ref().map_or(0, |cached| cached.cache.blocks());
            // Near keys: tiles that contain sinks, and those from the first on that the window of the first row reaches. Far keys: up to the last
            // that the window of the last row has left.
            let (sinks, near, end) = match far {
                false => {
                    let near = keys.from.max((first + 1).saturating_sub(relative.window) / l.tile);
                    ((keys.from..relative.sinks.div_ceil(l.tile).min(near)).len(), near, self.tile + 1)
                }
                true => (0, keys.from, last.saturating_sub(relative.window).div_ceil(l.tile).max(keys.from)),
            };
            for step in 0..blocks + sinks + end - near {
                let begun = keys.begun || step > 0;
                let (kt, pitch, v, key_weights, base, source);
                match self.cached.as_ref().filter(|_| step < blocks) {
                    Some(cached) => {
                        let c = cached.block(step, &mut columns, &mut cached_weights);
                        kt = cached.cache.block_keys(step, far, width);
                        v = &cached.cache.values[step * BLOCK * l.ep..][..BLOCK * l.ep];
                        key_weights = head.weighs_keys.then_some(&cached_weights[..]);
                        (pitch, base, source) = (BLOCK, decay.map(|_| c), KeySource::Cached(cached.cache, step, begins));
                    }
                    None => {
                        let i = step - blocks;
                        let tile = if i < sinks { keys.from + i } else { near + i - sinks };
                        let s0 = tile * l.tile;
                        kt = &c.kt[(kv * l.tiles + tile) * l.width * l.pitch..][..width * l.pitch];
                        v = &c.v[(kv * l.tp() + s0) * l.ep..][..l.tile * l.ep];
                        key_weights = c.gates.tile_weights(l, self.h, n, tile);
                        base = decay.map(|decay| decay_columns(&decay[s0..s0 + l.pitch], &mut columns));
                        (pitch, source) = (l.pitch, KeySource::Tile(s0, l.tile));
                    }
                }
                let seen =
                    VisibleKeys { source, distance: if matches!(source, KeySource::Cached(..)) { distance } else { relative }, range };
                // A weight of zero times NaN or infinity is NaN. If a value is NaN or infinite and some row does not see all keys,
                // each row is multiplied only by its visible values. Checked once for all rows of the tile.
                let seen_keys = if counted > first { seen.rows(first..counted) } else { 0 };
                let by_row = counted > first && !seen.all(first..counted) && !are_finite(&v[..seen_keys * l.ep]);
                let right_kt = precision.right(kt, pitch, [width, pitch], to_kt);
                let right_v = precision.right(v, l.ep, [seen_keys, l.ep], to_v);
                for r0 in (first..counted).step_by(ROWS) {
                    let r1 = (r0 + ROWS).min(counted);
                    // Row r1 − 1 sees keys up to itself; later ones need no work.
                    let keys = seen.rows(r0..r1);
                    if keys == 0 && begun {
                        continue;
                    }
                    let padded = keys.next_multiple_of(PAD);
                    let q = &q[(r0 - first) * l.dp..][..(r1 - r0) * l.dp];
                    match (&channels, source) {
                        (None, _) => {
                            let left_q = &left_q[(r0 - first) * l.dp..];
                            precision.multiply::<S, false>(
                                simd,
                                [r1 - r0, padded, width],
                                (left_q, l.dp, 1),
                                (right_kt, pitch),
                                (scores, TILE),
                            );
                        }
                        (Some(channels), KeySource::Tile(start, _)) => {
                            channels.scores(simd, ScoreRows { rows: r0..r1, q, width: padded, x: scores }, start / l.tile);
                        }
                        (Some(channels), KeySource::Cached(..)) => {
                            channels.cached_scores(simd, ScoreRows { rows: r0..r1, q, width: padded, x: scores }, (kt, pitch));
                        }
                    }
                    if self.cached.is_some() && !far {
                        for (r, row) in (r0..r1).zip(scores.chunks_exact(TILE)) {
                            let seen = seen.row(r);
                            let counted = row[..padded].iter().enumerate().filter(|(s, _)| seen.contains(*s)).map(|(_, x)| x.abs());
                            largest = counted.fold(largest, larger);
                        }
                    }
                    if let Some(cap) = head.cap {
                        scores.chunks_exact_mut(TILE).take(r1 - r0).for_each(|row| soft_cap(simd, &mut row[..padded], cap));
                    }
                    for r in r0..r1 {
                        let (i, row) = (r - first, r - r0);
                        let change = head.kernel.forward_row(
                            simd,
                            ForwardRow {
                                x: &mut scores[row * TILE..][..padded],
                                visible: seen.row(r),
                                clamp: head.clamp,
                                decay: base.map(|base| DecayRow { row: (decay.map_or(0.0, |d| d[r]) - base) as f32, columns: &columns }),
                                rho: head.rescale.of(rho[i]),
                                sums: &mut sums[i],
                                key_weights,
                            },
                        );
                        if let Some((now, factor)) = change {
                            rho[i] = now;
                            if begun {
                                let factor = simd.splat(factor);
                                let u = &mut u[i * l.ep..][..l.ep];
                                for j in (0..l.ep).step_by(S::LANES) {
                                    simd.store_at(u, j, simd.mul(simd.load_at(u, j), factor));
                                }
                            }
                        }
                    }
                    if by_row {
                        for r in r0..r1 {
                            let (u, weights) = (&mut u[(r - first) * l.ep..][..l.ep], &scores[(r - r0) * TILE..][..keys]);
                            let product = SeenProduct { seen: seen.row(r), weights, v, begun, u };
                            if P::CONVERTS {
                                product.multiply_converted(simd, precision, [&mut *to_weights, &mut *to_seen_v, &mut *to_right_seen_v]);
                            } else {
                                product.multiply(simd);
                            }
                        }
                        continue;
                    }
                    let weights = precision.left(scores, TILE, [r1 - r0, keys], to_weights);
                    let (sizes, to) = ([r1 - r0, l.ep, keys], (&mut u[(r0 - first) * l.ep..], l.ep));
                    match begun {
                        false => precision.multiply::<S, false>(simd, sizes, (weights, TILE, 1), (right_v, l.ep), to),
                        true => precision.multiply::<S, true>(simd, sizes, (weights, TILE, 1), (right_v, l.ep), to),
                    }
                }
            }
            for (z, sums) in z.iter_mut().zip(&*sums) {
                *z = simd.sum(simd.load_at(sums, 0));
            }
        }

        if let Some(to) = self.cached.and_then(|cached| cached.largest) {
            *to = largest;
        }
        if l.far[self.h].is_some() {
            let head = &l.heads[self.h];
            let sink = c.gates.sink(&head.variant, self.h).filter(|_| head.rescale != Rescale::SubtractMax);
            for (i, t) in (first..counted).enumerate() {
                let sees_far = !distance.far(begins + t).is_empty();
                let (from, sums) = (&self.far_sums, &mut self.sums);
                let far = || FarSums { u: &from.u[i * l.ep..][..l.ep], z: from.z[i], log: from.rho[i] };
                let near = sums.rho[i];
                sums.rho[i] = join(head.has_log_scale, &mut sums.u[i * l.ep..][..l.ep], &mut sums.z[i], near, sees_far.then(far), sink);
            }
        }
        epilogue::forward(l, &c.gates, (self.b, self.h), [first, counted, last], &self.sums, self.to)
    }
}
