//! Division of tensors into blocks that parallel tasks write to.

use rayon::prelude::*;

use crate::fused::plan::CallPlan;
use crate::{Buffer, Shape};
use termwise_kernels::disjoint::{Axes, Axis, Blocks, Disjoint};

/// The axes of a tensor with one matrix per head: [B, H, rows, width].
pub(in crate::fused) fn by_head(s: &Shape, width: usize) -> Axes {
    Axes {
        batch: Axis { count: s.batch, step: s.heads * s.time * width },
        heads: Axis { count: s.heads, step: s.time * width },
        rows: Axis { count: s.time, step: width },
        width,
    }
}

/// y [B, T, H, e] in blocks of `group` heads and the rows between `cuts`.
pub(in crate::fused) fn output_blocks<'a>(l: &CallPlan, y: &'a mut [f32], group: usize, cuts: &'a [usize]) -> Blocks<'a, f32> {
    let s = l.shape;
    let axes = Axes {
        batch: Axis { count: s.batch, step: s.time * s.heads * s.e },
        heads: Axis { count: s.heads, step: s.e },
        rows: Axis { count: s.time, step: s.heads * s.e },
        width: s.e,
    };
    Disjoint::new(y, axes).blocks(group, cuts)
}

/// Saved sums U, z and ρ in the same blocks; empty blocks if nothing is saved.
pub(in crate::fused) fn sum_blocks<'a>(
    l: &CallPlan,
    saved: Option<[&'a mut [f32]; 3]>,
    group: usize,
    cuts: &'a [usize],
) -> [Blocks<'a, f32>; 3] {
    let s = l.shape;
    match saved {
        None => [(); 3].map(|()| Blocks::empty(s.batch * (s.heads / group) * (cuts.len() - 1))),
        Some([u, z, rho]) => [(u, l.ep), (z, 1), (rho, 1)].map(|(x, width)| Disjoint::new(x, by_head(&s, width)).blocks(group, cuts)),
    }
}

/// A tensor [B·H, T, width] in pieces of one kv head of one batch row.
pub(in crate::fused) fn by_kv_head<'a>(
    l: &CallPlan,
    x: &'a mut Buffer,
    width: usize,
) -> impl IndexedParallelIterator<Item = &'a mut [f32]> {
    let s = l.shape;
    x[..l.head_count() * s.time * width].par_chunks_exact_mut(s.group() * s.time * width)
}
