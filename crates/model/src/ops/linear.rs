//! Linear layer: y = x Wᵀ + b, with x [M, C], W [N, C], b [N], y [M, N]. For few rows, [`termwise_kernels::gemv`] is faster.
//!
//! All functions panic if the lengths of the tensors do not match.

use rayon::prelude::*;

pub use termwise_kernels::gemm::Write;
use termwise_kernels::gemm::{Matrix, product};

/// y [M, N] = x Wᵀ + b, for x [M, C], `weight` [N, C], `bias` [N].
pub fn forward(x: &[f32], weight: &[f32], bias: Option<&[f32]>, y: &mut [f32], width: usize) {
    let (m, n) = (x.len() / width, weight.len() / width);
    let write = start_with_bias(y, bias);
    product(y, n, write, Matrix::new(x, m, width), Matrix::new(weight, n, width).transposed());
}

/// Copies the bias to every row of y [M, N], to which the product is then added.
pub(crate) fn start_with_bias(y: &mut [f32], bias: Option<&[f32]>) -> Write {
    let Some(bias) = bias else { return Write::Replace };
    y.chunks_exact_mut(bias.len()).for_each(|row| row.copy_from_slice(bias));
    Write::Add
}

/// dx [M, C] = or += dy W.
pub fn backward_input(dy: &[f32], weight: &[f32], dx: &mut [f32], width: usize, write: Write) {
    let (m, n) = (dx.len() / width, weight.len() / width);
    product(dx, width, write, Matrix::new(dy, m, n), Matrix::new(weight, n, width));
}

/// dW [N, C] += dyᵀ x.
pub fn backward_weight(dy: &[f32], x: &[f32], dweight: &mut [f32], width: usize) {
    let (m, n) = (x.len() / width, dweight.len() / width);
    product(dweight, width, Write::Add, Matrix::new(dy, m, n).transposed(), Matrix::new(x, m, width));
}

/// db [N] += Σ_m dy.
pub fn backward_bias(dy: &[f32], dbias: &mut [f32]) {
    /// Columns per task: four cache lines of each row.
    const COLUMNS: usize = 64;
    let width = dbias.len();
    dbias.par_chunks_mut(COLUMNS).enumerate().for_each(|(task, dbias)| {
        for row in dy.chunks_exact(width) {
            dbias.iter_mut().zip(&row[task * COLUMNS..]).for_each(|(sum, dy)| *sum += dy);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, numbers, with_threads};

    fn naive(x: &[f64], w: &[f64], b: Option<&[f64]>, width: usize) -> Vec<f64> {
        let dot = |row: &[f64], w: &[f64]| row.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
        x.chunks(width).flat_map(|row| w.chunks(width).enumerate().map(move |(n, w)| dot(row, w) + b.map_or(0.0, |b| b[n]))).collect()
    }

    #[test]
    fn forward_and_backward_match_float64() {
        for (m, n, c) in [(1, 1, 1), (5, 3, 7), (24, 37, 32), (130, 4, 64), (1, 300, 20), (40, 130, 9)] {
            let (x, w, b, dy) = (numbers(m * c, 1), numbers(n * c, 2), numbers(n, 3), numbers(m * n, 4));
            let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
            for bias in [None, Some(&b[..])] {
                let mut y = vec![f32::NAN; m * n];
                forward(&x, &w, bias, &mut y, c);
                assert_close(&y, &naive(&wide(&x), &wide(&w), bias.map(wide).as_deref(), c), 1e-6, "y");
            }
            // The gradients of Σ y·dy are also products: dx = dy W and dW = dyᵀ x.
            let transposed = |x: &[f32], columns: usize| {
                (0..x.len()).map(|i| x[i % (x.len() / columns) * columns + i / (x.len() / columns)] as f64).collect::<Vec<_>>()
            };
            let mut dx = numbers(m * c, 5);
            let expected: Vec<f64> = naive(&wide(&dy), &transposed(&w, c), None, n).iter().zip(&dx).map(|(a, &b)| a + b as f64).collect();
            backward_input(&dy, &w, &mut dx, c, Write::Add);
            assert_close(&dx, &expected, 1e-6, "dx added");
            backward_input(&dy, &w, &mut dx, c, Write::Replace);
            assert_close(&dx, &naive(&wide(&dy), &transposed(&w, c), None, n), 1e-6, "dx replaced");
            let (mut dw, mut db) = (vec![0.0; n * c], vec![0.0; n]);
            backward_weight(&dy, &x, &mut dw, c);
            backward_bias(&dy, &mut db);
            assert_close(&dw, &naive(&transposed(&dy, n), &transposed(&x, c), None, m), 1e-6, "dW");
            assert_close(&db, &naive(&transposed(&dy, n), &vec![1.0; m], None, m), 1e-6, "db");
        }
    }

    #[test]
    fn results_are_bit_identical_for_any_number_of_threads() {
        for m in [1, 2, 5, 17, 64, 257, 1000] {
            for n in [1, 3, 8, 37, 128, 300] {
                for c in [1, 2, 32, 100, 513] {
                    let (x, w, dy) = (numbers(m * c, 1), numbers(n * c, 2), numbers(m * n, 3));
                    let run = || {
                        let (mut y, mut dx, mut dw) = (vec![0.0; m * n], vec![0.0; m * c], vec![0.0; n * c]);
                        forward(&x, &w, None, &mut y, c);
                        backward_input(&dy, &w, &mut dx, c, Write::Replace);
                        backward_weight(&dy, &x, &mut dw, c);
                        [y, dx, dw].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                    };
                    let one = with_threads(1, run);
                    for threads in [2, 3, 8] {
                        assert!(one == with_threads(threads, run), "{m} x {n} x {c} on {threads} threads");
                    }
                }
            }
        }
    }
}
