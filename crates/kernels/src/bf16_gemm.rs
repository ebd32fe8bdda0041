//! C = A·B with inputs rounded to bfloat16 and sums in float32, for any transposition of A and B.
//!
//! Both operands are rounded and packed first, in pairs along k as `vdpbf16ps` reads them. A weight matrix that is multiplied often is packed once into a
//! [`PackedBf16`]. Packing writes panels of [`MR`] rows of A and of [`NR`] columns of B; a tile of the output is the product of two panels.
//!
//! # Arithmetic
//! The arithmetic of `vdpbf16ps`, as measured on Zen 4 and as in Intel's manual, is two fused multiply-adds, the odd element of a pair first:
//!
//! ```text
//! sum = fma(a[2p], b[2p], fma(a[2p + 1], b[2p + 1], sum))
//! ```
//!
//! Both round to nearest even. Subnormal inputs and results are replaced by zero of the same sign. Sums over [`KC`] pairs start at zero and are added to the
//! output in the order of k. The order does not depend on tiles, so the bits do not depend on the number of threads.
//!
//! Without AVX512-BF16 the inputs are rounded to bfloat16 and multiplied in float32, see [`Bf16Isa`].

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

use rayon::prelude::*;

use crate::gemm::{self, Matrix, Write, fits};
use crate::{Buffer, Error};

/// Rows of a tile of the output.
pub const MR: usize = 12;
/// Columns of a tile of the output: two vectors of 16.
pub const NR: usize = 32;
/// Pairs along k per block. The panel of A of a block (12 KB) stays in the first-level cache while panels of B pass.
pub const KC: usize = 256;
/// Values rounded per parallel task of [`Bf16Isa::Rounded`].
const ROUND_VALUES: usize = 16 * 1024;

/// The implementation of a product. Each has its own packed layout. AMX would be another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bf16Isa {
    /// Inputs are rounded to bfloat16 and stored as float32. The product is [`gemm::product`], so it is as fast as in float32 at most.
    #[default]
    Rounded,
    /// `vdpbf16ps` on vectors of 16 pairs.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

impl Bf16Isa {
    /// The fastest one that the machine supports and [`crate::simd::choose`] admits.
    pub fn selected() -> Bf16Isa {
        #[cfg(target_arch = "x86_64")]
        if crate::simd::isa() == crate::simd::Isa::Avx512 && is_x86_feature_detected!("avx512bf16") {
            return Bf16Isa::Avx512Bf16;
        }
        Bf16Isa::Rounded
    }

    /// Whether it computes with bfloat16 instructions.
    pub fn is_native(self) -> bool {
        self != Bf16Isa::Rounded
    }
}

/// x rounded to bfloat16, to nearest even. Subnormal values become zero, as in `vcvtneps2bf16`.
pub fn round(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(match x {
        _ if x.is_nan() => (bits | 0x0040_0000) & 0xffff_0000,
        _ if x.is_subnormal() => bits & 0x8000_0000,
        _ => (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000,
    })
}

/// The right operand B [k, n] of a product, rounded and packed.
#[derive(Clone, Debug, Default)]
pub struct PackedBf16 {
    isa: Bf16Isa,
    k: usize,
    n: usize,
    /// [`Bf16Isa::Avx512Bf16`]: [n / NR, k / 2, NR] pairs. [`Bf16Isa::Rounded`]: row-major [k, n], or [n, k] if `transposed`.
    values: Buffer,
    transposed: bool,
}

impl PackedBf16 {
    /// Rounds and packs a matrix. Reuses the memory of the last one if it is large enough.
    ///
    /// # Errors
    /// If the system has no memory for it.
    pub fn pack(&mut self, b: Matrix) -> Result<(), Error> {
        (self.k, self.n) = (b.rows, b.columns);
        match Bf16Isa::selected() {
            Bf16Isa::Rounded => self.pack_rounded(b)?,
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `selected` detected the features.
            isa @ Bf16Isa::Avx512Bf16 => unsafe {
                avx512::pack_b(b, &mut self.values)?;
                self.isa = isa;
            },
        }
        Ok(())
    }

    fn pack_rounded(&mut self, b: Matrix) -> Result<(), Error> {
        (self.isa, self.k, self.n) = (Bf16Isa::Rounded, b.rows, b.columns);
        self.transposed = round_matrix(b, &mut self.values)?;
        Ok(())
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.values.bytes()
    }
}

/// The memory of products: the packed operands of a call.
#[derive(Clone, Debug, Default)]
pub struct Bf16Workspace {
    a: Buffer,
    b: PackedBf16,
}

impl Bf16Workspace {
    /// out = a·b or out += a·b on the threads of the current rayon pool, as [`gemm::product`].
    ///
    /// # Errors
    /// If the system has no memory for the packed operands.
    ///
    /// # Panics
    /// If the inner dimensions differ or the output exceeds its slice.
    pub fn product(&mut self, out: &mut [f32], step: usize, write: Write, a: Matrix, b: Matrix) -> Result<(), Error> {
        self.b.pack(b)?;
        multiply(&mut self.a, (out, step), write, a, &self.b)
    }

    /// [`Bf16Workspace::product`] with a right operand that is packed already.
    ///
    /// # Errors
    /// If the system has no memory for the packed operand.
    ///
    /// # Panics
    /// As [`Bf16Workspace::product`].
    pub fn product_packed(&mut self, out: &mut [f32], step: usize, write: Write, a: Matrix, b: &PackedBf16) -> Result<(), Error> {
        multiply(&mut self.a, (out, step), write, a, b)
    }
}

fn multiply(packed: &mut Buffer, (out, step): (&mut [f32], usize), write: Write, a: Matrix, b: &PackedBf16) -> Result<(), Error> {
    assert_eq!(a.columns, b.k, "inner dimensions of a product differ");
    let [m, n, k] = [a.rows, b.n, b.k];
    assert!(n <= step && fits(out.len(), m, n, step), "output [{m}, {n}] exceeds its slice of {} values", out.len());
    match b.isa {
        Bf16Isa::Rounded => {
            let view = |values, rows, columns, transposed| match transposed {
                true => Matrix::new(values, columns, rows).transposed(),
                false => Matrix::new(values, rows, columns),
            };
            let transposed = round_matrix(a, packed)?;
            gemm::product(out, step, write, view(packed, m, k, transposed), view(&b.values, k, n, b.transposed));
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `PackedBf16::pack` detected the features. The assertions bound the output, and `pack` made panels of [k, n].
        Bf16Isa::Avx512Bf16 => unsafe { avx512::multiply(packed, (out, step), write, a, (&b.values, n))? },
    }
    Ok(())
}

/// Rounds a matrix to bfloat16 values in float32, in the order of its storage. Returns whether the rows of the storage are the columns of the matrix.
fn round_matrix(matrix: Matrix, out: &mut Buffer) -> Result<bool, Error> {
    let transposed = matrix.column_step != 1;
    let stored = if transposed { matrix.transposed() } else { matrix };
    out.ensure(stored.rows * stored.columns)?;
    let rows = ROUND_VALUES.div_ceil(stored.columns.max(1));
    out.par_chunks_mut((rows * stored.columns).max(1)).enumerate().for_each(|(task, out)| {
        for (i, out) in out.chunks_mut(stored.columns).enumerate() {
            let row = &stored.values[(task * rows + i) * stored.row_step..][..stored.columns];
            out.iter_mut().zip(row).for_each(|(out, &x)| *out = round(x));
        }
    });
    Ok(transposed)
}

#[cfg(test)]
pub(crate) mod tests;
