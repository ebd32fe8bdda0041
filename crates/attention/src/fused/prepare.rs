//! Before and after the tiles: convolution, RoPE and feature map turn the rows of q, k and v into packed, padded
//! tiles by head, and their gradients back.

use crate::fused::plan::{Class, Layout};
use crate::kernels::TILE;
use crate::kernels::simd::{Simd, Task};
use crate::parts::kernel::feature::Map;
use crate::parts::rope::{rotate, rotate_back};

/// Rows of one head in a [B, T, heads, dimension] tensor, and what happens to them.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    /// From the head's first value in its batch row on.
    pub x: &'a [f32],
    /// heads · dimension
    pub stride: usize,
    /// d or e
    pub dim: usize,
    /// Angles [T, d/2], empty without RoPE.
    pub cos: &'a [f32],
    /// Angles [T, d/2], empty without RoPE.
    pub sin: &'a [f32],
    /// Filters [w, dimension], empty without convolution.
    pub taps: &'a [f32],
    /// The inputs before the first position that the filters reach, oldest first [w − 1, dimension]; empty where there are none.
    pub tail: &'a [f32],
    /// φ
    pub map: Map,
    /// What the result is multiplied by.
    pub scale: f32,
}

impl Side<'_> {
    #[inline(always)]
    fn raw(&self, t: usize) -> &[f32] {
        &self.x[t * self.stride..t * self.stride + self.dim]
    }

    /// The convolution at t before its SiLU, into `sum` [dimension].
    #[inline(always)]
    fn filtered(&self, t: usize, sum: &mut [f32]) {
        let w = self.taps.len() / self.dim;
        sum.fill(0.0);
        let first = (w - 1).saturating_sub(t);
        if !self.tail.is_empty() {
            for j in 0..first {
                let taps = &self.taps[j * self.dim..(j + 1) * self.dim];
                for ((sum, &tap), &x) in sum.iter_mut().zip(taps).zip(&self.tail[(t + j) * self.dim..]) {
                    *sum += tap * x;
                }
            }
        }
        for j in first..w {
            let taps = &self.taps[j * self.dim..(j + 1) * self.dim];
            for ((sum, &tap), &x) in sum.iter_mut().zip(taps).zip(self.raw(t + j + 1 - w)) {
                *sum += tap * x;
            }
        }
    }

    /// Row t up to φ, into `row` [dimension].
    #[inline(always)]
    fn before_map<S: Simd>(&self, simd: S, t: usize, row: &mut [f32]) {
        if self.taps.is_empty() {
            row.copy_from_slice(self.raw(t));
        } else {
            self.filtered(t, row);
            for i in (0..row.len()).step_by(S::LANES) {
                let x = simd.load_at(row, i);
                simd.store_at(row, i, simd.mul(x, simd.sigmoid(x)));
            }
        }
        if !self.cos.is_empty() {
            let half = self.dim / 2;
            rotate(row, &self.cos[t * half..][..half], &self.sin[t * half..][..half]);
        }
    }

    /// Row t, prepared, into `row`, whose values behind the dimension become zero.
    #[inline(always)]
    pub fn forward<S: Simd>(&self, simd: S, t: usize, row: &mut [f32]) {
        let (row, padding) = row.split_at_mut(self.dim);
        self.before_map(simd, t, row);
        self.map.forward_simd(simd, row);
        if self.scale != 1.0 {
            row.iter_mut().for_each(|x| *x *= self.scale);
        }
        padding.fill(0.0);
    }

    /// Adds the gradient of row t, from that of the prepared row, to the rows of dx that `dx` hands out by position, and
    /// to `dtaps` (laid out like taps).
    #[inline(always)]
    pub fn backward<'d, S: Simd>(&self, simd: S, t: usize, row: &mut [f32], dx: impl Fn(usize) -> &'d mut [f32], dtaps: &mut [f32]) {
        let mut buffer = [0.0f32; 256];
        let scratch = &mut buffer[..self.dim];
        if self.scale != 1.0 {
            row.iter_mut().for_each(|x| *x *= self.scale);
        }
        if self.map != Map::Identity {
            self.before_map(simd, t, scratch);
            self.map.backward_simd(simd, scratch, row);
        }
        if !self.cos.is_empty() {
            let half = self.dim / 2;
            rotate_back(row, &self.cos[t * half..][..half], &self.sin[t * half..][..half]);
        }
        if self.taps.is_empty() {
            dx(t).iter_mut().zip(row).for_each(|(dx, g)| *dx += *g);
            return;
        }
        self.filtered(t, scratch);
        let one = simd.splat(1.0);
        for i in (0..scratch.len()).step_by(S::LANES) {
            let x = simd.load_at(scratch, i);
            let s = simd.sigmoid(x);
            simd.store_at(scratch, i, simd.mul(s, simd.fma(x, simd.sub(one, s), one)));
        }
        row.iter_mut().zip(&*scratch).for_each(|(g, slope)| *g *= *slope);
        let w = self.taps.len() / self.dim;
        for j in (w - 1).saturating_sub(t)..w {
            let source = t + j + 1 - w;
            let taps = &self.taps[j * self.dim..(j + 1) * self.dim];
            let dtaps = &mut dtaps[j * self.dim..(j + 1) * self.dim];
            for ((((dx, dtap), &g), &tap), &x) in dx(source).iter_mut().zip(dtaps).zip(&*row).zip(taps).zip(self.raw(source)) {
                *dx += g * tap;
                *dtap += g * x;
            }
        }
    }

    /// Rows `first`.. of a head, prepared, into `rows` [count, padded]; rows behind T become zero.
    #[inline(always)]
    pub fn fill<S: Simd>(&self, simd: S, first: usize, time: usize, rows: &mut [f32], padded: usize) {
        for (t, row) in (first..).zip(rows.chunks_exact_mut(padded)) {
            // Rows of one head lie too far apart for the machine to foresee.
            let ahead = self.x.as_ptr().wrapping_add((t + 8) * self.stride);
            for line in (0..self.dim).step_by(16) {
                simd.prefetch(ahead.wrapping_add(line));
            }
            if t < time { self.forward(simd, t, row) } else { row.fill(0.0) }
        }
    }
}

/// Packs a whole kv head: by rows [Tp, padded], by transposed tiles [tiles, dimension, pitch], or both; an empty slice is not wanted.
pub struct Pack<'a> {
    pub side: Side<'a>,
    pub time: usize,
    /// Positions of a tile, and in whole vectors.
    pub tile: usize,
    pub pitch: usize,
    pub padded: usize,
    pub rows: &'a mut [f32],
    pub transposed: &'a mut [f32],
    /// Room for one tile of rows [pitch, padded], where they are not wanted themselves.
    pub local: &'a mut [f32],
}

impl Task for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (padded, dim, pitch) = (self.padded, self.side.dim, self.pitch);
        // Dimensions behind dim are transposed with the rest of their block of 16, but not kept.
        let mut spare = [0.0f32; 16 * TILE];
        for (tile, first) in (0..self.time).step_by(self.tile).enumerate() {
            let rows: &mut [f32] = if self.rows.is_empty() {
                &mut self.local[..pitch * padded]
            } else {
                // Rows behind the tile are those of the next, written twice where a tile is not whole vectors.
                &mut self.rows[first * padded..][..pitch * padded]
            };
            self.side.fill(simd, first, self.time, rows, padded);
            if self.transposed.is_empty() {
                continue;
            }
            let out = &mut self.transposed[tile * dim * pitch..][..dim * pitch];
            for column in (0..padded).step_by(16) {
                let whole = column + 16 <= dim;
                for row in (0..pitch).step_by(16) {
                    let to = if whole { out[column * pitch + row..].as_mut_ptr() } else { spare[row..].as_mut_ptr() };
                    // SAFETY: rows holds pitch rows of padded values; `to` has 16 rows of pitch values from its column on.
                    unsafe { simd.transpose_16(rows.as_ptr().add(row * padded + column), padded, to, pitch) };
                }
                if !whole {
                    let rest = dim - column;
                    out[column * pitch..].copy_from_slice(&spare[..rest * pitch]);
                }
            }
        }
    }
}

/// Filters [heads·dimension, w] with the channel last: [heads, w, dimension].
pub fn channels_last(taps: &[f32], dim: usize, w: usize, out: &mut [f32]) {
    for (head, out) in taps.chunks_exact(dim * w).zip(out.chunks_exact_mut(dim * w)) {
        for (channel, taps) in head.chunks_exact(w).enumerate() {
            for (j, &tap) in taps.iter().enumerate() {
                out[j * dim + channel] = tap;
            }
        }
    }
}

/// Adds gradients of filters [heads, w, dimension] to [heads·dimension, w].
pub fn add_channels_first(dtaps: &[f32], dim: usize, w: usize, out: &mut [f32]) {
    for (dtaps, out) in dtaps.chunks_exact(dim * w).zip(out.chunks_exact_mut(dim * w)) {
        for (channel, out) in out.chunks_exact_mut(w).enumerate() {
            for (j, out) in out.iter_mut().enumerate() {
                *out += dtaps[j * dim + channel];
            }
        }
    }
}

/// The three tensors that are prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// q
    Q,
    /// k
    K,
    /// v
    V,
}

/// Parts of the workspace and the inputs that every [`Side`] of a call refers to.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// q, k and v as given.
    pub x: [&'a [f32]; 3],
    /// Angles.
    pub cos: &'a [f32],
    /// Angles.
    pub sin: &'a [f32],
    /// From the angles of one batch row to those of the next; 0 where all share them.
    pub angle_stride: usize,
    /// Filters of q, k and v, channel last.
    pub taps: [&'a [f32]; 3],
    /// Inputs before the first position, [B, heads, w − 1, dimension]; empty where there are none.
    pub tails: [&'a [f32]; 3],
}

impl<'a> Sources<'a> {
    /// The queries of head h in batch row b.
    pub fn query(&self, l: &Layout, b: usize, h: usize) -> Side<'a> {
        let head = &l.heads[h];
        self.side(l, l.classes[head.class], Which::Q, b, h, head.scale)
    }

    /// One head of one tensor in one batch row.
    pub fn side(&self, l: &Layout, class: Class, which: Which, b: usize, head: usize, scale: f32) -> Side<'a> {
        let s = &l.shape;
        let (heads, dim) = match which {
            Which::Q => (s.heads, s.d),
            Which::K => (s.kv_heads, s.d),
            Which::V => (s.kv_heads, s.e),
        };
        let stride = heads * dim;
        let (rope, map) = if which == Which::V { (false, Map::Identity) } else { (class.rope, class.map) };
        Side {
            x: &self.x[which as usize][b * s.time * stride + head * dim..],
            stride,
            dim,
            cos: if rope { &self.cos[b * self.angle_stride..] } else { &[] },
            sin: if rope { &self.sin[b * self.angle_stride..] } else { &[] },
            taps: if class.conv { &self.taps[which as usize][head * dim * l.taps..][..dim * l.taps] } else { &[] },
            tail: if class.conv && !self.tails[which as usize].is_empty() {
                let size = dim * (l.taps - 1);
                &self.tails[which as usize][(b * heads + head) * size..][..size]
            } else {
                &[]
            },
            map,
            scale,
        }
    }
}
