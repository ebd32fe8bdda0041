//! Heads that walk, backward, for the keys that tiles do not reach: chosen ones, and those that are lost, one at a position at most.
//!
//! ```text
//! forward in time    H, Z = Σ_{s lost} k'^α·(v_s, 1),  μ;   G_α = f·(H_α·dU + Z_α·dz),   f = e^{ℓ−ρ}
//!                    P = Σ_α b_{|α|}/α!·q'^α·G_α = dℓ,   dq' = ∂P/∂q' + dc'·μ',   dc' = ∂P/∂c',   da = ∂P/∂a
//! backward in time   D_α = Σ_{t' ≥ t} b_{|α|}/α!·q'^α·f·(dU, dz),   M = Σ_{t' ≥ t} dμ/n,   of the key that was lost at t:
//!                    dv = Σ_α k'^α·D_α,   dk' = ∂/∂k' Σ_α k'^α·D_α·(v, 1),   dk = M
//! ```
//!
//! Which keys are chosen, and the codes that keys become, are constants. Which key was lost at a position is what the pools say that take the text in once
//! more. Memory is an index per position and four numbers per query.

use rayon::prelude::*;

use crate::buffer::resize;
use crate::fused::gradients::{Gradients, KeyGrads, QueryGrads};
use crate::fused::plan::{Head, Layout};
use crate::fused::prepare::Sources;
use crate::fused::scratch::{CallScratch, FarRow, WalkGrads};
use crate::fused::tile_backward::Context;
use crate::fused::walk::{self, WalkInputs, walks};
use crate::kernels::basis::Basis;
use crate::kernels::disjoint::Blocks;
use crate::kernels::score_rows::{BackwardRow, Visible, soft_cap, soft_cap_slopes};
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::kernels::{PAD, TILE};
use crate::layer::StateGroup;
use crate::parts::centre::{bounded_gauss, bounded_gauss_slope};
use crate::real::dot;
use crate::state::State;
use crate::state::memory::{GroupMemory, Store};
use crate::state::pool::PoolScratch;
use crate::state::pool_step::{GroupInputs, attend};
use crate::{Error, Extra, Grads, Inputs};

/// No key was lost.
const NONE: u32 = u32::MAX;

/// Adds the gradients of Σ and γ, batch row by batch row.
pub fn add_spread(l: &Layout, walk: &WalkGrads, grads: &mut Grads<f32>) {
    let (s, square) = (l.shape, l.shape.d * l.shape.d);
    for (pair, from) in walk.spread.chunks_exact(square + s.group()).enumerate() {
        let g = pair % s.kv_heads;
        let (dspread, dgamma) = from.split_at(square);
        if (g * s.group()..(g + 1) * s.group()).any(|h| has_whole_gauss(l, h)) {
            add_scaled(&mut grads.extra(Extra::FarSpread)[g * square..][..square], 1.0, dspread);
            add_scaled(&mut grads.extra(Extra::FarGamma)[g * s.group()..][..s.group()], 1.0, dgamma);
        }
    }
}

fn has_whole_gauss(l: &Layout, h: usize) -> bool {
    l.far[h].as_ref().is_some_and(|far| far.gauss && l.classes[far.class].whole)
}

fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

/// Makes room; gives the values of scratch memory that a task takes.
pub fn ensure(l: &Layout, state: &mut State, walk: &mut WalkGrads) -> Result<usize, Error> {
    let (s, groups) = (l.shape, state.bases.len());
    state.clear();
    resize(&mut walk.lost, s.batch * groups * s.time)?;
    resize(&mut walk.rows, l.head_count() * s.time)?;
    let gauss = (0..s.heads).any(|h| has_whole_gauss(l, h)) as usize;
    walk.spread.ensure(gauss * s.batch * s.kv_heads * (s.d * s.d + s.group()))?;
    walk.spread.fill(0.0);
    let plan = l.layer.state_plan(state.memory);
    for (index, store) in state.stores.iter_mut().enumerate() {
        if chooses(l, &plan.groups[index % groups]) {
            store.reserve(s.time)?;
        }
    }
    let moments = state.bases.iter().flatten().map(|basis| basis.rows() * (l.ep + 3) + 2 * basis.lower_order_rows()).max().unwrap_or(0);
    let replay = plan.groups.iter().filter(|group| walks(l, group)).map(|group| walk::len(l, group, None)).max().unwrap_or(0);
    Ok(moments.max(replay))
}

fn chooses(l: &Layout, group: &StateGroup) -> bool {
    l.heads[group.heads[0]].variant.chosen.is_some()
}

/// Adds the gradients of chosen and of far keys, and of the queries that meet them.
pub fn run(c: &Context, inputs: &Inputs<f32>, w: &CallScratch, state: &mut State, walk: &mut WalkGrads, to: &mut Gradients) {
    let (l, s) = (c.layout, c.layout.shape);
    let (groups, plan) = (state.bases.len(), l.layer.state_plan(state.memory));
    let sources = &Sources::new(l, inputs, w);
    let tables = &state.tables;
    walk.lost.par_chunks_exact_mut(s.time).zip(&mut state.stores).enumerate().with_max_len(1).for_each(|(index, (lost, store))| {
        let (b, group) = (index / groups, &plan.groups[index % groups]);
        let (distance, len) = (group.distance, inputs.length(b, &s));
        if chooses(l, group) {
            let of = WalkInputs { l, inputs, sources, tables, group, b, g: group.g, t: 0 };
            w.tasks.with(|scratch| dispatch(Replay { c, of, store, lost: &mut lost[..len], scratch }));
        } else if walks(l, group) {
            lost.iter_mut().enumerate().for_each(|(t, lost)| {
                *lost = t.checked_sub(distance.window).filter(|&at| at >= distance.sinks).map_or(NONE, |at| at as u32);
            });
        }
    });
    let (lost, bases) = (&walk.lost, &state.bases);
    let rows = walk.rows.par_chunks_exact_mut(s.group() * s.time);
    let spread = Blocks::pieces(&mut walk.spread, s.batch * s.kv_heads).par();
    let places = to.places(l, &l.whole, 0).zip(rows).zip(spread);
    places.enumerate().with_max_len(1).for_each(|(pair, (((mut to_queries, mut to_keys), rows), mut spread))| {
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        for (index, group) in plan.groups.iter().enumerate().filter(|(_, group)| group.g == g && walks(l, group)) {
            let (basis, lost) = (bases[index].as_deref(), &lost[(b * groups + index) * s.time..][..inputs.length(b, &s)]);
            let (spread, to) = (spread.piece(), (&mut to_queries, &mut to_keys));
            w.tasks.with(|scratch| dispatch(WalkBackward { c, inputs, b, group, basis, lost, rows, spread, to, scratch }));
        }
    });
}

/// Takes the text in once more, for what is lost.
struct Replay<'a> {
    c: &'a Context<'a>,
    of: WalkInputs<'a>,
    store: &'a mut Store,
    lost: &'a mut [u32],
    scratch: &'a mut [f32],
}

impl Task for Replay<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Replay { c, mut of, store, lost, scratch } = self;
        let WalkInputs { l, group, b, g, .. } = of;
        let GroupMemory::Pool(pool) = &mut store.memory else { return };
        let (s, kv, dp) = (l.shape, l.kv_index(group.class, b, g), l.dp);
        let (distance, first) = (pool.places.distance, pool.places.distance.sinks + pool.places.distance.window);
        let (queries, scratch) = scratch.split_at_mut(s.d.next_multiple_of(PAD) * group.heads.len());
        let (mut pool_scratch, scratch) = PoolScratch::of(pool, group.heads.len(), scratch);
        let (key_out, value_out) = scratch.split_at_mut(s.d);
        // The position of each chosen key.
        let mut chosen = Vec::with_capacity(pool.places.count() - first);
        for (t, lost) in lost.iter_mut().enumerate() {
            of.t = t;
            for (&h, to) in group.heads.iter().zip(queries.chunks_exact_mut(s.d)) {
                to.copy_from_slice(&c.q[((b * s.heads + h) * l.tp() + t) * dp..][..s.d]);
            }
            let (key, value) = (&c.k[(kv * l.tp() + t) * dp..][..s.d], &c.v[(kv * l.tp() + t) * l.ep..][..l.ep]);
            let place = pool.advance(key, value, of.channels(), key_out, &mut value_out[..l.ep]);
            *lost = NONE;
            if let Some(leaving) = t.checked_sub(distance.window).filter(|&at| at >= distance.sinks).map(|at| at as u32) {
                match place {
                    None => chosen.push(leaving),
                    Some(place) if place < first => *lost = leaving,
                    Some(place) => *lost = std::mem::replace(&mut chosen[place - first], leaving),
                }
            }
            attend(simd, &l.layer, group, &of, (queries, s.d), pool, (&mut store.u, &mut store.sums), &mut pool_scratch);
        }
    }
}

/// All positions of one state group of one batch row.
struct WalkBackward<'a, 'b> {
    c: &'a Context<'a>,
    inputs: &'a Inputs<'a, f32>,
    b: usize,
    group: &'a StateGroup,
    basis: Option<&'a Basis>,
    lost: &'a [u32],
    /// Of all heads of the kv head.
    rows: &'a mut [FarRow],
    spread: &'a mut [f32],
    to: (&'a mut QueryGrads<'b>, &'a mut KeyGrads<'b>),
    scratch: &'a mut [f32],
}

impl Task for WalkBackward<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        if chooses(self.c.layout, self.group) {
            self.chosen(simd);
        }
        if self.group.far.is_some() {
            simd.call(Far(self));
        }
    }
}

impl WalkBackward<'_, '_> {
    /// The pairs of queries and chosen keys.
    #[inline(always)]
    fn chosen<S: Simd>(&mut self, simd: S) {
        let (c, l, b, class) = (self.c, self.c.layout, self.b, self.group.class);
        let (s, distance, kv) = (l.shape, self.group.distance, l.kv_index(class, b, self.group.g));
        let (to_queries, to_keys) = &mut self.to;
        let (mut x, mut dp, mut slopes) = ([0.0f32; TILE], [0.0f32; TILE], [0.0f32; TILE]);
        let mut kept: Vec<u32> = Vec::with_capacity(l.heads[self.group.heads[0]].variant.chosen.map_or(0, |chosen| chosen.keys + 1));
        for (t, &lost) in self.lost.iter().enumerate() {
            kept.extend(t.checked_sub(distance.window).filter(|&at| at >= distance.sinks).map(|at| at as u32));
            if let Some(place) = kept.iter().position(|&at| at == lost) {
                kept.swap_remove(place);
            }
            for &h in &self.group.heads {
                let (head, n) = (&l.heads[h], b * s.heads + h);
                let (q, du) = (&c.q[(n * l.tp() + t) * l.dp..][..s.d], &c.du[(n * s.time + t) * l.ep..][..l.ep]);
                let dq = &mut to_queries.dq[0].row(h % s.group(), t)[..s.d];
                for keys in kept.chunks(TILE) {
                    let count = keys.len().next_multiple_of(PAD);
                    let (x, dp) = (&mut x[..count], &mut dp[..count]);
                    for ((x, dp), &at) in x.iter_mut().zip(&mut *dp).zip(keys) {
                        let row = kv * l.tp() + at as usize;
                        (*x, *dp) = (dot(q, &c.k[row * l.dp..][..s.d]), dot(du, &c.v[row * l.ep..][..l.ep]));
                    }
                    if let Some(cap) = head.cap {
                        soft_cap(simd, x, cap);
                        soft_cap_slopes(simd, x, cap, &mut slopes[..count]);
                    }
                    let (visible, rho, dz) = (Visible::first(keys.len()), head.rescale.of(c.rho[n * s.time + t]), c.dz[n * s.time + t]);
                    let row = BackwardRow { x: &mut *x, dp: &mut *dp, visible, clamp: head.clamp, decay: None, rho, dz, key_weights: None };
                    head.kernel.backward_row(simd, row);
                    if head.cap.is_some() {
                        dp.iter_mut().zip(&slopes).for_each(|(dx, slope)| *dx *= slope);
                    }
                    for ((&weight, &dx), &at) in x.iter().zip(&*dp).zip(keys) {
                        let at = at as usize;
                        add_scaled(dq, dx, &c.k[(kv * l.tp() + at) * l.dp..][..s.d]);
                        add_scaled(&mut to_keys.dk.row(class, at)[..s.d], dx, q);
                        add_scaled(to_keys.dv.row(class, at), weight, du);
                    }
                }
            }
        }
    }
}

/// The far keys of a group.
struct Far<'a, 'b>(WalkBackward<'a, 'b>);

/// Room for the moments of a group: H or D [N, ep], Z [N], monomials of a row, numbers for each, lower orders of the row and their gradients.
struct Room<'a> {
    h: &'a mut [f32],
    z: &'a mut [f32],
    monomials: &'a mut [f32],
    numbers: &'a mut [f32],
    lower_orders: &'a mut [f32],
    dlower_orders: &'a mut [f32],
}

impl Task for Far<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (l, Some(basis)) = (self.0.c.layout, self.0.basis) else { return };
        let (n, lower) = (basis.rows(), basis.lower_order_rows());
        let (h, rest) = std::mem::take(&mut self.0.scratch).split_at_mut(n * l.ep);
        let (z, rest) = rest.split_at_mut(n);
        let (monomials, rest) = rest.split_at_mut(n);
        let (numbers, rest) = rest.split_at_mut(n);
        let (lower_orders, rest) = rest.split_at_mut(lower);
        let mut room = Room { h, z, monomials, numbers, lower_orders, dlower_orders: &mut rest[..lower] };
        self.queries(simd, basis, &mut room);
        self.keys(basis, &mut room);
    }
}

impl Room<'_> {
    /// The monomials of a row.
    #[inline(always)]
    fn take(&mut self, basis: &Basis, x: &[f32]) {
        basis.of_one(x, self.lower_orders, self.monomials);
        if basis.is_complete() {
            self.lower_orders.copy_from_slice(&self.monomials[..basis.lower_order_rows()]);
        }
    }

    /// Adds to dx the gradient of Σ_α numbers_α·x^α, for the row that was taken.
    #[inline(always)]
    fn slope(&mut self, basis: &Basis, x: &[f32], dx: &mut [f32]) {
        self.dlower_orders.fill(0.0);
        basis.reverse_rows(0..basis.rows(), x, 1, self.lower_orders, self.numbers, self.dlower_orders, dx);
        basis.reverse_lower_orders(x, 1, self.lower_orders, self.dlower_orders, dx);
    }

    /// Adds the monomials, multiplied by their numbers, times a row and times a number.
    #[inline(always)]
    fn enter(&mut self, row: &[f32], number: f32) {
        for ((h, z), monomial) in self.h.chunks_exact_mut(row.len()).zip(&mut *self.z).zip(&*self.monomials) {
            add_scaled(h, *monomial, row);
            *z += monomial * number;
        }
    }
}

/// b_n = Σ_{j≥n} a_j·(−c)^{j−n}/(j−n)!, for orders 0, 1, …
#[inline(always)]
fn shifted(coefficients: &[f64], c: f64, n: usize) -> f64 {
    let (mut sum, mut power) = (0.0, 1.0);
    for (i, a) in coefficients.iter().skip(n).enumerate() {
        sum += a * power;
        power *= -c / (i + 1) as f64;
    }
    sum
}

impl Far<'_, '_> {
    /// The row of a head's query for its far keys.
    fn query(&self, h: usize, t: usize) -> &[f32] {
        let l = self.0.c.layout;
        let n = l.head_count() + self.0.b * l.shape.heads + h;
        &self.0.c.q[(n * l.tp() + t) * l.dp..][..self.width()]
    }

    /// dU and dz of a head's row.
    fn row(&self, h: usize, t: usize) -> (&[f32], f32) {
        let l = self.0.c.layout;
        let at = (l.head_count() + self.0.b * l.shape.heads + h) * l.shape.time + t;
        (&self.0.c.du[at * l.ep..][..l.ep], self.0.c.dz[at])
    }

    fn class(&self) -> usize {
        self.0.group.far.as_ref().map_or(self.0.group.class, |far| far.class)
    }

    fn width(&self) -> usize {
        self.0.c.layout.classes[self.class()].width
    }

    /// A key as near or as far queries meet it, and its value.
    fn key(&self, class: usize, at: usize) -> (&[f32], &[f32]) {
        let (c, l) = (self.0.c, self.0.c.layout);
        let row = l.kv_index(class, self.0.b, self.0.group.g) * l.tp() + at;
        (&c.k[row * l.dp..][..l.classes[class].width], &c.v[row * l.ep..][..l.ep])
    }

    /// What the monomials of an order are multiplied by besides 1/α!.
    #[inline(always)]
    fn coefficient(whole: bool, far: &Head, shift: f32, i: usize) -> f64 {
        if whole { shifted(&far.coefficients, f64::from(shift), i) } else { far.coefficients[i] }
    }

    #[inline(always)]
    fn queries<S: Simd>(&mut self, simd: S, basis: &Basis, room: &mut Room) {
        let (c, l, b, g) = (self.0.c, self.0.c.layout, self.0.b, self.0.group.g);
        let (s, class, width) = (l.shape, self.class(), self.width());
        let (d, whole, root) = (s.d, l.classes[class].whole, (s.d as f32).sqrt());
        let of_keys = l.classes[class].of_keys(self.0.inputs, d, g);
        let (mut sum, mut mean, mut projected) = ([0.0f64; 256], [0.0f32; 256], [0.0f32; 528]);
        let (mean, projected) = (&mut mean[..d], &mut projected[..width]);
        let mut count = 0;
        room.h.fill(0.0);
        room.z.fill(0.0);
        for t in 0..self.0.lost.len() {
            if self.0.lost[t] != NONE {
                let at = self.0.lost[t] as usize;
                let (key, value) = self.key(class, at);
                room.take(basis, key);
                room.enter(value, 1.0);
                count += 1;
                if whole {
                    sum.iter_mut().zip(self.key(self.0.group.class, at).0).for_each(|(sum, &k)| *sum += f64::from(k));
                }
            }
            if count == 0 {
                continue;
            }
            if whole {
                mean.iter_mut().zip(&sum).for_each(|(mean, sum)| *mean = (sum / count as f64) as f32);
                of_keys.forward(simd, mean, &[], projected);
            }
            for &h in &self.0.group.heads {
                let Some(far) = &l.far[h] else { continue };
                let (n, in_group) = (b * s.heads + h, h % s.group());
                let near = &c.q[(n * l.tp() + t) * l.dp..][..d];
                let (scale, rho) = (l.heads[h].scale, c.rho[n * s.time + t]);
                let query = self.query(h, t);
                let (mut log, mut shift) = (0.0, 0.0);
                let mut variance = 0.0;
                let (spread, gamma) = l.layer.whole_spread(self.0.inputs, h);
                if whole {
                    (log, shift) = (dot(near, mean) / (scale * root), dot(query, projected));
                    if far.gauss {
                        variance = quadratic(near, spread) / (scale * scale);
                        log += bounded_gauss(f64::from(gamma * variance), count) as f32;
                    }
                } else if l.has_log_factor(far) {
                    log = l.classes[class].of_queries(self.0.inputs, d, far, h, g).log_factor(query);
                }
                let f = (log - rho).exp();
                let (du, dz) = self.row(h, t);
                room.take(basis, query);
                for ((number, h), z) in room.numbers.iter_mut().zip(room.h.chunks_exact(l.ep)).zip(&*room.z) {
                    *number = f * (dot(h, du) + z * dz);
                }
                // Sums by order, and the numbers of the polynomial.
                let (mut total, mut dc) = (0.0f64, 0.0f64);
                let (to_queries, _) = &mut self.0.to;
                let dlearned = &mut to_queries.dlearned[1].row(in_group, 0)[..far.learned];
                for i in 0..basis.orders().len() {
                    let a = Self::coefficient(whole, far, shift, i);
                    let span = basis.order_range(i);
                    let rows = room.monomials[span.clone()].iter().zip(&basis.inverse_factorials()[span.clone()]);
                    let mut part = 0.0f64;
                    for ((monomial, inverse), number) in rows.zip(&mut room.numbers[span]) {
                        *number *= inverse;
                        part += f64::from(monomial * *number);
                        *number *= a as f32;
                    }
                    total += a * part;
                    if whole {
                        dc -= shifted(&far.coefficients, f64::from(shift), i + 1) * part;
                        let mut power = part;
                        for (j, da) in dlearned.iter_mut().enumerate().skip(i) {
                            *da += power;
                            power *= -f64::from(shift) / (j - i + 1) as f64;
                        }
                    } else if let Some(da) = dlearned.get_mut(i) {
                        *da += part;
                    }
                }
                let dq = &mut to_queries.dq[1].row(in_group, t)[..width];
                let query = &c.q[((l.head_count() + n) * l.tp() + t) * l.dp..][..width];
                room.slope(basis, query, dq);
                let dlog = total as f32;
                if whole {
                    add_scaled(dq, dc as f32, projected);
                    let dq = &mut to_queries.dq[0].row(in_group, t)[..d];
                    add_scaled(dq, dlog / (scale * root), mean);
                    if far.gauss {
                        let slope = dlog * bounded_gauss_slope(f64::from(gamma * variance), count) as f32;
                        let (dspread, dgamma) = self.0.spread.split_at_mut(d * d);
                        dgamma[in_group] += slope * variance;
                        let factor = slope * gamma / (scale * scale);
                        spread_backward(near, spread, factor, dq, dspread);
                    }
                } else if l.has_log_factor(far) {
                    to_queries.dlog[1].row(in_group, t)[0] += total;
                }
                self.0.rows[in_group * s.time + t] = [f, shift, dlog, dc as f32];
            }
        }
    }

    #[inline(always)]
    fn keys(&mut self, basis: &Basis, room: &mut Room) {
        let (c, l, b) = (self.0.c, self.0.c.layout, self.0.b);
        let (s, class, near_class, width) = (l.shape, self.class(), self.0.group.class, self.width());
        let (d, whole, root) = (s.d, l.classes[class].whole, (s.d as f32).sqrt());
        let (mut dmean, mut dprojected) = ([0.0f64; 256], [0.0f64; 528]);
        let mut count = self.0.lost.iter().filter(|&&lost| lost != NONE).count();
        room.h.fill(0.0);
        room.z.fill(0.0);
        for t in (0..self.0.lost.len()).rev() {
            if count == 0 {
                break;
            }
            for &h in &self.0.group.heads {
                let Some(far) = &l.far[h] else { continue };
                let [f, shift, dlog, dc] = self.0.rows[h % s.group() * s.time + t];
                let (query, (du, dz)) = (self.query(h, t), self.row(h, t));
                room.take(basis, query);
                for i in 0..basis.orders().len() {
                    let (a, span) = (Self::coefficient(whole, far, shift, i) as f32 * f, basis.order_range(i));
                    let inverse = &basis.inverse_factorials()[span.clone()];
                    room.monomials[span].iter_mut().zip(inverse).for_each(|(x, inverse)| *x *= a * inverse);
                }
                room.enter(du, dz);
                if whole {
                    let near = &c.q[((b * s.heads + h) * l.tp() + t) * l.dp..][..d];
                    let share = f64::from(dlog / (l.heads[h].scale * root)) / count as f64;
                    dmean.iter_mut().zip(near).for_each(|(sum, &q)| *sum += share * f64::from(q));
                    let share = f64::from(dc) / count as f64;
                    dprojected.iter_mut().zip(query).for_each(|(sum, &q)| *sum += share * f64::from(q));
                }
            }
            if self.0.lost[t] == NONE {
                continue;
            }
            let at = self.0.lost[t] as usize;
            let (key, value) = self.key(class, at);
            room.take(basis, key);
            for ((number, h), z) in room.numbers.iter_mut().zip(room.h.chunks_exact(l.ep)).zip(&*room.z) {
                *number = dot(h, value) + z;
            }
            let mut dkey = [0.0f32; 528];
            let dkey = &mut dkey[..width];
            room.slope(basis, key, dkey);
            let (_, to_keys) = &mut self.0.to;
            add_scaled(&mut to_keys.dk.row(class, at)[..width], 1.0, dkey);
            let dv = to_keys.dv.row(class, at);
            room.h.chunks_exact(l.ep).zip(&*room.monomials).for_each(|(h, &monomial)| add_scaled(dv, monomial, h));
            if whole {
                to_keys.dk.row(class, at).iter_mut().zip(&dprojected[..width]).for_each(|(dk, sum)| *dk += *sum as f32);
                to_keys.dk.row(near_class, at).iter_mut().zip(&dmean[..d]).for_each(|(dk, sum)| *dk += *sum as f32);
            }
            count -= 1;
        }
    }
}

/// qᵀΣq
fn quadratic(q: &[f32], spread: &[f32]) -> f32 {
    spread.chunks_exact(q.len()).zip(q).map(|(row, q_i)| q_i * dot(row, q)).sum()
}

/// From the gradient of qᵀΣq to those of q and Σ.
#[inline(always)]
fn spread_backward(q: &[f32], spread: &[f32], factor: f32, dq: &mut [f32], dspread: &mut [f32]) {
    for (i, (line, dline)) in spread.chunks_exact(q.len()).zip(dspread.chunks_exact_mut(q.len())).enumerate() {
        dq[i] += factor * dot(line, q);
        add_scaled(dq, factor * q[i], line);
        add_scaled(dline, factor * q[i], q);
    }
}
