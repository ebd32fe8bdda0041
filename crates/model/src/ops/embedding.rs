//! Token embedding: x_m = c·E[id_m], with x [M, C], E [V, C] and a scalar c. Backward: dE[v] += c·Σ_{m: id_m = v} dx_m.

use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::chunks::rows_per_chunk;
use termwise_kernels::bf16::WeightMatrix;

/// Looks up x [M, C] for ids [M], each below V.
pub(crate) fn forward(ids: &[u32], table: WeightMatrix, scale: f32, x: &mut [f32], width: usize) {
    let rows = rows_per_chunk(width);
    (ids.par_chunks(rows), x.par_chunks_mut(rows * width)).into_par_iter().for_each(|(ids, x)| {
        for (&id, row) in ids.iter().zip(x.chunks_exact_mut(width)) {
            let range = id as usize * width..(id as usize + 1) * width;
            match table {
                WeightMatrix::F32(table) => row.copy_from_slice(&table[range]),
                WeightMatrix::Bf16(table) => table[range].convert_to_f32_slice(row),
            }
            if scale != 1.0 {
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
    });
}

/// Positions grouped by token, so the gradients of table rows can be summed in parallel, each in the order of positions.
#[derive(Default)]
pub struct TokenPositions {
    /// Start of each token's positions in `positions`. [V + 1]
    starts: Vec<u32>,
    /// Positions, ascending per token. [M]
    positions: Vec<u32>,
}

impl TokenPositions {
    /// Buffers for M positions and a vocabulary of V tokens.
    pub fn new(rows: usize, vocabulary: usize) -> TokenPositions {
        TokenPositions { starts: Vec::with_capacity(vocabulary + 1), positions: Vec::with_capacity(rows) }
    }

    /// A counting sort. It is stable, so positions ascend.
    fn sort(&mut self, ids: &[u32], vocabulary: usize) {
        let TokenPositions { starts, positions } = self;
        starts.clear();
        starts.resize(vocabulary + 1, 0);
        positions.clear();
        positions.resize(ids.len(), 0);
        for &id in ids {
            starts[id as usize] += 1;
        }
        let mut end = 0;
        for start in starts.iter_mut() {
            end += *start;
            *start = end;
        }
        // Filled back to front: each start moves from the end of its group to its beginning.
        for (m, &id) in ids.iter().enumerate().rev() {
            starts[id as usize] -= 1;
            positions[starts[id as usize] as usize] = m as u32;
        }
    }

    fn of(&self, token: usize) -> &[u32] {
        &self.positions[self.starts[token] as usize..self.starts[token + 1] as usize]
    }
}

/// Adds the rows of dx [M, C] to dE [V, C]; each table row is summed in the order of positions.
pub fn backward(ids: &[u32], dx: &[f32], scale: f32, dtable: &mut [f32], width: usize, groups: &mut TokenPositions) {
    groups.sort(ids, dtable.len() / width);
    let rows = rows_per_chunk(width);
    let groups = &*groups;
    dtable.par_chunks_mut(rows * width).enumerate().for_each(|(i, chunk)| {
        for (j, row) in chunk.chunks_exact_mut(width).enumerate() {
            for &m in groups.of(i * rows + j) {
                row.iter_mut().zip(&dx[m as usize * width..][..width]).for_each(|(sum, dx)| *sum += scale * dx);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::numbers;

    #[test]
    fn lookup_and_gradient_match_a_plain_loop() {
        for (v, c, m, scale) in [(5, 3, 11, 1.0), (1, 1, 4, 3.0), (700, 40, 300, 1.0), (700, 40, 300, 6.5)] {
            let ids: Vec<u32> = (0..m).map(|i| (i * i * 7 + 3) as u32 % v as u32).collect();
            let (table, dx) = (numbers(v * c, 1), numbers(m * c, 2));
            let mut x = vec![f32::NAN; m * c];
            forward(&ids, WeightMatrix::F32(&table), scale, &mut x, c);
            let mut expected = numbers(v * c, 3);
            let mut dtable = expected.clone();
            for (i, &id) in ids.iter().enumerate() {
                let id = id as usize;
                assert!(x[i * c..][..c].iter().zip(&table[id * c..][..c]).all(|(x, e)| *x == scale * e));
                expected[id * c..][..c].iter_mut().zip(&dx[i * c..]).for_each(|(sum, dx)| *sum += scale * dx);
            }
            backward(&ids, &dx, scale, &mut dtable, c, &mut TokenPositions::new(m, v));
            assert_eq!(dtable, expected);
        }
    }
}
