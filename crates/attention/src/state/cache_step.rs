//! One token of a KV cache: the key is appended, then every query attends to all keys.
//!
//! Keys may decay per channel before, a write rule may replace the value, and heads with a far kernel attend to the keys that have left their window in
//! a second pass.

use crate::epilogue::{FarSums, join};
use crate::state::block::{BLOCK, Query, QuerySums};
use crate::state::group_context::{GroupContext, TokenRows, padded};
use crate::state::kv_cache::KvCache;
use crate::state::memory::{GroupMemory, GroupState, HeadSums};

use termwise_kernels::score_rows::Rescale;
use termwise_kernels::simd::Simd;

/// One token of a group with a KV cache.
#[inline(always)]
pub(crate) fn step<S: Simd>(simd: S, context: &GroupContext, rows: TokenRows, state: &mut GroupState, scratch: &mut [f32]) {
    let GroupMemory::Cache(cache) = &mut state.memory else { return };
    let (TokenRows { key, value, queries, far_queries, .. }, shape) = (rows, context.state.shape);
    let t = cache.len;
    if context.decays_by_channel() {
        // A decay per channel is part of the keys: they are stored as the next query reads them.
        cache.decay_keys(context.channel_decay());
    }
    if context.write_rule().is_some() {
        written_value(simd, context, cache, key, value, scratch);
    }
    cache.push(key, &value[..shape.e]);
    for (&head, per_key) in context.group.heads.iter().zip(&mut cache.per_key) {
        context.set_per_key(head, t, per_key);
    }
    state.u.fill(0.0);
    for (sums, &head) in state.sums.iter_mut().zip(&context.group.heads) {
        *sums = QuerySums::new(context.head(head, false).rescale, context.sink(head));
    }
    attend(simd, context, cache, (queries, false), &mut state.u, &mut state.sums);
    for (row, sums) in state.rows.iter_mut().zip(&state.sums) {
        *row = HeadSums { z: sums.z(), rho: sums.rho, largest: sums.largest };
    }
    let Some(far) = &mut state.far else { return };
    far.u.fill(0.0);
    for (sums, &head) in state.sums.iter_mut().zip(&context.group.heads) {
        *sums = QuerySums::new(context.head(head, true).rescale, None);
    }
    attend(simd, context, cache, (far_queries, true), &mut far.u, &mut state.sums);
    for (i, &head) in context.group.heads.iter().enumerate() {
        let plan = context.head(head, true);
        if plan.variant.distance().far(t).is_empty() {
            continue;
        }
        let (row, at) = (&mut state.rows[i], i * cache.ep);
        let far = FarSums { u: &far.u[at..][..cache.ep], z: state.sums[i].z(), log: state.sums[i].rho };
        row.rho = join(plan.has_log_scale, &mut state.u[at..][..cache.ep], &mut row.z, row.rho, Some(far), context.joined_sink(head));
    }
}

/// Adds all near or far keys to U [heads, ep] and the sums of every head's query.
#[inline(always)]
fn attend<S: Simd>(
    simd: S,
    context: &GroupContext,
    cache: &KvCache,
    (queries, far): (&[f32], bool),
    u: &mut [f32],
    sums: &mut [QuerySums],
) {
    let t = cache.next_position() - 1;
    let mut x = [0.0f32; BLOCK];
    for block in 0..cache.blocks() {
        for (i, ((&head, u), sums)) in context.group.heads.iter().zip(u.chunks_exact_mut(cache.ep)).zip(&mut *sums).enumerate() {
            let plan = context.head(head, far);
            let (width, distance) = (context.state.layer.classes()[plan.key_transform].width, plan.variant.distance());
            let visible = if far { cache.far_visible(distance, block, t) } else { cache.near_visible(distance, block, t) };
            let q = &queries[i * padded(width)..][..width];
            let mut query = context.query(head, far, q, u, sums);
            query.attend(simd, &cache.block(block, far, width, i, visible), &mut x);
        }
    }
}

/// v ← β·(v − Σ_s w(scale·k_t·k_s)·v_s): the value that a write rule appends.
#[inline(always)]
fn written_value<S: Simd>(simd: S, context: &GroupContext, cache: &KvCache, key: &[f32], value: &mut [f32], scratch: &mut [f32]) {
    let Some((rule, beta)) = context.write_rule() else { return };
    let (head, width) = (context.group.heads[0], key.len());
    let (reader, answer) = scratch.split_at_mut(padded(width));
    let answer = &mut answer[..cache.ep];
    answer.fill(0.0);
    reader.iter_mut().zip(key).for_each(|(q, k)| *q = rule.scale as f32 * k);
    let (mut sums, mut x) = (QuerySums::new(Rescale::None, None), [0.0f32; BLOCK]);
    for block in 0..cache.blocks() {
        let visible = cache.near_visible(context.group.distance, block, cache.len);
        let query = context.query(head, false, &reader[..width], &mut *answer, &mut sums);
        Query { rescale: Rescale::None, ..query }.attend(simd, &cache.block(block, false, width, 0, visible), &mut x);
    }
    value.iter_mut().zip(&*answer).for_each(|(v, answer)| *v = beta * (*v - answer));
}
