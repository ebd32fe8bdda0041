//! The write rule (delta rule). Before the tiles, written values replace values. After the backward pass of the tiles, gradients of written values
//! become those of values, keys, β and decays.
//!
//! ```text
//! u_t = β_t·r_t,   r_t = v_t − Σ_{s<t} L_ts·u_s,   L_ts = M_ts·w(x̂_ts)                                           forward in time
//! λ_t = β_t·g_t,   g_s = du_s − Σ_{t>s} L_ts·λ_t;  dv = λ,  dβ_t = g_t·r_t,  dL_ts = −λ_t·u_s                     backward in time
//! ```
//!
//! Keys before a chunk are read from the state of the heads, H for u and D for −λ. Parallel mode has one chunk of all positions.
//!
//! ```text
//! r_t −= e^{c_t − c}·Φ̂(k_t)ᵀ·H,  H as for the heads            g_s += e^{c' − c_s}·K(k_s)ᵀ·D,  D ← e^{c' − c}·D − Σ_t e^{c_t − c}·Φ̂(k_t) λ_tᵀ
//! ```
//!
//! Within a chunk keys of a tile read earlier tiles of keys, and each tile on the diagonal is a unit triangular system ([`termwise_kernels::triangular`]).
//! Everything of one kv head and key transform is one task, in the order of time.

mod backward;
mod forward;

use std::ops::Range;

use rayon::prelude::*;

use crate::fused::chunks::{ChunkScratch, Chunks, GroupChunks, StateValues};
use crate::fused::delta::backward::SolveBackward;
use crate::fused::delta::forward::Solve;
use crate::fused::gradients::TileGrads;
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::{CallPlan, HeadPlan};
use crate::fused::prepare::PreparedValues;
use crate::fused::prepare::channel_decay::{ChannelDecay, ScoreRows, room_len};
use crate::fused::prepare::gates::decay_columns;
use crate::fused::prepared::Prepared;
use crate::parts::write::Delta;
use crate::{AuxKind, Buffer, Error, Grads, KeyRange};
use termwise_kernels::buffer::resize;
use termwise_kernels::disjoint::Blocks;
use termwise_kernels::features::{AccumulateState, FeatureTile, Transpose};
use termwise_kernels::score_rows::{DecayRow, ForwardRow, Visible, soft_cap};
use termwise_kernels::simd::{Simd, Task, dispatch};
use termwise_kernels::tile_gemm::multiply;
use termwise_kernels::{PAD, ROWS, TILE};

/// The writer of one kv head and key transform in one batch row.
#[derive(Clone, Copy)]
struct Writer<'a> {
    chunks: &'a Chunks<'a>,
    rule: Delta,
    b: usize,
    /// Its prepared kv head.
    kv: usize,
    /// The first head that reads the written values. All such heads have the same kernel, decay and learned coefficients.
    h: usize,
    /// The state of its heads, if they run in chunks.
    group: Option<GroupChunks<'a>>,
    /// H before the first position; empty if it is zero.
    initial: &'a [f32],
}

/// Keys of one tile, or of a block of a cache, with c of each less the first.
struct KeyTile<'a> {
    /// [width, pitch]
    kt: &'a [f32],
    /// The values written for them [count, ep]; empty if only weights are computed.
    written: &'a [f32],
    pitch: usize,
    count: usize,
    /// `None` for a block of a cache.
    tile: Option<usize>,
    columns: [f32; TILE],
    base: f64,
}

/// Rows of one tile.
#[derive(Clone)]
struct TileRows {
    tile: usize,
    rows: Range<usize>,
}

/// A tile of keys that is added to a state.
struct AddedTile<'a> {
    tile: usize,
    /// Factor of the state.
    keep: f32,
    /// Values [count, ep], which are multiplied by the decays in the scratch memory.
    values: &'a [f32],
    /// Whether the keys read the state, with scale and factors.
    reads: bool,
}

impl<'a> Writer<'a> {
    /// The writer of a prepared kv head, if its key transform has a write rule and a head that uses it. `states` are the initial states of all kv
    /// heads, with stride `step`.
    fn of(chunks: &'a Chunks<'a>, kv: usize, states: &'a [f32], step: usize) -> Option<Writer<'a>> {
        let (l, s) = (chunks.plan, chunks.plan.shape);
        let (transform, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        let h = (g * s.group()..(g + 1) * s.group()).find(|&h| l.heads[h].key_transform == transform)?;
        let rule = l.heads[h].variant.write?;
        let group = l.groups_of(g).find(|group| group.key_transform == transform);
        let initial = group.filter(|_| chunks.has_initial_state()).map_or(&[][..], |group| &states[pair * step + group.at..][..group.len]);
        let group = group.map(|group| chunks.group(group, b));
        Some(Writer { chunks, rule, b, kv, h, group, initial })
    }

    fn plan(&self) -> &'a CallPlan {
        self.chunks.plan
    }

    fn head(&self) -> &'a HeadPlan {
        &self.plan().heads[self.h]
    }

    fn scale(&self) -> f32 {
        self.rule.scale as f32
    }

    fn length(&self) -> usize {
        self.chunks.length(self.b)
    }

    /// Positions of a tile that count.
    fn count(&self, tile: usize) -> usize {
        self.chunks.count(self.b, tile)
    }

    /// Chunks with positions that count.
    fn chunk_count(&self) -> usize {
        if self.group.is_some() { self.length().div_ceil(self.plan().chunk_len()) } else { 1 }
    }

    /// The tiles of a chunk with positions that count.
    fn tiles(&self, chunk: usize) -> Range<usize> {
        let tiles = if self.group.is_some() { self.plan().tiles_of(chunk) } else { 0..self.plan().tiles };
        tiles.start..tiles.end.min(self.length().div_ceil(self.plan().tile))
    }

    /// c of the last position before a chunk, and of its last.
    fn log_decays(&self, group: GroupChunks, chunk: usize) -> [f64; 2] {
        let len = self.plan().chunk_len();
        [chunk * len, (chunk + 1) * len].map(|p| group.log_decay_at(p.min(self.length())))
    }

    /// The decay per channel, if there is one.
    fn channels(&self) -> Option<ChannelDecay<'a>> {
        self.chunks.prepared.channels.head(self.plan(), self.b, self.h)
    }

    /// c of all positions, if there is a decay per head.
    fn decay(&self) -> Option<&'a [f64]> {
        let (l, n) = (self.plan(), self.b * self.plan().shape.heads + self.h);
        self.head().variant.decays_by_head().then(|| &self.chunks.prepared.gates.decay[n * l.tp()..][..l.tp()])
    }

    /// Number of values of a key.
    fn width(&self) -> usize {
        self.plan().key_transforms[self.head().key_transform].width
    }

    /// The keys of a tile, [width, pitch].
    fn tile_keys(&self, tile: usize) -> &'a [f32] {
        let l = self.plan();
        &self.chunks.prepared.kt[(self.kv * l.tiles + tile) * l.width * l.pitch..][..self.width() * l.pitch]
    }

    /// The keys of a tile and the values written for them. A row after the tile sees all of its keys.
    fn key_tile<'k>(&self, tile: usize, written: &'k [f32]) -> KeyTile<'k>
    where
        'a: 'k,
    {
        let l = self.plan();
        let mut columns = [0.0; TILE];
        let base = self.decay().map_or(0.0, |decay| decay_columns(&decay[tile * l.tile..][..l.pitch], &mut columns));
        KeyTile { kt: self.tile_keys(tile), written, pitch: l.pitch, count: l.tile, tile: Some(tile), columns, base }
    }

    /// x̂ of rows of a tile with the first `width` keys, [rows, TILE], before the cap.
    #[inline(always)]
    fn scores<S: Simd>(&self, simd: S, of: &TileRows, keys: &KeyTile, width: usize, x: &mut [f32]) {
        let TileRows { tile, rows } = of.clone();
        let (l, own, at) = (self.plan(), self.tile_keys(tile), (keys.kt, keys.pitch));
        match self.channels() {
            None => multiply::<S, false>(simd, [rows.len(), width, self.width()], (&own[rows.start..], 1, l.pitch), at, (&mut *x, TILE)),
            Some(channels) => {
                let rows = tile * l.tile + rows.start..tile * l.tile + rows.end;
                let q = &channels.k[rows.start * l.dp..rows.end * l.dp];
                let of = ScoreRows { rows, q, width, x: &mut *x };
                match keys.tile {
                    Some(tile) => channels.scores(simd, of, tile),
                    None => channels.cached_scores(simd, of, at),
                }
            }
        }
        for row in x.chunks_mut(TILE).take(rows.len()) {
            times(simd, &mut row[..width], self.scale());
        }
    }

    /// The decay of position t over some keys.
    fn decay_row<'k>(&self, t: usize, keys: &'k KeyTile) -> Option<DecayRow<'k>> {
        self.decay().map(|decay| DecayRow { row: (decay[t] - keys.base) as f32, columns: &keys.columns })
    }

    /// −L of rows of a tile, [rows, TILE]; of its own tile, which is on the diagonal, the keys before each row.
    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, of: TileRows, keys: &KeyTile, diagonal: bool, x: &mut [f32]) {
        simd.call(WriteWeights { writer: *self, of, keys, diagonal, x });
    }

    /// Subtracts the reads of the rows of a tile from earlier keys: `own` [count, ep] −= L·u.
    #[inline(always)]
    fn subtract_read<S: Simd>(&self, simd: S, tile: usize, keys: &KeyTile, weights: &mut [f32], own: &mut [f32]) {
        let (ep, count) = (self.plan().ep, self.count(tile));
        for start in (0..count).step_by(ROWS) {
            let rows = start..(start + ROWS).min(count);
            self.weights(simd, TileRows { tile, rows: rows.clone() }, keys, false, weights);
            multiply::<S, true>(simd, [rows.len(), ep, keys.count], (weights, TILE, 1), (keys.written, ep), (&mut own[start * ep..], ep));
        }
    }

    /// Keys of a tile that read a state, [width, L], zero after the count: in place, or in `x`, times their scale. With a decay per channel they
    /// are multiplied by `factors`.
    #[inline(always)]
    fn reader_columns<'b, S: Simd>(&self, simd: S, group: GroupChunks<'a>, tile: usize, x: &'b mut [f32], factors: &mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        let (l, scale) = (self.plan(), self.scale());
        if scale == 1.0 && !group.group.channels {
            return group.keys(simd, tile, x, factors);
        }
        let (kt, count) = (self.tile_keys(tile), self.count(tile));
        let size = kt.len();
        if let Some(channels) = self.channels() {
            let rows = &channels.k[tile * l.tile * l.dp..][..l.pitch * l.dp];
            simd.call(Transpose { rows, stride: l.dp, count, dim: l.shape.d, columns: &mut *x, len: l.pitch });
            times(simd, &mut x[..size], scale);
            group.decay_queries(simd, tile, x, factors);
            return &x[..size];
        }
        for (x, kt) in x[..size].chunks_exact_mut(l.pitch).zip(kt.chunks_exact(l.pitch)) {
            x[..count].iter_mut().zip(kt).for_each(|(x, k)| *x = scale * k);
            x[count..].fill(0.0);
        }
        &x[..size]
    }

    /// Adds the keys of a tile to the state of a group.
    #[inline(always)]
    fn absorb<S: Simd>(
        &self,
        simd: S,
        group: GroupChunks<'a>,
        added: AddedTile,
        state: &mut [f32],
        scratch: &mut ChunkScratch<&mut [f32]>,
    ) {
        let AddedTile { tile, keep, values, reads } = added;
        let (l, count) = (self.plan(), self.count(tile));
        weigh_rows(&scratch.decays[..count], values, scratch.rows, l.ep);
        let factors: &[f32] = if reads { &l.factors[self.h] } else { &[] };
        let x = match reads {
            true => self.reader_columns(simd, group, tile, scratch.x, scratch.channels),
            false => group.keys(simd, tile, scratch.x, scratch.channels),
        };
        let features = FeatureTile::new(simd, &group.group.basis, (l.pitch, count), x, scratch.lower_orders, factors);
        let (rows, weights, block) = (&*scratch.rows, &*scratch.weights, &mut *scratch.block);
        simd.call(AccumulateState { features, keep, rows, ep: l.ep, weights, h: state, z: &mut [], block });
    }

    /// Advances H from before a chunk to its end, with the values written in `u` [Tp, ep]; does nothing without chunks.
    #[inline(always)]
    fn absorb_written<S: Simd>(&self, simd: S, chunk: usize, u: &[f32], state: &mut [f32], scratch: &mut ChunkScratch<&mut [f32]>) {
        let (l, Some(group)) = (self.plan(), self.group) else { return };
        let [before, end] = self.log_decays(group, chunk);
        let mut keep = (end - before).exp() as f32;
        group.decay_state(simd, chunk, &mut StateValues { h: &mut state[..group.group.len], z: &mut [] }, scratch.monomials);
        for tile in self.tiles(chunk) {
            group.decays(tile, end, -1.0, scratch.decays);
            let added = AddedTile { tile, keep, values: &u[tile * l.tile * l.ep..], reads: false };
            self.absorb(simd, group, added, state, scratch);
            keep = 1.0;
        }
    }
}

/// [`Writer::weights`], compiled once for all callers.
struct WriteWeights<'a> {
    writer: Writer<'a>,
    of: TileRows,
    keys: &'a KeyTile<'a>,
    diagonal: bool,
    x: &'a mut [f32],
}

impl Task for WriteWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let WriteWeights { writer, of, keys, diagonal, x } = self;
        let seen = |r: usize| if diagonal { r } else { keys.count };
        let width = seen(of.rows.end - 1).next_multiple_of(PAD).max(PAD);
        writer.scores(simd, &of, keys, width, x);
        let TileRows { tile, rows } = of;
        let mut sums = [0.0; 16];
        for (r, x) in rows.zip(x.chunks_mut(TILE)) {
            let (x, decay) = (&mut x[..width], writer.decay_row(tile * writer.plan().tile + r, keys));
            if let Some(cap) = writer.head().cap {
                soft_cap(simd, x, cap);
            }
            let (visible, clamp) = (Visible::first(seen(r)), writer.head().clamp);
            let row = ForwardRow { x: &mut *x, visible, clamp, decay, rho: None, sums: &mut sums, key_weights: None };
            writer.head().kernel.forward_row(simd, row);
            times(simd, x, -1.0);
        }
    }
}

/// x ← factor·x
#[inline(always)]
fn times<S: Simd>(simd: S, x: &mut [f32], factor: f32) {
    if factor != 1.0 {
        let factor = simd.splat(factor);
        for i in (0..x.len()).step_by(S::LANES) {
            simd.store_at(x, i, simd.mul(simd.load_at(x, i), factor));
        }
    }
}

/// Each row times its weight; zero after the last.
#[inline(always)]
fn weigh_rows(weights: &[f32], from: &[f32], to: &mut [f32], ep: usize) {
    for ((to, from), weight) in to.chunks_exact_mut(ep).zip(from.chunks_exact(ep)).zip(weights) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = weight * from);
    }
    to[weights.len() * ep..].fill(0.0);
}

/// Maximum number of values of a state.
fn state_len(l: &CallPlan) -> usize {
    l.groups.iter().map(|group| group.len).max().unwrap_or(0).next_multiple_of(PAD)
}

scratch_memory! {
    /// Values of the write rule that its backward pass reads.
    DeltaScratch {
        /// β [K, T]
        beta: Buffer,
        /// r, the residuals of values [K, Tp, ep]; only for the backward pass.
        residuals: Buffer,
    }
}

scratch_memory! {
    /// Gradients from the write rule.
    DeltaGrads {
        /// Of β [K, T].
        dbeta: Buffer,
        /// The share of dk that keys have as readers [K, Tp, dp]; only with a decay per channel.
        dreaders: Buffer,
        /// Of c [K, T] and of learned coefficients [K, orders].
        ddecay: Vec<f64>,
        dlearned: Vec<f64>,
    }
}

impl DeltaScratch {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        Ok(self.beta.ensure(if l.layer.writes() { l.kv_count() * l.shape.time } else { 0 })?)
    }

    pub fn ensure_backward(&mut self, l: &CallPlan) -> Result<(), Error> {
        Ok(self.residuals.ensure(if l.layer.writes() { l.kv_count() * l.tp() * l.ep } else { 0 })?)
    }
}

impl DeltaGrads {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let kvs = if l.layer.writes() { l.kv_count() } else { 0 };
        self.dbeta.ensure(kvs * l.shape.time)?;
        self.dreaders.ensure(if l.layer.decays_by_channel() { kvs * l.tp() * l.dp } else { 0 })?;
        resize(&mut self.ddecay, kvs * l.shape.time)?;
        Ok(resize(&mut self.dlearned, kvs * l.learned(KeyRange::Near))?)
    }

    fn clear(&mut self) {
        self.dbeta.fill(0.0);
        self.dreaders.fill(0.0);
        self.ddecay.fill(0.0);
        self.dlearned.fill(0.0);
    }
}

/// Values of task memory for the tiles of the backward pass.
fn backward_tiles_len(l: &CallPlan) -> usize {
    2 * TILE * TILE + if room_len(l) > 0 { room_len(l) + TILE * l.dp } else { 0 }
}

/// Values of task memory that the forward pass needs, or the backward pass.
pub fn task_len(l: &CallPlan, backward: bool) -> usize {
    match (l.layer.writes(), backward) {
        (false, _) => 0,
        (true, false) => state_len(l) + ChunkScratch::len(l, false),
        (true, true) => state_len(l) + ChunkScratch::len(l, true) + backward_tiles_len(l),
    }
}

/// Replaces values by the written values; for the backward pass also transposed, with residuals. `states` are the initial states of all kv heads.
pub fn forward(prepared: &Prepared, backward: bool, states: &[f32], values: &mut PreparedValues, own: &mut DeltaScratch) {
    let (call, chunks) = (&prepared.call, &Chunks::new(prepared));
    let (l, s, kvs) = (call.plan, call.plan.shape, call.plan.kv_count());
    let (PreparedValues { v, vt }, DeltaScratch { beta, residuals }) = (values, own);
    let optional = |buffer| if backward { Blocks::pieces(buffer, kvs) } else { Blocks::empty(kvs) };
    let places = Blocks::pieces(v, kvs).par().zip(optional(vt).par()).zip(optional(residuals).par());
    places.zip(Blocks::pieces(beta, kvs).par()).enumerate().with_max_len(1).for_each(
        |(kv, (((mut v, mut vt), mut residuals), mut beta))| {
            let Some(writer) = Writer::of(chunks, kv, states, l.splits * l.state_len) else { return };
            let logits = call.inputs.aux(AuxKind::Beta).iter().skip(writer.b * s.time * s.kv_heads + kv % s.kv_heads).step_by(s.kv_heads);
            beta.piece().iter_mut().zip(logits).for_each(|(beta, &logit)| *beta = writer.rule.beta(logit));
            let cache = call.past.and_then(|past| past.of(writer.b, writer.h));
            call.tasks.with(|memory| {
                let (state, memory) = memory.split_at_mut(state_len(l));
                let scratch = ChunkScratch::of(memory, l, false);
                let (v, vt, residuals) = (v.piece(), vt.piece(), residuals.piece());
                dispatch(Solve { writer, beta: beta.piece(), v, vt, residuals, cache, state, scratch });
            });
        },
    );
}

/// Gradients of written values become those of values; adds those of keys, decays, learned coefficients and β.
pub fn backward(prepared: &Prepared, own: &DeltaScratch, to: &mut TileGrads, own_grads: &mut DeltaGrads, grads: &mut Grads<f32>) {
    let (call, chunks) = (&prepared.call, &Chunks::new(prepared));
    let (l, s, kvs, learned) = (call.plan, call.plan.shape, call.plan.kv_count(), call.plan.learned(KeyRange::Near));
    own_grads.clear();
    let TileGrads { dk, dv, ddecay_queries, dlearned: all_learned, .. } = to;
    let DeltaGrads { dbeta, dreaders, ddecay, dlearned } = own_grads;
    let places = Blocks::pieces(dk, kvs).par().zip(Blocks::pieces(dv, kvs).par()).zip(Blocks::pieces(dbeta, kvs).par());
    let places = places.zip(Blocks::pieces(dreaders, kvs).par());
    let places = places.zip(Blocks::pieces(ddecay, kvs).par()).zip(Blocks::pieces(dlearned, kvs).par());
    places.enumerate().with_max_len(1).for_each(|(kv, (((((mut dk, mut dv), mut dbeta), mut dreaders), mut ddecay), mut dlearned))| {
        let Some(writer) = Writer::of(chunks, kv, &[], 0) else { return };
        let (rows, columns) = (l.tp(), l.tiles * l.pitch);
        call.tasks.with(|memory| {
            let (tiles, memory) = memory.split_at_mut(backward_tiles_len(l));
            let (state, memory) = memory.split_at_mut(state_len(l));
            dispatch(SolveBackward {
                writer,
                beta: &own.beta[kv * s.time..][..s.time],
                k: &prepared.k[kv * rows * l.dp..][..rows * l.dp],
                u: &prepared.v[kv * rows * l.ep..][..rows * l.ep],
                ut: &prepared.vt[kv * columns * s.e..][..columns * s.e],
                residuals: &own.residuals[kv * rows * l.ep..][..rows * l.ep],
                dk: dk.piece(),
                dv: dv.piece(),
                dbeta: dbeta.piece(),
                dreaders: dreaders.piece(),
                ddecay: ddecay.piece(),
                dlearned: dlearned.piece(),
                state,
                tiles,
                scratch: ChunkScratch::of(memory, l, true),
            });
        });
    });
    let writer = |kv: usize| Writer::of(chunks, kv, &[], 0);
    let logits = call.inputs.aux(AuxKind::Beta);
    grads.aux(AuxKind::Beta).par_chunks_exact_mut(s.kv_heads).with_min_len(64).enumerate().for_each(|(row, to)| {
        for kv in 0..kvs {
            let (g, t) = (kv % s.kv_heads, row % s.time);
            if let Some(writer) = writer(kv).filter(|writer| writer.b == row / s.time && t < writer.length()) {
                to[g] += dbeta[kv * s.time + t] * writer.rule.slope(logits[row * s.kv_heads + g]);
            }
        }
    });
    // A decay and learned coefficients belong to one head of a key transform.
    for writer in (0..kvs).filter_map(writer) {
        let (kv, n) = (writer.kv, writer.b * s.heads + writer.h);
        if writer.decay().is_some() {
            ddecay_queries[n * l.tp()..][..s.time].iter_mut().zip(&ddecay[kv * s.time..]).for_each(|(to, from)| *to += from);
        }
        if writer.head().learned > 0 {
            all_learned[0][n * learned..][..learned].iter_mut().zip(&dlearned[kv * learned..]).for_each(|(to, from)| *to += from);
        }
    }
}
