//! The packed symmetric basis: every monomial x^α = Π_i x_i^{α_i} of the chosen orders |α| = n, once
//!
//! ```text
//! (q·k)^n / n! = Σ_{|α| = n} q^α · k^α / α!,   α! = Π_i α_i!
//! ```
//!
//! Rows of order n are sorted by their largest index: block j holds those whose largest index is j, and is the first
//! C(j+n−1, n−1) rows of order n−1 times x_j. So a block is a contiguous run of the order below times one coordinate, and its
//! gradient is dx_j += ⟨g_block, run⟩, g_run += x_j·g_block.
//!
//! Two layouts: one position, rows contiguous; and L positions, [rows, L], positions contiguous. The second is built in two
//! steps, so that the many rows of the highest order need never be stored at once: the lower orders [M, L], all orders below the highest,
//! and from it any run of rows.
//!
//! All loops are plain and run over contiguous values; called within [`crate::kernels::simd::dispatch`] they compile to its vectors.

use std::ops::Range;

use crate::combinatorics::{binomial, monomials};
use crate::kernels::simd::Simd;
use crate::{Error, Real};

/// More rows than this are refused: a state of that many would take gigabytes a head.
pub const MAX_ROWS: usize = 1 << 26;

/// The monomials of d variables of some orders.
#[derive(Clone, Debug)]
pub struct Basis {
    d: usize,
    orders: Vec<usize>,
    /// Rows of each of `orders`.
    order_ranges: Vec<Range<usize>>,
    /// Rows of the orders 0..p in the lower orders, p the highest.
    lower_order_ranges: Vec<Range<usize>>,
    /// Where block j of order n ≥ 1 starts within its order, at n·(d + 1) + j; block d starts at the end.
    starts: Vec<usize>,
    /// 1/α! by row.
    inverse_factorials: Vec<f32>,
}

impl Basis {
    /// The monomials of these orders, ascending, in d variables. Refuses more than [`MAX_ROWS`].
    pub fn new(d: usize, orders: &[usize]) -> Result<Basis, Error> {
        let Some(&highest) = orders.last().filter(|_| d > 0 && orders.is_sorted_by(|a, b| a < b)) else {
            return Err(Error::Shape(format!(
                "a basis needs ascending orders and at least one variable, found orders {orders:?} and d = {d}"
            )));
        };
        let total = (0..=highest).fold(0u128, |sum, n| sum.saturating_add(monomials(d, n)));
        if total > MAX_ROWS as u128 {
            return Err(Error::Shape(format!(
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

    /// d
    pub fn d(&self) -> usize {
        self.d
    }

    /// N, the rows of all orders.
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

    /// M, rows of the lower orders: all orders below the highest.
    pub fn lower_order_rows(&self) -> usize {
        self.lower_order_ranges.last().map_or(0, |span| span.end)
    }

    fn highest(&self) -> usize {
        self.orders[self.orders.len() - 1]
    }

    /// Whether the orders are 0..=p: then the lower orders is the first part of the rows.
    pub fn is_complete(&self) -> bool {
        self.orders.len() == self.highest() + 1
    }

    /// Rows of block j of order n ≥ 1 within its order; as many as the run of order n − 1 that it is made of.
    #[inline(always)]
    fn block(&self, n: usize, j: usize) -> Range<usize> {
        let at = n * (self.d + 1) + j;
        self.starts[at]..self.starts[at + 1]
    }

    /// 1/α! of each row in float64, counted anew: for references.
    pub fn wide_inverse_factorials(&self) -> Vec<f64> {
        let mut out = Vec::with_capacity(self.rows());
        // For each row of an order: 1/α!, its largest index and the power of that.
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

    /// All rows [N] at one position x [d]. `lower_orders` [M] is room, not touched where the orders are complete.
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

    /// Order n from a lower_orders that ends with order n − 1.
    #[inline(always)]
    fn next_of_one<R: Real>(&self, n: usize, x: &[R], lower_orders: &[R], out: &mut [R]) {
        if n == 1 {
            // Blocks of one row each, of the one row that order 0 has: the coordinates themselves.
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

    /// As [`Basis::of_one`], by vectors, each row times its number of `table` [N] and a_n of its order; an empty table is one of ones. `room` is that for lower
    /// orders.
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
            self.blocks(simd, n, x, lower, (&[], 1.0), own);
        }
        self.blocks(simd, p, x, lower_orders, (top_table, a(p)), top);
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

    /// Order n from lower orders that end with order n − 1, at the start of `out`. What a block writes behind its end is overwritten by the next.
    #[inline(always)]
    fn blocks<S: Simd>(&self, simd: S, n: usize, x: &[f32], lower_orders: &[f32], (table, a): (&[f32], f32), out: &mut [f32]) {
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
                    // SAFETY: i + LANES ≤ `whole`, and no slice is shorter.
                    unsafe { simd.store(out.as_mut_ptr().add(i), simd.mul(simd.load(lower.as_ptr().add(i)), x)) };
                }
            } else if fits && whole <= table.len() {
                for i in (0..whole).step_by(S::LANES) {
                    // SAFETY: as above.
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

    /// The lower_orders [M, L] of L positions x [d, L].
    #[inline(always)]
    pub fn lower_orders<R: Real>(&self, x: &[R], len: usize, lower_orders: &mut [R]) {
        if self.highest() == 0 {
            return;
        }
        lower_orders[..len].fill(R::one());
        for n in 1..self.highest() {
            let (lower, own) = lower_orders.split_at_mut(self.lower_order_ranges[n].start * len);
            let lower = &lower[self.lower_order_ranges[n - 1].start * len..];
            self.times_coordinates(n, 0..self.lower_order_ranges[n].len(), x, len, lower, own);
        }
    }

    /// Rows `rows` of order n into `out` [rows, L], from the rows `lower` of order n − 1.
    #[inline(always)]
    fn times_coordinates<R: Real>(&self, n: usize, rows: Range<usize>, x: &[R], len: usize, lower: &[R], out: &mut [R]) {
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

    /// The block of order n that holds a row.
    #[inline(always)]
    fn first_block(&self, n: usize, row: usize) -> usize {
        let starts = &self.starts[n * (self.d + 1)..(n + 1) * (self.d + 1)];
        starts.partition_point(|&start| start <= row) - 1
    }

    /// Rows `rows` of L positions into `out` [rows, L], from x [d, L] and its lower_orders [M, L].
    #[inline(always)]
    pub fn rows_of<R: Real>(&self, rows: Range<usize>, x: &[R], len: usize, lower_orders: &[R], out: &mut [R]) {
        let p = self.highest();
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
                out.copy_from_slice(&lower_orders[(at + own.start) * len..(at + own.end) * len]);
            } else {
                self.times_coordinates(n, own, x, len, &lower_orders[self.lower_order_ranges[n - 1].start * len..], out);
            }
        }
    }

    /// The reverse of [`Basis::rows_of`]: from the gradient g [rows, L] of these rows, adds to the lower orders's [M, L] and to dx [d, L].
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the same six as forward, and where the gradients go")]
    pub fn reverse_rows<R: Real>(
        &self,
        rows: Range<usize>,
        x: &[R],
        len: usize,
        lower_orders: &[R],
        g: &[R],
        dlower_orders: &mut [R],
        dx: &mut [R],
    ) {
        let p = self.highest();
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
                add(&mut dlower_orders[(at + own.start) * len..(at + own.end) * len], g);
            } else {
                let at = self.lower_order_ranges[n - 1].start * len;
                self.reverse_coordinates(n, own, x, len, &lower_orders[at..], g, &mut dlower_orders[at..], dx);
            }
        }
    }

    /// The reverse of [`Basis::lower_orders`]: adds to dx [d, L], once all rows have been added to `dlower_orders`, which is changed.
    #[inline(always)]
    pub fn reverse_lower_orders<R: Real>(&self, x: &[R], len: usize, lower_orders: &[R], dlower_orders: &mut [R], dx: &mut [R]) {
        for n in (1..self.highest()).rev() {
            let own = &self.lower_order_ranges[n];
            let (lower, g) = dlower_orders.split_at_mut(own.start * len);
            let at = self.lower_order_ranges[n - 1].start * len;
            self.reverse_coordinates(n, 0..own.len(), x, len, &lower_orders[at..], g, &mut lower[at..], dx);
        }
    }

    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the same as forward, and where the gradients go")]
    fn reverse_coordinates<R: Real>(
        &self,
        n: usize,
        rows: Range<usize>,
        x: &[R],
        len: usize,
        lower: &[R],
        g: &[R],
        dlower: &mut [R],
        dx: &mut [R],
    ) {
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

#[inline(always)]
fn add<R: Real>(to: &mut [R], from: &[R]) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to += from);
}

/// Rows of a state H [N, width] and z [N], or empty, times the monomials of m [d]; `room` has the rows of the basis and of its lower_orders.
#[inline(always)]
pub(crate) fn decay_rows(basis: &Basis, m: &[f32], h: &mut [f32], z: &mut [f32], room: &mut [f32]) {
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
