//! Parallel work in chunks of fixed size.

use rayon::prelude::*;

/// Values per chunk of elementwise work. A chunk is 64 KB, so a few of them fit into the L2 cache and the cost of scheduling one is negligible.
pub const CHUNK_LEN: usize = 16 * 1024;

/// Rows per chunk of row-wise work on rows of `width` values. Depends on the width alone.
pub fn rows_per_chunk(width: usize) -> usize {
    (CHUNK_LEN / width.max(1)).clamp(1, 256)
}

/// Sets every value to zero, in parallel.
pub fn zero(x: &mut [f32]) {
    x.par_chunks_mut(CHUNK_LEN).for_each(|chunk| chunk.fill(0.0));
}
