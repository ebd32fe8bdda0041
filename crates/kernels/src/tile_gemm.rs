//! Matrix products on tiles: C [m×n] (+)= A [m×k] · B [k×n].
//!
//! A is read through two strides, so it may be transposed. Rows of B and C are contiguous, and n is a multiple of the vector length. Every element of C is
//! one chain of fused multiply-adds over k in ascending order, independent of the blocking. Attention spends most of its time here.

use std::marker::PhantomData;

use crate::simd::{Simd, Task};

/// The arithmetic of one step along k: the sum in each lane after a further element of A and of B.
pub(crate) trait Step<S: Simd>: Copy {
    fn add(simd: S, a: S::V, b: S::V, sum: S::V) -> S::V;
}

/// A step is one float32 value.
#[derive(Clone, Copy)]
pub(crate) struct FloatStep;

impl<S: Simd> Step<S> for FloatStep {
    #[inline(always)]
    fn add(simd: S, a: S::V, b: S::V, sum: S::V) -> S::V {
        simd.fma(a, b, sum)
    }
}

/// Whether the product replaces C, continues the sum in C, or is added to a multiple of C.
///
/// A long sum over many products is more accurate if each product is summed on its own and added at the end: [`multiply_onto`].
pub(crate) mod mode {
    /// C = A·B
    pub const SET: u8 = 0;
    /// C + A·B as one chain of additions.
    pub const CHAIN: u8 = 1;
    /// keep·C + (A·B)
    pub const ONTO: u8 = 2;
}

/// C = A·B, or C += A·B if `ADD`.
///
/// `sizes` are m, n and k. `a` is a slice with its row and column strides. `b` and `c` are slices with their row strides.
///
/// # Panics
/// If a matrix exceeds its slice, or n is not a multiple of `S::LANES`.
#[inline(always)]
pub fn multiply<S: Simd, const ADD: bool>(
    simd: S,
    sizes: [usize; 3],
    a: (&[f32], usize, usize),
    b: (&[f32], usize),
    c: (&mut [f32], usize),
) {
    if ADD {
        simd.call(TileProduct::<{ mode::CHAIN }, FloatStep>::new::<S>(sizes, a, b, c, 1.0));
    } else {
        simd.call(TileProduct::<{ mode::SET }, FloatStep>::new::<S>(sizes, a, b, c, 0.0));
    }
}

/// C = keep·C + A·B, where A·B is summed separately. Arguments as for [`multiply`].
///
/// # Panics
/// As [`multiply`].
#[inline(always)]
pub fn multiply_onto<S: Simd>(
    simd: S,
    sizes: [usize; 3],
    a: (&[f32], usize, usize),
    b: (&[f32], usize),
    c: (&mut [f32], usize),
    keep: f32,
) {
    simd.call(TileProduct::<{ mode::ONTO }, FloatStep>::new::<S>(sizes, a, b, c, keep));
}

/// A matrix read one element at a time: element (i, l) is `at[i·row + l·column]`.
#[derive(Clone, Copy)]
struct Strided {
    at: *const f32,
    row: usize,
    column: usize,
}

/// Contiguous rows of float32 values that start `stride` values apart.
#[derive(Clone, Copy)]
struct RowMajor<P> {
    at: P,
    stride: usize,
}

/// Whether the last element of `rows` rows and `columns` columns with these strides is within `len` values. An empty matrix fits.
#[inline(always)]
fn fits(len: usize, (rows, row): (usize, usize), (columns, column): (usize, usize)) -> bool {
    if rows == 0 || columns == 0 {
        return true;
    }
    let last = (rows - 1).checked_mul(row).zip((columns - 1).checked_mul(column)).and_then(|(row, column)| row.checked_add(column));
    last.is_some_and(|last| last < len)
}

/// A product, or a block of one.
///
/// Invariant: `a`, `b` and `c` are valid for m×k, k×n and m×n elements, c overlaps neither a nor b, and n is a multiple of the vector length.
#[derive(Clone, Copy)]
pub(crate) struct TileProduct<const MODE: u8, P> {
    m: usize,
    n: usize,
    k: usize,
    a: Strided,
    b: RowMajor<*const f32>,
    c: RowMajor<*mut f32>,
    keep: f32,
    step: PhantomData<P>,
}

impl<const MODE: u8, P: Copy> TileProduct<MODE, P> {
    #[inline(always)]
    pub(crate) fn new<S: Simd>(
        [m, n, k]: [usize; 3],
        (a, row, column): (&[f32], usize, usize),
        (b, b_stride): (&[f32], usize),
        (c, c_stride): (&mut [f32], usize),
        keep: f32,
    ) -> Self {
        let inside = fits(a.len(), (m, row), (k, column)) && fits(b.len(), (k, b_stride), (n, 1)) && fits(c.len(), (m, c_stride), (n, 1));
        assert!(
            inside && n.is_multiple_of(S::LANES),
            "product of {m}×{k} and {k}×{n} exceeds its slices, or {n} is not a whole number of vectors"
        );
        TileProduct {
            m,
            n,
            k,
            a: Strided { at: a.as_ptr(), row, column },
            b: RowMajor { at: b.as_ptr(), stride: b_stride },
            c: RowMajor { at: c.as_mut_ptr(), stride: c_stride },
            keep,
            step: PhantomData,
        }
    }

    /// `width` columns from column j on.
    ///
    /// # Safety
    /// j + width ≤ n.
    #[inline(always)]
    unsafe fn columns_from(self, j: usize, width: usize) -> Self {
        debug_assert!(j + width <= self.n, "columns {j}..{} of {}", j + width, self.n);
        // SAFETY: column j is within the rows of B and C, as promised.
        let (b, c) = unsafe { (RowMajor { at: self.b.at.add(j), ..self.b }, RowMajor { at: self.c.at.add(j), ..self.c }) };
        TileProduct { n: width, b, c, ..self }
    }

    /// `count` rows from row i on.
    ///
    /// # Safety
    /// i + count ≤ m.
    #[inline(always)]
    unsafe fn rows_from(self, i: usize, count: usize) -> Self {
        debug_assert!(i + count <= self.m, "rows {i}..{} of {}", i + count, self.m);
        // SAFETY: row i is within A and C, as promised. A has no rows to point at if k is 0, so its pointer wraps instead.
        let c = unsafe { RowMajor { at: self.c.at.add(i * self.c.stride), ..self.c } };
        TileProduct { m: count, a: Strided { at: self.a.at.wrapping_add(i * self.a.row), ..self.a }, c, ..self }
    }

    /// NV vectors of columns, all rows: in blocks of MR rows, then of 6, 4, 2 and 1.
    ///
    /// # Safety
    /// n = NV·LANES.
    #[inline(always)]
    unsafe fn column_block<S: Simd, const MR: usize, const NV: usize>(self, simd: S)
    where
        P: Step<S>,
    {
        debug_assert_eq!(self.n, NV * S::LANES);
        let mut i = 0;
        macro_rules! blocks {
            ($rows:expr) => {
                while self.m - i >= $rows {
                    // SAFETY: i + $rows ≤ m, and n is NV vectors.
                    unsafe { self.rows_from(i, $rows).register_block::<S, { $rows }, NV>(simd) };
                    i += $rows;
                }
            };
        }
        blocks!(MR);
        if MR > 6 {
            blocks!(6);
        }
        blocks!(4);
        blocks!(2);
        blocks!(1);
    }

    /// A block of MR rows and NV vectors of columns, kept in registers over the whole of k.
    ///
    /// # Safety
    /// m = MR and n = NV·LANES.
    #[inline(always)]
    unsafe fn register_block<S: Simd, const MR: usize, const NV: usize>(self, simd: S)
    where
        P: Step<S>,
    {
        debug_assert_eq!((self.m, self.n), (MR, NV * S::LANES));
        let TileProduct { k, a, b, c, keep, .. } = self;
        // SAFETY: every address below is that of an element of A, B or C: i < MR = m, j·LANES < n, and each step advances A and B by one of k.
        unsafe {
            let mut sums = [[simd.splat(0.0); NV]; MR];
            if MODE == mode::CHAIN {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum = simd.load(c.at.add(i * c.stride + j * S::LANES));
                    }
                }
            }
            let (mut at_a, mut at_b) = (a.at, b.at);
            // A macro, because a closure would be a function compiled without the instruction set.
            macro_rules! step {
                () => {
                    let mut row = [simd.splat(0.0); NV];
                    for (j, x) in row.iter_mut().enumerate() {
                        *x = simd.load(at_b.add(j * S::LANES));
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = simd.splat(*at_a.add(i * a.row));
                        for (sum, &y) in sums.iter_mut().zip(&row) {
                            *sum = P::add(simd, x, y, *sum);
                        }
                    }
                    at_a = at_a.wrapping_add(a.column);
                    at_b = at_b.wrapping_add(b.stride);
                };
            }
            // Four steps per iteration: the end of a loop of 16 iterations is predicted, that of 64 is not.
            for _ in 0..k / 4 {
                step!();
                step!();
                step!();
                step!();
            }
            for _ in 0..k % 4 {
                step!();
            }
            let keep = simd.splat(keep);
            for (i, sums) in sums.iter().enumerate() {
                for (j, &sum) in sums.iter().enumerate() {
                    let at = c.at.add(i * c.stride + j * S::LANES);
                    simd.store(at, if MODE == mode::ONTO { simd.fma(keep, simd.load(at), sum) } else { sum });
                }
            }
        }
    }

    /// Divides the columns into the largest blocks that fit into the registers, with room for one row of B and one element of A.
    #[inline(always)]
    pub(crate) fn all_columns<S: Simd>(self, simd: S)
    where
        P: Step<S>,
    {
        if self.m == 0 {
            return;
        }
        let mut j = 0;
        while j < self.n {
            let vectors = (self.n - j) / S::LANES;
            // SAFETY: each branch takes no more vectors than are left.
            unsafe {
                if S::REGISTERS >= 32 && vectors >= 4 {
                    self.columns_from(j, 4 * S::LANES).column_block::<S, 6, 4>(simd);
                    j += 4 * S::LANES;
                } else if S::REGISTERS >= 32 && vectors == 3 {
                    self.columns_from(j, 3 * S::LANES).column_block::<S, 6, 3>(simd);
                    j += 3 * S::LANES;
                } else if vectors >= 2 {
                    let block = self.columns_from(j, 2 * S::LANES);
                    if S::REGISTERS >= 32 {
                        block.column_block::<S, 12, 2>(simd)
                    } else {
                        block.column_block::<S, 6, 2>(simd)
                    }
                    j += 2 * S::LANES;
                } else {
                    self.columns_from(j, S::LANES).column_block::<S, 12, 1>(simd);
                    j += S::LANES;
                }
            }
        }
    }
}

impl<const MODE: u8> Task for TileProduct<MODE, FloatStep> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.all_columns(simd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, dispatch_on};

    struct Product<'a> {
        sizes: [usize; 3],
        transposed: bool,
        a: &'a [f32],
        b: &'a [f32],
        c: &'a mut [f32],
    }

    impl Task for Product<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let [m, n, k] = self.sizes;
            let (row, column) = if self.transposed { (1, m) } else { (k, 1) };
            multiply::<S, false>(simd, self.sizes, (self.a, row, column), (self.b, n), (&mut *self.c, n));
            multiply::<S, true>(simd, self.sizes, (self.a, row, column), (self.b, n), (&mut *self.c, n));
            multiply_onto(simd, self.sizes, (self.a, row, column), (self.b, n), (&mut *self.c, n), 0.5);
        }
    }

    fn number(i: usize) -> f32 {
        ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0
    }

    #[test]
    fn every_block_shape_equals_the_plain_product() {
        for isa in Isa::available() {
            for m in [1, 2, 3, 5, 6, 7, 11, 12, 13, 25, 64] {
                for n in [16, 32, 48, 64, 80, 112, 256] {
                    for (k, transposed) in [(1, false), (7, true), (64, false)] {
                        let a: Vec<f32> = (0..m * k).map(number).collect();
                        let b: Vec<f32> = (0..k * n).map(|i| number(i + 5)).collect();
                        let mut c = vec![f32::NAN; m * n];
                        dispatch_on(isa, Product { sizes: [m, n, k], transposed, a: &a, b: &b, c: &mut c });
                        for i in 0..m {
                            for j in 0..n {
                                let at = |l| if transposed { a[l * m + i] } else { a[i * k + l] };
                                let expected: f64 = (0..k).map(|l| at(l) as f64 * b[l * n + j] as f64).sum();
                                let found = c[i * n + j] as f64;
                                assert!((found - 2.0 * expected).abs() < 1e-4, "{} {m}x{n}x{k} at {i},{j}", isa.name());
                            }
                        }
                    }
                }
            }
        }
    }

    /// A sum over no elements is zero, and no rows write nothing.
    #[test]
    fn empty_products_read_nothing() {
        for isa in Isa::available() {
            let mut c = vec![3.0; 32];
            dispatch_on(isa, Product { sizes: [2, 16, 0], transposed: false, a: &[], b: &[], c: &mut c });
            assert_eq!(c, [0.0; 32], "{}", isa.name());
            dispatch_on(isa, Product { sizes: [0, 16, 3], transposed: false, a: &[], b: &[0.0; 48], c: &mut [] });
        }
    }

    #[test]
    #[should_panic(expected = "exceeds its slices")]
    fn a_short_slice_is_refused() {
        dispatch_on(Isa::Portable, Product { sizes: [3, 16, 2], transposed: false, a: &[0.0; 5], b: &[0.0; 32], c: &mut [0.0; 48] });
    }

    #[test]
    #[should_panic(expected = "whole number of vectors")]
    fn a_part_of_a_vector_is_refused() {
        dispatch_on(Isa::Portable, Product { sizes: [1, 12, 1], transposed: false, a: &[0.0], b: &[0.0; 12], c: &mut [0.0; 12] });
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "rows 1..3 of 2")]
    fn debug_assertions_check_the_blocks() {
        let product = TileProduct::<{ mode::SET }, FloatStep>::new::<crate::simd::Portable>(
            [2, 16, 1],
            (&[0.0; 2], 1, 1),
            (&[0.0; 16], 16),
            (&mut [0.0; 32], 16),
            0.0,
        );
        // SAFETY: the assertion fires before a pointer is formed.
        let _ = unsafe { product.rows_from(1, 2) };
    }
}
