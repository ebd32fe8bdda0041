//! Heads for which what is near or far depends on more than the distance: they take one position after another, as a state does, with all kv heads at
//! once. Cost is T times the keys that are held, memory that of the pools.

use rayon::prelude::*;

use crate::Kernel;
use crate::fused::epilogue::{self, Outputs, RowSums};
use crate::fused::gates::Gates;
use crate::fused::plan::Layout;
use crate::fused::prepare::Sources;
use crate::fused::scratch::CallScratch;
use crate::fused::{blocks, by_kv_head};
use crate::kernels::PAD;
use crate::kernels::basis::Basis;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::layer::StateGroup;
use crate::parts::bits::Channels;
use crate::real::{dot, larger};
use crate::state::State;
use crate::state::memory::Store;
use crate::state::pool::PoolScratch;
use crate::state::pool_step::{self, GroupInputs};
use crate::{Error, Extra, Inputs, Report};

/// Takes all positions of the call into the pools of a state, and computes y of the heads that walk.
pub(super) fn run(l: &Layout, inputs: &Inputs<f32>, w: &mut CallScratch, state: &mut State, y: &mut [f32]) -> Result<Report, Error> {
    let s = l.shape;
    let (groups, tables) = (state.bases.len(), &state.tables);
    for (index, store) in state.stores.iter_mut().enumerate() {
        if walks(l, &l.layer.state_plan(state.memory).groups[index % groups]) {
            store.reserve(inputs.length(index / groups, &s))?;
        }
    }
    for (buffer, width) in w.walk.iter_mut().zip([l.ep, 1, 1]) {
        buffer.ensure(l.head_count() * s.time * width)?;
    }
    let plan = l.layer.state_plan(state.memory);
    let scratch = state
        .stores
        .iter()
        .enumerate()
        .filter(|(index, _)| walks(l, &plan.groups[index % groups]))
        .map(|(index, store)| scratch_len(l, &plan.groups[index % groups], state.bases[index % groups].as_deref(), store.receiving()));
    w.tasks.ensure(scratch.max().unwrap_or(0))?;
    let [mut u, mut z, mut rho] = std::mem::take(&mut w.walk);
    let (sources, tasks, bases) = (Sources::new(l, inputs, w), &w.tasks, &state.bases);
    let mut stores = std::mem::take(&mut state.stores);
    {
        let (u, z, rho) = (by_kv_head(l, &mut u, l.ep), by_kv_head(l, &mut z, 1), by_kv_head(l, &mut rho, 1));
        // The groups of one kv head of one batch row are one task: they write to neighbouring rows.
        let mut pairs: Vec<Vec<(usize, &mut Store)>> = (0..s.batch * s.kv_heads).map(|_| Vec::new()).collect();
        for (index, store) in stores.iter_mut().enumerate() {
            pairs[index / groups * s.kv_heads + plan.groups[index % groups].g].push((index % groups, store));
        }
        pairs.into_par_iter().zip(u).zip(z).zip(rho).enumerate().with_max_len(1).for_each(|(pair, (((stores, u), z), rho))| {
            let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
            for (index, store) in stores {
                let group = &plan.groups[index];
                if !walks(l, group) {
                    continue;
                }
                let basis = bases[index].as_deref();
                let walk = WalkInputs { l, inputs, sources: &sources, tables, group, b, g, t: 0 };
                let to = RowSums { u, z, rho };
                tasks.with(|scratch| dispatch(Walk { inputs: walk, basis, store, to, scratch }));
            }
        });
    }
    for (index, store) in stores.iter().enumerate() {
        let (b, group) = (index / groups, &plan.groups[index % groups]);
        for (&h, row) in group.heads.iter().zip(&store.rows).filter(|_| walks(l, group)) {
            let seen = &mut state.steps.scores[b * s.heads + h];
            *seen = larger(*seen, row.largest);
        }
    }
    state.stores = stores;
    let gates = Gates::new(inputs, w);
    let cuts = [0, s.time];
    let (_, y) = blocks(l, None, y, 1, &cuts);
    let rows = u.par_chunks_exact_mut(s.time * l.ep).zip(z.par_chunks_exact_mut(s.time)).zip(rho.par_chunks_exact_mut(s.time));
    let reports = rows.take(l.head_count()).zip(y.par()).enumerate().map(|(n, (((u, z), rho), mut y))| {
        let (b, h) = (n / s.heads, n % s.heads);
        if !l.heads[h].variant.is_walked() {
            return Report::default();
        }
        let (len, to) = (inputs.length(b, &s), Outputs { y: &mut y, head: 0, row: 0 });
        epilogue::forward(l, &gates, (b, h), [0, len, s.time], &RowSums { u, z, rho }, to)
    });
    let report = reports.reduce(Report::default, Report::or);
    w.walk = [u, z, rho];
    Ok(report)
}

/// Whether the heads of a group walk.
pub(super) fn walks(l: &Layout, group: &StateGroup) -> bool {
    l.heads[group.heads[0]].variant.is_walked()
}

fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// Values of scratch memory for at most so many keys.
fn scratch_len(l: &Layout, group: &StateGroup, basis: Option<&Basis>, keys: usize) -> usize {
    let heads = group.heads.len();
    let far = group.far.as_ref().map_or(0, |far| l.classes[far.class].width);
    let pool = group.places.map_or(0, |places| PoolScratch::len(places, keys, l.shape.d, l.ep, heads));
    padded(l.shape.d) * (1 + heads) + l.ep + pool + pool_step::scratch_len(&l.shape, far, heads, basis)
}

/// What a pool reads of the positions of a call.
pub(super) struct WalkInputs<'a> {
    pub l: &'a Layout,
    pub inputs: &'a Inputs<'a, f32>,
    pub sources: &'a Sources<'a>,
    pub tables: &'a [std::sync::Arc<Vec<f32>>],
    pub group: &'a StateGroup,
    pub b: usize,
    pub g: usize,
    pub t: usize,
}

impl GroupInputs for WalkInputs<'_> {
    fn kernel(&self, head: usize, far: bool) -> &Kernel {
        &self.l.pass(head, far).kernel
    }

    fn table(&self, head: usize) -> &[f32] {
        &self.tables[head]
    }

    fn sink(&self, head: usize) -> Option<f32> {
        self.l.heads[head].variant.needs(Extra::Sink).then(|| self.inputs.extra(Extra::Sink)[head])
    }

    fn channels(&self) -> Option<Channels<'_>> {
        self.l.classes[self.group.class].channels_of(self.inputs, self.l.shape.d, self.g)
    }

    #[inline(always)]
    fn far_key<S: Simd>(&self, simd: S, key: &[f32], to: &mut [f32]) {
        let Some(far) = &self.group.far else { return };
        self.l.classes[far.class].of_keys(self.inputs, self.l.shape.d, self.g).forward(simd, key, to);
    }

    #[inline(always)]
    fn far_query<S: Simd>(&self, simd: S, head: usize, to: &mut [f32]) {
        self.sources.query(self.l, self.b, head, true).forward(simd, self.t, to);
    }
}

/// All positions of one state group of one batch row.
struct Walk<'a> {
    inputs: WalkInputs<'a>,
    basis: Option<&'a Basis>,
    store: &'a mut Store,
    /// Of all heads of the kv head.
    to: RowSums<'a>,
    scratch: &'a mut [f32],
}

impl Task for Walk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Walk { mut inputs, basis, store, to, scratch } = self;
        let WalkInputs { l, sources, group, b, g, .. } = inputs;
        let (s, dp) = (l.shape, padded(l.shape.d));
        let (key, scratch) = scratch.split_at_mut(dp);
        let (value, scratch) = scratch.split_at_mut(l.ep);
        let (queries, scratch) = scratch.split_at_mut(dp * group.heads.len());
        let (keys, values) = (sources.keys(l, group.class, b, g), sources.values(l, group.class, b, g));
        let mut largest = vec![0.0f32; group.heads.len()];
        for t in 0..inputs.inputs.length(b, &s) {
            inputs.t = t;
            keys.forward(simd, t, key);
            values.forward(simd, t, value);
            for (&head, query) in group.heads.iter().zip(queries.chunks_exact_mut(dp)) {
                sources.query(l, b, head, false).forward(simd, t, query);
            }
            let norm = dot(&key[..s.d], &key[..s.d]).sqrt();
            store.key_norm = larger(store.key_norm, norm);
            pool_step::step(simd, &l.layer, group, basis, &inputs, (&key[..s.d], value), (queries, dp), store, scratch);
            for (i, &head) in group.heads.iter().enumerate() {
                let at = (head - g * s.group()) * s.time + t;
                to.u[at * l.ep..][..l.ep].copy_from_slice(&store.u[i * l.ep..][..l.ep]);
                (to.z[at], to.rho[at]) = (store.rows[i].z, store.rows[i].rho);
                largest[i] = larger(largest[i], store.rows[i].largest);
            }
        }
        store.rows.iter_mut().zip(&largest).for_each(|(row, &largest)| row.largest = largest);
    }
}
