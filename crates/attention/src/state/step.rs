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

use crate::epilogue::{self, FarSums, Post, Row, join};
use crate::kernels::PAD;
use crate::kernels::basis::{Basis, decay_rows};
use crate::kernels::score_rows::Rescale;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::kernels::state_update::{read_sums, update_and_read, write_and_read};
use crate::layer::{Class, Features, Head, StateGroup};
use crate::parts::bits::{self, Channels};
use crate::parts::rope::rotate;
use crate::real::{dot, larger};
use crate::state::cache::{Query, Sums};
use crate::state::memory::{FarMemory, GroupMemory, HeadSums, State, Store};
use crate::state::pool::PoolScratch;
use crate::state::pool_step::{self, GroupInputs};
use crate::{Error, Extra, Inputs, Kernel, Report, Shape};

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
        for (head, (kernel, far)) in self.kernels.iter_mut().zip(&mut self.far_kernels).enumerate() {
            self.layer.bind(head, inputs, kernel);
            if let Some(far) = far {
                self.layer.bind_far(head, inputs, far);
            }
        }
        self.token.prepare(&self.layer, &shape, inputs, &mut self.steps);
        let mut stores = std::mem::take(&mut self.stores);
        let step = Step { state: self, inputs };
        let bytes: usize = stores.iter().map(Store::bytes_read).sum();
        step.all(0, &mut stores, if bytes > WORTH_THREADS { rayon::current_num_threads() } else { 1 });
        self.stores = stores;
        let report = self.finish(inputs, y);
        self.steps.positions.iter_mut().enumerate().for_each(|(b, position)| *position += inputs.length(b, &shape));
        Ok(report)
    }

    /// Makes scratch for one more token, so that nothing can fail once it enters.
    fn reserve(&mut self, inputs: &Inputs<f32>) -> Result<(), Error> {
        let groups = self.bases.len();
        for (index, store) in self.stores.iter_mut().enumerate() {
            if inputs.length(index / groups, &self.shape) > 0 {
                store.reserve(1)?;
            }
        }
        let classes = self.layer.classes();
        let keys = |index: usize| self.stores.iter().skip(index).step_by(groups).map(Store::receiving).max().unwrap_or(0);
        let scratch = |(index, (group, basis)): (usize, (&StateGroup, &Option<_>))| {
            let far = group.far.as_ref().map_or(0, |far| classes[far.class].width);
            let (width, heads) = (classes[group.class].width, group.heads.len());
            let pool = group.places.map_or(0, |places| {
                let queries = padded(width) * (1 + heads) + padded(self.shape.e) + 2 * heads;
                let own = PoolScratch::len(places, keys(index), self.shape.d, padded(self.shape.e), heads);
                queries + own + pool_step::scratch_len(&self.shape, far, heads, basis.as_deref())
            });
            scratch_len([width, far], self.shape.e, heads, basis.as_deref()).max(pool)
        };
        let most = self.layer.state_plan(self.memory).groups.iter().zip(&self.bases).enumerate().map(scratch).max().unwrap_or(0);
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
                *seen = larger(*seen, largest);
            }
        }
        report
    }
}

impl Store {
    fn bytes_read(&self) -> usize {
        let far = self.far.as_ref().map_or(0, |far| 4 * far.h.len());
        match &self.memory {
            GroupMemory::Moments { h, .. } => 4 * h.len(),
            GroupMemory::Cache(cache) => 4 * cache.len * (cache.d + cache.ep) + far,
            GroupMemory::Pool(pool) => 4 * pool.len() * (pool.d + pool.ep) + far,
        }
    }
}

/// Values of scratch memory that one state group takes.
fn scratch_len(widths: [usize; 2], e: usize, heads: usize, basis: Option<&Basis>) -> usize {
    // One reader more than heads, and what it finds: the key, where there is a write rule.
    let rows = basis.map_or(0, |basis| padded(basis.lower_order_rows()) + padded(basis.rows()) * (2 + heads));
    let keys: usize = widths.map(|width| padded(width) * (2 + heads)).iter().sum();
    rows + keys + padded(e) * (3 + heads) + 3 * heads
}

/// One token of all batch rows; the memories are taken out of the state meanwhile.
struct Step<'a> {
    state: &'a State,
    inputs: &'a Inputs<'a, f32>,
}

impl Step<'_> {
    /// Those from `first` on, halved by bytes for so many threads: neighbours stay with the core whose cache has them from the token before.
    fn all(&self, first: usize, stores: &mut [Store], threads: usize) {
        if stores.len() < 2 || threads < 2 {
            return stores.iter_mut().enumerate().for_each(|(i, store)| self.run(first + i, store));
        }
        let all: usize = stores.iter().map(Store::bytes_read).sum();
        let mut before = 0;
        let half = stores.iter().take_while(|store| {
            before += store.bytes_read();
            2 * before <= all
        });
        let cut = half.count().clamp(1, stores.len() - 1);
        let (left, right) = stores.split_at_mut(cut);
        rayon::join(|| self.all(first, left, threads - threads / 2), || self.all(first + cut, right, threads / 2));
    }

    fn run(&self, index: usize, store: &mut Store) {
        let groups = &self.state.plan().groups;
        let (b, group, basis) = (index / groups.len(), &groups[index % groups.len()], self.state.bases[index % groups.len()].as_deref());
        if self.inputs.length(b, &self.state.shape) > 0 {
            self.state.tasks.with(|scratch| dispatch(GroupStep { step: self, b, group, basis, store, scratch }));
        }
    }

    /// The key of kv head g as a class prepares it, into `to` [width].
    #[inline(always)]
    fn key<S: Simd>(&self, simd: S, b: usize, g: usize, class: usize, to: &mut [f32]) {
        let class = self.state.layer.classes()[class];
        self.features(simd, 1, b, g, class, class.of_keys(self.inputs, self.state.shape.d, g), to);
    }

    /// The query of a head as it meets near or far keys, into `to` [width].
    #[inline(always)]
    fn query<S: Simd>(&self, simd: S, b: usize, h: usize, head: &Head, to: &mut [f32]) {
        let class = self.state.layer.classes()[head.class];
        self.features(simd, 0, b, h, class, class.of_queries(self.inputs, self.state.shape.d, head, h), to);
    }

    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "which row, and how it is prepared")]
    fn features<S: Simd>(&self, simd: S, which: usize, b: usize, head: usize, class: Class, features: Features, to: &mut [f32]) {
        if features.only_scales() {
            self.row(which, b, head, class, &mut to[..features.width]);
            features.scale_row(&mut to[..features.width]);
        } else {
            let mut buffer = [0.0f32; 256];
            let x = &mut buffer[..self.state.shape.d];
            self.row(which, b, head, class, x);
            features.forward(simd, x, &mut to[..features.width]);
        }
    }

    /// Row `head` of tensor `which` in batch row b, prepared up to RoPE, into `to` [dim].
    #[inline(always)]
    fn row(&self, which: usize, b: usize, head: usize, class: Class, to: &mut [f32]) {
        let Shape { heads, kv_heads, d, e, .. } = self.state.shape;
        let (count, dim) = [(heads, d), (kv_heads, d), (kv_heads, e)][which];
        let token = &self.state.token;
        let x = match self.state.layer.norm_source(class).filter(|_| which < 2) {
            Some(source) => &token.normed[which][(source * self.state.shape.batch + b) * count * dim..],
            None if class.conv => &token.filtered[which][b * count * dim..],
            None => self.inputs.x[which].row(b, count * dim),
        };
        let to = &mut to[..dim];
        to.copy_from_slice(&x[head * dim..][..dim]);
        if class.rope && which < 2 {
            let half = self.state.layer.rotary_pairs();
            rotate(to, &token.cos[b * half..][..half], &token.sin[b * half..][..half]);
        }
        let coded = class.bits.filter(|&(_, sinks)| which > 0 && self.state.steps.positions[b] >= sinks);
        // Of keys: there are more query heads than channels have kv heads.
        match (coded, coded.filter(|_| which == 1).and_then(|_| class.channels_of(self.inputs, d, head))) {
            (Some((bits, _)), Some(channels)) => bits::round_key(bits, channels, to),
            (Some((bits, _)), _) => bits::round_value(bits, to),
            _ => {}
        }
    }
}

fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// What a pool reads of one token.
struct TokenInputs<'a> {
    step: &'a Step<'a>,
    b: usize,
    group: &'a StateGroup,
}

impl GroupInputs for TokenInputs<'_> {
    fn kernel(&self, head: usize, far: bool) -> &Kernel {
        let State { kernels, far_kernels, .. } = self.step.state;
        if far { far_kernels[head].as_ref().unwrap_or(&kernels[head]) } else { &kernels[head] }
    }

    fn table(&self, head: usize) -> &[f32] {
        &self.step.state.tables[head]
    }

    fn sink(&self, head: usize) -> Option<f32> {
        let needs = self.step.state.layer.heads()[head].needs(Extra::Sink);
        needs.then(|| self.step.inputs.extra(Extra::Sink)[head])
    }

    fn channels(&self) -> Option<Channels<'_>> {
        self.step.state.layer.classes()[self.group.class].channels_of(self.step.inputs, self.step.state.shape.d, self.group.g)
    }

    #[inline(always)]
    fn far_key<S: Simd>(&self, simd: S, key: &[f32], to: &mut [f32]) {
        let Some(far) = &self.group.far else { return };
        let class = self.step.state.layer.classes()[far.class];
        class.of_keys(self.step.inputs, self.step.state.shape.d, self.group.g).forward(simd, key, to);
    }

    #[inline(always)]
    fn far_query<S: Simd>(&self, simd: S, head: usize, to: &mut [f32]) {
        let layer = &self.step.state.layer;
        let plan = layer.far_plans()[head].as_ref().unwrap_or(&layer.head_plans()[head]);
        self.step.query(simd, self.b, head, plan, to);
    }
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
        let State { layer, kernels, shape, steps, token, .. } = step.state;
        let (Shape { heads: h, e, .. }, heads, log_decay) = (*shape, layer.head_plans(), &steps.log_decay);
        let class = layer.classes()[group.class];
        let (width, t) = (class.width, steps.positions[b]);
        let (dp, ep, first) = (padded(width), padded(e), b * h + group.heads[0]);
        let (key, scratch) = scratch.split_at_mut(dp);
        let (value, scratch) = scratch.split_at_mut(ep);
        let (queries, scratch) = scratch.split_at_mut(dp * group.heads.len());
        let (sums, scratch) = scratch.split_at_mut(group.heads.len());
        let key = &mut key[..width];
        step.key(simd, b, group.g, group.class, key);
        step.row(2, b, group.g, class, value);
        value[e..].fill(0.0);
        for (&head, query) in group.heads.iter().zip(queries.chunks_exact_mut(dp)) {
            step.query(simd, b, head, &heads[head], query);
        }
        let write =
            heads[group.heads[0]].variant.write.map(|rule| (rule, rule.beta(step.inputs.extra(Extra::Beta)[b * shape.kv_heads + group.g])));
        let channels = heads[group.heads[0]].variant.decays_by_channel();
        let norm = dot(key, key).sqrt();
        store.key_norm = larger(store.key_norm, norm);
        match (&mut store.memory, basis) {
            (GroupMemory::Moments { h: state, z }, Some(basis)) => {
                // Gates and weights are the same for all heads of the group, or it has one head.
                value[..e].iter_mut().for_each(|v| *v *= token.key_weights[first]);
                let m = if heads[group.heads[0]].variant.decays_by_head() { token.decay[first] } else { 1.0 };
                if channels {
                    decay_rows(basis, &token.decay[first * width..][..width], state, z, scratch);
                }
                let (beta, entering) = (write.map(|(_, beta)| beta), Some((&*key, 1.0)));
                let (queries, u) = (&*queries, &mut store.u[..]);
                simd.call(MomentsStep {
                    step,
                    group,
                    far: false,
                    basis,
                    m,
                    beta,
                    queries,
                    stride: dp,
                    entering,
                    value,
                    h: state,
                    z,
                    u,
                    sums,
                    scratch,
                });
                for ((query, row), &z) in queries.chunks_exact(dp).zip(&mut store.rows).zip(&*sums) {
                    let largest = dot(&query[..width], &query[..width]).sqrt() * store.key_norm;
                    *row = HeadSums { z, rho: 0.0, largest };
                }
            }
            (GroupMemory::Cache(cache), _) => {
                let distance = heads[group.heads[0]].variant.distance();
                let mut far_queries = &mut [][..];
                let far_width = group.far.as_ref().map_or(0, |far| layer.classes()[far.class].width);
                if let (Some(kind), Some(far)) = (&group.far, &mut store.far) {
                    let stride = padded(far_width);
                    let (left, scratch) = scratch.split_at_mut(ep);
                    let (far_key, scratch) = scratch.split_at_mut(stride);
                    let (own_queries, scratch) = scratch.split_at_mut(stride * group.heads.len());
                    // The key that leaves the window at this position, unless it is a sink.
                    let leaving = t.checked_sub(distance.window).filter(|&at| at >= distance.sinks);
                    if let Some(at) = leaving {
                        cache.far_key(at, &mut far_key[..far_width]);
                        left.copy_from_slice(cache.value(cache.place(at)));
                    }
                    for (&head, query) in group.heads.iter().zip(own_queries.chunks_exact_mut(stride)) {
                        let plan = layer.far_plans()[head].as_ref().unwrap_or(&heads[head]);
                        step.query(simd, b, head, plan, query);
                    }
                    if let Some(basis) = basis {
                        let column = &cache.columns[0];
                        let place = leaving.map_or(0, |at| cache.place(at));
                        let weight = column.weights.get(place).copied().unwrap_or(1.0);
                        let decay = column.decay.get(place).map_or(1.0, |c| (log_decay[first] - c).exp() as f32);
                        left[..e].iter_mut().for_each(|v| *v *= weight);
                        let m = if heads[group.heads[0]].variant.decays_by_head() { token.decay[first] } else { 1.0 };
                        let entering = leaving.map(|_| (&far_key[..far_width], decay));
                        let FarMemory { h, z, u } = far;
                        simd.call(MomentsStep {
                            step,
                            group,
                            far: true,
                            basis,
                            m,
                            beta: None,
                            queries: own_queries,
                            stride,
                            entering,
                            value: left,
                            h,
                            z,
                            u,
                            sums: &mut *sums,
                            scratch,
                        });
                        store.sums.iter_mut().zip(&*sums).for_each(|(sums, &z)| sums.far_z = z);
                    }
                    step.key(simd, b, group.g, kind.class, far_key);
                    far_queries = own_queries;
                    cache.forget(t);
                    cache.push(key, if cache.far_row > 0 { &far_key[..far_width] } else { &[] }, &value[..e]);
                } else {
                    cache.forget(t);
                    if channels {
                        // A decay by channel is in the keys: they are kept as the next query meets them.
                        cache.decay_keys(&token.decay[first * width..][..width]);
                    }
                    if let Some((rule, beta)) = write {
                        let (reader, answer) = scratch.split_at_mut(dp);
                        let answer = &mut answer[..ep];
                        answer.fill(0.0);
                        reader.iter_mut().zip(&*key).for_each(|(q, k)| *q = rule.scale as f32 * k);
                        let (first, mut sums) = (group.heads[0], Sums::new(Rescale::None, None));
                        for block in 0..cache.blocks() {
                            let mut query = Query {
                                q: &reader[..width],
                                distance,
                                far: false,
                                kernel: &kernels[first],
                                cap: heads[first].cap,
                                clamp: heads[first].clamp,
                                rescale: Rescale::None,
                                log_decay: if channels { 0.0 } else { log_decay[b * h + first] },
                                u: &mut *answer,
                                sums: &mut sums,
                            };
                            cache.decode(simd, block, 0, &mut query);
                        }
                        value.iter_mut().zip(&*answer).for_each(|(v, answer)| *v = beta * (*v - answer));
                    }
                    cache.push(key, &[], &value[..e]);
                }
                for (&head, column) in group.heads.iter().zip(&mut cache.columns) {
                    let head_plan = &heads[head];
                    if head_plan.weighs_keys {
                        column.weights.push(token.key_weights[b * h + head]);
                    }
                    if head_plan.variant.decays_by_head() {
                        column.decay.push(log_decay[b * h + head]);
                    }
                }
                store.u.fill(0.0);
                let sink_of = |head: usize| heads[head].variant.needs(Extra::Sink).then(|| step.inputs.extra(Extra::Sink)[head]);
                for (i, &head) in group.heads.iter().enumerate() {
                    store.sums[i] = Sums { far_z: store.sums[i].far_z, ..Sums::new(heads[head].rescale, sink_of(head)) };
                }
                for block in 0..cache.blocks() {
                    for (i, &head) in group.heads.iter().enumerate() {
                        let plan = &heads[head];
                        let mut query = Query {
                            q: &queries[i * dp..][..width],
                            distance: plan.variant.distance(),
                            far: false,
                            kernel: &kernels[head],
                            cap: plan.cap,
                            clamp: plan.clamp,
                            rescale: plan.rescale,
                            log_decay: if channels { 0.0 } else { log_decay[b * h + head] },
                            u: &mut store.u[i * ep..][..ep],
                            sums: &mut store.sums[i],
                        };
                        cache.decode(simd, block, i, &mut query);
                    }
                }
                for (row, sums) in store.rows.iter_mut().zip(&store.sums) {
                    *row = HeadSums { z: sums.z(), rho: sums.rho, largest: sums.largest };
                }
                for (i, &head) in group.heads.iter().enumerate() {
                    let (Some(far), Some(plan)) = (&mut store.far, &layer.far_plans()[head]) else { continue };
                    let distance = plan.variant.distance();
                    if distance.far(t).is_empty() {
                        continue;
                    }
                    let u = &mut far.u[i * ep..][..ep];
                    let mut z = store.sums[i].far_z;
                    let mut log = 0.0;
                    if !cache.far_in_state {
                        u.fill(0.0);
                        let mut sums = Sums::new(plan.rescale, None);
                        for block in 0..cache.blocks() {
                            let mut query = Query {
                                q: &far_queries[i * padded(far_width)..][..far_width],
                                distance,
                                far: true,
                                kernel: step.state.far_kernels[head].as_ref().unwrap_or(&plan.kernel),
                                cap: plan.cap,
                                clamp: plan.clamp,
                                rescale: plan.rescale,
                                log_decay: log_decay[b * h + head],
                                u,
                                sums: &mut sums,
                            };
                            cache.decode(simd, block, i, &mut query);
                        }
                        z = sums.z();
                        log = sums.rho;
                    }
                    let (row, own) = (&mut store.rows[i], &mut store.u[i * ep..][..ep]);
                    let sink = sink_of(head).filter(|_| heads[head].rescale != Rescale::SubtractMax);
                    row.rho = join(&plan.variant, own, &mut row.z, row.rho, Some(FarSums { u, z, log }), sink);
                }
            }
            (GroupMemory::Pool(_), _) => {
                let inputs = TokenInputs { step, b, group };
                pool_step::step(simd, layer, group, basis, &inputs, (key, value), (queries, dp), store, scratch);
            }
            (GroupMemory::Moments { .. }, None) => unreachable!("moments are built with their basis"),
        }
    }
}

/// One token of the moments of one state group: U [heads, ep] and z of every head, from the state that a key enters, if one does. Compiled once for all
/// who call it.
struct MomentsStep<'a> {
    step: &'a Step<'a>,
    group: &'a StateGroup,
    far: bool,
    basis: &'a Basis,
    /// m_t
    m: f32,
    /// β_t of a write rule.
    beta: Option<f32>,
    /// Prepared queries, so far apart.
    queries: &'a [f32],
    stride: usize,
    /// The key that enters, decayed by so much since its position.
    entering: Option<(&'a [f32], f32)>,
    /// Its value, weighted; becomes what is written where there is a write rule.
    value: &'a mut [f32],
    h: &'a mut [f32],
    z: &'a mut [f32],
    u: &'a mut [f32],
    /// z of every head.
    sums: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl Task for MomentsStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let MomentsStep { step, group, far, basis, m, beta, queries, stride, entering, value, h, z, u, sums, scratch } = self;
        let State { layer, kernels, far_kernels, tables, key_tables, .. } = step.state;
        let kernel = |head: usize| if far { far_kernels[head].as_ref().unwrap_or(&kernels[head]) } else { &kernels[head] };
        let learns = |head: usize| layer.far_plans()[head].as_ref().filter(|_| far).unwrap_or(&layer.head_plans()[head]).learned > 0;
        // a_n, which tables leave out where it is learned.
        let coefficient = |head: usize, order: usize| if learns(head) { kernel(head).coefficient(order) as f32 } else { 1.0 };
        let (n, width, ep, heads) = (basis.rows(), basis.d(), value.len(), group.heads.len());
        let (lower_orders, scratch) = scratch.split_at_mut(padded(basis.lower_order_rows()));
        let (k, scratch) = scratch.split_at_mut(padded(n));
        let (q, found) = scratch.split_at_mut(padded(n) * (1 + heads));
        match entering {
            Some((key, decay)) => {
                basis.scaled_of_one(simd, key, (&[], |_| 1.0), lower_orders, k);
                k[n..].fill(0.0);
                if decay != 1.0 {
                    k.iter_mut().for_each(|k| *k *= decay);
                }
            }
            None => k.fill(0.0),
        }
        for ((&head, query), q) in group.heads.iter().zip(queries.chunks_exact(stride)).zip(q.chunks_exact_mut(padded(n))) {
            basis.scaled_of_one(simd, &query[..width], (&tables[head], |order| coefficient(head, order)), lower_orders, q);
            q[n..].fill(0.0);
        }
        u.fill(0.0);
        match beta {
            None => update_and_read(simd, h, ep, m, k, value, &q[..heads * padded(n)], u),
            Some(beta) => {
                let (first, reader) = (group.heads[0], &mut q[heads * padded(n)..]);
                for (i, &order) in basis.orders().iter().enumerate() {
                    let (a, range) = (coefficient(first, order), basis.order_range(i));
                    let table = key_tables[first][range.clone()].iter();
                    reader[range.clone()].iter_mut().zip(&k[range]).zip(table).for_each(|((q, k), c)| *q = k * c * a);
                }
                reader[n..].fill(0.0);
                let found = &mut found[..ep * (1 + heads)];
                found.fill(0.0);
                write_and_read(simd, h, ep, m, k, (value, beta), q, found);
                u.copy_from_slice(&found[..ep * heads]);
            }
        }
        for ((i, &head), query) in group.heads.iter().enumerate().zip(queries.chunks_exact(stride)) {
            let own = entering.map_or(0.0, |(key, decay)| decay * kernel(head).value(dot(&query[..width], &key[..width])));
            let (q, last) = (&q[i * padded(n)..][..n], i + 1 == heads);
            let before = if last { read_sums::<S, true>(simd, q, z, m, k) } else { read_sums::<S, false>(simd, q, z, m, k) };
            for (u, &v) in u[i * ep..][..ep].iter_mut().zip(&*value) {
                *u = m * *u + own * v;
            }
            sums[i] = m * before + own;
        }
    }
}
