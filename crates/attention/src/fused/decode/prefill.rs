//! Prefill: continuing from a state by many positions at once.

use rayon::prelude::*;

use crate::fused::call::Call;
use crate::fused::decode::ring_to_contiguous::{FarKey, copy_rings};
use crate::fused::decode::sequential::{self, is_sequential};
use crate::fused::plan::{CallPlan, ChunkGroup};
use crate::fused::prepare::channel_decay::{ChannelDecay, ChannelDecays};
use crate::fused::scratch::CallScratch;
use crate::fused::{Fused, forward};
use crate::layer::{HeadRows, RowSources, StateGroup};
use crate::parts::distance::Distance;
use crate::state::State;
use crate::state::block::PerKey;
use crate::state::kv_cache::KvCache;
use crate::state::memory::{EnteringKey, FarState, GroupMemory};
use crate::state::ring::RingKvCache;
use crate::{Error, Inputs, Report};
use termwise_kernels::basis::Basis;
use termwise_kernels::real::{dot, larger};
use termwise_kernels::simd::{Simd, Task, dispatch};

impl Fused {
    /// Continues from a state, which may be empty, by T positions, and leaves the state as after T steps. The engine must have been built with
    /// [`crate::FusedOptions::continues`].
    ///
    /// Heads with a recurrent state process the positions as one chunk in parallel mode, and in chunks in chunk mode. Queries of heads with a cache
    /// attend to cached and new keys. Positions after the length of a batch row are ignored. The report names positions since the state was empty.
    /// float32, bit-identical for any number of threads on one instruction set; recurrent states are summed in another order than by stepping. There are no gradients
    /// across calls.
    pub fn extend(&mut self, state: &mut State, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        self.check_state(state, inputs)?;
        self.plans.whole.plan.shape.check_outputs("y", y.len())?;
        let (plan, scratch) = (&mut self.plans.whole.plan, &self.scratch);
        let s = plan.shape;
        // Everything that can fail comes first: the state changes afterwards.
        for (index, group) in state.groups.iter_mut().enumerate() {
            group.reserve(inputs.length(index / state.bases.len(), &s))?;
        }
        plan.bind(inputs);
        let l = &*plan;
        scratch.with(|w| {
            w.ensure_forward(l)?;
            begin(l, inputs, state, w)?;
            let mut report = forward(l, inputs, Some(state), w, None, y);
            w.tasks.ensure(end_scratch_len(l, state))?;
            if l.has_sequential_heads() {
                report = report.or(sequential::run(l, inputs, w, state, y)?);
            }
            if let Some(at) = &mut report.nonpositive {
                at.position += w.initial.positions[at.row];
            }
            end(l, inputs, state, w);
            Ok(report)
        })
    }

    /// Rejects a state of another kind, layer or batch size.
    fn check_state(&self, state: &State, inputs: &Inputs<f32>) -> Result<(), Error> {
        let (plan, continues) = (&self.plans.whole.plan, &self.plans.options.continues);
        let s = plan.shape;
        plan.layer.check(&s, inputs, 1)?;
        inputs.check_no_documents()?;
        if *continues != Some(state.memory()) {
            let (asked, built) = (state.memory(), continues);
            return Err(Error::Shape(format!(
                "the state's memory is {asked:?}, and the engine was built to continue from {built:?}: build it with `FusedOptions::continues`"
            )));
        }
        if state.batch() != s.batch || !state.layer().is_same(&plan.layer) {
            return Err(Error::Shape(format!(
                "the state belongs to another layer, or has {} rows where the call has {}: continue with the layer that the state was made for",
                state.batch(),
                s.batch
            )));
        }
        Ok(())
    }
}

/// Copies the state into the scratch memory.
fn begin(l: &CallPlan, inputs: &Inputs<f32>, state: &State, w: &mut CallScratch) -> Result<(), Error> {
    let (steps, initial, sums) = (&state.steps, &mut w.initial, &mut w.gates.sums);
    copy_rings(l, state, inputs, &mut initial.contiguous)?;
    initial.given = true;
    initial.positions.copy_from_slice(&steps.positions);
    sums.in_gate.copy_from_slice(&steps.in_gate);
    sums.out_gate.copy_from_slice(&steps.out_gate);
    sums.post_gate.copy_from_slice(&steps.post_gate);
    sums.decay.copy_from_slice(&steps.decay);
    initial.log_decay.copy_from_slice(&steps.log_decay);
    w.tiles.largest.fill(0.0);
    w.tables.ensure_angles_per_row(l)?;
    for (to, from) in initial.conv_tails.iter_mut().zip(&steps.tails) {
        to.ensure(from.len())?;
        to.copy_from_slice(from);
    }
    w.states.ensure_initial(l)?;
    each_state(l, state, |b, group, index| {
        if let Some((h, z)) = state.groups[index].recurrent() {
            let to = &mut w.states.values[state_at(l, b, group, 0)..][..group.len];
            to[..h.len()].copy_from_slice(h);
            to[h.len()..h.len() + z.len()].copy_from_slice(z);
            to[h.len() + z.len()..].fill(0.0);
        }
    });
    Ok(())
}

/// The index of the state of a group at the start of a split.
fn state_at(l: &CallPlan, b: usize, group: &ChunkGroup, split: usize) -> usize {
    ((b * l.shape.kv_heads + group.g) * l.splits + split) * l.state_len + group.at
}

/// Calls f with every batch row and group, and the index of its state.
fn each_state(l: &CallPlan, state: &State, mut f: impl FnMut(usize, &ChunkGroup, usize)) {
    let plan = state.plan();
    for b in 0..l.shape.batch {
        l.groups.iter().for_each(|group| f(b, group, b * plan.groups.len() + plan.group_of[group.heads[0]].0));
    }
}

/// Values of scratch memory that [`end`] takes.
fn end_scratch_len(l: &CallPlan, state: &State) -> usize {
    let widest = l.key_transforms.iter().map(|key_transform| key_transform.width).max().unwrap_or(0);
    let monomials = state.bases.iter().flatten().map(|basis| EnteringKey::scratch_len(basis)).max().unwrap_or(0);
    l.shape.time + 3 * widest + l.ep + monomials
}

/// Moves the state to the end of the call, from the scratch memory.
fn end(l: &CallPlan, inputs: &Inputs<f32>, state: &mut State, w: &CallScratch) {
    let s = l.shape;
    let mut groups = std::mem::take(&mut state.groups);
    each_state(l, state, |b, group, index| {
        if let Some((h, z)) = groups[index].recurrent_mut() {
            let from = &w.states.values[state_at(l, b, group, l.splits - 1)..][..group.len];
            let (from_h, from_z) = from.split_at(h.len());
            h.copy_from_slice(from_h);
            let rows = z.len();
            z.copy_from_slice(&from_z[..rows]);
        }
    });
    let call = &Call { plan: l, inputs, initial: &w.initial, past: None, tasks: &w.tasks };
    let (sources, plan) = (RowSources::of_call(call, &w.tables), &state.plan().groups);
    let decays = ChannelDecays::new(call, &w.gates, &w.rows, &w.channel_decay);
    groups.par_iter_mut().enumerate().for_each(|(index, group_state)| {
        let (b, group, basis) = (index / plan.len(), &plan[index % plan.len()], state.bases[index % plan.len()].as_deref());
        if is_sequential(l, group) {
            return;
        }
        let channels = decays.head(l, b, group.heads[0]);
        let keys = NewKeys { l, inputs, w, b, group, len: inputs.length(b, &s), channels };
        w.tasks.with(|scratch| {
            let (norms, scratch) = scratch.split_at_mut(s.time);
            let norms = &mut norms[..keys.len];
            keys.norms(norms, &mut group_state.key_norm, scratch);
            match &mut group_state.memory {
                GroupMemory::Recurrent { .. } => {}
                GroupMemory::Cache(cache) => keys.append(cache, scratch),
                GroupMemory::Ring(ring) => {
                    if let (Some(far), Some(basis)) = (&mut group_state.far, basis) {
                        keys.evict(ring, basis, far, scratch);
                    }
                    keys.insert(ring, scratch);
                }
            }
            for (&h, row) in group.heads.iter().zip(&mut group_state.rows) {
                let n = b * s.heads + h;
                row.largest = match group.remembered() {
                    None => w.tiles.largest[n * l.tiles..(n + 1) * l.tiles].iter().copied().fold(0.0, larger),
                    Some(_) => dispatch(LargestScore { side: sources.query(b, h, false), norms }),
                };
            }
        });
    });
    let (plan, steps) = (l.layer.state_plan(state.memory), &mut state.steps);
    for (index, group_state) in groups.iter().enumerate() {
        let (b, group) = (index / plan.groups.len(), &plan.groups[index % plan.groups.len()]);
        for (&h, row) in group.heads.iter().zip(&group_state.rows) {
            let seen = &mut steps.scores[b * s.heads + h];
            *seen = larger(*seen, row.largest);
        }
    }
    state.groups = groups;
    steps.in_gate.copy_from_slice(&w.gates.sums.in_gate);
    steps.out_gate.copy_from_slice(&w.gates.sums.out_gate);
    steps.post_gate.copy_from_slice(&w.gates.sums.post_gate);
    steps.decay.copy_from_slice(&w.gates.sums.decay);
    for b in 0..s.batch {
        let len = inputs.length(b, &s);
        steps.positions[b] += len;
        for (which, (x, [heads, dim])) in inputs.x.iter().zip(s.rows_of_heads()).enumerate() {
            let from = len.saturating_sub(steps.width.saturating_sub(1));
            steps.keep_tail(which, b, [heads, dim], (from..len).map(|t| x.row(b * s.time + t, heads * dim)));
        }
        for (h, n) in (b * s.heads..(b + 1) * s.heads).enumerate() {
            if l.heads[h].variant.decays_by_head() {
                steps.log_decay[n] = w.gates.decay[n * l.tp() + len - 1];
            } else if l.heads[h].variant.decays_by_channel() {
                steps.log_decay[n * s.d..][..s.d].copy_from_slice(&w.gates.channel_decay[(n * l.tp() + len - 1) * s.d..][..s.d]);
            }
        }
    }
}

/// The new keys and values of one state group of one batch row.
struct NewKeys<'a> {
    l: &'a CallPlan,
    inputs: &'a Inputs<'a, f32>,
    w: &'a CallScratch,
    b: usize,
    group: &'a StateGroup,
    len: usize,
    channels: Option<ChannelDecay<'a>>,
}

impl NewKeys<'_> {
    /// The key of a position as a key transform prepares it, into `key` [width].
    fn key(&self, key_transform: usize, t: usize, key: &mut [f32]) {
        let l = self.l;
        if let Some(channels) = &self.channels {
            key.copy_from_slice(&channels.k[t * l.dp..][..l.shape.d]);
            return;
        }
        let tile = &self.w.rows.kt[(l.kv_index(key_transform, self.b, self.group.g) * l.tiles + t / l.tile) * l.width * l.pitch..];
        for (key, row) in key.iter_mut().zip(tile.chunks_exact(l.pitch)) {
            *key = row[t % l.tile];
        }
    }

    /// The value of a position, padded; it is the same for near and far keys.
    fn value(&self, t: usize) -> &[f32] {
        let l = self.l;
        &self.w.values.v[(l.kv_index(self.group.key_transform, self.b, self.group.g) * l.tp() + t) * l.ep..][..l.ep]
    }

    /// The key of a position as a cache stores it, into `key`: for near queries, then for far queries if the cache stores those values.
    fn stored_key(&self, t: usize, key: &mut [f32]) {
        let (near, far) = key.split_at_mut(self.l.key_transforms[self.group.key_transform].width);
        self.key(self.group.key_transform, t, near);
        if let Some(channels) = &self.channels {
            // Stored as the next query reads it.
            let (after, at) = (channels.after(self.len), channels.at(t));
            near.iter_mut().zip(after.iter().zip(at)).for_each(|(key, (after, at))| *key *= (after - at).exp() as f32);
        }
        if let Some(key_transform) = self.group.far.as_ref().map(|far| far.key_transform).filter(|_| !far.is_empty()) {
            self.key(key_transform, t, far);
        }
    }

    /// The decay of stored keys over the whole call, if it is per channel, into `m`.
    fn channel_decay<'b>(&self, m: &'b mut [f32]) -> Option<&'b [f32]> {
        let channels = self.channels.as_ref()?;
        let m = &mut m[..self.l.shape.d];
        factors(channels.after(self.len), channels.before, m);
        Some(m)
    }

    /// Stores the weights and log decays of a position at index `at`.
    fn set_per_key(&self, t: usize, at: usize, per_key: &mut [PerKey]) {
        let l = self.l;
        for (&h, per_key) in self.group.heads.iter().zip(per_key) {
            let (head, n) = (&l.heads[h], (self.b * l.shape.heads + h) * l.tp() + t);
            per_key.set(
                at,
                head.weighs_keys.then(|| self.w.gates.key_weights[n]),
                head.variant.decays_by_head().then(|| self.w.gates.decay[n]),
            );
        }
    }

    /// The largest ‖k‖ up to each position, from that of all keys before.
    fn norms(&self, norms: &mut [f32], largest: &mut f32, scratch: &mut [f32]) {
        let key = &mut scratch[..self.l.key_transforms[self.group.key_transform].width];
        for (t, norm) in norms.iter_mut().enumerate() {
            self.key(self.group.key_transform, t, key);
            *largest = larger(*largest, dot(key, key).sqrt());
            *norm = *largest;
        }
    }

    /// Appends all keys to a cache.
    fn append(&self, cache: &mut KvCache, scratch: &mut [f32]) {
        if let Some(m) = self.channel_decay(scratch) {
            cache.decay_keys(m);
        }
        let key = &mut scratch[..cache.d];
        for t in 0..self.len {
            self.stored_key(t, key);
            self.set_per_key(t, cache.len, &mut cache.per_key);
            cache.push(key, &self.value(t)[..self.l.shape.e]);
        }
    }

    /// Inserts the keys that are near after the call into a ring.
    fn insert(&self, ring: &mut RingKvCache, scratch: &mut [f32]) {
        if let Some(m) = self.channel_decay(scratch) {
            ring.decay_keys(m);
        }
        let (before, layout, key) = (ring.next, ring.layout, &mut scratch[..ring.d]);
        ring.next += self.len;
        for position in layout.positions(ring.next).filter(|&position| position >= before) {
            let (t, slot) = (position - before, layout.slot(position));
            self.stored_key(t, key);
            ring.write(slot, key, self.value(t));
            self.set_per_key(t, slot, &mut ring.per_key);
        }
    }

    /// Moves the recurrent state of far keys to the end of the call: the keys that leave the window of a ring enter it. Tiles of new keys that are far
    /// from all positions of the call have entered with their chunks.
    fn evict(&self, ring: &RingKvCache, basis: &Basis, far: &mut FarState, scratch: &mut [f32]) {
        let (l, h) = (self.l, self.group.heads[0]);
        let Some(key_transform) = self.group.far.as_ref().map(|far| far.key_transform) else { return };
        let width = l.key_transforms[key_transform].width;
        let (key, scratch) = scratch.split_at_mut(width);
        let (stored, scratch) = scratch.split_at_mut(ring.d);
        let (old_value, scratch) = scratch.split_at_mut(l.ep);
        let (Distance { window, sinks }, before, n) = (ring.layout.distance, ring.next, (self.b * l.shape.heads + h) * l.tp());
        let decays = l.heads[h].variant.decays_by_head();
        let last = if decays { self.w.gates.decay[n + self.len - 1] } else { 0.0 };
        let absorbed = before + self.len.saturating_sub(window) / l.tile * l.tile;
        for position in before.saturating_sub(window).max(sinks)..(before + self.len).saturating_sub(window) {
            let (value, weight, decay);
            match position.checked_sub(before) {
                None => {
                    let slot = ring.layout.slot(position);
                    ring.key(slot, stored);
                    let features = l.key_transforms[key_transform].of_keys(self.inputs, l.shape.d, self.group.g);
                    dispatch(FarKey { ring, features, key: stored, to: &mut *key });
                    ring.value(slot, old_value);
                    (weight, decay) = (ring.per_key[0].weight(slot), ring.per_key[0].decay(slot, last));
                    value = &*old_value;
                }
                Some(t) if position >= absorbed => {
                    self.key(key_transform, t, key);
                    weight = if l.heads[h].weighs_keys { self.w.gates.key_weights[n + t] } else { 1.0 };
                    decay = if decays { (last - self.w.gates.decay[n + t]).exp() as f32 } else { 1.0 };
                    value = self.value(t);
                }
                Some(_) => continue,
            }
            EnteringKey { key, value, weight, decay }.enter(basis, &mut far.h, &mut far.z, scratch);
        }
    }
}

/// e^{c' − c}
fn factors(after: &[f64], before: &[f64], out: &mut [f32]) {
    out.iter_mut().zip(after.iter().zip(before)).for_each(|(out, (after, before))| *out = (after - before).exp() as f32);
}

/// The largest ‖q_t‖ times the largest ‖k‖ up to t, which bounds all scores.
struct LargestScore<'a> {
    side: HeadRows<'a>,
    norms: &'a [f32],
}

impl Task for LargestScore<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut row = [0.0f32; 528];
        let row = &mut row[..self.side.features.width];
        let mut largest = 0.0;
        for (t, norm) in self.norms.iter().enumerate() {
            self.side.forward(simd, t, row);
            largest = larger(largest, dot(row, row).sqrt() * norm);
        }
        largest
    }
}
