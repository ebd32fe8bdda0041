//! Pieces of work of fixed size.

use rayon::prelude::*;

/// Values in a piece of elementwise work: 64 KB, so that a piece and its partners stay in the second cache and starting one
/// costs nothing beside it.
pub const PIECE: usize = 16 * 1024;

/// Rows of `width` values in a piece of row-wise work; depends on the width alone.
pub fn rows_of(width: usize) -> usize {
    (PIECE / width.max(1)).clamp(1, 256)
}

/// Sets every value to zero, in parallel.
pub fn zero(x: &mut [f32]) {
    x.par_chunks_mut(PIECE).for_each(|piece| piece.fill(0.0));
}
