//! The forward pass over one tile of queries.

use std::ops::Range;

use crate::Report;
use crate::epilogue::{FarSums, join};
use crate::fused::channels::Source;
use crate::fused::epilogue::{self, Outputs, RowSums};
use crate::fused::gates::{Gates, decay_columns};
use crate::fused::plan::Layout;
use crate::fused::prepare::Sources;
use crate::kernels::gemm::multiply;
use crate::kernels::score_rows::{DecayRow, ForwardRow, Rescale, Visible, soft_cap};
use crate::kernels::simd::{Simd, Task};
use crate::kernels::{PAD, ROWS, TILE};
use crate::parts::distance::Distance;
use crate::real::larger;
use crate::state::State;
use crate::state::cache::{BLOCK, Cache};

/// What the tasks of one forward pass read.
pub struct Context<'a> {
    pub layout: &'a Layout,
    pub sources: Sources<'a>,
    pub kt: &'a [f32],
    pub v: &'a [f32],
    pub gates: Gates<'a>,
    pub channels: Source<'a>,
    pub lengths: Option<&'a [usize]>,
    /// What the call continues from.
    pub state: Option<&'a State>,
}

/// One tile of queries of one head: everything from scores to y.
pub struct ForwardTile<'a, 'b> {
    pub context: &'a Context<'a>,
    pub b: usize,
    pub h: usize,
    pub tile: usize,
    /// Keys that it sees, all where there is no window.
    pub near: KeysOf<'a>,
    /// Its far keys, where it sees any.
    pub far: Option<KeysOf<'a>>,
    /// Keys and values kept from earlier calls, all of which it sees.
    pub cached: Option<Cached<'a>>,
    pub sums: RowSums<'a>,
    /// Memory for the sums over far keys.
    pub far_sums: RowSums<'a>,
    pub to: Outputs<'a, 'b>,
}

/// How a tile of queries meets keys of one kind.
pub struct KeysOf<'a> {
    /// The first tile of keys that it looks at.
    pub from: usize,
    /// Whether its rows of u and z hold what keys before `from` gave already.
    pub begun: bool,
    /// The queries [tile, dp].
    pub q: Queries<'a>,
}

/// The cache of a head, and where the largest |score| of a tile goes, if that is wanted.
pub struct Cached<'a> {
    pub cache: &'a Cache,
    /// The head's place in the cache's group.
    pub column: usize,
    pub largest: Option<&'a mut f32>,
}

impl<'a> Context<'a> {
    /// The cache that a head continues from.
    pub fn cached(&self, b: usize, h: usize, largest: Option<&'a mut f32>) -> Option<Cached<'a>> {
        self.state?.cache_of(b, h).map(|(cache, column)| Cached { cache, column, largest })
    }
}

impl Cached<'_> {
    /// c of a block's keys less the first of them, that first, and the weights of its values, zero after the last key.
    fn block(&self, block: usize, columns: &mut [f32; TILE], weights: &mut [f32; TILE]) -> f64 {
        const { assert!(BLOCK == TILE, "blocks of a cache are read like tiles") };
        let column = &self.cache.columns[self.column];
        let first = block * BLOCK;
        let count = (self.cache.len - first).min(BLOCK);
        weights.fill(0.0);
        if !column.weights.is_empty() {
            weights[..count].copy_from_slice(&column.weights[first..first + count]);
        }
        if column.decay.is_empty() { 0.0 } else { decay_columns(&column.decay[first..first + count], columns) }
    }
}

/// The tile code as a function of its own, compiled once for all who call it.
pub struct CallTile<'a, 'b>(pub ForwardTile<'a, 'b>);

impl Task for CallTile<'_, '_> {
    type Output = Report;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Report {
        simd.call(self.0)
    }
}

/// Which keys of a tile are seen.
#[derive(Clone, Copy)]
struct Keys<'a> {
    /// The block of a cache and the position of the first row, or where the tile starts and how long it is.
    place: Place<'a>,
    distance: Distance,
    far: bool,
}

#[derive(Clone, Copy)]
enum Place<'a> {
    Cached(&'a Cache, usize, usize),
    Tile(usize, usize),
}

impl Keys<'_> {
    /// Those that row r sees.
    #[inline(always)]
    fn row(self, r: usize) -> Visible {
        match (self.place, self.far) {
            (Place::Cached(cache, block, first), false) => cache.visible(self.distance, block, first + r),
            (Place::Cached(cache, block, first), true) => cache.far_visible(self.distance, block, first + r),
            (Place::Tile(start, tile), false) => self.distance.visible(r, start, tile),
            (Place::Tile(start, tile), true) => self.distance.far_visible(r, start, tile),
        }
    }

    /// Whether all of the rows see the same keys, from the first on.
    fn all(self, rows: Range<usize>) -> bool {
        let (first, last) = (self.row(rows.start), self.row(rows.end - 1));
        first.until == last.until && last.from <= last.sinks
    }

    /// How many from the first on any of the rows sees.
    #[inline(always)]
    fn rows(self, rows: Range<usize>) -> usize {
        let (first, last) = (self.row(rows.start), self.row(rows.end - 1));
        if first.from < last.until { last.until } else { last.sinks }
    }
}

/// Whether none is NaN or infinite: a maximum of integers, which vectorizes.
#[inline(always)]
fn are_finite(values: &[f32]) -> bool {
    let mut largest = 0;
    for value in values {
        largest = largest.max(value.to_bits() & i32::MAX as u32);
    }
    largest < f32::INFINITY.to_bits()
}

/// U (+)= W·V of one row [ep], of the keys that it sees alone.
#[inline(always)]
fn multiply_seen<S: Simd>(simd: S, seen: Visible, weights: &[f32], v: &[f32], begun: bool, u: &mut [f32]) {
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

/// The queries of a tile: scratch for them, or prepared already.
pub enum Queries<'a> {
    Scratch(&'a mut [f32]),
    Prepared(&'a [f32]),
}

#[repr(align(64))]
struct Scores([f32; ROWS * TILE]);

/// z of each row, spread over the lanes of a vector until the row is done.
#[repr(align(64))]
struct Sums([[f32; 16]; TILE]);

impl Task for ForwardTile<'_, '_> {
    type Output = Report;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> Report {
        let c = self.context;
        let l = c.layout;
        let s = l.shape;
        let n = self.b * s.heads + self.h;
        let g = self.h / s.group();
        let len = c.lengths.map_or(s.time, |lengths| lengths[self.b]);
        let (first, last) = (self.tile * l.tile, ((self.tile + 1) * l.tile).min(s.time));
        let counted = last.min(len).max(first);
        let mut scores = Scores([0.0; ROWS * TILE]);
        let scores = &mut scores.0;
        let mut columns = [0.0; TILE];
        let channels = c.channels.head(l, self.b, self.h);
        let mut cached_weights = [0.0; TILE];
        let mut largest = 0.0f32;
        let begins = self.cached.as_ref().map_or(0, |cached| cached.cache.next_position());
        let distance = l.heads[self.h].variant.distance();
        let relative = distance.after(begins);
        let passes = [Some((self.near, &mut self.sums)), self.far.map(|far| (far, &mut self.far_sums))];
        for (far, (keys, sums)) in [false, true].into_iter().zip(passes).filter_map(|(far, pass)| Some((far, pass?))) {
            let head = l.pass(self.h, far);
            let (kv, width) = (l.kv_index(head.class, self.b, g), l.classes[head.class].width);
            let RowSums { u, z, rho } = sums;
            let (u, z, rho) = (&mut u[..(last - first) * l.ep], &mut z[..last - first], &mut rho[..last - first]);
            u[(counted - first) * l.ep..].fill(0.0);
            rho.fill(if far { head.rescale.start() } else { c.gates.first_rho(head, self.h) });
            rho[counted - first..].fill(0.0);

            let size = (counted - first) * l.dp;
            let q: &[f32] = match keys.q {
                Queries::Prepared(q) => &q[..size],
                Queries::Scratch(q) => {
                    let q = &mut q[..size];
                    c.sources.query(l, self.b, self.h, far).fill(simd, first, s.time, q, l.dp);
                    q
                }
            };
            let mut sums = Sums([[0.0; 16]; TILE]);
            let sums = &mut sums.0;
            if keys.begun {
                sums.iter_mut().zip(&z[..counted - first]).for_each(|(sums, &z)| sums[0] = z);
            }
            let decay = head.variant.decays_by_head().then(|| &c.gates.decay[n * l.tp()..][..l.tp()]);
            let blocks = self.cached.as_ref().map_or(0, |cached| cached.cache.blocks());
            // Near keys: tiles that hold sinks, and from the first on that the window of the first row reaches. Far keys: up to the last
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
                let (kt, pitch, v, key_weights, base, place);
                match self.cached.as_ref().filter(|_| step < blocks) {
                    Some(cached) => {
                        let c = cached.block(step, &mut columns, &mut cached_weights);
                        kt = cached.cache.block_keys(step, far, width);
                        v = &cached.cache.values[step * BLOCK * l.ep..][..BLOCK * l.ep];
                        key_weights = head.weighs_keys.then_some(&cached_weights[..]);
                        (pitch, base, place) = (BLOCK, decay.map(|_| c), Place::Cached(cached.cache, step, begins));
                    }
                    None => {
                        let i = step - blocks;
                        let tile = if i < sinks { keys.from + i } else { near + i - sinks };
                        let s0 = tile * l.tile;
                        kt = &c.kt[(kv * l.tiles + tile) * l.width * l.pitch..][..width * l.pitch];
                        v = &c.v[(kv * l.tp() + s0) * l.ep..][..l.tile * l.ep];
                        key_weights = c.gates.tile_weights(l, self.h, n, tile);
                        base = decay.map(|decay| decay_columns(&decay[s0..s0 + l.pitch], &mut columns));
                        (pitch, place) = (l.pitch, Place::Tile(s0, l.tile));
                    }
                }
                let seen = Keys { place, distance: if matches!(place, Place::Cached(..)) { distance } else { relative }, far };
                // A weight of zero times a value that is not finite is NaN: where some row does not see all keys, and a value is not
                // finite, each row is multiplied by the values that it sees. Looked at once for all rows of the tile.
                let by_row = counted > first && !seen.all(first..counted) && !are_finite(&v[..seen.rows(first..counted) * l.ep]);
                for r0 in (first..counted).step_by(ROWS) {
                    let r1 = (r0 + ROWS).min(counted);
                    // Row r1 − 1 sees keys up to itself; later ones need no work.
                    let keys = seen.rows(r0..r1);
                    if keys == 0 && begun {
                        continue;
                    }
                    let padded = keys.next_multiple_of(PAD);
                    let q = &q[(r0 - first) * l.dp..][..(r1 - r0) * l.dp];
                    match (&channels, place) {
                        (None, _) => multiply::<S, false>(simd, [r1 - r0, padded, width], (q, l.dp, 1), (kt, pitch), (scores, TILE)),
                        (Some(channels), Place::Tile(start, _)) => channels.scores(simd, r0..r1, q, start / l.tile, padded, scores),
                        (Some(channels), Place::Cached(..)) => channels.cached_scores(simd, r0..r1, q, (kt, pitch), padded, scores),
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
                            let u = &mut u[(r - first) * l.ep..][..l.ep];
                            multiply_seen(simd, seen.row(r), &scores[(r - r0) * TILE..][..TILE], v, begun, u);
                        }
                        continue;
                    }
                    let (sizes, to) = ([r1 - r0, l.ep, keys], (&mut u[(r0 - first) * l.ep..], l.ep));
                    match begun {
                        false => multiply::<S, false>(simd, sizes, (scores, TILE, 1), (v, l.ep), to),
                        true => multiply::<S, true>(simd, sizes, (scores, TILE, 1), (v, l.ep), to),
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
            let variant = &l.heads[self.h].variant;
            let sink = c.gates.sink(variant, self.h).filter(|_| l.heads[self.h].rescale != Rescale::SubtractMax);
            for (i, t) in (first..counted).enumerate() {
                let sees_far = !distance.far(begins + t).is_empty();
                let (from, sums) = (&self.far_sums, &mut self.sums);
                let far = || FarSums { u: &from.u[i * l.ep..][..l.ep], z: from.z[i], log: from.rho[i] };
                let near = sums.rho[i];
                sums.rho[i] = join(variant, &mut sums.u[i * l.ep..][..l.ep], &mut sums.z[i], near, sees_far.then(far), sink);
            }
        }
        epilogue::forward(l, &c.gates, (self.b, self.h), [first, counted, last], &self.sums, self.to)
    }
}
