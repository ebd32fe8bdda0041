//! Copies of windowed caches in the order of positions, which tiles read like the cache of all keys.

use crate::fused::decode::sequential::is_sequential;
use crate::fused::plan::CallPlan;
use crate::layer::{Features, StateGroup};
use crate::state::State;
use crate::state::block::PerKey;
use crate::state::kv_cache::KvCache;
use crate::state::memory::GroupMemory;
use crate::state::ring::RingKvCache;
use crate::{Error, Inputs};
use termwise_kernels::simd::{Simd, Task, dispatch};

/// The largest head dimension; learned features have twice as many values, for near and for far queries.
const MAX_DIM: usize = 256;

/// Copies all rings that tiles read.
pub(in crate::fused) fn copy_rings(l: &CallPlan, state: &State, inputs: &Inputs<f32>, copies: &mut Vec<KvCache>) -> Result<(), Error> {
    let groups = &state.plan().groups;
    copies.resize_with(state.groups.len(), KvCache::default);
    for (index, (group_state, copy)) in state.groups.iter().zip(copies).enumerate() {
        let group = &groups[index % groups.len()];
        if let GroupMemory::Ring(ring) = &group_state.memory
            && !is_sequential(l, group)
        {
            copy_ring(l, group, ring, inputs, copy)?;
        }
    }
    Ok(())
}

fn copy_ring(l: &CallPlan, group: &StateGroup, ring: &RingKvCache, inputs: &Inputs<f32>, copy: &mut KvCache) -> Result<(), Error> {
    let (near, far) =
        (l.key_transforms[group.key_transform].width, group.far.as_ref().filter(|far| far.key_transform != group.key_transform));
    let width = far.map_or(0, |far| l.key_transforms[far.key_transform].width);
    copy.reset(near + width, ring.ep, group.heads.len(), if far.is_some() { near } else { 0 });
    copy.reserve(ring.len())?;
    let (mut key, mut value) = ([0.0f32; 4 * MAX_DIM], [0.0f32; MAX_DIM]);
    for position in ring.layout.positions(ring.next) {
        let slot = ring.layout.slot(position);
        ring.key(slot, &mut key[..ring.d]);
        ring.value(slot, &mut value[..ring.ep]);
        if let Some(far) = far.filter(|_| ring.far_row.is_none()) {
            let features = l.key_transforms[far.key_transform].of_keys(inputs, l.shape.d, group.g);
            let (key, to) = key.split_at_mut(near);
            dispatch(FarKey { ring, features, key, to: &mut to[..width] });
        }
        let at = copy.len;
        copy.push(&key[..near + width], &value[..ring.ep]);
        for (from, to) in ring.per_key.iter().zip(&mut copy.per_key) {
            let PerKey { weights, log_decay } = from;
            to.set(at, weights.get(slot).copied(), log_decay.get(slot).copied());
        }
    }
    copy.gap = ring.next - copy.len;
    Ok(())
}

/// [`RingKvCache::far_key`] as a task.
pub(in crate::fused) struct FarKey<'a> {
    pub ring: &'a RingKvCache,
    pub features: Features<'a>,
    pub key: &'a [f32],
    pub to: &'a mut [f32],
}

impl Task for FarKey<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.ring.far_key(simd, self.features, self.key, self.to);
    }
}
