//! Norms of q and k ahead of the tiles: one pass over the rows of all heads, since a norm may run over all of them, before RoPE and φ turn the
//! rows of single heads.
//!
//! Forward: rows, with or without the short convolution, normed, [B, T, heads·d]. Backward: the gradients of these become those of the rows before the
//! norm, in place; the gradients of weights are summed over pieces of rows, then over pieces in order.

use rayon::prelude::*;

use crate::fused::plan::{Layout, NORMED_ROWS as ROWS};
use crate::fused::prepare::{Sources, Tensor};
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::parts::qk_norm::QkNorm;
use crate::{Extra, Inputs};

/// The two tensors that are normed, with their weights.
pub const NORMED: [(Tensor, Extra); 2] = [(Tensor::Q, Extra::QNorm), (Tensor::K, Extra::KNorm)];

/// Where the norm of a tensor has its weights.
pub fn weights<'a>(norm: &QkNorm, inputs: &Inputs<'a, f32>, extra: Extra) -> &'a [f32] {
    if norm.has_weight() { inputs.extra(extra) } else { &[] }
}

/// A row of all heads of one tensor, after the short convolution or as it is.
#[inline(always)]
fn row_of<S: Simd>(simd: S, l: &Layout, sources: &Sources, (tensor, conv): (Tensor, bool), at: usize, row: &mut [f32]) {
    let (b, t) = (at / l.shape.time, at % l.shape.time);
    for (head, row) in row.chunks_exact_mut(l.shape.d).enumerate() {
        sources.before_norm(l, (tensor, conv), b, head).before_map(simd, t, row);
    }
}

/// The width of a norm: that of a head, or of the row.
fn width(norm: &QkNorm, d: usize, row: usize) -> usize {
    if norm.over_heads() { row } else { d }
}

struct Forward<'a> {
    l: &'a Layout,
    sources: &'a Sources<'a>,
    of: (Tensor, bool),
    norm: &'a QkNorm,
    weight: &'a [f32],
    first: usize,
    rows: &'a mut [f32],
}

impl Task for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let all = self.l.shape.widths()[self.of.0 as usize];
        for (at, row) in (self.first..).zip(self.rows.chunks_exact_mut(all)) {
            row_of(simd, self.l, self.sources, self.of, at, row);
            row.chunks_exact_mut(width(self.norm, self.l.shape.d, all)).for_each(|x| self.norm.forward(x, self.weight));
        }
    }
}

/// Normed rows of q or k, [sources, B, T, heads·d].
pub fn forward(l: &Layout, inputs: &Inputs<f32>, sources: &Sources, (tensor, extra): (Tensor, Extra), normed: &mut [f32]) {
    let Some(norm) = l.layer.qk_norm() else { return };
    let (all, weight) = (l.shape.widths()[tensor as usize], weights(norm, inputs, extra));
    for (conv, normed) in l.layer.norm_sources().zip(normed.chunks_exact_mut(l.shape.rows() * all)) {
        normed.par_chunks_mut(ROWS * all).enumerate().for_each(|(piece, rows)| {
            dispatch(Forward { l, sources, of: (tensor, conv), norm, weight, first: piece * ROWS, rows });
        });
    }
}

struct Backward<'a> {
    l: &'a Layout,
    inputs: &'a Inputs<'a, f32>,
    sources: &'a Sources<'a>,
    of: (Tensor, bool),
    norm: &'a QkNorm,
    weight: &'a [f32],
    first: usize,
    gradients: &'a mut [f32],
    /// Room for a row.
    x: &'a mut [f32],
    dweight: &'a mut [f32],
}

impl Task for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let shape = &self.l.shape;
        let all = shape.widths()[self.of.0 as usize];
        let width = width(self.norm, shape.d, all);
        for (at, gradient) in (self.first..).zip(self.gradients.chunks_exact_mut(all)) {
            // What lies behind the end of a text may be anything, and counts for nothing.
            if at % shape.time < self.inputs.length(at / shape.time, shape) {
                row_of(simd, self.l, self.sources, self.of, at, self.x);
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
    l: &Layout,
    inputs: &Inputs<f32>,
    sources: &Sources,
    (of, extra): ((Tensor, bool), Extra),
    gradients: &mut [f32],
    dweight: &mut [f32],
    room: &mut [f32],
) {
    let Some(norm) = l.layer.qk_norm() else { return };
    let (all, weight) = (l.shape.widths()[of.0 as usize], weights(norm, inputs, extra));
    let pieces = gradients.len().div_ceil(ROWS * all);
    let room = &mut room[..pieces * (all + weight.len())];
    room.fill(0.0);
    gradients.par_chunks_mut(ROWS * all).zip(room.par_chunks_exact_mut(all + weight.len())).enumerate().for_each(
        |(piece, (gradients, room))| {
            let (x, dweight) = room.split_at_mut(all);
            dispatch(Backward { l, inputs, sources, of, norm, weight, first: piece * ROWS, gradients, x, dweight });
        },
    );
    for partial in room.chunks_exact(all + weight.len()) {
        dweight.iter_mut().zip(&partial[all..]).for_each(|(sum, part)| *sum += part);
    }
}
