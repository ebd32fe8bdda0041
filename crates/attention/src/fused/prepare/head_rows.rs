//! The prepared rows of one head packed into tiles, and the backward pass of their preparation.

use crate::layer::{FeatureGrads, HeadRows, KeyTransform};
use crate::parts::rope::rotate_back;
use termwise_kernels::TILE;
use termwise_kernels::disjoint::Block;
use termwise_kernels::simd::{Simd, Task};
use termwise_kernels::transpose;

impl HeadRows<'_> {
    /// Adds the gradient of row t, from that of the prepared row, to those of the inputs and of the parameters of the features.
    #[inline(always)]
    fn backward<S: Simd>(&self, simd: S, t: usize, row: &mut [f32], to: &mut InputGrads, features: FeatureGrads) {
        let mut own;
        let row = if self.features.only_scales() {
            self.features.scale_row(row);
            row
        } else {
            let mut x = [0.0f32; 256];
            let x = &mut x[..self.dim];
            own = [0.0f32; 256];
            self.before_map(simd, t, x);
            self.features.backward(simd, x, row, &mut own[..self.dim], features);
            &mut own[..self.dim]
        };
        self.before_map_backward(simd, t, row, to);
    }

    /// Adds the gradient of row t, from that of the row up to φ, which it changes.
    #[inline(always)]
    fn before_map_backward<S: Simd>(&self, simd: S, t: usize, row: &mut [f32], to: &mut InputGrads) {
        let InputGrads { dx, dtaps } = to;
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

/// [`HeadRows::fill`], compiled once for all callers.
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
            // The stride of rows is too large for the hardware prefetcher.
            let ahead = side.x.as_ptr().wrapping_add((t + 8) * side.stride);
            for line in (0..side.dim).step_by(16) {
                simd.prefetch(ahead.wrapping_add(line));
            }
            if t < self.time { side.forward(simd, t, row) } else { row.fill(0.0) }
        }
    }
}

/// Packs a whole kv head: by rows [Tp, padded], by transposed tiles [tiles, columns, pitch], or both; an empty slice is skipped.
pub struct Pack<'a> {
    pub side: HeadRows<'a>,
    pub time: usize,
    /// Positions of a tile, and the same padded to whole vectors.
    pub tile: usize,
    pub pitch: usize,
    pub padded: usize,
    /// Rows of a transposed tile.
    pub columns: usize,
    pub rows: &'a mut [f32],
    pub transposed: &'a mut [f32],
    /// Memory for one tile of rows [pitch, padded], if `rows` is empty.
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
                // Rows past the tile belong to the next one, which overwrites them.
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

/// Where the gradients of the inputs of one head are added.
pub struct InputGrads<'a> {
    /// Rows of q, k or v.
    pub dx: Block<'a, f32>,
    /// Convolution filters, laid out like [`HeadRows::taps`].
    pub dtaps: &'a mut [f32],
}

/// Backward pass through the short convolution, from the gradients of one head's rows before the norm, which are `stride` apart.
pub struct ConvBackward<'a> {
    pub side: HeadRows<'a>,
    pub len: usize,
    pub from: &'a [f32],
    pub stride: usize,
    pub to: InputGrads<'a>,
}

impl Task for ConvBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut buffer = [0.0f32; 256];
        let row = &mut buffer[..self.side.dim];
        for t in 0..self.len {
            row.copy_from_slice(&self.from[t * self.stride..][..self.side.dim]);
            self.side.before_map_backward(simd, t, row, &mut self.to);
        }
    }
}

/// Backward pass from the prepared rows of one head [T, padded] to its inputs.
pub struct UnpackBackward<'a> {
    pub side: HeadRows<'a>,
    pub transform: KeyTransform,
    pub len: usize,
    pub rows: &'a mut [f32],
    pub padded: usize,
    pub to: InputGrads<'a>,
    /// Gradients of the tensors of the key transform; empty if it reads none.
    pub tensors: &'a mut [f32],
}

impl Task for UnpackBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        for (t, row) in self.rows.chunks_exact_mut(self.padded).take(self.len).enumerate() {
            let tensors = match self.tensors.is_empty() {
                true => FeatureGrads::none(),
                false => FeatureGrads::of(&self.transform, self.side.dim, self.tensors),
            };
            self.side.backward(simd, t, &mut row[..self.side.features.width], &mut self.to, tensors);
        }
    }
}
