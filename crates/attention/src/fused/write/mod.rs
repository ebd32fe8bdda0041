//! The write rule, around the rest of the engine: before it, values become what is written; after it, gradients of what is written become those
//! of values, keys, β and decays.
//!
//! ```text
//! u_t = β_t·r_t,   r_t = v_t − Σ_{s<t} L_ts·u_s,   L_ts = M_ts·w(x̂_ts)                                           forward in time
//! λ_t = β_t·g_t,   g_s = du_s − Σ_{t>s} L_ts·λ_t;  dv = λ,  dβ_t = g_t·r_t,  dL_ts = −λ_t·u_s                     backward in time
//! ```
//!
//! Keys before a chunk (in parallel mode there is one chunk, of all positions) are met through the state of the heads, H for u and D for −λ:
//!
//! ```text
//! r_t −= e^{c_t − c}·Φ̂(k_t)ᵀ·H,  H as for the heads            g_s += e^{c' − c_s}·K(k_s)ᵀ·D,  D ← e^{c' − c}·D − Σ_t e^{c_t − c}·Φ̂(k_t) λ_tᵀ
//! ```
//!
//! Inside a chunk tiles of keys meet tiles of keys, and each tile on the diagonal is a unit triangular system ([`crate::kernels::triangular`]).
//! Everything of one kv head and class is one task, in the order of time.

mod backward;
mod forward;

use std::ops::Range;

use rayon::prelude::*;

use crate::fused::channels::{Channels, room_len};
use crate::fused::chunk::{ChunkScratch, Chunks, State};
use crate::fused::gates::decay_columns;
use crate::fused::plan::{ChunkGroup, Head, Layout};
use crate::fused::scratch::CallScratch;
use crate::fused::write::backward::Unsolve;
use crate::fused::write::forward::Solve;
use crate::kernels::disjoint::Blocks;
use crate::kernels::features::{Absorb, Points, Transpose};
use crate::kernels::gemm::multiply;
use crate::kernels::score_rows::{DecayRow, ForwardRow, Visible, soft_cap};
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::kernels::{PAD, ROWS, TILE};
use crate::parts::write::Delta;
use crate::{Error, Extra, Grads, Inputs};

/// What one class writes for one kv head of one batch row.
#[derive(Clone, Copy)]
struct Writer<'a> {
    chunks: &'a Chunks<'a>,
    rule: Delta,
    b: usize,
    /// Its prepared kv head.
    kv: usize,
    /// The first head that reads what it writes: kernel, decay and learned coefficients of all that do are the same.
    h: usize,
    /// The state of its heads, where they run in chunks.
    group: Option<&'a ChunkGroup>,
    /// H before the first position; empty where it is zero.
    initial: &'a [f32],
}

/// Keys of one tile, or of a block of a cache, with c of each less the first.
struct Keys<'a> {
    /// [width, pitch]
    kt: &'a [f32],
    pitch: usize,
    count: usize,
    /// `None` for those of a cache.
    tile: Option<usize>,
    columns: [f32; TILE],
    base: f64,
}

impl<'a> Writer<'a> {
    /// The writer of a prepared kv head, if its class has a write rule and a head that uses it. `states` hold the initial states of all kv heads, `step` apart.
    fn of(chunks: &'a Chunks<'a>, kv: usize, states: &'a [f32], step: usize) -> Option<Writer<'a>> {
        let (l, s) = (chunks.layout, chunks.layout.shape);
        let (class, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        let h = (g * s.group()..(g + 1) * s.group()).find(|&h| l.heads[h].class == class)?;
        let rule = l.heads[h].variant.write?;
        let group = l.groups_of(g).find(|group| group.class == class);
        let initial = group.filter(|_| chunks.has_initial_state).map_or(&[][..], |group| &states[pair * step + group.at..][..group.len]);
        Some(Writer { chunks, rule, b, kv, h, group, initial })
    }

    fn layout(&self) -> &'a Layout {
        self.chunks.layout
    }

    fn head(&self) -> &'a Head {
        &self.layout().heads[self.h]
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
        if self.group.is_some() { self.length().div_ceil(self.layout().chunk_len()) } else { 1 }
    }

    /// The tiles of a chunk that have positions which count.
    fn tiles(&self, chunk: usize) -> Range<usize> {
        let tiles = if self.group.is_some() { self.layout().tiles_of(chunk) } else { 0..self.layout().tiles };
        tiles.start..tiles.end.min(self.length().div_ceil(self.layout().tile))
    }

    /// c of the last position before a chunk, and of its last.
    fn log_decays(&self, group: &ChunkGroup, chunk: usize) -> [f64; 2] {
        let len = self.layout().chunk_len();
        [chunk * len, (chunk + 1) * len].map(|p| self.chunks.log_decay_at(group, self.b, p.min(self.length())))
    }

    /// The decay by channel, where there is one.
    fn channels(&self) -> Option<Channels<'a>> {
        self.chunks.channels.head(self.layout(), self.b, self.h)
    }

    /// c of all positions, where there is a decay by head.
    fn decay(&self) -> Option<&'a [f64]> {
        let (l, n) = (self.layout(), self.b * self.layout().shape.heads + self.h);
        self.head().variant.decays_by_head().then(|| &self.chunks.gates.decay[n * l.tp()..][..l.tp()])
    }

    /// Numbers of a key.
    fn width(&self) -> usize {
        self.layout().classes[self.head().class].width
    }

    /// The keys of a tile, [width, pitch].
    fn tile_keys(&self, tile: usize) -> &'a [f32] {
        let l = self.layout();
        &self.chunks.kt[(self.kv * l.tiles + tile) * l.width * l.pitch..][..self.width() * l.pitch]
    }

    /// The keys of a tile, of which all count that a row after them sees.
    fn keys(&self, tile: usize) -> Keys<'a> {
        let l = self.layout();
        let mut columns = [0.0; TILE];
        let base = self.decay().map_or(0.0, |decay| decay_columns(&decay[tile * l.tile..][..l.pitch], &mut columns));
        Keys { kt: self.tile_keys(tile), pitch: l.pitch, count: l.tile, tile: Some(tile), columns, base }
    }

    /// x̂ of rows of a tile with the first `width` keys, [rows, TILE], before the cap.
    #[inline(always)]
    fn scores<S: Simd>(&self, simd: S, tile: usize, rows: Range<usize>, keys: &Keys, width: usize, x: &mut [f32]) {
        let (l, own, at) = (self.layout(), self.tile_keys(tile), (keys.kt, keys.pitch));
        match self.channels() {
            None => multiply::<S, false>(simd, [rows.len(), width, self.width()], (&own[rows.start..], 1, l.pitch), at, (&mut *x, TILE)),
            Some(channels) => {
                let rows = tile * l.tile + rows.start..tile * l.tile + rows.end;
                let q = &channels.k[rows.start * l.dp..rows.end * l.dp];
                match keys.tile {
                    Some(of) => channels.scores(simd, rows, q, of, width, x),
                    None => channels.cached_scores(simd, rows, q, at, width, x),
                }
            }
        }
        for row in x.chunks_mut(TILE).take(rows.len()) {
            times(simd, &mut row[..width], self.scale());
        }
    }

    /// The decay of position t over some keys.
    fn decay_row<'k>(&self, t: usize, keys: &'k Keys) -> Option<DecayRow<'k>> {
        self.decay().map(|decay| DecayRow { row: (decay[t] - keys.base) as f32, columns: &keys.columns })
    }

    /// −L of rows of a tile, [rows, TILE]; of its own tile, which is on the diagonal, the keys before each row.
    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, tile: usize, rows: Range<usize>, keys: &Keys, diagonal: bool, x: &mut [f32]) {
        simd.call(Weights { writer: *self, tile, rows, keys, diagonal, x });
    }

    /// What other keys answer to the rows of a tile: `own` [count, ep] −= L·u.
    #[inline(always)]
    fn answer<S: Simd>(&self, simd: S, tile: usize, keys: &Keys, u: &[f32], weights: &mut [f32], own: &mut [f32]) {
        let (ep, count) = (self.layout().ep, self.count(tile));
        for start in (0..count).step_by(ROWS) {
            let rows = start..(start + ROWS).min(count);
            self.weights(simd, tile, rows.clone(), keys, false, weights);
            multiply::<S, true>(simd, [rows.len(), ep, keys.count], (weights, TILE, 1), (u, ep), (&mut own[start * ep..], ep));
        }
    }

    /// Keys of a tile, [width, L], zero after the count: in place, or in `x`; those that read a state times their scale. With a decay by channel both are
    /// multiplied by `factors`.
    #[inline(always)]
    fn columns<'b, S: Simd>(
        &self,
        simd: S,
        group: &ChunkGroup,
        tile: usize,
        reads: bool,
        x: &'b mut [f32],
        factors: &mut [f32],
    ) -> &'b [f32]
    where
        'a: 'b,
    {
        let (l, scale) = (self.layout(), if reads { self.scale() } else { 1.0 });
        if !reads || (scale == 1.0 && !group.channels) {
            return self.chunks.keys(simd, group, self.b, tile, x, factors);
        }
        let (kt, count) = (self.tile_keys(tile), self.count(tile));
        let size = kt.len();
        if let Some(channels) = self.channels() {
            let rows = &channels.k[tile * l.tile * l.dp..][..l.pitch * l.dp];
            simd.call(Transpose { rows, stride: l.dp, count, dim: l.shape.d, columns: &mut *x, len: l.pitch });
            times(simd, &mut x[..size], scale);
            self.chunks.decay_queries(simd, group, self.b, tile, x, factors);
            return &x[..size];
        }
        for (x, kt) in x[..size].chunks_exact_mut(l.pitch).zip(kt.chunks_exact(l.pitch)) {
            x[..count].iter_mut().zip(kt).for_each(|(x, k)| *x = scale * k);
            x[count..].fill(0.0);
        }
        &x[..size]
    }

    /// Adds the keys of a tile to a state, with rows decays·from; those that read the state with scale and factors.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the symbols of the formula")]
    fn absorb<S: Simd>(
        &self,
        simd: S,
        group: &ChunkGroup,
        tile: usize,
        keep: f32,
        from: &[f32],
        reads: bool,
        state: &mut [f32],
        scratch: &mut ChunkScratch<&mut [f32]>,
    ) {
        let (l, count) = (self.layout(), self.count(tile));
        weigh_rows(&scratch.decays[..count], from, scratch.rows, l.ep);
        let factors: &[f32] = if reads { &self.chunks.factors[self.h] } else { &[] };
        let x = self.columns(simd, group, tile, reads, scratch.x, scratch.channels);
        let points = Points::new(simd, &group.basis, (l.pitch, count), x, scratch.lower_orders, factors);
        let (rows, weights, block) = (&*scratch.rows, &*scratch.weights, &mut *scratch.block);
        simd.call(Absorb { points, keep, rows, ep: l.ep, weights, h: state, z: &mut [], block });
    }

    /// H from before a chunk to its end, where `u` [Tp, ep] is written.
    #[inline(always)]
    fn absorb_written<S: Simd>(
        &self,
        simd: S,
        group: &ChunkGroup,
        chunk: usize,
        u: &[f32],
        state: &mut [f32],
        scratch: &mut ChunkScratch<&mut [f32]>,
    ) {
        let l = self.layout();
        let [before, end] = self.log_decays(group, chunk);
        let mut keep = (end - before).exp() as f32;
        self.chunks.decay_state(simd, group, self.b, chunk, &mut State { h: &mut *state, z: &mut [] }, scratch.monomials);
        for tile in self.tiles(chunk) {
            self.chunks.decays(group, self.b, tile, end, -1.0, scratch.decays);
            self.absorb(simd, group, tile, keep, &u[tile * l.tile * l.ep..], false, state, scratch);
            keep = 1.0;
        }
    }
}

/// [`Writer::weights`], compiled once for all who call it.
struct Weights<'a> {
    writer: Writer<'a>,
    tile: usize,
    rows: Range<usize>,
    keys: &'a Keys<'a>,
    diagonal: bool,
    x: &'a mut [f32],
}

impl Task for Weights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Weights { writer, tile, rows, keys, diagonal, x } = self;
        let seen = |r: usize| if diagonal { r } else { keys.count };
        let width = seen(rows.end - 1).next_multiple_of(PAD).max(PAD);
        writer.scores(simd, tile, rows.clone(), keys, width, x);
        let mut sums = [0.0; 16];
        for (r, x) in rows.zip(x.chunks_mut(TILE)) {
            let (x, decay) = (&mut x[..width], writer.decay_row(tile * writer.layout().tile + r, keys));
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

/// Each row times its weight; zero behind them.
#[inline(always)]
fn weigh_rows(weights: &[f32], from: &[f32], to: &mut [f32], ep: usize) {
    for ((to, from), weight) in to.chunks_exact_mut(ep).zip(from.chunks_exact(ep)).zip(weights) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = weight * from);
    }
    to[weights.len() * ep..].fill(0.0);
}

/// Values of a state, at most.
fn state_len(l: &Layout) -> usize {
    l.groups.iter().map(|group| group.len).max().unwrap_or(0).next_multiple_of(PAD)
}

/// Values become what is written, in the scratch memory; for the backward pass also transposed, with r beside it. `state` has caches where the call
/// continues from one.
pub fn forward(
    l: &Layout,
    inputs: &Inputs<f32>,
    w: &mut CallScratch,
    factors: &[Vec<f32>],
    backward: bool,
    state: Option<&crate::state::State>,
) -> Result<(), Error> {
    if !l.layer.writes() {
        return Ok(());
    }
    let (s, kvs) = (l.shape, l.kv_count());
    w.beta.ensure(kvs * s.time)?;
    w.tasks.ensure(state_len(l) + ChunkScratch::len(l, false))?;
    if backward {
        w.kept.ensure(kvs * l.tp() * l.ep)?;
    }
    let [mut v, mut vt, mut beta, mut kept] = [&mut w.v, &mut w.vt, &mut w.beta, &mut w.kept].map(std::mem::take);
    let optional = |buffer| if backward { Blocks::pieces(buffer, kvs) } else { Blocks::empty(kvs) };
    let places = Blocks::pieces(&mut v, kvs).par().zip(optional(&mut vt).par()).zip(optional(&mut kept).par());
    let chunks = &super::chunks(l, inputs, w, factors);
    places.zip(Blocks::pieces(&mut beta, kvs).par()).enumerate().with_max_len(1).for_each(
        |(kv, (((mut v, mut vt), mut kept), mut beta))| {
            let Some(writer) = Writer::of(chunks, kv, &w.states, l.splits * l.state_len) else { return };
            let logits = inputs.extra(Extra::Beta).iter().skip(writer.b * s.time * s.kv_heads + kv % s.kv_heads).step_by(s.kv_heads);
            beta.piece().iter_mut().zip(logits).for_each(|(beta, &logit)| *beta = writer.rule.beta(logit));
            let cache = state.and_then(|state| state.cache_of(writer.b, writer.h));
            w.tasks.with(|memory| {
                let (state, memory) = memory.split_at_mut(state_len(l));
                let scratch = ChunkScratch::of(memory, l, false);
                dispatch(Solve { writer, beta: beta.piece(), v: v.piece(), vt: vt.piece(), kept: kept.piece(), cache, state, scratch });
            });
        },
    );
    (w.v, w.vt, w.beta, w.kept) = (v, vt, beta, kept);
    Ok(())
}

/// Gradients of what is written, in the scratch memory, become those of values; adds those of keys, decays, learned coefficients and β.
pub fn backward(l: &Layout, inputs: &Inputs<f32>, w: &mut CallScratch, factors: &[Vec<f32>], grads: &mut Grads<f32>) -> Result<(), Error> {
    if !l.layer.writes() {
        return Ok(());
    }
    let (s, kvs, learned) = (l.shape, l.kv_count(), l.learned(false));
    let tiles_len = 2 * TILE * TILE + if room_len(l) > 0 { room_len(l) + TILE * l.dp } else { 0 };
    w.tasks.ensure(state_len(l) + ChunkScratch::len(l, true) + tiles_len)?;
    w.dbeta.ensure(kvs * s.time)?;
    for (sums, width) in [(&mut w.ddecay_write, s.time), (&mut w.dlearned_write, learned)] {
        crate::buffer::resize(sums, kvs * width)?;
        sums.fill(0.0);
    }
    w.dbeta.fill(0.0);
    w.dreaders.ensure(if l.layer.decays_by_channel() { kvs * l.tp() * l.dp } else { 0 })?;
    w.dreaders.fill(0.0);
    let [mut dk, mut dv, mut dbeta] = [&mut w.dk, &mut w.dv, &mut w.dbeta].map(std::mem::take);
    let mut dreaders = std::mem::take(&mut w.dreaders);
    let [mut ddecay, mut dlearned] = [&mut w.ddecay_write, &mut w.dlearned_write].map(std::mem::take);
    let [mut own_decay, mut own_learned] = [&mut w.ddecay_queries, &mut w.dlearned[0]].map(std::mem::take);
    let chunks = &super::chunks(l, inputs, w, factors);
    let places = Blocks::pieces(&mut dk, kvs).par().zip(Blocks::pieces(&mut dv, kvs).par()).zip(Blocks::pieces(&mut dbeta, kvs).par());
    let places = places.zip(Blocks::pieces(&mut dreaders, kvs).par());
    let places = places.zip(Blocks::pieces(&mut ddecay, kvs).par()).zip(Blocks::pieces(&mut dlearned, kvs).par());
    places.enumerate().with_max_len(1).for_each(|(kv, (((((mut dk, mut dv), mut dbeta), mut dreaders), mut ddecay), mut dlearned))| {
        let Some(writer) = Writer::of(chunks, kv, &[], 0) else { return };
        let (rows, columns) = (l.tp(), l.tiles * l.pitch);
        w.tasks.with(|memory| {
            let (tiles, memory) = memory.split_at_mut(tiles_len);
            let (state, memory) = memory.split_at_mut(state_len(l));
            dispatch(Unsolve {
                writer,
                beta: &w.beta[kv * s.time..][..s.time],
                k: &w.k[kv * rows * l.dp..][..rows * l.dp],
                u: &w.v[kv * rows * l.ep..][..rows * l.ep],
                ut: &w.vt[kv * columns * s.e..][..columns * s.e],
                kept: &w.kept[kv * rows * l.ep..][..rows * l.ep],
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
    let logits = inputs.extra(Extra::Beta);
    grads.extra(Extra::Beta).par_chunks_exact_mut(s.kv_heads).with_min_len(64).enumerate().for_each(|(row, to)| {
        for kv in 0..kvs {
            let (g, t) = (kv % s.kv_heads, row % s.time);
            if let Some(writer) = writer(kv).filter(|writer| writer.b == row / s.time && t < writer.length()) {
                to[g] += dbeta[kv * s.time + t] * writer.rule.slope(logits[row * s.kv_heads + g]);
            }
        }
    });
    // Decays and learned coefficients belong to one head of a class.
    for writer in (0..kvs).filter_map(writer) {
        let (kv, n) = (writer.kv, writer.b * s.heads + writer.h);
        if writer.decay().is_some() {
            own_decay[n * l.tp()..][..s.time].iter_mut().zip(&ddecay[kv * s.time..]).for_each(|(to, from)| *to += from);
        }
        if writer.head().learned > 0 {
            own_learned[n * learned..][..learned].iter_mut().zip(&dlearned[kv * learned..]).for_each(|(to, from)| *to += from);
        }
    }
    (w.ddecay_queries, w.dlearned[0], w.dreaders) = (own_decay, own_learned, dreaders);
    (w.dk, w.dv, w.dbeta, w.ddecay_write, w.dlearned_write) = (dk, dv, dbeta, ddecay, dlearned);
    Ok(())
}
