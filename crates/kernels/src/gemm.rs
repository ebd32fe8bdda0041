//! C = A·B in float32 or float64 with the `gemm` crates.
//!
//! The tiles of the output and their order of summation depend on the shapes and on the cache sizes only, so the bits do not depend on the number of
//! threads.

use gemm_common::Parallelism;

/// Whether a product replaces the output or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// output = product
    Replace,
    /// output += product
    Add,
}

mod sealed {
    /// One call of a kernel of the `gemm` crates, which writes a column-major output.
    pub struct GemmCall<T> {
        pub sizes: [usize; 3],
        pub out: *mut T,
        /// Column and row stride.
        pub out_strides: [isize; 2],
        pub add: bool,
        pub a: *const T,
        pub a_strides: [isize; 2],
        pub b: *const T,
        pub b_strides: [isize; 2],
        pub parallelism: gemm_common::Parallelism,
    }

    pub trait Kernel: Copy {
        /// # Safety
        /// The pointers must be valid for all elements of their matrices, and the output must not overlap an input.
        unsafe fn gemm(call: GemmCall<Self>);
    }
}

/// Element type of a product: float32 or float64.
pub trait GemmScalar: sealed::Kernel {}

macro_rules! scalar {
    ($type:ty, $kernel:path) => {
        impl sealed::Kernel for $type {
            unsafe fn gemm(call: sealed::GemmCall<$type>) {
                let sealed::GemmCall { sizes: [m, n, k], out, out_strides, add, a, a_strides, b, b_strides, parallelism } = call;
                // SAFETY: the caller's promise.
                unsafe {
                    $kernel()(
                        m,
                        n,
                        k,
                        out,
                        out_strides[0],
                        out_strides[1],
                        add,
                        a,
                        a_strides[0],
                        a_strides[1],
                        b,
                        b_strides[0],
                        b_strides[1],
                        1.0,
                        1.0,
                        false,
                        false,
                        false,
                        parallelism,
                    );
                }
            }
        }

        impl GemmScalar for $type {}
    };
}

scalar!(f32, gemm_f32::gemm::f32::get_gemm_fn);
scalar!(f64, gemm_f64::gemm::f64::get_gemm_fn);

/// A matrix view: a slice with the strides of its rows and columns.
#[derive(Clone, Copy)]
pub struct Matrix<'a, T = f32> {
    pub(crate) values: &'a [T],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_step: usize,
    pub(crate) column_step: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// A row-major matrix [rows, columns].
    ///
    /// # Panics
    /// If it exceeds the slice.
    pub fn new(values: &'a [T], rows: usize, columns: usize) -> Self {
        Matrix::strided(values, rows, columns, columns)
    }

    /// A matrix whose rows start `step` values apart.
    ///
    /// # Panics
    /// If rows overlap or exceed the slice.
    pub fn strided(values: &'a [T], rows: usize, columns: usize, step: usize) -> Self {
        let inside = columns <= step && fits(values.len(), rows, columns, step);
        assert!(inside, "matrix [{rows}, {columns}] exceeds its slice of {} values", values.len());
        Matrix { values, rows, columns, row_step: step, column_step: 1 }
    }

    /// The transpose: rows and columns are exchanged.
    pub fn transposed(self) -> Self {
        Matrix { rows: self.columns, columns: self.rows, row_step: self.column_step, column_step: self.row_step, ..self }
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Column and row stride. Indices stay below the length of a slice, so they fit into `isize`.
    fn strides(&self) -> [isize; 2] {
        [self.column_step as isize, self.row_step as isize]
    }
}

/// Whether [rows, columns] with rows `step` apart is within `len` values.
pub(crate) fn fits(len: usize, rows: usize, columns: usize, step: usize) -> bool {
    rows == 0 || (rows - 1).checked_mul(step).and_then(|start| start.checked_add(columns)).is_some_and(|end| end <= len)
}

/// out = a·b or out += a·b on the threads of the current rayon pool. out is [a.rows, b.columns] with rows `step` apart.
///
/// # Panics
/// If the inner dimensions differ or the output exceeds its slice.
pub fn product<T: GemmScalar>(out: &mut [T], step: usize, write: Write, a: Matrix<T>, b: Matrix<T>) {
    run(out, step, write, [a, b], Parallelism::Rayon(0));
}

/// [`product`] on the calling thread.
///
/// # Panics
/// As [`product`].
pub fn sequential_product<T: GemmScalar>(out: &mut [T], step: usize, write: Write, a: Matrix<T>, b: Matrix<T>) {
    run(out, step, write, [a, b], Parallelism::None);
}

fn run<T: GemmScalar>(out: &mut [T], step: usize, write: Write, [a, b]: [Matrix<T>; 2], parallelism: Parallelism) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product differ");
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(n <= step && fits(out.len(), m, n, step), "output [{m}, {n}] exceeds its slice of {} values", out.len());
    // The kernels write column-major: a row-major output is the column-major one of (a·b)ᵀ = bᵀ·aᵀ.
    let (sizes, out_strides, a, b) = match step > 1 {
        true => ([n, m, k], [step as isize, 1], b.transposed(), a.transposed()),
        false => ([m, n, k], [1, step as isize], a, b),
    };
    let call = sealed::GemmCall {
        sizes,
        out: out.as_mut_ptr(),
        out_strides,
        add: write == Write::Add,
        a: a.values.as_ptr(),
        a_strides: a.strides(),
        b: b.values.as_ptr(),
        b_strides: b.strides(),
        parallelism,
    };
    // SAFETY: the assertions here and in `Matrix` bound every element read or written. `out` is borrowed mutably, so it overlaps neither input.
    unsafe { T::gemm(call) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Real;
    use crate::testing::uniform;

    /// Both functions, both ways to write, all transpositions, rows with a stride, against a plain loop in float64.
    fn check<T: GemmScalar + Real>(tolerance: f64) {
        let numbers = |n: usize, seed: u64| uniform(n, seed).into_iter().map(|x| T::of(x as f64)).collect::<Vec<T>>();
        for (m, n, k) in [(1, 1, 1), (3, 1, 5), (1, 7, 4), (17, 33, 9), (64, 48, 70)] {
            for (turn_a, turn_b) in [(false, false), (true, false), (false, true), (true, true)] {
                for write in [Write::Replace, Write::Add] {
                    let (a, b, before) = (numbers(m * k, 1), numbers((k + 2) * (n + 2), 2), numbers(m * (n + 3), 3));
                    let view_a = if turn_a { Matrix::new(&a, k, m).transposed() } else { Matrix::new(&a, m, k) };
                    let view_b = if turn_b { Matrix::strided(&b, n, k, k + 2).transposed() } else { Matrix::strided(&b, k, n, n + 2) };
                    let (mut out, mut sequential) = (before.clone(), before.clone());
                    product(&mut out, n + 3, write, view_a, view_b);
                    sequential_product(&mut sequential, n + 3, write, view_a, view_b);
                    assert_eq!(out, sequential, "the bits depend on the threads");
                    for i in 0..m {
                        for j in 0..n + 3 {
                            let old = before[i * (n + 3) + j].wide();
                            let at = |view: Matrix<T>, i: usize, j: usize| view.values[i * view.row_step + j * view.column_step].wide();
                            let dot: f64 = (0..k).map(|l| if j < n { at(view_a, i, l) * at(view_b, l, j) } else { 0.0 }).sum();
                            let expected = if j >= n || write == Write::Add { old + dot } else { dot };
                            let found = out[i * (n + 3) + j].wide();
                            assert!(
                                (found - expected).abs() <= tolerance,
                                "{m}x{n}x{k} {turn_a} {turn_b} {write:?} at {i}, {j}: {found}, {expected}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn float32_products_equal_a_plain_loop() {
        check::<f32>(1e-5);
    }

    #[test]
    fn float64_products_equal_a_plain_loop() {
        check::<f64>(1e-13);
    }

    #[test]
    fn matrices_that_exceed_their_slices_are_refused() {
        let refused = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
        let values = [0.0f32; 12];
        assert!(refused(&|| assert!(Matrix::new(&values, 4, 4).rows > 0)));
        assert!(refused(&|| assert!(Matrix::strided(&values, 2, 4, 3).rows > 0)));
        assert!(refused(&|| assert!(Matrix::strided(&values, usize::MAX, 4, 8).rows > 0)));
        let (a, b) = (Matrix::new(&values, 3, 4), Matrix::new(&values, 4, 3));
        assert!(!refused(&|| product(&mut [0.0; 9], 3, Write::Replace, a, b)));
        assert!(
            refused(&|| product(&mut [0.0; 8], 3, Write::Replace, a, b)) && refused(&|| product(&mut [0.0; 9], 2, Write::Replace, a, b))
        );
        assert!(refused(&|| product(&mut [0.0; 9], 3, Write::Replace, a, a)));
    }
}
