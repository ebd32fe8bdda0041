//! Recurrent state and monomial features of the positions of one tile, for chunked evaluation.
//!
//! | task | formula | use |
//! |---|---|---|
//! | [`AccumulateState`] | H ← keep·H + Φ·R, z ← keep·z + Φ·f | keys into the state; queries and dU into its gradient |
//! | [`ReadState`] | R = Φᵀ·H, f = Φᵀ·z | U from the state; dV from its gradient |
//! | [`FeatureGradient`] | dx = ∂/∂x of Σ Φ ∘ (H·Rᵀ + z·fᵀ) | dq from the state; dk from its gradient |
//!
//! Φ [N, L] are the monomials of x [d, L], multiplied by `factors` [N] on the query side (a_n/α!). R is [L, ep], f is [L], and L is the padded length of a
//! tile. Only a block of [`BLOCK`] rows of Φ exists at a time, and it stays in the first-level cache.

use std::ops::Range;

use crate::basis::{Basis, PositionGrads, Positions};
use crate::simd::{Simd, Task};
use crate::tile_gemm::{multiply, multiply_onto};
use crate::{PAD, transpose};

/// Rows of a block of Φ: a multiple of the register blocks of products. A block of H fits into the first-level cache next to it.
pub const BLOCK: usize = 48;

/// The positions of one tile and their monomials of the lower orders.
#[derive(Clone, Copy)]
pub struct FeatureTile<'a> {
    basis: &'a Basis,
    positions: Positions<'a, f32>,
    /// Number of valid positions; x is zero past them.
    count: usize,
    /// Factor of each monomial [N]; empty for 1.
    factors: &'a [f32],
}

impl<'a> FeatureTile<'a> {
    /// L = `len` positions x [d, L] of a tile, of which the first `count` are valid. Their monomials of the lower orders are computed into `lower_orders`
    /// [M, L]. `factors` [N] multiplies each monomial; empty for 1.
    ///
    /// # Panics
    /// If L is not a multiple of [`PAD`], `count` exceeds L, or a slice is too short.
    #[inline(always)]
    pub fn new<S: Simd>(
        simd: S,
        basis: &'a Basis,
        (len, count): (usize, usize),
        x: &'a [f32],
        lower_orders: &'a mut [f32],
        factors: &'a [f32],
    ) -> FeatureTile<'a> {
        let fits = x.len() >= basis.d() * len && (factors.is_empty() || factors.len() >= basis.rows());
        assert!(
            fits && count <= len && len.is_multiple_of(PAD),
            "{count} of {len} positions in d = {} do not fit a feature tile",
            basis.d()
        );
        simd.call(LowerOrders { basis, len, x, lower_orders: &mut *lower_orders });
        FeatureTile { basis, positions: Positions { x, len, lower_orders }, count, factors }
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = self.basis.rows();
        (0..rows).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(rows))
    }

    /// Rows `rows` of Φ.
    #[inline(always)]
    fn fill<S: Simd>(&self, simd: S, rows: Range<usize>, block: &mut [f32]) {
        self.basis.rows_of(rows.clone(), self.positions, block);
        if self.factors.is_empty() {
            return;
        }
        for (row, &factor) in block.chunks_exact_mut(self.positions.len).zip(&self.factors[rows]) {
            let factor = simd.splat(factor);
            for i in (0..row.len()).step_by(S::LANES) {
                simd.store_at(row, i, simd.mul(simd.load_at(row, i), factor));
            }
        }
    }
}

/// Computes the monomials of the lower orders.
struct LowerOrders<'a> {
    basis: &'a Basis,
    len: usize,
    x: &'a [f32],
    lower_orders: &'a mut [f32],
}

impl Task for LowerOrders<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        self.basis.lower_orders(self.x, self.len, self.lower_orders);
    }
}

/// H ← keep·H + Φ·R, z ← keep·z + Φ·f
pub struct AccumulateState<'a> {
    /// Positions whose monomials are Φ.
    pub features: FeatureTile<'a>,
    /// Factor of the previous state.
    pub keep: f32,
    /// R [L, ep]
    pub rows: &'a [f32],
    /// Columns of H, a multiple of [`PAD`].
    pub ep: usize,
    /// f [L], zero past the valid positions.
    pub weights: &'a [f32],
    /// H [N, ep]
    pub h: &'a mut [f32],
    /// z [N]; may be empty.
    pub z: &'a mut [f32],
    /// Scratch memory [[`BLOCK`], L].
    pub block: &'a mut [f32],
}

impl Task for AccumulateState<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (p, ep) = (self.features, self.ep);
        let len = p.positions.len;
        for rows in p.blocks() {
            let (count, start) = (rows.len(), rows.start);
            let block = &mut self.block[..count * len];
            p.fill(simd, rows.clone(), block);
            let h = &mut self.h[start * ep..(start + count) * ep];
            multiply_onto(simd, [count, ep, p.count], (block, len, 1), (self.rows, ep), (h, ep), self.keep);
            if self.z.is_empty() {
                continue;
            }
            for (z, row) in self.z[rows].iter_mut().zip(block.chunks_exact(len)) {
                let mut sum = simd.splat(0.0);
                for i in (0..len).step_by(S::LANES) {
                    sum = simd.fma(simd.load_at(row, i), simd.load_at(self.weights, i), sum);
                }
                *z = self.keep * *z + simd.sum(sum);
            }
        }
    }
}

/// R = Φᵀ·H, f = Φᵀ·z
pub struct ReadState<'a> {
    /// Positions whose monomials are Φ.
    pub features: FeatureTile<'a>,
    /// H [N, ep]
    pub h: &'a [f32],
    /// z [N]; may be empty.
    pub z: &'a [f32],
    /// Columns of H, a multiple of [`PAD`].
    pub ep: usize,
    /// R [count, ep]
    pub rows: &'a mut [f32],
    /// f [L]; written if z is not empty.
    pub weights: &'a mut [f32],
    /// Scratch memory [[`BLOCK`], L].
    pub block: &'a mut [f32],
}

impl Task for ReadState<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (p, ep) = (self.features, self.ep);
        let len = p.positions.len;
        if !self.z.is_empty() {
            self.weights[..len].fill(0.0);
        }
        for rows in p.blocks() {
            let (count, start) = (rows.len(), rows.start);
            let block = &mut self.block[..count * len];
            p.fill(simd, rows.clone(), block);
            let (sizes, a, b) = ([p.count, ep, count], (&*block, 1, len), (&self.h[start * ep..], ep));
            match start {
                0 => multiply::<S, false>(simd, sizes, a, b, (&mut *self.rows, ep)),
                _ => multiply_onto(simd, sizes, a, b, (&mut *self.rows, ep), 1.0),
            }
            if self.z.is_empty() {
                continue;
            }
            for i in (0..len).step_by(S::LANES) {
                let mut sum = simd.splat(0.0);
                for (row, &z) in block.chunks_exact(len).zip(&self.z[rows.clone()]) {
                    sum = simd.fma(simd.load_at(row, i), simd.splat(z), sum);
                }
                simd.store_at(self.weights, i, simd.add(simd.load_at(self.weights, i), sum));
            }
        }
    }
}

/// dx of Σ Φ ∘ (H·Rᵀ + z·fᵀ)
pub struct FeatureGradient<'a> {
    /// Positions whose monomials are Φ.
    pub features: FeatureTile<'a>,
    /// H [N, ep]
    pub h: &'a [f32],
    /// z [N]; may be empty.
    pub z: &'a [f32],
    /// Columns of H, a multiple of [`PAD`].
    pub ep: usize,
    /// Rᵀ [e, L], zero past the valid positions.
    pub columns: &'a [f32],
    /// Rows of `columns`, at most ep.
    pub e: usize,
    /// f [L], zero past the valid positions.
    pub weights: &'a [f32],
    /// dx [d, L]; overwritten.
    pub dx: &'a mut [f32],
    /// Scratch memory for the gradient of the lower orders [M, L].
    pub dlower_orders: &'a mut [f32],
    /// Scratch memory [[`BLOCK`], L].
    pub gradient: &'a mut [f32],
    /// Scratch memory [[`BLOCK`], L]; not used if `parts` is empty.
    pub block: &'a mut [f32],
    /// Contribution of each order to Σ Φ ∘ (…) with factors 1/α!, per position [orders, L]. Added to; may be empty.
    pub parts: &'a mut [f32],
}

impl Task for FeatureGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (p, ep) = (self.features, self.ep);
        let len = p.positions.len;
        assert!(self.e <= ep, "{} columns of a state of {ep}", self.e);
        let dx = &mut self.dx[..p.basis.d() * len];
        dx.fill(0.0);
        let dlower_orders = &mut self.dlower_orders[..p.basis.lower_order_rows() * len];
        dlower_orders.fill(0.0);
        let mut grads = PositionGrads { dx, dlower_orders };
        for rows in p.blocks() {
            let (count, start) = (rows.len(), rows.start);
            let gradient = &mut self.gradient[..count * len];
            multiply::<S, false>(simd, [count, len, self.e], (&self.h[start * ep..], ep, 1), (self.columns, len), (&mut *gradient, len));
            if !self.z.is_empty() {
                for (row, &z) in gradient.chunks_exact_mut(len).zip(&self.z[rows.clone()]) {
                    let z = simd.splat(z);
                    for i in (0..len).step_by(S::LANES) {
                        simd.store_at(row, i, simd.fma(z, simd.load_at(self.weights, i), simd.load_at(row, i)));
                    }
                }
            }
            if !self.parts.is_empty() {
                p.basis.rows_of(rows.clone(), p.positions, self.block);
                for order in 0..p.basis.orders().len() {
                    let span = p.basis.order_range(order);
                    let part = &mut self.parts[order * len..(order + 1) * len];
                    let (from, to) = (rows.start.max(span.start), rows.end.min(span.end).max(span.start));
                    for (row, &inverse) in (from..to).zip(p.basis.inverse_factorials().iter().skip(from)) {
                        let at = (row - start) * len;
                        let (g, x) = (&gradient[at..at + len], &self.block[at..at + len]);
                        let factor = simd.splat(inverse);
                        for i in (0..len).step_by(S::LANES) {
                            let term = simd.mul(simd.mul(simd.load_at(g, i), factor), simd.load_at(x, i));
                            simd.store_at(part, i, simd.add(simd.load_at(part, i), term));
                        }
                    }
                }
            }
            if !p.factors.is_empty() {
                for (row, &factor) in gradient.chunks_exact_mut(len).zip(&p.factors[rows.clone()]) {
                    let factor = simd.splat(factor);
                    for i in (0..len).step_by(S::LANES) {
                        simd.store_at(row, i, simd.mul(simd.load_at(row, i), factor));
                    }
                }
            }
            p.basis.reverse_rows(rows, p.positions, gradient, &mut grads);
        }
        p.basis.reverse_lower_orders(p.positions, &mut grads);
    }
}

/// Writes the rows of a tile as columns; columns past `count` become zero.
pub struct Transpose<'a> {
    /// [len, stride]
    pub rows: &'a [f32],
    /// Distance between rows, at least `dim` padded to [`PAD`].
    pub stride: usize,
    /// Number of valid rows.
    pub count: usize,
    /// Values per row.
    pub dim: usize,
    /// [`dim` padded to [`PAD`], len]
    pub columns: &'a mut [f32],
    /// Rows of a tile, a multiple of [`PAD`].
    pub len: usize,
}

impl Task for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (len, padded) = (self.len, self.dim.next_multiple_of(PAD));
        assert!(len.is_multiple_of(PAD) && self.stride >= padded && self.count <= len, "{} of {len} rows of a tile", self.count);
        for column in (0..padded).step_by(16) {
            for row in (0..len).step_by(16) {
                transpose(simd, &self.rows[row * self.stride + column..], self.stride, &mut self.columns[column * len + row..], len);
            }
        }
        for row in self.columns[..padded * len].chunks_exact_mut(len) {
            row[self.count..].fill(0.0);
        }
    }
}

/// Adds columns to the first `count` rows of a tile.
pub struct AddTransposed<'a> {
    /// [`dim` padded to [`PAD`], len]
    pub columns: &'a [f32],
    /// Rows of a tile, a multiple of [`PAD`].
    pub len: usize,
    /// [count, stride]
    pub rows: &'a mut [f32],
    /// Distance between rows, at least `dim` padded to [`PAD`].
    pub stride: usize,
    /// Number of rows.
    pub count: usize,
    /// Values per row.
    pub dim: usize,
}

impl Task for AddTransposed<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (len, padded) = (self.len, self.dim.next_multiple_of(PAD));
        assert!(len.is_multiple_of(PAD) && self.stride >= padded && self.count <= len, "{} of {len} rows of a tile", self.count);
        let mut square = [0.0f32; 256];
        for column in (0..padded).step_by(16) {
            for row in (0..self.count).step_by(16) {
                transpose(simd, &self.columns[column * len + row..], len, &mut square, 16);
                let width = 16.min(self.dim - column);
                for (i, from) in (row..self.count.min(row + 16)).zip(square.chunks_exact(16)) {
                    let to = &mut self.rows[i * self.stride + column..][..width];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
