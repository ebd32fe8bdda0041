//! The backward pass over tiles: from the gradients of the sums over keys to those of prepared q, k and v.

use std::ops::Range;

use crate::fused::channels::{Source, room_len};
use crate::fused::gates::{Gates, decay_columns};
use crate::fused::gradients::{KeyGrads, QueryGrads};
use crate::fused::plan::Layout;
use crate::kernels::gemm::multiply;
use crate::kernels::score_rows::{BackwardRow, CoefficientRow, DecayGrad, DecayRow, soft_cap, soft_cap_slopes};
use crate::kernels::simd::{Simd, Task};
use crate::kernels::{PAD, ROWS, TILE};

/// What the tasks of the backward pass over tiles read.
pub struct Context<'a> {
    pub layout: &'a Layout,
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub kt: &'a [f32],
    pub vt: &'a [f32],
    pub v: &'a [f32],
    pub gates: Gates<'a>,
    pub channels: Source<'a>,
    pub lengths: Option<&'a [usize]>,
    pub rho: &'a [f32],
    pub du: &'a [f32],
    pub dz: &'a [f32],
}

/// Some key tiles of one kv head, for some query tiles that see them and all heads that run in one mode.
pub struct BackwardTiles<'a, 'b> {
    pub context: &'a Context<'a>,
    pub b: usize,
    pub g: usize,
    pub keys: Range<usize>,
    pub queries: Range<usize>,
    /// Heads whose tiles stay within their chunk, or those that see all keys.
    pub chunked: bool,
    /// Whether its heads are the first to write gradients of these queries and keys, and whether they are the first of all heads.
    pub first: bool,
    pub first_of_all: bool,
    pub to_queries: QueryGrads<'b>,
    pub to_keys: KeyGrads<'b>,
    /// Room for its tiles, [`tiles_len`] values.
    pub room: &'a mut [f32],
}

/// Tiles of one task: scores and their gradients [TILE, TILE], and the gradient of the values of one key tile [TILE, ep].
struct Tiles<'a> {
    x: &'a mut [f32],
    dp: &'a mut [f32],
    dv: &'a mut [f32],
    /// For products with a decay by channel; empty without.
    room: &'a mut [f32],
}

/// Values that the tiles of one task take.
pub fn tiles_len(l: &Layout) -> usize {
    2 * TILE * TILE + TILE * l.ep + room_len(l)
}

impl Task for BackwardTiles<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let c = self.context;
        let l = c.layout;
        let s = l.shape;
        let len = c.lengths.map_or(s.time, |lengths| lengths[self.b]);
        let (x, rest) = std::mem::take(&mut self.room).split_at_mut(TILE * TILE);
        let (dp, rest) = rest.split_at_mut(TILE * TILE);
        let (dv, room) = rest.split_at_mut(TILE * l.ep);
        let mut tiles = Tiles { x, dp, dv, room };
        let heads = self.g * s.group()..(self.g + 1) * s.group();
        let chunked = self.chunked;
        let heads = heads.filter(|&h| l.heads[h].chunked == chunked);
        let (rows, count) = ((self.queries.end * l.tile).min(s.time) - self.queries.start * l.tile, self.keys.len() * l.tile);
        for h in heads.clone().filter(|_| self.first) {
            self.to_queries.dq[0].rows(h % s.group(), 0, rows).fill(0.0);
            if l.far[h].is_some() {
                self.to_queries.dq[1].rows(h % s.group(), 0, rows).fill(0.0);
            }
            if l.heads[h].weighs_keys {
                self.to_keys.dkey_weights.rows(h % s.group(), 0, count).fill(0.0);
            }
        }
        for class in (0..l.classes.len()).filter(|_| self.first_of_all) {
            self.to_keys.dk.rows(class, 0, count).fill(0.0);
            self.to_keys.dv.rows(class, 0, count).fill(0.0);
        }
        for tile in self.keys.clone() {
            for h in heads.clone() {
                // A loop over near and far keys, so that what is long is compiled once.
                for far in [false, true] {
                    let rows = self.rows_of(h, far, tile, len);
                    if !rows.is_empty() {
                        self.key_tile(simd, h, far, tile, rows, &mut tiles);
                    }
                }
            }
        }
    }
}

impl BackwardTiles<'_, '_> {
    /// The queries of one head that meet a tile of keys, as near or as far keys.
    fn rows_of(&self, h: usize, far: bool, tile: usize, len: usize) -> Range<usize> {
        let l = self.context.layout;
        let distance = l.heads[h].variant.distance();
        let (first, until) = match (&l.far[h], far) {
            (_, false) if self.chunked => (tile, l.chunk_end(tile)),
            (_, false) => (tile, distance.seen_until(tile * l.tile, l.tile)),
            (None, true) => return 0..0,
            // From the first tile of queries on whose last may be far enough from its first key, until all are in the state.
            (Some(far), true) => {
                let lag = (distance.window - 1).div_ceil(l.tile);
                let until = if far.chunked { l.met_in_state_from(tile, lag) } else { usize::MAX };
                ((tile * l.tile).saturating_add(distance.window) / l.tile, until)
            }
        };
        first.max(self.queries.start).saturating_mul(l.tile)..len.min(until).min(self.queries.end * l.tile)
    }

    /// One tile of keys against these queries of one head, as near or as far keys.
    #[inline(always)]
    fn key_tile<S: Simd>(&mut self, simd: S, h: usize, far: bool, tile: usize, rows: Range<usize>, tiles: &mut Tiles) {
        let c = self.context;
        let l = c.layout;
        let s = l.shape;
        let head = l.pass(h, far);
        let (n, in_group) = (self.b * s.heads + h, h % s.group());
        // Among queries as they meet near or far keys.
        let pass = far as usize * l.head_count() + n;
        let (kv, width_of) = (l.kv_index(head.class, self.b, self.g), l.classes[head.class].width);
        let dp_of = width_of.next_multiple_of(PAD);
        let s0 = tile * l.tile;
        let distance = head.variant.distance();
        let kt = &c.kt[(kv * l.tiles + tile) * l.width * l.pitch..][..width_of * l.pitch];
        let vt = &c.vt[(kv * l.tiles + tile) * s.e * l.pitch..][..s.e * l.pitch];
        let k = &c.k[(kv * l.tp() + s0) * l.dp..][..l.tile * l.dp];
        let key_weights = c.gates.tile_weights(l, h, n, tile);
        let channels = c.channels.head(l, self.b, h);
        let decay = head.variant.decays_by_head().then(|| &c.gates.decay[n * l.tp()..][..l.tp()]);
        let mut columns = [0.0; TILE];
        let mut dcolumns = [0.0; TILE];
        let mut slopes = [0.0; TILE];
        let base = decay.map_or(0.0, |decay| decay_columns(&decay[s0..s0 + l.pitch], &mut columns));
        // Places of this tile, and of the first query, in what the task writes to.
        let (first, to) = (self.queries.start * l.tile, (tile - self.keys.start) * l.tile);
        let KeyGrads { dk, dv, dkey_weights, ddecay: ddecay_keys } = &mut self.to_keys;
        let (dk, dv) = (dk.rows(head.class, to, to + l.tile), dv.rows(head.class, to, to + l.tile));
        let QueryGrads { dq, ddecay, dlearned } = &mut self.to_queries;
        let dq = &mut dq[far as usize];
        let dlearned = &mut dlearned[far as usize].row(in_group, 0)[..head.learned];
        // Weighted keys: the gradient of the weight needs that of the unweighted value first.
        let to_dv: &mut [f32] = if head.weighs_keys {
            tiles.dv.fill(0.0);
            &mut *tiles.dv
        } else {
            &mut *dv
        };
        let (x, dp) = (&mut *tiles.x, &mut *tiles.dp);

        for t0 in rows.clone().step_by(l.tile) {
            let t1 = (t0 + l.tile).min(rows.end);
            // A far key is never the query's own.
            let diagonal = t0 == s0 && !far;
            let q = &c.q[(pass * l.tp() + t0) * l.dp..][..(t1 - t0) * l.dp];
            let du = &c.du[(pass * s.time + t0) * l.ep..][..(t1 - t0) * l.ep];
            // Where the window of no row reaches the tile, its sinks alone are left.
            let in_window = distance.visible(t0, s0, l.tile).from < l.tile;
            let keys_of = |r1: usize| match (diagonal, in_window) {
                _ if far => distance.far_visible(t1 - 1, s0, l.tile).until,
                (true, _) => r1 - s0,
                (false, true) => l.tile,
                (false, false) => (distance.sinks - s0).min(l.tile),
            };
            for r0 in (t0..t1).step_by(ROWS) {
                let r1 = (r0 + ROWS).min(t1);
                let width = keys_of(r1).next_multiple_of(PAD);
                let (m, i0) = (r1 - r0, r0 - t0);
                let (to_x, to_dp) = (&mut x[i0 * TILE..], &mut dp[i0 * TILE..]);
                match &channels {
                    None => multiply::<S, false>(simd, [m, width, width_of], (&q[i0 * l.dp..], l.dp, 1), (kt, l.pitch), (to_x, TILE)),
                    Some(channels) => channels.scores(simd, r0..r1, &q[i0 * l.dp..], tile, width, to_x),
                }
                multiply::<S, false>(simd, [m, width, s.e], (&du[i0 * l.ep..], l.ep, 1), (vt, l.pitch), (to_dp, TILE));
                for r in r0..r1 {
                    let i = r - t0;
                    let (at, of_pass) = (n * s.time + r, pass * s.time + r);
                    let (x, dp) = (&mut x[i * TILE..][..width], &mut dp[i * TILE..][..width]);
                    let visible = if far { distance.far_visible(r, s0, l.tile) } else { distance.visible(r, s0, l.tile) };
                    if let Some(cap) = head.cap {
                        soft_cap_slopes(simd, x, cap, &mut slopes[..width]);
                        soft_cap(simd, x, cap);
                    }
                    let row = (decay.map_or(0.0, |d| d[r]) - base) as f32;
                    let decay_row = || decay.map(|_| DecayRow { row, columns: &columns });
                    let rho = head.rescale.of(c.rho[at]);
                    let dz = c.dz[of_pass];
                    if head.learned > 0 {
                        let (decay, clamp) = (decay_row(), head.clamp);
                        let grads = CoefficientRow { x, dp, visible, clamp, decay, rho, dz, key_weights };
                        head.kernel.learned_row(simd, grads, dlearned);
                    }
                    let total = head.kernel.backward_row(
                        simd,
                        BackwardRow {
                            x,
                            dp,
                            visible,
                            clamp: head.clamp,
                            decay: decay_row().map(|decay| DecayGrad { decay, dcolumns: &mut dcolumns, own: diagonal }),
                            rho,
                            dz,
                            key_weights,
                        },
                    );
                    if head.cap.is_some() {
                        dp.iter_mut().zip(&slopes).for_each(|(dx, slope)| *dx *= slope);
                    }
                    if decay.is_some() {
                        ddecay.row(in_group, r - first)[0] += total as f64;
                    }
                }
                // dQ += dX·K
                if channels.is_some() {
                    continue;
                }
                let to = (dq.rows(in_group, r0 - first, r1 - first), l.dp);
                multiply::<S, true>(simd, [m, dp_of, keys_of(r1)], (&dp[i0 * TILE..], TILE, 1), (k, l.dp), to);
            }
            // dV += Wᵀ·dU and dK += dXᵀ·Q; on the diagonal, keys from c0 on are seen by rows from c0 on.
            let keys = keys_of(t1);
            let step = if diagonal { ROWS } else { l.tile };
            for c0 in (0..keys).step_by(step) {
                let m = step.min(keys - c0);
                let skip = if diagonal { c0 } else { 0 };
                let rows = t1 - t0 - skip;
                let place = skip * TILE + c0;
                let to = (&mut to_dv[c0 * l.ep..], l.ep);
                multiply::<S, true>(simd, [m, l.ep, rows], (&x[place..], 1, TILE), (&du[skip * l.ep..], l.ep), to);
                if channels.is_none() {
                    let to = (&mut dk[c0 * l.dp..], l.dp);
                    multiply::<S, true>(simd, [m, dp_of, rows], (&dp[place..], 1, TILE), (&q[skip * l.dp..], l.dp), to);
                }
            }
            if let Some(channels) = &channels {
                let dq = dq.rows(in_group, t0 - first, t1 - first);
                channels.backward(simd, t0..t1, q, (tile, keys), dp, dq, dk, tiles.room);
            }
            if decay.is_some() {
                // What keys take away cancels most of what queries give: float32 sums over one tile only.
                let ddecay = ddecay_keys.rows(in_group, to, to + l.tile);
                ddecay.iter_mut().zip(&mut dcolumns).for_each(|(d, column)| *d += std::mem::take(column) as f64);
            }
        }

        if let Some(weights) = key_weights {
            let v = &c.v[(kv * l.tp() + s0) * l.ep..][..l.tile * l.ep];
            let dweights = dkey_weights.rows(in_group, to, to + l.tile);
            for (i, (dweight, &weight)) in dweights.iter_mut().zip(weights).enumerate() {
                let (from, v) = (&tiles.dv[i * l.ep..][..l.ep], &v[i * l.ep..][..l.ep]);
                *dweight += crate::real::dot(from, v);
                for (d, &g) in dv[i * l.ep..][..l.ep].iter_mut().zip(from) {
                    *d += weight * g;
                }
            }
        }
    }
}
