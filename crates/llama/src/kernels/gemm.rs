//! C = A·B in float32, by the `gemm` crates with the threads of the current pool.
//!
//! Their threads share out tiles of the output whose borders and order of summation depend on the shapes and the machine's caches alone, so
//! the bits do not depend on how many there are (tested in [`crate::ops::linear`]).

use gemm_common::Parallelism;

/// Whether a product replaces what is in the output or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// output = product
    Replace,
    /// output += product
    Add,
}

/// A matrix in memory: its values, the distance between rows and the distance between columns.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_step: usize,
    column_step: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major [rows, columns].
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        Matrix::strided(values, rows, columns, columns)
    }

    /// Rows that start `step` values apart.
    pub fn strided(values: &'a [f32], rows: usize, columns: usize, step: usize) -> Self {
        assert!(columns <= step && fits(values.len(), rows, columns, step), "matrix [{rows}, {columns}] does not fit");
        Matrix { values, rows, columns, row_step: step, column_step: 1 }
    }

    /// Rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Matrix { rows: self.columns, columns: self.rows, row_step: self.column_step, column_step: self.row_step, ..self }
    }
}

/// Whether [rows, columns] with rows `step` apart lies within `len` values.
fn fits(len: usize, rows: usize, columns: usize, step: usize) -> bool {
    rows == 0 || (rows - 1).checked_mul(step).and_then(|start| start.checked_add(columns)).is_some_and(|end| end <= len)
}

/// out [a.rows, b.columns] (rows `step` apart) = or += a·b.
pub(crate) fn product(out: &mut [f32], step: usize, write: Write, a: Matrix, b: Matrix) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product");
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(n <= step && fits(out.len(), m, n, step), "output [{m}, {n}] does not fit");
    // The kernels write columns: a row-major output is the column-major one of (a·b)ᵀ = bᵀ·aᵀ.
    let (m, n, row_step, column_step, a, b) =
        if step > 1 { (n, m, 1, step, b.transposed(), a.transposed()) } else { (m, n, step, 1, a, b) };
    // SAFETY: the assertions here and in `Matrix` bound every element read or written; `out` is borrowed mutably, so it overlaps neither input.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            m,
            n,
            k,
            out.as_mut_ptr(),
            column_step as isize,
            row_step as isize,
            write == Write::Add,
            a.values.as_ptr(),
            a.column_step as isize,
            a.row_step as isize,
            b.values.as_ptr(),
            b.column_step as isize,
            b.row_step as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}
