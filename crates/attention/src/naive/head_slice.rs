//! One head of one batch row inside tensors of all heads.

use crate::naive::add_scaled;
use crate::{AuxKind, Grads, Inputs, Real, Rows, Shape};

/// The position of one head in tensors [B, T, heads, dim].
#[derive(Clone, Copy)]
pub(crate) struct HeadSlice {
    /// The first row of the batch row.
    pub first: usize,
    pub heads: usize,
    pub head: usize,
    pub length: usize,
}

impl HeadSlice {
    /// The index of position t, in units of the dimension.
    pub fn index(&self, t: usize) -> usize {
        (self.first + t) * self.heads + self.head
    }

    /// A copy of the head, [length, dim].
    pub fn read<R: Real>(&self, x: Rows<R>, dim: usize) -> Vec<R> {
        let columns = self.head * dim..(self.head + 1) * dim;
        (0..self.length).flat_map(|t| &x.row(self.first + t, self.heads * dim)[columns.clone()]).copied().collect()
    }

    /// A copy of all heads, [length, heads·dim].
    pub fn read_all<R: Real>(&self, x: Rows<R>, dim: usize) -> Vec<R> {
        (0..self.length).flat_map(|t| x.row(self.first + t, self.heads * dim)).copied().collect()
    }

    /// A copy of the head in gate logits [B, T, heads, dim].
    pub fn logits<R: Real>(&self, inputs: &Inputs<R>, aux: AuxKind, dim: usize) -> Vec<R> {
        self.read(inputs.aux(aux).into(), dim)
    }

    /// Adds values [length, width] to the gradient of tensor `which` (0 q, 1 k, 2 v), from column `first` on.
    pub fn add<R: Real>(&self, values: &[R], (first, width): (usize, usize), which: usize, grads: &mut Grads<R>, shape: &Shape) {
        for (t, row) in values.chunks_exact(width).enumerate() {
            add_scaled(&mut grads.row(which, self.first + t, shape)[first..][..width], R::one(), row);
        }
    }

    /// Adds values [length, dim] to the head in the gradient of gate logits.
    pub fn add_logits<R: Real>(&self, values: &[R], aux: AuxKind, dim: usize, grads: &mut Grads<R>) {
        let to = grads.aux(aux);
        for (t, row) in values.chunks_exact(dim).enumerate() {
            add_scaled(&mut to[self.index(t) * dim..][..dim], R::one(), row);
        }
    }
}
