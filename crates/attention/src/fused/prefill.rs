//! Continuing from a state by many positions at once.

use rayon::prelude::*;

use crate::fused::channels::Channels;
use crate::fused::plan::{ChunkGroup, Layout};
use crate::fused::prepare::{HeadRows, Sources};
use crate::fused::scratch::CallScratch;
use crate::fused::unroll::Unrolled;
use crate::fused::{Fused, Planned, channels, gates, prepare, run_forward, walk};
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::layer::StateGroup;
use crate::real::{dot, larger};
use crate::state::State;
use crate::state::memory::{GroupMemory, Store};
use crate::{Error, Inputs, Report};

impl Fused {
    /// Continues from a state, also an empty one, by T positions, and leaves the state as if they had been stepped one by one. The engine
    /// must have been built for that, with [`crate::FusedOptions::continues`].
    ///
    /// Where the state has moments, the positions are one chunk in parallel mode, and cut into chunks in chunk mode; where it has
    /// caches, queries look at cached and new keys. Of a batch row only its length counts, and its state stops there. The report
    /// names positions since the state was empty. float32, bit-identical for any number of threads; moments are summed in another
    /// order than by stepping. There are no gradients across calls.
    pub fn extend(&mut self, state: &mut State, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        self.check_state(state, inputs)?;
        self.whole.layout.shape.check_outputs("y", y.len())?;
        let unrolled = Unrolled::new(&self.whole.layout, state, inputs)?;
        let result = self.continue_from_caches(state, inputs, y);
        unrolled.end(&self.whole.layout, state, inputs, result.is_ok());
        result
    }

    /// Refuses a state of another kind, layer or batch.
    fn check_state(&self, state: &State, inputs: &Inputs<f32>) -> Result<(), Error> {
        let Fused { whole: Planned { layout, .. }, options: (_, continues), .. } = self;
        let s = layout.shape;
        layout.layer.check(&s, inputs, 1)?;
        inputs.check_no_documents()?;
        if *continues != Some(state.memory()) {
            let (asked, built) = (state.memory(), continues);
            return Err(Error::Shape(format!(
                "the state's memory is {asked:?}, and the engine was built to continue from {built:?}: build it with `FusedOptions::continues`"
            )));
        }
        if state.batch() != s.batch || !state.layer().is_same(&layout.layer) {
            return Err(Error::Shape(format!(
                "the state belongs to another layer, or has {} rows where the call has {}: continue with the layer that the state was made for",
                state.batch(),
                s.batch
            )));
        }
        Ok(())
    }

    /// [`Fused::extend`], where windows are laid out by position.
    fn continue_from_caches(&mut self, state: &mut State, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        let Fused { whole: Planned { layout, factors, .. }, scratch, .. } = self;
        let s = layout.shape;
        // All that can fail comes first: afterwards the state changes.
        for (index, store) in state.stores.iter_mut().enumerate() {
            if let GroupMemory::Cache(cache) = &mut store.memory {
                cache.reserve(inputs.length(index / state.bases.len(), &s))?;
            }
        }
        layout.bind(inputs, factors);
        let l = &*layout;
        scratch.with(|w| {
            w.ensure_forward(l)?;
            begin(l, state, w)?;
            gates::forward(l, inputs, w);
            prepare::forward(l, inputs, w, false)?;
            channels::prepare(l, inputs, w)?;
            let mut report = run_forward(l, inputs, w, factors, None, y, Some(state))?;
            if l.has_walked_heads() {
                report = report.or(walk::run(l, inputs, w, state, y)?);
            }
            if let Some(at) = &mut report.nonpositive {
                at.position += w.initial.positions[at.row];
            }
            end(l, inputs, state, w);
            Ok(report)
        })
    }
}

/// What came before, into the scratch memory.
fn begin(l: &Layout, state: &State, w: &mut CallScratch) -> Result<(), Error> {
    let s = l.shape;
    let (steps, initial) = (&state.steps, &mut w.initial);
    initial.given = true;
    initial.positions.copy_from_slice(&steps.positions);
    initial.in_gate.copy_from_slice(&steps.in_gate);
    initial.out_gate.copy_from_slice(&steps.out_gate);
    initial.post_gate.copy_from_slice(&steps.post_gate);
    initial.decay.copy_from_slice(&steps.decay);
    initial.log_decay.copy_from_slice(&steps.log_decay);
    w.largest.fill(0.0);
    if l.layer.rotates() {
        w.cos.ensure(s.batch * s.time * l.layer.rotary_pairs())?;
        w.sin.ensure(s.batch * s.time * l.layer.rotary_pairs())?;
    }
    // [B, channels, w − 1] becomes [B, heads, w − 1, dimension].
    let kept = steps.width.saturating_sub(1);
    for ((to, from), dim) in initial.tails.iter_mut().zip(&steps.tails).zip([s.d, s.d, s.e]) {
        to.ensure(from.len())?;
        for (to, from) in to.chunks_exact_mut((dim * kept).max(1)).zip(from.chunks_exact((dim * kept).max(1))) {
            for (channel, tail) in from.chunks_exact(kept).enumerate() {
                tail.iter().enumerate().for_each(|(t, &x)| to[t * dim + channel] = x);
            }
        }
    }
    w.states.ensure(s.batch * s.kv_heads * l.splits * l.state_len)?;
    each_state(l, state, |b, group, index| {
        if let Some((h, z)) = state.stores[index].moments() {
            let to = &mut w.states[state_at(l, b, group, 0)..][..group.len];
            to[..h.len()].copy_from_slice(h);
            to[h.len()..h.len() + z.len()].copy_from_slice(z);
            to[h.len() + z.len()..].fill(0.0);
        }
    });
    Ok(())
}

/// Where the state of a group lies at the start of a split.
fn state_at(l: &Layout, b: usize, group: &ChunkGroup, split: usize) -> usize {
    ((b * l.shape.kv_heads + group.g) * l.splits + split) * l.state_len + group.at
}

/// Calls f with every batch row and group, and the index of its store.
fn each_state(l: &Layout, state: &State, mut f: impl FnMut(usize, &ChunkGroup, usize)) {
    let plan = state.plan();
    for b in 0..l.shape.batch {
        l.groups.iter().for_each(|group| f(b, group, b * plan.groups.len() + plan.group_of[group.heads[0]].0));
    }
}

/// What comes after, from the scratch memory into the state.
fn end(l: &Layout, inputs: &Inputs<f32>, state: &mut State, w: &CallScratch) {
    let s = l.shape;
    let mut stores = std::mem::take(&mut state.stores);
    each_state(l, state, |b, group, index| {
        if let Some((h, z)) = stores[index].moments_mut() {
            let from = &w.states[state_at(l, b, group, l.splits - 1)..][..group.len];
            let (from_h, from_z) = from.split_at(h.len());
            h.copy_from_slice(from_h);
            let rows = z.len();
            z.copy_from_slice(&from_z[..rows]);
        }
    });
    let (sources, groups) = (Sources::new(l, inputs, w), &state.plan().groups);
    let bounds: Vec<Vec<(usize, f32)>> = stores
        .par_iter_mut()
        .enumerate()
        .map(|(index, store)| {
            let (b, group) = (index / groups.len(), &groups[index % groups.len()]);
            let len = inputs.length(b, &s);
            let channels = channels::Source::new(inputs, w).head(l, b, group.heads[0]);
            let keys = Keys { l, w, b, group: group.g, first: b * s.heads, len, channels };
            if matches!(store.memory, GroupMemory::Pool(_)) {
                return Vec::new();
            }
            keys.enter(state, group, index % groups.len(), store);
            let norms = keys.append(group, store);
            let bound = |&h: &usize| {
                let n = b * s.heads + h;
                let largest = w.largest[n * l.tiles..(n + 1) * l.tiles].iter().copied().fold(0.0, larger);
                let cached = matches!(store.memory, GroupMemory::Cache(_)) && group.remembered().is_none();
                (n, if cached { largest } else { dispatch(LargestScore { side: sources.query(l, b, h, false), norms: &norms }) })
            };
            group.heads.iter().map(bound).collect()
        })
        .collect();
    state.stores = stores;
    let steps = &mut state.steps;
    for (n, bound) in bounds.into_iter().flatten() {
        steps.scores[n] = larger(steps.scores[n], bound);
    }
    steps.in_gate.copy_from_slice(&w.initial.in_gate);
    steps.out_gate.copy_from_slice(&w.initial.out_gate);
    steps.post_gate.copy_from_slice(&w.initial.post_gate);
    steps.decay.copy_from_slice(&w.initial.decay);
    for b in 0..s.batch {
        let len = inputs.length(b, &s);
        steps.positions[b] += len;
        for (which, (x, channels)) in inputs.x.iter().zip(s.widths()).enumerate() {
            if steps.width > 1 {
                let from = len.saturating_sub(steps.width - 1);
                steps.keep_tail(which, b, channels, (from..len).map(|t| x.row(b * s.time + t, channels)));
            }
        }
        for (h, n) in (b * s.heads..(b + 1) * s.heads).enumerate() {
            if l.heads[h].variant.decays_by_head() {
                steps.log_decay[n] = w.decay[n * l.tp() + len - 1];
            } else if l.heads[h].variant.decays_by_channel() {
                steps.log_decay[n * s.d..][..s.d].copy_from_slice(&w.channel_decay[(n * l.tp() + len - 1) * s.d..][..s.d]);
            }
        }
    }
}

/// The new keys and values of one state group of one batch row.
struct Keys<'a> {
    l: &'a Layout,
    w: &'a CallScratch,
    b: usize,
    /// Its kv head.
    group: usize,
    /// B·H index of the batch row's first head.
    first: usize,
    len: usize,
    channels: Option<Channels<'a>>,
}

impl Keys<'_> {
    /// The key of a position as a class prepares it, into `key` [width].
    fn key(&self, class: usize, t: usize, key: &mut [f32]) {
        let l = self.l;
        let tile = &self.w.kt[(l.kv_index(class, self.b, self.group) * l.tiles + t / l.tile) * l.width * l.pitch..];
        for (key, row) in key.iter_mut().zip(tile.chunks_exact(l.pitch)) {
            *key = row[t % l.tile];
        }
    }

    /// The value of a position, padded; all classes of a convolution have the same.
    fn value(&self, class: usize, t: usize) -> &[f32] {
        let l = self.l;
        &self.w.v[(l.kv_index(class, self.b, self.group) * l.tp() + t) * l.ep..][..l.ep]
    }

    /// Brings the state of far keys from before the call to after it. Tiles that are far from all positions of the call have entered the state with
    /// their chunks.
    fn enter(&self, state: &State, group: &StateGroup, index: usize, store: &mut Store) {
        let l = self.l;
        let class = group.far.as_ref().map_or(group.class, |far| far.class);
        let (GroupMemory::Cache(cache), Some(far), Some(basis)) = (&mut store.memory, &mut store.far, state.bases[index].as_deref()) else {
            return;
        };
        let mut key = vec![0.0; l.classes[class].width];
        let h = group.heads[0];
        let distance = l.heads[h].variant.distance();
        let (n, before) = (self.first + h, cache.next_position());
        let after = (before + self.len).saturating_sub(distance.window);
        let last = if l.heads[h].variant.decay.is_some() { self.w.decay[n * l.tp() + self.len - 1] } else { 0.0 };
        let absorbed = before + self.len.saturating_sub(distance.window) / l.tile * l.tile;
        for at in before.saturating_sub(distance.window).max(distance.sinks)..after {
            match at.checked_sub(before) {
                None => {
                    cache.far_key(at, &mut key);
                    let (place, column) = (cache.place(at), &cache.columns[0]);
                    let decay = column.decay.get(place).map_or(1.0, |c| (last - c).exp() as f32);
                    far.enter(basis, &key, cache.value(place), column.weights.get(place).copied().unwrap_or(1.0), decay);
                }
                Some(t) if at >= absorbed => {
                    self.key(class, t, &mut key);
                    let decay = if l.heads[h].variant.decay.is_some() { (last - self.w.decay[n * l.tp() + t]).exp() as f32 } else { 1.0 };
                    let weight = if l.heads[h].weighs_keys { self.w.key_weights[n * l.tp() + t] } else { 1.0 };
                    far.enter(basis, &key, self.value(class, t), weight, decay);
                }
                Some(_) => {}
            }
        }
    }

    /// Takes them into a cache, if that is what the store is; returns the largest ‖k‖ up to each position.
    fn append(&self, group: &StateGroup, store: &mut Store) -> Vec<f32> {
        let (l, s) = (self.l, self.l.shape);
        let mut key = vec![0.0; l.classes[group.class].width];
        let far = group.far.as_ref().map(|far| far.class).filter(|&far| far != group.class);
        let mut far_key = vec![0.0; far.map_or(0, |far| l.classes[far].width)];
        let mut norms = Vec::with_capacity(self.len);
        let mut after = 0;
        if let GroupMemory::Cache(cache) = &mut store.memory {
            // The next position still takes a key from the window into a state of far keys.
            after = cache.next_position() + self.len - cache.far_in_state as usize;
            cache.forget(after);
            if let Some(channels) = &self.channels {
                factors(channels.after(self.len), channels.before, &mut key);
                cache.decay_keys(&key);
            }
        }
        for t in 0..self.len {
            match &self.channels {
                None => self.key(group.class, t, &mut key),
                Some(channels) => key.copy_from_slice(&channels.k[t * l.dp..][..s.d]),
            }
            store.key_norm = larger(store.key_norm, dot(&key, &key).sqrt());
            norms.push(store.key_norm);
            let GroupMemory::Cache(cache) = &mut store.memory else { continue };
            if cache.skips(after) {
                cache.forgotten += 1;
                continue;
            }
            if let Some(channels) = &self.channels {
                // Kept as the next query meets it.
                let mut decay = [0.0; 256];
                factors(channels.after(self.len), channels.at(t), &mut decay[..s.d]);
                key.iter_mut().zip(&decay).for_each(|(key, decay)| *key *= decay);
            }
            if let Some(far) = far {
                self.key(far, t, &mut far_key);
            }
            cache.push(&key, &far_key, &self.value(group.class, t)[..s.e]);
            for (&h, column) in group.heads.iter().zip(&mut cache.columns) {
                let at = (self.first + h) * l.tp() + t;
                if l.heads[h].weighs_keys {
                    column.weights.push(self.w.key_weights[at]);
                }
                if l.heads[h].variant.decays_by_head() {
                    column.decay.push(self.w.decay[at]);
                }
            }
        }
        norms
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
