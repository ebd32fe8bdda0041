//! Windows whose keys lie in places of a pool, for calls of many positions: laid out by position as a cache, which tiles read, and taken back afterwards.

use crate::fused::plan::Layout;
use crate::fused::walk::walks;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::layer::{Features, StateGroup};
use crate::parts::distance::Distance;
use crate::state::State;
use crate::state::cache::Cache;
use crate::state::memory::GroupMemory;
use crate::state::pool::Pool;
use crate::{Error, Inputs};

/// The pools of a state, by store, while caches stand in their places.
pub(super) struct Unrolled(Vec<Option<Pool>>);

/// Positions that a pool holds by distance, ascending.
fn held(distance: Distance, next: usize) -> impl Iterator<Item = usize> {
    let Distance { window, sinks } = distance;
    (0..next.min(sinks)).chain(next.saturating_sub(window).max(sinks)..next)
}

fn place(distance: Distance, position: usize) -> usize {
    let Distance { window, sinks } = distance;
    if position < sinks { position } else { sinks + (position - sinks) % window }
}

impl Unrolled {
    /// Puts caches in the place of all pools that tiles can read, with room for the positions of the call. The state is as before where that fails.
    pub fn new(l: &Layout, state: &mut State, inputs: &Inputs<f32>) -> Result<Unrolled, Error> {
        let groups = state.bases.len();
        let mut caches: Vec<Option<Cache>> = Vec::with_capacity(state.stores.len());
        for (index, store) in state.stores.iter_mut().enumerate() {
            let group = &l.layer.state_plan(state.memory).groups[index % groups];
            let GroupMemory::Pool(pool) = &mut store.memory else {
                caches.push(None);
                continue;
            };
            if walks(l, group) {
                caches.push(None);
                continue;
            }
            let more = inputs.length(index / groups, &l.shape);
            pool.reserve(more)?;
            caches.push(Some(unroll(l, group, pool, inputs, more)?));
        }
        let swap = |(store, cache): (&mut crate::state::memory::Store, Option<Cache>)| match std::mem::replace(
            &mut store.memory,
            GroupMemory::Cache(cache?),
        ) {
            GroupMemory::Pool(pool) => Some(pool),
            _ => None,
        };
        Ok(Unrolled(state.stores.iter_mut().zip(caches).map(swap).collect()))
    }

    /// Puts the pools back: with what the caches hold by now, or as they were where the call failed.
    pub fn end(self, l: &Layout, state: &mut State, inputs: &Inputs<f32>, done: bool) {
        let (groups, d) = (state.bases.len(), l.shape.d);
        for (index, (store, pool)) in state.stores.iter_mut().zip(self.0).enumerate() {
            let Some(mut pool) = pool else { continue };
            if let (GroupMemory::Cache(cache), true) = (&store.memory, done) {
                let group = &l.layer.state_plan(state.memory).groups[index % groups];
                let channels = l.classes[group.class].channels_of(inputs, d, group.g);
                let (distance, next) = (pool.places.distance, cache.next_position());
                pool.next = next;
                let mut key = vec![0.0; cache.d];
                // The oldest may be forgotten where no later query sees it; its place is the next to be taken.
                let is_there = |position: &usize| *position < distance.sinks || *position >= distance.sinks + cache.forgotten;
                for position in held(distance, next).filter(is_there) {
                    let at = if position < distance.sinks { position } else { cache.place(position) };
                    cache.key(at, &mut key);
                    pool.write(place(distance, position), &key[..d], cache.value(at), channels);
                }
            }
            store.memory = GroupMemory::Pool(pool);
        }
    }
}

/// The keys of a pool by position.
fn unroll(l: &Layout, group: &StateGroup, pool: &Pool, inputs: &Inputs<f32>, more: usize) -> Result<Cache, Error> {
    let d = l.shape.d;
    let own = group.far.as_ref().filter(|far| far.class != group.class);
    let width = own.map_or(0, |far| l.classes[far.class].width);
    let mut cache = Cache::new(d + width, pool.ep, group.heads.len(), group.distance);
    if let Some(far) = &group.far {
        (cache.far_row, cache.far_in_state) = (if width > 0 { d } else { 0 }, far.moments.is_some());
    }
    cache.reserve(pool.len() + more)?;
    let channels = l.classes[group.class].channels_of(inputs, d, group.g);
    let (mut key, mut value, mut far_key) = (vec![0.0; d], vec![0.0; pool.ep], vec![0.0; width]);
    for position in held(pool.places.distance, pool.next) {
        let at = place(pool.places.distance, position);
        pool.key(at, channels, &mut key);
        pool.value(at, &mut value);
        if let Some(far) = own {
            let features = l.classes[far.class].of_keys(inputs, d, group.g);
            dispatch(FarKey { features, key: &key, to: &mut far_key });
        }
        cache.push(&key, &far_key, &value[..pool.e]);
    }
    cache.forgotten = pool.next - cache.len;
    Ok(cache)
}

/// A key as far queries meet it.
struct FarKey<'a> {
    features: Features<'a>,
    key: &'a [f32],
    to: &'a mut [f32],
}

impl Task for FarKey<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.features.forward(simd, self.key, self.to);
    }
}
