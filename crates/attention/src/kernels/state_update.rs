//! The inner loop of a step: one pass over the rows of H.

use std::ops::Range;

use crate::kernels::simd::Simd;

/// Values of H that stay in the first-level cache while several passes go over them.
const BLOCK: usize = 4096;

/// U_i += Q_iᵀ·H for every head i, then H ← m·H + K·vᵀ.
///
/// H is [N, ep], v [ep], K [at least N], Q [heads, as long as K], U [heads, ep]; ep a multiple of 16, K and Q zero behind N.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the symbols of the formula")]
pub fn update_and_read<S: Simd>(simd: S, h: &mut [f32], ep: usize, m: f32, k: &[f32], v: &[f32], q: &[f32], u: &mut [f32]) {
    let heads = u.len() / ep;
    let stride = k.len();
    // Where the registers hold the sums of whole rows, H is read and written as one stream, by each four heads. Else rows come in blocks, and only
    // the first pass over a block waits for memory.
    let rows = h.len() / ep;
    let columns = ep / S::LANES;
    let block = if columns <= vectors_of::<S>(columns, heads.min(4)) { rows } else { (BLOCK / ep).max(1) };
    for start in (0..rows).step_by(block.max(1)) {
        let end = (start + block).min(rows);
        let mut first = 0;
        while first < heads {
            let left = (heads - first).min(4);
            let together = if left == 3 { 2 } else { left };
            let update = first + together == heads;
            let mut column = 0;
            while column < ep {
                let vectors = vectors_of::<S>((ep - column) / S::LANES, together);
                let (k, q) = (&k[start..], &q[first * stride + start..]);
                let rows = Rows { h: &mut h[start * ep..end * ep], ep, column, m, k, v, q, stride, u: &mut u[first * ep..] };
                rows.some_columns(simd, vectors, together, update);
                column += vectors * S::LANES;
            }
            first += together;
        }
    }
}

/// Values of H that a token with a write rule goes over twice while they are in the first-level cache, as far as rows that are cut to
/// [`NARROWEST`] columns allow: narrower ones would be fetched by single cache lines.
const PANEL: usize = 8192;
const NARROWEST: usize = 64;

/// One token of a write rule: U_i += Q_iᵀ·H for every reader i; then H ← m·H + K·uᵀ, where `write` makes u [ep] of what the readers found, for
/// the columns that it is called with. What is written into a column depends on that column alone, so that H passes once through the cache.
///
/// H is [N, ep], K [at least N], Q [readers, as long as K], U [readers, ep]; ep a multiple of 16, K and Q zero behind N.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the symbols of the formula")]
pub fn write_and_read<S: Simd>(
    simd: S,
    h: &mut [f32],
    ep: usize,
    m: f32,
    k: &[f32],
    q: &[f32],
    found: &mut [f32],
    u: &mut [f32],
    mut write: impl FnMut(Range<usize>, &[f32], &mut [f32]),
) {
    let (readers, stride, rows) = (found.len() / ep, k.len(), h.len() / ep);
    let width = (PANEL / rows.max(1) / 16 * 16).max(NARROWEST).min(ep);
    for start in (0..ep).step_by(width) {
        let end = (start + width).min(ep);
        let mut first = 0;
        while first < readers {
            let left = (readers - first).min(4);
            let together = if left == 3 { 2 } else { left };
            let mut column = start;
            while column < end {
                let vectors = vectors_of::<S>((end - column) / S::LANES, together);
                let rows = Rows { h, ep, column, m, k, v: u, q: &q[first * stride..], stride, u: &mut found[first * ep..] };
                rows.some_columns(simd, vectors, together, false);
                column += vectors * S::LANES;
            }
            first += together;
        }
        write(start..end, found, u);
        let mut column = start;
        while column < end {
            let vectors = vectors_of::<S>((end - column) / S::LANES, 1);
            match vectors {
                1 => update::<S, 1>(simd, h, ep, column, m, k, u),
                2 => update::<S, 2>(simd, h, ep, column, m, k, u),
                4 => update::<S, 4>(simd, h, ep, column, m, k, u),
                _ => update::<S, 8>(simd, h, ep, column, m, k, u),
            }
            column += vectors * S::LANES;
        }
    }
}

/// H ← m·H + K·uᵀ, of P vectors of columns.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "constant bounds and plain indices keep every value in a register")]
fn update<S: Simd, const P: usize>(simd: S, h: &mut [f32], ep: usize, column: usize, m: f32, k: &[f32], u: &[f32]) {
    let m = simd.splat(m);
    let mut value = [simd.splat(0.0); P];
    for p in 0..P {
        value[p] = simd.load_at(u, column + p * S::LANES);
    }
    for (row, &k) in h.chunks_exact_mut(ep).zip(k) {
        let (row, k) = (&mut row[column..][..P * S::LANES], simd.splat(k));
        for p in 0..P {
            let x = simd.load_at(row, p * S::LANES);
            simd.store_at(row, p * S::LANES, simd.fma(x, m, simd.mul(k, value[p])));
        }
    }
}

/// Vectors of columns that one pass takes for so many heads, of those that are left: a power of two, so that there are about eight sums to hide
/// the latency of fma, and no more than half of the registers hold them.
#[inline(always)]
fn vectors_of<S: Simd>(left: usize, heads: usize) -> usize {
    let most = if heads == 1 { 8 } else { (S::REGISTERS / 2 / heads).min(4) };
    let left = left.min(most);
    if left == 0 { 1 } else { 1 << left.ilog2() }
}

/// Some rows of some columns for some heads.
struct Rows<'a> {
    h: &'a mut [f32],
    ep: usize,
    column: usize,
    m: f32,
    k: &'a [f32],
    v: &'a [f32],
    q: &'a [f32],
    /// From one head's row of q to the next.
    stride: usize,
    u: &'a mut [f32],
}

impl Rows<'_> {
    /// So many vectors of columns for so many heads, as [`vectors_of`] gives them.
    #[inline(always)]
    fn some_columns<S: Simd>(self, simd: S, vectors: usize, together: usize, update: bool) {
        match (vectors, together) {
            (1, 1) => self.run::<S, 1, 1, 8>(simd, update),
            (1, 2) => self.run::<S, 1, 2, 4>(simd, update),
            (1, _) => self.run::<S, 1, 4, 2>(simd, update),
            (2, 1) => self.run::<S, 2, 1, 4>(simd, update),
            (2, 2) => self.run::<S, 2, 2, 2>(simd, update),
            (2, _) => self.run::<S, 2, 4, 1>(simd, update),
            (4, 1) => self.run::<S, 4, 1, 2>(simd, update),
            (4, 2) => self.run::<S, 4, 2, 1>(simd, update),
            (4, _) => self.run::<S, 4, 4, 1>(simd, update),
            _ => self.run::<S, 8, 1, 1>(simd, update),
        }
    }

    /// P vectors of columns, A heads, U rows at a time; the last heads update the rows.
    #[inline(always)]
    fn run<S: Simd, const P: usize, const A: usize, const U: usize>(self, simd: S, update: bool) {
        match (update, self.m == 1.0) {
            (true, true) => self.pass::<S, P, A, U, true, false>(simd),
            (true, false) => self.pass::<S, P, A, U, true, true>(simd),
            (false, _) => self.pass::<S, P, A, U, false, false>(simd),
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "constant bounds and plain indices keep every accumulator in a register")]
    fn pass<S: Simd, const P: usize, const A: usize, const U: usize, const UPDATE: bool, const DECAY: bool>(self, simd: S) {
        let Rows { h, ep, column, m, k, v, q, stride, u } = self;
        let rows = h.len() / ep;
        assert!(rows <= k.len() && q.len() >= (A - 1) * stride + rows && column + P * S::LANES <= ep && v.len() >= ep);
        let m = simd.splat(m);
        let mut value = [simd.splat(0.0); P];
        for (p, value) in value.iter_mut().enumerate() {
            *value = simd.load_at(v, column + p * S::LANES);
        }
        let mut sums = [[[simd.splat(0.0); P]; A]; U];
        let (h, k, q) = (h.as_mut_ptr().wrapping_add(column), k.as_ptr(), q.as_ptr());
        let mut row = 0;
        // SAFETY: row + i < rows; the assertion holds for every index formed from it.
        unsafe {
            while row + U <= rows {
                for i in 0..U {
                    one_row::<S, P, A, UPDATE, DECAY>(
                        simd,
                        h.add((row + i) * ep),
                        *k.add(row + i),
                        q.add(row + i),
                        stride,
                        m,
                        &value,
                        &mut sums[i],
                    );
                }
                row += U;
            }
            while row < rows {
                one_row::<S, P, A, UPDATE, DECAY>(simd, h.add(row * ep), *k.add(row), q.add(row), stride, m, &value, &mut sums[0]);
                row += 1;
            }
        }
        for a in 0..A {
            for p in 0..P {
                let at = a * ep + column + p * S::LANES;
                let mut total = simd.load_at(u, at);
                for sums in &sums {
                    total = simd.add(total, sums[a][p]);
                }
                simd.store_at(u, at, total);
            }
        }
    }
}

/// P vectors of one row: sums += q·row for A heads, row ← m·row + key·value.
///
/// # Safety
/// `h` must be valid for P vectors, `q` for A values, `stride` apart.
#[inline(always)]
#[allow(clippy::too_many_arguments, clippy::needless_range_loop, reason = "as above")]
unsafe fn one_row<S: Simd, const P: usize, const A: usize, const UPDATE: bool, const DECAY: bool>(
    simd: S,
    h: *mut f32,
    key: f32,
    q: *const f32,
    stride: usize,
    m: S::V,
    value: &[S::V; P],
    sums: &mut [[S::V; P]; A],
) {
    let key = simd.splat(key);
    // Before the first store: the compiler cannot know that H and Q are apart, and would read them again after each.
    let mut queries = [key; A];
    for a in 0..A {
        // SAFETY: the caller's promise.
        queries[a] = simd.splat(unsafe { *q.add(a * stride) });
    }
    for p in 0..P {
        // SAFETY: as above.
        let x = unsafe { simd.load(h.add(p * S::LANES)) };
        for a in 0..A {
            sums[a][p] = simd.fma(queries[a], x, sums[a][p]);
        }
        if UPDATE {
            let next = if DECAY { simd.fma(x, m, simd.mul(key, value[p])) } else { simd.fma(key, value[p], x) };
            // SAFETY: as above.
            unsafe { simd.store(h.add(p * S::LANES), next) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::simd::{Isa, Task, dispatch_on};

    struct Run<'a> {
        sizes: [usize; 3],
        m: f32,
        h: &'a mut [f32],
        u: &'a mut [f32],
        written: bool,
    }

    fn number(i: usize) -> f32 {
        ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0
    }

    impl Task for Run<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let [rows, ep, heads] = self.sizes;
            let padded = rows.next_multiple_of(16);
            let k: Vec<f32> = (0..padded).map(|i| if i < rows { number(i + 1) } else { 0.0 }).collect();
            let q: Vec<f32> = (0..heads * padded).map(|i| if i % padded < rows { number(i + 2) } else { 0.0 }).collect();
            let v: Vec<f32> = (0..ep).map(|i| number(i + 3)).collect();
            if self.written {
                let mut u = vec![f32::NAN; ep];
                write_and_read(simd, self.h, ep, self.m, &k, &q, self.u, &mut u, |columns, found, u| {
                    u[columns.clone()].iter_mut().zip(columns).for_each(|(u, j)| *u = v[j] - 0.5 * found[(heads - 1) * ep + j]);
                });
            } else {
                update_and_read(simd, self.h, ep, self.m, &k, &v, &q, self.u);
            }
        }
    }

    #[test]
    fn what_is_written_depends_on_what_was_read() {
        for isa in Isa::available() {
            for (rows, ep) in [(1, 16), (7, 48), (128, 128), (150, 80), (600, 256)] {
                for (heads, m) in [(2, 0.5), (3, 1.0), (6, 0.5)] {
                    let padded = usize::next_multiple_of(rows, 16);
                    let start: Vec<f32> = (0..rows * ep).map(|i| 0.1 * number(i)).collect();
                    let (mut h, mut u) = (start.clone(), vec![0.0; heads * ep]);
                    dispatch_on(isa, Run { sizes: [rows, ep, heads], m, h: &mut h, u: &mut u, written: true });
                    for j in 0..ep {
                        let read = |head: usize| {
                            (0..rows).map(|row| number(head * padded + row + 2) as f64 * start[row * ep + j] as f64).sum::<f64>()
                        };
                        for head in 0..heads {
                            assert!((u[head * ep + j] as f64 - read(head)).abs() < 1e-4, "{} {rows} {ep} {heads}", isa.name());
                        }
                        let written = number(j + 3) as f64 - 0.5 * read(heads - 1);
                        for row in 0..rows {
                            let expected = m as f64 * start[row * ep + j] as f64 + number(row + 1) as f64 * written;
                            assert!((h[row * ep + j] as f64 - expected).abs() < 1e-4, "{} {rows} {ep} {heads}", isa.name());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_blocking_equals_the_formula() {
        for isa in Isa::available() {
            for rows in [1usize, 7, 33, 150, 300] {
                for ep in [16, 32, 48, 64, 80, 128, 144, 256] {
                    for (heads, m) in [(1, 1.0), (1, 0.5), (2, 1.0), (3, 0.5), (4, 1.0), (5, 0.5), (8, 1.0)] {
                        let padded = rows.next_multiple_of(16);
                        let start: Vec<f32> = (0..rows * ep).map(number).collect();
                        let (mut h, mut u) = (start.clone(), vec![1.0; heads * ep]);
                        dispatch_on(isa, Run { sizes: [rows, ep, heads], m, h: &mut h, u: &mut u, written: false });
                        let what = format!("{} {rows} rows of {ep}, {heads} heads, m {m}", isa.name());
                        for (i, (&found, &before)) in h.iter().zip(&start).enumerate() {
                            let expected = m * before + number(i / ep + 1) * number(i % ep + 3);
                            assert!((found - expected).abs() < 1e-6, "{what}: H at {i} is {found}, expected {expected}");
                        }
                        for (i, &found) in u.iter().enumerate() {
                            let (head, column) = (i / ep, i % ep);
                            let term = |row: usize| number(head * padded + row + 2) as f64 * start[row * ep + column] as f64;
                            let expected = 1.0 + (0..rows).map(term).sum::<f64>();
                            assert!((found as f64 - expected).abs() < 1e-4, "{what}: U at {i} is {found}, expected {expected}");
                        }
                    }
                }
            }
        }
    }
}
