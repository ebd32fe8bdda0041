//! y = x Wᵀ + b for few rows x [M, C], W [N, C], b [N], y [M, N]: what decoding needs, where reading W takes all the time.
//!
//! Every value is one dot product, summed in an order that depends on C alone: a row has the same bits in a batch of any size and
//! on any number of threads. W is read once from memory, whatever M.

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

/// Rows of W that meet a row of x at once: so many sums keep both multipliers busy, and their rows are so many streams from memory.
const ROWS: usize = 8;
/// Values of W in a piece of work. Half of a megabyte is long beside the time to wake a thread.
const PIECE: usize = 128 * 1024;

/// Values of `columns` that [`forward`] needs for M rows and N outputs.
pub fn scratch_len(rows: usize, outputs: usize) -> usize {
    if rows == 1 { 0 } else { rows * outputs }
}

/// y [M, N] = x Wᵀ + b; `columns` has at least [`scratch_len`] values.
pub fn forward(x: &[f32], weight: &[f32], bias: Option<&[f32]>, y: &mut [f32], width: usize, columns: &mut [f32]) {
    let (m, n) = (x.len() / width, weight.len() / width);
    assert!(x.len() == m * width && weight.len() == n * width && y.len() == m * n, "sizes of a product");
    let rows = (PIECE / width).max(1).next_multiple_of(ROWS);
    // Outputs of one row of W lie together, so that pieces of W write pieces of memory.
    let out = if m == 1 { &mut *y } else { &mut columns[..m * n] };
    if n <= rows {
        dispatch(Piece { x, weight, width, out });
    } else {
        (weight.par_chunks(rows * width), out.par_chunks_mut(rows * m))
            .into_par_iter()
            .for_each(|(weight, out)| dispatch(Piece { x, weight, width, out }));
    }
    if m > 1 {
        for (row, y) in y.chunks_exact_mut(n).enumerate() {
            y.iter_mut().zip(columns.chunks_exact(m)).for_each(|(y, column)| *y = column[row]);
        }
    }
    if let Some(bias) = bias {
        for row in y.chunks_exact_mut(n) {
            row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
    }
}

/// out [rows of W, M] of some rows of W.
struct Piece<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

impl Task for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Piece { x, weight, width, out } = self;
        let m = x.len() / width;
        let blocks = weight.chunks(ROWS * width).zip(out.chunks_mut(ROWS * m));
        for (weight, out) in blocks {
            if weight.len() == ROWS * width {
                let mut row = 0;
                // With 32 registers a block of W meets two rows of x at once.
                while S::REGISTERS >= 32 && row + 2 <= m {
                    block::<S, ROWS, 2>(simd, &x[row * width..], weight, width, out, m, row);
                    row += 2;
                }
                for row in row..m {
                    block::<S, ROWS, 1>(simd, &x[row * width..], weight, width, out, m, row);
                }
            } else {
                for (weight, out) in weight.chunks_exact(width).zip(out.chunks_exact_mut(m)) {
                    for row in 0..m {
                        block::<S, 1, 1>(simd, &x[row * width..], weight, width, out, m, row);
                    }
                }
            }
        }
    }
}

/// Dot products of N rows of W with M rows of x, into out [N, `step`] from column `row` on.
#[inline(always)]
fn block<S: Simd, const N: usize, const M: usize>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    width: usize,
    out: &mut [f32],
    step: usize,
    row: usize,
) {
    let (x, weight) = (&x[..M * width], &weight[..N * width]);
    let mut sums = [[simd.splat(0.0); M]; N];
    let whole = width - width % S::LANES;
    let mut i = 0;
    while i < whole {
        let mut inputs = [simd.splat(0.0); M];
        for (m, input) in inputs.iter_mut().enumerate() {
            // SAFETY: i + LANES ≤ width, and x has M rows of that width.
            *input = unsafe { simd.load(x.as_ptr().add(m * width + i)) };
        }
        for (n, sums) in sums.iter_mut().enumerate() {
            // SAFETY: i + LANES ≤ width, and W has N rows of that width.
            let w = unsafe { simd.load(weight.as_ptr().add(n * width + i)) };
            for (sum, &input) in sums.iter_mut().zip(&inputs) {
                *sum = simd.fma(w, input, *sum);
            }
        }
        i += S::LANES;
    }
    if whole < width {
        for (n, sums) in sums.iter_mut().enumerate() {
            let w = simd.load_part(&weight[n * width + whole..(n + 1) * width]);
            for (m, sum) in sums.iter_mut().enumerate() {
                *sum = simd.fma(w, simd.load_part(&x[m * width + whole..(m + 1) * width]), *sum);
            }
        }
    }
    for (n, sums) in sums.iter().enumerate() {
        for (m, &sum) in sums.iter().enumerate() {
            out[n * step + row + m] = simd.sum(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, numbers, with_threads};

    fn run(x: &[f32], w: &[f32], b: Option<&[f32]>, c: usize) -> Vec<f32> {
        let (m, n) = (x.len() / c, w.len() / c);
        let mut y = vec![f32::NAN; m * n];
        let mut columns = vec![f32::NAN; scratch_len(m, n)];
        forward(x, w, b, &mut y, c, &mut columns);
        y
    }

    #[test]
    fn products_match_float64() {
        for (m, n, c) in
            [(1, 1, 1), (1, 9, 7), (1, 300, 20), (2, 8, 16), (3, 17, 33), (7, 40, 100), (5, 4100, 70), (1, 2, 3_000), (2, 9, 140_000)]
        {
            let (x, w, b) = (numbers(m * c, 1), numbers(n * c, 2), numbers(n, 3));
            for bias in [None, Some(&b[..])] {
                let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(&a, &b)| a as f64 * b as f64).sum::<f64>();
                let add = |j: usize| bias.map_or(0.0, |b| b[j] as f64);
                let expected: Vec<f64> = x.chunks(c).flat_map(|x| w.chunks(c).enumerate().map(move |(j, w)| dot(x, w) + add(j))).collect();
                assert_close(&run(&x, &w, bias, c), &expected, if c > 10_000 { 1e-5 } else { 1e-6 }, &format!("{m} {n} {c}"));
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads() {
        for (n, c) in [(5, 3), (37, 48), (5000, 70), (1000, 257)] {
            let (x, w) = (numbers(6 * c, 1), numbers(n * c, 2));
            let bits = |y: Vec<f32>| y.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let alone: Vec<u32> = x.chunks(c).flat_map(|x| bits(run(x, &w, None, c))).collect();
            for m in 1..=6 {
                for threads in [1, 3] {
                    assert!(bits(with_threads(threads, || run(&x[..m * c], &w, None, c))) == alone[..m * n], "{m} rows of {n} x {c}");
                }
            }
        }
    }
}
