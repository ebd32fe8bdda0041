//! From gradients of what is written to those of values, keys, β, decays and learned coefficients: backward in time, then forward once more
//! for what keys read from the state.

use std::ops::Range;

use crate::fused::chunk::{ChunkScratch, State, multiply_columns};
use crate::fused::plan::ChunkGroup;
use crate::fused::write::{Writer, times, weigh_rows};
use crate::kernels::features::{Points, Read};
use crate::kernels::gemm::multiply;
use crate::kernels::score_rows::{BackwardRow, CoefficientRow, DecayGrad, Visible, soft_cap, soft_cap_slopes};
use crate::kernels::simd::{Simd, Task};
use crate::kernels::triangular::Strict;
use crate::kernels::{PAD, ROWS, TILE};
use crate::real::dot;

/// All positions of one writer.
pub(super) struct Unsolve<'a> {
    pub writer: Writer<'a>,
    /// [T]
    pub beta: &'a [f32],
    /// [Tp, dp]
    pub k: &'a [f32],
    /// u [Tp, ep], the same transposed by tile, and r.
    pub u: &'a [f32],
    pub ut: &'a [f32],
    pub kept: &'a [f32],
    /// Added to [Tp, dp].
    pub dk: &'a mut [f32],
    /// du [Tp, ep], which becomes λ.
    pub dv: &'a mut [f32],
    /// [T], zero at first.
    pub dbeta: &'a mut [f32],
    /// What keys have as readers of [`Unsolve::dk`], added to [Tp, dp]; empty without a decay by channel.
    pub dreaders: &'a mut [f32],
    /// [T] and [orders], zero at first.
    pub ddecay: &'a mut [f64],
    pub dlearned: &'a mut [f64],
    /// Room for D, then for H.
    pub state: &'a mut [f32],
    /// Room for two tiles.
    pub tiles: &'a mut [f32],
    pub scratch: ChunkScratch<&'a mut [f32]>,
}

impl Task for Unsolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (writer, l) = (self.writer, self.writer.layout());
        let state = std::mem::take(&mut self.state);
        let count = writer.chunk_count();
        state.fill(0.0);
        for chunk in (0..count).rev() {
            for tile in writer.tiles(chunk).rev() {
                if let Some(group) = writer.group.filter(|_| chunk + 1 < count) {
                    self.written(simd, group, chunk, tile, state);
                }
                // Later tiles first, then its own, whose λ they and the state make known.
                for of in (tile + 1..writer.tiles(chunk).end).chain([tile]) {
                    if of == tile {
                        self.solve(simd, tile);
                    }
                    self.pairs(simd, of, tile);
                }
            }
            if let Some(group) = writer.group.filter(|_| chunk > 0) {
                let [before, end] = writer.log_decays(group, chunk);
                let mut keep = (end - before).exp() as f32;
                let later = &mut State { h: &mut state[..group.len], z: &mut [] };
                writer.chunks.decay_state(simd, group, writer.b, chunk, later, self.scratch.monomials);
                for tile in writer.tiles(chunk) {
                    writer.chunks.decays(group, writer.b, tile, before, 1.0, self.scratch.decays);
                    self.scratch.decays.iter_mut().for_each(|decay| *decay = -*decay);
                    writer.absorb(simd, group, tile, keep, &self.dv[tile * l.tile * l.ep..], true, state, &mut self.scratch);
                    keep = 1.0;
                }
            }
        }
        let Some(group) = writer.group else { return };
        state[..group.len].fill(0.0);
        for chunk in 0..count {
            if chunk > 0 {
                writer.tiles(chunk).for_each(|tile| self.reading(simd, group, chunk, tile, state));
            }
            if chunk + 1 < count {
                writer.absorb_written(simd, group, chunk, self.u, state, &mut self.scratch);
            }
        }
    }
}

impl Unsolve<'_> {
    /// The positions of a tile that count.
    fn positions(&self, tile: usize) -> Range<usize> {
        let first = tile * self.writer.layout().tile;
        first..first + self.writer.count(tile)
    }

    /// The keys of a tile as those that are in the state: g += e^{c' − c_s}·K(k_s)ᵀ·D, dk and dc.
    #[inline(always)]
    fn written<S: Simd>(&mut self, simd: S, group: &ChunkGroup, chunk: usize, tile: usize, state: &[f32]) {
        let (writer, l, at) = (self.writer, self.writer.layout(), self.positions(tile));
        let (s, scratch) = (l.shape, &mut self.scratch);
        let back = &mut scratch.backward;
        let u = &self.u[at.start * l.ep..at.end * l.ep];
        writer.chunks.decays(group, writer.b, tile, writer.log_decays(group, chunk)[1], -1.0, scratch.decays);
        weigh_rows(&scratch.decays[..at.len()], u, scratch.rows, l.ep);
        back.turn(simd, l, scratch.rows, at.len());
        let x = writer.columns(simd, group, tile, false, scratch.x, scratch.channels);
        let points = Points::new(simd, &group.basis, (l.pitch, at.len()), x, scratch.lower_orders, &[]);
        let (rows, weights, block) = (&mut *back.drows, &mut *scratch.weights, &mut *scratch.block);
        simd.call(Read { points, h: state, z: &[], ep: l.ep, rows, weights, block });
        back.slope(simd, l, points, [state, &[]], scratch.weights, scratch.block, 0);
        if group.channels {
            multiply_columns(back.dx, &scratch.channels[..s.d * l.pitch]);
        }
        let dk = &mut self.dk[at.start * l.dp..at.end * l.dp];
        back.add_slope(simd, l, group, dk, at.len());
        let rows = self.dv[at.start * l.ep..at.end * l.ep].chunks_exact_mut(l.ep).zip(back.drows.chunks_exact(l.ep));
        for (((g, from), &decay), (u, dc)) in rows.zip(&*scratch.decays).zip(u.chunks_exact(l.ep).zip(&mut self.ddecay[at])) {
            g.iter_mut().zip(from).for_each(|(g, from)| *g += decay * from);
            if group.decays {
                *dc -= (decay * dot(from, u)) as f64;
            }
        }
    }

    /// The system of a tile, transposed: from d to λ, with dβ.
    #[inline(always)]
    fn solve<S: Simd>(&mut self, simd: S, tile: usize) {
        let (writer, l, at) = (self.writer, self.writer.layout(), self.positions(tile));
        let keys = writer.keys(tile);
        let n = &mut self.tiles[..TILE * TILE];
        for start in (0..at.len()).step_by(ROWS) {
            let rows = start..(start + ROWS).min(at.len());
            writer.weights(simd, tile, rows, &keys, true, &mut n[start * TILE..]);
        }
        let system = Strict { n, beta: &self.beta[at.clone()], ep: l.ep };
        let rows = &mut self.dv[at.start * l.ep..at.end * l.ep];
        for start in (0..at.len()).step_by(ROWS).rev() {
            let count = ROWS.min(at.len() - start);
            system.backward(simd, [start, count, at.len()], rows);
            let own = rows[start * l.ep..][..count * l.ep].chunks_exact_mut(l.ep);
            for (t, g) in (at.start + start..).zip(own) {
                self.dbeta[t] = dot(g, &self.kept[t * l.ep..][..l.ep]);
                times(simd, g, self.beta[t]);
            }
        }
    }

    /// The pairs of the rows of one tile, whose λ is known, with the keys of an earlier tile, for which they give g, or of the same.
    #[inline(always)]
    fn pairs<S: Simd>(&mut self, simd: S, tile: usize, of: usize) {
        let (writer, l, at, first) = (self.writer, self.writer.layout(), self.positions(tile), of * self.writer.layout().tile);
        let (s, head, diagonal) = (l.shape, writer.head(), of == tile);
        let (x, rest) = self.tiles.split_at_mut(TILE * TILE);
        let (dp, room) = rest.split_at_mut(TILE * TILE);
        let (channels, first_row) = (writer.channels(), at.start * l.dp);
        let keys = writer.keys(of);
        let ut = &self.ut[of * s.e * l.pitch..][..s.e * l.pitch];
        let mut dcolumns = [0.0; TILE];
        let mut slopes = [0.0; TILE];
        // Of an earlier tile all keys are seen, of its own those before each row.
        let seen = |r: usize| if diagonal { r } else { l.tile };
        let k = &self.k[first * l.dp..][..l.tile * l.dp];
        for start in (0..at.len()).step_by(ROWS) {
            let rows = start..(start + ROWS).min(at.len());
            let (most, m) = (seen(rows.end - 1), rows.len());
            // The last key of a block is seen by none of its rows, but is among the columns that are read below.
            let width = if diagonal { rows.end } else { l.tile }.next_multiple_of(PAD);
            let (x, dp) = (&mut x[start * TILE..], &mut dp[start * TILE..]);
            writer.scores(simd, tile, rows.clone(), &keys, width, x);
            let lambda = &self.dv[(at.start + start) * l.ep..];
            multiply::<S, false>(simd, [m, width, s.e], (lambda, l.ep, 1), (ut, l.pitch), (dp, TILE));
            for (r, (x, dp)) in rows.zip(x.chunks_mut(TILE).zip(dp.chunks_mut(TILE))) {
                let (x, dp, t) = (&mut x[..width], &mut dp[..width], at.start + r);
                times(simd, dp, -1.0);
                if let Some(cap) = head.cap {
                    soft_cap_slopes(simd, x, cap, &mut slopes[..width]);
                    soft_cap(simd, x, cap);
                }
                let (visible, clamp) = (Visible::first(seen(r)), head.clamp);
                if head.learned > 0 {
                    let decay = writer.decay_row(t, &keys);
                    let row = CoefficientRow { x, dp, visible, clamp, decay, rho: None, dz: 0.0, key_weights: None };
                    head.kernel.learned_row(simd, row, &mut self.dlearned[..head.learned]);
                }
                let decay = writer.decay_row(t, &keys).map(|decay| DecayGrad { decay, dcolumns: &mut dcolumns, own: false });
                let row = BackwardRow { x: &mut *x, dp: &mut *dp, visible, clamp, decay, rho: None, dz: 0.0, key_weights: None };
                self.ddecay[t] += head.kernel.backward_row(simd, row) as f64;
                if head.cap.is_some() {
                    dp.iter_mut().zip(&slopes).for_each(|(dx, slope)| *dx *= slope);
                }
                times(simd, dp, writer.scale());
                times(simd, x, -1.0);
            }
            // dk_t += dX·k_s
            if channels.is_some() {
                continue;
            }
            let to = (&mut self.dk[(at.start + start) * l.dp..][..m * l.dp], l.dp);
            multiply::<S, true>(simd, [m, l.dp, most], (dp, TILE, 1), (k, l.dp), to);
        }
        // dk_s += dXᵀ·k_t and g_s −= Lᵀ·λ; on the diagonal, keys from c0 on are seen by rows after them.
        let own = &self.k[at.start * l.dp..at.end * l.dp];
        let keys = if diagonal { at.len() } else { l.tile };
        for c0 in (0..keys).step_by(ROWS) {
            let (m, skip) = (ROWS.min(keys - c0), if diagonal { c0 } else { 0 });
            let (rows, place) = (at.len() - skip, skip * TILE + c0);
            if channels.is_none() {
                let to = (&mut self.dk[(first + c0) * l.dp..][..m * l.dp], l.dp);
                multiply::<S, true>(simd, [m, l.dp, rows], (&dp[place..], 1, TILE), (&own[skip * l.dp..], l.dp), to);
            }
            if !diagonal {
                let (to, lambda) = self.dv.split_at_mut(at.start * l.ep);
                let to = (&mut to[(first + c0) * l.ep..][..m * l.ep], l.ep);
                multiply::<S, true>(simd, [m, l.ep, rows], (&x[c0..], 1, TILE), (lambda, l.ep), to);
            }
        }
        if let Some(channels) = channels {
            // Rows and keys may be the same: what the rows get is added at the end.
            let (dq, room) = room.split_at_mut(TILE * l.dp);
            dq[..own.len()].fill(0.0);
            channels.backward(simd, at.clone(), own, (of, keys), dp, dq, &mut self.dk[first * l.dp..][..l.tile * l.dp], room);
            for to in [&mut self.dk[first_row..], &mut self.dreaders[first_row..]] {
                to[..own.len()].iter_mut().zip(&*dq).for_each(|(to, from)| *to += *from);
            }
        }
        if writer.decay().is_some() {
            self.ddecay[first..].iter_mut().zip(&dcolumns).for_each(|(d, &column)| *d += column as f64);
        }
    }

    /// The keys of a tile as those that read the state: dk, dc and learned coefficients of −λ_tᵀ·(e^{c_t − c}·Hᵀ·Φ̂(k_t)).
    #[inline(always)]
    fn reading<S: Simd>(&mut self, simd: S, group: &ChunkGroup, chunk: usize, tile: usize, state: &[f32]) {
        let (writer, l, at) = (self.writer, self.writer.layout(), self.positions(tile));
        let (s, scratch, head) = (l.shape, &mut self.scratch, writer.head());
        let back = &mut scratch.backward;
        writer.chunks.decays(group, writer.b, tile, writer.log_decays(group, chunk)[0], 1.0, scratch.decays);
        scratch.decays.iter_mut().for_each(|decay| *decay = -*decay);
        weigh_rows(&scratch.decays[..at.len()], &self.dv[at.start * l.ep..], scratch.rows, l.ep);
        back.turn(simd, l, scratch.rows, at.len());
        let x = writer.columns(simd, group, tile, true, scratch.x, scratch.channels);
        let factors = &writer.chunks.factors[writer.h];
        let points = Points::new(simd, &group.basis, (l.pitch, at.len()), x, scratch.lower_orders, factors);
        let wanted = if group.decays || head.learned > 0 { group.basis.orders().len() * l.pitch } else { 0 };
        back.slope(simd, l, points, [state, &[]], scratch.weights, scratch.block, wanted);
        times(simd, &mut back.dx[..group.basis.d() * l.pitch], writer.scale());
        if group.channels {
            multiply_columns(back.dx, &scratch.channels[..s.d * l.pitch]);
        }
        let dk = &mut self.dk[at.start * l.dp..at.end * l.dp];
        back.add_slope(simd, l, group, dk, at.len());
        if group.channels {
            back.add_slope(simd, l, group, &mut self.dreaders[at.start * l.dp..at.end * l.dp], at.len());
        }
        for (order, (part, a)) in back.parts[..wanted].chunks_exact(l.pitch).zip(&head.coefficients).enumerate() {
            if group.decays {
                self.ddecay[at.clone()].iter_mut().zip(part).for_each(|(d, &part)| *d += a * part as f64);
            }
            if head.learned > 0 {
                self.dlearned[order] += part[..at.len()].iter().map(|&part| part as f64).sum::<f64>();
            }
        }
    }
}
