//! QK norm: one pass over the rows of all heads before RoPE and φ, since a norm may run over all heads.
//!
//! Forward: rows, with or without the short convolution, normed, [B, T, heads·d]. Backward: the gradients of these become those of the rows before the
//! norm, in place; the gradients of weights are summed over pieces of rows, then over pieces in order.

use rayon::prelude::*;

use crate::fused::plan::NORMED_ROWS as ROWS;
use crate::layer::{QkvTensor, RowSources};
use crate::parts::qk_norm::QkNorm;
use crate::{AuxKind, Inputs};
use termwise_kernels::simd::{Simd, Task, dispatch};

/// The normed tensors and their weights.
pub const NORMED: [(QkvTensor, AuxKind); 2] = [(QkvTensor::Q, AuxKind::QNorm), (QkvTensor::K, AuxKind::KNorm)];

/// The weights of the norm of a tensor; empty if it has none.
pub fn weights<'a>(norm: &QkNorm, inputs: &Inputs<'a, f32>, aux: AuxKind) -> &'a [f32] {
    if norm.has_weight() { inputs.aux(aux) } else { &[] }
}

/// The width of a norm: that of a head, or of the row.
fn width(norm: &QkNorm, d: usize, row: usize) -> usize {
    if norm.over_heads() { row } else { d }
}

struct NormForward<'a> {
    sources: &'a RowSources<'a>,
    of: (QkvTensor, bool),
    norm: &'a QkNorm,
    weight: &'a [f32],
    first: usize,
    rows: &'a mut [f32],
}

impl Task for NormForward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let shape = &self.sources.shape;
        for (at, row) in (self.first..).zip(self.rows.chunks_exact_mut(shape.widths()[self.of.0 as usize])) {
            self.sources.normed_row(simd, self.of, (self.norm, self.weight), [at / shape.time, at % shape.time], row);
        }
    }
}

/// Normed rows of q or k, [sources, B, T, heads·d].
pub fn forward(sources: &RowSources, (tensor, aux): (QkvTensor, AuxKind), normed: &mut [f32]) {
    let RowSources { layer, shape, inputs, .. } = *sources;
    let Some(norm) = layer.qk_norm() else { return };
    let (all, weight) = (shape.widths()[tensor as usize], weights(norm, inputs, aux));
    for (conv, normed) in layer.norm_sources().zip(normed.chunks_exact_mut(shape.rows() * all)) {
        normed.par_chunks_mut(ROWS * all).enumerate().for_each(|(piece, rows)| {
            dispatch(NormForward { sources, of: (tensor, conv), norm, weight, first: piece * ROWS, rows });
        });
    }
}

struct NormBackward<'a> {
    sources: &'a RowSources<'a>,
    of: (QkvTensor, bool),
    norm: &'a QkNorm,
    weight: &'a [f32],
    first: usize,
    gradients: &'a mut [f32],
    /// Scratch for a row.
    x: &'a mut [f32],
    dweight: &'a mut [f32],
}

impl Task for NormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let RowSources { shape, inputs, .. } = self.sources;
        let all = shape.widths()[self.of.0 as usize];
        let width = width(self.norm, shape.d, all);
        for (at, gradient) in (self.first..).zip(self.gradients.chunks_exact_mut(all)) {
            // Padding has no gradient.
            if at % shape.time < inputs.length(at / shape.time, shape) {
                self.sources.row_before_norm(simd, self.of, at / shape.time, at % shape.time, self.x);
                for (x, gradient) in self.x.chunks_exact(width).zip(gradient.chunks_exact_mut(width)) {
                    self.norm.backward(x, self.weight, gradient, self.dweight);
                }
            }
        }
    }
}

/// Gradients of normed rows [B, T, heads·d] of one source become those of the rows before the norm; those of the weights are added to
/// `dweight`, piece by piece.
pub fn backward(
    sources: &RowSources,
    (of, aux): ((QkvTensor, bool), AuxKind),
    gradients: &mut [f32],
    dweight: &mut [f32],
    room: &mut [f32],
) {
    let RowSources { layer, shape, inputs, .. } = *sources;
    let Some(norm) = layer.qk_norm() else { return };
    let (all, weight) = (shape.widths()[of.0 as usize], weights(norm, inputs, aux));
    let pieces = gradients.len().div_ceil(ROWS * all);
    let room = &mut room[..pieces * (all + weight.len())];
    room.fill(0.0);
    gradients.par_chunks_mut(ROWS * all).zip(room.par_chunks_exact_mut(all + weight.len())).enumerate().for_each(
        |(piece, (gradients, room))| {
            let (x, dweight) = room.split_at_mut(all);
            dispatch(NormBackward { sources, of, norm, weight, first: piece * ROWS, gradients, x, dweight });
        },
    );
    for partial in room.chunks_exact(all + weight.len()) {
        dweight.iter_mut().zip(&partial[all..]).for_each(|(sum, part)| *sum += part);
    }
}
