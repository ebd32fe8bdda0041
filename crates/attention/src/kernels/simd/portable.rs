//! Plain Rust on arrays of 8: the twin of the intrinsics, and the path on every other machine.

use crate::kernels::simd::{Simd, Task};

/// Needs nothing.
#[derive(Clone, Copy)]
pub struct Portable;

type V = [f32; 8];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type V = V;
    type M = [bool; 8];
    type Power = [i32; 8];
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: the caller promises LANES readable values; arrays of float32 need no more than their alignment.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, x: V) {
        // SAFETY: the caller promises LANES writable values.
        unsafe { p.cast::<V>().write_unaligned(x) }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // Rounded twice where the compiler may not use the instruction: there a true fused operation is a library call a hundred times slower.
        const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
        std::array::from_fn(|i| if FUSED { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn gt(self, a: V, b: V) -> [bool; 8] {
        std::array::from_fn(|i| a[i] > b[i])
    }
    #[inline(always)]
    fn any(self, m: [bool; 8]) -> bool {
        m.iter().any(|&lane| lane)
    }
    #[inline(always)]
    fn first(self, n: usize) -> [bool; 8] {
        std::array::from_fn(|i| i < n)
    }
    #[inline(always)]
    fn select(self, m: [bool; 8], a: V, b: V) -> V {
        std::array::from_fn(|i| if m[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn round_and_scale(self, x: V) -> (V, [i32; 8]) {
        // Adding and subtracting 1.5·2^23 rounds to the nearest integer in plain arithmetic.
        const ROUNDER: f32 = 12_582_912.0;
        let n = x.map(|x| (x + ROUNDER) - ROUNDER);
        (n, n.map(|n| n as i32))
    }
    #[inline(always)]
    fn scale(self, y: V, power: [i32; 8]) -> V {
        std::array::from_fn(|i| {
            let half = power[i] >> 1;
            let two_to = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
            y[i] * two_to(half) * two_to(power[i].wrapping_sub(half))
        })
    }
    #[inline(never)]
    fn call<T: Task>(self, task: T) -> T::Output {
        task.run(Portable)
    }
}
