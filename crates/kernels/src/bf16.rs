//! Weight matrices in float32 or bfloat16, and conversion between them.

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::{Buffer, Error};

/// Values converted per parallel task.
const TASK_VALUES: usize = 16 * 1024;

/// A row-major weight matrix in its storage type. Products compute in float32.
#[derive(Clone, Copy, Debug)]
pub enum WeightMatrix<'a> {
    /// float32
    F32(&'a [f32]),
    /// bfloat16
    Bf16(&'a [bf16]),
}

/// Converts to float32: `out[i] = values[i]`.
pub fn widen(values: &[bf16], out: &mut [f32]) {
    (values.par_chunks(TASK_VALUES), out.par_chunks_mut(TASK_VALUES))
        .into_par_iter()
        .for_each(|(values, out)| values.convert_to_f32_slice(out));
}

/// bfloat16 values in the memory of a [`Buffer`].
pub struct Bf16Buffer(Buffer);

impl Bf16Buffer {
    /// `len` zeros, rounded up to an even number.
    ///
    /// # Errors
    /// If the system has no memory for them.
    pub fn zeros(len: usize) -> Result<Bf16Buffer, Error> {
        Ok(Bf16Buffer(Buffer::zeros(len.div_ceil(2))?))
    }

    /// The values.
    pub fn values(&self) -> &[bf16] {
        // SAFETY: a float32 has the size of two bfloat16 and at least their alignment, and every bit pattern is a valid bfloat16.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), 2 * self.0.len()) }
    }

    /// Stores values from index `at` on, rounded to nearest even.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn set(&mut self, at: usize, values: &[f32]) {
        // SAFETY: as in `values`; the buffer is borrowed mutably.
        let all: &mut [bf16] = unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), 2 * self.0.len()) };
        let out = &mut all[at..at + values.len()];
        (values.par_chunks(TASK_VALUES), out.par_chunks_mut(TASK_VALUES))
            .into_par_iter()
            .for_each(|(values, out)| out.convert_from_f32_slice(values));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::uniform;

    #[test]
    fn buffer_rounds_to_nearest_and_widens_exactly() {
        // More than one task.
        let values = uniform(2 * TASK_VALUES + 5, 1);
        let mut buffer = Bf16Buffer::zeros(values.len() + 3).expect("memory");
        buffer.set(3, &values);
        assert_eq!(buffer.values().len(), (values.len() + 3).next_multiple_of(2));
        assert!(buffer.values()[..3].iter().all(|x| x.to_bits() == 0));
        let mut wide = vec![f32::NAN; values.len()];
        widen(&buffer.values()[3..3 + values.len()], &mut wide);
        for (found, value) in wide.iter().zip(&values) {
            assert_eq!(found.to_bits(), bf16::from_f32(*value).to_f32().to_bits());
        }
    }

    #[test]
    #[should_panic]
    fn values_past_the_end_are_refused() {
        Bf16Buffer::zeros(4).expect("memory").set(3, &[0.0; 2]);
    }
}
