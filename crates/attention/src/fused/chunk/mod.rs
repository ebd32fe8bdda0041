//! Chunks: what all passes over them share. Within a chunk queries look at keys as in parallel mode; what came before is in the state.
//!
//! ```text
//! forward    U_t = e^{c_t − c} · Φ(q_t)ᵀ·H + (tiles within the chunk);        H ← e^{c' − c}·H + Σ_s e^{c' − c_s}·K(k_s) (κ_s v_s)ᵀ
//! backward   forward in time, with H: dq;     backward in time, with dH ← e^{c' − c}·dH + Σ_t e^{c_t − c}·Φ(q_t) dU_tᵀ: dk, dv, dκ
//! ```
//!
//! c is that of the last position before the chunk, c' that of its last. No state is stored: the backward pass computes them anew.
//! Where there are few kv heads, time is cut into splits that run at the same time: first what each adds to the state, then
//! their sums in order, then the passes. All of this is fixed by the shape, so that results do not depend on the number of threads.

mod backward;
mod boundary_states;
mod forward;
pub(super) mod run;

use crate::fused::channels::{Channels, Source, decay_state};
use crate::fused::gates::Gates;
use crate::fused::plan::{ChunkGroup, Layout};
use crate::kernels::features::{Absorb, AddTransposed, BLOCK, Points, Slope, Transpose};
use crate::kernels::simd::Simd;

/// What every pass over chunks reads.
#[derive(Clone, Copy)]
pub struct Chunks<'a> {
    pub layout: &'a Layout,
    pub gates: Gates<'a>,
    pub channels: Source<'a>,
    pub lengths: Option<&'a [usize]>,
    pub kt: &'a [f32],
    pub v: &'a [f32],
    /// a_n/α! of each chunked head [N].
    pub factors: &'a [Vec<f32>],
    /// Empty in the forward pass.
    pub queries: QueryGrads<'a>,
    /// Whether split 0 starts from an initial state.
    pub has_initial_state: bool,
}

/// Queries and their gradients, which the backward pass reads.
#[derive(Clone, Copy, Default)]
pub struct QueryGrads<'a> {
    /// [passes, N, Tp, dp]
    pub q: &'a [f32],
    /// [passes, N, T, ep] and [passes, N, T]
    pub du: &'a [f32],
    pub dz: &'a [f32],
}

/// Memory of one task, by name; `T` is a slice, or nothing where only sizes are asked for.
pub struct ChunkScratch<T> {
    /// A state, where splits have none in memory.
    pub state: T,
    /// Prepared queries of a chunk, [positions, dp], as they meet the keys in the state.
    pub queries: T,
    /// Those of a tile as they meet near keys, where the state holds far keys.
    pub near: T,
    /// Sums of a tile [L, ep] and [L], where they are not saved.
    pub u: T,
    pub z: T,
    pub rho: T,
    /// Those over far keys.
    pub far_u: T,
    pub far_z: T,
    pub far_rho: T,
    /// [dp, L]
    pub x: T,
    /// [M, L]
    pub lower_orders: T,
    /// [BLOCK, L]
    pub block: T,
    /// [L, ep]
    pub rows: T,
    /// [L]
    pub weights: T,
    /// e^{c_t − c} [L]
    pub decays: T,
    /// The same by channel [dp, L], and room for the monomials of one position; empty without such a decay.
    pub channels: T,
    pub monomials: T,
    pub backward: BackwardScratch<T>,
}

/// What only the backward pass needs.
pub struct BackwardScratch<T> {
    /// [BLOCK, L]
    pub gradient: T,
    /// [M, L]
    pub dlower_orders: T,
    /// [dp, L]
    pub dx: T,
    /// [ep, L]
    pub columns: T,
    /// [orders, L]
    pub parts: T,
    /// [L, ep]
    pub drows: T,
    /// [L]
    pub line: T,
}

impl BackwardScratch<&mut [f32]> {
    /// `rows` [count, ep], by which a state is read, turned for [`BackwardScratch::slope`].
    #[inline(always)]
    pub fn turn<S: Simd>(&mut self, simd: S, l: &Layout, rows: &[f32], count: usize) {
        simd.call(Transpose { rows, stride: l.ep, count, dim: l.shape.e, columns: self.columns, len: l.pitch });
    }

    /// The gradient of points through a state, H and z, that is read by turned rows and by `weights`; what each order gives stays in the first `parts`
    /// numbers of [`BackwardScratch::parts`].
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "points, a state, and the two ways in which it is read")]
    pub fn slope<S: Simd>(
        &mut self,
        simd: S,
        l: &Layout,
        points: Points,
        [h, z]: [&[f32]; 2],
        weights: &[f32],
        block: &mut [f32],
        parts: usize,
    ) {
        let BackwardScratch { gradient, dlower_orders, dx, columns, parts: all, .. } = self;
        let parts = &mut all[..parts];
        parts.fill(0.0);
        simd.call(Slope { points, h, z, ep: l.ep, columns, e: l.shape.e, weights, dx, dlower_orders, gradient, block, parts });
    }

    /// Adds it to rows [count, dp].
    #[inline(always)]
    pub fn add_slope<S: Simd>(&self, simd: S, l: &Layout, group: &ChunkGroup, rows: &mut [f32], count: usize) {
        simd.call(AddTransposed { columns: self.dx, len: l.pitch, rows, stride: l.dp, count, dim: group.basis.d() });
    }
}

impl<T> ChunkScratch<T> {
    /// Takes each part by its size.
    fn new(l: &Layout, backward: bool, own_state: bool, mut take: impl FnMut(usize) -> T) -> ChunkScratch<T> {
        let most = |f: fn(&ChunkGroup) -> usize| l.groups.iter().map(f).max().unwrap_or(0);
        let (len, lower_orders, orders) =
            (l.pitch, most(|group| group.basis.lower_order_rows()) * l.pitch, most(|group| group.basis.orders().len()));
        let only = |wanted: bool, size: usize| if wanted { size } else { 0 };
        let mut take = |size: usize| take(size.next_multiple_of(16));
        ChunkScratch {
            state: take(only(own_state, most(|group| group.len))),
            queries: take(only(!backward, ((l.chunk_tiles - 1) * l.tile + l.pitch) * l.dp)),
            near: take(only(!backward && l.passes() > 1, len * l.dp)),
            u: take(only(!backward, len * l.ep)),
            z: take(only(!backward, len)),
            rho: take(only(!backward, len)),
            far_u: take(only(!backward && l.passes() > 1, len * l.ep)),
            far_z: take(only(!backward && l.passes() > 1, len)),
            far_rho: take(only(!backward && l.passes() > 1, len)),
            x: take(l.dp * len),
            lower_orders: take(lower_orders),
            block: take(BLOCK * len),
            rows: take(len * l.ep),
            weights: take(len),
            decays: take(len),
            channels: take(only(l.layer.decays_by_channel(), l.dp * len)),
            monomials: take(only(l.layer.decays_by_channel(), most(|group| group.basis.rows() + group.basis.lower_order_rows()))),
            backward: BackwardScratch {
                gradient: take(only(backward, BLOCK * len)),
                dlower_orders: take(only(backward, lower_orders)),
                dx: take(only(backward, l.dp * len)),
                columns: take(only(backward, l.ep * len)),
                parts: take(only(backward, orders * len)),
                drows: take(only(backward, len * l.ep)),
                line: take(only(backward, len)),
            },
        }
    }
}

impl<'a> ChunkScratch<&'a mut [f32]> {
    /// Values that [`ChunkScratch::of`] takes.
    pub fn len(l: &Layout, backward: bool) -> usize {
        let mut total = 0;
        ChunkScratch::new(l, backward, l.splits < 2, |size| total += size);
        total
    }

    /// Divides memory up.
    pub fn of(mut memory: &'a mut [f32], l: &Layout, backward: bool) -> ChunkScratch<&'a mut [f32]> {
        ChunkScratch::new(l, backward, l.splits < 2, |size| {
            let (own, rest) = std::mem::take(&mut memory).split_at_mut(size);
            memory = rest;
            own
        })
    }
}

/// A state: H [N, ep] and z [N], which is empty where there is none.
pub struct State<'a> {
    pub h: &'a mut [f32],
    pub z: &'a mut [f32],
}

impl<'a> State<'a> {
    /// That of a group, in memory of its own or among those of its kv head.
    pub fn of(group: &ChunkGroup, c: &Chunks, values: &'a mut [f32]) -> State<'a> {
        let (rows, at) = (group.basis.rows(), if c.has_states() { group.at } else { 0 });
        let (h, z) = values[at..at + group.len].split_at_mut(rows * c.layout.ep);
        let z = if group.sums { &mut z[..rows] } else { &mut [] };
        State { h, z }
    }
}

/// One split of one kv head of one batch row: what every pass works on.
pub struct Split<'a> {
    pub chunks: &'a Chunks<'a>,
    pub b: usize,
    pub g: usize,
    pub split: usize,
    /// The states at its start, or their gradients at its end; empty where all start from nothing.
    pub states: &'a mut [f32],
    pub scratch: ChunkScratch<&'a mut [f32]>,
}

impl<'a> Split<'a> {
    /// Takes the memory of the state of a group; [`Split::put_back`] returns it.
    fn take_state(&mut self, group: &ChunkGroup) -> &'a mut [f32] {
        if self.states.is_empty() {
            let own = std::mem::take(&mut self.scratch.state);
            own[..group.len].fill(0.0);
            own
        } else {
            std::mem::take(&mut self.states)
        }
    }

    fn put_back(&mut self, memory: &'a mut [f32]) {
        if self.chunks.has_states() { self.states = memory } else { self.scratch.state = memory }
    }
}

impl<'a> Chunks<'a> {
    /// Whether the states of splits lie in memory, and not in that of their task.
    pub fn has_states(&self) -> bool {
        self.layout.splits > 1 || self.has_initial_state
    }

    /// Positions of a batch row that count.
    pub fn length(&self, b: usize) -> usize {
        self.lengths.map_or(self.layout.shape.time, |lengths| lengths[b])
    }

    /// c at the last of the first p positions; 0 where there is no decay.
    pub fn log_decay_at(&self, group: &ChunkGroup, b: usize, p: usize) -> f64 {
        let l = self.layout;
        let n = b * l.shape.heads + group.heads[0];
        match (group.decays, p) {
            (false, _) => 0.0,
            (true, 0) => self.gates.log_decay_before[n],
            (true, p) => self.gates.decay[n * l.tp() + p - 1],
        }
    }

    /// How many positions of a tile count.
    pub fn count(&self, b: usize, tile: usize) -> usize {
        (self.length(b).saturating_sub(tile * self.layout.tile)).min(self.layout.tile)
    }

    /// e^{sign·(c_t − c)} of the positions of a tile; 1 without decay, 0 after the count.
    pub fn decays(&self, group: &ChunkGroup, b: usize, tile: usize, c: f64, sign: f64, decays: &mut [f32]) {
        let l = self.layout;
        let count = self.count(b, tile);
        decays[..l.pitch].fill(0.0);
        for (i, decay) in decays[..count].iter_mut().enumerate() {
            *decay = if group.decays { ((sign * (self.log_decay_at(group, b, tile * l.tile + i + 1) - c)) as f32).exp() } else { 1.0 };
        }
    }

    /// Whether a tile of keys enters the state after the chunk that says so: far keys do where all are far from the last position.
    fn enters(&self, group: &ChunkGroup, b: usize, tile: usize) -> bool {
        let end = (tile + 1) * self.layout.tile;
        if group.far { end.saturating_add(group.distance.window) <= self.length(b) } else { self.count(b, tile) > 0 }
    }

    /// e^{c − c_s} of the keys of a tile, 0 of those that do not enter the state: sinks, and what does not count.
    fn key_decays(&self, group: &ChunkGroup, b: usize, tile: usize, c: f64, decays: &mut [f32]) {
        self.decays(group, b, tile, c, -1.0, decays);
        decays[..self.sinks(group, b, tile)].fill(0.0);
    }

    /// How many keys of a tile are sinks, which no state of far keys holds.
    fn sinks(&self, group: &ChunkGroup, b: usize, tile: usize) -> usize {
        let l = self.layout;
        let sinks = group.distance.after(self.gates.positions_before(b)).sinks;
        if group.far { sinks.saturating_sub(tile * l.tile).min(l.tile) } else { 0 }
    }

    /// The decay by channel of a group.
    pub fn channels_of(&self, group: &ChunkGroup, b: usize) -> Option<Channels<'a>> {
        self.channels.head(self.layout, b, group.heads[0])
    }

    /// c by channel at the last of the first p positions.
    pub fn channels_at(&self, group: &ChunkGroup, b: usize, p: usize) -> Option<&'a [f64]> {
        self.channels_of(group, b).map(|channels| channels.after(p.min(self.length(b))))
    }

    /// Queries of a tile, [d, L], decay by channel since the position before their chunk; the factors stay in `factors`.
    #[inline(always)]
    pub fn decay_queries<S: Simd>(&self, simd: S, group: &ChunkGroup, b: usize, tile: usize, x: &mut [f32], factors: &mut [f32]) {
        if let Some(channels) = self.channels_of(group, b) {
            let l = self.layout;
            let before = channels.after(tile / l.chunk_tiles * l.chunk_len());
            let first = tile * l.tile;
            channels.columns(simd, first..first + self.count(b, tile), before, true, factors, l.pitch);
            multiply_columns(x, &factors[..l.shape.d * l.pitch]);
        }
    }

    /// A state decays by channel from before a chunk to its end, or its gradient from the end.
    #[inline(always)]
    pub fn decay_state<S: Simd>(&self, simd: S, group: &ChunkGroup, b: usize, chunk: usize, state: &mut State, room: &mut [f32]) {
        let len = self.layout.chunk_len();
        if let (Some(before), Some(after)) = (self.channels_at(group, b, chunk * len), self.channels_at(group, b, (chunk + 1) * len)) {
            decay_state(simd, &group.basis, [before, after], state.h, state.z, room);
        }
    }

    /// Prepared keys of a tile, [d, L], zero after the count: in place, or in `x`; with a decay by channel as they are at the end of their chunk, with the
    /// factors in `factors`.
    #[inline(always)]
    pub fn keys<'b, S: Simd>(&self, simd: S, group: &ChunkGroup, b: usize, tile: usize, x: &'b mut [f32], factors: &mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        let l = self.layout;
        if let Some(channels) = self.channels_of(group, b) {
            let (first, count) = (tile * l.tile, self.count(b, tile));
            let end = channels.after(((tile / l.chunk_tiles + 1) * l.chunk_len()).min(self.length(b)));
            channels.columns(simd, first..first + count, end, false, factors, l.pitch);
            let rows = &channels.k[first * l.dp..][..l.pitch * l.dp];
            simd.call(Transpose { rows, stride: l.dp, count, dim: l.shape.d, columns: &mut *x, len: l.pitch });
            multiply_columns(x, &factors[..l.shape.d * l.pitch]);
            return &x[..l.shape.d * l.pitch];
        }
        let (len, kv, count) = (l.pitch, l.kv_index(group.class, b, group.g), self.count(b, tile));
        let size = group.basis.d() * len;
        let kt = &self.kt[(kv * l.tiles + tile) * l.width * len..][..size];
        if count == len {
            return kt;
        }
        for (x, kt) in x[..size].chunks_exact_mut(len).zip(kt.chunks_exact(len)) {
            x[..count].copy_from_slice(&kt[..count]);
            x[count..].fill(0.0);
        }
        &x[..size]
    }

    /// Values of a tile, [tile, ep].
    pub fn values(&self, group: &ChunkGroup, b: usize, tile: usize) -> &'a [f32] {
        let l = self.layout;
        let kv = l.kv_index(group.class, b, group.g);
        &self.v[(kv * l.tp() + tile * l.tile) * l.ep..][..l.tile * l.ep]
    }

    /// κ of a tile, where keys have weights.
    pub fn key_weights(&self, group: &ChunkGroup, b: usize, tile: usize) -> Option<&'a [f32]> {
        let h = group.heads[0];
        self.gates.tile_weights(self.layout, h, b * self.layout.shape.heads + h, tile)
    }

    /// κ_s·decay_s·v_s of a tile into `rows` [L, ep], zero after the count.
    pub fn weighted_values(&self, group: &ChunkGroup, b: usize, tile: usize, decays: &[f32], rows: &mut [f32]) {
        let (ep, count) = (self.layout.ep, self.count(b, tile));
        let (v, weights) = (self.values(group, b, tile), self.key_weights(group, b, tile));
        for (i, (row, v)) in rows.chunks_exact_mut(ep).zip(v.chunks_exact(ep)).take(count).enumerate() {
            let factor = decays[i] * weights.map_or(1.0, |weights| weights[i]);
            row.iter_mut().zip(v).for_each(|(row, v)| *row = factor * v);
        }
        rows[count * ep..self.layout.pitch * ep].fill(0.0);
    }

    /// The keys of one chunk enter the state.
    #[inline(always)]
    pub fn absorb_keys<S: Simd>(
        &self,
        simd: S,
        group: &ChunkGroup,
        b: usize,
        chunk: usize,
        state: &mut State,
        scratch: &mut ChunkScratch<&mut [f32]>,
    ) {
        let l = self.layout;
        let start = chunk * l.chunk_len();
        if start >= self.length(b) {
            return;
        }
        let end = self.log_decay_at(group, b, (start + l.chunk_len()).min(self.length(b)));
        let mut keep = (end - self.log_decay_at(group, b, start)).exp() as f32;
        self.decay_state(simd, group, b, chunk, state, scratch.monomials);
        // A state decays with its chunk, whether keys enter it or not.
        let tiles = l.entering(chunk, group.lag);
        if tiles.is_empty() || !self.enters(group, b, tiles.start) {
            if keep != 1.0 {
                state.h.iter_mut().chain(&mut *state.z).for_each(|x| *x *= keep);
            }
            return;
        }
        for tile in tiles {
            let count = self.count(b, tile);
            if !self.enters(group, b, tile) {
                break;
            }
            self.key_decays(group, b, tile, end, scratch.decays);
            let plain = !group.decays && !group.weighs_keys && self.sinks(group, b, tile) == 0;
            let rows = if plain {
                self.values(group, b, tile)
            } else {
                self.weighted_values(group, b, tile, scratch.decays, scratch.rows);
                &*scratch.rows
            };
            let x = self.keys(simd, group, b, tile, scratch.x, scratch.channels);
            let points = Points::new(simd, &group.basis, (l.pitch, count), x, scratch.lower_orders, &[]);
            let (h, z) = (&mut *state.h, &mut *state.z);
            simd.call(Absorb { points, keep, rows, ep: l.ep, weights: scratch.decays, h, z, block: scratch.block });
            keep = 1.0;
        }
    }

    /// The queries and dU of one chunk enter the gradient of the state, which moves from the end of the chunk to its start.
    #[inline(always)]
    pub fn absorb_queries<S: Simd>(
        &self,
        simd: S,
        group: &ChunkGroup,
        b: usize,
        chunk: usize,
        state: &mut State,
        scratch: &mut ChunkScratch<&mut [f32]>,
    ) {
        let l = self.layout;
        let start = chunk * l.chunk_len();
        if start >= self.length(b) {
            return;
        }
        let before = self.log_decay_at(group, b, start);
        let end = self.log_decay_at(group, b, (start + l.chunk_len()).min(self.length(b)));
        let mut keep = (end - before).exp() as f32;
        self.decay_state(simd, group, b, chunk, state, scratch.monomials);
        for &h in &group.heads {
            for tile in l.tiles_of(chunk) {
                let count = self.count(b, tile);
                if count == 0 {
                    break;
                }
                self.decays(group, b, tile, before, 1.0, scratch.decays);
                self.query_rows(simd, group, b, h, tile, scratch);
                self.decay_queries(simd, group, b, tile, scratch.x, scratch.channels);
                let points = Points::new(simd, &group.basis, (l.pitch, count), scratch.x, scratch.lower_orders, &self.factors[h]);
                let (h, z) = (&mut *state.h, &mut *state.z);
                simd.call(Absorb { points, keep, rows: scratch.rows, ep: l.ep, weights: scratch.weights, h, z, block: scratch.block });
                keep = 1.0;
            }
        }
    }

    /// Queries of a tile into `x`, decay·dU into `rows` and decay·dz into `weights`, all zero after the count.
    #[inline(always)]
    pub fn query_rows<S: Simd>(
        &self,
        simd: S,
        group: &ChunkGroup,
        b: usize,
        h: usize,
        tile: usize,
        scratch: &mut ChunkScratch<&mut [f32]>,
    ) {
        let (l, grads) = (self.layout, self.queries);
        let n = group.far as usize * l.head_count() + b * l.shape.heads + h;
        let (first, count) = (tile * l.tile, self.count(b, tile));
        let q = &grads.q[(n * l.tp() + first) * l.dp..][..l.pitch * l.dp];
        simd.call(Transpose { rows: q, stride: l.dp, count, dim: group.basis.d(), columns: scratch.x, len: l.pitch });
        let at = n * l.shape.time + first;
        let du = grads.du[at * l.ep..][..count * l.ep].chunks_exact(l.ep);
        for ((row, du), &decay) in scratch.rows.chunks_exact_mut(l.ep).zip(du).zip(&*scratch.decays) {
            row.iter_mut().zip(du).for_each(|(row, du)| *row = decay * du);
        }
        scratch.rows[count * l.ep..l.pitch * l.ep].fill(0.0);
        scratch.weights[..l.pitch].fill(0.0);
        for ((weight, dz), &decay) in scratch.weights.iter_mut().zip(&grads.dz[at..at + count]).zip(&*scratch.decays) {
            *weight = decay * dz;
        }
    }
}

/// x ← x∘factors
#[inline(always)]
pub fn multiply_columns(x: &mut [f32], factors: &[f32]) {
    x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
}
