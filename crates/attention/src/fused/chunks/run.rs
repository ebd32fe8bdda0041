//! The passes over chunks, in parallel over kv heads and splits.

use rayon::prelude::*;

use crate::Report;
use crate::fused::blocks::{output_blocks, sum_blocks};
use crate::fused::chunks::backward::{KeySplit, QuerySplit};
use crate::fused::chunks::boundary_states::{SplitSum, combine};
use crate::fused::chunks::forward::ForwardSplit;
use crate::fused::chunks::{ChunkScratch, Chunks, Split, SplitStates};
use crate::fused::gradients::TileGrads;
use crate::fused::plan::CallPlan;
use crate::fused::prepared::Prepared;
use crate::fused::tiles::backward::{BackwardTiles, TileInputs, tiles_len};
use termwise_kernels::bf16_tile::TileF32;
use termwise_kernels::disjoint::{Axes, Axis, Blocks, Disjoint};
use termwise_kernels::simd::dispatch;

/// The states of all splits [B, G, splits, state_len], one block per split; empty blocks if they are not in memory.
fn blocks<'a>(c: &Chunks<'a>, states: &'a mut [f32]) -> Blocks<'a, f32> {
    let (l, s) = (c.plan, c.plan.shape);
    if !c.has_states() {
        return Blocks::empty(s.batch * s.kv_heads * l.splits);
    }
    let axes = Axes {
        batch: Axis { count: s.batch, step: s.kv_heads * l.splits * l.state_len },
        heads: Axis { count: s.kv_heads, step: l.splits * l.state_len },
        rows: Axis { count: l.splits, step: l.state_len },
        width: l.state_len,
    };
    Disjoint::new(states, axes).blocks(1, &l.split_parts.numbers)
}

/// The batch row, kv head and split of a task.
fn place(l: &CallPlan, task: usize) -> (usize, usize, usize) {
    let (pair, split) = (task / l.splits, task % l.splits);
    (pair / l.shape.kv_heads, pair % l.shape.kv_heads, split)
}

/// Runs f for every split of every kv head that runs in chunks, with the blocks that it writes.
fn each<T: Send>(c: &Chunks, states: &mut [f32], to: impl IndexedParallelIterator<Item = T>, f: impl Fn(Split, T) + Sync) {
    let (l, tasks) = (c.plan, c.prepared.call.tasks);
    blocks(c, states).par().zip(to).enumerate().with_max_len(1).for_each(|(task, (mut states, to))| {
        let (b, g, split) = place(l, task);
        if l.groups_of(g).next().is_some() {
            tasks
                .with(|memory| f(Split { chunks: c, b, g, split, states: states.piece(), scratch: ChunkScratch::of(memory, l, true) }, to));
        }
    });
}

/// The states at the starts of all splits, or their gradients at the ends.
fn boundary_states(c: &Chunks, states: &mut [f32], backward: bool) {
    let (l, tasks) = (c.plan, c.prepared.call.tasks);
    if l.splits < 2 {
        return;
    }
    let (splits, len) = (l.splits, l.state_len);
    states.par_chunks_exact_mut(splits * len).enumerate().with_max_len(1).for_each(|(pair, states)| {
        let (b, g) = (pair / l.shape.kv_heads, pair % l.shape.kv_heads);
        if l.groups_of(g).next().is_none() {
            return;
        }
        // A split contributes to the state after it, or to the gradient before it. The state at the other end has no contribution.
        let (places, end, next) = if backward { (0..splits - 1, splits - 1, 1) } else { (1..splits, 0, 0) };
        if !c.has_initial_state() {
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

/// Values of task memory that the forward pass needs, or the backward pass.
pub fn task_len(l: &CallPlan, backward: bool) -> usize {
    match (l.groups.is_empty(), backward) {
        (true, _) => 0,
        (false, false) => ChunkScratch::len(l, false),
        (false, true) => ChunkScratch::len(l, true).max(ChunkScratch::len(l, false)),
    }
}

/// y of all heads that run in chunks, and their sums if they are saved. One task per kv head and split.
pub fn forward(prepared: &Prepared, states: &mut SplitStates, saved: Option<[&mut [f32]; 3]>, y: &mut [f32]) -> Report {
    let (l, c, states) = (prepared.call.plan, &Chunks::new(prepared), &mut states.values);
    let (group, cuts) = (l.shape.group(), &l.split_parts.positions);
    boundary_states(c, states, false);
    let [u, z, rho] = sum_blocks(l, saved, group, cuts).map(Blocks::par);
    let y = output_blocks(l, y, group, cuts).par();
    let all = blocks(c, states).par().zip(u).zip(z).zip(rho).zip(y).enumerate().with_max_len(1);
    let reports = all.map(|(task, ((((mut states, u), z), rho), y))| {
        let (b, g, split) = place(l, task);
        prepared.call.tasks.with(|memory| {
            let of = Split { chunks: c, b, g, split, states: states.piece(), scratch: ChunkScratch::of(memory, l, false) };
            dispatch(ForwardSplit { of, sums: [u, z, rho], y })
        })
    });
    reports.reduce(Report::default, Report::or)
}

/// Gradients of prepared q, k and v, of c, key weights and learned coefficients, of all heads that run in chunks.
pub fn backward(inputs: &TileInputs, states: &mut SplitStates, to: &mut TileGrads) {
    let TileInputs { prepared, du, dz, .. } = *inputs;
    let (l, c, states) = (prepared.call.plan, &Chunks { du, dz, ..Chunks::new(prepared) }, &mut states.values);
    let (cuts, first_of_all) = (&l.split_parts, !l.has_parallel_heads());
    let places = to.places(l, cuts, 0);
    places.enumerate().with_max_len(1).for_each(|(task, (to_queries, to_keys))| {
        let (b, g, split) = place(l, task);
        if l.groups_of(g).next().is_some() {
            prepared.call.tasks.with(|memory| {
                let (keys, queries) = (cuts.tiles(split), cuts.tiles(split));
                let room = &mut memory[..tiles_len(l)];
                let (precision, first) = (TileF32, true);
                dispatch(BackwardTiles {
                    precision,
                    inputs,
                    b,
                    g,
                    keys,
                    queries,
                    chunked: true,
                    first,
                    first_of_all,
                    to_queries,
                    to_keys,
                    room,
                });
            });
        }
    });
    boundary_states(c, states, false);
    each(c, states, to.queries(l, cuts), |of, to| dispatch(QuerySplit { of, to }));
    boundary_states(c, states, true);
    for (lag, cuts) in &l.lags {
        let lag = *lag;
        each(c, states, to.keys(l, cuts), |of, to| {
            let start = cuts.padded[of.split];
            dispatch(KeySplit { of, lag, start, to });
        });
    }
}
