//! The packed symmetric basis: every monomial x^α = Π_i x_i^{α_i} of the chosen orders |α| = n, once.
//!
//! ```text
//! (q·k)^n / n! = Σ_{|α| = n} q^α · k^α / α!,   α! = Π_i α_i!
//! ```
//!
//! Rows of order n are sorted by their largest index. Block j contains the rows whose largest index is j. It equals the first C(j+n−1, n−1) rows of
//! order n−1 times x_j. A block is therefore a contiguous run of the order below times one coordinate, and its gradient is
//! dx_j += ⟨g_block, run⟩, g_run += x_j·g_block.
//!
//! There are two layouts: one position with contiguous rows, and L positions [rows, L] with contiguous positions. The second is computed in two steps, so
//! the many rows of the highest order are never stored at once: first the lower orders [M, L], all orders below the highest, then any run of rows.
//!
//! The loops run over contiguous values. Within [`crate::simd::dispatch`] the compiler vectorises them for the instruction set.

use std::ops::Range;

use crate::combinatorics::{binomial, monomials};
use crate::simd::Simd;
use crate::{Error, Real};

/// Maximum number of rows of a basis. A state with more would need gigabytes per head.
pub const MAX_ROWS: usize = 1 << 26;

/// The monomials of some orders in d variables.
#[derive(Clone, Debug)]
pub struct Basis {
    d: usize,
    orders: Vec<usize>,
    /// Rows of each of `orders`.
    order_ranges: Vec<Range<usize>>,
    /// Rows of each of the orders 0..p within the lower orders; p is the highest order.
    lower_order_ranges: Vec<Range<usize>>,
    /// First row of block j of order n ≥ 1 within its order, at index n·(d + 1) + j. Block d starts at the end of the order.
    starts: Vec<usize>,
    /// 1/α! of each row.
    inverse_factorials: Vec<f32>,
}

impl Basis {
    /// The monomials of these ascending orders in d variables.
    ///
    /// # Errors
    /// If there are no orders, d is 0, or the orders up to the highest have more than [`MAX_ROWS`] monomials.
    pub fn new(d: usize, orders: &[usize]) -> Result<Basis, Error> {
        let Some(&highest) = orders.last().filter(|_| d > 0 && orders.is_sorted_by(|a, b| a < b)) else {
            return Err(Error::Basis(format!(
                "a basis needs ascending orders and at least one variable, found orders {orders:?} and d = {d}"
            )));
        };
        let total = (0..=highest).fold(0u128, |sum, n| sum.saturating_add(monomials(d, n)));
        if total > MAX_ROWS as u128 {
            return Err(Error::Basis(format!(
                "orders up to {highest} at head dimension {d} have {total} monomials, more than {MAX_ROWS}: take lower orders, or keep keys and values instead of a state"
            )));
        }
        let consecutive = |orders: &mut dyn Iterator<Item = usize>| {
            let mut start = 0;
            orders
                .map(|n| {
                    let span = start..start + monomials(d, n) as usize;
                    start = span.end;
                    span
                })
                .collect::<Vec<_>>()
        };
        let order_ranges = consecutive(&mut orders.iter().copied());
        let lower_order_ranges = consecutive(&mut (0..highest));
        // Monomials of order n in the variables below j.
        let start = |n: usize, j: usize| if n == 0 || j == 0 { 0 } else { binomial(j + n - 1, n) as usize };
        let starts = (0..=highest).flat_map(|n| (0..=d).map(move |j| start(n, j))).collect();
        let mut basis = Basis { d, orders: orders.to_vec(), order_ranges, lower_order_ranges, starts, inverse_factorials: Vec::new() };
        basis.inverse_factorials = basis.wide_inverse_factorials().into_iter().map(|x| x as f32).collect();
        Ok(basis)
    }

    /// d, the number of variables.
    pub fn d(&self) -> usize {
        self.d
    }

    /// N, the number of rows of all orders.
    pub fn rows(&self) -> usize {
        self.order_ranges.last().map_or(0, |span| span.end)
    }

    /// The orders, ascending.
    pub fn orders(&self) -> &[usize] {
        &self.orders
    }

    /// Rows of the i-th of the orders.
    pub fn order_range(&self, i: usize) -> Range<usize> {
        self.order_ranges[i].clone()
    }

    /// 1/α! of each row.
    pub fn inverse_factorials(&self) -> &[f32] {
        &self.inverse_factorials
    }

    /// M, the number of rows of all orders below the highest.
    pub fn lower_order_rows(&self) -> usize {
        self.lower_order_ranges.last().map_or(0, |span| span.end)
    }

    fn highest(&self) -> usize {
        self.orders[self.orders.len() - 1]
    }

    /// Whether the orders are 0..=p. Then the lower orders are the first M rows.
    pub fn is_complete(&self) -> bool {
        self.orders.len() == self.highest() + 1
    }

    /// Rows of block j of order n ≥ 1 within its order. Their number is the length of the run of order n − 1 that is multiplied by x_j.
    #[inline(always)]
    fn block(&self, n: usize, j: usize) -> Range<usize> {
        let at = n * (self.d + 1) + j;
        self.starts[at]..self.starts[at + 1]
    }

    /// 1/α! of each row in float64, computed on each call.
    pub fn wide_inverse_factorials(&self) -> Vec<f64> {
        let mut out = Vec::with_capacity(self.rows());
        // For each row of an order: 1/α!, its largest index and the power of that index.
        let mut lower: Vec<(f64, usize, usize)> = vec![(1.0, usize::MAX, 0)];
        for n in 0..=self.highest() {
            if n > 0 {
                let mut next = Vec::with_capacity(monomials(self.d, n) as usize);
                for j in 0..self.d {
                    for &(inverse, largest, power) in &lower[..self.block(n, j).len()] {
                        let power = if largest == j { power + 1 } else { 1 };
                        next.push((inverse / power as f64, j, power));
                    }
                }
                lower = next;
            }
            if self.orders.contains(&n) {
                out.extend(lower.iter().map(|row| row.0));
            }
        }
        out
    }

    /// All rows [N] at one position x [d]. `lower_orders` [M] is scratch memory; it is not used if the orders are complete.
    #[inline(always)]
    pub fn of_one<R: Real>(&self, x: &[R], lower_orders: &mut [R], out: &mut [R]) {
        let (m, p) = (self.lower_order_rows(), self.highest());
        let out = &mut out[..self.rows()];
        if p == 0 {
            out.fill(R::one());
            return;
        }
        if self.is_complete() {
            let (lower_orders, top) = out.split_at_mut(m);
            self.lower_orders_of_one(x, lower_orders);
            self.next_of_one(p, x, lower_orders, top);
            return;
        }
        let lower_orders = &mut lower_orders[..m];
        self.lower_orders_of_one(x, lower_orders);
        for (&n, span) in self.orders.iter().zip(&self.order_ranges) {
            let to = &mut out[span.clone()];
            if n < p {
                to.copy_from_slice(&lower_orders[self.lower_order_ranges[n].clone()])
            } else {
                self.next_of_one(p, x, lower_orders, to)
            }
        }
    }

    #[inline(always)]
    fn lower_orders_of_one<R: Real>(&self, x: &[R], lower_orders: &mut [R]) {
        lower_orders[0] = R::one();
        for n in 1..self.highest() {
            let (lower, own) = lower_orders.split_at_mut(self.lower_order_ranges[n].start);
            self.next_of_one(n, x, lower, own);
        }
    }

    /// Order n from lower orders that end with order n − 1.
    #[inline(always)]
    fn next_of_one<R: Real>(&self, n: usize, x: &[R], lower_orders: &[R], out: &mut [R]) {
        if n == 1 {
            // Each block is one row: the coordinate times the constant monomial.
            out[..self.d].copy_from_slice(&x[..self.d]);
            return;
        }
        let lower = &lower_orders[self.lower_order_ranges[n - 1].clone()];
        for (j, &x) in x[..self.d].iter().enumerate() {
            let block = self.block(n, j);
            for (out, &lower) in out[block.clone()].iter_mut().zip(&lower[..block.len()]) {
                *out = lower * x;
            }
        }
    }

    /// [`Basis::of_one`] with explicit vectors. Each row is multiplied by its entry of `table` [N] and by a_n of its order; an empty table disables both
    /// factors. `room` [M] is scratch memory for the lower orders.
    #[inline(always)]
    pub fn scaled_of_one<S: Simd>(
        &self,
        simd: S,
        x: &[f32],
        (table, a): (&[f32], impl Fn(usize) -> f32),
        room: &mut [f32],
        out: &mut [f32],
    ) {
        let (m, p, complete) = (self.lower_order_rows(), self.highest(), self.is_complete());
        let (below, top) = out[..self.rows()].split_at_mut(self.order_ranges[self.orders.len() - 1].start);
        let top_table = table.get(below.len()..).unwrap_or_default();
        let lower_orders = if complete { &mut *below } else { &mut room[..m] };
        if let Some(first) = lower_orders.first_mut() {
            *first = 1.0;
        }
        for n in 1..p {
            let (lower, own) = lower_orders.split_at_mut(self.lower_order_ranges[n].start);
            self.vector_blocks(simd, (n, x), lower, (&[], 1.0), own);
        }
        self.vector_blocks(simd, (p, x), lower_orders, (top_table, a(p)), top);
        for (&n, range) in self.orders.iter().zip(&self.order_ranges).take(self.orders.len() - 1) {
            if !complete {
                below[range.clone()].copy_from_slice(&room[self.lower_order_ranges[n].clone()]);
            }
            if let Some(table) = table.get(range.clone()) {
                let a = a(n);
                below[range.clone()].iter_mut().zip(table).for_each(|(out, &c)| *out *= c * a);
            }
        }
    }

    /// Order n from lower orders that end with order n − 1, at the start of `out`. A block may write past its end; the next block overwrites these values.
    #[inline(always)]
    fn vector_blocks<S: Simd>(&self, simd: S, (n, x): (usize, &[f32]), lower_orders: &[f32], (table, a): (&[f32], f32), out: &mut [f32]) {
        let factor = simd.splat(a);
        if n < 2 {
            let all = if n == 0 { 1 } else { self.d };
            out[..all].iter_mut().zip(x).for_each(|(out, &x)| *out = if n == 0 { 1.0 } else { x });
            out[..all].iter_mut().zip(table).for_each(|(out, &c)| *out *= c * a);
            return;
        }
        let lower = &lower_orders[self.lower_order_ranges[n - 1].clone()];
        for (j, &x) in x[..self.d].iter().enumerate() {
            let (block, x) = (self.block(n, j), simd.splat(x));
            let (out, table) = (&mut out[block.start..], table.get(block.start..).unwrap_or_default());
            let whole = block.len().next_multiple_of(S::LANES);
            let fits = whole <= lower.len().min(out.len());
            if fits && table.is_empty() {
                for i in (0..whole).step_by(S::LANES) {
                    // SAFETY: i + LANES ≤ `whole` ≤ the lengths of `lower` and `out`.
                    unsafe { simd.store(out.as_mut_ptr().add(i), simd.mul(simd.load(lower.as_ptr().add(i)), x)) };
                }
            } else if fits && whole <= table.len() {
                for i in (0..whole).step_by(S::LANES) {
                    // SAFETY: i + LANES ≤ `whole` ≤ the lengths of `lower`, `out` and `table`.
                    unsafe {
                        let (row, c) = (simd.mul(simd.load(lower.as_ptr().add(i)), x), simd.load(table.as_ptr().add(i)));
                        simd.store(out.as_mut_ptr().add(i), simd.mul(row, simd.mul(c, factor)));
                    }
                }
            } else {
                for i in (0..block.len()).step_by(S::LANES) {
                    let row = simd.mul(simd.load_at(lower, i), x);
                    let row = if table.is_empty() { row } else { simd.mul(row, simd.mul(simd.load_at(table, i), factor)) };
                    simd.store_at(out, i, row);
                }
            }
        }
    }

    /// Computes the lower orders [M, L] of L positions x [d, L].
    #[inline(always)]
    pub fn lower_orders<R: Real>(&self, x: &[R], len: usize, lower_orders: &mut [R]) {
        if self.highest() == 0 {
            return;
        }
        lower_orders[..len].fill(R::one());
        for n in 1..self.highest() {
            let (lower_orders, own) = lower_orders.split_at_mut(self.lower_order_ranges[n].start * len);
            self.times_coordinates(n, 0..self.lower_order_ranges[n].len(), Positions { x, len, lower_orders }, own);
        }
    }

    /// Rows `rows` of order n into `out` [rows, L], from lower orders that contain order n − 1.
    #[inline(always)]
    fn times_coordinates<R: Real>(&self, n: usize, rows: Range<usize>, positions: Positions<R>, out: &mut [R]) {
        let Positions { x, len, lower_orders } = positions;
        let lower = &lower_orders[self.lower_order_ranges[n - 1].start * len..];
        let mut j = self.first_block(n, rows.start);
        let mut row = rows.start;
        while row < rows.end {
            let block = self.block(n, j);
            let end = block.end.min(rows.end);
            let x = &x[j * len..(j + 1) * len];
            let from = lower[(row - block.start) * len..(end - block.start) * len].chunks_exact(len);
            let to = out[(row - rows.start) * len..(end - rows.start) * len].chunks_exact_mut(len);
            for (to, from) in to.zip(from) {
                for ((to, &from), &x) in to.iter_mut().zip(from).zip(x) {
                    *to = from * x;
                }
            }
            (row, j) = (end, j + 1);
        }
    }

    /// The block of order n that contains a row.
    #[inline(always)]
    fn first_block(&self, n: usize, row: usize) -> usize {
        let starts = &self.starts[n * (self.d + 1)..(n + 1) * (self.d + 1)];
        starts.partition_point(|&start| start <= row) - 1
    }

    /// Rows `rows` of L positions into `out` [rows, L].
    #[inline(always)]
    pub fn rows_of<R: Real>(&self, rows: Range<usize>, positions: Positions<R>, out: &mut [R]) {
        let (p, len) = (self.highest(), positions.len);
        for (&n, span) in self.orders.iter().zip(&self.order_ranges) {
            let (from, to) = (rows.start.max(span.start), rows.end.min(span.end));
            if from >= to {
                continue;
            }
            let out = &mut out[(from - rows.start) * len..(to - rows.start) * len];
            let own = from - span.start..to - span.start;
            if p == 0 {
                out.fill(R::one());
            } else if n < p {
                let at = self.lower_order_ranges[n].start;
                out.copy_from_slice(&positions.lower_orders[(at + own.start) * len..(at + own.end) * len]);
            } else {
                self.times_coordinates(n, own, positions, out);
            }
        }
    }

    /// The backward pass of [`Basis::rows_of`]: adds the gradients of the lower orders and of x, given the gradient g [rows, L] of these rows.
    #[inline(always)]
    pub fn reverse_rows<R: Real>(&self, rows: Range<usize>, positions: Positions<R>, g: &[R], grads: &mut PositionGrads<R>) {
        let (p, len) = (self.highest(), positions.len);
        if p == 0 {
            return;
        }
        for (&n, span) in self.orders.iter().zip(&self.order_ranges) {
            let (from, to) = (rows.start.max(span.start), rows.end.min(span.end));
            if from >= to {
                continue;
            }
            let g = &g[(from - rows.start) * len..(to - rows.start) * len];
            let own = from - span.start..to - span.start;
            if n < p {
                let at = self.lower_order_ranges[n].start;
                add(&mut grads.dlower_orders[(at + own.start) * len..(at + own.end) * len], g);
            } else {
                self.reverse_coordinates(n, own, positions, g, grads);
            }
        }
    }

    /// The backward pass of [`Basis::lower_orders`]: adds the gradient of x, after [`Basis::reverse_rows`] of all rows. Overwrites `dlower_orders`.
    #[inline(always)]
    pub fn reverse_lower_orders<R: Real>(&self, positions: Positions<R>, grads: &mut PositionGrads<R>) {
        for n in (1..self.highest()).rev() {
            let own = &self.lower_order_ranges[n];
            let (dlower_orders, g) = grads.dlower_orders.split_at_mut(own.start * positions.len);
            self.reverse_coordinates(n, 0..own.len(), positions, g, &mut PositionGrads { dx: &mut *grads.dx, dlower_orders });
        }
    }

    /// The backward pass of [`Basis::times_coordinates`].
    #[inline(always)]
    fn reverse_coordinates<R: Real>(&self, n: usize, rows: Range<usize>, positions: Positions<R>, g: &[R], grads: &mut PositionGrads<R>) {
        let Positions { x, len, lower_orders } = positions;
        let PositionGrads { dx, dlower_orders } = grads;
        let at = self.lower_order_ranges[n - 1].start * len;
        let (lower, dlower) = (&lower_orders[at..], &mut dlower_orders[at..]);
        let mut j = self.first_block(n, rows.start);
        let mut row = rows.start;
        while row < rows.end {
            let block = self.block(n, j);
            let end = block.end.min(rows.end);
            let (x, dx) = (&x[j * len..(j + 1) * len], &mut dx[j * len..(j + 1) * len]);
            let run = (row - block.start) * len..(end - block.start) * len;
            let from = lower[run.clone()].chunks_exact(len).zip(dlower[run].chunks_exact_mut(len));
            let g = g[(row - rows.start) * len..(end - rows.start) * len].chunks_exact(len);
            for (g, (lower, dlower)) in g.zip(from) {
                for ((((&g, &lower), dlower), &x), dx) in g.iter().zip(lower).zip(dlower).zip(x).zip(&mut *dx) {
                    *dx += g * lower;
                    *dlower += g * x;
                }
            }
            (row, j) = (end, j + 1);
        }
    }
}

/// L positions and their monomials of the lower orders, see [`Basis::lower_orders`].
#[derive(Clone, Copy, Debug)]
pub struct Positions<'a, R> {
    /// x [d, L]
    pub x: &'a [R],
    /// L
    pub len: usize,
    /// [M, L]
    pub lower_orders: &'a [R],
}

/// Gradients of [`Positions`].
#[derive(Debug)]
pub struct PositionGrads<'a, R> {
    /// Gradient of x [d, L].
    pub dx: &'a mut [R],
    /// Gradient of the lower orders [M, L].
    pub dlower_orders: &'a mut [R],
}

#[inline(always)]
fn add<R: Real>(to: &mut [R], from: &[R]) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to += from);
}

/// Multiplies the rows of a state H [N, width] and of z [N] by the monomials of m [d]. z may be empty. `room` [N + M] is scratch memory.
#[inline(always)]
pub fn decay_rows(basis: &Basis, m: &[f32], h: &mut [f32], z: &mut [f32], room: &mut [f32]) {
    let (rows, lower_orders) = room.split_at_mut(basis.rows());
    basis.of_one(m, lower_orders, rows);
    let width = h.len() / basis.rows();
    for (h, m) in h.chunks_exact_mut(width).zip(&*rows) {
        h.iter_mut().for_each(|h| *h *= m);
    }
    z.iter_mut().zip(&*rows).for_each(|(z, m)| *z *= m);
}

#[cfg(test)]
mod tests;
