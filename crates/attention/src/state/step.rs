//! One token of every batch row.
//!
//! ```text
//! bind learned coefficients → prepare the token (angles, convolution, norms, gates) → each state group: prepare rows, update its memory, attend → epilogue
//! ```
//!
//! State groups run in parallel. Each has one kind of memory: [`recurrent_step`], [`cache_step`] or [`ring_step`].

use crate::epilogue::{self, Post, Row};
use crate::layer::{RowSources, StateGroup};
use crate::state::group_context::{GroupContext, TokenRows, padded, widths};
use crate::state::memory::{GroupMemory, GroupState, HeadSums, State};
use crate::state::ring::RingScratch;
use crate::state::{cache_step, recurrent_step, ring_step};
use crate::{AuxKind, Error, Inputs, KeyRange, Layer, Report, Shape};
use termwise_kernels::basis::Basis;
use termwise_kernels::real::larger;
use termwise_kernels::simd::{Simd, Task, dispatch};

/// Memory below this size is updated by one thread: waking others takes as long.
const WORTH_THREADS: usize = 512 << 10;

impl State {
    /// Processes one token of every batch row: y [B, 1, H, e] from inputs whose time is one. If lengths are given, rows of length
    /// 0 do not advance: their inputs are not read, their outputs are zero.
    ///
    /// float32; allocates nothing unless a cache grows; bit-identical for any number of threads. The report names the first
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
            GroupMemory::Cache(_) => cache_step::step(simd, &context, rows, group_state, scratch),
            GroupMemory::Ring(_) => ring_step::step(simd, &context, rows, group_state, scratch),
        }
    }
}
