//! The backward pass over tiles: from the gradients of the sums over keys to those of prepared q, k and v.

use std::ops::Range;

use crate::fused::gates::{Gates, decay_columns};
use crate::fused::plan::Layout;
use crate::kernels::disjoint::Shared;
use crate::kernels::gemm::{Rows, Strided, product};
use crate::kernels::score_rows::{BackwardRow, CoefficientRow, DecayGrad, DecayRow, soft_cap, soft_cap_slopes};
use crate::kernels::simd::{Simd, Task};
use crate::kernels::{PAD, ROWS, TILE};

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
    /// [copies, N, T, dp]
    pub dq: Shared<f32>,
    /// [K, Tp, dp] and [K, Tp, ep]
    pub dk: Shared<f32>,
    pub dv: Shared<f32>,
    /// [N, Tp]
    pub dkey_weights: Shared<f32>,
    /// [copies, N, Tp]
    pub ddecay: Shared<f64>,
    /// [copies, N, orders]
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
    /// Which copy of the gradients of queries, decays and coefficients is its own.
    pub copy: usize,
    /// Whether it is the first to write gradients of these keys.
    pub clear: bool,
    /// Room for its tiles, [`tiles_len`] values.
    pub room: &'a mut [f32],
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
        for h in self.heads() {
            let n = self.b * s.heads + h;
            let (from, to) = if self.chunked { (start, (start + count).min(s.time)) } else { (0, s.time) };
            // SAFETY: (copy, b, h) belongs to this task alone, or in chunk mode these rows of it.
            unsafe { c.dq.slice(((self.copy * l.head_count() + n) * s.time + from) * l.dp, (to - from) * l.dp) }.fill(0.0);
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
        let distance = head.variant.distance();
        let end = if self.chunked { len.min(l.chunk_end(tile)) } else { len.min(distance.last_query(s0, l.tile).saturating_add(1)) };
        let kt = &c.kt[(kv * l.tiles + tile) * s.d * l.pitch..][..s.d * l.pitch];
        let vt = &c.vt[(kv * l.tiles + tile) * s.e * l.pitch..][..s.e * l.pitch];
        let k = &c.k[(kv * l.tp() + s0) * l.dp..][..l.tile * l.dp];
        let key_weights = c.gates.tile_weights(l, h, n, tile);
        let decay = head.variant.decay.is_some().then(|| &c.gates.decay[n * l.tp()..][..l.tp()]);
        let mut columns = [0.0; TILE];
        let mut dcolumns = [0.0; TILE];
        let mut slopes = [0.0; TILE];
        let base = decay.map_or(0.0, |decay| decay_columns(&decay[s0..s0 + l.pitch], &mut columns));
        // SAFETY: all places below belong to this task: (copy, b, h) from this tile on, in chunk mode to the end of the chunk, and
        // this key tile of this kv head. In chunk mode the copies of coefficients are as many as the splits.
        let (dq, dk, dv, ddecay, dlearned) = unsafe {
            let at = self.copy * l.head_count() + n;
            let learned = if self.chunked { l.split_of(tile) } else { self.copy } * l.head_count() + n;
            (
                c.dq.slice((at * s.time + s0) * l.dp, (end - s0) * l.dp),
                c.dk.slice((kv * l.tp() + s0) * l.dp, l.tile * l.dp),
                c.dv.slice((kv * l.tp() + s0) * l.ep, l.tile * l.ep),
                if decay.is_some() { c.ddecay.slice(at * l.tp() + s0, end - s0) } else { &mut [] },
                c.dlearned.slice(learned * l.learned(), head.learned),
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
            // Where the window of no row reaches the tile, its sinks alone are left.
            let in_window = distance.visible(t0, s0, l.tile).from < l.tile;
            let keys_of = |r1: usize| match (diagonal, in_window) {
                (true, _) => r1 - s0,
                (false, true) => l.tile,
                (false, false) => (distance.sinks - s0).min(l.tile),
            };
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
                    let visible = distance.visible(r, s0, l.tile);
                    if let Some(cap) = head.cap {
                        soft_cap(simd, x, cap);
                        soft_cap_slopes(simd, x, cap, &mut slopes[..width]);
                    }
                    let row = (decay.map_or(0.0, |d| d[r]) - base) as f32;
                    let decay_row = || decay.map(|_| DecayRow { row, columns: &columns });
                    let frame = head.frame.of(c.rho[at]);
                    if head.learned > 0 {
                        let (decay, clamp) = (decay_row(), head.clamp);
                        let grads = CoefficientRow { x, dp, visible, clamp, decay, frame, dz: c.dz[at], key_weights };
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
                            frame,
                            dz: c.dz[at],
                            key_weights,
                        },
                    );
                    if head.cap.is_some() {
                        dp.iter_mut().zip(&slopes).for_each(|(dx, slope)| *dx *= slope);
                    }
                    if let Some(d) = ddecay.get_mut(r - s0) {
                        *d += total as f64;
                    }
                }
                // dQ += dX·K
                // SAFETY: dp has rows r0..r1 of TILE values, k tile rows of dp, dq rows r0..r1 of dp.
                unsafe {
                    let a = Strided { at: dp.as_ptr().add(i0 * TILE), row: TILE, column: 1 };
                    let to = Rows { at: dq[(r0 - s0) * l.dp..].as_mut_ptr(), stride: l.dp };
                    product::<S, true>(simd, m, l.dp, keys_of(r1), a, Rows { at: k.as_ptr(), stride: l.dp }, to);
                }
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

        for (d, column) in ddecay.iter_mut().zip(&dcolumns[..l.tile]) {
            *d += *column as f64;
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
