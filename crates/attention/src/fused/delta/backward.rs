//! Gradients of values, keys, β, decays and learned coefficients, from those of written values: backward in time, then forward once more for the
//! reads of the state.

use std::ops::Range;

use crate::fused::chunks::{ChunkScratch, GroupChunks, StateRead, StateValues, multiply_columns};
use crate::fused::delta::{AddedTile, TileRows, Writer, times, weigh_rows};
use crate::fused::prepare::channel_decay::ScoreRowGrads;
use termwise_kernels::features::{FeatureTile, ReadState};
use termwise_kernels::real::dot;
use termwise_kernels::score_rows::{BackwardRow, CoefficientRow, DecayGrad, Visible, soft_cap, soft_cap_slopes};
use termwise_kernels::simd::{Simd, Task};
use termwise_kernels::tile_gemm::multiply;
use termwise_kernels::triangular::UnitLowerTriangular;
use termwise_kernels::{PAD, ROWS, TILE};

/// All positions of one writer.
pub(in crate::fused) struct SolveBackward<'a> {
    pub writer: Writer<'a>,
    /// [T]
    pub beta: &'a [f32],
    /// [Tp, dp]
    pub k: &'a [f32],
    /// u [Tp, ep], the same transposed per tile, and r.
    pub u: &'a [f32],
    pub ut: &'a [f32],
    pub residuals: &'a [f32],
    /// Added to [Tp, dp].
    pub dk: &'a mut [f32],
    /// du [Tp, ep], which becomes λ.
    pub dv: &'a mut [f32],
    /// [T], zero at first.
    pub dbeta: &'a mut [f32],
    /// The share of [`SolveBackward::dk`] that keys have as readers, added to [Tp, dp]; empty without a decay per channel.
    pub dreaders: &'a mut [f32],
    /// [T] and [orders], zero at first.
    pub ddecay: &'a mut [f64],
    pub dlearned: &'a mut [f64],
    /// Scratch for D, then for H.
    pub state: &'a mut [f32],
    /// Scratch for two tiles.
    pub tiles: &'a mut [f32],
    pub scratch: ChunkScratch<&'a mut [f32]>,
}

impl Task for SolveBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (writer, l) = (self.writer, self.writer.plan());
        let state = std::mem::take(&mut self.state);
        let count = writer.chunk_count();
        state.fill(0.0);
        for chunk in (0..count).rev() {
            for tile in writer.tiles(chunk).rev() {
                if let Some(group) = writer.group.filter(|_| chunk + 1 < count) {
                    self.written(simd, group, chunk, tile, state);
                }
                // Later tiles first, then its own tile, whose λ depends on them and on the state.
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
                let later = &mut StateValues { h: &mut state[..group.group.len], z: &mut [] };
                group.decay_state(simd, chunk, later, self.scratch.monomials);
                for tile in writer.tiles(chunk) {
                    group.decays(tile, before, 1.0, self.scratch.decays);
                    self.scratch.decays.iter_mut().for_each(|decay| *decay = -*decay);
                    let added = AddedTile { tile, keep, values: &self.dv[tile * l.tile * l.ep..], reads: true };
                    writer.absorb(simd, group, added, state, &mut self.scratch);
                    keep = 1.0;
                }
            }
        }
        let Some(group) = writer.group else { return };
        state[..group.group.len].fill(0.0);
        for chunk in 0..count {
            if chunk > 0 {
                writer.tiles(chunk).for_each(|tile| self.reading(simd, group, chunk, tile, state));
            }
            if chunk + 1 < count {
                writer.absorb_written(simd, chunk, self.u, state, &mut self.scratch);
            }
        }
    }
}

impl<'a> SolveBackward<'a> {
    /// The positions of a tile that count.
    fn positions(&self, tile: usize) -> Range<usize> {
        let first = tile * self.writer.plan().tile;
        first..first + self.writer.count(tile)
    }

    /// The keys of a tile as keys of the state: g += e^{c' − c_s}·K(k_s)ᵀ·D, dk and dc.
    #[inline(always)]
    fn written<S: Simd>(&mut self, simd: S, of: GroupChunks<'a>, chunk: usize, tile: usize, state: &[f32]) {
        let (writer, l, at) = (self.writer, self.writer.plan(), self.positions(tile));
        let (s, scratch) = (l.shape, &mut self.scratch);
        let (back, group) = (&mut scratch.backward, of.group);
        let u = &self.u[at.start * l.ep..at.end * l.ep];
        of.decays(tile, writer.log_decays(of, chunk)[1], -1.0, scratch.decays);
        weigh_rows(&scratch.decays[..at.len()], u, scratch.rows, l.ep);
        back.turn(simd, l, scratch.rows, at.len());
        let x = of.keys(simd, tile, scratch.x, scratch.channels);
        let features = FeatureTile::new(simd, &group.basis, (l.pitch, at.len()), x, scratch.lower_orders, &[]);
        let (rows, weights, block) = (&mut *back.drows, &mut *scratch.weights, &mut *scratch.block);
        simd.call(ReadState { features, h: state, z: &[], ep: l.ep, rows, weights, block });
        back.slope(simd, l, StateRead { features, h: state, z: &[], weights: scratch.weights }, scratch.block, 0);
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
        let (writer, l, at) = (self.writer, self.writer.plan(), self.positions(tile));
        let keys = writer.key_tile(tile, &[]);
        let n = &mut self.tiles[..TILE * TILE];
        for start in (0..at.len()).step_by(ROWS) {
            let rows = start..(start + ROWS).min(at.len());
            writer.weights(simd, TileRows { tile, rows }, &keys, true, &mut n[start * TILE..]);
        }
        let system = UnitLowerTriangular { n, beta: &self.beta[at.clone()], ep: l.ep };
        let rows = &mut self.dv[at.start * l.ep..at.end * l.ep];
        for start in (0..at.len()).step_by(ROWS).rev() {
            let count = ROWS.min(at.len() - start);
            system.backward(simd, [start, count, at.len()], rows);
            let own = rows[start * l.ep..][..count * l.ep].chunks_exact_mut(l.ep);
            for (t, g) in (at.start + start..).zip(own) {
                self.dbeta[t] = dot(g, &self.residuals[t * l.ep..][..l.ep]);
                times(simd, g, self.beta[t]);
            }
        }
    }

    /// The pairs of the rows of one tile, whose λ is known, with the keys of the same or of an earlier tile, to whose g they contribute.
    #[inline(always)]
    fn pairs<S: Simd>(&mut self, simd: S, tile: usize, of: usize) {
        let (writer, l, at, first) = (self.writer, self.writer.plan(), self.positions(tile), of * self.writer.plan().tile);
        let (s, head, diagonal) = (l.shape, writer.head(), of == tile);
        let (x, rest) = self.tiles.split_at_mut(TILE * TILE);
        let (dp, room) = rest.split_at_mut(TILE * TILE);
        let (channels, first_row) = (writer.channels(), at.start * l.dp);
        let keys = writer.key_tile(of, &[]);
        let ut = &self.ut[of * s.e * l.pitch..][..s.e * l.pitch];
        let mut dcolumns = [0.0; TILE];
        let mut slopes = [0.0; TILE];
        // Of an earlier tile all keys are visible, of its own those before each row.
        let seen = |r: usize| if diagonal { r } else { l.tile };
        let k = &self.k[first * l.dp..][..l.tile * l.dp];
        for start in (0..at.len()).step_by(ROWS) {
            let rows = start..(start + ROWS).min(at.len());
            let (most, m) = (seen(rows.end - 1), rows.len());
            // The last key of a block is visible to none of its rows, but is among the columns that are read below.
            let width = if diagonal { rows.end } else { l.tile }.next_multiple_of(PAD);
            let (x, dp) = (&mut x[start * TILE..], &mut dp[start * TILE..]);
            writer.scores(simd, &TileRows { tile, rows: rows.clone() }, &keys, width, x);
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
        // dk_s += dXᵀ·k_t and g_s −= Lᵀ·λ; on the diagonal, keys from c0 on are visible to rows after them.
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
            // Rows and keys may be the same: the gradient of the rows is added at the end.
            let (dq, room) = room.split_at_mut(TILE * l.dp);
            dq[..own.len()].fill(0.0);
            let dk = &mut self.dk[first * l.dp..][..l.tile * l.dp];
            let block = ScoreRowGrads { rows: at.clone(), q: own, dx: dp, dq: &mut *dq, dk, room };
            channels.backward(simd, block, of, keys);
            for to in [&mut self.dk[first_row..], &mut self.dreaders[first_row..]] {
                to[..own.len()].iter_mut().zip(&*dq).for_each(|(to, from)| *to += *from);
            }
        }
        if writer.decay().is_some() {
            self.ddecay[first..].iter_mut().zip(&dcolumns).for_each(|(d, &column)| *d += column as f64);
        }
    }

    /// The keys of a tile as readers of the state: dk, dc and learned coefficients of −λ_tᵀ·(e^{c_t − c}·Hᵀ·Φ̂(k_t)).
    #[inline(always)]
    fn reading<S: Simd>(&mut self, simd: S, of: GroupChunks<'a>, chunk: usize, tile: usize, state: &[f32]) {
        let (writer, l, at) = (self.writer, self.writer.plan(), self.positions(tile));
        let (s, scratch, head) = (l.shape, &mut self.scratch, writer.head());
        let (back, group) = (&mut scratch.backward, of.group);
        of.decays(tile, writer.log_decays(of, chunk)[0], 1.0, scratch.decays);
        scratch.decays.iter_mut().for_each(|decay| *decay = -*decay);
        weigh_rows(&scratch.decays[..at.len()], &self.dv[at.start * l.ep..], scratch.rows, l.ep);
        back.turn(simd, l, scratch.rows, at.len());
        let x = writer.reader_columns(simd, of, tile, scratch.x, scratch.channels);
        let factors = &l.factors[writer.h];
        let features = FeatureTile::new(simd, &group.basis, (l.pitch, at.len()), x, scratch.lower_orders, factors);
        let wanted = if group.decays || head.learned > 0 { group.basis.orders().len() * l.pitch } else { 0 };
        back.slope(simd, l, StateRead { features, h: state, z: &[], weights: scratch.weights }, scratch.block, wanted);
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
