//! AVX-512: 16 lanes, 32 registers.

use std::arch::x86_64::*;

use crate::simd::{Simd, Task};

/// Proof that the machine supports AVX-512 F, BW, DQ, VL and FMA.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// The token, for functions that are compiled for a superset of its features.
    ///
    /// # Safety
    /// The machine must support the features of [`enter`].
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx512 {
        Avx512(())
    }
}

x86_entries!(Avx512(()), "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma");

// SAFETY of every block below: the token exists only inside `enter`, whose caller checked the features. Pointers are valid by the contract of the method.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one argument for all blocks, above")]
impl Simd for Avx512 {
    type V = __m512;
    type M = __mmask16;
    type Exponent = __m512;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;

    x86_methods! {
        __m512; splat = _mm512_set1_ps; load = _mm512_loadu_ps; store = _mm512_storeu_ps;
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        div(a, b) = _mm512_div_ps;
        sqrt(a) = _mm512_sqrt_ps;
        fma(a, b, c) = _mm512_fmadd_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
    }
    #[inline(always)]
    fn gt(self, a: __m512, b: __m512) -> __mmask16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) }
    }
    #[inline(always)]
    fn any(self, m: __mmask16) -> bool {
        m != 0
    }
    #[inline(always)]
    fn first(self, n: usize) -> __mmask16 {
        if n >= 16 { u16::MAX } else { (1 << n) - 1 }
    }
    #[inline(always)]
    fn select(self, m: __mmask16, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(m, b, a) }
    }
    #[inline(always)]
    fn round_to_exponent(self, x: __m512) -> (__m512, __m512) {
        let n = unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) };
        (n, n)
    }
    #[inline(always)]
    fn ldexp(self, y: __m512, exponent: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(y, exponent) }
    }
    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(x) }
    }
    #[inline(always)]
    fn maximum(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(x) }
    }
    #[inline(always)]
    unsafe fn transpose_16(self, from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // Interleaves pairs, then quadruples of rows within 128-bit lanes, then exchanges the lanes.
        unsafe {
            let mut a = [_mm512_setzero_ps(); 16];
            for (i, a) in a.iter_mut().enumerate() {
                *a = _mm512_loadu_ps(from.add(i * stride));
            }
            let mut b = a;
            for i in (0..16).step_by(2) {
                b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
                b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
            }
            for i in (0..16).step_by(4) {
                for half in 0..2 {
                    let (x, y) = (_mm512_castps_pd(b[i + half]), _mm512_castps_pd(b[i + half + 2]));
                    a[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
                    a[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
                }
            }
            // a[4g + c] contains columns c, c + 4, c + 8, c + 12 of rows 4g..4g + 4.
            for c in 0..4 {
                let low = _mm512_shuffle_f32x4::<0x88>(a[c], a[4 + c]);
                let high = _mm512_shuffle_f32x4::<0xdd>(a[c], a[4 + c]);
                let low_2 = _mm512_shuffle_f32x4::<0x88>(a[8 + c], a[12 + c]);
                let high_2 = _mm512_shuffle_f32x4::<0xdd>(a[8 + c], a[12 + c]);
                let columns = [
                    _mm512_shuffle_f32x4::<0x88>(low, low_2),
                    _mm512_shuffle_f32x4::<0x88>(high, high_2),
                    _mm512_shuffle_f32x4::<0xdd>(low, low_2),
                    _mm512_shuffle_f32x4::<0xdd>(high, high_2),
                ];
                for (i, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_ps(to.add((4 * i + c) * to_stride), column);
                }
            }
        }
    }
}
