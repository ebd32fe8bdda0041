//! Plain Rust on arrays of 8 values: the reference of the intrinsics, and the implementation on other machines.

use crate::simd::{Simd, Task};

/// The portable instruction set.
#[derive(Clone, Copy)]
pub struct Portable;

type V = [f32; 8];

/// An array of 8 values of an expression in the lane index. Written out, because `from_fn` and `map` are loops that the compiler would have to unroll at
/// every use of an operation.
macro_rules! lanes {
    (|$i:ident| $lane:expr) => {
        lanes!(|$i| $lane; 0 1 2 3 4 5 6 7)
    };
    (|$i:ident| $lane:expr; $($n:literal)+) => {
        [$({
            const $i: usize = $n;
            $lane
        }),+]
    };
}

impl Simd for Portable {
    type V = V;
    type M = [bool; 8];
    type Exponent = [i32; 8];
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: the caller promises LANES readable values, and the read is unaligned.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: V) {
        // SAFETY: the caller promises LANES writable values, and the write is unaligned.
        unsafe { p.cast::<V>().write_unaligned(x) }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        lanes!(|I| a[I] + b[I])
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        lanes!(|I| a[I] - b[I])
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        lanes!(|I| a[I] * b[I])
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        lanes!(|I| a[I] / b[I])
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        lanes!(|I| a[I].sqrt())
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // Without the instruction a fused operation is a library call, which is a hundred times slower.
        const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
        lanes!(|I| if FUSED { a[I].mul_add(b[I], c[I]) } else { a[I] * b[I] + c[I] })
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        lanes!(|I| if a[I] > b[I] { a[I] } else { b[I] })
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        lanes!(|I| if a[I] < b[I] { a[I] } else { b[I] })
    }
    #[inline(always)]
    fn gt(self, a: V, b: V) -> [bool; 8] {
        lanes!(|I| a[I] > b[I])
    }
    #[inline(always)]
    fn any(self, m: [bool; 8]) -> bool {
        m[0] | m[1] | m[2] | m[3] | m[4] | m[5] | m[6] | m[7]
    }
    #[inline(always)]
    fn first(self, n: usize) -> [bool; 8] {
        lanes!(|I| I < n)
    }
    #[inline(always)]
    fn select(self, m: [bool; 8], a: V, b: V) -> V {
        lanes!(|I| if m[I] { a[I] } else { b[I] })
    }
    #[inline(always)]
    fn round_to_exponent(self, x: V) -> (V, [i32; 8]) {
        // Adding and subtracting 1.5·2^23 rounds to the nearest integer.
        const ROUNDER: f32 = 12_582_912.0;
        let n = lanes!(|I| (x[I] + ROUNDER) - ROUNDER);
        (n, lanes!(|I| n[I] as i32))
    }
    #[inline(always)]
    fn ldexp(self, y: V, exponent: [i32; 8]) -> V {
        let two_to = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
        lanes!(|I| y[I] * two_to(exponent[I] >> 1) * two_to(exponent[I].wrapping_sub(exponent[I] >> 1)))
    }
    #[inline(never)]
    fn call<T: Task>(self, task: T) -> T::Output {
        task.run(Portable)
    }
}
