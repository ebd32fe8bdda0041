//! Products of attention tiles in float32, or with inputs rounded to bfloat16 and sums in float32.
//!
//! A tile is generic over its [`TilePrecision`]. In bfloat16 an operand is converted to pairs along k before its products. Every element of an output is one
//! chain of the steps of [`crate::bf16_gemm`] over the pairs in ascending order, which starts at zero or at the output. Without AVX512-BF16 the operands are
//! rounded and multiplied in float32 by [`crate::tile_gemm::multiply`].

use crate::bf16_gemm::{Bf16Isa, round};
use crate::simd::Simd;
use crate::tile_gemm;

/// The storage and the products of the operands of a tile.
pub trait TilePrecision: Copy + Send + Sync {
    /// Whether operands are converted. If not, no room is needed for them.
    const CONVERTS: bool;

    /// Number of stored values for k elements along the inner dimension of a product.
    fn depth(self, k: usize) -> usize;

    /// A left operand [rows, k]. Rows start `stride` values apart, before and after.
    fn left<'a>(self, from: &'a [f32], stride: usize, sizes: [usize; 2], room: &'a mut [f32]) -> &'a [f32];

    /// A right operand [k, n] or a transposed left operand, with n a multiple of [`crate::PAD`]: [depth, n]. Rows start `stride` values apart, before and
    /// after.
    fn right<'a>(self, from: &'a [f32], stride: usize, sizes: [usize; 2], room: &'a mut [f32]) -> &'a [f32];

    /// C = A·B, or C += A·B if `ADD`, as [`tile_gemm::multiply`], of operands from [`TilePrecision::left`] and [`TilePrecision::right`].
    fn multiply<S: Simd, const ADD: bool>(
        self,
        simd: S,
        sizes: [usize; 3],
        a: (&[f32], usize, usize),
        b: (&[f32], usize),
        c: (&mut [f32], usize),
    );
}

/// Operands and products in float32.
#[derive(Clone, Copy, Debug)]
pub struct TileF32;

impl TilePrecision for TileF32 {
    const CONVERTS: bool = false;

    #[inline(always)]
    fn depth(self, k: usize) -> usize {
        k
    }

    #[inline(always)]
    fn left<'a>(self, from: &'a [f32], _: usize, _: [usize; 2], _: &'a mut [f32]) -> &'a [f32] {
        from
    }

    #[inline(always)]
    fn right<'a>(self, from: &'a [f32], _: usize, _: [usize; 2], _: &'a mut [f32]) -> &'a [f32] {
        from
    }

    #[inline(always)]
    fn multiply<S: Simd, const ADD: bool>(
        self,
        simd: S,
        sizes: [usize; 3],
        a: (&[f32], usize, usize),
        b: (&[f32], usize),
        c: (&mut [f32], usize),
    ) {
        tile_gemm::multiply::<S, ADD>(simd, sizes, a, b, c);
    }
}

/// Operands rounded to bfloat16, sums in float32.
#[derive(Clone, Copy, Debug)]
pub struct TileBf16 {
    /// The machine supports it: only [`TileBf16::selected`] sets it.
    isa: Bf16Isa,
}

impl TileBf16 {
    /// With the fastest implementation that the machine supports.
    pub fn selected() -> TileBf16 {
        TileBf16 { isa: Bf16Isa::selected() }
    }
}

/// Rounds a matrix with rows `stride` apart.
fn round_rows(from: &[f32], stride: usize, [rows, columns]: [usize; 2], to: &mut [f32]) {
    for (from, to) in from.chunks(stride).zip(to.chunks_mut(stride)).take(rows) {
        to[..columns].iter_mut().zip(&from[..columns]).for_each(|(to, &x)| *to = round(x));
    }
}

impl TilePrecision for TileBf16 {
    const CONVERTS: bool = true;

    #[inline(always)]
    fn depth(self, k: usize) -> usize {
        if self.isa.is_native() { k.div_ceil(2) } else { k }
    }

    fn left<'a>(self, from: &'a [f32], stride: usize, sizes: [usize; 2], room: &'a mut [f32]) -> &'a [f32] {
        match self.isa {
            Bf16Isa::Rounded => round_rows(from, stride, sizes, room),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `selected` detected the features.
            Bf16Isa::Avx512Bf16 => unsafe { avx512::pair_columns(from, stride, sizes, room) },
        }
        room
    }

    fn right<'a>(self, from: &'a [f32], stride: usize, sizes: [usize; 2], room: &'a mut [f32]) -> &'a [f32] {
        match self.isa {
            Bf16Isa::Rounded => round_rows(from, stride, sizes, room),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `selected` detected the features.
            Bf16Isa::Avx512Bf16 => unsafe { avx512::pair_rows(from, stride, sizes, room) },
        }
        room
    }

    #[inline(always)]
    fn multiply<S: Simd, const ADD: bool>(
        self,
        simd: S,
        sizes: [usize; 3],
        a: (&[f32], usize, usize),
        b: (&[f32], usize),
        c: (&mut [f32], usize),
    ) {
        match self.isa {
            Bf16Isa::Rounded => tile_gemm::multiply::<S, ADD>(simd, sizes, a, b, c),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `selected` detected the features.
            Bf16Isa::Avx512Bf16 => unsafe { avx512::multiply::<ADD>([sizes[0], sizes[1], self.depth(sizes[2])], a, b, c) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use crate::bf16_gemm::avx512::{interleave_order, interleave_pair, round_32};
    use crate::simd::Avx512;
    use crate::tile_gemm::{Step, TileProduct, mode};

    /// A step is a pair of bfloat16 values.
    #[derive(Clone, Copy)]
    struct PairStep;

    impl Step<Avx512> for PairStep {
        #[inline(always)]
        fn add(_: Avx512, a: __m512, b: __m512, sum: __m512) -> __m512 {
            // SAFETY: both types are 64 bytes of plain data. Only `multiply` uses this step, and its caller promises the feature.
            unsafe { _mm512_dpbf16_ps(sum, std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b)) }
        }
    }

    /// C = A·B or C += A·B of pairs.
    ///
    /// # Safety
    /// The machine must support AVX-512 F, BW, DQ, VL, BF16, AVX2 and FMA.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
    pub unsafe fn multiply<const ADD: bool>(sizes: [usize; 3], a: (&[f32], usize, usize), b: (&[f32], usize), c: (&mut [f32], usize)) {
        // SAFETY: the caller's promise.
        let simd = unsafe { Avx512::assume() };
        match ADD {
            true => TileProduct::<{ mode::CHAIN }, PairStep>::new::<Avx512>(sizes, a, b, c, 1.0).all_columns(simd),
            false => TileProduct::<{ mode::SET }, PairStep>::new::<Avx512>(sizes, a, b, c, 0.0).all_columns(simd),
        }
    }

    /// Rounds [rows, k] to pairs of adjacent columns, [rows, k / 2]. An element past k is zero.
    ///
    /// # Safety
    /// As [`multiply`].
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn pair_columns(from: &[f32], stride: usize, [rows, k]: [usize; 2], to: &mut [f32]) {
        for (from, to) in from.chunks(stride).zip(to.chunks_mut(stride)).take(rows) {
            for (from, to) in from[..k].chunks(32).zip(to.chunks_exact_mut(16)) {
                // SAFETY: `from` has its length of values.
                let pairs = unsafe { round_32(from.as_ptr(), from.len()) };
                // SAFETY: `to` is a vector.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs) };
            }
        }
    }

    /// Rounds [k, n] to pairs of adjacent rows, [k / 2, n], for n a multiple of 16. A row past k is zero.
    ///
    /// # Safety
    /// As [`multiply`].
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub unsafe fn pair_rows(from: &[f32], stride: usize, [k, n]: [usize; 2], to: &mut [f32]) {
        // SAFETY: the caller's promise.
        let order = unsafe { interleave_order() };
        for (p, to) in to.chunks_mut(stride).take(k.div_ceil(2)).enumerate() {
            let even = &from[2 * p * stride..][..n];
            let odd = if 2 * p + 1 < k { &from[(2 * p + 1) * stride..][..n] } else { &[] };
            for (j, to) in to[..n].chunks_exact_mut(16).enumerate() {
                // SAFETY: all slices have n values, a multiple of 16, or `odd` is empty.
                unsafe {
                    let even = _mm512_loadu_ps(even.as_ptr().add(16 * j));
                    let odd = if odd.is_empty() { _mm512_setzero_ps() } else { _mm512_loadu_ps(odd.as_ptr().add(16 * j)) };
                    _mm512_storeu_si512(to.as_mut_ptr().cast(), interleave_pair(order, even, odd));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16_gemm::tests::add_pair;
    use crate::simd::{Task, dispatch};
    use crate::testing::uniform;

    /// C = A·B or C += A·B for A [m, k], which is stored transposed if `transposed`. Rows of all matrices start `STRIDE` values apart.
    struct ConvertedProduct<'a> {
        precision: TileBf16,
        sizes: [usize; 3],
        transposed: bool,
        add: bool,
        a: &'a [f32],
        b: &'a [f32],
        c: &'a mut [f32],
    }

    const STRIDE: usize = 144;

    impl Task for ConvertedProduct<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let ConvertedProduct { precision, sizes: [m, n, k], transposed, add, a, b, c } = self;
            // Conversion overwrites the memory of earlier operands.
            let (mut to_a, mut to_b) = (vec![f32::NAN; a.len()], vec![f32::NAN; b.len()]);
            let (a, row, column) = match transposed {
                true => (precision.right(a, STRIDE, [k, m.next_multiple_of(16)], &mut to_a), 1, STRIDE),
                false => (precision.left(a, STRIDE, [m, k], &mut to_a), STRIDE, 1),
            };
            let b = precision.right(b, STRIDE, [k, n], &mut to_b);
            match add {
                true => precision.multiply::<S, true>(simd, [m, n, k], (a, row, column), (b, STRIDE), (c, STRIDE)),
                false => precision.multiply::<S, false>(simd, [m, n, k], (a, row, column), (b, STRIDE), (c, STRIDE)),
            }
        }
    }

    /// Every shape of a block of rows and columns, even and odd k, both layouts of A, both ways to write: rounded A, rounded B, C before and after.
    fn each_case(precision: TileBf16, mut check: impl FnMut([usize; 3], [&dyn Fn(usize, usize) -> f32; 4], bool, &str)) {
        for m in [1, 2, 5, 12, 13, 128] {
            for n in [16, 32, 48, 64, 112, 128] {
                for k in [0, 1, 2, 7, 64, 101] {
                    for (transposed, add) in [(false, false), (false, true), (true, false), (true, true)] {
                        // Values past k are NaN: an odd last element is paired with zero.
                        let mut a = vec![f32::NAN; 129 * STRIDE];
                        let mut b = vec![f32::NAN; 129 * STRIDE];
                        let (from_a, from_b) = (uniform(128 * 128, 1), uniform(128 * 128, 2));
                        let place = |i: usize, l: usize| if transposed { l * STRIDE + i } else { i * STRIDE + l };
                        (0..m).for_each(|i| (0..k).for_each(|l| a[place(i, l)] = from_a[i * 128 + l]));
                        (0..k).for_each(|l| (0..n).for_each(|j| b[l * STRIDE + j] = from_b[l * 128 + j]));
                        let before = uniform(m * STRIDE, 3);
                        let mut c = before.clone();
                        dispatch(ConvertedProduct { precision, sizes: [m, n, k], transposed, add, a: &a, b: &b, c: &mut c });
                        let (at_a, at_b) = (|i, l| round(a[place(i, l)]), |l: usize, j: usize| round(b[l * STRIDE + j]));
                        let (old, new) = (|i: usize, j: usize| before[i * STRIDE + j], |i: usize, j: usize| c[i * STRIDE + j]);
                        check([m, n, k], [&at_a, &at_b, &old, &new], add, &format!("{m}x{n}x{k} {transposed} {add}"));
                        for i in 0..m {
                            (n..STRIDE).for_each(|j| assert!(new(i, j) == old(i, j), "column {j} is past the product"));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn tile_products_equal_the_scalar_twin_bit_for_bit() {
        let precision = TileBf16::selected();
        if !precision.isa.is_native() {
            return;
        }
        each_case(precision, |[m, n, k], [a, b, old, new], add, what| {
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let pair = |f: &dyn Fn(usize) -> f32, p: usize| [f(2 * p), if 2 * p + 1 < k { f(2 * p + 1) } else { 0.0 }];
                let start = if add { old(i, j) } else { 0.0 };
                let expected = (0..k.div_ceil(2)).fold(start, |sum, p| add_pair(sum, pair(&|l| a(i, l), p), pair(&|l| b(l, j), p)));
                assert_eq!(new(i, j).to_bits(), expected.to_bits(), "{what} at {i}, {j}");
            }
        });
    }

    /// Both implementations are within the rounding error of float32 of a float64 product of the rounded inputs.
    #[test]
    fn every_implementation_of_tiles_equals_a_float64_product_of_rounded_inputs() {
        for precision in [TileBf16::selected(), TileBf16 { isa: Bf16Isa::Rounded }] {
            each_case(precision, |[m, n, k], [a, b, old, new], add, what| {
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let dot: f64 = (0..k).map(|l| a(i, l) as f64 * b(l, j) as f64).sum();
                    let expected = dot + if add { old(i, j) as f64 } else { 0.0 };
                    assert!((new(i, j) as f64 - expected).abs() <= 1e-5, "{:?} {what} at {i}, {j}", precision.isa);
                }
            });
        }
    }
}
