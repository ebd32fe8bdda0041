//! Continuing from a state by many positions at once.

use rayon::prelude::*;

use crate::fused::gates::Carried;
use crate::fused::plan::Layout;
use crate::fused::prepare::Side;
use crate::fused::setup::{prepare_all, sources};
use crate::fused::workspace::Workspace;
use crate::fused::{Fused, Kept, bind, run_forward};
use crate::kernels::disjoint::Shared;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::real::dot;
use crate::state::State;
use crate::state::cache::Cache;
use crate::state::memory::{Store, UnitMemory};
use crate::tensors::check_length;
use crate::{Error, Inputs, Report, Shape};

/// The plan of a call that continues: heads whose state has moments run in chunks, the others look at their caches.
pub(super) struct Extension {
    layout: Layout,
    factors: Vec<Vec<f32>>,
}

impl Fused {
    /// Continues from a state, also an empty one, by T positions, and leaves the state as if they had been stepped one by one.
    ///
    /// Where the state has moments, the positions are one chunk in parallel mode, and cut into chunks in chunk mode; where it has
    /// caches, queries look at cached and new keys. Of a batch row only its length counts, and its state stops there. The report
    /// names positions since the state was empty. float32, bit-identical for any number of threads; moments are summed in another
    /// order than by stepping. No gradients: `backward` belongs to `forward` and needs one of its own after this.
    pub fn extend(&mut self, state: &mut State, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        let s = self.layout.shape;
        inputs.check(&self.variants, &s)?;
        check_length(format_args!("y"), s.batch * s.time * s.heads * s.e, y.len())?;
        if state.shape() != (Shape { time: 1, ..s }) || state.heads() != self.variants {
            return Err(Error::Shape(format!(
                "the state belongs to another layer: it has {:?}, the attention {s:?} (times aside), or their heads differ; continue with the layer that the state was made for",
                state.shape()
            )));
        }
        let mut extension = self.extension_for(state)?;
        let Extension { layout, factors } = &mut extension;
        bind(layout, factors, inputs);
        let l = &*layout;
        let scratch = self.scratch.clone();
        let mut guard = scratch.lock();
        let w = &mut *guard;
        w.ensure_forward(l);
        begin(l, state, w);
        let carry = &mut state.carry;
        let offsets = carry.positions.clone();
        let [in_gate, out_gate, post_gate, decay] =
            [&mut carry.in_gate, &mut carry.out_gate, &mut carry.post_gate, &mut carry.decay].map(|past| Shared::new(past));
        prepare_all(l, inputs, w, false, Some(Carried { in_gate, out_gate, post_gate, decay, offsets: &offsets }));
        let kept = Kept { u: Shared::new(&mut self.u), z: Shared::new(&mut self.z), rho: Shared::new(&mut self.rho) };
        let mut nonpositive = run_forward(l, inputs, w, factors, kept, y, Some(state));
        if let Some(at) = &mut nonpositive {
            at.position += offsets[at.row];
        }
        end(l, inputs, state, w);
        self.extension = Some(extension);
        Ok(Report { nonpositive })
    }

    /// The plan for a state like this; kept from call to call.
    fn extension_for(&mut self, state: &State) -> Result<Extension, Error> {
        let chunked: Vec<bool> = state.unit_of.iter().map(|&(unit, _)| state.units[unit].basis().is_some()).collect();
        let fits = |extension: &Extension| extension.layout.heads.iter().map(|head| head.chunked).eq(chunked.iter().copied());
        if let Some(extension) = self.extension.take().filter(fits) {
            return Ok(extension);
        }
        let length = if self.layout.units.is_empty() { self.layout.shape.time } else { self.layout.chunk_len() };
        let plan = chunked.contains(&true).then_some((length, &chunked[..]));
        let layout = Layout::new(&self.variants, self.layout.shape, plan)?;
        Ok(Extension { factors: layout.factors(), layout })
    }
}

impl State {
    /// The cache of a head and the head's place in it.
    pub(super) fn cache_of(&self, b: usize, h: usize) -> Option<(&Cache, usize)> {
        let (unit, column) = self.unit_of[h];
        match &self.stores[b * self.units.len() + unit].memory {
            UnitMemory::Cache(cache) => Some((cache, column)),
            UnitMemory::Moments { .. } => None,
        }
    }
}

/// What came before, into the workspace.
fn begin(l: &Layout, state: &State, w: &mut Workspace) {
    let s = l.shape;
    let carry = &state.carry;
    w.offsets.extend_from_slice(&carry.positions);
    w.before.extend_from_slice(&carry.log_decay);
    w.largest.ensure(l.head_count() * l.tiles);
    w.largest.fill(0.0);
    if l.classes.iter().any(|class| class.rope) {
        w.angle_stride = s.time * (s.d / 2);
        w.cos.ensure(s.batch * w.angle_stride);
        w.sin.ensure(s.batch * w.angle_stride);
    }
    // [B, channels, w − 1] becomes [B, heads, w − 1, dimension].
    let kept = carry.width.saturating_sub(1);
    for ((to, from), dim) in w.tails.iter_mut().zip(&carry.tails).zip([s.d, s.d, s.e]) {
        to.ensure(from.len());
        for (to, from) in to.chunks_exact_mut((dim * kept).max(1)).zip(from.chunks_exact((dim * kept).max(1))) {
            for (channel, tail) in from.chunks_exact(kept).enumerate() {
                tail.iter().enumerate().for_each(|(t, &x)| to[t * dim + channel] = x);
            }
        }
    }
    w.states.ensure(l.spans * s.batch * l.state_len);
    each_state(l, state.units.len(), &state.unit_of, |b, at, len, index| {
        if let UnitMemory::Moments { h, z } = &state.stores[index].memory {
            let to = &mut w.states[b * l.state_len + at..][..len];
            to[..h.len()].copy_from_slice(h);
            to[h.len()..h.len() + z.len()].copy_from_slice(z);
            to[h.len() + z.len()..].fill(0.0);
        }
    });
}

/// Calls f with every batch row, the place of each unit's state in it and its length, and the index of its store.
fn each_state(l: &Layout, units: usize, unit_of: &[(usize, usize)], mut f: impl FnMut(usize, usize, usize, usize)) {
    for b in 0..l.shape.batch {
        for unit in &l.units {
            f(b, unit.at, unit.len, b * units + unit_of[unit.heads[0]].0);
        }
    }
}

/// What comes after, from the workspace into the state.
fn end(l: &Layout, inputs: &Inputs<f32>, state: &mut State, w: &Workspace) {
    let s = l.shape;
    let last = l.spans.saturating_sub(1) * s.batch;
    let State { stores, units, unit_of, carry, .. } = state;
    each_state(l, units.len(), unit_of, |b, at, len, index| {
        if let UnitMemory::Moments { h, z } = &mut stores[index].memory {
            let from = &w.states[(last + b) * l.state_len + at..][..len];
            let (from_h, from_z) = from.split_at(h.len());
            h.copy_from_slice(from_h);
            let rows = z.len();
            z.copy_from_slice(&from_z[..rows]);
        }
    });
    let sources = sources(inputs, w);
    let bounds: Vec<Vec<(usize, f32)>> = stores
        .par_iter_mut()
        .enumerate()
        .map(|(index, store)| {
            let (b, unit) = (index / units.len(), &units[index % units.len()]);
            let len = inputs.length(b, &s);
            let class = l.heads[unit.heads[0]].class;
            let keys = Keys { l, w, kv: l.kv_index(class, b, unit.kv_head), first: b * s.heads, len };
            let norms = keys.append(&unit.heads, store);
            let bound = |&h: &usize| {
                let n = b * s.heads + h;
                let largest = w.largest[n * l.tiles..(n + 1) * l.tiles].iter().copied().fold(0.0, larger);
                let cached = matches!(store.memory, UnitMemory::Cache(_));
                (n, if cached { largest } else { dispatch(LargestScore { side: sources.query(l, b, h), norms: &norms }) })
            };
            unit.heads.iter().map(bound).collect()
        })
        .collect();
    for (n, bound) in bounds.into_iter().flatten() {
        carry.scores[n] = larger(carry.scores[n], bound);
    }
    for b in 0..s.batch {
        let len = inputs.length(b, &s);
        carry.positions[b] += len;
        for (which, (x, channels)) in [inputs.q, inputs.k, inputs.v].into_iter().zip(l.channels()).enumerate() {
            if carry.width > 1 {
                let from = len.saturating_sub(carry.width - 1);
                carry.keep_tail(which, b, &x[(b * s.time + from) * channels..(b * s.time + len) * channels], channels);
            }
        }
        for h in (0..s.heads).filter(|&h| l.heads[h].variant.decay.is_some()) {
            carry.log_decay[b * s.heads + h] = w.decay[(b * s.heads + h) * l.tp() + len - 1];
        }
    }
}

/// The larger; what is not a number has no bound and stays.
fn larger(a: f32, b: f32) -> f32 {
    if b <= a { a } else { b }
}

/// The new keys and values of one unit of one batch row.
struct Keys<'a> {
    l: &'a Layout,
    w: &'a Workspace,
    kv: usize,
    /// B·H index of the batch row's first head.
    first: usize,
    len: usize,
}

impl Keys<'_> {
    /// Takes them into a cache, if that is what the store is; returns the largest ‖k‖ up to each position.
    fn append(&self, heads: &[usize], store: &mut Store) -> Vec<f32> {
        let (l, s) = (self.l, self.l.shape);
        let mut key = vec![0.0; s.d];
        let mut norms = Vec::with_capacity(self.len);
        if let UnitMemory::Cache(cache) = &mut store.memory {
            cache.reserve(self.len);
        }
        for t in 0..self.len {
            let tile = &self.w.kt[(self.kv * l.tiles + t / l.tile) * s.d * l.pitch..][..s.d * l.pitch];
            for (key, row) in key.iter_mut().zip(tile.chunks_exact(l.pitch)) {
                *key = row[t % l.tile];
            }
            store.key_norm = larger(store.key_norm, dot(&key, &key).sqrt());
            norms.push(store.key_norm);
            if let UnitMemory::Cache(cache) = &mut store.memory {
                cache.push(&key, &self.w.v[(self.kv * l.tp() + t) * l.ep..][..s.e]);
            }
        }
        if let UnitMemory::Cache(cache) = &mut store.memory {
            for (&h, column) in heads.iter().zip(&mut cache.columns) {
                let at = (self.first + h) * l.tp();
                if l.heads[h].weighs_keys {
                    column.weights.extend_from_slice(&self.w.key_weights[at..at + self.len]);
                }
                if l.heads[h].variant.decay.is_some() {
                    column.decay.extend_from_slice(&self.w.decay[at..at + self.len]);
                }
            }
        }
        norms
    }
}

/// The largest ‖q_t‖ times the largest ‖k‖ up to t, which bounds all scores.
struct LargestScore<'a> {
    side: Side<'a>,
    norms: &'a [f32],
}

impl Task for LargestScore<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut row = [0.0f32; 256];
        let row = &mut row[..self.side.dim];
        let mut largest = 0.0;
        for (t, norm) in self.norms.iter().enumerate() {
            self.side.forward(simd, t, row);
            largest = larger(largest, dot(row, row).sqrt() * norm);
        }
        largest
    }
}
