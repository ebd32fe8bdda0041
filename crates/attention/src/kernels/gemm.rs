//! Small matrix products on tiles, the only arithmetic of attention that costs anything.
//!
//! C [m×n] (+)= A [m×k] · B [k×n], where A is read through two strides (so that it may be transposed), rows of B and C are
//! contiguous and n is a multiple of the vector length. Every element of C is one chain of fused multiply-adds over k
//! in ascending order, whatever the blocking. A long sum made of many products is more accurate where each is its own chain, added
//! at the end: that is [`product_onto`].

use crate::kernels::simd::{Simd, Task};

/// A matrix read one number at a time: element (i, l) lies at `at[i·row + l·column]`.
#[derive(Clone, Copy)]
pub struct Strided {
    /// First element.
    pub at: *const f32,
    /// From one row to the next.
    pub row: usize,
    /// From one column to the next.
    pub column: usize,
}

/// Rows of contiguous float32, `stride` apart.
#[derive(Clone, Copy)]
pub struct Rows<P> {
    /// First element.
    pub at: P,
    /// From one row to the next.
    pub stride: usize,
}

/// C = A·B, or C += A·B where `ADD`.
///
/// # Safety
/// The pointers must be valid for m×k, k×n and m×n elements; n must be a multiple of `S::LANES`; C overlaps neither A nor B.
#[inline(always)]
pub unsafe fn product<S: Simd, const ADD: bool>(simd: S, m: usize, n: usize, k: usize, a: Strided, b: Rows<*const f32>, c: Rows<*mut f32>) {
    debug_assert_eq!(n % S::LANES, 0);
    if ADD {
        simd.call(Product::<CHAIN> { m, n, k, a, b, c, keep: 1.0 })
    } else {
        simd.call(Product::<SET> { m, n, k, a, b, c, keep: 0.0 })
    }
}

/// C = keep·C + A·B, where A·B is summed apart.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
pub unsafe fn product_onto<S: Simd>(simd: S, sizes: [usize; 3], a: Strided, b: Rows<*const f32>, c: Rows<*mut f32>, keep: f32) {
    let [m, n, k] = sizes;
    debug_assert_eq!(n % S::LANES, 0);
    simd.call(Product::<ONTO> { m, n, k, a, b, c, keep });
}

/// C = A·B, or C += A·B where `ADD`, of matrices in slices: A [m×k] with its two strides, rows of B [k×n] and C [m×n] with theirs.
#[inline(always)]
pub fn multiply<S: Simd, const ADD: bool>(
    simd: S,
    [m, n, k]: [usize; 3],
    (a, row, column): (&[f32], usize, usize),
    (b, b_stride): (&[f32], usize),
    (c, c_stride): (&mut [f32], usize),
) {
    let last = |rows: usize, stride: usize, width: usize| rows.saturating_sub(1) * stride + width;
    let fits = a.len() > last(m, row, 0) + last(k, column, 0) && b.len() >= last(k, b_stride, n) && c.len() >= last(m, c_stride, n);
    assert!(fits && n.is_multiple_of(S::LANES), "a product of {m}×{k} and {k}×{n} within its slices");
    let (a, b, c) =
        (Strided { at: a.as_ptr(), row, column }, Rows { at: b.as_ptr(), stride: b_stride }, Rows { at: c.as_mut_ptr(), stride: c_stride });
    // SAFETY: as asserted; a mutable slice overlaps no other.
    unsafe { product::<S, ADD>(simd, m, n, k, a, b, c) };
}

/// C = A·B
const SET: u8 = 0;
/// C + A·B as one chain.
const CHAIN: u8 = 1;
/// keep·C + (A·B)
const ONTO: u8 = 2;

struct Product<const MODE: u8> {
    m: usize,
    n: usize,
    k: usize,
    a: Strided,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    keep: f32,
}

impl<const MODE: u8> Task for Product<MODE> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: constructed only by `product`, whose caller promises valid pointers.
        unsafe { by_columns::<S, MODE>(simd, [self.m, self.n, self.k], self.a, self.b, self.c, self.keep) }
    }
}

#[inline(always)]
unsafe fn by_columns<S: Simd, const MODE: u8>(simd: S, sizes: [usize; 3], a: Strided, b: Rows<*const f32>, c: Rows<*mut f32>, keep: f32) {
    let [m, n, k] = sizes;
    let mut j = 0;
    // Blocks are as large as the registers hold, with room for one row of B and one number of A.
    while j < n {
        let vectors = (n - j) / S::LANES;
        // SAFETY: the column block [j, j + width) lies within n.
        let (b, c) = unsafe { (Rows { at: b.at.add(j), ..b }, Rows { at: c.at.add(j), ..c }) };
        // SAFETY: as promised by the caller, restricted to this column block.
        unsafe {
            if S::REGISTERS >= 32 && vectors >= 4 {
                columns::<S, 6, 4, MODE>(simd, m, k, a, b, c, keep);
                j += 4 * S::LANES;
            } else if S::REGISTERS >= 32 && vectors == 3 {
                columns::<S, 6, 3, MODE>(simd, m, k, a, b, c, keep);
                j += 3 * S::LANES;
            } else if vectors >= 2 {
                if S::REGISTERS >= 32 {
                    columns::<S, 12, 2, MODE>(simd, m, k, a, b, c, keep);
                } else {
                    columns::<S, 6, 2, MODE>(simd, m, k, a, b, c, keep);
                }
                j += 2 * S::LANES;
            } else {
                columns::<S, 12, 1, MODE>(simd, m, k, a, b, c, keep);
                j += S::LANES;
            }
        }
    }
}

/// NV vectors of columns, all rows: in blocks of MR, then of 6, 4, 2 and 1.
#[inline(always)]
unsafe fn columns<S: Simd, const MR: usize, const NV: usize, const MODE: u8>(
    simd: S,
    m: usize,
    k: usize,
    a: Strided,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    keep: f32,
) {
    let mut i = 0;
    macro_rules! blocks {
        ($rows:expr) => {
            while m - i >= $rows {
                // SAFETY: rows [i, i + $rows) lie within m.
                unsafe {
                    let (a, c) = (Strided { at: a.at.add(i * a.row), ..a }, Rows { at: c.at.add(i * c.stride), ..c });
                    block::<S, { $rows }, NV, MODE>(simd, k, a, b, c, keep);
                }
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

/// One block, kept in registers over the whole of k.
#[inline(always)]
unsafe fn block<S: Simd, const MR: usize, const NV: usize, const MODE: u8>(
    simd: S,
    k: usize,
    a: Strided,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    keep: f32,
) {
    // SAFETY: the caller's promise covers every address below: i < MR, l < k, j < NV.
    unsafe {
        let mut sums = [[simd.splat(0.0); NV]; MR];
        if MODE == CHAIN {
            for (i, sums) in sums.iter_mut().enumerate() {
                for (j, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.load(c.at.add(i * c.stride + j * S::LANES));
                }
            }
        }
        let (mut at_a, mut at_b) = (a.at, b.at);
        // A macro and not a closure, which would be a function compiled without the instruction set.
        macro_rules! step {
            () => {
                let mut row = [simd.splat(0.0); NV];
                for (j, x) in row.iter_mut().enumerate() {
                    *x = simd.load(at_b.add(j * S::LANES));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = simd.splat(*at_a.add(i * a.row));
                    for (sum, &y) in sums.iter_mut().zip(&row) {
                        *sum = simd.fma(x, y, *sum);
                    }
                }
                at_a = at_a.wrapping_add(a.column);
                at_b = at_b.wrapping_add(b.stride);
            };
        }
        // Four at a time: a loop of 16 rounds ends as predicted, one of 64 does not.
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
                simd.store(at, if MODE == ONTO { simd.fma(keep, simd.load(at), sum) } else { sum });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::simd::{Isa, dispatch_on};

    struct Run<'a> {
        sizes: (usize, usize, usize),
        transposed: bool,
        a: &'a [f32],
        b: &'a [f32],
        c: &'a mut [f32],
    }

    impl Task for Run<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let (m, n, k) = self.sizes;
            let (row, column) = if self.transposed { (1, m) } else { (k, 1) };
            let a = Strided { at: self.a.as_ptr(), row, column };
            let (b, c) = (Rows { at: self.b.as_ptr(), stride: n }, Rows { at: self.c.as_mut_ptr(), stride: n });
            // SAFETY: the test passes buffers of m·k, k·n and m·n values, n a multiple of 16.
            unsafe {
                product::<S, false>(simd, m, n, k, a, b, c);
                product::<S, true>(simd, m, n, k, a, b, c);
                product_onto(simd, [m, n, k], a, b, c, 0.5);
            }
        }
    }

    #[test]
    fn every_block_shape_equals_the_plain_product() {
        let number = |i: usize| ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0;
        for isa in Isa::available() {
            for m in [1, 2, 3, 5, 6, 7, 11, 12, 13, 25, 64] {
                for n in [16, 32, 48, 64, 80, 112, 256] {
                    for (k, transposed) in [(1, false), (7, true), (64, false)] {
                        let a: Vec<f32> = (0..m * k).map(number).collect();
                        let b: Vec<f32> = (0..k * n).map(|i| number(i + 5)).collect();
                        let mut c = vec![f32::NAN; m * n];
                        dispatch_on(isa, Run { sizes: (m, n, k), transposed, a: &a, b: &b, c: &mut c });
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
}
