//! Conversion between two layouts of a row of q, k and v: interleaved per head, [H, 3, d], as in GPT-NeoX, and split, [3, H, d], as attention reads it.

use rayon::prelude::*;

use super::chunks::rows_per_chunk;

/// Converts each row of x [M, H, 3, d] to [3, H, d], in place.
pub fn split(x: &mut [f32], heads: usize, d: usize) {
    transpose(x, [heads, 3], d);
}

/// Converts each row of x [M, 3, H, d] to [H, 3, d], in place. This is the inverse of [`split`] and its gradient.
pub fn join(x: &mut [f32], heads: usize, d: usize) {
    transpose(x, [3, heads], d);
}

/// Transposes each row of x, a matrix of blocks of d values, in place by following the cycles of the permutation.
fn transpose(x: &mut [f32], [rows, columns]: [usize; 2], d: usize) {
    let (count, width) = (rows * columns, rows * columns * d);
    let source = |at: usize| at % rows * columns + at / rows;
    let is_first = |at: usize| {
        let mut other = source(at);
        while other > at {
            other = source(other);
        }
        other == at
    };
    x.par_chunks_mut(rows_per_chunk(width) * width).for_each(|chunk| {
        for row in chunk.chunks_exact_mut(width) {
            for first in (0..count).filter(|&at| is_first(at)) {
                let (mut at, mut from) = (first, source(first));
                while from != first {
                    let (low, high) = row.split_at_mut(at.max(from) * d);
                    low[at.min(from) * d..][..d].swap_with_slice(&mut high[..d]);
                    (at, from) = (from, source(from));
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_and_join_permute_blocks() {
        for (m, heads, d) in [(1, 1, 1), (2, 4, 3), (3, 5, 2), (700, 8, 4)] {
            let at = |m: usize, h: usize, part: usize, i: usize| (((m * heads + h) * 3 + part) * d + i) as f32;
            let interleaved: Vec<f32> = (0..m * heads * 3 * d).map(|i| i as f32).collect();
            let mut x = interleaved.clone();
            split(&mut x, heads, d);
            for (i, &value) in x.iter().enumerate() {
                let (row, part, head, coordinate) = (i / (3 * heads * d), i / (heads * d) % 3, i / d % heads, i % d);
                assert_eq!(value, at(row, head, part, coordinate), "{heads} heads of {d}, value {i}");
            }
            join(&mut x, heads, d);
            assert_eq!(x, interleaved);
        }
    }
}
