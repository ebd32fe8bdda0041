//! Unit lower triangular systems within a tile, solved in blocks of [`ROWS`] rows:
//!
//! ```text
//! forward     u_t = β_t·r_t,   r_t = v_t + Σ_{s<t} N_ts·u_s
//! backward    λ_t = β_t·g_t,   g_s = d_s + Σ_{t>s} N_ts·λ_t                (transposed system)
//! ```
//!
//! The contribution of other blocks is a matrix product. Within a block rows are substituted one after another, with all rows of the block in registers.

use crate::simd::Simd;
use crate::tile_gemm::multiply;
use crate::{ROWS, TILE};

/// The matrix N of a unit lower triangular system. Entries on and above the diagonal are not read.
#[derive(Clone, Copy)]
pub struct UnitLowerTriangular<'a> {
    /// N of some rows [rows, [`TILE`]].
    pub n: &'a [f32],
    /// β of all rows of the tile.
    pub beta: &'a [f32],
    /// Values per row of v, a multiple of the vector length.
    pub ep: usize,
}

/// N within a block of rows, zero on and above the diagonal, and β of the rows.
struct DiagonalBlock {
    n: [[f32; ROWS]; ROWS],
    beta: [f32; ROWS],
}

impl UnitLowerTriangular<'_> {
    /// Rows `start..start + count` of the tile, count ≤ [`ROWS`]. N starts with row `start`.
    #[inline(always)]
    fn diagonal_block(&self, start: usize, count: usize) -> DiagonalBlock {
        let mut block = DiagonalBlock { n: [[0.0; ROWS]; ROWS], beta: [0.0; ROWS] };
        block.beta[..count].copy_from_slice(&self.beta[start..start + count]);
        for (t, row) in block.n.iter_mut().enumerate().take(count) {
            row[..t].copy_from_slice(&self.n[t * TILE + start..][..t]);
        }
        block
    }

    /// Solves for rows `start..start + count` of the tile in place, count ≤ [`ROWS`]. `rows` contains u before `start` and v from `start` on. N starts with
    /// row `start`. r is written to `kept` [count, ep], which may be empty.
    ///
    /// # Panics
    /// If a slice is too short.
    #[inline(always)]
    pub fn forward<S: Simd>(&self, simd: S, start: usize, count: usize, rows: &mut [f32], kept: &mut [f32]) {
        let (before, own) = rows.split_at_mut(start * self.ep);
        let own = &mut own[..count * self.ep];
        if start > 0 {
            multiply::<S, true>(simd, [count, self.ep, start], (self.n, TILE, 1), (before, self.ep), (own, self.ep));
        }
        let block = self.diagonal_block(start, count);
        for column in (0..self.ep).step_by(S::LANES) {
            let mut r = [simd.splat(0.0); ROWS];
            for (r, row) in r.iter_mut().zip(own.chunks_exact(self.ep)) {
                *r = simd.load_at(row, column);
            }
            let mut u = r;
            // A macro: constant indices keep every row in a register.
            macro_rules! row {
                ($($t:literal)+) => {$(
                    u[$t] = simd.mul(r[$t], simd.splat(block.beta[$t]));
                    for i in $t + 1..ROWS {
                        r[i] = simd.fma(simd.splat(block.n[i][$t]), u[$t], r[i]);
                    }
                )+};
            }
            const { assert!(ROWS == 12, "the macro invocation lists 12 rows") };
            row!(0 1 2 3 4 5 6 7 8 9 10);
            u[ROWS - 1] = simd.mul(r[ROWS - 1], simd.splat(block.beta[ROWS - 1]));
            for (kept, &r) in kept.chunks_exact_mut(self.ep).zip(&r) {
                simd.store_at(kept, column, r);
            }
            for (row, &u) in own.chunks_exact_mut(self.ep).zip(&u) {
                simd.store_at(row, column, u);
            }
        }
    }

    /// Solves the transposed system for rows `start..start + count` of a tile of `total` rows in place. `rows` contains d up to these rows and λ after them.
    /// N contains all rows of the tile. The result is g; the caller computes λ = β·g.
    ///
    /// # Panics
    /// If a slice is too short.
    #[inline(always)]
    pub fn backward<S: Simd>(&self, simd: S, [start, count, total]: [usize; 3], rows: &mut [f32]) {
        let (own, after) = rows[start * self.ep..total * self.ep].split_at_mut(count * self.ep);
        let end = start + count;
        if end < total {
            let n = &self.n[end * TILE + start..];
            multiply::<S, true>(simd, [count, self.ep, total - end], (n, 1, TILE), (after, self.ep), (own, self.ep));
        }
        let block = UnitLowerTriangular { n: &self.n[start * TILE..], ..*self }.diagonal_block(start, count);
        for column in (0..self.ep).step_by(S::LANES) {
            let mut g = [simd.splat(0.0); ROWS];
            for (g, row) in g.iter_mut().zip(own.chunks_exact(self.ep)) {
                *g = simd.load_at(row, column);
            }
            macro_rules! row {
                ($($t:literal)+) => {$(
                    let lambda = simd.mul(g[$t], simd.splat(block.beta[$t]));
                    for i in 0..$t {
                        g[i] = simd.fma(simd.splat(block.n[$t][i]), lambda, g[i]);
                    }
                )+};
            }
            row!(11 10 9 8 7 6 5 4 3 2 1);
            for (row, &g) in own.chunks_exact_mut(self.ep).zip(&g) {
                simd.store_at(row, column, g);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, Task, dispatch_on};

    fn number(i: usize) -> f32 {
        ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0
    }

    struct SolveTask<'a> {
        system: UnitLowerTriangular<'a>,
        count: usize,
        rows: &'a mut [f32],
        kept: &'a mut [f32],
        backward: bool,
    }

    impl Task for SolveTask<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let SolveTask { system, count: total, rows, kept, backward } = self;
            let starts: Vec<usize> = (0..total).step_by(ROWS).collect();
            if backward {
                for &start in starts.iter().rev() {
                    let count = ROWS.min(total - start);
                    system.backward(simd, [start, count, total], rows);
                    for t in start..start + count {
                        kept[t * system.ep..][..system.ep].copy_from_slice(&rows[t * system.ep..][..system.ep]);
                        rows[t * system.ep..][..system.ep].iter_mut().for_each(|x| *x *= system.beta[t]);
                    }
                }
            } else {
                for &start in &starts {
                    let count = ROWS.min(total - start);
                    let own = UnitLowerTriangular { n: &system.n[start * TILE..], ..system };
                    own.forward(simd, start, count, rows, &mut kept[start * system.ep..(start + count) * system.ep]);
                }
            }
        }
    }

    #[test]
    fn every_size_equals_substitution() {
        for isa in Isa::available() {
            for (count, ep) in [(1, 16), (5, 16), (12, 48), (13, 32), (37, 128), (64, 80), (128, 64)] {
                // Entries on and above the diagonal must not be read.
                let entry = |t: usize, s: usize| if s < t { 0.2 * number(t * 131 + s) } else { f32::NAN };
                let n: Vec<f32> = (0..count * TILE).map(|i| entry(i / TILE, i % TILE)).collect();
                let beta: Vec<f32> = (0..count).map(|t| 0.5 + 0.4 * number(t + 3)).collect();
                let start: Vec<f32> = (0..count * ep).map(number).collect();
                let wide = |t: usize, j: usize| start[t * ep + j] as f64;
                for backward in [false, true] {
                    let (mut rows, mut kept) = (start.clone(), vec![f32::NAN; count * ep]);
                    dispatch_on(
                        isa,
                        SolveTask {
                            system: UnitLowerTriangular { n: &n, beta: &beta, ep },
                            count,
                            rows: &mut rows,
                            kept: &mut kept,
                            backward,
                        },
                    );
                    for j in 0..ep {
                        let (mut r, mut u) = (vec![0.0; count], vec![0.0; count]);
                        let order: Vec<usize> = if backward { (0..count).rev().collect() } else { (0..count).collect() };
                        for &t in &order {
                            let others: f64 = match backward {
                                false => (0..t).map(|s| entry(t, s) as f64 * u[s]).sum(),
                                true => (t + 1..count).map(|s| entry(s, t) as f64 * u[s]).sum(),
                            };
                            r[t] = wide(t, j) + others;
                            u[t] = beta[t] as f64 * r[t];
                        }
                        for t in 0..count {
                            let what = format!("{} {count} rows of {ep}, backward {backward}, row {t}, column {j}", isa.name());
                            assert!((rows[t * ep + j] as f64 - u[t]).abs() < 1e-4 * (1.0 + u[t].abs()), "{what}");
                            assert!((kept[t * ep + j] as f64 - r[t]).abs() < 1e-4 * (1.0 + r[t].abs()), "{what}");
                        }
                    }
                }
            }
        }
    }
}
