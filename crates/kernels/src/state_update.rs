//! One token of a recurrent state: read H with the queries, then update it. The inner loop of decoding with polynomial kernels.

use std::ops::Range;

use crate::simd::Simd;

/// Values of H that stay in the first-level cache while several passes read them.
const CACHED_VALUES: usize = 4096;

/// Maximum number of columns of a pass: two cache lines of each row. Measured: with whole rows of 64 columns the sums and values of a pass use all
/// registers, and loads wait for each other.
const MAX_PASS_COLUMNS: usize = 32;

/// Maximum number of heads of a pass.
const MAX_PASS_HEADS: usize = 4;

/// A recurrent state H [N, ep] and the features of one token.
///
/// ep is a multiple of 16. `k` and the rows of `q` may be longer than N.
///
/// ```
/// use termwise_kernels::simd::{Simd, Task, dispatch};
/// use termwise_kernels::state_update::StateUpdate;
///
/// struct Step<'a> {
///     h: &'a mut [f32],
///     u: &'a mut [f32],
/// }
///
/// impl Task for Step<'_> {
///     type Output = ();
///     #[inline(always)]
///     fn run<S: Simd>(self, simd: S) {
///         let (k, q, v) = ([2.0, 3.0], [1.0, 10.0], [1.0; 16]);
///         StateUpdate { h: self.h, ep: 16, decay: 0.5, k: &k, q: &q, u: self.u }.add(simd, &v);
///     }
/// }
///
/// let (mut h, mut u) = (vec![4.0; 2 * 16], vec![0.0; 16]);
/// dispatch(Step { h: &mut h, u: &mut u });
/// assert_eq!((u[0], h[0], h[16]), (44.0, 4.0, 5.0));
/// ```
pub struct StateUpdate<'a> {
    /// H [N, ep]
    pub h: &'a mut [f32],
    /// Columns of H, padded to whole vectors.
    pub ep: usize,
    /// m, the factor of the previous state.
    pub decay: f32,
    /// Features K of the key [at least N].
    pub k: &'a [f32],
    /// Features Q of the queries [heads, length of k].
    pub q: &'a [f32],
    /// Results U [heads, ep]; Qᵀ·H is added.
    pub u: &'a mut [f32],
}

impl StateUpdate<'_> {
    /// Linear attention: U_i += Q_iᵀ·H for every head i, then H ← m·H + K·vᵀ, with v [ep].
    ///
    /// # Panics
    /// If a slice is too short.
    #[inline(always)]
    pub fn add<S: Simd>(self, simd: S, v: &[f32]) {
        let StateUpdate { h, ep, decay, k, q, u } = self;
        let (heads, stride, rows) = (u.len() / ep, k.len(), h.len() / ep);
        // If one pass serves all heads, H is read as one stream. Otherwise rows are processed in blocks, and only the first pass over a block waits for
        // memory.
        let block = if heads_of_pass(heads) == heads { rows } else { (CACHED_VALUES / ep).max(1) };
        for start in (0..rows).step_by(block.max(1)) {
            let end = (start + block).min(rows);
            let mut first = 0;
            while first < heads {
                let together = heads_of_pass(heads - first);
                let (k, q) = (&k[start..], &q[first * stride + start..]);
                let pass = StatePass { h: &mut h[start * ep..end * ep], ep, decay, k, v, q, stride, u: &mut u[first * ep..] };
                pass.columns(simd, 0..ep, together, first + together == heads);
                first += together;
            }
        }
    }

    /// Delta rule: U_i += Q_iᵀ·H for every reader i, of which the last is the key. Then H ← m·H + K·uᵀ with u = β·(v − m·U_last), which replaces v [ep].
    ///
    /// A column of the update depends on the same column of H only, so H is loaded into the cache once.
    ///
    /// # Panics
    /// If a slice is too short.
    #[inline(always)]
    pub fn delta_rule<S: Simd>(self, simd: S, v: &mut [f32], beta: f32) {
        let StateUpdate { h, ep, decay, k, q, u } = self;
        let (readers, stride, rows) = (u.len() / ep, k.len(), h.len() / ep);
        let (m, beta) = (simd.splat(decay), simd.splat(beta));
        // A panel is read and then updated within the first-level cache, but has at least MAX_PASS_COLUMNS columns: fewer would load single cache lines.
        let width = (CACHED_VALUES / rows.max(1) / 16 * 16).max(MAX_PASS_COLUMNS).min(ep);
        for start in (0..ep).step_by(width) {
            let columns = start..(start + width).min(ep);
            let mut first = 0;
            while first < readers {
                let together = heads_of_pass(readers - first);
                let pass = StatePass { h, ep, decay, k, v, q: &q[first * stride..], stride, u: &mut u[first * ep..] };
                pass.columns(simd, columns.clone(), together, false);
                first += together;
            }
            for at in columns.clone().step_by(S::LANES) {
                let error = simd.sub(simd.load_at(v, at), simd.mul(m, simd.load_at(u, (readers - 1) * ep + at)));
                simd.store_at(v, at, simd.mul(beta, error));
            }
            StatePass { h, ep, decay, k, v, q: &[], stride, u: &mut [] }.columns(simd, columns, 0, true);
        }
    }
}

/// Number of heads that the next pass serves, of `left` remaining: 0, 1, 2 or 4.
#[inline(always)]
fn heads_of_pass(left: usize) -> usize {
    let left = left.min(MAX_PASS_HEADS);
    if left == 3 { 2 } else { left }
}

/// Vectors of columns that one pass processes for this number of heads, of `left` remaining: a power of two, at most [`MAX_PASS_COLUMNS`] columns, with
/// sums in at most half of the registers.
#[inline(always)]
fn vectors_of_pass<S: Simd>(left: usize, heads: usize) -> usize {
    let left = left.min(MAX_PASS_COLUMNS / S::LANES).min(S::REGISTERS / 2 / heads.max(1));
    if left == 0 { 1 } else { 1 << left.ilog2() }
}

/// Some rows of H and some heads.
struct StatePass<'a> {
    h: &'a mut [f32],
    ep: usize,
    decay: f32,
    k: &'a [f32],
    v: &'a [f32],
    q: &'a [f32],
    /// Distance between the rows of q of two heads.
    stride: usize,
    u: &'a mut [f32],
}

impl StatePass<'_> {
    /// Processes some columns for 0, 1, 2 or 4 heads, [`vectors_of_pass`] vectors at a time, and updates H if `update`. The number of rows per iteration
    /// gives about eight independent sums, which hide the latency of fma; four if registers are few.
    #[inline(always)]
    fn columns<S: Simd>(mut self, simd: S, columns: Range<usize>, heads: usize, update: bool) {
        let mut at = columns.start;
        while at < columns.end {
            let vectors = vectors_of_pass::<S>((columns.end - at) / S::LANES, heads);
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

    /// P vectors of columns, A heads, U rows per iteration.
    #[inline(always)]
    fn run<S: Simd, const P: usize, const A: usize, const U: usize>(&mut self, simd: S, column: usize, update: bool) {
        match (update, self.decay == 1.0) {
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
        let StatePass { h, ep, decay, k, v, q, stride, u } = self;
        let (ep, stride, rows) = (*ep, *stride, h.len() / *ep);
        let queries = A == 0 || q.len() >= (A - 1) * stride + rows;
        assert!(
            rows <= k.len() && queries && column + P * S::LANES <= ep && v.len() >= ep,
            "a slice is shorter than the rows or columns of H"
        );
        let mut row_update = RowUpdate::<S, P> { decay: simd.splat(*decay), value: [simd.splat(0.0); P], stride };
        for (p, value) in row_update.value.iter_mut().enumerate() {
            *value = simd.load_at(v, column + p * S::LANES);
        }
        let mut sums = [[[simd.splat(0.0); P]; A]; U];
        let (h, k, q) = (h.as_mut_ptr().wrapping_add(column), k.as_ptr(), q.as_ptr());
        let mut row = 0;
        // SAFETY: every row index is below `rows`. By the assertion, P vectors from `column` on are within a row of H, and K and Q have a value for the row.
        unsafe {
            while row + U <= rows {
                for i in 0..U {
                    let row = row + i;
                    row_update.run::<A, UPDATE, DECAY>(simd, h.add(row * ep), *k.add(row), q.add(row), &mut sums[i]);
                }
                row += U;
            }
            while row < rows {
                row_update.run::<A, UPDATE, DECAY>(simd, h.add(row * ep), *k.add(row), q.add(row), &mut sums[0]);
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

/// The operands that all rows of a pass share.
struct RowUpdate<S: Simd, const P: usize> {
    decay: S::V,
    value: [S::V; P],
    /// Distance between the features of two heads.
    stride: usize,
}

impl<S: Simd, const P: usize> RowUpdate<S, P> {
    /// P vectors of one row: sums += q·row for A heads, row ← m·row + key·value.
    ///
    /// # Safety
    /// `h` must be valid for P vectors, `q` for A values, `stride` apart.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "constant bounds and plain indices keep every accumulator in a register")]
    unsafe fn run<const A: usize, const UPDATE: bool, const DECAY: bool>(
        &self,
        simd: S,
        h: *mut f32,
        key: f32,
        q: *const f32,
        sums: &mut [[S::V; P]; A],
    ) {
        let key = simd.splat(key);
        // Before the first store: the compiler cannot prove that H and Q do not overlap, and would load Q again after each store.
        let mut queries = [key; A];
        for a in 0..A {
            // SAFETY: the caller's promise.
            queries[a] = simd.splat(unsafe { *q.add(a * self.stride) });
        }
        for p in 0..P {
            // SAFETY: the caller's promise.
            let x = unsafe { simd.load(h.add(p * S::LANES)) };
            for a in 0..A {
                sums[a][p] = simd.fma(queries[a], x, sums[a][p]);
            }
            if UPDATE {
                let next = if DECAY { simd.fma(x, self.decay, simd.mul(key, self.value[p])) } else { simd.fma(key, self.value[p], x) };
                // SAFETY: the caller's promise.
                unsafe { simd.store(h.add(p * S::LANES), next) };
            }
        }
    }
}

/// Σ_i q_i·z_i with four accumulators, then z ← m·z + K if `UPDATE`. 0 if z is empty.
///
/// # Panics
/// If q or k is shorter than z.
#[inline(always)]
pub fn read_sums<S: Simd, const UPDATE: bool>(simd: S, q: &[f32], z: &mut [f32], m: f32, k: &[f32]) -> f32 {
    assert!(q.len() >= z.len() && k.len() >= z.len(), "Q or K is shorter than z");
    let (mut sums, m, size) = ([simd.splat(0.0); 4], simd.splat(m), 4 * S::LANES);
    let whole = z.len() / size * size;
    for start in (0..whole).step_by(size) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            // SAFETY: at + LANES ≤ `whole`, and by the assertion no slice is shorter than that.
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
    use crate::simd::{Isa, Task, dispatch_on};

    struct Update<'a> {
        sizes: [usize; 3],
        m: f32,
        h: &'a mut [f32],
        u: &'a mut [f32],
        delta: bool,
    }

    const BETA: f32 = 0.7;

    fn number(i: usize) -> f32 {
        ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0
    }

    impl Task for Update<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let [rows, ep, heads] = self.sizes;
            let padded = rows.next_multiple_of(16);
            let k: Vec<f32> = (0..padded).map(|i| if i < rows { number(i + 1) } else { 0.0 }).collect();
            let q: Vec<f32> = (0..heads * padded).map(|i| if i % padded < rows { number(i + 2) } else { 0.0 }).collect();
            let mut v: Vec<f32> = (0..ep).map(|i| number(i + 3)).collect();
            let state = StateUpdate { h: self.h, ep, decay: self.m, k: &k, q: &q, u: self.u };
            if self.delta {
                state.delta_rule(simd, &mut v, BETA);
            } else {
                state.add(simd, &v);
            }
        }
    }

    #[test]
    fn delta_rule_equals_the_formula() {
        for isa in Isa::available() {
            for (rows, ep) in [(1, 16), (7, 48), (128, 128), (150, 80), (600, 256)] {
                for (heads, m) in [(2, 0.5), (3, 1.0), (6, 0.5)] {
                    let padded = usize::next_multiple_of(rows, 16);
                    let start: Vec<f32> = (0..rows * ep).map(|i| 0.1 * number(i)).collect();
                    let (mut h, mut u) = (start.clone(), vec![0.0; heads * ep]);
                    dispatch_on(isa, Update { sizes: [rows, ep, heads], m, h: &mut h, u: &mut u, delta: true });
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
    fn additive_update_equals_the_formula_for_every_blocking() {
        for isa in Isa::available() {
            for rows in [1usize, 7, 33, 150, 300] {
                for ep in [16, 32, 48, 64, 80, 128, 144, 256] {
                    for (heads, m) in [(1, 1.0), (1, 0.5), (2, 1.0), (3, 0.5), (4, 1.0), (5, 0.5), (8, 1.0)] {
                        let padded = rows.next_multiple_of(16);
                        let start: Vec<f32> = (0..rows * ep).map(number).collect();
                        let (mut h, mut u) = (start.clone(), vec![1.0; heads * ep]);
                        dispatch_on(isa, Update { sizes: [rows, ep, heads], m, h: &mut h, u: &mut u, delta: false });
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
    fn read_sums_reads_before_it_updates() {
        for isa in Isa::available() {
            for n in [0usize, 1, 7, 16, 33, 64, 150] {
                // Values of Q and K past the end of z must not be used.
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
