//! Heads whose keys are selected by more than their distance: sequential evaluation, one position at a time as in [`State::step`], with all kv heads in
//! parallel. The cost is T times the keys in the cache, the memory that of the caches.

use rayon::prelude::*;

use crate::fused::blocks::{by_kv_head, output_blocks};
use crate::fused::call::Call;
use crate::fused::epilogue::{self, Outputs, RowSums, SumBuffers};
use crate::fused::plan::CallPlan;
use crate::fused::prepare::gates::GateFactors;
use crate::fused::scratch::CallScratch;
use crate::layer::{RowSources, StateGroup};
use crate::state::State;
use crate::state::group_context::{GroupContext, TokenRows};
use crate::state::memory::GroupState;
use crate::state::ring_step;
use crate::state::step::scratch_len;
use crate::{Error, Inputs, Report};
use termwise_kernels::real::larger;
use termwise_kernels::simd::{Simd, Task, dispatch};

/// Processes all positions of the call with the caches of a state, and computes y of the sequential heads.
pub(in crate::fused) fn run(
    l: &CallPlan,
    inputs: &Inputs<f32>,
    w: &mut CallScratch,
    state: &mut State,
    y: &mut [f32],
) -> Result<Report, Error> {
    let (s, count) = (l.shape, state.bases.len());
    let plan = l.layer.state_plan(state.memory);
    let sequential = |index: usize| is_sequential(l, &plan.groups[index % count]);
    let mut scratch = 0;
    for (index, group_state) in state.groups.iter_mut().enumerate().filter(|(index, _)| sequential(*index)) {
        group_state.reserve(inputs.length(index / count, &s))?;
        let (group, basis) = (&plan.groups[index % count], state.bases[index % count].as_deref());
        scratch = scratch.max(scratch_len(&l.layer, &s, group, basis, group_state) + group.heads.len());
    }
    w.tasks.ensure(scratch)?;
    w.sequential.ensure(l)?;
    state.bind(inputs);
    let CallScratch { initial, tables, gates, sequential: SumBuffers { u, z, rho }, tasks, .. } = w;
    let call = &Call { plan: l, inputs, initial, past: None, tasks };
    let sources = RowSources::of_call(call, tables);
    let mut groups = std::mem::take(&mut state.groups);
    {
        let state = &*state;
        let (u, z, rho) = (by_kv_head(l, u, l.ep), by_kv_head(l, z, 1), by_kv_head(l, rho, 1));
        // The groups of one kv head of one batch row are one task: they write to neighbouring rows.
        let mut pairs: Vec<Vec<(usize, &mut GroupState)>> = (0..s.batch * s.kv_heads).map(|_| Vec::new()).collect();
        for (index, group_state) in groups.iter_mut().enumerate().filter(|(index, _)| sequential(*index)) {
            pairs[index / count * s.kv_heads + plan.groups[index % count].g].push((index % count, group_state));
        }
        pairs.into_par_iter().zip(u).zip(z).zip(rho).enumerate().with_max_len(1).for_each(|(pair, (((groups, u), z), rho))| {
            for (index, group_state) in groups {
                let (b, group, basis) = (pair / s.kv_heads, &plan.groups[index], state.bases[index].as_deref());
                let (context, to) = (GroupContext { state, inputs, b, group, basis }, RowSums { u, z, rho });
                call.tasks.with(|scratch| dispatch(SequentialSteps { l, sources: &sources, context, group_state, to, scratch }));
            }
        });
    }
    state.groups = groups;
    let gates = GateFactors::new(call, gates);
    let cuts = [0, s.time];
    let y = output_blocks(l, y, 1, &cuts);
    let rows = u.par_chunks_exact_mut(s.time * l.ep).zip(z.par_chunks_exact_mut(s.time)).zip(rho.par_chunks_exact_mut(s.time));
    let reports = rows.take(l.head_count()).zip(y.par()).enumerate().map(|(n, (((u, z), rho), mut y))| {
        let (b, h) = (n / s.heads, n % s.heads);
        if !l.heads[h].variant.is_sequential() {
            return Report::default();
        }
        let (len, to) = (inputs.length(b, &s), Outputs { y: &mut y, head: 0, row: 0 });
        epilogue::forward(l, &gates, (b, h), [0, len, s.time], &RowSums { u, z, rho }, to)
    });
    Ok(reports.reduce(Report::default, Report::or))
}

/// Whether a group has heads that are evaluated one position at a time.
pub(in crate::fused) fn is_sequential(l: &CallPlan, group: &StateGroup) -> bool {
    l.heads[group.heads[0]].variant.is_sequential()
}

/// All positions of one state group of one batch row.
struct SequentialSteps<'a> {
    l: &'a CallPlan,
    sources: &'a RowSources<'a>,
    context: GroupContext<'a>,
    group_state: &'a mut GroupState,
    /// Of all heads of the kv head.
    to: RowSums<'a>,
    scratch: &'a mut [f32],
}

impl Task for SequentialSteps<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let SequentialSteps { l, sources, context, group_state, to, scratch } = self;
        let (s, group, b) = (l.shape, context.group, context.b);
        let (largest, scratch) = scratch.split_at_mut(group.heads.len());
        largest.fill(0.0);
        for t in 0..context.inputs.length(b, &s) {
            let (mut rows, scratch) = TokenRows::split(&context, group_state, scratch);
            rows.prepare(simd, sources, &context, t);
            group_state.key_norm = larger(group_state.key_norm, rows.key_norm(&context));
            ring_step::step(simd, &context, rows, group_state, scratch);
            for (i, &head) in group.heads.iter().enumerate() {
                let at = (head - group.g * s.group()) * s.time + t;
                to.u[at * l.ep..][..l.ep].copy_from_slice(&group_state.u[i * l.ep..][..l.ep]);
                (to.z[at], to.rho[at]) = (group_state.rows[i].z, group_state.rows[i].rho);
                largest[i] = larger(largest[i], group_state.rows[i].largest);
            }
        }
        group_state.rows.iter_mut().zip(&*largest).for_each(|(row, &largest)| row.largest = largest);
    }
}
