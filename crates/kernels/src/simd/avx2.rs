//! AVX2 with FMA: 8 lanes, 16 registers.

use std::arch::x86_64::*;

use crate::simd::{Simd, Task};

/// Proof that the machine supports AVX2 and FMA.
#[derive(Clone, Copy)]
pub struct Avx2(());

x86_entries!(Avx2(()), "avx2,fma");

// SAFETY of every block below: the token exists only inside `enter`, whose caller checked the features. Pointers are valid by the contract of the method.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one argument for all blocks, above")]
impl Simd for Avx2 {
    type V = __m256;
    type M = __m256;
    type Exponent = __m256i;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

    x86_methods! {
        __m256; splat = _mm256_set1_ps; load = _mm256_loadu_ps; store = _mm256_storeu_ps;
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        sqrt(a) = _mm256_sqrt_ps;
        fma(a, b, c) = _mm256_fmadd_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
    }
    #[inline(always)]
    fn gt(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_cmp_ps::<_CMP_GT_OQ>(a, b) }
    }
    #[inline(always)]
    fn any(self, m: __m256) -> bool {
        unsafe { _mm256_movemask_ps(m) != 0 }
    }
    #[inline(always)]
    fn first(self, n: usize) -> __m256 {
        unsafe {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), lane))
        }
    }
    #[inline(always)]
    fn select(self, m: __m256, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_blendv_ps(b, a, m) }
    }
    #[inline(always)]
    fn round_to_exponent(self, x: __m256) -> (__m256, __m256i) {
        unsafe {
            let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            (n, _mm256_cvtps_epi32(n))
        }
    }
    #[inline(always)]
    fn ldexp(self, y: __m256, exponent: __m256i) -> __m256 {
        // In two factors, so 2^128 times a number below one does not overflow.
        unsafe {
            let half = _mm256_srai_epi32::<1>(exponent);
            let rest = _mm256_sub_epi32(exponent, half);
            let bias = _mm256_set1_epi32(127);
            let two_to_half = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias)));
            let two_to_rest = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias)));
            _mm256_mul_ps(_mm256_mul_ps(y, two_to_half), two_to_rest)
        }
    }
    #[inline(always)]
    fn sum(self, x: __m256) -> f32 {
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn maximum(self, x: __m256) -> f32 {
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn transpose_16(self, from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        unsafe {
            for (i, j) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
                transpose_8(from.add(i * stride + j), stride, to.add(j * to_stride + i), to_stride);
            }
        }
    }
}

/// Transposes an 8×8 block: interleaves pairs, then quadruples of rows within 128-bit lanes, then exchanges the lanes.
///
/// # Safety
/// The caller runs within [`enter`]. Both pointers must be valid for 8 rows of 8 values at their strides, and not overlap.
#[inline(always)]
unsafe fn transpose_8(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
    // SAFETY: the features are enabled, and every access is within 8 rows of 8 values.
    unsafe {
        let mut a = [_mm256_setzero_ps(); 8];
        for (i, a) in a.iter_mut().enumerate() {
            *a = _mm256_loadu_ps(from.add(i * stride));
        }
        let mut b = a;
        for i in (0..8).step_by(2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for i in (0..8).step_by(4) {
            for half in 0..2 {
                let (x, y) = (_mm256_castps_pd(b[i + half]), _mm256_castps_pd(b[i + half + 2]));
                a[i + 2 * half] = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
                a[i + 2 * half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
            }
        }
        // a[4g + c] contains columns c and c + 4 of rows 4g..4g + 4.
        for c in 0..4 {
            _mm256_storeu_ps(to.add(c * to_stride), _mm256_permute2f128_ps::<0x20>(a[c], a[4 + c]));
            _mm256_storeu_ps(to.add((c + 4) * to_stride), _mm256_permute2f128_ps::<0x31>(a[c], a[4 + c]));
        }
    }
}
