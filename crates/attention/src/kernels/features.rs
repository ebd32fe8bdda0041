//! The four steps that chunks are made of, over the positions of one tile. Monomials exist only in blocks of a few rows, [rows, L]
//! with positions contiguous, while they are in the first-level cache.
//!
//! ```text
//! absorb    H ← keep·H + Φ·R,  z ← keep·z + Φ·f          keys into the state; queries and dU into its gradient
//! read      R = Φᵀ·H,          f = Φᵀ·z                   U from the state; dV from its gradient
//! slope     dx = ∂/∂x of Σ Φ ∘ (H·Rᵀ + z·fᵀ)              dq from the state; dk from its gradient
//! ```
//!
//! Φ [N, L] are the monomials of x [d, L], times `factors` [N] on the query side (a_n/α!); R [L, ep]; f [L]; L = pitch of a tile.

use std::ops::Range;

use crate::kernels::basis::Basis;
use crate::kernels::gemm::{Rows, Strided, product, product_onto};
use crate::kernels::simd::{Simd, Task};

/// Rows of a block: a multiple of the products' blocks that leaves room for a block of H in the first-level cache.
pub const BLOCK: usize = 48;

/// The positions of one tile and their monomials of the lower orders.
#[derive(Clone, Copy)]
pub struct Points<'a> {
    basis: &'a Basis,
    /// L
    len: usize,
    /// Positions that count; behind them x is zero.
    count: usize,
    /// [d, L]
    x: &'a [f32],
    /// [M, L]
    lower_orders: &'a [f32],
    /// What multiplies each monomial [N]; empty for 1.
    factors: &'a [f32],
}

impl<'a> Points<'a> {
    /// L positions x [d, L] of a tile, of which `count` count, with their monomials of the lower orders in `lower_orders`.
    #[inline(always)]
    pub fn new<S: Simd>(
        simd: S,
        basis: &'a Basis,
        (len, count): (usize, usize),
        x: &'a [f32],
        lower_orders: &'a mut [f32],
        factors: &'a [f32],
    ) -> Points<'a> {
        simd.call(LowerOrders { basis, len, x, lower_orders: &mut *lower_orders });
        Points { basis, len, count, x, lower_orders, factors }
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = self.basis.rows();
        (0..rows).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(rows))
    }

    /// Φ of some rows.
    #[inline(always)]
    fn fill<S: Simd>(&self, simd: S, rows: Range<usize>, block: &mut [f32]) {
        self.basis.rows_of(rows.clone(), self.x, self.len, self.lower_orders, block);
        if self.factors.is_empty() {
            return;
        }
        for (row, &factor) in block.chunks_exact_mut(self.len).zip(&self.factors[rows]) {
            let factor = simd.splat(factor);
            for i in (0..row.len()).step_by(S::LANES) {
                simd.store_at(row, i, simd.mul(simd.load_at(row, i), factor));
            }
        }
    }
}

/// The monomials of the lower orders.
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
pub struct Absorb<'a> {
    pub points: Points<'a>,
    pub keep: f32,
    /// R [L, ep]
    pub rows: &'a [f32],
    pub ep: usize,
    /// f [L], zero behind the count.
    pub weights: &'a [f32],
    /// H [N, ep]
    pub h: &'a mut [f32],
    /// z [N]; empty for none.
    pub z: &'a mut [f32],
    /// [BLOCK, L]
    pub block: &'a mut [f32],
}

impl Task for Absorb<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (p, ep) = (self.points, self.ep);
        assert!(p.count <= p.len && self.rows.len() >= p.count * ep && self.h.len() >= p.basis.rows() * ep);
        for rows in p.blocks() {
            let (count, start) = (rows.len(), rows.start);
            let block = &mut self.block[..count * p.len];
            p.fill(simd, rows.clone(), block);
            let h = &mut self.h[start * ep..(start + count) * ep];
            // SAFETY: block has count rows of L ≥ p.count values, rows p.count rows of ep, h count rows of ep.
            unsafe {
                let a = Strided { at: block.as_ptr(), row: p.len, column: 1 };
                let (b, to) = (Rows { at: self.rows.as_ptr(), stride: ep }, Rows { at: h.as_mut_ptr(), stride: ep });
                product_onto(simd, [count, ep, p.count], a, b, to, self.keep);
            }
            if self.z.is_empty() {
                continue;
            }
            for (z, row) in self.z[rows].iter_mut().zip(block.chunks_exact(p.len)) {
                let mut sum = simd.splat(0.0);
                for i in (0..p.len).step_by(S::LANES) {
                    sum = simd.fma(simd.load_at(row, i), simd.load_at(self.weights, i), sum);
                }
                *z = self.keep * *z + simd.sum(sum);
            }
        }
    }
}

/// R = Φᵀ·H, f = Φᵀ·z
pub struct Read<'a> {
    pub points: Points<'a>,
    /// H [N, ep]
    pub h: &'a [f32],
    /// z [N]; empty for none.
    pub z: &'a [f32],
    pub ep: usize,
    /// R [count, ep]
    pub rows: &'a mut [f32],
    /// f [L]; written where there is z.
    pub weights: &'a mut [f32],
    /// [BLOCK, L]
    pub block: &'a mut [f32],
}

impl Task for Read<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (p, ep) = (self.points, self.ep);
        assert!(p.count <= p.len && self.rows.len() >= p.count * ep && self.h.len() >= p.basis.rows() * ep);
        if !self.z.is_empty() {
            self.weights[..p.len].fill(0.0);
        }
        for rows in p.blocks() {
            let (count, start) = (rows.len(), rows.start);
            let block = &mut self.block[..count * p.len];
            p.fill(simd, rows.clone(), block);
            // SAFETY: block has count rows of L ≥ p.count values, h count rows of ep from the block's first on, rows p.count rows of ep.
            unsafe {
                let a = Strided { at: block.as_ptr(), row: 1, column: p.len };
                let b = Rows { at: self.h[start * ep..].as_ptr(), stride: ep };
                let to = Rows { at: self.rows.as_mut_ptr(), stride: ep };
                match start {
                    0 => product::<S, false>(simd, p.count, ep, count, a, b, to),
                    _ => product_onto(simd, [p.count, ep, count], a, b, to, 1.0),
                }
            }
            if self.z.is_empty() {
                continue;
            }
            for i in (0..p.len).step_by(S::LANES) {
                let mut sum = simd.splat(0.0);
                for (row, &z) in block.chunks_exact(p.len).zip(&self.z[rows.clone()]) {
                    sum = simd.fma(simd.load_at(row, i), simd.splat(z), sum);
                }
                simd.store_at(self.weights, i, simd.add(simd.load_at(self.weights, i), sum));
            }
        }
    }
}

/// dx of Σ Φ ∘ (H·Rᵀ + z·fᵀ)
pub struct Slope<'a> {
    pub points: Points<'a>,
    /// H [N, ep]
    pub h: &'a [f32],
    /// z [N]; empty for none.
    pub z: &'a [f32],
    pub ep: usize,
    /// Rᵀ [e, L], zero behind the count.
    pub columns: &'a [f32],
    pub e: usize,
    /// f [L], zero behind the count.
    pub weights: &'a [f32],
    /// dx [d, L], written.
    pub dx: &'a mut [f32],
    /// [M, L]
    pub dlower_orders: &'a mut [f32],
    /// [BLOCK, L] each; the second is used where `parts` are wanted.
    pub gradient: &'a mut [f32],
    pub block: &'a mut [f32],
    /// What each order gives to Σ Φ ∘ (…) with factors 1/α!, by position [orders, L]; added to, empty where not wanted.
    pub parts: &'a mut [f32],
}

impl Task for Slope<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (p, ep) = (self.points, self.ep);
        assert!(self.columns.len() >= self.e * p.len && self.h.len() >= p.basis.rows() * ep && self.e <= ep && p.len.is_multiple_of(16));
        let dx = &mut self.dx[..p.basis.d() * p.len];
        dx.fill(0.0);
        let dlower_orders = &mut self.dlower_orders[..p.basis.lower_order_rows() * p.len];
        dlower_orders.fill(0.0);
        for rows in p.blocks() {
            let (count, start) = (rows.len(), rows.start);
            let gradient = &mut self.gradient[..count * p.len];
            // SAFETY: h has count rows of ep ≥ e from the block's first on, columns e rows of L, gradient count rows of L, whole vectors.
            unsafe {
                let a = Strided { at: self.h[start * ep..].as_ptr(), row: ep, column: 1 };
                let (b, to) = (Rows { at: self.columns.as_ptr(), stride: p.len }, Rows { at: gradient.as_mut_ptr(), stride: p.len });
                product::<S, false>(simd, count, p.len, self.e, a, b, to);
            }
            if !self.z.is_empty() {
                for (row, &z) in gradient.chunks_exact_mut(p.len).zip(&self.z[rows.clone()]) {
                    let z = simd.splat(z);
                    for i in (0..p.len).step_by(S::LANES) {
                        simd.store_at(row, i, simd.fma(z, simd.load_at(self.weights, i), simd.load_at(row, i)));
                    }
                }
            }
            if !self.parts.is_empty() {
                p.basis.rows_of(rows.clone(), p.x, p.len, p.lower_orders, self.block);
                for order in 0..p.basis.orders().len() {
                    let span = p.basis.order_range(order);
                    let part = &mut self.parts[order * p.len..(order + 1) * p.len];
                    let (from, to) = (rows.start.max(span.start), rows.end.min(span.end).max(span.start));
                    for (row, &inverse) in (from..to).zip(p.basis.inverse_factorials().iter().skip(from)) {
                        let at = (row - start) * p.len;
                        let (g, x) = (&gradient[at..at + p.len], &self.block[at..at + p.len]);
                        let factor = simd.splat(inverse);
                        for i in (0..p.len).step_by(S::LANES) {
                            let term = simd.mul(simd.mul(simd.load_at(g, i), factor), simd.load_at(x, i));
                            simd.store_at(part, i, simd.add(simd.load_at(part, i), term));
                        }
                    }
                }
            }
            if !p.factors.is_empty() {
                for (row, &factor) in gradient.chunks_exact_mut(p.len).zip(&p.factors[rows.clone()]) {
                    let factor = simd.splat(factor);
                    for i in (0..p.len).step_by(S::LANES) {
                        simd.store_at(row, i, simd.mul(simd.load_at(row, i), factor));
                    }
                }
            }
            p.basis.reverse_rows(rows, p.x, p.len, p.lower_orders, gradient, dlower_orders, dx);
        }
        p.basis.reverse_lower_orders(p.x, p.len, p.lower_orders, dlower_orders, dx);
    }
}

/// Rows [count, stride] as columns [dim in whole vectors, len], zero behind the count. Both have room for `len` positions.
pub struct Transpose<'a> {
    pub rows: &'a [f32],
    pub stride: usize,
    pub count: usize,
    pub dim: usize,
    pub columns: &'a mut [f32],
    pub len: usize,
}

impl Task for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (len, padded) = (self.len, self.dim.next_multiple_of(16));
        assert!(self.rows.len() >= len * self.stride && self.stride >= padded && self.columns.len() >= padded * len);
        assert!(len.is_multiple_of(16) && self.count <= len);
        for column in (0..padded).step_by(16) {
            for row in (0..len).step_by(16) {
                // SAFETY: rows has len rows of stride ≥ padded values, columns padded rows of len; both are multiples of 16.
                unsafe {
                    let from = self.rows.as_ptr().add(row * self.stride + column);
                    simd.transpose_16(from, self.stride, self.columns.as_mut_ptr().add(column * len + row), len);
                }
            }
        }
        for row in self.columns[..padded * len].chunks_exact_mut(len) {
            row[self.count..].fill(0.0);
        }
    }
}

/// Adds columns [dim in whole vectors, len] to the first `count` rows of `rows` [count, stride].
pub struct AddTransposed<'a> {
    pub columns: &'a [f32],
    pub len: usize,
    pub rows: &'a mut [f32],
    pub stride: usize,
    pub count: usize,
    pub dim: usize,
}

impl Task for AddTransposed<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (len, padded) = (self.len, self.dim.next_multiple_of(16));
        assert!(self.columns.len() >= padded * len && self.stride >= padded && self.rows.len() >= self.count * self.stride);
        assert!(len.is_multiple_of(16) && self.count <= len);
        let mut square = [0.0f32; 256];
        for column in (0..padded).step_by(16) {
            for row in (0..self.count).step_by(16) {
                // SAFETY: columns has padded rows of len values, both multiples of 16; the square has 16 rows of 16.
                unsafe { simd.transpose_16(self.columns.as_ptr().add(column * len + row), len, square.as_mut_ptr(), 16) };
                let width = 16.min(self.dim - column);
                for (i, from) in (row..self.count.min(row + 16)).zip(square.chunks_exact(16)) {
                    let to = &mut self.rows[i * self.stride + column..][..width];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                }
            }
        }
    }
}
