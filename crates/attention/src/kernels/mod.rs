//! The innermost loops, with all unsafe code of the crate: vectors, products of tiles, rows of scores, monomial features, state updates.

pub mod basis;
pub(crate) mod disjoint;
pub(crate) mod features;
pub(crate) mod gemm;
pub mod score_rows;
pub mod simd;
pub(crate) mod state_update;
pub(crate) mod triangular;

/// Queries and keys of a tile. Measured: 128 keys leave the first-level cache (64 KB at dimension 64), but the second feeds the
/// products fast enough, and longer rows share the cost of their maximum and their sums; 64 and 96 are 5 % slower.
pub const TILE: usize = 128;
/// Rows of a tile that are finished together, while their scores are still in the first-level cache.
pub const ROWS: usize = 12;
/// Rows are padded to whole vectors of the widest kind.
pub const PAD: usize = 16;

/// 16 rows of 16 values, `stride` apart, written as columns, `to_stride` apart.
#[inline(always)]
pub(crate) fn transpose<S: simd::Simd>(simd: S, from: &[f32], stride: usize, to: &mut [f32], to_stride: usize) {
    assert!(from.len() >= 15 * stride + 16 && to.len() >= 15 * to_stride + 16, "a square of 16 rows lies within both slices");
    // SAFETY: as asserted; a mutable slice overlaps no other.
    unsafe { simd.transpose_16(from.as_ptr(), stride, to.as_mut_ptr(), to_stride) };
}
