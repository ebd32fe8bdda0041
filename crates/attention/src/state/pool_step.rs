//! One token of a state group whose exact keys are in a pool: the one place that says what such a group does, for tokens one by one and for texts.
//!
//! ```text
//! the pool takes the key in; the key that it evicts ─► far features ─► moments
//! queries ─► all keys of the pool: U, z, ρ ─► the moments of far keys ─► joined under one denominator
//! ```

use crate::epilogue::{FarSums, join};
use crate::kernels::PAD;
use crate::kernels::basis::Basis;
use crate::kernels::score_rows::Rescale;
use crate::kernels::simd::Simd;
use crate::kernels::state_update::{read_sums, update_and_read};
use crate::layer::{MOST_CHOOSING, StateGroup};
use crate::parts::bits::Channels;
use crate::real::dot;
use crate::state::cache::Sums;
use crate::state::memory::{GroupMemory, HeadSums, Store};
use crate::state::pool::{Pool, PoolQuery, PoolScratch};
use crate::{Kernel, Layer, Shape};

/// What a step of a group reads, wherever its inputs come from.
pub(crate) trait GroupInputs {
    /// The bound kernel of a head for near or far keys.
    fn kernel(&self, head: usize, far: bool) -> &Kernel;
    /// 1/α! of each monomial of far keys, times a_n where that is not learned.
    fn table(&self, head: usize) -> &[f32];
    /// b_h of a sum with a sink.
    fn sink(&self, head: usize) -> Option<f32>;
    /// The centre and range of codes.
    fn channels(&self) -> Option<Channels<'_>>;
    /// A·k of a key, and what else is done to it before it meets far queries, into `to`.
    fn far_key<S: Simd>(&self, simd: S, key: &[f32], to: &mut [f32]);
    /// The query of a head as it meets far keys, into `to`.
    fn far_query<S: Simd>(&self, simd: S, head: usize, to: &mut [f32]);
}

/// Values of scratch memory that [`step`] takes besides [`PoolScratch`].
pub(crate) fn scratch_len(shape: &Shape, far_width: usize, heads: usize, basis: Option<&Basis>) -> usize {
    let rows = basis.map_or(0, |basis| padded(basis.lower_order_rows()) + padded(basis.rows()) * (1 + heads));
    padded(shape.d) + padded(shape.e) + padded(far_width) * (1 + heads) + rows
}

fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// Takes a key [d] and a value [ep] in, and leaves U, z and ρ of every head's query in the store; prepared near queries are `stride` apart.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "a token and all that reads it")]
pub(crate) fn step<S: Simd, I: GroupInputs>(
    simd: S,
    layer: &Layer,
    group: &StateGroup,
    basis: Option<&Basis>,
    inputs: &I,
    (key, value): (&[f32], &[f32]),
    (queries, stride): (&[f32], usize),
    store: &mut Store,
    scratch: &mut [f32],
) {
    let GroupMemory::Pool(pool) = &mut store.memory else { return };
    let (heads, ep, d) = (layer.head_plans(), pool.ep, pool.d);
    let (mut pool_scratch, scratch) = PoolScratch::of(pool, group.heads.len(), scratch);
    let (lost_key, scratch) = scratch.split_at_mut(padded(d));
    let (lost_value, scratch) = scratch.split_at_mut(ep);
    let channels = inputs.channels();
    let lost = pool.advance(key, value, channels, &mut lost_key[..d], lost_value);
    if !lost {
        lost_value.fill(0.0);
    }
    let lost_key = &lost_key[..d];

    attend(simd, layer, group, inputs, (queries, stride), pool, (&mut store.u, &mut store.sums), &mut pool_scratch);
    for (row, sums) in store.rows.iter_mut().zip(&store.sums) {
        *row = HeadSums { z: sums.z(), rho: sums.rho, largest: sums.largest };
    }

    let (Some(kind), Some(far), Some(basis)) = (&group.far, &mut store.far, basis) else { return };
    let (width, n, count) = (layer.classes()[kind.class].width, basis.rows(), pool.lost());
    let (far_key, scratch) = scratch.split_at_mut(padded(width));
    let (far_queries, scratch) = scratch.split_at_mut(padded(width) * group.heads.len());
    let (lower_orders, scratch) = scratch.split_at_mut(padded(basis.lower_order_rows()));
    let (k, q) = scratch.split_at_mut(padded(n));
    k.fill(0.0);
    if lost {
        inputs.far_key(simd, lost_key, &mut far_key[..width]);
        basis.of_one(&far_key[..width], lower_orders, k);
        k[n..].fill(0.0);
    }
    for (i, &head) in group.heads.iter().enumerate() {
        let to = &mut far_queries[i * padded(width)..][..width];
        inputs.far_query(simd, head, to);
        let Some(plan) = &layer.far_plans()[head] else { continue };
        let q = &mut q[i * padded(n)..][..padded(n)];
        basis.of_one(to, lower_orders, q);
        q[n..].fill(0.0);
        for (at, &order) in basis.orders().iter().enumerate() {
            let span = basis.order_range(at);
            let a = if plan.learned > 0 { inputs.kernel(head, true).coefficient(order) as f32 } else { 1.0 };
            q[span.clone()].iter_mut().zip(&inputs.table(head)[span]).for_each(|(q, &c)| *q *= c * a);
        }
    }
    far.u.fill(0.0);
    // A value that comes after its read is added by its score: the sum over monomials rounds at the size of (Σ_i |q_i·k_i|)^n.
    update_and_read(simd, &mut far.h, ep, 1.0, k, lost_value, &q[..group.heads.len() * padded(n)], &mut far.u);
    for (i, &head) in group.heads.iter().enumerate() {
        let Some(plan) = &layer.far_plans()[head] else { continue };
        let query = &far_queries[i * padded(width)..][..width];
        let mut z = if far.z.is_empty() { 0.0 } else { read_sums::<S, false>(simd, &q[i * padded(n)..][..n], &mut far.z, 1.0, k) };
        let u = &mut far.u[i * ep..][..ep];
        if lost {
            let own = inputs.kernel(head, true).value(dot(query, &far_key[..width]));
            u.iter_mut().zip(&*lost_value).for_each(|(u, &v)| *u += own * v);
            z += own;
        }
        if count == 0 {
            continue;
        }
        let (row, own) = (&mut store.rows[i], &mut store.u[i * ep..][..ep]);
        let sink = inputs.sink(head).filter(|_| heads[head].rescale != Rescale::SubtractMax);
        row.rho = join(&plan.variant, own, &mut row.z, row.rho, Some(FarSums { u, z, log: 0.0 }), sink);
    }
    far.z.iter_mut().zip(&*k).for_each(|(z, k)| *z += k);
}

/// Every head's query against all keys of the pool: U [heads, ep] and its sums, and what each key received.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "queries, keys, and where sums go")]
fn attend<S: Simd, I: GroupInputs>(
    simd: S,
    layer: &Layer,
    group: &StateGroup,
    inputs: &I,
    (queries, stride): (&[f32], usize),
    pool: &mut Pool,
    (u, all): (&mut [f32], &mut [Sums]),
    scratch: &mut PoolScratch,
) {
    let (heads, channels, ep, d) = (layer.head_plans(), inputs.channels(), pool.ep, pool.d);
    u.fill(0.0);
    for (sums, &head) in all.iter_mut().zip(&group.heads) {
        *sums = Sums::new(heads[head].rescale, inputs.sink(head));
    }
    for (part, members) in group.heads.chunks(MOST_CHOOSING).enumerate() {
        // One pass over the keys for so many heads at once.
        let first = part * MOST_CHOOSING;
        let mut rows: [Option<PoolQuery>; MOST_CHOOSING] = [const { None }; MOST_CHOOSING];
        let places = u.chunks_exact_mut(ep).zip(&mut *all).skip(first);
        for (((i, &head), row), (u, sums)) in members.iter().enumerate().zip(&mut rows).zip(places) {
            let (plan, q, kernel) = (&heads[head], &queries[(first + i) * stride..][..d], inputs.kernel(head, false));
            *row = Some(PoolQuery { q, kernel, cap: plan.cap, clamp: plan.clamp, rescale: plan.rescale, u, sums });
        }
        pool.attend(simd, channels, &mut rows[..members.len()], scratch);
    }
}
