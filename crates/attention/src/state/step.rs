//! One token, in one sweep over the state: each row is read once, used, decayed, updated and stored
//!
//! ```text
//! U_t = m_t·Q_tᵀ·H_{t−1} + w(x_tt)·v'_t      z_t = m_t·Q_tᵀ·z_{t−1} + w(x_tt)      v' = I·κ·v
//! H_t = m_t·H_{t−1} + K_t·v'_tᵀ
//! ```
//!
//! The token's own weight is computed from its score: the sum over monomials rounds at the size of (Σ_i |q_i·k_i|)^n however small
//! (q·k)^n is, and at the first positions there is nothing else beside it.

use std::cell::RefCell;

use rayon::prelude::*;

use crate::epilogue::{self, Row};
use crate::kernels::PAD;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::kernels::state_update::sweep;
use crate::parts::kernel::feature::Map;
use crate::parts::rope::rotate;
use crate::real::dot;
use crate::state::cache::{Query, Sums};
use crate::state::memory::{Kind, State, Store, Unit, UnitMemory};
use crate::state::token::Token;
use crate::tensors::check_length;
use crate::{Buffer, Error, Extra, Inputs, Kernel, Nonpositive, Report, Shape, Variant};

/// Less memory than this is swept by one thread: waking others takes as long.
const WORTH_THREADS: usize = 512 << 10;

impl State {
    /// Takes one token of every batch row in: y [B, 1, H, e] from inputs whose time is one. Where lengths are given, rows of length
    /// 0 stand still: their inputs are not read, their outputs are zero.
    ///
    /// float32; allocates nothing unless a cache grows; bit-identical for any number of threads. The report names the first
    /// denominator that is not a positive number, by its position since the state was empty.
    pub fn step(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        let shape = self.shape;
        let all = Inputs { extras: inputs.extras.clone(), lengths: None, ..*inputs };
        all.check(&self.heads, &shape)?;
        if let Some(lengths) = inputs.lengths {
            check_length(format_args!("lengths"), shape.batch, lengths.len())?;
            if let Some((row, length)) = lengths.iter().enumerate().find(|(_, length)| **length > 1) {
                return Err(Error::Shape(format!("batch row {row} has length {length}: a step takes one token of a row, or none")));
            }
        }
        check_length(format_args!("y"), shape.batch * shape.heads * shape.e, y.len())?;
        self.prepare(inputs);
        let State { heads, kernels, units, tables, stores, carry, token, .. } = self;
        let bytes: usize = stores.iter().map(Store::swept_bytes).sum();
        let context = Context { heads, kernels, units, tables, shape: &shape, inputs, token, log_decay: &carry.log_decay };
        if stores.len() > 1 && bytes > WORTH_THREADS {
            stores.par_iter_mut().enumerate().with_max_len(1).for_each(|(index, store)| context.run(index, store));
        } else {
            stores.iter_mut().enumerate().for_each(|(index, store)| context.run(index, store));
        }
        let report = self.finish(inputs, y);
        self.carry.positions.iter_mut().enumerate().for_each(|(b, position)| *position += inputs.length(b, &shape));
        Ok(report)
    }

    /// y from U, z and ρ of every head.
    fn finish(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Report {
        let Shape { batch, heads: h, e, .. } = self.shape;
        let ep = e.next_multiple_of(PAD);
        let mut report = Report::default();
        for b in 0..batch {
            if inputs.length(b, &self.shape) == 0 {
                y[b * h * e..(b + 1) * h * e].fill(0.0);
                continue;
            }
            let position = self.carry.positions[b];
            for (head, variant) in self.heads.iter().enumerate() {
                let at = b * h + head;
                let (unit, place) = self.unit_of[head];
                let store = &self.stores[b * self.units.len() + unit];
                let UnitRow { z, rho, largest } = store.rows[place];
                let parameter = |extra| if variant.needs(extra) { inputs.extra(extra) } else { &[] };
                let row = Row {
                    z,
                    count: (position + 1) as f32,
                    rho,
                    out: self.token.out[at],
                    post: self.token.post[at],
                    weight: parameter(Extra::NormWeight),
                    bias: parameter(Extra::NormBias),
                };
                let denominator = epilogue::forward(variant, row, &store.u[place * ep..][..e], &mut y[at * e..][..e]);
                let sound = denominator > 0.0 && denominator < f32::INFINITY;
                if variant.denominator.sums() && !sound && report.nonpositive.is_none() {
                    let value = denominator as f64 * (rho as f64).exp();
                    report.nonpositive = Some(Nonpositive { row: b, head, position, value });
                }
                let seen = &mut self.carry.scores[at];
                // A score that is not a number has no bound.
                *seen = if largest <= *seen { *seen } else { largest };
            }
        }
        report
    }
}

/// What a unit gives for one of its heads besides U.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnitRow {
    pub z: f32,
    pub rho: f32,
    /// Bound of |x| at this token.
    pub largest: f32,
}

impl Store {
    fn swept_bytes(&self) -> usize {
        match &self.memory {
            UnitMemory::Moments { h, .. } => 4 * h.len(),
            UnitMemory::Cache(cache) => 4 * cache.len * (cache.d + cache.ep),
        }
    }
}

struct Context<'a> {
    heads: &'a [Variant],
    kernels: &'a [Kernel],
    units: &'a [Unit],
    tables: &'a [Table],
    shape: &'a Shape,
    inputs: &'a Inputs<'a, f32>,
    token: &'a Token,
    log_decay: &'a [f64],
}

/// scale^n/α! of each row of a head's basis, times a_n where that is not learned; empty for caches.
pub(crate) type Table = std::sync::Arc<Vec<f32>>;

thread_local! {
    static ROOM: RefCell<Buffer> = RefCell::default();
}

impl Context<'_> {
    fn run(&self, index: usize, store: &mut Store) {
        let (b, unit) = (index / self.units.len(), &self.units[index % self.units.len()]);
        if self.inputs.length(b, self.shape) == 0 {
            return;
        }
        let rows = unit.basis().map_or(0, |basis| basis.stem_rows().next_multiple_of(PAD) + padded(basis.rows()) * (1 + unit.heads.len()));
        let sides = padded(self.shape.d) * (1 + unit.heads.len()) + padded(self.shape.e);
        ROOM.with_borrow_mut(|room| {
            room.ensure(rows + sides);
            dispatch(UnitStep { context: self, b, unit, store, room: room.as_mut_slice() });
        });
    }

    /// Row `head` of tensor `which` in batch row b, prepared up to φ, into `to` [dim].
    #[inline(always)]
    fn side<S: Simd>(&self, simd: S, which: usize, b: usize, head: usize, unit: &Unit, to: &mut [f32]) {
        let Shape { heads, kv_heads, d, e, .. } = *self.shape;
        let (count, dim) = [(heads, d), (kv_heads, d), (kv_heads, e)][which];
        let raw = [self.inputs.q, self.inputs.k, self.inputs.v][which];
        let x = if unit.conv { &self.token.filtered[which] } else { raw };
        let to = &mut to[..dim];
        to.copy_from_slice(&x[(b * count + head) * dim..][..dim]);
        if which == 2 {
            return;
        }
        if unit.rope {
            let half = d / 2;
            rotate(to, &self.token.cos[b * half..][..half], &self.token.sin[b * half..][..half]);
        }
        if unit.map != Map::Identity {
            unit.map.forward_simd(simd, to);
        }
    }
}

fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// One unit of one batch row.
struct UnitStep<'a> {
    context: &'a Context<'a>,
    b: usize,
    unit: &'a Unit,
    store: &'a mut Store,
    room: &'a mut [f32],
}

impl Task for UnitStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let UnitStep { context, b, unit, store, room } = self;
        let Shape { heads: h, d, e, .. } = *context.shape;
        let (dp, ep) = (padded(d), padded(e));
        let (key, room) = room.split_at_mut(dp);
        let (value, room) = room.split_at_mut(ep);
        let (queries, room) = room.split_at_mut(dp * unit.heads.len());
        let key = &mut key[..d];
        context.side(simd, 1, b, unit.kv_head, unit, key);
        context.side(simd, 2, b, unit.kv_head, unit, value);
        value[e..].fill(0.0);
        for (&head, query) in unit.heads.iter().zip(queries.chunks_exact_mut(dp)) {
            context.side(simd, 0, b, head, unit, query);
        }
        let norm = dot(key, key).sqrt();
        store.key_norm = if norm <= store.key_norm { store.key_norm } else { norm };
        match (&mut store.memory, &unit.kind) {
            (UnitMemory::Moments { h: state, z }, Kind::Moments { basis, .. }) => {
                let first = b * h + unit.heads[0];
                // Gates and weights are the same for all heads of the unit, or it has one head.
                let (weight, m) = (context.token.key_weights[first], context.token.decay[first]);
                value[..e].iter_mut().for_each(|v| *v *= weight);
                let n = basis.rows();
                let (stem, room) = room.split_at_mut(padded(basis.stem_rows()));
                let (k, q) = room.split_at_mut(padded(n));
                basis.of_one(key, stem, k);
                k[n..].fill(0.0);
                for ((&head, query), q) in unit.heads.iter().zip(queries.chunks_exact(dp)).zip(q.chunks_exact_mut(padded(n))) {
                    basis.of_one(&query[..d], stem, q);
                    q[n..].fill(0.0);
                    let learned = context.heads[head].learned() > 0;
                    for (i, &order) in basis.orders().iter().enumerate() {
                        let a = if learned { context.kernels[head].coefficient(order) as f32 } else { 1.0 };
                        let span = basis.span(i);
                        for (q, &c) in q[span.clone()].iter_mut().zip(&context.tables[head][span]) {
                            *q *= c * a;
                        }
                    }
                }
                store.u.fill(0.0);
                sweep(simd, state, ep, m, k, value, q, &mut store.u);
                for ((i, &head), query) in unit.heads.iter().enumerate().zip(queries.chunks_exact(dp)) {
                    let query = &query[..d];
                    let scale = context.heads[head].scale_for(d) as f32;
                    let largest = scale.abs() * dot(query, query).sqrt() * store.key_norm;
                    let own = context.kernels[head].value(scale * dot(query, key));
                    let before = if z.is_empty() { 0.0 } else { product(simd, &q[i * padded(n)..][..n], z) };
                    for (u, &v) in store.u[i * ep..][..ep].iter_mut().zip(&*value) {
                        *u = m * *u + own * v;
                    }
                    store.rows[i] = UnitRow { z: m * before + own, rho: 0.0, largest };
                }
                update_sums(simd, z, m, &k[..n]);
            }
            (UnitMemory::Cache(cache), _) => {
                cache.push(key, &value[..e]);
                for (&head, column) in unit.heads.iter().zip(&mut cache.columns) {
                    let variant = &context.heads[head];
                    if variant.in_gate.is_some() || variant.denominator.key_side() {
                        column.weights.push(context.token.key_weights[b * h + head]);
                    }
                    if variant.decay.is_some() {
                        column.decay.push(context.log_decay[b * h + head]);
                    }
                }
                for (&head, query) in unit.heads.iter().zip(queries.chunks_exact_mut(dp)) {
                    let scale = context.heads[head].scale_for(d) as f32;
                    query[..d].iter_mut().for_each(|q| *q *= scale);
                }
                store.u.fill(0.0);
                for (i, &head) in unit.heads.iter().enumerate() {
                    store.sums[i] = Sums::new(context.heads[head].rescale());
                }
                for block in 0..cache.blocks() {
                    for (i, &head) in unit.heads.iter().enumerate() {
                        let variant = &context.heads[head];
                        let mut query = Query {
                            q: &queries[i * dp..][..d],
                            kernel: &context.kernels[head],
                            clamp: variant.clamp.map_or(f32::INFINITY, |c| c as f32),
                            frame: variant.rescale(),
                            log_decay: context.log_decay[b * h + head],
                            u: &mut store.u[i * ep..][..ep],
                            sums: &mut store.sums[i],
                        };
                        cache.decode(simd, block, i, &mut query);
                    }
                }
                for (row, sums) in store.rows.iter_mut().zip(&store.sums) {
                    *row = UnitRow { z: sums.z(), rho: sums.rho, largest: sums.largest };
                }
            }
            (UnitMemory::Moments { .. }, Kind::Cache) => unreachable!("stores are built after their units"),
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
