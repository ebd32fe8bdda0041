//! The passes over chunks, in parallel over kv heads and splits.

use rayon::prelude::*;

use crate::fused::chunk::backward::{KeySplit, QuerySplit};
use crate::fused::chunk::boundary_states::{SplitSum, combine};
use crate::fused::chunk::forward::ForwardSplit;
use crate::fused::chunk::{ChunkScratch, Chunks, Split};
use crate::fused::gradients::Gradients;
use crate::fused::plan::Layout;
use crate::fused::tile_backward::{self, BackwardTiles};
use crate::fused::tile_forward;
use crate::kernels::disjoint::{Axes, Axis, Blocks, Disjoint};
use crate::kernels::simd::dispatch;
use crate::task_scratch::TaskScratch;
use crate::{Buffer, Report};

/// The states of all splits [B, G, splits, state_len], one block for each; empty ones where they are not in memory.
fn blocks<'a>(c: &Chunks<'a>, states: &'a mut [f32]) -> Blocks<'a, f32> {
    let (l, s) = (c.layout, c.layout.shape);
    if !c.has_states() {
        return Blocks::empty(s.batch * s.kv_heads * l.splits);
    }
    let axes = Axes {
        batch: Axis { count: s.batch, step: s.kv_heads * l.splits * l.state_len },
        heads: Axis { count: s.kv_heads, step: l.splits * l.state_len },
        rows: Axis { count: l.splits, step: l.state_len },
        width: l.state_len,
    };
    Disjoint::new(states, axes).blocks(1, &l.split_cuts.numbers)
}

/// The batch row, kv head and split of a task.
fn place(l: &Layout, task: usize) -> (usize, usize, usize) {
    let (pair, split) = (task / l.splits, task % l.splits);
    (pair / l.shape.kv_heads, pair % l.shape.kv_heads, split)
}

/// Runs f for every split of every kv head that runs in chunks, with what it writes to.
fn each<T: Send>(
    c: &Chunks,
    states: &mut [f32],
    to: impl IndexedParallelIterator<Item = T>,
    tasks: &TaskScratch,
    f: impl Fn(Split, T) + Sync,
) {
    let l = c.layout;
    blocks(c, states).par().zip(to).enumerate().with_max_len(1).for_each(|(task, (mut states, to))| {
        let (b, g, split) = place(l, task);
        if l.groups_of(g).next().is_some() {
            tasks
                .with(|memory| f(Split { chunks: c, b, g, split, states: states.piece(), scratch: ChunkScratch::of(memory, l, true) }, to));
        }
    });
}

/// The states at the starts of all splits, or their gradients at the ends.
fn boundary_states(c: &Chunks, states: &mut [f32], tasks: &TaskScratch, backward: bool) {
    let l = c.layout;
    if l.splits < 2 {
        return;
    }
    let (splits, len) = (l.splits, l.state_len);
    states.par_chunks_exact_mut(splits * len).enumerate().with_max_len(1).for_each(|(pair, states)| {
        let (b, g) = (pair / l.shape.kv_heads, pair % l.shape.kv_heads);
        if l.groups_of(g).next().is_none() {
            return;
        }
        // A split adds to the place after it, or with gradients before it; the place at the other end is nobody's.
        let (places, end, next) = if backward { (0..splits - 1, splits - 1, 1) } else { (1..splits, 0, 0) };
        if !c.has_initial_state {
            states[end * len..(end + 1) * len].fill(0.0);
        }
        states[places.start * len..places.end * len].par_chunks_exact_mut(len).enumerate().with_max_len(1).for_each(|(i, states)| {
            tasks.with(|memory| {
                let of = Split { chunks: c, b, g, split: i + next, states, scratch: ChunkScratch::of(memory, l, false) };
                dispatch(SplitSum { of, backward });
            });
        });
        combine(c, b, g, states, backward);
    });
}

/// All heads that run in chunks, forward. `sums` and `y` come as one block for each split of each kv head.
pub fn forward(
    context: &tile_forward::Context,
    c: &Chunks,
    states: &mut [f32],
    tasks: &TaskScratch,
    sums: [Blocks<f32>; 3],
    y: Blocks<f32>,
) -> Report {
    let l = c.layout;
    boundary_states(c, states, tasks, false);
    let [u, z, rho] = sums.map(Blocks::par);
    let all = blocks(c, states).par().zip(u).zip(z).zip(rho).zip(y.par()).enumerate().with_max_len(1);
    let reports = all.map(|(task, ((((mut states, u), z), rho), y))| {
        let (b, g, split) = place(l, task);
        tasks.with(|memory| {
            let of = Split { chunks: c, b, g, split, states: states.piece(), scratch: ChunkScratch::of(memory, l, false) };
            dispatch(ForwardSplit { of, context, sums: [u, z, rho], y })
        })
    });
    reports.reduce(Report::default, Report::or)
}

/// All heads that run in chunks, backward.
pub fn backward(context: &tile_backward::Context, c: &Chunks, to: &mut Gradients, states: &mut Buffer, tasks: &TaskScratch) {
    let l = c.layout;
    if l.groups.is_empty() {
        return;
    }
    let (cuts, first_of_all) = (&l.split_cuts, !l.has_parallel_heads());
    let places = to.places(l, cuts, 0);
    places.enumerate().with_max_len(1).for_each(|(task, (to_queries, to_keys))| {
        let (b, g, split) = place(l, task);
        if l.groups_of(g).next().is_some() {
            tasks.with(|memory| {
                let (keys, queries) = (cuts.tiles(split), cuts.tiles(split));
                let room = &mut memory[..tile_backward::tiles_len(l)];
                let first = true;
                dispatch(BackwardTiles { context, b, g, keys, queries, chunked: true, first, first_of_all, to_queries, to_keys, room });
            });
        }
    });
    boundary_states(c, states, tasks, false);
    each(c, states, to.queries(l, cuts), tasks, |of, to| dispatch(QuerySplit { of, to }));
    boundary_states(c, states, tasks, true);
    for (lag, cuts) in &l.lags {
        let lag = *lag;
        each(c, states, to.keys(l, cuts), tasks, |of, to| {
            let start = cuts.padded[of.split];
            dispatch(KeySplit { of, lag, start, to });
        });
    }
}
