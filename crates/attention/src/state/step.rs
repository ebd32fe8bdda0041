//! One token, in one pass over the state: each row is read once, used, decayed, updated and stored
//!
//! ```text
//! U_t = m_t·Q_tᵀ·H_{t−1} + w(x_tt)·v'_t      z_t = m_t·Q_tᵀ·z_{t−1} + w(x_tt)      v' = I·κ·v
//! H_t = m_t·H_{t−1} + K_t·v'_tᵀ
//! ```
//!
//! With a write rule the key reads before it writes, v' = β·(v − m_t·K̂_tᵀ·H_{t−1}): two passes over columns of H while they are in the cache.
//!
//! The token's own weight is computed from its score: the sum over monomials rounds at the size of (Σ_i |q_i·k_i|)^n however small
//! (q·k)^n is, and at the first positions there is nothing else beside it.

use rayon::prelude::*;

use crate::epilogue::{self, Post, Row};
use crate::kernels::PAD;
use crate::kernels::basis::Basis;
use crate::kernels::score_rows::Rescale;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::kernels::state_update::{sweep, sweep_written};
use crate::layer::StateGroup;
use crate::parts::kernel::feature::Map;
use crate::parts::rope::rotate;
use crate::real::dot;
use crate::state::cache::{Query, Sums};
use crate::state::memory::{GroupMemory, HeadSums, State, Store};
use crate::{Error, Extra, Inputs, Report, Shape};

/// Less memory than this is updated by one thread: waking others takes as long.
const WORTH_THREADS: usize = 512 << 10;

impl State {
    /// Takes one token of every batch row in: y [B, 1, H, e] from inputs whose time is one. Where lengths are given, rows of length
    /// 0 stand still: their inputs are not read, their outputs are zero.
    ///
    /// float32; allocates nothing unless a cache grows; bit-identical for any number of threads. The report names the first
    /// denominator that is not a positive number, by its position since the state was empty.
    pub fn step(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        let shape = self.shape;
        self.layer.check(&shape, inputs, 0)?;
        inputs.check_no_documents()?;
        shape.check_outputs("y", y.len())?;
        self.reserve(inputs)?;
        for (head, kernel) in self.kernels.iter_mut().enumerate() {
            self.layer.bind(head, inputs, kernel);
        }
        self.token.prepare(&self.layer, &shape, inputs, &mut self.steps);
        let mut stores = std::mem::take(&mut self.stores);
        let step = Step { state: self, inputs };
        let bytes: usize = stores.iter().map(Store::bytes_read).sum();
        if stores.len() > 1 && bytes > WORTH_THREADS {
            stores.par_iter_mut().enumerate().with_max_len(1).for_each(|(index, store)| step.run(index, store));
        } else {
            stores.iter_mut().enumerate().for_each(|(index, store)| step.run(index, store));
        }
        self.stores = stores;
        let report = self.finish(inputs, y);
        self.steps.positions.iter_mut().enumerate().for_each(|(b, position)| *position += inputs.length(b, &shape));
        Ok(report)
    }

    /// Makes scratch for one more token, so that nothing can fail once it enters.
    fn reserve(&mut self, inputs: &Inputs<f32>) -> Result<(), Error> {
        let groups = self.bases.len();
        for (index, store) in self.stores.iter_mut().enumerate() {
            if let GroupMemory::Cache(cache) = &mut store.memory
                && inputs.length(index / groups, &self.shape) > 0
            {
                cache.reserve(1)?;
            }
        }
        let scratch = |(group, basis): (&StateGroup, &Option<_>)| scratch_len(&self.shape, group.heads.len(), basis.as_deref());
        let most = self.layer.state_plan(self.memory).groups.iter().zip(&self.bases).map(scratch).max().unwrap_or(0);
        self.tasks.ensure(most)
    }

    /// y from U, z and ρ of every head.
    fn finish(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Report {
        let Shape { batch, heads: h, e, .. } = self.shape;
        let (ep, plan) = (e.next_multiple_of(PAD), self.layer.state_plan(self.memory));
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
                let store = &self.stores[b * plan.groups.len() + group];
                let HeadSums { z, rho, largest } = store.rows[place];
                let parameter = |extra| if variant.needs(extra) { inputs.extra(extra) } else { &[] };
                let row = Row {
                    z,
                    count: variant.visible(position) as f32,
                    rho,
                    out: self.token.out[at],
                    post: match &variant.post_gate {
                        Some(gate) if gate.by_channel() => Post::Each(&self.token.post_channels[at * e..][..e]),
                        _ => Post::One(self.token.post[at]),
                    },
                    sink: if variant.needs(Extra::Sink) { (inputs.extra(Extra::Sink)[head] - rho).exp() } else { 0.0 },
                    weight: parameter(Extra::NormWeight),
                    bias: parameter(Extra::NormBias),
                };
                let denominator = epilogue::forward(variant, row, &store.u[place * ep..][..e], &mut y[at * e..][..e]);
                if variant.denominator.sums() {
                    report.see((b, head, position), denominator, rho);
                }
                let seen = &mut self.steps.scores[at];
                // A score that is not a number has no bound.
                *seen = if largest <= *seen { *seen } else { largest };
            }
        }
        report
    }
}

impl Store {
    fn bytes_read(&self) -> usize {
        match &self.memory {
            GroupMemory::Moments { h, .. } => 4 * h.len(),
            GroupMemory::Cache(cache) => 4 * cache.len * (cache.d + cache.ep),
        }
    }
}

/// Values of scratch memory that one state group takes.
fn scratch_len(shape: &Shape, heads: usize, basis: Option<&Basis>) -> usize {
    // One reader more than heads, and what it finds: the key, where there is a write rule.
    let rows = basis.map_or(0, |basis| padded(basis.stem_rows()) + padded(basis.rows()) * (2 + heads));
    rows + padded(shape.d) * (2 + heads) + padded(shape.e) * (2 + heads)
}

/// One token of all batch rows; the memories are taken out of the state meanwhile.
struct Step<'a> {
    state: &'a State,
    inputs: &'a Inputs<'a, f32>,
}

impl Step<'_> {
    fn run(&self, index: usize, store: &mut Store) {
        let groups = &self.state.plan().groups;
        let (b, group, basis) = (index / groups.len(), &groups[index % groups.len()], self.state.bases[index % groups.len()].as_deref());
        if self.inputs.length(b, &self.state.shape) > 0 {
            self.state.tasks.with(|scratch| dispatch(GroupStep { step: self, b, group, basis, store, scratch }));
        }
    }

    /// Row `head` of tensor `which` in batch row b, prepared up to φ, into `to` [dim].
    #[inline(always)]
    fn row<S: Simd>(&self, simd: S, which: usize, b: usize, head: usize, group: &StateGroup, to: &mut [f32]) {
        let Shape { heads, kv_heads, d, e, .. } = self.state.shape;
        let (count, dim) = [(heads, d), (kv_heads, d), (kv_heads, e)][which];
        let (class, token) = (self.state.layer.classes()[group.class], &self.state.token);
        let x = match self.state.layer.norm_source(class).filter(|_| which < 2) {
            Some(source) => &token.normed[which][(source * self.state.shape.batch + b) * count * dim..],
            None if class.conv => &token.filtered[which][b * count * dim..],
            None => self.inputs.x[which].row(b, count * dim),
        };
        let to = &mut to[..dim];
        to.copy_from_slice(&x[head * dim..][..dim]);
        if which == 2 {
            return;
        }
        if class.rope {
            let half = d / 2;
            rotate(to, &token.cos[b * half..][..half], &token.sin[b * half..][..half]);
        }
        if class.map != Map::Identity {
            class.map.forward_simd(simd, to);
        }
    }
}

fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// One state group of one batch row.
struct GroupStep<'a> {
    step: &'a Step<'a>,
    b: usize,
    group: &'a StateGroup,
    basis: Option<&'a Basis>,
    store: &'a mut Store,
    scratch: &'a mut [f32],
}

impl Task for GroupStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let GroupStep { step, b, group, basis, store, scratch } = self;
        let State { layer, kernels, tables, key_tables, shape, steps, token, .. } = step.state;
        let (Shape { heads: h, d, e, .. }, heads, log_decay) = (*shape, layer.head_plans(), &steps.log_decay);
        let (dp, ep) = (padded(d), padded(e));
        let (key, scratch) = scratch.split_at_mut(dp);
        let (value, scratch) = scratch.split_at_mut(ep);
        let (queries, scratch) = scratch.split_at_mut(dp * group.heads.len());
        let key = &mut key[..d];
        step.row(simd, 1, b, group.g, group, key);
        step.row(simd, 2, b, group.g, group, value);
        value[e..].fill(0.0);
        for (&head, query) in group.heads.iter().zip(queries.chunks_exact_mut(dp)) {
            step.row(simd, 0, b, head, group, query);
        }
        let write =
            heads[group.heads[0]].variant.write.map(|rule| (rule, rule.beta(step.inputs.extra(Extra::Beta)[b * shape.kv_heads + group.g])));
        let norm = dot(key, key).sqrt();
        store.key_norm = if norm <= store.key_norm { store.key_norm } else { norm };
        match (&mut store.memory, basis) {
            (GroupMemory::Moments { h: state, z }, Some(basis)) => {
                let first = b * h + group.heads[0];
                // Gates and weights are the same for all heads of the group, or it has one head.
                let (weight, m) = (token.key_weights[first], token.decay[first]);
                value[..e].iter_mut().for_each(|v| *v *= weight);
                let n = basis.rows();
                let (stem, scratch) = scratch.split_at_mut(padded(basis.stem_rows()));
                let (k, scratch) = scratch.split_at_mut(padded(n));
                let (q, found) = scratch.split_at_mut(padded(n) * (1 + group.heads.len()));
                basis.of_one(key, stem, k);
                k[n..].fill(0.0);
                for ((&head, query), q) in group.heads.iter().zip(queries.chunks_exact(dp)).zip(q.chunks_exact_mut(padded(n))) {
                    basis.of_one(&query[..d], stem, q);
                    q[n..].fill(0.0);
                    let learned = heads[head].learned > 0;
                    for (i, &order) in basis.orders().iter().enumerate() {
                        let a = if learned { kernels[head].coefficient(order) as f32 } else { 1.0 };
                        let span = basis.span(i);
                        for (q, &c) in q[span.clone()].iter_mut().zip(&tables[head][span]) {
                            *q *= c * a;
                        }
                    }
                }
                store.u.fill(0.0);
                match write {
                    None => sweep(simd, state, ep, m, k, value, &q[..group.heads.len() * padded(n)], &mut store.u),
                    Some((_, beta)) => {
                        let reader = &mut q[group.heads.len() * padded(n)..];
                        let learned = heads[group.heads[0]].learned > 0;
                        for (i, &order) in basis.orders().iter().enumerate() {
                            let a = if learned { kernels[group.heads[0]].coefficient(order) as f32 } else { 1.0 };
                            let span = basis.span(i);
                            let table = key_tables[group.heads[0]][span.clone()].iter();
                            reader[span.clone()].iter_mut().zip(&k[span]).zip(table).for_each(|((q, k), c)| *q = k * c * a);
                        }
                        reader[n..].fill(0.0);
                        let found = &mut found[..ep * (1 + group.heads.len())];
                        found.fill(0.0);
                        let mut u = [0.0; 256];
                        let u = &mut u[..ep];
                        sweep_written(simd, state, ep, m, k, q, found, u, |columns, found, u| {
                            let answers = &found[ep * group.heads.len()..][columns.clone()];
                            let answers = value[columns.clone()].iter().zip(answers);
                            u[columns].iter_mut().zip(answers).for_each(|(u, (v, answer))| *u = beta * (v - m * answer));
                        });
                        value.copy_from_slice(u);
                        store.u.copy_from_slice(&found[..ep * group.heads.len()]);
                    }
                }
                for ((i, &head), query) in group.heads.iter().enumerate().zip(queries.chunks_exact(dp)) {
                    let query = &query[..d];
                    let scale = heads[head].scale;
                    let largest = scale.abs() * dot(query, query).sqrt() * store.key_norm;
                    let own = kernels[head].value(scale * dot(query, key));
                    let before = if z.is_empty() { 0.0 } else { product(simd, &q[i * padded(n)..][..n], z) };
                    for (u, &v) in store.u[i * ep..][..ep].iter_mut().zip(&*value) {
                        *u = m * *u + own * v;
                    }
                    store.rows[i] = HeadSums { z: m * before + own, rho: 0.0, largest };
                }
                update_sums(simd, z, m, &k[..n]);
            }
            (GroupMemory::Cache(cache), _) => {
                cache.forget(cache.next_position());
                if let Some((rule, beta)) = write {
                    let (reader, answer) = scratch.split_at_mut(dp);
                    let answer = &mut answer[..ep];
                    answer.fill(0.0);
                    reader.iter_mut().zip(&*key).for_each(|(q, k)| *q = rule.scale as f32 * k);
                    let (first, mut sums) = (group.heads[0], Sums::new(Rescale::None, None));
                    for block in 0..cache.blocks() {
                        let mut query = Query {
                            q: &reader[..d],
                            kernel: &kernels[first],
                            cap: heads[first].cap,
                            clamp: heads[first].clamp,
                            rescale: Rescale::None,
                            log_decay: log_decay[b * h + first],
                            u: &mut *answer,
                            sums: &mut sums,
                        };
                        cache.decode(simd, block, 0, &mut query);
                    }
                    value.iter_mut().zip(&*answer).for_each(|(v, answer)| *v = beta * (*v - answer));
                }
                cache.push(key, &value[..e]);
                for (&head, column) in group.heads.iter().zip(&mut cache.columns) {
                    let head_plan = &heads[head];
                    if head_plan.weighs_keys {
                        column.weights.push(token.key_weights[b * h + head]);
                    }
                    if head_plan.variant.decay.is_some() {
                        column.decay.push(log_decay[b * h + head]);
                    }
                }
                for (&head, query) in group.heads.iter().zip(queries.chunks_exact_mut(dp)) {
                    let scale = heads[head].scale;
                    query[..d].iter_mut().for_each(|q| *q *= scale);
                }
                store.u.fill(0.0);
                for (i, &head) in group.heads.iter().enumerate() {
                    let variant = &heads[head].variant;
                    let sink = variant.needs(Extra::Sink).then(|| self.step.inputs.extra(Extra::Sink)[head]);
                    store.sums[i] = Sums::new(variant.rescale(), sink);
                }
                for block in 0..cache.blocks() {
                    for (i, &head) in group.heads.iter().enumerate() {
                        let plan = &heads[head];
                        let mut query = Query {
                            q: &queries[i * dp..][..d],
                            kernel: &kernels[head],
                            cap: plan.cap,
                            clamp: plan.clamp,
                            rescale: plan.variant.rescale(),
                            log_decay: log_decay[b * h + head],
                            u: &mut store.u[i * ep..][..ep],
                            sums: &mut store.sums[i],
                        };
                        cache.decode(simd, block, i, &mut query);
                    }
                }
                for (row, sums) in store.rows.iter_mut().zip(&store.sums) {
                    *row = HeadSums { z: sums.z(), rho: sums.rho, largest: sums.largest };
                }
            }
            (GroupMemory::Moments { .. }, None) => unreachable!("moments are built with their basis"),
        }
    }
}

/// z ← m·z + K
#[inline(always)]
fn update_sums<S: Simd>(simd: S, z: &mut [f32], m: f32, k: &[f32]) {
    let m = simd.splat(m);
    for i in (0..z.len()).step_by(S::LANES) {
        simd.store_at(z, i, simd.fma(simd.load_at(z, i), m, simd.load_at(k, i)));
    }
}

/// Σ_i a_i·b_i with four accumulators.
#[inline(always)]
fn product<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [simd.splat(0.0); 4];
    let mut i = 0;
    while i < a.len() {
        for (lane, sum) in sums.iter_mut().enumerate() {
            let at = i + lane * S::LANES;
            if at < a.len() {
                *sum = simd.fma(simd.load_at(a, at), simd.load_at(b, at), *sum);
            }
        }
        i += 4 * S::LANES;
    }
    simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])))
}
