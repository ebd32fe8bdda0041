//! Vectors of float32. The instruction set is selected at run time: AVX-512, AVX2 with FMA, or portable Rust.
//!
//! A kernel is written once, generic over [`Simd`], and marked `#[inline(always)]` down to the intrinsics. [`dispatch`] runs it within a function that is
//! compiled for the selected instruction set. Do not use vectors in closures: a closure that is not inlined is compiled without the instruction set and is
//! a hundred times slower.
//!
//! ```
//! use termwise_kernels::simd::{Simd, Task, dispatch};
//!
//! struct Double<'a>(&'a mut [f32]);
//!
//! impl Task for Double<'_> {
//!     type Output = ();
//!     #[inline(always)]
//!     fn run<S: Simd>(self, simd: S) {
//!         for i in (0..self.0.len()).step_by(S::LANES) {
//!             let x = simd.load_at(self.0, i);
//!             simd.store_at(self.0, i, simd.add(x, x));
//!         }
//!     }
//! }
//!
//! let mut x = [1.0, 2.0, 3.0];
//! dispatch(Double(&mut x));
//! assert_eq!(x, [2.0, 4.0, 6.0]);
//! ```

/// Methods of an instruction set of x86-64 that are one intrinsic each.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_methods {
    (
        $vector:ty; splat = $splat:ident; load = $load:ident; store = $store:ident;
        $($method:ident($($operand:ident),+) = $intrinsic:ident;)+
    ) => {
        #[inline(always)]
        fn splat(self, x: f32) -> $vector {
            unsafe { $splat(x) }
        }
        #[inline(always)]
        unsafe fn load(self, p: *const f32) -> $vector {
            unsafe { $load(p) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32, x: $vector) {
            unsafe { $store(p, x) }
        }
        #[inline(always)]
        fn prefetch(self, at: *const f32) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
        #[inline(always)]
        fn call<T: Task>(self, task: T) -> T::Output {
            unsafe { call(task) }
        }
        $(
            #[inline(always)]
            fn $method(self, $($operand: $vector),+) -> $vector {
                unsafe { $intrinsic($($operand),+) }
            }
        )+
    };
}

/// `enter` and `call`: functions that are compiled for an instruction set of x86-64.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_entries {
    ($token:expr, $features:literal) => {
        /// # Safety
        /// The machine must support the features of the attribute below.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn enter<T: Task>(task: T) -> T::Output {
            task.run($token)
        }

        /// # Safety
        /// As for [`enter`].
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn call<T: Task>(task: T) -> T::Output {
            task.run($token)
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(target_arch = "x86_64")]
pub use crate::simd::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use crate::simd::avx512::Avx512;
pub use crate::simd::portable::Portable;

mod sealed {
    /// Kernels rely on properties of an instruction set, such as at most 16 lanes. Other crates cannot add one.
    pub trait Sealed {}
    impl Sealed for super::Portable {}
    #[cfg(target_arch = "x86_64")]
    impl Sealed for super::Avx2 {}
    #[cfg(target_arch = "x86_64")]
    impl Sealed for super::Avx512 {}
}

/// Operations on vectors of `LANES` float32 values.
///
/// A value of an implementing type is a token: it exists only if the machine supports the instructions.
pub trait Simd: sealed::Sealed + Copy + Send + Sync + 'static {
    /// A vector.
    type V: Copy;
    /// A mask with one bit per lane.
    type M: Copy;
    /// float32 values per vector, at most 16.
    const LANES: usize;
    /// Number of vector registers. It limits the register blocks of matrix products.
    const REGISTERS: usize;

    /// x in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// LANES values from memory.
    ///
    /// # Safety
    /// `p` must be valid for reads of LANES float32 values.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// LANES values to memory.
    ///
    /// # Safety
    /// `p` must be valid for writes of LANES float32 values.
    unsafe fn store(self, p: *mut f32, x: Self::V);
    /// a + b
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a − b
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a·b
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a/b
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// √a
    fn sqrt(self, a: Self::V) -> Self::V;
    /// a·b + c. [`Avx2`] and [`Avx512`] round once.
    ///
    /// [`Portable`] rounds once only if the crate is compiled for a target with a fused multiply-add instruction (aarch64, or x86-64 with
    /// `target-feature=+fma`). On other targets, including default x86-64, it rounds the product and the sum: a fused operation would be a library call
    /// that is a hundred times slower.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger value; b if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller value; b if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// a > b
    fn gt(self, a: Self::V, b: Self::V) -> Self::M;
    /// Whether any lane of the mask is set.
    fn any(self, m: Self::M) -> bool;
    /// A mask of the first n lanes.
    fn first(self, n: usize) -> Self::M;
    /// a in lanes of the mask, b elsewhere.
    fn select(self, m: Self::M, a: Self::V, b: Self::V) -> Self::V;
    /// x rounded to the nearest integer n, and n as the argument of [`Simd::ldexp`]. Requires −127 ≤ x ≤ 129; n is arbitrary below.
    fn round_to_exponent(self, x: Self::V) -> (Self::V, Self::Exponent);
    /// A vector of integers, the second result of [`Simd::round_to_exponent`].
    type Exponent: Copy;
    /// y·2^n
    fn ldexp(self, y: Self::V, exponent: Self::Exponent) -> Self::V;

    /// Prefetches a cache line. Any address is allowed.
    #[inline(always)]
    fn prefetch(self, _at: *const f32) {}

    /// Runs a task as a separate function compiled for this instruction set. For code that is too large to inline at every call.
    fn call<T: Task>(self, task: T) -> T::Output;

    /// Transposes a 16×16 block: rows `stride` apart to rows `to_stride` apart.
    ///
    /// # Safety
    /// Both pointers must be valid for 16 rows of 16 values at their strides, and not overlap.
    #[inline(always)]
    unsafe fn transpose_16(self, from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        for i in 0..16 {
            for j in 0..16 {
                // SAFETY: the caller promises 16 rows of 16 values at both pointers.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * stride + j) };
            }
        }
    }

    /// |x|
    #[inline(always)]
    fn abs(self, x: Self::V) -> Self::V {
        self.max(x, self.sub(self.splat(0.0), x))
    }

    /// The lanes as the first LANES values of an array; the others are zero.
    #[inline(always)]
    fn to_array(self, x: Self::V) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        // SAFETY: a vector has at most 16 lanes.
        unsafe { self.store(lanes.as_mut_ptr(), x) };
        lanes
    }

    /// Sum of the lanes. Repeatedly adds the upper half to the lower half, so the order is fixed.
    #[inline(always)]
    fn sum(self, x: Self::V) -> f32 {
        self.reduce(x, |a, b| a + b)
    }

    /// The largest lane.
    #[inline(always)]
    fn maximum(self, x: Self::V) -> f32 {
        self.reduce(x, f32::max)
    }

    /// Reduces the lanes with f, which repeatedly combines the upper half with the lower half.
    #[inline(always)]
    fn reduce(self, x: Self::V, f: impl Fn(f32, f32) -> f32) -> f32 {
        let mut lanes = self.to_array(x);
        let mut width = Self::LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] = f(lanes[i], lanes[i + width]);
            }
            width /= 2;
        }
        lanes[0]
    }

    /// Loads at most 16 values, padded with zeros.
    ///
    /// # Panics
    /// If the slice is longer.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::V {
        let lanes = load_end(x, 0);
        // SAFETY: a vector has at most 16 lanes.
        unsafe { self.load(lanes.as_ptr()) }
    }

    /// Loads x[i..i + LANES], padded with zeros past the end of x.
    #[inline(always)]
    fn load_at(self, x: &[f32], i: usize) -> Self::V {
        if i + Self::LANES <= x.len() {
            // SAFETY: x has LANES values from i on.
            unsafe { self.load(x.as_ptr().add(i)) }
        } else {
            let lanes = load_end(x, i);
            // SAFETY: a vector has at most 16 lanes.
            unsafe { self.load(lanes.as_ptr()) }
        }
    }

    /// Stores v to x[i..i + LANES]. Lanes past the end of x are ignored.
    #[inline(always)]
    fn store_at(self, x: &mut [f32], i: usize, v: Self::V) {
        if i + Self::LANES <= x.len() {
            // SAFETY: x has LANES values from i on.
            unsafe { self.store(x.as_mut_ptr().add(i), v) };
        } else {
            store_end(x, i, &self.to_array(v));
        }
    }

    /// 1/(1 + e^−x)
    #[inline(always)]
    fn sigmoid(self, x: Self::V) -> Self::V {
        let one = self.splat(1.0);
        self.div(one, self.add(one, self.exp(self.sub(self.splat(0.0), x))))
    }

    /// e^x within 2 ULP. 0 below −87.3 (no subnormals), +∞ above 88.7. NaN propagates.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        const LOG2_E: f32 = std::f32::consts::LOG2_E;
        // ln 2 as a sum of two constants: n times the first is exact for every n in range.
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        const LOWEST: f32 = -87.336_54;
        // `min` returns its second argument if either is NaN, so NaN propagates.
        let inside = self.min(self.splat(89.0), x);
        let (n, exponent) = self.round_to_exponent(self.mul(inside, self.splat(LOG2_E)));
        let r = self.fma(n, self.splat(-LN2_HIGH), inside);
        let r = self.fma(n, self.splat(-LN2_LOW), r);
        // Minimax polynomial of degree 6 for |r| ≤ ln 2 / 2: relative error 1.7e-8.
        let mut p = self.splat(0.001_383_684_6);
        for c in [0.008_374_816, 0.041_668_225, 0.166_664_2, 0.499_999_9, 1.0, 1.0] {
            p = self.fma(p, r, self.splat(c));
        }
        let y = self.ldexp(p, exponent);
        self.select(self.gt(self.splat(LOWEST), x), self.splat(0.0), y)
    }
}

/// x[i..], shorter than a vector, padded with zeros. Not inlined, because hundreds of kernels contain the end of a row.
#[inline(never)]
fn load_end(x: &[f32], i: usize) -> [f32; 16] {
    let mut lanes = [0.0; 16];
    lanes[..x.len() - i].copy_from_slice(&x[i..]);
    lanes
}

/// Stores the first lanes to x[i..].
#[inline(never)]
fn store_end(x: &mut [f32], i: usize, lanes: &[f32; 16]) {
    let rest = &mut x[i..];
    rest.copy_from_slice(&lanes[..rest.len()]);
}

/// A computation that is generic over the instruction set.
pub trait Task {
    /// The result.
    type Output;
    /// Runs the computation. Mark it and every function that it calls `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Isa {
    /// Plain Rust on arrays of 8 values.
    Portable = 1,
    /// AVX2 with FMA, 8 lanes.
    Avx2 = 2,
    /// AVX-512 F, BW, DQ, VL, 16 lanes.
    Avx512 = 3,
}

impl Isa {
    /// The instruction sets that this machine supports, slowest first.
    pub fn available() -> Vec<Isa> {
        [Isa::Portable, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.supported()).collect()
    }

    /// Whether this machine supports it.
    pub fn supported(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.supported()
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
        }
    }
}

/// The selected instruction set; 0 before the first use.
static SELECTED: AtomicU8 = AtomicU8::new(0);

/// The selected instruction set: the last argument of [`choose`], else the widest that the machine supports.
pub fn isa() -> Isa {
    match SELECTED.load(Ordering::Relaxed) {
        1 => Isa::Portable,
        2 => Isa::Avx2,
        3 => Isa::Avx512,
        _ => {
            let best = *Isa::available().last().expect("portable is always available");
            SELECTED.store(best as u8, Ordering::Relaxed);
            best
        }
    }
}

/// Selects an instruction set for the whole process. Returns false and changes nothing if the machine does not support it. For tests and benchmarks.
pub fn choose(isa: Isa) -> bool {
    let supported = isa.supported();
    if supported {
        SELECTED.store(isa as u8, Ordering::Relaxed);
    }
    supported
}

/// Runs the task with the selected instruction set.
#[inline]
pub fn dispatch<T: Task>(task: T) -> T::Output {
    dispatch_on(isa(), task)
}

/// Runs the task with this instruction set, or with portable code if the machine does not support it.
#[inline]
pub fn dispatch_on<T: Task>(isa: Isa, task: T) -> T::Output {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the guard detects the features.
        Isa::Avx512 if Isa::Avx512.supported() => unsafe { avx512::enter(task) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the guard detects the features.
        Isa::Avx2 if Isa::Avx2.supported() => unsafe { avx2::enter(task) },
        _ => task.run(Portable),
    }
}

#[cfg(test)]
mod tests;
