//! One token of every batch row.
//!
//! ```text
//! bind learned coefficients → prepare the token (angles, convolution, norms, gates) → each state group: prepare rows, update its memory, attend → epilogue
//! ```
//!
//! State groups run in parallel. Each has one kind of memory: a KV cache, which [`cache_step`] reads, a recurrent state ([`recurrent_step`]) or the ring buffer
//! of a window ([`ring_step`]).

use crate::epilogue::{self, FarSums, Post, Row, join};
use crate::layer::{RowSources, StateGroup};
use crate::state::block::{BLOCK, Query, QuerySums};
use crate::state::group_context::{GroupContext, TokenRows, padded, widths};
use crate::state::kv_cache::KvCache;
use crate::state::memory::{GroupMemory, GroupState, HeadSums, State};
use crate::state::ring::RingScratch;
use crate::state::{recurrent_step, ring_step};
use crate::{AuxKind, Error, Inputs, KeyRange, Layer, Report, Shape};
use termwise_kernels::basis::Basis;
use termwise_kernels::real::larger;
use termwise_kernels::score_rows::Rescale;
use termwise_kernels::simd::{Simd, Task, dispatch};

/// Memory below this size is updated by one thread: waking others takes as long.
const WORTH_THREADS: usize = 512 << 10;

impl State {
    /// Processes one token of every batch row: y [B, 1, H, e] from inputs whose time is one. If lengths are given, rows of length
    /// 0 do not advance: their inputs are not read, their outputs are zero.
    ///
    /// float32; allocates nothing unless a cache grows; bit-identical for any number of threads on one instruction set. The report names the first
    /// denominator that is not a positive number, by its position since the state was empty.
    pub fn step(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        let shape = self.shape;
        self.layer.check(&shape, inputs, 0)?;
        inputs.check_no_documents()?;
        shape.check_outputs("y", y.len())?;
        self.reserve(inputs)?;
        self.bind(inputs);
        self.token.prepare(&self.layer, &shape, inputs, &mut self.steps);
        let mut groups = std::mem::take(&mut self.groups);
        let bytes: usize = groups.iter().map(GroupState::bytes_read).sum();
        let threads = if bytes > WORTH_THREADS { rayon::current_num_threads() } else { 1 };
        let rows = self.token.rows(&self.layer, &shape, inputs, &self.steps);
        Step { state: self, inputs, rows }.all(0, &mut groups, threads);
        self.groups = groups;
        let report = self.finish(inputs, y);
        self.steps.advance(inputs, &shape);
        Ok(report)
    }

    /// Allocates memory for one more token, so nothing can fail once it is processed.
    fn reserve(&mut self, inputs: &Inputs<f32>) -> Result<(), Error> {
        let count = self.bases.len();
        for (index, group) in self.groups.iter_mut().enumerate() {
            if inputs.length(index / count, &self.shape) > 0 {
                group.reserve(1)?;
            }
        }
        let plan = self.layer.state_plan(self.memory);
        let scratch = |(index, state): (usize, &GroupState)| {
            scratch_len(&self.layer, &self.shape, &plan.groups[index % count], self.bases[index % count].as_deref(), state)
        };
        Ok(self.tasks.ensure(self.groups.iter().enumerate().map(scratch).max().unwrap_or(0))?)
    }

    /// Copies learned coefficients into the kernels.
    pub(crate) fn bind(&mut self, inputs: &Inputs<f32>) {
        for (head, (kernel, far)) in self.kernels.iter_mut().zip(&mut self.far_kernels).enumerate() {
            self.layer.bind(head, KeyRange::Near, inputs, kernel);
            if let Some(far) = far {
                self.layer.bind(head, KeyRange::Far, inputs, far);
            }
        }
    }

    /// y from U, z and ρ of every head.
    fn finish(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Report {
        let Shape { batch, heads: h, e, .. } = self.shape;
        let (ep, plan) = (padded(e), self.layer.state_plan(self.memory));
        let mut report = Report::default();
        for b in 0..batch {
            if inputs.length(b, &self.shape) == 0 {
                y[b * h * e..(b + 1) * h * e].fill(0.0);
                continue;
            }
            let position = self.steps.positions[b];
            for (head, variant) in self.layer.heads().iter().enumerate() {
                let at = b * h + head;
                let (group, place) = plan.group_of[head];
                let state = &self.groups[b * plan.groups.len() + group];
                let HeadSums { z, rho, largest } = state.rows[place];
                let parameter = |aux| if variant.needs(aux) { inputs.aux(aux) } else { &[] };
                let row = Row {
                    z,
                    count: variant.visible(position) as f32,
                    rho,
                    out: self.token.out[at],
                    post: match &variant.post_gate {
                        Some(gate) if gate.by_channel() => Post::Each(&self.token.post_channels[at * e..][..e]),
                        _ => Post::One(self.token.post[at]),
                    },
                    sink: if variant.needs(AuxKind::Sink) { (inputs.aux(AuxKind::Sink)[head] - rho).exp() } else { 0.0 },
                    weight: parameter(AuxKind::NormWeight),
                    bias: parameter(AuxKind::NormBias),
                    norm_reads_scale: self.layer.head_plans()[head].norm_reads_scale,
                };
                let denominator = epilogue::forward(variant, row, &state.u[place * ep..][..e], &mut y[at * e..][..e]);
                if variant.denominator.sums() {
                    report.see((b, head, position), denominator, rho);
                }
                let seen = &mut self.steps.scores[at];
                *seen = larger(*seen, largest);
            }
        }
        report
    }
}

impl GroupState {
    fn bytes_read(&self) -> usize {
        let far = self.far.as_ref().map_or(0, |far| 4 * far.h.len());
        match &self.memory {
            GroupMemory::Recurrent { h, .. } => 4 * h.len(),
            GroupMemory::Cache(cache) => 4 * cache.len * (cache.d + cache.ep) + far,
            GroupMemory::Ring(ring) => 4 * ring.len() * (ring.d + ring.ep) + far,
        }
    }
}

/// Values of scratch memory for one token of a state group.
pub(crate) fn scratch_len(layer: &Layer, shape: &Shape, group: &StateGroup, basis: Option<&Basis>, state: &GroupState) -> usize {
    let (ep, heads) = (padded(shape.e), group.heads.len());
    let [near, far] = widths(layer, group);
    let memory = match &state.memory {
        GroupMemory::Recurrent { .. } => basis.map_or(0, |basis| recurrent_step::scratch_len(basis, heads, ep)),
        GroupMemory::Cache(_) => padded(near) + ep,
        GroupMemory::Ring(ring) => {
            let own = RingScratch::len(ring.layout, ring.accumulated_attention.len(), ring.d, ep, heads);
            own + ring_step::scratch_len([ring.d, far], ep, heads, basis)
        }
    };
    TokenRows::len([near, far], ep, heads) + memory
}

/// One token of all batch rows; the state groups are moved out of the state meanwhile.
struct Step<'a> {
    state: &'a State,
    inputs: &'a Inputs<'a, f32>,
    rows: RowSources<'a>,
}

impl Step<'_> {
    /// State groups from `first` on, split in halves of equal bytes for this many threads: a group stays on the core whose cache contains it.
    fn all(&self, first: usize, groups: &mut [GroupState], threads: usize) {
        if groups.len() < 2 || threads < 2 {
            return groups.iter_mut().enumerate().for_each(|(i, state)| self.run(first + i, state));
        }
        let all: usize = groups.iter().map(GroupState::bytes_read).sum();
        let mut before = 0;
        let half = groups.iter().take_while(|state| {
            before += state.bytes_read();
            2 * before <= all
        });
        let middle = half.count().clamp(1, groups.len() - 1);
        let (left, right) = groups.split_at_mut(middle);
        rayon::join(|| self.all(first, left, threads - threads / 2), || self.all(first + middle, right, threads / 2));
    }

    fn run(&self, index: usize, group_state: &mut GroupState) {
        let Step { state, inputs, .. } = *self;
        let groups = &state.plan().groups;
        let (b, group, basis) = (index / groups.len(), &groups[index % groups.len()], state.bases[index % groups.len()].as_deref());
        if inputs.length(b, &state.shape) > 0 {
            let context = GroupContext { state, inputs, b, group, basis };
            state.tasks.with(|scratch| dispatch(GroupStep { rows: &self.rows, context, group_state, scratch }));
        }
    }
}

/// One token of one state group of one batch row.
struct GroupStep<'a> {
    rows: &'a RowSources<'a>,
    context: GroupContext<'a>,
    group_state: &'a mut GroupState,
    scratch: &'a mut [f32],
}

impl Task for GroupStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let GroupStep { rows: sources, context, group_state, scratch } = self;
        let (mut rows, scratch) = TokenRows::split(&context, group_state, scratch);
        rows.prepare(simd, sources, &context, 0);
        group_state.key_norm = larger(group_state.key_norm, rows.key_norm(&context));
        match group_state.memory {
            GroupMemory::Recurrent { .. } => recurrent_step::step(simd, &context, rows, group_state, scratch),
            GroupMemory::Cache(_) => cache_step(simd, &context, rows, group_state, scratch),
            GroupMemory::Ring(_) => ring_step::step(simd, &context, rows, group_state, scratch),
        }
    }
}

/// One token of a group with a KV cache.
#[inline(always)]
fn cache_step<S: Simd>(simd: S, context: &GroupContext, rows: TokenRows, state: &mut GroupState, scratch: &mut [f32]) {
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
            let (width, distance) = (context.state.layer.key_transforms()[plan.key_transform].width, plan.variant.distance());
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
