//! Matrix products, and all unsafe code of this crate besides the mapping of files into memory.
//!
//! [`gemm`] is for many rows, where multiplying takes the time; [`gemv`] for few, where reading the weights does.

pub(crate) mod gemm;
pub(crate) mod gemv;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::error::Result;
use crate::ops::pieces::PIECE;
use crate::ops::{Buffer, zeros};

/// A matrix of weights as it is stored, row-major.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stored<'a> {
    F32(&'a [f32]),
    /// Read as bfloat16, computed with in float32.
    Bf16(&'a [bf16]),
}

/// The values in float32.
pub(crate) fn widen(values: &[bf16], out: &mut [f32]) {
    (values.par_chunks(PIECE), out.par_chunks_mut(PIECE)).into_par_iter().for_each(|(values, out)| values.convert_to_f32_slice(out));
}

/// bfloat16 values in the pages of a [`Buffer`].
pub(crate) struct Bf16Buffer(Buffer);

impl Bf16Buffer {
    /// At least `len` zeros.
    pub fn zeros(what: &str, len: usize) -> Result<Bf16Buffer> {
        Ok(Bf16Buffer(zeros(what, len.div_ceil(2), 1)?))
    }

    pub fn values(&self) -> &[bf16] {
        // SAFETY: a float32 is as large as two bfloat16 and aligned for them, and every bit pattern is a bfloat16.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), 2 * self.0.len()) }
    }

    /// Rounded to nearest even, from `at` on.
    pub fn set(&mut self, at: usize, values: &[f32]) {
        // SAFETY: as in `values`; the buffer is borrowed mutably.
        let all: &mut [bf16] = unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), 2 * self.0.len()) };
        let out = &mut all[at..at + values.len()];
        (values.par_chunks(PIECE), out.par_chunks_mut(PIECE)).into_par_iter().for_each(|(values, out)| out.convert_from_f32_slice(values));
    }
}
