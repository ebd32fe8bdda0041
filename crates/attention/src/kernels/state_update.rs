//! The inner loop of a step: one pass over the rows of H.

use std::ops::Range;

use crate::kernels::simd::Simd;

/// Values of H that stay in the first-level cache while several passes go over them.
const BLOCK: usize = 4096;

/// Columns that a pass takes at most: two cache lines of each row. Measured: with whole rows of 64 the sums and values of a pass leave no register
/// free, and reads wait for each other.
const COLUMNS: usize = 32;

/// Heads that one pass serves.
const TOGETHER: usize = 4;

/// U_i += Q_iᵀ·H for every head i, then H ← m·H + K·vᵀ.
///
/// H is [N, ep], v [ep], K [at least N], Q [heads, as long as K], U [heads, ep]; ep a multiple of 16, K and Q zero behind N.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the symbols of the formula")]
pub fn update_and_read<S: Simd>(simd: S, h: &mut [f32], ep: usize, m: f32, k: &[f32], v: &[f32], q: &[f32], u: &mut [f32]) {
    let (heads, stride, rows) = (u.len() / ep, k.len(), h.len() / ep);
    // Where one pass serves all heads, H goes by as one stream. Else rows come in blocks, and only the first pass over a block waits for memory.
    let block = if heads_of(heads) == heads { rows } else { (BLOCK / ep).max(1) };
    for start in (0..rows).step_by(block.max(1)) {
        let end = (start + block).min(rows);
        let mut first = 0;
        while first < heads {
            let together = heads_of(heads - first);
            let (k, q) = (&k[start..], &q[first * stride + start..]);
            let rows = Rows { h: &mut h[start * ep..end * ep], ep, m, k, v, q, stride, u: &mut u[first * ep..] };
            rows.columns(simd, 0..ep, together, first + together == heads);
            first += together;
        }
    }
}

/// Values of H that a token with a write rule goes over twice while they are in the first-level cache, as far as rows that are cut to
/// [`COLUMNS`] allow: narrower ones would be fetched by single cache lines.
const PANEL: usize = 4096;

/// One token of a write rule: U_i += Q_iᵀ·H for every reader i, of which the last is the key; then H ← m·H + K·uᵀ, u = β·(v − m·U_last) in the place of
/// v. What is written into a column depends on that column alone, so that H passes once through the cache.
///
/// H is [N, ep], v [ep], K [at least N], Q [readers, as long as K], U [readers, ep]; ep a multiple of 16, K and Q zero behind N.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the symbols of the formula")]
pub fn write_and_read<S: Simd>(
    simd: S,
    h: &mut [f32],
    ep: usize,
    m: f32,
    k: &[f32],
    (v, beta): (&mut [f32], f32),
    q: &[f32],
    u: &mut [f32],
) {
    let (readers, stride, rows) = (u.len() / ep, k.len(), h.len() / ep);
    let (decay, strength) = (simd.splat(m), simd.splat(beta));
    let width = (PANEL / rows.max(1) / 16 * 16).max(COLUMNS).min(ep);
    for start in (0..ep).step_by(width) {
        let columns = start..(start + width).min(ep);
        let mut first = 0;
        while first < readers {
            let together = heads_of(readers - first);
            let rows = Rows { h, ep, m, k, v, q: &q[first * stride..], stride, u: &mut u[first * ep..] };
            rows.columns(simd, columns.clone(), together, false);
            first += together;
        }
        for at in columns.clone().step_by(S::LANES) {
            let left = simd.sub(simd.load_at(v, at), simd.mul(decay, simd.load_at(u, (readers - 1) * ep + at)));
            simd.store_at(v, at, simd.mul(strength, left));
        }
        Rows { h, ep, m, k, v, q: &[], stride, u: &mut [] }.columns(simd, columns, 0, true);
    }
}

/// Heads of those that are left that the next pass serves.
#[inline(always)]
fn heads_of(left: usize) -> usize {
    let left = left.min(TOGETHER);
    if left == 3 { 2 } else { left }
}

/// Vectors of columns that one pass takes for so many heads, of those that are left: a power of two, no more than [`COLUMNS`], and no more than half of
/// the registers hold sums.
#[inline(always)]
fn vectors_of<S: Simd>(left: usize, heads: usize) -> usize {
    let left = left.min(COLUMNS / S::LANES).min(S::REGISTERS / 2 / heads.max(1));
    if left == 0 { 1 } else { 1 << left.ilog2() }
}

/// Some rows for some heads.
struct Rows<'a> {
    h: &'a mut [f32],
    ep: usize,
    m: f32,
    k: &'a [f32],
    v: &'a [f32],
    q: &'a [f32],
    /// From one head's row of q to the next.
    stride: usize,
    u: &'a mut [f32],
}

impl Rows<'_> {
    /// Some columns for 0, 1, 2 or 4 heads, by as many vectors as [`vectors_of`] gives; the last heads update the rows. So many rows at a time that
    /// there are about eight sums to hide the latency of fma, four where registers are few.
    #[inline(always)]
    fn columns<S: Simd>(mut self, simd: S, columns: Range<usize>, heads: usize, update: bool) {
        let mut at = columns.start;
        while at < columns.end {
            let vectors = vectors_of::<S>((columns.end - at) / S::LANES, heads);
            match (vectors, heads, S::REGISTERS < 32) {
                (1, 0, _) => self.run::<S, 1, 0, 4>(simd, at, update),
                (2, 0, _) => self.run::<S, 2, 0, 2>(simd, at, update),
                (_, 0, _) => self.run::<S, 4, 0, 1>(simd, at, update),
                (1, 1, true) => self.run::<S, 1, 1, 4>(simd, at, update),
                (1, 1, false) => self.run::<S, 1, 1, 8>(simd, at, update),
                (2, 1, true) => self.run::<S, 2, 1, 2>(simd, at, update),
                (2, 1, false) => self.run::<S, 2, 1, 4>(simd, at, update),
                (_, 1, _) => self.run::<S, 4, 1, 1>(simd, at, update),
                (1, 2, _) => self.run::<S, 1, 2, 4>(simd, at, update),
                (2, 2, _) => self.run::<S, 2, 2, 2>(simd, at, update),
                (_, 2, _) => self.run::<S, 4, 2, 1>(simd, at, update),
                (1, ..) => self.run::<S, 1, 4, 2>(simd, at, update),
                _ => self.run::<S, 2, 4, 1>(simd, at, update),
            }
            at += vectors * S::LANES;
        }
    }

    /// P vectors of columns, A heads, U rows at a time.
    #[inline(always)]
    fn run<S: Simd, const P: usize, const A: usize, const U: usize>(&mut self, simd: S, column: usize, update: bool) {
        match (update, self.m == 1.0) {
            (true, true) => self.pass::<S, P, A, U, true, false>(simd, column),
            (true, false) => self.pass::<S, P, A, U, true, true>(simd, column),
            (false, _) => self.pass::<S, P, A, U, false, false>(simd, column),
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "constant bounds and plain indices keep every accumulator in a register")]
    fn pass<S: Simd, const P: usize, const A: usize, const U: usize, const UPDATE: bool, const DECAY: bool>(
        &mut self,
        simd: S,
        column: usize,
    ) {
        let Rows { h, ep, m, k, v, q, stride, u } = self;
        let (ep, stride, rows) = (*ep, *stride, h.len() / *ep);
        let reads = A == 0 || q.len() >= (A - 1) * stride + rows;
        assert!(rows <= k.len() && reads && column + P * S::LANES <= ep && v.len() >= ep, "rows and columns of H");
        let m = simd.splat(*m);
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

/// Σ_i q_i·z_i with four accumulators; then z ← m·z + K, where `UPDATE`. 0 where z is empty.
#[inline(always)]
pub fn read_sums<S: Simd, const UPDATE: bool>(simd: S, q: &[f32], z: &mut [f32], m: f32, k: &[f32]) -> f32 {
    assert!(q.len() >= z.len() && k.len() >= z.len(), "a number of Q and K for each of z");
    let (mut sums, m, size) = ([simd.splat(0.0); 4], simd.splat(m), 4 * S::LANES);
    let whole = z.len() / size * size;
    for start in (0..whole).step_by(size) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            // SAFETY: a vector ends no later than `whole`, which no slice is shorter than.
            unsafe {
                let at = start + lane * S::LANES;
                let x = simd.load(z.as_ptr().add(at));
                *sum = simd.fma(simd.load(q.as_ptr().add(at)), x, *sum);
                if UPDATE {
                    simd.store(z.as_mut_ptr().add(at), simd.fma(x, m, simd.load(k.as_ptr().add(at))));
                }
            }
        }
    }
    for (at, sum) in (whole..z.len()).step_by(S::LANES).zip(&mut sums) {
        let x = simd.load_at(z, at);
        *sum = simd.fma(simd.load_at(&q[..z.len()], at), x, *sum);
        if UPDATE {
            simd.store_at(z, at, simd.fma(x, m, simd.load_at(k, at)));
        }
    }
    simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])))
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

    const BETA: f32 = 0.7;

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
            let mut v: Vec<f32> = (0..ep).map(|i| number(i + 3)).collect();
            if self.written {
                write_and_read(simd, self.h, ep, self.m, &k, (&mut v, BETA), &q, self.u);
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
                        let written = BETA as f64 * (number(j + 3) as f64 - m as f64 * read(heads - 1));
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

    struct Sums<'a>(&'a [f32], &'a mut [f32], &'a [f32], bool);

    impl Task for Sums<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> f32 {
            let Sums(q, z, k, update) = self;
            if update { read_sums::<S, true>(simd, q, z, 0.5, k) } else { read_sums::<S, false>(simd, q, z, 0.5, k) }
        }
    }

    #[test]
    fn sums_are_read_before_they_change() {
        for isa in Isa::available() {
            for n in [0usize, 1, 7, 16, 33, 64, 150] {
                // Behind z lies what must not count.
                let (q, k): (Vec<f32>, Vec<f32>) = (0..n + 16).map(|i| (number(i), number(i + 5))).unzip();
                let start: Vec<f32> = (0..n).map(|i| number(i + 9)).collect();
                let expected: f64 = (0..n).map(|i| q[i] as f64 * start[i] as f64).sum();
                for update in [false, true] {
                    let mut z = start.clone();
                    let found = dispatch_on(isa, Sums(&q, &mut z, &k, update));
                    assert!((found as f64 - expected).abs() < 1e-4, "{} {n}", isa.name());
                    for (i, &z) in z.iter().enumerate() {
                        let after = if update { 0.5 * start[i] + k[i] } else { start[i] };
                        assert!((z - after).abs() < 1e-6, "{} {n} at {i}", isa.name());
                    }
                }
            }
        }
    }
}
