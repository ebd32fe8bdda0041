//! Backward pass over tiles: gradients of prepared q, k and v, from those of the sums over keys.

use std::ops::Range;

use rayon::prelude::*;

use crate::KeyRange;
use crate::fused::gradients::{KeyGrads, QueryGrads, TileGrads};
use crate::fused::plan::CallPlan;
use crate::fused::prepare::channel_decay::{ScoreRowGrads, ScoreRows, room_len};
use crate::fused::prepare::gates::decay_columns;
use crate::fused::prepared::Prepared;
use crate::fused::tiles::split;
use termwise_kernels::bf16_tile::{TileBf16, TileF32, TilePrecision};
use termwise_kernels::score_rows::{BackwardRow, CoefficientRow, DecayGrad, DecayRow, soft_cap, soft_cap_slopes};
use termwise_kernels::simd::{Simd, Task, dispatch};
use termwise_kernels::{PAD, ROWS, TILE};

/// Inputs of the backward pass over tiles.
#[derive(Clone, Copy)]
pub struct TileInputs<'a> {
    pub prepared: &'a Prepared<'a>,
    /// ρ [N, T]
    pub rho: &'a [f32],
    /// dU [branches, N, T, ep] and dz [branches, N, T].
    pub du: &'a [f32],
    pub dz: &'a [f32],
}

/// Gradients of prepared q, k and v, of c, key weights and learned coefficients, of all heads that see every key.
///
/// In round r, part i of the keys is paired with part i + r of the queries: no two tasks add to the same sum, and the order of rounds fixes that of
/// every sum.
pub fn run(inputs: &TileInputs, to: &mut TileGrads) {
    match inputs.prepared.call.plan.bf16 {
        true => run_in(TileBf16::selected(), inputs, to),
        false => run_in(TileF32, inputs, to),
    }
}

fn run_in<P: TilePrecision>(precision: P, inputs: &TileInputs, to: &mut TileGrads) {
    let l = inputs.prepared.call.plan;
    for round in 0..l.parts.count() {
        to.places(l, &l.parts, round).enumerate().with_max_len(1).for_each(|(task, (to_queries, to_keys))| {
            let (pair, part) = (task / l.parts.count(), task % l.parts.count());
            if part + round >= l.parts.count() {
                return;
            }
            let (b, g, first) = (pair / l.shape.kv_heads, pair % l.shape.kv_heads, round == 0);
            let (keys, queries) = (l.parts.tiles(part), l.parts.tiles(part + round));
            inputs.prepared.call.tasks.with(|memory| {
                let room = &mut memory[..tiles_len(l)];
                let first_of_all = first;
                dispatch(BackwardTiles {
                    precision,
                    inputs,
                    b,
                    g,
                    keys,
                    queries,
                    chunked: false,
                    first,
                    first_of_all,
                    to_queries,
                    to_keys,
                    room,
                });
            });
        });
    }
}

/// Some key tiles of one kv head, for some query tiles that see them and all heads that run in one mode.
pub struct BackwardTiles<'a, 'b, P> {
    pub precision: P,
    pub inputs: &'a TileInputs<'a>,
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
    /// Scratch for its tiles, [`tiles_len`] values.
    pub room: &'a mut [f32],
}

/// Tiles of one task: scores and their gradients [TILE, TILE], and the gradient of the values of one key tile [TILE, ep].
struct ScoreTiles<'a> {
    x: &'a mut [f32],
    dp: &'a mut [f32],
    dv: &'a mut [f32],
    /// For products with a decay per channel; empty without one.
    room: &'a mut [f32],
    /// For converted operands; empty in float32.
    converted: &'a mut [f32],
}

/// One tile of keys, and the queries of one head that see it as near or as far keys.
struct KeyTileRows {
    h: usize,
    range: KeyRange,
    tile: usize,
    rows: Range<usize>,
}

/// Number of values that the tiles of one task take.
pub fn tiles_len(l: &CallPlan) -> usize {
    let converted: usize = if l.bf16 { converted_lens(l).iter().sum() } else { 0 };
    2 * TILE * TILE + TILE * l.ep + room_len(l) + converted
}

/// Lengths of the converted operands of a pair of tiles: kᵀ, vᵀ and k; q and dU as left and as right operands; dX as a left operand; W and dX transposed.
fn converted_lens(l: &CallPlan) -> [usize; 10] {
    [l.width, l.shape.e, l.dp, l.dp, l.ep, l.dp, l.ep, ROWS, TILE, TILE].map(|width| TILE * width)
}

impl<P: TilePrecision> Task for BackwardTiles<'_, '_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let call = &self.inputs.prepared.call;
        let (l, s) = (call.plan, call.plan.shape);
        let len = call.length(self.b);
        let (x, rest) = std::mem::take(&mut self.room).split_at_mut(TILE * TILE);
        let (dp, rest) = rest.split_at_mut(TILE * TILE);
        let (dv, rest) = rest.split_at_mut(TILE * l.ep);
        let (room, converted) = rest.split_at_mut(room_len(l));
        let mut tiles = ScoreTiles { x, dp, dv, room, converted };
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
        for transform in (0..l.key_transforms.len()).filter(|_| self.first_of_all) {
            self.to_keys.dk.rows(transform, 0, count).fill(0.0);
            self.to_keys.dv.rows(transform, 0, count).fill(0.0);
        }
        for tile in self.keys.clone() {
            for h in heads.clone() {
                // A loop over both branches, so that the long function is compiled once.
                for range in KeyRange::ALL {
                    let rows = self.rows_of(h, range, tile, len);
                    if !rows.is_empty() {
                        self.key_tile(simd, KeyTileRows { h, range, tile, rows }, &mut tiles);
                    }
                }
            }
        }
    }
}

impl<P: TilePrecision> BackwardTiles<'_, '_, P> {
    /// The queries of one head that see a tile of keys as near or as far keys.
    fn rows_of(&self, h: usize, range: KeyRange, tile: usize, len: usize) -> Range<usize> {
        let l = self.inputs.prepared.call.plan;
        let distance = l.heads[h].variant.distance();
        let (first, until) = match (&l.far[h], range) {
            (_, KeyRange::Near) if self.chunked => (tile, l.chunk_end(tile)),
            (_, KeyRange::Near) => (tile, distance.seen_until(tile * l.tile, l.tile)),
            (None, KeyRange::Far) => return 0..0,
            // From the first tile of queries whose last query can see the first key as far, until all keys are in the state.
            (Some(far), KeyRange::Far) => {
                let lag = (distance.window - 1).div_ceil(l.tile);
                let until = if far.chunked { l.met_in_state_from(tile, lag) } else { usize::MAX };
                ((tile * l.tile).saturating_add(distance.window) / l.tile, until)
            }
        };
        first.max(self.queries.start).saturating_mul(l.tile)..len.min(until).min(self.queries.end * l.tile)
    }

    /// One tile of keys against these queries of one head, as near or as far keys.
    #[inline(always)]
    fn key_tile<S: Simd>(&mut self, simd: S, of: KeyTileRows, tiles: &mut ScoreTiles) {
        let KeyTileRows { h, range, tile, rows } = of;
        let (inputs, c, precision) = (self.inputs, self.inputs.prepared, self.precision);
        let (l, s) = (c.call.plan, c.call.plan.shape);
        let (head, far) = (l.branch(h, range), range.is_far());
        let (n, in_group) = (self.b * s.heads + h, h % s.group());
        // Index among the queries of both branches.
        let branch = range as usize * l.head_count() + n;
        let (kv, width_of) = (l.kv_index(head.key_transform, self.b, self.g), l.key_transforms[head.key_transform].width);
        let dp_of = width_of.next_multiple_of(PAD);
        let s0 = tile * l.tile;
        let distance = head.variant.distance();
        let kt = &c.kt[(kv * l.tiles + tile) * l.width * l.pitch..][..width_of * l.pitch];
        let vt = &c.vt[(kv * l.tiles + tile) * s.e * l.pitch..][..s.e * l.pitch];
        let k = &c.k[(kv * l.tp() + s0) * l.dp..][..l.tile * l.dp];
        let lens = converted_lens(l).map(|len| if P::CONVERTS { len } else { 0 });
        let [to_kt, to_vt, to_k, to_q, to_du, to_right_q, to_right_du, to_dx, to_wt, to_dxt] = split(&mut *tiles.converted, lens);
        let kt = precision.right(kt, l.pitch, [width_of, l.pitch], to_kt);
        let vt = precision.right(vt, l.pitch, [s.e, l.pitch], to_vt);
        // Without padding, which may be NaN: a pair with the last key would read it.
        let k = precision.right(k, l.dp, [l.tile.min(c.call.length(self.b) - s0), dp_of], to_k);
        let key_weights = c.gates.tile_weights(l, h, n, tile);
        let channels = c.channels.head(l, self.b, h);
        let decay = head.variant.decays_by_head().then(|| &c.gates.decay[n * l.tp()..][..l.tp()]);
        let mut columns = [0.0; TILE];
        let mut dcolumns = [0.0; TILE];
        let mut slopes = [0.0; TILE];
        let base = decay.map_or(0.0, |decay| decay_columns(&decay[s0..s0 + l.pitch], &mut columns));
        // The first query, and the offset of this tile, in the blocks of the task.
        let (first, to) = (self.queries.start * l.tile, (tile - self.keys.start) * l.tile);
        let KeyGrads { dk, dv, dkey_weights, ddecay: ddecay_keys } = &mut self.to_keys;
        let (dk, dv) = (dk.rows(head.key_transform, to, to + l.tile), dv.rows(head.key_transform, to, to + l.tile));
        let QueryGrads { dq, ddecay, dlearned } = &mut self.to_queries;
        let dq = &mut dq[range as usize];
        let dlearned = &mut dlearned[range as usize].row(in_group, 0)[..head.learned];
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
            let q = &c.q[(branch * l.tp() + t0) * l.dp..][..(t1 - t0) * l.dp];
            let du = &inputs.du[(branch * s.time + t0) * l.ep..][..(t1 - t0) * l.ep];
            let left_q = precision.left(q, l.dp, [t1 - t0, width_of], to_q);
            let left_du = precision.left(du, l.ep, [t1 - t0, s.e], to_du);
            let right_q = precision.right(q, l.dp, [t1 - t0, dp_of], to_right_q);
            let right_du = precision.right(du, l.ep, [t1 - t0, l.ep], to_right_du);
            // If the window of no row reaches the tile, only its sinks are left.
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
                    None => {
                        let left_q = (&left_q[i0 * l.dp..], l.dp, 1);
                        precision.multiply::<S, false>(simd, [m, width, width_of], left_q, (kt, l.pitch), (to_x, TILE));
                    }
                    Some(channels) => channels.scores(simd, ScoreRows { rows: r0..r1, q: &q[i0 * l.dp..], width, x: to_x }, tile),
                }
                precision.multiply::<S, false>(simd, [m, width, s.e], (&left_du[i0 * l.ep..], l.ep, 1), (vt, l.pitch), (to_dp, TILE));
                for r in r0..r1 {
                    let i = r - t0;
                    let (at, of_branch) = (n * s.time + r, branch * s.time + r);
                    let (x, dp) = (&mut x[i * TILE..][..width], &mut dp[i * TILE..][..width]);
                    let visible = if far { distance.far_visible(r, s0, l.tile) } else { distance.visible(r, s0, l.tile) };
                    if let Some(cap) = head.cap {
                        soft_cap_slopes(simd, x, cap, &mut slopes[..width]);
                        soft_cap(simd, x, cap);
                    }
                    let row = (decay.map_or(0.0, |d| d[r]) - base) as f32;
                    let decay_row = || decay.map(|_| DecayRow { row, columns: &columns });
                    let rho = head.rescale.of(inputs.rho[at]);
                    let dz = inputs.dz[of_branch];
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
                let dx = precision.left(&dp[i0 * TILE..], TILE, [m, keys_of(r1)], to_dx);
                precision.multiply::<S, true>(simd, [m, dp_of, keys_of(r1)], (dx, TILE, 1), (k, l.dp), to);
            }
            // dV += Wᵀ·dU and dK += dXᵀ·Q; on the diagonal, keys from c0 on are seen by rows from c0 on.
            let keys = keys_of(t1);
            let wt = precision.right(x, TILE, [t1 - t0, keys.next_multiple_of(PAD)], to_wt);
            let dxt = precision.right(dp, TILE, [t1 - t0, keys.next_multiple_of(PAD)], to_dxt);
            let step = if diagonal { ROWS } else { l.tile };
            for c0 in (0..keys).step_by(step) {
                let m = step.min(keys - c0);
                let skip = if diagonal { c0 } else { 0 };
                let rows = t1 - t0 - skip;
                // A multiple of ROWS, which is even: no pair begins before it.
                let skip = precision.depth(skip);
                let (wt, dxt) = (&wt[skip * TILE + c0..], &dxt[skip * TILE + c0..]);
                let to = (&mut to_dv[c0 * l.ep..], l.ep);
                precision.multiply::<S, true>(simd, [m, l.ep, rows], (wt, 1, TILE), (&right_du[skip * l.ep..], l.ep), to);
                if channels.is_none() {
                    let to = (&mut dk[c0 * l.dp..], l.dp);
                    precision.multiply::<S, true>(simd, [m, dp_of, rows], (dxt, 1, TILE), (&right_q[skip * l.dp..], l.dp), to);
                }
            }
            if let Some(channels) = &channels {
                let dq = dq.rows(in_group, t0 - first, t1 - first);
                let of = ScoreRowGrads { rows: t0..t1, q, dx: dp, dq, dk, room: tiles.room };
                channels.backward(simd, of, tile, keys);
            }
            if decay.is_some() {
                // Contributions of keys cancel most of those of queries: float32 sums are limited to one tile.
                let ddecay = ddecay_keys.rows(in_group, to, to + l.tile);
                ddecay.iter_mut().zip(&mut dcolumns).for_each(|(d, column)| *d += std::mem::take(column) as f64);
            }
        }

        if let Some(weights) = key_weights {
            let v = &c.v[(kv * l.tp() + s0) * l.ep..][..l.tile * l.ep];
            let dweights = dkey_weights.rows(in_group, to, to + l.tile);
            for (i, (dweight, &weight)) in dweights.iter_mut().zip(weights).enumerate() {
                let (from, v) = (&tiles.dv[i * l.ep..][..l.ep], &v[i * l.ep..][..l.ep]);
                *dweight += termwise_kernels::real::dot(from, v);
                for (d, &g) in dv[i * l.ep..][..l.ep].iter_mut().zip(from) {
                    *d += weight * g;
                }
            }
        }
    }
}
