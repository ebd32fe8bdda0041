//! Chunks: what all passes over them share. Within a chunk queries look at keys as in parallel mode; what came before is in the state.
//!
//! ```text
//! forward    U_t = e^{c_t − c} · Φ(q_t)ᵀ·H + (tiles within the chunk);        H ← e^{c' − c}·H + Σ_s e^{c' − c_s}·K(k_s) (κ_s v_s)ᵀ
//! backward   forward in time, with H: dq;     backward in time, with dH ← e^{c' − c}·dH + Σ_t e^{c_t − c}·Φ(q_t) dU_tᵀ: dk, dv, dκ
//! ```
//!
//! c is that of the last position before the chunk, c' that of its last. No state is stored: the backward pass computes them anew.
//! Where there are few kv heads, time is cut into spans that run at the same time: first what each adds to the state, then
//! their sums in order, then the passes. All of this is fixed by the shape, so that results do not depend on the number of threads.

mod backward;
mod boundary_states;
mod forward;
pub(super) mod run;

use crate::fused::plan::Layout;
use crate::fused::state_group::Unit;
use crate::fused::tile_forward::Gates;
use crate::kernels::disjoint::Shared;
use crate::kernels::features::{Absorb, BLOCK, Points, Stem, Transpose};
use crate::kernels::simd::Simd;

/// What every pass over chunks reads.
#[derive(Clone, Copy)]
pub struct Chunks<'a> {
    pub layout: &'a Layout,
    pub gates: Gates<'a>,
    pub lengths: Option<&'a [usize]>,
    pub kt: &'a [f32],
    pub v: &'a [f32],
    /// a_n/α! of each chunked head [N].
    pub factors: &'a [Vec<f32>],
    /// States at the start of each span, or their gradients at its end [spans, B, units]; empty for a single span from nothing.
    pub states: Shared<f32>,
    /// Empty in the forward pass.
    pub queries: QueryGrads<'a>,
    /// Whether the states of span 0 hold what came before the first position.
    pub given: bool,
}

/// Queries and their gradients, which the backward pass reads.
#[derive(Clone, Copy, Default)]
pub struct QueryGrads<'a> {
    /// [N, Tp, dp]
    pub q: &'a [f32],
    /// [N, T, ep] and [N, T]
    pub du: &'a [f32],
    pub dz: &'a [f32],
}

/// Memory of one task.
pub struct Work<'a> {
    /// Where states are not shared between spans.
    pub state: &'a mut [f32],
    /// Prepared queries of a chunk, [positions, dp].
    pub queries: &'a mut [f32],
    /// [dp, L]
    pub x: &'a mut [f32],
    /// [M, L]
    pub stem: &'a mut [f32],
    /// [BLOCK, L]
    pub block: &'a mut [f32],
    /// [L, ep]
    pub rows: &'a mut [f32],
    /// [L]
    pub weights: &'a mut [f32],
    /// e^{c_t − c} [L]
    pub fades: &'a mut [f32],
    pub backward: BackwardWork<'a>,
}

/// What only the backward pass needs.
pub struct BackwardWork<'a> {
    /// [BLOCK, L]
    pub gradient: &'a mut [f32],
    /// [M, L]
    pub dstem: &'a mut [f32],
    /// [dp, L]
    pub dx: &'a mut [f32],
    /// [ep, L]
    pub columns: &'a mut [f32],
    /// [orders, L]
    pub parts: &'a mut [f32],
    /// [L, ep]
    pub drows: &'a mut [f32],
    /// [L]
    pub line: &'a mut [f32],
}

fn sizes(l: &Layout, backward: bool, given: bool) -> [usize; 15] {
    let most = |f: fn(&Unit) -> usize| l.units.iter().map(f).max().unwrap_or(0);
    let (len, stem) = (l.pitch, most(|unit| unit.basis.stem_rows()) * l.pitch);
    let state = if l.spans > 1 || given { 0 } else { most(|unit| unit.len) };
    let queries = if backward { 0 } else { ((l.chunk_tiles - 1) * l.tile + l.pitch) * l.dp };
    let forward = [state, queries, l.dp * len, stem, BLOCK * len, len * l.ep, len, len];
    let only = |size: usize| if backward { size } else { 0 };
    let orders = most(|unit| unit.basis.orders().len());
    let rest = [BLOCK * len, stem, l.dp * len, l.ep * len, orders * len, len * l.ep, len].map(only);
    let mut all = [0; 15];
    all[..8].copy_from_slice(&forward);
    all[8..].copy_from_slice(&rest);
    all.map(|size| size.next_multiple_of(16))
}

impl<'a> Work<'a> {
    /// Values that [`Work::new`] takes.
    pub fn len(l: &Layout, backward: bool, given: bool) -> usize {
        sizes(l, backward, given).iter().sum()
    }

    /// Divides a room up.
    pub fn new(mut room: &'a mut [f32], l: &Layout, backward: bool, given: bool) -> Work<'a> {
        let [state, queries, x, stem, block, rows, weights, fades, gradient, dstem, dx, columns, parts, drows, line] =
            sizes(l, backward, given).map(|size| {
                let (own, rest) = std::mem::take(&mut room).split_at_mut(size);
                room = rest;
                own
            });
        let backward = BackwardWork { gradient, dstem, dx, columns, parts, drows, line };
        Work { state, queries, x, stem, block, rows, weights, fades, backward }
    }
}

/// A state: H [N, ep] and z [N], which is empty where there is none.
pub struct State<'a> {
    pub h: &'a mut [f32],
    pub z: &'a mut [f32],
}

impl<'a> State<'a> {
    pub fn of(unit: &Unit, ep: usize, values: &'a mut [f32]) -> State<'a> {
        let rows = unit.basis.rows();
        let (h, z) = values[..unit.len].split_at_mut(rows * ep);
        let z = if unit.sums { &mut z[..rows] } else { &mut [] };
        State { h, z }
    }
}

impl<'a> Chunks<'a> {
    /// Positions of a batch row that count.
    pub fn length(&self, b: usize) -> usize {
        self.lengths.map_or(self.layout.shape.time, |lengths| lengths[b])
    }

    /// The state of a unit at the start of a span: a shared place, or a cleared one of the task's own.
    ///
    /// # Safety
    /// No other task may have this span of this unit in this batch row.
    pub unsafe fn state<'s>(&self, unit: &Unit, b: usize, span: usize, own: &'s mut [f32]) -> State<'s>
    where
        'a: 's,
    {
        let l = self.layout;
        if l.spans > 1 || self.given {
            // SAFETY: the caller's promise.
            return State::of(unit, l.ep, unsafe { self.slot(unit, b, span) });
        }
        own[..unit.len].fill(0.0);
        State::of(unit, l.ep, own)
    }

    /// # Safety
    /// As for [`Chunks::state`].
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn slot(&self, unit: &Unit, b: usize, span: usize) -> &'a mut [f32] {
        let l = self.layout;
        let at = (span * l.shape.batch + b) * l.state_len + unit.at;
        // SAFETY: the caller's promise; the workspace is borrowed for as long as the tasks run.
        unsafe { &mut *(self.states.slice(at, unit.len) as *mut [f32]) }
    }

    /// c at the last of the first p positions; 0 where there is no decay.
    pub fn clock(&self, unit: &Unit, b: usize, p: usize) -> f64 {
        let l = self.layout;
        let n = b * l.shape.heads + unit.heads[0];
        match (unit.decays, p) {
            (false, _) => 0.0,
            (true, 0) => self.gates.before.get(n).copied().unwrap_or(0.0),
            (true, p) => self.gates.decay[n * l.tp() + p - 1],
        }
    }

    /// Of how many positions of a tile count.
    pub fn count(&self, b: usize, tile: usize) -> usize {
        (self.length(b).saturating_sub(tile * self.layout.tile)).min(self.layout.tile)
    }

    /// e^{sign·(c_t − c)} of the positions of a tile; 1 without decay, 0 behind the count.
    pub fn fade(&self, unit: &Unit, b: usize, tile: usize, c: f64, sign: f64, fades: &mut [f32]) {
        let l = self.layout;
        let count = self.count(b, tile);
        fades[..l.pitch].fill(0.0);
        for (i, fade) in fades[..count].iter_mut().enumerate() {
            *fade = if unit.decays { (sign * (self.clock(unit, b, tile * l.tile + i + 1) - c)).exp() as f32 } else { 1.0 };
        }
    }

    /// Prepared keys of a tile, [d, L], zero behind the count: in place, or in `x`.
    pub fn keys<'b>(&self, unit: &Unit, b: usize, tile: usize, x: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        let l = self.layout;
        let (len, kv, count) = (l.pitch, l.kv_index(unit.class, b, unit.g), self.count(b, tile));
        let size = l.shape.d * len;
        let kt = &self.kt[(kv * l.tiles + tile) * size..][..size];
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
    pub fn values(&self, unit: &Unit, b: usize, tile: usize) -> &'a [f32] {
        let l = self.layout;
        let kv = l.kv_index(unit.class, b, unit.g);
        &self.v[(kv * l.tp() + tile * l.tile) * l.ep..][..l.tile * l.ep]
    }

    /// κ of a tile, where keys have weights.
    pub fn key_weights(&self, unit: &Unit, b: usize, tile: usize) -> Option<&'a [f32]> {
        let h = unit.heads[0];
        self.gates.tile_weights(self.layout, h, b * self.layout.shape.heads + h, tile)
    }

    /// κ_s·fade_s·v_s of a tile into `rows` [L, ep], zero behind the count.
    pub fn weighted_values(&self, unit: &Unit, b: usize, tile: usize, fades: &[f32], rows: &mut [f32]) {
        let (ep, count) = (self.layout.ep, self.count(b, tile));
        let (v, weights) = (self.values(unit, b, tile), self.key_weights(unit, b, tile));
        for (i, (row, v)) in rows.chunks_exact_mut(ep).zip(v.chunks_exact(ep)).take(count).enumerate() {
            let factor = fades[i] * weights.map_or(1.0, |weights| weights[i]);
            row.iter_mut().zip(v).for_each(|(row, v)| *row = factor * v);
        }
        rows[count * ep..self.layout.pitch * ep].fill(0.0);
    }

    /// The keys of one chunk enter the state.
    #[inline(always)]
    pub fn absorb_keys<S: Simd>(&self, simd: S, unit: &Unit, b: usize, chunk: usize, state: &mut State, work: &mut Work) {
        let l = self.layout;
        let start = chunk * l.chunk_len();
        if start >= self.length(b) {
            return;
        }
        let end = self.clock(unit, b, (start + l.chunk_len()).min(self.length(b)));
        let mut keep = (end - self.clock(unit, b, start)).exp() as f32;
        for tile in l.tiles_of(chunk) {
            let count = self.count(b, tile);
            if count == 0 {
                break;
            }
            self.fade(unit, b, tile, end, -1.0, work.fades);
            let plain = !unit.decays && !unit.weighs_keys;
            let rows = if plain {
                self.values(unit, b, tile)
            } else {
                self.weighted_values(unit, b, tile, work.fades, work.rows);
                &*work.rows
            };
            let x = self.keys(unit, b, tile, work.x);
            simd.call(Stem { basis: &unit.basis, len: l.pitch, x, stem: work.stem });
            let points = Points { basis: &unit.basis, len: l.pitch, count, x, stem: work.stem, factors: &[] };
            let (h, z) = (&mut *state.h, &mut *state.z);
            simd.call(Absorb { points, keep, rows, ep: l.ep, weights: work.fades, h, z, block: work.block });
            keep = 1.0;
        }
    }

    /// The queries and dU of one chunk enter the gradient of the state, which moves from the end of the chunk to its start.
    #[inline(always)]
    pub fn absorb_queries<S: Simd>(&self, simd: S, unit: &Unit, b: usize, chunk: usize, state: &mut State, work: &mut Work) {
        let l = self.layout;
        let start = chunk * l.chunk_len();
        if start >= self.length(b) {
            return;
        }
        let before = self.clock(unit, b, start);
        let end = self.clock(unit, b, (start + l.chunk_len()).min(self.length(b)));
        let mut keep = (end - before).exp() as f32;
        for &h in &unit.heads {
            for tile in l.tiles_of(chunk) {
                let count = self.count(b, tile);
                if count == 0 {
                    break;
                }
                self.fade(unit, b, tile, before, 1.0, work.fades);
                self.query_rows(simd, b, h, tile, work);
                simd.call(Stem { basis: &unit.basis, len: l.pitch, x: work.x, stem: work.stem });
                let points = Points { basis: &unit.basis, len: l.pitch, count, x: work.x, stem: work.stem, factors: &self.factors[h] };
                let (h, z) = (&mut *state.h, &mut *state.z);
                simd.call(Absorb { points, keep, rows: work.rows, ep: l.ep, weights: work.weights, h, z, block: work.block });
                keep = 1.0;
            }
        }
    }

    /// Queries of a tile into `x`, fade·dU into `rows` and fade·dz into `weights`, all zero behind the count.
    #[inline(always)]
    pub fn query_rows<S: Simd>(&self, simd: S, b: usize, h: usize, tile: usize, work: &mut Work) {
        let (l, grads) = (self.layout, self.queries);
        let (n, first, count) = (b * l.shape.heads + h, tile * l.tile, self.count(b, tile));
        let q = &grads.q[(n * l.tp() + first) * l.dp..][..l.pitch * l.dp];
        simd.call(Transpose { rows: q, stride: l.dp, count, dim: l.shape.d, columns: work.x, len: l.pitch });
        let at = n * l.shape.time + first;
        let du = grads.du[at * l.ep..][..count * l.ep].chunks_exact(l.ep);
        for ((row, du), &fade) in work.rows.chunks_exact_mut(l.ep).zip(du).zip(&*work.fades) {
            row.iter_mut().zip(du).for_each(|(row, du)| *row = fade * du);
        }
        work.rows[count * l.ep..l.pitch * l.ep].fill(0.0);
        work.weights[..l.pitch].fill(0.0);
        for ((weight, dz), &fade) in work.weights.iter_mut().zip(&grads.dz[at..at + count]).zip(&*work.fades) {
            *weight = fade * dz;
        }
    }
}
