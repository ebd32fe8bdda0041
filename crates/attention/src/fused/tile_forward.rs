//! The forward pass over one tile of queries.

use crate::epilogue::{self, Row};
use crate::fused::plan::Layout;
use crate::fused::prepare::Sources;
use crate::kernels::disjoint::Shared;
use crate::kernels::gemm::{Rows, Strided, product};
use crate::kernels::score_rows::{DecayRow, ForwardRow};
use crate::kernels::simd::{Simd, Task};
use crate::kernels::{PAD, ROWS, TILE};
use crate::state::cache::{BLOCK, Cache};

/// What the tasks of one forward pass read and write.
pub struct Context<'a> {
    pub layout: &'a Layout,
    pub sources: Sources<'a>,
    pub kt: &'a [f32],
    pub v: &'a [f32],
    pub gates: Gates<'a>,
    pub lengths: Option<&'a [usize]>,
    /// U [N, T, ep], z and ρ [N, T]: kept for the backward pass.
    pub u: Shared<f32>,
    pub z: Shared<f32>,
    pub rho: Shared<f32>,
    /// [B, T, H, e]
    pub y: Shared<f32>,
}

/// Factors from gates, and parameters of the norm; empty slices where a variant has none.
#[derive(Clone, Copy)]
pub struct Gates<'a> {
    pub out: &'a [f32],
    pub post: &'a [f32],
    pub key_weights: &'a [f32],
    pub decay: &'a [f64],
    /// c of the last position before the first, [N]; empty where there is none.
    pub before: &'a [f64],
    /// Positions before the first of each batch row; empty where there are none.
    pub offsets: &'a [usize],
    pub norm_weight: &'a [f32],
    pub norm_bias: &'a [f32],
}

impl<'a> Gates<'a> {
    /// The epilogue's view of row t of head n = (b, h).
    #[inline(always)]
    pub fn row(&self, layout: &Layout, h: usize, n: usize, t: usize, z: f32, rho: f32) -> Row<'a, f32> {
        let variant = &layout.heads[h].variant;
        let at = n * layout.shape.time + t;
        Row {
            z,
            count: (self.offsets.get(n / layout.shape.heads).copied().unwrap_or(0) + t + 1) as f32,
            rho,
            out: if variant.out_gate.is_some() { self.out[at] } else { 1.0 },
            post: if variant.post_gate.is_some() { self.post[at] } else { 1.0 },
            weight: if variant.norm.has_weight() { self.norm_weight } else { &[] },
            bias: if variant.norm.has_bias() { self.norm_bias } else { &[] },
        }
    }

    /// Key weights of one tile of head n, in whole vectors.
    #[inline(always)]
    pub fn tile_weights(&self, layout: &Layout, h: usize, n: usize, tile: usize) -> Option<&'a [f32]> {
        layout.heads[h].weighs_keys.then(|| &self.key_weights[n * layout.tp() + tile * layout.tile..][..layout.pitch])
    }
}

/// c of the keys of one tile, less the first of them, in float32; and that first.
#[inline(always)]
pub fn decay_columns(decay: &[f64], columns: &mut [f32; TILE]) -> f64 {
    const { assert!(BLOCK == TILE, "blocks of a cache are read like tiles") };
    let base = decay[0];
    for (column, c) in columns.iter_mut().zip(decay) {
        *column = (c - base) as f32;
    }
    base
}

/// One tile of queries of one head: everything from scores to y.
pub struct ForwardTile<'a> {
    pub context: &'a Context<'a>,
    pub b: usize,
    pub h: usize,
    pub tile: usize,
    /// The first tile of keys that it looks at.
    pub from: usize,
    /// Whether its rows of u and z hold what keys before `from` gave already.
    pub begun: bool,
    /// Its queries [tile, dp].
    pub q: Queries<'a>,
    /// Keys and values kept from earlier calls, all of which it sees.
    pub past: Option<Past<'a>>,
}

/// The cache of a head, and where the largest |score| of its tile goes.
#[derive(Clone, Copy)]
pub struct Past<'a> {
    pub cache: &'a Cache,
    /// The head's place in the cache's unit.
    pub column: usize,
    /// [N, tiles]
    pub largest: Shared<f32>,
}

impl Past<'_> {
    /// c of a block's keys less the first of them, that first, and the weights of its values, zero behind the last key.
    fn block(&self, block: usize, columns: &mut [f32; TILE], weights: &mut [f32; TILE]) -> (usize, f64) {
        let column = &self.cache.columns[self.column];
        let first = block * BLOCK;
        let count = (self.cache.len - first).min(BLOCK);
        weights.fill(0.0);
        if !column.weights.is_empty() {
            weights[..count].copy_from_slice(&column.weights[first..first + count]);
        }
        let base = if column.decay.is_empty() { 0.0 } else { decay_columns(&column.decay[first..first + count], columns) };
        (count, base)
    }
}

/// The tile code as a function of its own, compiled once for all who call it.
pub struct CallTile<'a>(pub ForwardTile<'a>);

impl Task for CallTile<'_> {
    type Output = Option<(usize, f32)>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Option<(usize, f32)> {
        simd.call(self.0)
    }
}

/// How far the keys of a tile are seen.
#[derive(Clone, Copy)]
enum Until {
    /// All of this many, by every row.
    All(usize),
    /// From this position on, up to a row's own, at most this many.
    Own(usize, usize),
}

impl Until {
    /// Keys that row r sees.
    #[inline(always)]
    fn row(self, r: usize) -> usize {
        match self {
            Until::All(count) => count,
            Until::Own(start, most) => (r + 1 - start).min(most),
        }
    }
}

/// The queries of a tile: room for them, or prepared already.
pub enum Queries<'a> {
    Room(&'a mut [f32]),
    Prepared(&'a [f32]),
}

#[repr(align(64))]
struct Scores([f32; ROWS * TILE]);

/// z of each row, spread over the lanes of a vector until the row is done.
#[repr(align(64))]
struct Sums([[f32; 16]; TILE]);

impl Task for ForwardTile<'_> {
    /// The first row whose denominator is not positive, with its value.
    type Output = Option<(usize, f32)>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Option<(usize, f32)> {
        let c = self.context;
        let l = c.layout;
        let s = l.shape;
        let head = &l.heads[self.h];
        let n = self.b * s.heads + self.h;
        let g = self.h / s.group();
        let kv = l.kv_index(head.class, self.b, g);
        let len = c.lengths.map_or(s.time, |lengths| lengths[self.b]);
        let (first, last) = (self.tile * l.tile, ((self.tile + 1) * l.tile).min(s.time));
        let counted = last.min(len).max(first);

        // SAFETY: each task is the only one with this (b, h, tile), hence with these rows of u, z, rho and y.
        let (u, z, rho) = unsafe {
            let at = n * s.time + first;
            (c.u.slice(at * l.ep, (last - first) * l.ep), c.z.slice(at, last - first), c.rho.slice(at, last - first))
        };
        u[(counted - first) * l.ep..].fill(0.0);
        rho.fill(head.frame.start());
        rho[counted - first..].fill(0.0);

        let size = (counted - first) * l.dp;
        let q: &[f32] = match self.q {
            Queries::Prepared(q) => &q[..size],
            Queries::Room(q) => {
                let q = &mut q[..size];
                c.sources.query(l, self.b, self.h).fill(simd, first, s.time, q, l.dp);
                q
            }
        };
        let mut sums = Sums([[0.0; 16]; TILE]);
        let sums = &mut sums.0;
        if self.begun {
            sums.iter_mut().zip(&z[..counted - first]).for_each(|(sums, &z)| sums[0] = z);
        }
        let mut scores = Scores([0.0; ROWS * TILE]);
        let scores = &mut scores.0;
        let mut columns = [0.0; TILE];
        let decay = head.variant.decay.is_some().then(|| &c.gates.decay[n * l.tp()..][..l.tp()]);
        let mut past_weights = [0.0; TILE];
        let mut largest = 0.0f32;
        let blocks = self.past.map_or(0, |past| past.cache.blocks());
        for step in 0..blocks + self.tile + 1 - self.from {
            let begun = self.begun || step > 0;
            let (kt, pitch, v, key_weights, base, keys_until);
            match self.past.filter(|_| step < blocks) {
                Some(past) => {
                    let (count, c) = past.block(step, &mut columns, &mut past_weights);
                    kt = &past.cache.keys[step * s.d * BLOCK..][..s.d * BLOCK];
                    v = &past.cache.values[step * BLOCK * l.ep..][..BLOCK * l.ep];
                    key_weights = head.weighs_keys.then_some(&past_weights[..]);
                    (pitch, base, keys_until) = (BLOCK, decay.map(|_| c), Until::All(count));
                }
                None => {
                    let tile = self.from + step - blocks;
                    let s0 = tile * l.tile;
                    kt = &c.kt[(kv * l.tiles + tile) * s.d * l.pitch..][..s.d * l.pitch];
                    v = &c.v[(kv * l.tp() + s0) * l.ep..][..l.tile * l.ep];
                    key_weights = c.gates.tile_weights(l, self.h, n, tile);
                    base = decay.map(|decay| decay_columns(&decay[s0..s0 + l.pitch], &mut columns));
                    (pitch, keys_until) = (l.pitch, Until::Own(s0, l.tile));
                }
            }
            for r0 in (first..counted).step_by(ROWS) {
                let r1 = (r0 + ROWS).min(counted);
                // Row r1 − 1 sees keys up to itself; those behind need no work.
                let keys = keys_until.row(r1 - 1);
                let width = keys.next_multiple_of(PAD);
                let q = &q[(r0 - first) * l.dp..][..(r1 - r0) * l.dp];
                let a = Strided { at: q.as_ptr(), row: l.dp, column: 1 };
                // SAFETY: q has r1 − r0 rows of dp ≥ d, kt d rows of pitch ≥ width, scores ROWS rows of TILE.
                unsafe {
                    let (b, to) = (Rows { at: kt.as_ptr(), stride: pitch }, Rows { at: scores.as_mut_ptr(), stride: TILE });
                    product::<S, false>(simd, r1 - r0, width, s.d, a, b, to);
                }
                if self.past.is_some() {
                    for (r, row) in (r0..r1).zip(scores.chunks_exact(TILE)) {
                        largest =
                            row[..keys_until.row(r)].iter().fold(largest, |largest, x| if x.abs() <= largest { largest } else { x.abs() });
                    }
                }
                for r in r0..r1 {
                    let (i, row) = (r - first, r - r0);
                    let change = head.kernel.forward_row(
                        simd,
                        ForwardRow {
                            x: &mut scores[row * TILE..][..width],
                            visible: keys_until.row(r),
                            clamp: head.clamp,
                            decay: base.map(|base| DecayRow { row: (decay.map_or(0.0, |d| d[r]) - base) as f32, columns: &columns }),
                            frame: head.frame.of(rho[i]),
                            sums: &mut sums[i],
                            key_weights,
                        },
                    );
                    if let Some((now, factor)) = change {
                        rho[i] = now;
                        if begun {
                            let factor = simd.splat(factor);
                            let u = &mut u[i * l.ep..][..l.ep];
                            for j in (0..l.ep).step_by(S::LANES) {
                                simd.store_at(u, j, simd.mul(simd.load_at(u, j), factor));
                            }
                        }
                    }
                }
                let a = Strided { at: scores.as_ptr(), row: TILE, column: 1 };
                let (b, to) = (Rows { at: v.as_ptr(), stride: l.ep }, Rows { at: u[(r0 - first) * l.ep..].as_mut_ptr(), stride: l.ep });
                // SAFETY: scores has r1 − r0 rows of TILE ≥ keys, v tile ≥ keys rows of ep, u at least r1 − r0 rows of ep from r0 on.
                unsafe {
                    match begun {
                        false => product::<S, false>(simd, r1 - r0, l.ep, keys, a, b, to),
                        true => product::<S, true>(simd, r1 - r0, l.ep, keys, a, b, to),
                    }
                }
            }
        }

        if let Some(past) = self.past {
            // SAFETY: the place of this task alone.
            unsafe { past.largest.slice(n * l.tiles + self.tile, 1)[0] = largest };
        }
        for (z, sums) in z.iter_mut().zip(&*sums) {
            // SAFETY: the array holds 16 ≥ LANES values; those behind LANES are zero.
            *z = simd.sum(unsafe { simd.load(sums.as_ptr()) });
        }

        let mut nonpositive = None;
        for t in first..last {
            // SAFETY: as above; row (b, t, h) of y belongs to this task.
            let y = unsafe { c.y.slice(((self.b * s.time + t) * s.heads + self.h) * s.e, s.e) };
            if t >= counted {
                y.fill(0.0);
                continue;
            }
            let i = t - first;
            let row = c.gates.row(l, self.h, n, t, z[i], rho[i]);
            let d = epilogue::forward(&head.variant, row, &u[i * l.ep..][..s.e], y);
            if head.variant.denominator.sums() && (d <= 0.0 || d.is_nan()) && nonpositive.is_none() {
                nonpositive = Some((t, d));
            }
        }
        nonpositive
    }
}
