//! The fused engine: float32 attention in tiles of scores that stay in the first-level cache and are never stored.
//!
//! [`forward`] and [`backward`] below list the stages of a call in the order in which they run:
//!
//! ```text
//! forward    gates → prepare k, v per kv head → channel decay → write rule → tiles or chunks, each with its epilogue → y
//! backward   the same preparation, with q → epilogue → join of near and far keys → tiles or chunks → write rule → channel decay → prepare → gates
//! ```
//!
//! Plain softmax runs prepare, tiles and epilogue. The plan of the call decides whether another stage runs. Heads with a finite state can run in
//! chunks: tiles within a chunk, a recurrent state between chunks. [`Fused::extend`] starts from the state of earlier calls.
//!
//! Guarantees: Memory is linear in T. A call does not allocate once the scratch memory has grown, except for heads with heavy hitters and calls
//! that continue from a state. Every sum has a fixed order, so results are bit-identical for any number of threads (not across instruction sets).
//! A NaN or infinite value changes no row that does not see it, except through a write rule.

mod blocks;
mod call;
mod chunks;
mod cost;
mod decode;
mod delta;
mod engine;
mod epilogue;
mod gradients;
mod heap_bytes;
mod mode;
mod plan;
mod plan_cache;
mod prepare;
mod prepared;
mod saved;
mod scratch;
mod tiles;

pub use crate::fused::cost::break_even;
pub use crate::fused::engine::{Fused, FusedOptions};
pub use crate::fused::mode::Mode;
pub use crate::fused::scratch::Scratch;

use crate::fused::call::{Call, PastKeys};
use crate::fused::plan::CallPlan;
use crate::fused::prepare::channel_decay;
use crate::fused::prepare::gates::{self, GateFactors};
use crate::fused::prepared::Prepared;
use crate::fused::scratch::CallScratch;
use crate::fused::tiles::backward::TileInputs;
use crate::fused::tiles::join;
use crate::state::State;
use crate::{Grads, Inputs, Report};

/// y [B, T, H, e] of all heads that are not evaluated sequentially. The sums over keys U, z and ρ go to `saved` if a backward pass follows.
/// A call that continues from a `state` reads its caches; the scratch memory contains its other values.
fn forward(
    plan: &CallPlan,
    inputs: &Inputs<f32>,
    state: Option<&State>,
    scratch: &mut CallScratch,
    mut saved: Option<[&mut [f32]; 3]>,
    y: &mut [f32],
) -> Report {
    let CallScratch { initial, tasks, tables, rows, values, gates, channel_decay, delta, tiles, states, .. } = scratch;
    let past = state.map(|state| PastKeys { state, contiguous: &initial.contiguous });
    let call = &Call { plan, inputs, initial, past, tasks };

    if plan.has_gates() {
        gates::forward(call, gates);
    }
    prepare::forward(call, false, tables, rows, values);
    if plan.layer.decays_by_channel() {
        channel_decay::forward(call, gates, rows, channel_decay);
    }
    let prepared = Prepared::new(*call, tables, gates, rows, channel_decay);
    if plan.layer.writes() {
        delta::forward(&prepared, false, &states.values, values, delta);
    }

    let prepared = &prepared.with_values(values);
    let mut report = Report::default();
    if plan.has_parallel_heads() {
        let saved = saved.as_mut().map(|sums| sums.each_mut().map(|sums| &mut **sums));
        report = tiles::forward::run(prepared, tiles, saved, y);
    }
    if plan.has_chunked_heads() {
        report = report.or(chunks::run::forward(prepared, states, saved, y));
    }
    report
}

/// Adds the gradients of Σ y·dy to `grads`, from the sums U, z and ρ that the forward pass saved.
fn backward(plan: &CallPlan, inputs: &Inputs<f32>, scratch: &mut CallScratch, saved: [&[f32]; 3], dy: &[f32], grads: &mut Grads<f32>) {
    let CallScratch { initial, tasks, tables, rows, values, gates, channel_decay, delta, states, grads: own, .. } = scratch;
    let call = &Call { plan, inputs, initial, past: None, tasks };

    if plan.has_gates() {
        gates::forward(call, gates);
    }
    prepare::forward(call, true, tables, rows, values);
    if plan.layer.decays_by_channel() {
        channel_decay::forward(call, gates, rows, channel_decay);
    }
    let prepared = Prepared::new(*call, tables, gates, rows, channel_decay);
    if plan.layer.writes() {
        delta::forward(&prepared, true, &[], values, delta);
    }

    epilogue::backward(call, &GateFactors::new(call, gates), saved, dy, &mut own.epilogue, &mut own.gates);
    if plan.has_far_keys() {
        join::backward(call, saved[2], &mut own.epilogue);
    }
    let prepared = &prepared.with_values(values);
    let tile_inputs = &TileInputs { prepared, rho: saved[2], du: &own.epilogue.du, dz: &own.epilogue.dz };
    if plan.has_parallel_heads() {
        tiles::backward::run(tile_inputs, &mut own.tiles);
    }
    if plan.has_chunked_heads() {
        chunks::run::backward(tile_inputs, states, &mut own.tiles);
    }

    if plan.layer.writes() {
        delta::backward(prepared, delta, &mut own.tiles, &mut own.delta, grads);
    }
    if plan.layer.decays_by_channel() {
        channel_decay::backward(call, rows, &own.tiles, &own.delta.dreaders, &mut own.channel_decay, grads);
    }
    prepare::backward(call, tables, &mut own.tiles, &mut own.prepare, grads);
    if plan.has_gates() {
        gates::backward(call, gates, &mut own.tiles, &mut own.gates, grads);
    }
    if plan.has_epilogue_parameters() {
        own.epilogue.add_parameters(plan, grads);
    }
    if plan.learns_coefficients() {
        own.tiles.add_learned(plan, grads);
    }
}
