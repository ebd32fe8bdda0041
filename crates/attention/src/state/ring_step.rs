//! One token of a windowed KV cache: the only implementation, for single tokens and for sequential evaluation of a call.
//!
//! ```text
//! the ring inserts the key; the evicted key ─► far features ─► recurrent state of far keys
//! queries ─► all keys of the ring: U, z, ρ ─► the recurrent state ─► joined under one denominator
//! ```

use crate::epilogue::{FarSums, join};
use crate::parts::quantize;
use crate::state::block::{BLOCK, KeyBlock, QuerySums};
use crate::state::group_context::{GroupContext, TokenRows, padded};
use crate::state::memory::{GroupMemory, GroupState, HeadSums};
use crate::state::recurrent_step::{self, Entering};
use crate::state::ring::{RingKvCache, RingScratch};

use termwise_kernels::basis::Basis;
use termwise_kernels::score_rows::Visible;
use termwise_kernels::simd::Simd;

/// Values of scratch memory in addition to [`RingScratch`], for stored keys of d and far keys of `far_width` values.
pub(crate) fn scratch_len([d, far_width]: [usize; 2], ep: usize, heads: usize, basis: Option<&Basis>) -> usize {
    padded(d) + ep + padded(far_width) + heads + basis.map_or(0, |basis| recurrent_step::scratch_len(basis, heads, ep))
}

/// One token of a group with a windowed cache.
#[inline(always)]
pub(crate) fn step<S: Simd>(simd: S, context: &GroupContext, rows: TokenRows, state: &mut GroupState, scratch: &mut [f32]) {
    let GroupMemory::Ring(ring) = &mut state.memory else { return };
    let TokenRows { key, value, queries, far_queries, .. } = rows;
    let (group, ep, d) = (context.group, ring.ep, ring.d);
    let (mut ring_scratch, scratch) = RingScratch::split(ring, group.heads.len(), scratch);
    let (evicted_key, scratch) = scratch.split_at_mut(padded(d));
    let (evicted_value, scratch) = scratch.split_at_mut(ep);
    let evicted_key = &mut evicted_key[..d];

    if context.decays_by_channel() {
        // A decay per channel is part of the keys: they are stored as the next query reads them.
        ring.decay_keys(context.channel_decay());
    }
    let slot = ring.layout.slot(ring.next);
    let evicted = ring.push((key, value), evicted_key, evicted_value);
    // Heads with heavy hitters have no data per key; otherwise the evicted key was in the slot of the new one.
    let (weight, decay) = (ring.per_key[0].weight(slot), ring.per_key[0].decay(slot, context.log_decay(group.heads[0])));
    for (&head, per_key) in group.heads.iter().zip(&mut ring.per_key) {
        context.set_per_key(head, slot, per_key);
    }

    state.u.fill(0.0);
    for (sums, &head) in state.sums.iter_mut().zip(&group.heads) {
        *sums = QuerySums::new(context.head(head, false).rescale, context.sink(head));
    }
    attend(simd, context, ring, queries, (&mut state.u, &mut state.sums), &mut ring_scratch);
    if ring.rotates_values() {
        state.u.chunks_exact_mut(ep).for_each(|u| quantize::rotate(&mut u[..ring.e]));
    }
    ring.accumulate(&state.sums, &ring_scratch);
    for (row, sums) in state.rows.iter_mut().zip(&state.sums) {
        *row = HeadSums { z: sums.z(), rho: sums.rho, largest: sums.largest };
    }

    let (Some(features), Some(far)) = (context.far_features(), &mut state.far) else { return };
    let width = features.width;
    let (far_key, scratch) = scratch.split_at_mut(padded(width));
    let (sums, scratch) = scratch.split_at_mut(group.heads.len());
    let far_key = &mut far_key[..width];
    if evicted {
        ring.far_key(simd, features, evicted_key, far_key);
        evicted_value.iter_mut().for_each(|v| *v *= weight);
    } else {
        evicted_value.fill(0.0);
    }
    let entering = Entering { key: evicted.then_some((&*far_key, decay)), value: evicted_value };
    recurrent_step::far_step(simd, context, (&mut *far, &mut *sums), far_queries, entering, scratch);
    if ring.evicted() == 0 {
        return;
    }
    for (i, &head) in group.heads.iter().enumerate() {
        let (row, at, plan) = (&mut state.rows[i], i * ep, context.head(head, true));
        let far = FarSums { u: &far.u[at..][..ep], z: sums[i], log: 0.0 };
        row.rho = join(plan.has_log_scale, &mut state.u[at..][..ep], &mut row.z, row.rho, Some(far), context.joined_sink(head));
    }
}

/// Adds all keys of the ring to U [heads, ep] and the sums of every head's query.
#[inline(always)]
fn attend<S: Simd>(
    simd: S,
    context: &GroupContext,
    ring: &RingKvCache,
    queries: &[f32],
    (u, sums): (&mut [f32], &mut [QuerySums]),
    scratch: &mut RingScratch,
) {
    let width = context.state.layer.key_transforms()[context.group.key_transform].width;
    let mut x = [0.0f32; BLOCK];
    for number in 0..ring.blocks() {
        let (first, n) = ring.block_slots(number);
        if n == 0 {
            continue;
        }
        ring.dequantize_block(number, n, scratch);
        for (i, ((&head, u), sums)) in context.group.heads.iter().zip(u.chunks_exact_mut(ring.ep)).zip(&mut *sums).enumerate() {
            let (keys, pitch, values) = ring.block(number, scratch);
            let block = KeyBlock { keys, pitch, values, visible: Visible::first(n), per_key: &ring.per_key[i], first };
            let mut query = context.query(head, false, &queries[i * padded(width)..][..width], u, sums);
            query.attend(simd, &block, &mut x);
            let rho = query.sums.rho;
            scratch.record(ring, i, number, &x, rho);
        }
    }
}
