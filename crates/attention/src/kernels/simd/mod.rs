//! Vectors of float32 in three widths, chosen at run time: AVX-512, AVX2 with FMA, and portable code.
//!
//! Code is written once against [`Simd`], marked `#[inline(always)]` down to the intrinsics, and run through
//! [`dispatch`], which enters a function compiled for the instruction set found. Vectors do not belong into closures:
//! a closure that the compiler chooses not to inline is compiled without the instruction set, and a hundred times slower.
//!
//! ```
//! use termwise_attention::simd::{Simd, Task, dispatch};
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

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(target_arch = "x86_64")]
pub use crate::kernels::simd::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use crate::kernels::simd::avx512::Avx512;
pub use crate::kernels::simd::portable::Portable;

mod sealed {
    /// Kernels rely on what an instruction set promises, above all on at most 16 lanes: none can be added from outside.
    pub trait Sealed {}
    impl Sealed for super::Portable {}
    #[cfg(target_arch = "x86_64")]
    impl Sealed for super::Avx2 {}
    #[cfg(target_arch = "x86_64")]
    impl Sealed for super::Avx512 {}
}

/// Operations on vectors of `LANES` float32 values. The types are tokens: whoever has one may use the instructions.
pub trait Simd: sealed::Sealed + Copy + Send + Sync + 'static {
    /// A vector.
    type V: Copy;
    /// A mask with one bit a lane.
    type M: Copy;
    /// float32 values in a vector.
    const LANES: usize;
    /// Vector registers of the instruction set, which bounds the blocks of matrix products.
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
    /// a·b + c, rounded once; by [`Portable`] rounded twice where the target has no such instruction.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; b where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; b where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// a > b
    fn gt(self, a: Self::V, b: Self::V) -> Self::M;
    /// Whether any lane of the mask is set.
    fn any(self, m: Self::M) -> bool;
    /// The first n lanes.
    fn first(self, n: usize) -> Self::M;
    /// a where the mask is set, b elsewhere.
    fn select(self, m: Self::M, a: Self::V, b: Self::V) -> Self::V;
    /// x rounded to the nearest integer n, and n as [`Simd::scale`] takes it. x from −127 to 129; below, n is arbitrary.
    fn round_and_scale(self, x: Self::V) -> (Self::V, Self::Power);
    /// The second result of [`Simd::round_and_scale`].
    type Power: Copy;
    /// y·2^n
    fn scale(self, y: Self::V, power: Self::Power) -> Self::V;

    /// Asks for a cache line that will be read soon; any address will do.
    #[inline(always)]
    fn prefetch(self, _at: *const f32) {}

    /// Runs a task as a function of its own, compiled for this instruction set: for code too large to repeat at every place.
    fn call<T: Task>(self, task: T) -> T::Output;

    /// 16 rows of 16 values, `stride` apart, written as columns, `to_stride` apart.
    ///
    /// # Safety
    /// Both pointers must be valid for 16 rows of 16 values at their strides, and not overlap.
    #[inline(always)]
    unsafe fn transpose_16(self, from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        for i in 0..16 {
            for j in 0..16 {
                // SAFETY: the caller's promise.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * stride + j) };
            }
        }
    }

    /// |x|
    #[inline(always)]
    fn abs(self, x: Self::V) -> Self::V {
        self.max(x, self.sub(self.splat(0.0), x))
    }

    /// The lanes as an array, of which the first LANES count.
    #[inline(always)]
    fn to_array(self, x: Self::V) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        // SAFETY: no vector has more than 16 lanes.
        unsafe { self.store(lanes.as_mut_ptr(), x) };
        lanes
    }

    /// Σ of the lanes, in halves: the same order at every call.
    #[inline(always)]
    fn sum(self, x: Self::V) -> f32 {
        self.reduce(x, |a, b| a + b)
    }

    /// The largest lane.
    #[inline(always)]
    fn maximum(self, x: Self::V) -> f32 {
        self.reduce(x, f32::max)
    }

    /// The lanes folded in halves.
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

    /// The first values of a slice shorter than a vector, zeros behind.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::V {
        let lanes = rest(x, 0);
        // SAFETY: no vector has more than 16 lanes.
        unsafe { self.load(lanes.as_ptr()) }
    }

    /// x[i..i + LANES]; zeros behind the end of x.
    #[inline(always)]
    fn load_at(self, x: &[f32], i: usize) -> Self::V {
        if i + Self::LANES <= x.len() {
            // SAFETY: the guard leaves LANES values from i on.
            unsafe { self.load(x.as_ptr().add(i)) }
        } else {
            let lanes = rest(x, i);
            // SAFETY: no vector has more than 16 lanes.
            unsafe { self.load(lanes.as_ptr()) }
        }
    }

    /// x[i..i + LANES] = v; lanes behind the end of x are dropped.
    #[inline(always)]
    fn store_at(self, x: &mut [f32], i: usize, v: Self::V) {
        if i + Self::LANES <= x.len() {
            // SAFETY: the guard leaves LANES values from i on.
            unsafe { self.store(x.as_mut_ptr().add(i), v) };
        } else {
            put_rest(x, i, &self.to_array(v));
        }
    }

    /// 1/(1 + e^−x)
    #[inline(always)]
    fn sigmoid(self, x: Self::V) -> Self::V {
        let one = self.splat(1.0);
        self.div(one, self.add(one, self.exp(self.sub(self.splat(0.0), x))))
    }

    /// e^x within 2 units in the last place; 0 below −87.3 (no denormals), +∞ above 88.7, NaN stays NaN.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        const LOG2_E: f32 = std::f32::consts::LOG2_E;
        // ln 2 in two parts: n times the first is exact for every n that occurs.
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        const LOWEST: f32 = -87.336_54;
        // `min` gives its second argument where one is NaN, so that NaN passes through all of this.
        let inside = self.min(self.splat(89.0), x);
        let (n, power) = self.round_and_scale(self.mul(inside, self.splat(LOG2_E)));
        let r = self.fma(n, self.splat(-LN2_HIGH), inside);
        let r = self.fma(n, self.splat(-LN2_LOW), r);
        // The polynomial of degree 6 with the smallest relative error, 1.7e-8, for |r| ≤ ln 2 / 2.
        let mut p = self.splat(0.001_383_684_6);
        for c in [0.008_374_816, 0.041_668_225, 0.166_664_2, 0.499_999_9, 1.0, 1.0] {
            p = self.fma(p, r, self.splat(c));
        }
        let y = self.scale(p, power);
        self.select(self.gt(self.splat(LOWEST), x), self.splat(0.0), y)
    }
}

/// x[i..], which is less than a vector, and zeros behind. The ends of rows are met at hundreds of places: a function of its own keeps what
/// is compiled there short.
#[inline(never)]
fn rest(x: &[f32], i: usize) -> [f32; 16] {
    let mut lanes = [0.0; 16];
    lanes[..x.len() - i].copy_from_slice(&x[i..]);
    lanes
}

/// x[i..] = the first of these lanes.
#[inline(never)]
fn put_rest(x: &mut [f32], i: usize, lanes: &[f32; 16]) {
    let rest = &mut x[i..];
    rest.copy_from_slice(&lanes[..rest.len()]);
}

/// Something to run with whatever vectors the machine has.
pub trait Task {
    /// Its result.
    type Output;
    /// The work; mark it and all it calls `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Isa {
    /// Plain Rust, 8 lanes, left to the compiler.
    Portable = 1,
    /// AVX2 with FMA, 8 lanes.
    Avx2 = 2,
    /// AVX-512 F, BW, DQ, VL, 16 lanes.
    Avx512 = 3,
}

impl Isa {
    /// Those that this machine can run, slowest first.
    pub fn available() -> Vec<Isa> {
        [Isa::Portable, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.supported()).collect()
    }

    /// Whether this machine can run it.
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
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
        }
    }
}

static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// The instruction set in use: the widest that the machine has, unless [`choose`] said otherwise.
pub fn isa() -> Isa {
    match CHOSEN.load(Ordering::Relaxed) {
        1 => Isa::Portable,
        2 => Isa::Avx2,
        3 => Isa::Avx512,
        _ => {
            let best = *Isa::available().last().expect("portable is always available");
            CHOSEN.store(best as u8, Ordering::Relaxed);
            best
        }
    }
}

/// Uses this instruction set from now on in the whole process; false where the machine lacks it. For tests and benchmarks.
pub fn choose(isa: Isa) -> bool {
    let supported = isa.supported();
    if supported {
        CHOSEN.store(isa as u8, Ordering::Relaxed);
    }
    supported
}

/// Runs the task with the instruction set in use.
#[inline]
pub fn dispatch<T: Task>(task: T) -> T::Output {
    dispatch_on(isa(), task)
}

/// Runs the task with this instruction set, which the machine must support.
#[inline]
pub fn dispatch_on<T: Task>(isa: Isa, task: T) -> T::Output {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the guard has just detected the features.
        Isa::Avx512 if Isa::Avx512.supported() => unsafe { avx512::enter(task) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 if Isa::Avx2.supported() => unsafe { avx2::enter(task) },
        _ => task.run(Portable),
    }
}

#[cfg(test)]
mod tests;
