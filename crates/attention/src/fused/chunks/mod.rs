//! Chunk mode. Within a chunk queries score keys as in parallel mode. Earlier keys are in the state.
//!
//! ```text
//! forward    U_t = e^{c_t − c} · Φ(q_t)ᵀ·H + (tiles within the chunk);        H ← e^{c' − c}·H + Σ_s e^{c' − c_s}·K(k_s) (κ_s v_s)ᵀ
//! backward   forward in time, with H: dq;     backward in time, with dH ← e^{c' − c}·dH + Σ_t e^{c_t − c}·Φ(q_t) dU_tᵀ: dk, dv, dκ
//! ```
//!
//! c belongs to the last position before the chunk, c' to its last position. States are not stored: the backward pass recomputes them.
//! With few kv heads, time is divided into splits that run in parallel: first the contribution of each split to the state, then the sums in
//! order, then the passes. The shape fixes the splits, so results do not depend on the number of threads.

mod backward;
mod boundary_states;
mod forward;
pub(in crate::fused) mod run;

use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::{CallPlan, ChunkGroup};
use crate::fused::prepare::channel_decay::{ChannelDecay, decay_state};
use crate::fused::prepared::Prepared;
use crate::{Buffer, Error};
use termwise_kernels::features::{AccumulateState, AddTransposed, BLOCK, FeatureGradient, FeatureTile, Transpose};
use termwise_kernels::simd::Simd;

scratch_memory! {
    /// States at the boundaries of splits.
    SplitStates {
        /// At the start of each split, or their gradients at its end [B, G, splits, state_len]. Empty if one split starts from zero.
        values: Buffer,
    }
}

impl SplitStates {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let splits = if l.splits > 1 { l.splits } else { 0 };
        Ok(self.values.ensure(l.shape.batch * l.shape.kv_heads * splits * l.state_len)?)
    }

    /// Memory for all splits, the first of which starts from an initial state.
    pub fn ensure_initial(&mut self, l: &CallPlan) -> Result<(), Error> {
        Ok(self.values.ensure(l.shape.batch * l.shape.kv_heads * l.splits * l.state_len)?)
    }
}

/// Inputs of every pass over chunks.
#[derive(Clone, Copy)]
pub struct Chunks<'a> {
    pub plan: &'a CallPlan,
    pub prepared: &'a Prepared<'a>,
    /// dU [branches, N, T, ep] and dz [branches, N, T]; empty in the forward pass.
    pub du: &'a [f32],
    pub dz: &'a [f32],
}

/// Memory of one task; `T` is a slice, or () to count sizes.
pub struct ChunkScratch<T> {
    /// A state, if it is not in [`SplitStates`].
    pub state: T,
    /// Prepared queries of a chunk [positions, dp] for the keys in the state.
    pub queries: T,
    /// Prepared queries of a tile for near keys, if the state contains far keys.
    pub near: T,
    /// Sums of a tile [L, ep] and [L], if they are not saved.
    pub u: T,
    pub z: T,
    pub rho: T,
    /// Sums over far keys.
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
    /// The same per channel [dp, L], and memory for the monomials of one position; empty without a decay per channel.
    pub channels: T,
    pub monomials: T,
    pub backward: BackwardScratch<T>,
}

/// Memory of one task of the backward pass.
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

/// How features read a state in the backward pass: H by the turned rows, z by `weights`.
pub struct StateRead<'a> {
    pub features: FeatureTile<'a>,
    pub h: &'a [f32],
    pub z: &'a [f32],
    pub weights: &'a [f32],
}

impl BackwardScratch<&mut [f32]> {
    /// Transposes `rows` [count, ep], by which a state is read, for [`BackwardScratch::slope`].
    #[inline(always)]
    pub fn turn<S: Simd>(&mut self, simd: S, l: &CallPlan, rows: &[f32], count: usize) {
        simd.call(Transpose { rows, stride: l.ep, count, dim: l.shape.e, columns: self.columns, len: l.pitch });
    }

    /// The gradient of features that read a state. The contributions of each order stay in the first `parts` values of
    /// [`BackwardScratch::parts`].
    #[inline(always)]
    pub fn slope<S: Simd>(&mut self, simd: S, l: &CallPlan, read: StateRead, block: &mut [f32], parts: usize) {
        let StateRead { features, h, z, weights } = read;
        let BackwardScratch { gradient, dlower_orders, dx, columns, parts: all, .. } = self;
        let parts = &mut all[..parts];
        parts.fill(0.0);
        simd.call(FeatureGradient { features, h, z, ep: l.ep, columns, e: l.shape.e, weights, dx, dlower_orders, gradient, block, parts });
    }

    /// Adds it to rows [count, dp].
    #[inline(always)]
    pub fn add_slope<S: Simd>(&self, simd: S, l: &CallPlan, group: &ChunkGroup, rows: &mut [f32], count: usize) {
        simd.call(AddTransposed { columns: self.dx, len: l.pitch, rows, stride: l.dp, count, dim: group.basis.d() });
    }
}

impl<T> ChunkScratch<T> {
    /// Allocates each field by its size.
    fn new(l: &CallPlan, backward: bool, own_state: bool, mut take: impl FnMut(usize) -> T) -> ChunkScratch<T> {
        let most = |f: fn(&ChunkGroup) -> usize| l.groups.iter().map(f).max().unwrap_or(0);
        let (len, lower_orders, orders) =
            (l.pitch, most(|group| group.basis.lower_order_rows()) * l.pitch, most(|group| group.basis.orders().len()));
        let only = |wanted: bool, size: usize| if wanted { size } else { 0 };
        let mut take = |size: usize| take(size.next_multiple_of(16));
        ChunkScratch {
            state: take(only(own_state, most(|group| group.len))),
            queries: take(only(!backward, ((l.chunk_tiles - 1) * l.tile + l.pitch) * l.dp)),
            near: take(only(!backward && l.branches() > 1, len * l.dp)),
            u: take(only(!backward, len * l.ep)),
            z: take(only(!backward, len)),
            rho: take(only(!backward, len)),
            far_u: take(only(!backward && l.branches() > 1, len * l.ep)),
            far_z: take(only(!backward && l.branches() > 1, len)),
            far_rho: take(only(!backward && l.branches() > 1, len)),
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
    /// Values that [`ChunkScratch::of`] divides.
    pub fn len(l: &CallPlan, backward: bool) -> usize {
        let mut total = 0;
        ChunkScratch::new(l, backward, l.splits < 2, |size| total += size);
        total
    }

    /// Divides memory into fields.
    pub fn of(mut memory: &'a mut [f32], l: &CallPlan, backward: bool) -> ChunkScratch<&'a mut [f32]> {
        ChunkScratch::new(l, backward, l.splits < 2, |size| {
            let (own, rest) = std::mem::take(&mut memory).split_at_mut(size);
            memory = rest;
            own
        })
    }
}

/// The values of one state: H [N, ep] and z [N], which is empty without a denominator that sums.
pub struct StateValues<'a> {
    pub h: &'a mut [f32],
    pub z: &'a mut [f32],
}

impl<'a> StateValues<'a> {
    /// The state of a group, in the memory of its task or in that of its KV head.
    pub fn of(group: &ChunkGroup, c: &Chunks, values: &'a mut [f32]) -> StateValues<'a> {
        let (rows, at) = (group.basis.rows(), if c.has_states() { group.at } else { 0 });
        let (h, z) = values[at..at + group.len].split_at_mut(rows * c.plan.ep);
        let z = if group.sums { &mut z[..rows] } else { &mut [] };
        StateValues { h, z }
    }
}

/// One split of one kv head of one batch row.
pub struct Split<'a> {
    pub chunks: &'a Chunks<'a>,
    pub b: usize,
    pub g: usize,
    pub split: usize,
    /// The states at its start, or their gradients at its end; empty if all start from zero.
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
    /// In the forward pass.
    pub fn new(prepared: &'a Prepared<'a>) -> Chunks<'a> {
        Chunks { plan: prepared.call.plan, prepared, du: &[], dz: &[] }
    }

    /// Whether the first split starts from the state of earlier calls.
    pub fn has_initial_state(&self) -> bool {
        self.prepared.call.initial.given
    }

    /// Whether the states are in [`SplitStates`], and not in the memory of their task.
    pub fn has_states(&self) -> bool {
        self.plan.splits > 1 || self.has_initial_state()
    }

    /// Positions of a batch row that are not padding.
    pub fn length(&self, b: usize) -> usize {
        self.prepared.call.length(b)
    }

    /// Positions of a tile that are not padding.
    pub fn count(&self, b: usize, tile: usize) -> usize {
        (self.length(b).saturating_sub(tile * self.plan.tile)).min(self.plan.tile)
    }

    /// A group of heads in one batch row.
    pub fn group(&'a self, group: &'a ChunkGroup, b: usize) -> GroupChunks<'a> {
        GroupChunks { chunks: self, group, b }
    }
}

/// A group of heads that run in chunks, in one batch row.
#[derive(Clone, Copy)]
pub struct GroupChunks<'a> {
    pub chunks: &'a Chunks<'a>,
    pub group: &'a ChunkGroup,
    pub b: usize,
}

impl<'a> GroupChunks<'a> {
    fn length(&self) -> usize {
        self.chunks.length(self.b)
    }

    /// Positions of a tile that are not padding.
    pub fn count(&self, tile: usize) -> usize {
        self.chunks.count(self.b, tile)
    }

    /// c at the last of the first p positions; 0 without a decay.
    pub fn log_decay_at(&self, p: usize) -> f64 {
        let l = self.chunks.plan;
        let n = self.b * l.shape.heads + self.group.heads[0];
        match (self.group.decays, p) {
            (false, _) => 0.0,
            (true, 0) => self.chunks.prepared.gates.log_decay_before[n],
            (true, p) => self.chunks.prepared.gates.decay[n * l.tp() + p - 1],
        }
    }

    /// e^{sign·(c_t − c)} of the positions of a tile; 1 without decay, 0 after the count.
    pub fn decays(&self, tile: usize, c: f64, sign: f64, decays: &mut [f32]) {
        let l = self.chunks.plan;
        let count = self.count(tile);
        decays[..l.pitch].fill(0.0);
        for (i, decay) in decays[..count].iter_mut().enumerate() {
            *decay = if self.group.decays { ((sign * (self.log_decay_at(tile * l.tile + i + 1) - c)) as f32).exp() } else { 1.0 };
        }
    }

    /// Whether a tile of keys enters the state: far keys do if all of them are far from the last position.
    fn enters(&self, tile: usize) -> bool {
        let end = (tile + 1) * self.chunks.plan.tile;
        if self.group.range.is_far() { end.saturating_add(self.group.distance.window) <= self.length() } else { self.count(tile) > 0 }
    }

    /// e^{c − c_s} of the keys of a tile, 0 for sinks and padding, which do not enter the state.
    fn key_decays(&self, tile: usize, c: f64, decays: &mut [f32]) {
        self.decays(tile, c, -1.0, decays);
        decays[..self.sinks(tile)].fill(0.0);
    }

    /// Number of keys of a tile that are sinks, which do not enter a state of far keys.
    fn sinks(&self, tile: usize) -> usize {
        let l = self.chunks.plan;
        let sinks = self.group.distance.after(self.chunks.prepared.gates.positions_before(self.b)).sinks;
        if self.group.range.is_far() { sinks.saturating_sub(tile * l.tile).min(l.tile) } else { 0 }
    }

    /// The decay per channel of the group.
    pub fn channels(&self) -> Option<ChannelDecay<'a>> {
        self.chunks.prepared.channels.head(self.chunks.plan, self.b, self.group.heads[0])
    }

    /// c per channel at the last of the first p positions.
    pub fn channels_at(&self, p: usize) -> Option<&'a [f64]> {
        self.channels().map(|channels| channels.after(p.min(self.length())))
    }

    /// Multiplies queries of a tile [d, L] by their decay per channel since the position before their chunk. The factors stay in `factors`.
    #[inline(always)]
    pub fn decay_queries<S: Simd>(&self, simd: S, tile: usize, x: &mut [f32], factors: &mut [f32]) {
        if let Some(channels) = self.channels() {
            let l = self.chunks.plan;
            let before = channels.after(tile / l.chunk_tiles * l.chunk_len());
            let first = tile * l.tile;
            channels.columns(simd, first..first + self.count(tile), before, true, factors);
            multiply_columns(x, &factors[..l.shape.d * l.pitch]);
        }
    }

    /// Multiplies a state, or its gradient, by the decay per channel of a chunk.
    #[inline(always)]
    pub fn decay_state<S: Simd>(&self, simd: S, chunk: usize, state: &mut StateValues, room: &mut [f32]) {
        let len = self.chunks.plan.chunk_len();
        if let (Some(before), Some(after)) = (self.channels_at(chunk * len), self.channels_at((chunk + 1) * len)) {
            decay_state(simd, &self.group.basis, [before, after], state.h, state.z, room);
        }
    }

    /// Prepared keys of a tile [d, L], zero for padding: in place, or in `x`. With a decay per channel they are relative to the end of their chunk,
    /// with the factors in `factors`.
    #[inline(always)]
    pub fn keys<'b, S: Simd>(&self, simd: S, tile: usize, x: &'b mut [f32], factors: &mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        let l = self.chunks.plan;
        if let Some(channels) = self.channels() {
            let (first, count) = (tile * l.tile, self.count(tile));
            let end = channels.after(((tile / l.chunk_tiles + 1) * l.chunk_len()).min(self.length()));
            channels.columns(simd, first..first + count, end, false, factors);
            let rows = &channels.k[first * l.dp..][..l.pitch * l.dp];
            simd.call(Transpose { rows, stride: l.dp, count, dim: l.shape.d, columns: &mut *x, len: l.pitch });
            multiply_columns(x, &factors[..l.shape.d * l.pitch]);
            return &x[..l.shape.d * l.pitch];
        }
        let (len, kv, count) = (l.pitch, l.kv_index(self.group.key_transform, self.b, self.group.g), self.count(tile));
        let size = self.group.basis.d() * len;
        let kt = &self.chunks.prepared.kt[(kv * l.tiles + tile) * l.width * len..][..size];
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
    pub fn values(&self, tile: usize) -> &'a [f32] {
        let l = self.chunks.plan;
        let kv = l.kv_index(self.group.key_transform, self.b, self.group.g);
        &self.chunks.prepared.v[(kv * l.tp() + tile * l.tile) * l.ep..][..l.tile * l.ep]
    }

    /// κ of a tile, if keys have weights.
    pub fn key_weights(&self, tile: usize) -> Option<&'a [f32]> {
        let h = self.group.heads[0];
        self.chunks.prepared.gates.tile_weights(self.chunks.plan, h, self.b * self.chunks.plan.shape.heads + h, tile)
    }

    /// κ_s·decay_s·v_s of a tile into `rows` [L, ep], zero after the count.
    pub fn weighted_values(&self, tile: usize, decays: &[f32], rows: &mut [f32]) {
        let (ep, count) = (self.chunks.plan.ep, self.count(tile));
        let (v, weights) = (self.values(tile), self.key_weights(tile));
        for (i, (row, v)) in rows.chunks_exact_mut(ep).zip(v.chunks_exact(ep)).take(count).enumerate() {
            let factor = decays[i] * weights.map_or(1.0, |weights| weights[i]);
            row.iter_mut().zip(v).for_each(|(row, v)| *row = factor * v);
        }
        rows[count * ep..self.chunks.plan.pitch * ep].fill(0.0);
    }

    /// The keys of one chunk enter the state.
    #[inline(always)]
    pub fn absorb_keys<S: Simd>(&self, simd: S, chunk: usize, state: &mut StateValues, scratch: &mut ChunkScratch<&mut [f32]>) {
        let l = self.chunks.plan;
        let start = chunk * l.chunk_len();
        if start >= self.length() {
            return;
        }
        let end = self.log_decay_at((start + l.chunk_len()).min(self.length()));
        let mut keep = (end - self.log_decay_at(start)).exp() as f32;
        self.decay_state(simd, chunk, state, scratch.monomials);
        // A state decays with its chunk, whether keys enter it or not.
        let tiles = l.entering(chunk, self.group.lag);
        if tiles.is_empty() || !self.enters(tiles.start) {
            if keep != 1.0 {
                state.h.iter_mut().chain(&mut *state.z).for_each(|x| *x *= keep);
            }
            return;
        }
        for tile in tiles {
            let count = self.count(tile);
            if !self.enters(tile) {
                break;
            }
            self.key_decays(tile, end, scratch.decays);
            let plain = !self.group.decays && !self.group.weighs_keys && self.sinks(tile) == 0;
            let rows = if plain {
                self.values(tile)
            } else {
                self.weighted_values(tile, scratch.decays, scratch.rows);
                &*scratch.rows
            };
            let x = self.keys(simd, tile, scratch.x, scratch.channels);
            let features = FeatureTile::new(simd, &self.group.basis, (l.pitch, count), x, scratch.lower_orders, &[]);
            let (h, z) = (&mut *state.h, &mut *state.z);
            simd.call(AccumulateState { features, keep, rows, ep: l.ep, weights: scratch.decays, h, z, block: scratch.block });
            keep = 1.0;
        }
    }

    /// The queries and dU of one chunk enter the gradient of the state, which moves from the end of the chunk to its start.
    #[inline(always)]
    pub fn absorb_queries<S: Simd>(&self, simd: S, chunk: usize, state: &mut StateValues, scratch: &mut ChunkScratch<&mut [f32]>) {
        let l = self.chunks.plan;
        let start = chunk * l.chunk_len();
        if start >= self.length() {
            return;
        }
        let before = self.log_decay_at(start);
        let end = self.log_decay_at((start + l.chunk_len()).min(self.length()));
        let mut keep = (end - before).exp() as f32;
        self.decay_state(simd, chunk, state, scratch.monomials);
        for &h in &self.group.heads {
            for tile in l.tiles_of(chunk) {
                let count = self.count(tile);
                if count == 0 {
                    break;
                }
                self.decays(tile, before, 1.0, scratch.decays);
                self.query_rows(simd, h, tile, scratch);
                self.decay_queries(simd, tile, scratch.x, scratch.channels);
                let features = FeatureTile::new(simd, &self.group.basis, (l.pitch, count), scratch.x, scratch.lower_orders, &l.factors[h]);
                let (h, z) = (&mut *state.h, &mut *state.z);
                simd.call(AccumulateState {
                    features,
                    keep,
                    rows: scratch.rows,
                    ep: l.ep,
                    weights: scratch.weights,
                    h,
                    z,
                    block: scratch.block,
                });
                keep = 1.0;
            }
        }
    }

    /// Queries of a tile into `x`, decay·dU into `rows` and decay·dz into `weights`, all zero after the count.
    #[inline(always)]
    pub fn query_rows<S: Simd>(&self, simd: S, h: usize, tile: usize, scratch: &mut ChunkScratch<&mut [f32]>) {
        let l = self.chunks.plan;
        let n = self.group.range as usize * l.head_count() + self.b * l.shape.heads + h;
        let (first, count) = (tile * l.tile, self.count(tile));
        let q = &self.chunks.prepared.q[(n * l.tp() + first) * l.dp..][..l.pitch * l.dp];
        simd.call(Transpose { rows: q, stride: l.dp, count, dim: self.group.basis.d(), columns: scratch.x, len: l.pitch });
        let at = n * l.shape.time + first;
        let du = self.chunks.du[at * l.ep..][..count * l.ep].chunks_exact(l.ep);
        for ((row, du), &decay) in scratch.rows.chunks_exact_mut(l.ep).zip(du).zip(&*scratch.decays) {
            row.iter_mut().zip(du).for_each(|(row, du)| *row = decay * du);
        }
        scratch.rows[count * l.ep..l.pitch * l.ep].fill(0.0);
        scratch.weights[..l.pitch].fill(0.0);
        for ((weight, dz), &decay) in scratch.weights.iter_mut().zip(&self.chunks.dz[at..at + count]).zip(&*scratch.decays) {
            *weight = decay * dz;
        }
    }
}

/// x ← x∘factors
#[inline(always)]
pub fn multiply_columns(x: &mut [f32], factors: &[f32]) {
    x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
}
