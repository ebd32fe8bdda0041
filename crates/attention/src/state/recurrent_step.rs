//! One token of a recurrent state, in one pass: each row of H is read once, used, decayed, updated and stored.
//!
//! ```text
//! U_t = m_t·Q_tᵀ·H_{t−1} + w(x_tt)·v'_t      z_t = m_t·Q_tᵀ·z_{t−1} + w(x_tt)      v' = I·κ·v
//! H_t = m_t·H_{t−1} + K_t·v'_tᵀ
//! ```
//!
//! With a write rule the key reads before it writes, v' = β·(v − m_t·K̂_tᵀ·H_{t−1}): two passes over columns of H while they are in the CPU cache.
//!
//! The weight of the token itself is computed from its score: the sum over monomials has rounding errors of the size of (Σ_i |q_i·k_i|)^n however small
//! (q·k)^n is, and at the first positions it is the only key.

use crate::state::group_context::{GroupContext, TokenRows, padded};
use crate::state::memory::{FarState, GroupMemory, GroupState, HeadSums};

use termwise_kernels::basis::{Basis, decay_rows};
use termwise_kernels::real::dot;
use termwise_kernels::simd::{Simd, Task};
use termwise_kernels::state_update::{StateUpdate, read_sums};

/// Values of scratch memory for this many heads.
pub(crate) fn scratch_len(basis: &Basis, heads: usize, ep: usize) -> usize {
    // One query more than heads: the key, if there is a write rule.
    padded(basis.lower_order_rows()) + padded(basis.rows()) * (2 + heads) + ep * (1 + heads) + heads
}

/// One token of a group without a cache.
#[inline(always)]
pub(crate) fn step<S: Simd>(simd: S, context: &GroupContext, rows: TokenRows, state: &mut GroupState, scratch: &mut [f32]) {
    let (GroupMemory::Recurrent { h, z }, Some(basis)) = (&mut state.memory, context.basis) else { return };
    let TokenRows { key, value, queries, .. } = rows;
    // Gates and weights are the same for all heads of the group, or it has one head.
    let first = context.group.heads[0];
    value[..context.state.shape.e].iter_mut().for_each(|v| *v *= context.key_weight(first));
    if context.decays_by_channel() {
        decay_rows(basis, context.channel_decay(), h, z, scratch);
    }
    let (sums, scratch) = scratch.split_at_mut(context.group.heads.len());
    let beta = context.write_rule().map(|(_, beta)| beta);
    let entering = Some((&*key, 1.0));
    let (m, u) = (context.decay(first), &mut state.u[..]);
    simd.call(RecurrentStep { context, far: false, basis, m, beta, queries, entering, value, h, z, u, sums, scratch });
    let width = basis.d();
    for ((query, row), &z) in queries.chunks_exact(padded(width)).zip(&mut state.rows).zip(&*sums) {
        let largest = dot(&query[..width], &query[..width]).sqrt() * state.key_norm;
        *row = HeadSums { z, rho: 0.0, largest };
    }
}

/// The key that enters a recurrent state of far keys, with its weighted value and its decay since its position.
pub(crate) struct Entering<'a> {
    pub key: Option<(&'a [f32], f32)>,
    pub value: &'a mut [f32],
}

/// One token of the recurrent state of far keys: U of every head in the state, z of every head in `sums`.
#[inline(always)]
pub(crate) fn far_step<S: Simd>(
    simd: S,
    context: &GroupContext,
    (far, sums): (&mut FarState, &mut [f32]),
    queries: &[f32],
    entering: Entering,
    scratch: &mut [f32],
) {
    let Some(basis) = context.basis else { return };
    let (FarState { h, z, u }, Entering { key, value }) = (far, entering);
    let m = context.decay(context.group.heads[0]);
    simd.call(RecurrentStep { context, far: true, basis, m, beta: None, queries, entering: key, value, h, z, u, sums, scratch });
}

/// U [heads, ep] and z of every head from a recurrent state and the key that enters it. Compiled once for all callers.
struct RecurrentStep<'a> {
    context: &'a GroupContext<'a>,
    far: bool,
    basis: &'a Basis,
    /// m_t
    m: f32,
    /// β_t of a write rule.
    beta: Option<f32>,
    /// Prepared queries [heads, d in whole vectors].
    queries: &'a [f32],
    /// The key that enters, and its decay since its position.
    entering: Option<(&'a [f32], f32)>,
    /// Its value, weighted; replaced by the written value if there is a write rule.
    value: &'a mut [f32],
    h: &'a mut [f32],
    z: &'a mut [f32],
    u: &'a mut [f32],
    /// z of every head.
    sums: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl Task for RecurrentStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let RecurrentStep { context, far, basis, m, beta, queries, entering, value, h, z, u, sums, scratch } = self;
        let (group, tables) = (context.group, &context.state.tables);
        let (n, width, ep, heads) = (basis.rows(), basis.d(), value.len(), group.heads.len());
        let stride = padded(width);
        let (lower_orders, scratch) = scratch.split_at_mut(padded(basis.lower_order_rows()));
        let (k, scratch) = scratch.split_at_mut(padded(n));
        let (q, found) = scratch.split_at_mut(padded(n) * (1 + heads));
        match entering {
            Some((key, decay)) => {
                basis.scaled_of_one(simd, key, (&[], |_| 1.0), lower_orders, k);
                k[n..].fill(0.0);
                if decay != 1.0 {
                    k.iter_mut().for_each(|k| *k *= decay);
                }
            }
            None => k.fill(0.0),
        }
        for ((&head, query), q) in group.heads.iter().zip(queries.chunks_exact(stride)).zip(q.chunks_exact_mut(padded(n))) {
            let coefficient = |order| context.coefficient(head, far, order);
            basis.scaled_of_one(simd, &query[..width], (&tables[head], coefficient), lower_orders, q);
            q[n..].fill(0.0);
        }
        u.fill(0.0);
        match beta {
            None => StateUpdate { h, ep, decay: m, k, q: &q[..heads * padded(n)], u }.add(simd, value),
            Some(beta) => {
                let (first, reader) = (group.heads[0], &mut q[heads * padded(n)..]);
                for (i, &order) in basis.orders().iter().enumerate() {
                    let (a, range) = (context.coefficient(first, far, order), basis.order_range(i));
                    let table = context.state.key_tables[first][range.clone()].iter();
                    reader[range.clone()].iter_mut().zip(&k[range]).zip(table).for_each(|((q, k), c)| *q = k * c * a);
                }
                reader[n..].fill(0.0);
                let found = &mut found[..ep * (1 + heads)];
                found.fill(0.0);
                StateUpdate { h, ep, decay: m, k, q, u: found }.delta_rule(simd, value, beta);
                u.copy_from_slice(&found[..ep * heads]);
            }
        }
        for ((i, &head), query) in group.heads.iter().enumerate().zip(queries.chunks_exact(stride)) {
            let own = entering.map_or(0.0, |(key, decay)| decay * context.kernel(head, far).value(dot(&query[..width], &key[..width])));
            let (q, last) = (&q[i * padded(n)..][..n], i + 1 == heads);
            let before = if last { read_sums::<S, true>(simd, q, z, m, k) } else { read_sums::<S, false>(simd, q, z, m, k) };
            for (u, &v) in u[i * ep..][..ep].iter_mut().zip(&*value) {
                *u = m * *u + own * v;
            }
            sums[i] = m * before + own;
        }
    }
}
