//! The fused engine: tiles of scores that live in the first-level cache and are never stored; float32.
//!
//! ```text
//! forward    prepare k, v by head · gates → for each tile of queries: scores, weights, U += W·V, z → epilogue → y
//! backward   prepare q, k, v · gates → epilogue → for each tile of keys: scores and weights once more, dV, dK, dQ → prepare, gates backward
//! ```
//!
//! Heads with a finite state can run in chunks instead ([`chunk`]): tiles only within a chunk, a state between chunks; preparing, gates
//! and epilogue are the same. [`prefill`] starts from the state of earlier calls.
//!
//! Promises: memory linear in T; no allocation once the scratch memory has grown, except by heads with heavy hitters and by calls that
//! continue from a state; every sum has a fixed order, so that results are bit-identical for any number of threads (not across instruction
//! sets). A value that is NaN or infinite changes no row that does not see it, except through a write rule.

mod channels;
mod chunk;
mod cost;
mod epilogue;
mod gates;
mod gradients;
mod join;
mod mode;
mod plan;
mod prefill;
mod prepare;
mod saved;
mod scratch;
mod tile_backward;
mod tile_forward;
mod unroll;
mod walk;
mod write;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use rayon::prelude::*;

use crate::engine::{Home, SavedRows};
pub use crate::fused::cost::break_even;
use crate::fused::epilogue::{Outputs, RowSums};
use crate::fused::gates::Gates;
use crate::fused::gradients::Gradients;
pub use crate::fused::mode::Mode;
use crate::fused::plan::Layout;
use crate::fused::prepare::Sources;
use crate::fused::scratch::CallScratch;
pub use crate::fused::scratch::Scratch;
use crate::fused::tile_backward::BackwardTiles;
use crate::fused::tile_forward::{CallTile, ForwardTile, KeysOf, Queries};
use crate::kernels::TILE;
use crate::kernels::disjoint::{Axes, Axis, Blocks, Disjoint};
use crate::kernels::simd::dispatch;
use crate::state::State;
use crate::{Attention, Buffer, Error, Extra, Grads, Inputs, Layer, Memory, Report, Saved, Shape};

/// Attention in tiles, float32.
///
/// ```
/// use termwise_attention::{Attention, Grads, Inputs, Layer};
///
/// let layer = Layer::new(2, 1, 4).variant("exp over=sum rope=off")?;
/// let mut attention = layer.fused(1, 3)?;
/// let (q, k, v) = ([0.1; 24], [0.2; 12], [0.3; 12]);
/// let inputs = Inputs::new(&q, &k, &v);
/// let mut y = [0.0; 24];
/// let saved = attention.forward(&inputs, &mut y)?;
/// assert!(y.iter().all(|y| (y - 0.3).abs() < 1e-6));
///
/// let (mut dq, mut dk, mut dv) = ([0.0; 24], [0.0; 12], [0.0; 12]);
/// attention.backward(&inputs, &saved, &[1.0; 24], &mut Grads::new(&mut dq, &mut dk, &mut dv))?;
/// assert!((dv.iter().sum::<f32>() - 24.0).abs() < 1e-5);
/// # Ok::<(), termwise_attention::Error>(())
/// ```
pub struct Fused {
    whole: Planned,
    /// Plans for documents, by their lengths.
    documents: HashMap<usize, Planned>,
    scratch: Scratch,
    /// The mode asked for, and the kind of states that [`Fused::extend`] continues from.
    options: (Mode, Option<Memory>),
    home: Arc<Home>,
}

/// Plans for documents that are kept from call to call, unless one call needs more.
const DOCUMENT_PLANS: usize = 256;

/// A call of one shape.
struct Planned {
    layout: Layout,
    /// a_n/α! of each head that runs in chunks [N].
    factors: Vec<Vec<f32>>,
    /// The memory of heads that walk through a call that continues from nothing; `None` where there is no such head, or before the first call.
    walked: Option<State>,
}

impl Planned {
    fn new(layer: &Layer, shape: Shape, (mode, continues): (Mode, Option<Memory>)) -> Result<Planned, Error> {
        let chosen = cost::plan(layer, &shape, mode)?;
        let mut layout = Layout::new(layer, shape, chosen.as_ref().map(|(length, chunked)| (*length, &chunked[..])))?;
        if let Some(memory) = continues {
            let plan = layer.state_plan(memory);
            let chunked: Vec<bool> = plan.group_of.iter().map(|&(group, _)| plan.groups[group].remembered().is_some()).collect();
            let length = if layout.groups.is_empty() { shape.time } else { layout.chunk_len() };
            layout = Layout::new(layer, shape, chunked.contains(&true).then_some((length, &chunked[..])))?;
        }
        Ok(Planned { factors: layout.factors(), layout, walked: None })
    }

    fn forward(&mut self, inputs: &Inputs<f32>, scratch: &Scratch, saved: Option<[&mut [f32]; 3]>, y: &mut [f32]) -> Result<Report, Error> {
        let Planned { layout, factors, walked } = self;
        layout.bind(inputs, factors);
        if layout.has_walked_heads() {
            match walked {
                Some(state) => state.clear(),
                None => *walked = Some(layout.layer.state(layout.shape.batch)?),
            }
        }
        scratch.with(|w| {
            w.ensure_forward(layout)?;
            gates::forward(layout, inputs, w);
            prepare::forward(layout, inputs, w, false)?;
            channels::prepare(layout, inputs, w)?;
            let report = run_forward(layout, inputs, w, factors, saved, y, None)?;
            match walked {
                Some(state) => Ok(report.or(walk::run(layout, inputs, w, state, y)?)),
                None => Ok(report),
            }
        })
    }

    fn backward(
        &mut self,
        inputs: &Inputs<f32>,
        scratch: &Scratch,
        saved: [&[f32]; 3],
        dy: &[f32],
        grads: &mut Grads<f32>,
    ) -> Result<(), Error> {
        let Planned { layout, factors, .. } = self;
        layout.bind(inputs, factors);
        let l = &*layout;
        scratch.with(|w| {
            w.ensure_forward(l)?;
            w.ensure_backward(l)?;
            backward_tasks(l, inputs, w, factors, saved, dy, grads)
        })
    }
}

/// From dy to all gradients.
#[allow(clippy::too_many_arguments, reason = "all that a backward pass reads and writes")]
fn backward_tasks(
    l: &Layout,
    inputs: &Inputs<f32>,
    w: &mut CallScratch,
    factors: &[Vec<f32>],
    saved: [&[f32]; 3],
    dy: &[f32],
    grads: &mut Grads<f32>,
) -> Result<(), Error> {
    gates::forward(l, inputs, w);
    prepare::forward(l, inputs, w, true)?;
    channels::prepare(l, inputs, w)?;
    write::forward(l, inputs, w, factors, true, None)?;
    epilogue::backward(l, inputs, saved, dy, w);
    join::backward(l, inputs, saved[2], w);
    tiles_backward(l, inputs, saved[2], w, factors)?;
    write::backward(l, inputs, w, factors, grads)?;
    channels::backward(l, inputs, w, grads)?;
    prepare::backward(l, inputs, w, grads);
    gates::backward(l, inputs, w, grads);
    parameters_backward(l, w, grads);
    Ok(())
}

/// How a fused engine computes, beyond its layer and sizes.
#[derive(Clone, Default)]
pub struct FusedOptions {
    mode: Mode,
    scratch: Scratch,
    continues: Option<Memory>,
}

impl FusedOptions {
    /// In this mode instead of [`Mode::Parallel`].
    pub fn mode(self, mode: Mode) -> FusedOptions {
        FusedOptions { mode, ..self }
    }

    /// With memory for intermediate results that other engines share.
    pub fn scratch(self, scratch: &Scratch) -> FusedOptions {
        FusedOptions { scratch: scratch.clone(), ..self }
    }

    /// For [`Fused::extend`] from states of this kind: heads that have a state of constant size run in chunks, which are as long as the
    /// call unless the mode says otherwise.
    pub fn continues(self, memory: Memory) -> FusedOptions {
        FusedOptions { continues: Some(memory), ..self }
    }
}

impl Layer {
    /// The fused engine for B rows of T positions.
    pub fn fused(&self, batch: usize, time: usize) -> Result<Fused, Error> {
        self.fused_with(batch, time, FusedOptions::default())
    }

    /// As [`Layer::fused`], with these options.
    pub fn fused_with(&self, batch: usize, time: usize, options: FusedOptions) -> Result<Fused, Error> {
        self.check_fused()?;
        let shape = self.shape(batch, time)?;
        let FusedOptions { mode, scratch, continues } = options;
        let options = (mode, continues);
        Ok(Fused { whole: Planned::new(self, shape, options)?, documents: HashMap::new(), scratch, options, home: Arc::default() })
    }
}

impl Fused {
    /// The mode in which the heads with a finite state run: [`Mode::Parallel`], or [`Mode::Chunk`] with the length of its chunks.
    pub fn mode_taken(&self) -> Mode {
        let layout = &self.whole.layout;
        if layout.groups.is_empty() { Mode::Parallel } else { Mode::Chunk(Some(layout.chunk_len())) }
    }

    /// Whether this head runs in chunks; false also where there is no such head.
    pub fn runs_in_chunks(&self, head: usize) -> bool {
        head < self.whole.layout.heads.len() && self.whole.layout.runs_in_chunks(head)
    }

    /// Plans all documents of a call.
    fn plan(&mut self, inputs: &Inputs<f32>) -> Result<(), Error> {
        let whole = &self.whole.layout;
        if self.documents.len() > DOCUMENT_PLANS {
            self.documents.clear();
        }
        for (_, shape, _) in inputs.each_document(&whole.shape).filter(|(_, shape, _)| *shape != whole.shape) {
            if let Entry::Vacant(place) = self.documents.entry(shape.time) {
                place.insert(Planned::new(&whole.layer, shape, self.options)?);
            }
        }
        Ok(())
    }

    /// The plan of a call or document of this shape.
    fn planned(&mut self, shape: &Shape) -> &mut Planned {
        if *shape == self.whole.layout.shape { &mut self.whole } else { self.documents.get_mut(&shape.time).expect("planned before") }
    }

    /// Memory for the sums of all rows.
    fn new_saved(&self) -> Result<Saved, Error> {
        let mut saved = self.home.saved(Report::default(), self.home.take());
        let layout = &self.whole.layout;
        let rows = layout.head_count() * layout.shape.time;
        saved.rows.u.ensure(rows * layout.ep)?;
        saved.rows.z.ensure(rows)?;
        saved.rows.rho.ensure(rows)?;
        Ok(saved)
    }

    fn run(&mut self, inputs: &Inputs<f32>, mut saved: Option<&mut SavedRows>, y: &mut [f32]) -> Result<Report, Error> {
        let (s, scratch) = (self.whole.layout.shape, self.scratch.clone());
        self.whole.layout.layer.check(&s, inputs, 1)?;
        s.check_outputs("y", y.len())?;
        self.plan(inputs)?;
        let mut report = Report::default();
        for (at, shape, inputs) in inputs.each_document(&s) {
            let saved = saved.as_deref_mut().map(|saved| saved.part_mut(&at, s.heads));
            let y = &mut y[at.start * s.heads * s.e..at.end * s.heads * s.e];
            let found = self.planned(&shape).forward(&inputs, &scratch, saved, y)?;
            report = report.or(found.of_document(at.start, &s));
        }
        Ok(report)
    }
}

impl Attention<f32> for Fused {
    fn infer(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        self.run(inputs, None, y)
    }

    fn forward(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Saved, Error> {
        self.whole.layout.layer.check_trainable()?;
        let mut saved = self.new_saved()?;
        saved.report = self.run(inputs, Some(&mut saved.rows), y)?;
        saved.rows.keep_partition(inputs);
        Ok(saved)
    }

    fn backward(&mut self, inputs: &Inputs<f32>, saved: &Saved, dy: &[f32], grads: &mut Grads<f32>) -> Result<(), Error> {
        self.whole.layout.layer.check_trainable()?;
        self.home.check(saved)?;
        saved.rows.check_partition(inputs)?;
        let (s, scratch) = (self.whole.layout.shape, self.scratch.clone());
        self.whole.layout.layer.check(&s, inputs, 1)?;
        self.whole.layout.layer.check_grads(&s, grads)?;
        s.check_outputs("gradient of y", dy.len())?;
        self.plan(inputs)?;
        for (at, shape, inputs) in inputs.each_document(&s) {
            let dy = &dy[at.start * s.heads * s.e..at.end * s.heads * s.e];
            let saved = saved.rows.part(&at, s.heads);
            self.planned(&shape).backward(&inputs, &scratch, saved, dy, &mut grads.part(&at, &s))?;
        }
        Ok(())
    }
}

/// A tensor by head: [B, H, rows, width].
fn by_head(s: &Shape, width: usize) -> Axes {
    Axes {
        batch: Axis { count: s.batch, step: s.heads * s.time * width },
        heads: Axis { count: s.heads, step: s.time * width },
        rows: Axis { count: s.time, step: width },
        width,
    }
}

/// U, z, ρ and y in blocks of `group` heads and the rows between `cuts`.
fn blocks<'a>(
    l: &Layout,
    saved: Option<[&'a mut [f32]; 3]>,
    y: &'a mut [f32],
    group: usize,
    cuts: &'a [usize],
) -> ([Blocks<'a, f32>; 3], Blocks<'a, f32>) {
    let s = l.shape;
    let count = s.batch * (s.heads / group) * (cuts.len() - 1);
    let sums = match saved {
        None => [(); 3].map(|()| Blocks::empty(count)),
        Some([u, z, rho]) => [(u, l.ep), (z, 1), (rho, 1)].map(|(x, width)| Disjoint::new(x, by_head(&s, width)).blocks(group, cuts)),
    };
    let axes = Axes {
        batch: Axis { count: s.batch, step: s.time * s.heads * s.e },
        heads: Axis { count: s.heads, step: s.e },
        rows: Axis { count: s.time, step: s.heads * s.e },
        width: s.e,
    };
    (sums, Disjoint::new(y, axes).blocks(group, cuts))
}

/// A tensor [B·H, T, width] in pieces of one kv head of one batch row.
fn by_kv_head<'a>(l: &Layout, x: &'a mut Buffer, width: usize) -> impl IndexedParallelIterator<Item = &'a mut [f32]> {
    let s = l.shape;
    x[..l.head_count() * s.time * width].par_chunks_exact_mut(s.group() * s.time * width)
}

/// From prepared tensors in the scratch memory to y; `state` has caches where the call continues from one.
fn run_forward(
    l: &Layout,
    inputs: &Inputs<f32>,
    w: &mut CallScratch,
    factors: &[Vec<f32>],
    saved: Option<[&mut [f32]; 3]>,
    y: &mut [f32],
    state: Option<&State>,
) -> Result<Report, Error> {
    write::forward(l, inputs, w, factors, false, state)?;
    let tile_len = l.passes() * TILE * (l.dp + l.ep + 2);
    let chunk_len = if l.groups.is_empty() { 0 } else { chunk::ChunkScratch::len(l, false) };
    w.tasks.ensure(tile_len.max(chunk_len))?;
    let (mut states, mut largest) = (std::mem::take(&mut w.states), std::mem::take(&mut w.largest));
    let report = forward_tasks(l, inputs, w, factors, saved, y, state, &mut states, &mut largest);
    (w.states, w.largest) = (states, largest);
    Ok(report)
}

#[allow(clippy::too_many_arguments, reason = "what `run_forward` has, with the memory that tasks write to apart")]
fn forward_tasks(
    l: &Layout,
    inputs: &Inputs<f32>,
    w: &CallScratch,
    factors: &[Vec<f32>],
    mut saved: Option<[&mut [f32]; 3]>,
    y: &mut [f32],
    state: Option<&State>,
    states: &mut [f32],
    largest: &mut [f32],
) -> Report {
    let (s, tasks) = (l.shape, &w.tasks);
    let (gates, lengths) = (Gates::new(inputs, w), inputs.lengths);
    let (sources, channels) = (Sources::new(l, inputs, w), channels::Source::new(inputs, w));
    let context = tile_forward::Context { layout: l, sources, kt: &w.kt, v: &w.v, gates, channels, lengths, state };
    let mut report = Report::default();
    if l.has_parallel_heads() {
        let ([u, z, rho], y) = blocks(l, saved.as_mut().map(|saved| saved.each_mut().map(|x| &mut **x)), y, 1, &l.tile_cuts);
        // Head by head, so that its keys and values stay in the second-level cache; long tiles first.
        let all = u.par().zip(z.par()).zip(rho.par()).zip(y.par()).zip(largest.par_iter_mut()).enumerate().rev().with_max_len(1);
        let reports = all.map(|(task, ((((mut u, mut z), mut rho), mut y), largest))| {
            let (n, tile) = (task / l.tiles, task % l.tiles);
            let (b, h) = (n / s.heads, n % s.heads);
            if l.runs_in_chunks(h) || l.heads[h].variant.is_walked() {
                return Report::default();
            }
            tasks.with(|memory| {
                let (q, memory) = memory.split_at_mut(TILE * l.dp);
                let rows = l.tile_cuts[tile + 1] - l.tile_cuts[tile];
                let (own, memory) = row_sums(l, memory);
                let sums =
                    if u.is_empty() { own } else { RowSums { u: u.rows(0, 0, rows), z: z.rows(0, 0, rows), rho: rho.rows(0, 0, rows) } };
                let cached = context.cached(b, h, Some(largest));
                let keys = |q| KeysOf { from: 0, begun: false, q: Queries::Scratch(q) };
                let (far, far_sums) = match l.far[h].is_some() {
                    true => {
                        let (q, memory) = memory.split_at_mut(TILE * l.dp);
                        (Some(keys(q)), row_sums(l, memory).0)
                    }
                    false => (None, RowSums { u: &mut [], z: &mut [], rho: &mut [] }),
                };
                let (near, to) = (keys(q), Outputs { y: &mut y, head: 0, row: 0 });
                dispatch(CallTile(ForwardTile { context: &context, b, h, tile, near, far, cached, sums, far_sums, to }))
            })
        });
        report = reports.reduce(Report::default, Report::or);
    }
    if !l.groups.is_empty() {
        let chunks = chunks(l, inputs, w, factors);
        let (sums, y) = blocks(l, saved, y, s.group(), &l.split_cuts.positions);
        report = report.or(chunk::run::forward(&context, &chunks, states, tasks, sums, y));
    }
    report
}

/// Memory for the sums of a tile, and what is left.
fn row_sums<'a>(l: &Layout, memory: &'a mut [f32]) -> (RowSums<'a>, &'a mut [f32]) {
    let (u, rest) = memory.split_at_mut(TILE * l.ep);
    let (z, rest) = rest.split_at_mut(TILE);
    let (rho, rest) = rest.split_at_mut(TILE);
    (RowSums { u, z, rho }, rest)
}

fn chunks<'a>(l: &'a Layout, inputs: &Inputs<'a, f32>, w: &'a CallScratch, factors: &'a [Vec<f32>]) -> chunk::Chunks<'a> {
    chunk::Chunks {
        layout: l,
        gates: Gates::new(inputs, w),
        channels: channels::Source::new(inputs, w),
        lengths: inputs.lengths,
        kt: &w.kt,
        v: &w.v,
        factors,
        queries: chunk::QueryGrads::default(),
        has_initial_state: w.initial.given,
    }
}

/// Gradients of prepared q, k and v, of c, key weights and learned coefficients.
fn tiles_backward(l: &Layout, inputs: &Inputs<f32>, rho: &[f32], w: &mut CallScratch, factors: &[Vec<f32>]) -> Result<(), Error> {
    let s = l.shape;
    let chunk_len = if l.groups.is_empty() { 0 } else { chunk::ChunkScratch::len(l, true).max(chunk::ChunkScratch::len(l, false)) };
    w.tasks.ensure(tile_backward::tiles_len(l).max(chunk_len))?;
    let mut to = Gradients::take(w);
    let mut states = std::mem::take(&mut w.states);
    let context = tile_backward::Context {
        layout: l,
        q: &w.q,
        k: &w.k,
        kt: &w.kt,
        vt: &w.vt,
        v: &w.v,
        gates: Gates::new(inputs, w),
        channels: channels::Source::new(inputs, w),
        lengths: inputs.lengths,
        rho,
        du: &w.du,
        dz: &w.dz,
    };
    // In round r, part i of the keys meets part i + r of the queries: no two tasks add to the same sum, and the order of rounds fixes
    // that of every sum.
    for round in 0..l.parts.count() {
        to.places(l, &l.parts, round).enumerate().with_max_len(1).for_each(|(task, (to_queries, to_keys))| {
            let (pair, part) = (task / l.parts.count(), task % l.parts.count());
            if part + round >= l.parts.count() {
                return;
            }
            let (b, g, first) = (pair / s.kv_heads, pair % s.kv_heads, round == 0);
            let (keys, queries) = (l.parts.tiles(part), l.parts.tiles(part + round));
            w.tasks.with(|memory| {
                let (context, room) = (&context, &mut memory[..tile_backward::tiles_len(l)]);
                let first_of_all = first;
                dispatch(BackwardTiles { context, b, g, keys, queries, chunked: false, first, first_of_all, to_queries, to_keys, room });
            });
        });
    }
    let queries = chunk::QueryGrads { q: context.q, du: context.du, dz: context.dz };
    let chunks = chunk::Chunks { queries, ..chunks(l, inputs, w, factors) };
    chunk::run::backward(&context, &chunks, &mut to, &mut states, &w.tasks);
    to.put_back(w);
    w.states = states;
    Ok(())
}

/// Adds the gradients of sinks, of the norms' parameters and of learned coefficients, which tasks have left by head.
fn parameters_backward(l: &Layout, w: &CallScratch, grads: &mut Grads<f32>) {
    let s = l.shape;
    for (n, dnorm) in w.dnorm.chunks_exact(2 * s.e + 1).enumerate() {
        let variant = &l.heads[n % s.heads].variant;
        let (dweight, rest) = dnorm.split_at(s.e);
        let (dbias, dsink) = rest.split_at(s.e);
        if variant.needs(Extra::Sink) {
            grads.extra(Extra::Sink)[n % s.heads] += dsink[0];
        }
        for (extra, from) in [(Extra::NormWeight, dweight), (Extra::NormBias, dbias)] {
            if variant.needs(extra) {
                grads.extra(extra).iter_mut().zip(from).for_each(|(d, &g)| *d += g);
            }
        }
    }
    for (far, dlearned) in [false, true].into_iter().zip(&w.dlearned) {
        let (learned, extra) = (l.learned(far), if far { Extra::FarCoefficients } else { Extra::Coefficients });
        for (i, dlearned) in dlearned.chunks_exact(learned.max(1)).enumerate() {
            let h = i % s.heads;
            if l.passes_of(h).any(|head| head.far == far && head.learned > 0) {
                let to = &mut grads.extra(extra)[h * learned..(h + 1) * learned];
                to.iter_mut().zip(dlearned).for_each(|(d, &g)| *d += g as f32);
            }
        }
    }
}
