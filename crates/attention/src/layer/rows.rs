//! Preparation of q, k and v, row by row: short convolution → RoPE → quantization → projection and feature map → scale.
//!
//! The only implementation: training and prefill prepare tiles of rows with it, decoding one row at a time. Norms of q and k run before, over the rows of
//! all heads. [`RowSources`] are the inputs of a call, [`HeadRows`] the rows of one head of one tensor.

use crate::layer::{Features, KeyTransform, Layer};
use crate::parts::qk_norm::QkNorm;
use crate::parts::quantize::{self, CacheBits};
use crate::parts::rope::rotate;
use crate::{Inputs, Shape};
use termwise_kernels::simd::Simd;

/// The three tensors that are prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QkvTensor {
    /// q
    Q,
    /// k
    K,
    /// v
    V,
}

/// Copies filters [heads·dimension, w] with the channel last: [heads, w, dimension].
pub(crate) fn channels_last(taps: &[f32], dim: usize, w: usize, out: &mut [f32]) {
    for (head, out) in taps.chunks_exact(dim * w).zip(out.chunks_exact_mut(dim * w)) {
        for (channel, taps) in head.chunks_exact(w).enumerate() {
            for (j, &tap) in taps.iter().enumerate() {
                out[j * dim + channel] = tap;
            }
        }
    }
}

/// The inputs of a call of T positions, or of one token, from which [`HeadRows`] are made.
#[derive(Clone, Copy)]
pub(crate) struct RowSources<'a> {
    pub layer: &'a Layer,
    pub shape: Shape,
    pub inputs: &'a Inputs<'a, f32>,
    /// Pairs of coordinates that RoPE rotates, 0 if no head rotates.
    pub pairs: usize,
    /// Width of the short convolution, 0 for none.
    pub width: usize,
    /// Angles of RoPE [T, pairs] per batch row.
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    /// Values between the angles of two batch rows; 0 if all share them.
    pub angle_stride: usize,
    /// Filters of q, k and v, channel last.
    pub taps: [&'a [f32]; 3],
    /// Inputs before the first position, [B, heads, w − 1, dimension]; empty if there are none.
    pub tails: [&'a [f32]; 3],
    /// Normed rows of q and k, [sources, B, T, heads·d]; empty if there are none.
    pub normed: [&'a [f32]; 2],
    /// The first position of each batch row; empty if all are 0.
    pub positions: &'a [usize],
}

impl<'a> RowSources<'a> {
    /// The queries of head h in batch row b, for near or for far keys.
    #[inline(always)]
    pub fn query(&self, b: usize, h: usize, far: bool) -> HeadRows<'a> {
        let head = self.layer.far_plans()[h].as_ref().filter(|_| far).unwrap_or(&self.layer.head_plans()[h]);
        let transform = self.layer.key_transforms()[head.key_transform];
        self.rows(transform, QkvTensor::Q, b, h, transform.of_queries(self.inputs, self.shape.d, head, h))
    }

    /// The keys of kv head g in batch row b.
    #[inline(always)]
    pub fn keys(&self, key_transform: usize, b: usize, g: usize) -> HeadRows<'a> {
        let transform = self.layer.key_transforms()[key_transform];
        self.rows(transform, QkvTensor::K, b, g, transform.of_keys(self.inputs, self.shape.d, g))
    }

    /// The values of kv head g in batch row b.
    #[inline(always)]
    pub fn values(&self, key_transform: usize, b: usize, g: usize) -> HeadRows<'a> {
        self.rows(self.layer.key_transforms()[key_transform], QkvTensor::V, b, g, Features::none(self.shape.e))
    }

    /// One head of one tensor in one batch row before the norm of q and k: after the short convolution, or the input.
    pub fn before_norm(&self, (tensor, conv): (QkvTensor, bool), b: usize, head: usize) -> HeadRows<'a> {
        let d = self.shape.d;
        self.rows(KeyTransform { conv, ..KeyTransform::plain(d) }, tensor, b, head, Features::none(d))
    }

    /// A row of all heads of one tensor before the norm.
    #[inline(always)]
    pub fn row_before_norm<S: Simd>(&self, simd: S, source: (QkvTensor, bool), b: usize, t: usize, row: &mut [f32]) {
        for (head, row) in row.chunks_exact_mut(self.shape.d).enumerate() {
            self.before_norm(source, b, head).before_map(simd, t, row);
        }
    }

    /// A row of all heads of one tensor after the norm.
    #[inline(always)]
    pub fn normed_row<S: Simd>(
        &self,
        simd: S,
        source: (QkvTensor, bool),
        (norm, weight): (&QkNorm, &[f32]),
        [b, t]: [usize; 2],
        row: &mut [f32],
    ) {
        self.row_before_norm(simd, source, b, t, row);
        let width = if norm.over_heads() { row.len() } else { self.shape.d };
        row.chunks_exact_mut(width).for_each(|x| norm.forward(x, weight));
    }

    /// One head of one tensor in one batch row.
    #[inline(always)]
    fn rows(&self, key_transform: KeyTransform, tensor: QkvTensor, b: usize, head: usize, features: Features<'a>) -> HeadRows<'a> {
        let (s, i) = (&self.shape, tensor as usize);
        let (heads, dim) = [(s.heads, s.d), (s.kv_heads, s.d), (s.kv_heads, s.e)][i];
        let stride = self.inputs.x[i].stride(heads * dim);
        let rope = key_transform.rope && tensor != QkvTensor::V;
        // Normed rows include the convolution, if their key transform has one.
        let normed = self.layer.norm_source(key_transform).filter(|_| tensor != QkvTensor::V);
        let (x, stride) = match normed {
            Some(source) => (&self.normed[i][source * s.rows() * heads * dim..], heads * dim),
            None => (self.inputs.x[i].values(), stride),
        };
        let (conv, taps) = (key_transform.conv && normed.is_none(), self.width);
        HeadRows {
            x: &x[b * s.time * stride + head * dim..],
            stride,
            dim,
            pairs: self.pairs,
            cos: if rope { &self.cos[b * self.angle_stride..] } else { &[] },
            sin: if rope { &self.sin[b * self.angle_stride..] } else { &[] },
            taps: if conv { &self.taps[i][head * dim * taps..][..dim * taps] } else { &[] },
            tail: if conv && !self.tails[i].is_empty() {
                let size = dim * (taps - 1);
                &self.tails[i][(b * heads + head) * size..][..size]
            } else {
                &[]
            },
            features,
            quantizer: key_transform.bits.map(|(bits, sinks)| RowQuantizer {
                bits,
                sinks: sinks.saturating_sub(self.positions.get(b).copied().unwrap_or(0)),
                tensor,
            }),
        }
    }
}

/// Rows of one head in a [B, T, heads, dimension] tensor, and the stages of their preparation.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'a> {
    /// The tensor from the head's first value in its batch row on.
    pub x: &'a [f32],
    /// Values between the starts of two rows.
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
    /// Inputs before the first position that the filters read, oldest first [w − 1, dimension]; empty if there are none.
    pub tail: &'a [f32],
    /// Projection and feature map, after RoPE.
    pub features: Features<'a>,
    /// Rounding to quantized values.
    pub quantizer: Option<RowQuantizer>,
}

/// Rounds rows to their stored values. Queries and keys change to the basis of stored keys; values keep their basis.
#[derive(Clone, Copy)]
pub(crate) struct RowQuantizer {
    pub bits: CacheBits,
    /// Number of rows that are sinks.
    pub sinks: usize,
    pub tensor: QkvTensor,
}

impl RowQuantizer {
    fn round(&self, t: usize, row: &mut [f32]) {
        let sink = t < self.sinks;
        if self.tensor == QkvTensor::V {
            return self.bits.value_format(sink).round_in_basis(row);
        }
        let format = self.bits.key_format(sink);
        if format.rotated {
            quantize::rotate(row);
        }
        if self.tensor == QkvTensor::K {
            format.round(row);
        }
    }
}

impl HeadRows<'_> {
    #[inline(always)]
    pub fn raw(&self, t: usize) -> &[f32] {
        &self.x[t * self.stride..t * self.stride + self.dim]
    }

    /// The convolution at t before its SiLU, into `sum` [dimension].
    #[inline(always)]
    pub fn filtered(&self, t: usize, sum: &mut [f32]) {
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
        if let Some(quantizer) = self.quantizer {
            quantizer.round(t, row);
        }
    }

    /// Row t, prepared, into `row`; values after its width become zero.
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
}
