//! The rows of one head: what convolution, RoPE and features make of them, packed into tiles, and back from gradients.

use crate::kernels::TILE;
use crate::kernels::disjoint::Block;
use crate::kernels::simd::{Simd, Task};
use crate::kernels::transpose;
use crate::layer::{Class, FeatureGrads, Features};
use crate::parts::bits::{self, Channels};
use crate::parts::rope::{rotate, rotate_back};

/// Rows of one head in a [B, T, heads, dimension] tensor, and what happens to them.
#[derive(Clone, Copy)]
pub struct HeadRows<'a> {
    /// From the head's first value in its batch row on.
    pub x: &'a [f32],
    /// From one row to the next.
    pub stride: usize,
    /// d or e
    pub dim: usize,
    /// Pairs of coordinates that RoPE rotates.
    pub pairs: usize,
    /// Angles [T, pairs], empty without RoPE.
    pub cos: &'a [f32],
    /// Angles [T, pairs], empty without RoPE.
    pub sin: &'a [f32],
    /// Filters [w, dimension], empty without convolution.
    pub taps: &'a [f32],
    /// The inputs before the first position that the filters reach, oldest first [w − 1, dimension]; empty where there are none.
    pub tail: &'a [f32],
    /// What follows RoPE.
    pub features: Features<'a>,
    /// The codes that rows become.
    pub codes: Option<Codes<'a>>,
}

/// Rows as their codes have them.
#[derive(Clone, Copy)]
pub struct Codes<'a> {
    pub bits: u32,
    /// The first row that has codes.
    pub from: usize,
    /// Of keys; values have a scale for each row.
    pub channels: Option<Channels<'a>>,
}

impl Codes<'_> {
    fn round(&self, row: &mut [f32]) {
        match self.channels {
            Some(channels) => bits::round_key(self.bits, channels, row),
            None => bits::round_value(self.bits, row),
        }
    }
}

impl HeadRows<'_> {
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
    pub fn before_map<S: Simd>(&self, simd: S, t: usize, row: &mut [f32]) {
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
            let half = self.pairs;
            rotate(row, &self.cos[t * half..][..half], &self.sin[t * half..][..half]);
        }
        if let Some(codes) = self.codes.filter(|codes| t >= codes.from) {
            codes.round(row);
        }
    }

    /// Row t, prepared, into `row`, whose values after its width become zero.
    #[inline(always)]
    pub fn forward<S: Simd>(&self, simd: S, t: usize, row: &mut [f32]) {
        let (row, padding) = row.split_at_mut(self.features.width);
        if self.features.only_scales() {
            self.before_map(simd, t, row);
            self.features.scale_row(row);
        } else {
            let mut buffer = [0.0f32; 256];
            let x = &mut buffer[..self.dim];
            self.before_map(simd, t, x);
            self.features.forward(simd, x, row);
        }
        padding.fill(0.0);
    }

    /// Adds the gradient of row t, from that of the prepared row, to the rows of `dx`, to those of the filter and of other tensors.
    #[inline(always)]
    fn backward<S: Simd>(&self, simd: S, t: usize, row: &mut [f32], dx: &mut Block<f32>, dtaps: &mut [f32], to: FeatureGrads) {
        let mut own;
        let row = if self.features.only_scales() {
            self.features.scale_row(row);
            row
        } else {
            let mut x = [0.0f32; 256];
            let x = &mut x[..self.dim];
            own = [0.0f32; 256];
            self.before_map(simd, t, x);
            self.features.backward(simd, x, row, &mut own[..self.dim], to);
            &mut own[..self.dim]
        };
        self.before_map_backward(simd, t, row, dx, dtaps);
    }

    /// Adds the gradient of row t, from that of the row up to φ, which it changes.
    #[inline(always)]
    fn before_map_backward<S: Simd>(&self, simd: S, t: usize, row: &mut [f32], dx: &mut Block<f32>, dtaps: &mut [f32]) {
        if !self.cos.is_empty() {
            let half = self.pairs;
            rotate_back(row, &self.cos[t * half..][..half], &self.sin[t * half..][..half]);
        }
        if self.taps.is_empty() {
            dx.row(0, t).iter_mut().zip(&*row).for_each(|(dx, g)| *dx += *g);
            return;
        }
        let mut buffer = [0.0f32; 256];
        let scratch = &mut buffer[..self.dim];
        self.filtered(t, scratch);
        let one = simd.splat(1.0);
        for i in (0..scratch.len()).step_by(S::LANES) {
            let x = simd.load_at(scratch, i);
            let s = simd.sigmoid(x);
            simd.store_at(scratch, i, simd.mul(s, simd.fma(x, simd.sub(one, s), one)));
        }
        row.iter_mut().zip(&*scratch).for_each(|(g, slope)| *g *= *slope);
        let w = self.taps.len() / self.dim;
        for j in 0..w {
            let Some(source) = (t + j + 1).checked_sub(w) else { continue };
            let (taps, dtaps) = (&self.taps[j * self.dim..][..self.dim], &mut dtaps[j * self.dim..][..self.dim]);
            for ((((dx, dtap), &g), &tap), &x) in dx.row(0, source).iter_mut().zip(dtaps).zip(&*row).zip(taps).zip(self.raw(source)) {
                *dx += g * tap;
                *dtap += g * x;
            }
        }
    }

    /// Rows `first`.. of a head, prepared, into `rows` [count, padded]; rows after T become zero.
    #[inline(always)]
    pub fn fill<S: Simd>(&self, simd: S, first: usize, time: usize, rows: &mut [f32], padded: usize) {
        simd.call(Fill { side: *self, first, time, rows, padded });
    }
}

/// [`HeadRows::fill`], compiled once for all who call it.
struct Fill<'a> {
    side: HeadRows<'a>,
    first: usize,
    time: usize,
    rows: &'a mut [f32],
    padded: usize,
}

impl Task for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let side = &self.side;
        for (t, row) in (self.first..).zip(self.rows.chunks_exact_mut(self.padded)) {
            // Rows of one head lie too far apart for the machine to foresee.
            let ahead = side.x.as_ptr().wrapping_add((t + 8) * side.stride);
            for line in (0..side.dim).step_by(16) {
                simd.prefetch(ahead.wrapping_add(line));
            }
            if t < self.time { side.forward(simd, t, row) } else { row.fill(0.0) }
        }
    }
}

/// Packs a whole kv head: by rows [Tp, padded], by transposed tiles [tiles, columns, pitch], or both; an empty slice is not wanted.
pub struct Pack<'a> {
    pub side: HeadRows<'a>,
    pub time: usize,
    /// Positions of a tile, and in whole vectors.
    pub tile: usize,
    pub pitch: usize,
    pub padded: usize,
    /// Rows of a transposed tile.
    pub columns: usize,
    pub rows: &'a mut [f32],
    pub transposed: &'a mut [f32],
    /// Scratch for one tile of rows [pitch, padded], where they are not wanted themselves.
    pub local: &'a mut [f32],
}

impl Task for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (padded, dim, pitch) = (self.padded, self.side.features.width, self.pitch);
        for (tile, first) in (0..self.time).step_by(self.tile).enumerate() {
            let rows: &mut [f32] = if self.rows.is_empty() {
                &mut self.local[..pitch * padded]
            } else {
                // Rows after the tile are those of the next, written twice where a tile is not whole vectors.
                &mut self.rows[first * padded..][..pitch * padded]
            };
            self.side.fill(simd, first, self.time, rows, padded);
            if self.transposed.is_empty() {
                continue;
            }
            transpose_tile(simd, rows, padded, &mut self.transposed[tile * self.columns * pitch..][..dim * pitch], pitch);
        }
    }
}

/// Rows of a tile [pitch, padded] as columns [dimension, pitch].
#[inline(always)]
pub fn transpose_tile<S: Simd>(simd: S, rows: &[f32], padded: usize, columns: &mut [f32], pitch: usize) {
    let dim = columns.len() / pitch;
    // Dimensions after dim are transposed with the rest of their block of 16, but not kept.
    let mut spare = [0.0f32; 16 * TILE];
    for column in (0..dim).step_by(16) {
        let whole = column + 16 <= dim;
        for row in (0..pitch).step_by(16) {
            let to = if whole { &mut columns[column * pitch + row..] } else { &mut spare[row..] };
            transpose(simd, &rows[row * padded + column..], padded, to, pitch);
        }
        if !whole {
            columns[column * pitch..].copy_from_slice(&spare[..(dim - column) * pitch]);
        }
    }
}

/// The gradients of one head's rows before the norm, rows `stride` apart, become those of its inputs.
pub struct Unfilter<'a> {
    pub side: HeadRows<'a>,
    pub len: usize,
    pub from: &'a [f32],
    pub stride: usize,
    pub to: Block<'a, f32>,
    /// Of the filters, laid out like [`HeadRows::taps`].
    pub dtaps: &'a mut [f32],
}

impl Task for Unfilter<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut buffer = [0.0f32; 256];
        let row = &mut buffer[..self.side.dim];
        for t in 0..self.len {
            row.copy_from_slice(&self.from[t * self.stride..][..self.side.dim]);
            self.side.before_map_backward(simd, t, row, &mut self.to, self.dtaps);
        }
    }
}

/// The gradients of the prepared rows of one head [T, padded] become those of its inputs.
pub struct Unpack<'a> {
    pub side: HeadRows<'a>,
    pub class: Class,
    pub len: usize,
    pub rows: &'a mut [f32],
    pub padded: usize,
    pub to: Block<'a, f32>,
    /// Of the filters, laid out like [`HeadRows::taps`].
    pub dtaps: &'a mut [f32],
    /// Of the tensors of the class; empty where it reads none.
    pub tensors: &'a mut [f32],
}

impl Task for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        for (t, row) in self.rows.chunks_exact_mut(self.padded).take(self.len).enumerate() {
            let tensors = match self.tensors.is_empty() {
                true => FeatureGrads::none(),
                false => FeatureGrads::of(&self.class, self.side.dim, self.tensors),
            };
            self.side.backward(simd, t, &mut row[..self.side.features.width], &mut self.to, self.dtaps, tensors);
        }
    }
}
