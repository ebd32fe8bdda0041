//! The backward pass: from dy to the gradients of the sums over keys, and through the tiles to those of q, k and v.

use std::ops::Range;

use crate::epilogue;
use crate::fused::plan::Layout;
use crate::fused::tile_forward::{Gates, decay_columns};
use crate::fused::with_room;
use crate::kernels::disjoint::Shared;
use crate::kernels::gemm::{Rows, Strided, product};
use crate::kernels::score_rows::{BackwardRow, CoefficientRow, DecayGrad, DecayRow};
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::kernels::turns::{Turns, in_order};
use crate::kernels::{PAD, ROWS, TILE};
use crate::parts::norm::NormGrads;

/// What the tasks of the epilogue's backward pass read and write.
pub struct EpilogueContext<'a> {
    pub layout: &'a Layout,
    pub gates: Gates<'a>,
    pub lengths: Option<&'a [usize]>,
    pub u: &'a [f32],
    pub z: &'a [f32],
    pub rho: &'a [f32],
    /// [B, T, H, e]
    pub dy: &'a [f32],
    /// [N, T, ep] and [N, T]
    pub du: Shared<f32>,
    pub dz: Shared<f32>,
    /// [N, T] each
    pub dout: Shared<f32>,
    pub dpost: Shared<f32>,
    /// [N, 2, e]
    pub dnorm: Shared<f32>,
}

/// The epilogue of one head of one batch row, backward.
pub struct EpilogueHead<'a> {
    pub context: &'a EpilogueContext<'a>,
    pub b: usize,
    pub h: usize,
}

impl Task for EpilogueHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let c = self.context;
        let l = c.layout;
        let s = l.shape;
        let variant = &l.heads[self.h].variant;
        let n = self.b * s.heads + self.h;
        let len = c.lengths.map_or(s.time, |lengths| lengths[self.b]);
        let mut scratch = [0.0f32; 512];
        // SAFETY: each task is the only one with this (b, h).
        let (du, dz, dnorm) =
            unsafe { (c.du.slice(n * s.time * l.ep, s.time * l.ep), c.dz.slice(n * s.time, s.time), c.dnorm.slice(n * 2 * s.e, 2 * s.e)) };
        // SAFETY: as above; the buffers exist where the gates do.
        let (dout, dpost) = unsafe {
            let of = |there: bool, shared: &Shared<f32>| {
                if there { shared.slice(n * s.time, s.time) as *mut [f32] } else { &mut [] as *mut [f32] }
            };
            (&mut *of(variant.out_gate.is_some(), &c.dout), &mut *of(variant.post_gate.is_some(), &c.dpost))
        };
        dnorm.fill(0.0);
        let (dweight, dbias) = dnorm.split_at_mut(s.e);
        for t in 0..s.time {
            let at = n * s.time + t;
            let du = &mut du[t * l.ep..][..l.ep];
            let (row, padding) = du.split_at_mut(s.e);
            padding.fill(0.0);
            let mut grads = epilogue::RowGrads { z: 0.0, out: 0.0, post: 0.0 };
            if t < len {
                row.copy_from_slice(&c.dy[((self.b * s.time + t) * s.heads + self.h) * s.e..][..s.e]);
                let input = c.gates.row(l, self.h, n, t, c.z[at], c.rho[at]);
                let norm = NormGrads {
                    weight: if variant.norm.has_weight() { &mut *dweight } else { &mut [] },
                    bias: if variant.norm.has_bias() { &mut *dbias } else { &mut [] },
                };
                grads = epilogue::backward(variant, input, &c.u[at * l.ep..][..s.e], row, &mut scratch[..2 * s.e], norm);
            } else {
                row.fill(0.0);
            }
            dz[t] = grads.z;
            if let Some(d) = dout.get_mut(t) {
                *d = grads.out;
            }
            if let Some(d) = dpost.get_mut(t) {
                *d = grads.post;
            }
        }
    }
}

/// What the tasks of the backward pass over tiles read and write.
pub struct Context<'a> {
    pub layout: &'a Layout,
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub kt: &'a [f32],
    pub vt: &'a [f32],
    pub v: &'a [f32],
    pub gates: Gates<'a>,
    pub lengths: Option<&'a [usize]>,
    pub rho: &'a [f32],
    pub du: &'a [f32],
    pub dz: &'a [f32],
    /// [N, T, dp]
    pub dq: Shared<f32>,
    /// [K, Tp, dp] and [K, Tp, ep]
    pub dk: Shared<f32>,
    pub dv: Shared<f32>,
    /// [N, Tp]
    pub dkey_weights: Shared<f32>,
    /// [N, Tp]
    pub ddecay: Shared<f64>,
    /// [tiles or spans, N, orders]
    pub dlearned: Shared<f64>,
}

/// Some key tiles of one kv head, for all queries that see them and all heads that run in one mode.
pub struct BackwardSegment<'a> {
    pub context: &'a Context<'a>,
    pub b: usize,
    pub g: usize,
    pub keys: Range<usize>,
    /// Heads whose tiles stay within their chunk, or those that see all keys.
    pub chunked: bool,
    /// Whose turn it is to add to a tile of queries [N, tiles]; within chunks every tile has one task.
    pub turns: Option<&'a Turns>,
    /// Whether it is the first to write gradients of these keys.
    pub clear: bool,
    /// Room for its tiles, [`tiles_len`] values.
    pub room: &'a mut [f32],
}

/// All key tiles of heads that see all keys. Tasks of a kv head add to the gradients of its queries in turns, which fixes the order of sums, not that
/// of tasks: as many kv heads alternate as there are threads, so that a task seldom waits and a thread's queries stay in its cache. Early tiles come
/// first, which have more queries; hence the last tasks are the shortest.
pub fn backward(context: &Context, turns: &mut Turns) {
    let l = context.layout;
    let (pairs, alternating) = (l.shape.batch * l.shape.kv_heads, rayon::current_num_threads());
    turns.reset(l.head_count() * l.tiles);
    let turns = &*turns;
    in_order(pairs * l.tiles, |task| {
        let first = task / (alternating * l.tiles) * alternating;
        let (task, together) = (task - first * l.tiles, alternating.min(pairs - first));
        let (tile, pair) = (task / together, first + task % together);
        let (b, g) = (pair / l.shape.kv_heads, pair % l.shape.kv_heads);
        with_room(tiles_len(l), |room| {
            let keys = tile..tile + 1;
            turns.watch(|| dispatch(BackwardSegment { context, b, g, keys, chunked: false, turns: Some(turns), clear: true, room }));
        });
    });
}

/// Tiles of one task: scores and their gradients [TILE, TILE], and the gradient of the values of one key tile [TILE, ep].
struct Tiles<'a> {
    x: &'a mut [f32],
    dp: &'a mut [f32],
    dv: &'a mut [f32],
}

/// Values that the tiles of one task take.
pub fn tiles_len(l: &Layout) -> usize {
    2 * TILE * TILE + TILE * l.ep
}

impl Task for BackwardSegment<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let c = self.context;
        let l = c.layout;
        let s = l.shape;
        let len = c.lengths.map_or(s.time, |lengths| lengths[self.b]);
        let (x, rest) = std::mem::take(&mut self.room).split_at_mut(TILE * TILE);
        let (dp, dv) = rest.split_at_mut(TILE * TILE);
        let mut tiles = Tiles { x, dp, dv };
        let (start, count) = (self.keys.start * l.tile, self.keys.len() * l.tile);
        for h in self.heads().filter(|_| self.turns.is_none()) {
            let n = self.b * s.heads + h;
            let end = (start + count).min(s.time);
            // SAFETY: these rows of (b, h) belong to this task alone.
            unsafe { c.dq.slice((n * s.time + start) * l.dp, (end - start) * l.dp) }.fill(0.0);
        }
        for class in (0..l.classes.len()).filter(|_| self.clear) {
            let kv = l.kv_index(class, self.b, self.g);
            // SAFETY: these key tiles of this kv head belong to this task alone.
            unsafe {
                c.dk.slice((kv * l.tp() + start) * l.dp, count * l.dp).fill(0.0);
                c.dv.slice((kv * l.tp() + start) * l.ep, count * l.ep).fill(0.0);
            }
        }
        for tile in self.keys.clone() {
            for h in self.heads() {
                if tile * l.tile < len {
                    self.key_tile(simd, h, tile, len, &mut tiles);
                }
            }
        }
    }
}

impl BackwardSegment<'_> {
    /// The heads of its group in its mode.
    fn heads(&self) -> impl Iterator<Item = usize> + use<'_> {
        let l = self.context.layout;
        (self.g * l.shape.group()..(self.g + 1) * l.shape.group()).filter(|&h| l.heads[h].chunked == self.chunked)
    }

    /// One tile of keys against all queries of one head that see it directly.
    #[inline(always)]
    fn key_tile<S: Simd>(&self, simd: S, h: usize, tile: usize, len: usize, tiles: &mut Tiles) {
        let c = self.context;
        let l = c.layout;
        let s = l.shape;
        let head = &l.heads[h];
        let n = self.b * s.heads + h;
        let kv = l.kv_index(head.class, self.b, self.g);
        let s0 = tile * l.tile;
        let end = if self.chunked { len.min(l.chunk_end(tile)) } else { len };
        let kt = &c.kt[(kv * l.tiles + tile) * s.d * l.pitch..][..s.d * l.pitch];
        let vt = &c.vt[(kv * l.tiles + tile) * s.e * l.pitch..][..s.e * l.pitch];
        let k = &c.k[(kv * l.tp() + s0) * l.dp..][..l.tile * l.dp];
        let key_weights = c.gates.tile_weights(l, h, n, tile);
        let decay = head.variant.decay.is_some().then(|| &c.gates.decay[n * l.tp()..][..l.tp()]);
        let mut columns = [0.0; TILE];
        let mut dcolumns = [0.0; TILE];
        let base = decay.map_or(0.0, |decay| decay_columns(&decay[s0..s0 + l.pitch], &mut columns));
        // SAFETY: this key tile of this kv head belongs to this task, and so does its copy of the coefficients, of which there is one for
        // each tile, or in chunk mode for each span.
        let (dk, dv, dlearned) = unsafe {
            let copy = if self.chunked { l.span_of(tile) } else { tile };
            (
                c.dk.slice((kv * l.tp() + s0) * l.dp, l.tile * l.dp),
                c.dv.slice((kv * l.tp() + s0) * l.ep, l.tile * l.ep),
                c.dlearned.slice((copy * l.head_count() + n) * l.learned(), head.learned),
            )
        };
        // Weighted keys: the gradient of the weight needs that of the unweighted value first.
        let to_dv: &mut [f32] = if head.weighs_keys {
            tiles.dv.fill(0.0);
            &mut *tiles.dv
        } else {
            &mut *dv
        };
        let (x, dp) = (&mut *tiles.x, &mut *tiles.dp);

        for t0 in (s0..end).step_by(l.tile) {
            let t1 = (t0 + l.tile).min(end);
            let diagonal = t0 == s0;
            let q = &c.q[(n * l.tp() + t0) * l.dp..][..(t1 - t0) * l.dp];
            let du = &c.du[(n * s.time + t0) * l.ep..][..(t1 - t0) * l.ep];
            let keys_of = |r1: usize| if diagonal { r1 - s0 } else { l.tile };
            let place = n * l.tiles + t0 / l.tile;
            let mut totals = [0.0; TILE];
            for r0 in (t0..t1).step_by(ROWS) {
                let r1 = (r0 + ROWS).min(t1);
                let width = keys_of(r1).next_multiple_of(PAD);
                let (m, i0) = (r1 - r0, r0 - t0);
                // SAFETY: rows r0..r1 of q and du exist with dp ≥ d and ep ≥ e values; kt and vt have d and e rows of pitch ≥ width.
                unsafe {
                    let (qa, ua) = (q.as_ptr().add(i0 * l.dp), du.as_ptr().add(i0 * l.ep));
                    let (xc, pc) = (x.as_mut_ptr().add(i0 * TILE), dp.as_mut_ptr().add(i0 * TILE));
                    let (a, b, to) = (
                        Strided { at: qa, row: l.dp, column: 1 },
                        Rows { at: kt.as_ptr(), stride: l.pitch },
                        Rows { at: xc, stride: TILE },
                    );
                    product::<S, false>(simd, m, width, s.d, a, b, to);
                    let (a, b, to) = (
                        Strided { at: ua, row: l.ep, column: 1 },
                        Rows { at: vt.as_ptr(), stride: l.pitch },
                        Rows { at: pc, stride: TILE },
                    );
                    product::<S, false>(simd, m, width, s.e, a, b, to);
                }
                for r in r0..r1 {
                    let i = r - t0;
                    let at = n * s.time + r;
                    let (x, dp) = (&mut x[i * TILE..][..width], &mut dp[i * TILE..][..width]);
                    let visible = (r + 1 - s0).min(l.tile);
                    let row = (decay.map_or(0.0, |d| d[r]) - base) as f32;
                    let decay_row = || decay.map(|_| DecayRow { row, columns: &columns });
                    let frame = head.frame.of(c.rho[at]);
                    if head.learned > 0 {
                        let (decay, clamp) = (decay_row(), head.clamp);
                        let grads = CoefficientRow { x, dp, visible, clamp, decay, frame, dz: c.dz[at], key_weights };
                        head.kernel.learned_row(simd, grads, dlearned);
                    }
                    totals[i] = head.kernel.backward_row(
                        simd,
                        BackwardRow {
                            x,
                            dp,
                            visible,
                            clamp: head.clamp,
                            decay: decay_row().map(|decay| DecayGrad { decay, dcolumns: &mut dcolumns, own: diagonal }),
                            frame,
                            dz: c.dz[at],
                            key_weights,
                        },
                    );
                }
                // dQ += dX·K, key tile by key tile.
                if let Some(turns) = self.turns.filter(|_| r0 == t0) {
                    turns.wait(place, tile);
                }
                // SAFETY: these rows of (b, h) are this task's until its turn is over, or alone its own; dp has rows r0..r1 of TILE values,
                // k tile rows of dp, dq rows r0..r1 of dp.
                unsafe {
                    let dq = c.dq.slice((n * s.time + r0) * l.dp, m * l.dp);
                    let a = Strided { at: dp.as_ptr().add(i0 * TILE), row: TILE, column: 1 };
                    let (b, to) = (Rows { at: k.as_ptr(), stride: l.dp }, Rows { at: dq.as_mut_ptr(), stride: l.dp });
                    match self.turns.is_some() && tile == 0 {
                        true => product::<S, false>(simd, m, l.dp, keys_of(r1), a, b, to),
                        false => product::<S, true>(simd, m, l.dp, keys_of(r1), a, b, to),
                    }
                }
            }
            if decay.is_some() {
                // SAFETY: as for dq.
                let ddecay = unsafe { c.ddecay.slice(n * l.tp() + t0, t1 - t0) };
                ddecay.iter_mut().zip(totals).for_each(|(d, total)| *d += total as f64);
            }
            if let Some(turns) = self.turns {
                turns.pass(place);
            }
            // dV += Wᵀ·dU and dK += dXᵀ·Q; on the diagonal, keys from c0 on are seen by rows from c0 on.
            let keys = keys_of(t1);
            let step = if diagonal { ROWS } else { l.tile };
            for c0 in (0..keys).step_by(step) {
                let m = step.min(keys - c0);
                let skip = if diagonal { c0 } else { 0 };
                let rows = t1 - t0 - skip;
                // SAFETY: x and dp hold t1 − t0 rows of TILE values, written up to the width of each row's block, which covers
                // columns c0..c0 + m from row `skip` on; q, du, dk and dv have the rows addressed.
                unsafe {
                    let place = skip * TILE + c0;
                    let a = Strided { at: x.as_ptr().add(place), row: 1, column: TILE };
                    let b = Rows { at: du.as_ptr().add(skip * l.ep), stride: l.ep };
                    product::<S, true>(simd, m, l.ep, rows, a, b, Rows { at: to_dv.as_mut_ptr().add(c0 * l.ep), stride: l.ep });
                    let a = Strided { at: dp.as_ptr().add(place), row: 1, column: TILE };
                    let b = Rows { at: q.as_ptr().add(skip * l.dp), stride: l.dp };
                    product::<S, true>(simd, m, l.dp, rows, a, b, Rows { at: dk.as_mut_ptr().add(c0 * l.dp), stride: l.dp });
                }
            }
        }

        if decay.is_some() {
            // SAFETY: no later turn adds to the rows of this tile, and all earlier ones are over.
            let ddecay = unsafe { c.ddecay.slice(n * l.tp() + s0, l.tile.min(end - s0)) };
            ddecay.iter_mut().zip(dcolumns).for_each(|(d, column)| *d += column as f64);
        }
        if let Some(weights) = key_weights {
            let v = &c.v[(kv * l.tp() + s0) * l.ep..][..l.tile * l.ep];
            // SAFETY: (b, h) and this key tile belong to this task.
            let dweights = unsafe { c.dkey_weights.slice(n * l.tp() + s0, l.tile) };
            for (i, (dweight, &weight)) in dweights.iter_mut().zip(weights).enumerate() {
                let (from, v) = (&tiles.dv[i * l.ep..][..l.ep], &v[i * l.ep..][..l.ep]);
                *dweight = crate::real::dot(from, v);
                for (d, &g) in dv[i * l.ep..][..l.ep].iter_mut().zip(from) {
                    *d += weight * g;
                }
            }
        }
    }
}
