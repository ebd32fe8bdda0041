//! The innermost loops of attention and models, with all their unsafe code.
//!
//! Each kernel is written once, generic over [`simd::Simd`]. The portable instruction set is plain Rust; tests compare every kernel with a float64 formula
//! on every instruction set of the machine.
//!
//! | module | content |
//! |---|---|
//! | [`simd`] | float32 vectors; the instruction set is selected at run time |
//! | [`buffer`], [`task_scratch`] | page-aligned memory, scratch memory per thread |
//! | [`disjoint`] | disjoint mutable blocks of one tensor for parallel tasks |
//! | [`gemm`], [`gemv`], [`bf16`] | matrix products: many rows, few rows, bfloat16 weights |
//! | [`bf16_gemm`] | matrix products of many rows with inputs rounded to bfloat16 |
//! | [`bf16_tile`] | products of a tile in float32 or with inputs rounded to bfloat16 |
//! | [`tile_gemm`], [`score_rows`], [`triangular`] | products, softmax rows and triangular solves of a tile |
//! | [`basis`], [`features`], [`state_update`] | monomials of a polynomial kernel, and its recurrent state |
//! | [`real`], [`combinatorics`] | float32 and float64, sums in a fixed order, binomials |

pub mod basis;
pub mod bf16;
pub mod bf16_gemm;
pub mod bf16_tile;
pub mod buffer;
pub mod combinatorics;
pub mod disjoint;
mod error;
pub mod features;
pub mod gemm;
pub mod gemv;
pub mod real;
pub mod score_rows;
pub mod simd;
pub mod state_update;
pub mod task_scratch;
#[doc(hidden)]
pub mod testing;
pub mod tile_gemm;
pub mod triangular;

pub use buffer::Buffer;
pub use error::Error;
pub use real::Real;

/// Number of queries and of keys of a tile.
///
/// Measured: 64 and 96 are 5 % slower. The keys and values of a tile exceed the first-level cache (64 KB at dimension 64), but the second level is fast
/// enough, and a longer row amortises its maximum and its sum.
pub const TILE: usize = 128;
/// Rows of a tile that are processed together: their scores stay in the first-level cache.
pub const ROWS: usize = 12;
/// Rows are padded to a multiple of this number of values: a vector of the widest instruction set.
pub const PAD: usize = 16;

/// Transposes a 16×16 block: rows `stride` apart to rows `to_stride` apart.
///
/// # Panics
/// If the block exceeds a slice.
#[inline(always)]
pub fn transpose<S: simd::Simd>(simd: S, from: &[f32], stride: usize, to: &mut [f32], to_stride: usize) {
    let fits = |len: usize, stride: usize| stride.checked_mul(15).is_some_and(|last| len >= 16 && last <= len - 16);
    assert!(fits(from.len(), stride) && fits(to.len(), to_stride), "a block of 16×16 values exceeds its slice");
    // SAFETY: by the assertion both slices contain 16 rows of 16 values, and a mutable slice overlaps no other.
    unsafe { simd.transpose_16(from.as_ptr(), stride, to.as_mut_ptr(), to_stride) };
}
