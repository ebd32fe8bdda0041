//! Products of float64 matrices on one thread.

use gemm_common::Parallelism;

/// out [m, n] (rows n apart) = or += a [m, k] (rows `step` apart) times b, whose element (i, j) stands at i·rows + j·columns.
pub struct Product<'a> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: &'a [f64],
    pub step: usize,
    pub b: &'a [f64],
    pub rows: usize,
    pub columns: usize,
}

impl Product<'_> {
    pub fn write(self, out: &mut [f64], add: bool) {
        let Product { m, n, k, a, step, b, rows, columns } = self;
        if m == 0 || n == 0 || k == 0 {
            return;
        }
        assert!(k <= step && a.len() >= (m - 1) * step + k, "the first matrix does not fit");
        assert!(b.len() > (k - 1) * rows + (n - 1) * columns, "the second matrix does not fit");
        assert!(out.len() >= m * n, "the product does not fit");
        // The kernels write columns, and the rows of a·b are the columns of bᵀ·aᵀ.
        // SAFETY: the assertions bound every element that is read or written; `out` is borrowed mutably, so it overlaps neither input.
        unsafe {
            gemm_f64::gemm::f64::get_gemm_fn()(
                n,
                m,
                k,
                out.as_mut_ptr(),
                n as isize,
                1,
                add,
                b.as_ptr(),
                rows as isize,
                columns as isize,
                a.as_ptr(),
                step as isize,
                1,
                1.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}
