//! Fused float32 kernels: tiles of scores that live in the first-level cache and are never stored.
//!
//! ```text
//! forward    prepare q, k, v by head → for each tile of queries: scores, weights, U += W·V, z → epilogue → y
//! backward   prepare again → epilogue → for each tile of keys: scores and weights once more, dV, dK, dQ → finish
//! ```
//!
//! Heads with a finite state can run in chunks instead: tiles only within a chunk, a state between chunks; preparing, epilogue and
//! finish are the same.
//!
//! Promises: memory linear in T; no allocation once the workspace has grown; every sum has a fixed order, so that
//! results are bit-identical for any number of threads (not across instruction sets).

mod chunk;
mod cost;
mod finish;
mod gates;
mod mode;
mod plan;
mod prefill;
mod prepare;
mod setup;
mod state_group;
mod tile_backward;
mod tile_forward;
mod workspace;

use std::cell::RefCell;

use rayon::prelude::*;

pub use crate::fused::cost::break_even;
pub use crate::fused::mode::Mode;
use crate::fused::plan::Layout;
use crate::fused::setup::{chunks, gates, prepare_all, sources};
use crate::fused::tile_forward::{CallTile, ForwardTile, Past, Queries};
pub use crate::fused::workspace::Scratch;
use crate::fused::workspace::Workspace;
use crate::kernels::TILE;
use crate::kernels::disjoint::Shared;

use crate::extras::check_heads;
use crate::kernels::simd::dispatch;
use crate::state::State;
use crate::tensors::check_length;
use crate::{Attention, Buffer, Error, Extra, Grads, Inputs, Nonpositive, Report, Shape, Variant};

/// Attention in tiles, float32.
///
/// ```
/// use termwise_attention::{Attention, Extras, Fused, Inputs, Rope, Scratch, Shape, Variant};
///
/// let shape = Shape { batch: 1, time: 3, heads: 2, kv_heads: 1, d: 4, e: 4 };
/// let softmax: Variant = "softmax".parse()?;
/// let mut attention = Fused::new(&[softmax.clone(), softmax], shape, &Scratch::default())?;
/// let (q, k, v) = ([0.1; 24], [0.2; 12], [0.3; 12]);
/// let rope = Rope::new(4, 10_000.0, None)?;
/// let mut y = [0.0; 24];
/// attention.forward(&Inputs { q: &q, k: &k, v: &v, extras: Extras::default(), lengths: None, rope: &rope }, &mut y)?;
/// assert!(y.iter().all(|y| (y - 0.3).abs() < 1e-6));
/// # Ok::<(), termwise_attention::Error>(())
/// ```
pub struct Fused {
    layout: Layout,
    variants: Vec<Variant>,
    scratch: Scratch,
    /// a_n/α! of each head that runs in chunks [N].
    factors: Vec<Vec<f32>>,
    /// U [B, H, T, ep], z and ρ [B, H, T] of the last forward pass.
    u: Buffer,
    z: Buffer,
    rho: Buffer,
    extension: Option<prefill::Extension>,
}

impl Fused {
    /// An attention whose heads have these variants, one each; memory for intermediate results comes from `scratch`.
    pub fn new(heads: &[Variant], shape: Shape, scratch: &Scratch) -> Result<Fused, Error> {
        Fused::with_mode(heads, shape, scratch, Mode::Parallel)
    }

    /// As [`Fused::new`], computed in this mode.
    pub fn with_mode(heads: &[Variant], shape: Shape, scratch: &Scratch, mode: Mode) -> Result<Fused, Error> {
        check_heads(heads, &shape)?;
        crate::layer_extras(heads, &shape)?;
        let plan = cost::plan(heads, &shape, mode)?;
        let layout = Layout::new(heads, shape, plan.as_ref().map(|(length, chunked)| (*length, &chunked[..])))?;
        let mut fused = Fused {
            factors: layout.factors(),
            layout,
            variants: heads.to_vec(),
            scratch: scratch.clone(),
            u: Buffer::default(),
            z: Buffer::default(),
            rho: Buffer::default(),
            extension: None,
        };
        let rows = shape.batch * shape.heads * shape.time;
        fused.u.ensure(rows * fused.layout.ep);
        fused.z.ensure(rows);
        fused.rho.ensure(rows);
        Ok(fused)
    }

    /// The mode in which the heads with a finite state run: [`Mode::Parallel`], or [`Mode::Chunk`] with the length of its chunks.
    pub fn mode_taken(&self) -> Mode {
        if self.layout.units.is_empty() { Mode::Parallel } else { Mode::Chunk(Some(self.layout.chunk_len())) }
    }

    /// Whether this head runs in chunks; false also where there is no such head.
    pub fn runs_in_chunks(&self, head: usize) -> bool {
        self.layout.heads.get(head).is_some_and(|head| head.chunked)
    }

    /// Bytes kept between `forward` and `backward`, besides the shared workspace.
    pub fn saved_bytes(&self) -> usize {
        self.u.bytes() + self.z.bytes() + self.rho.bytes()
    }
}

/// Takes learned coefficients in.
fn bind(layout: &mut Layout, factors: &mut Vec<Vec<f32>>, inputs: &Inputs<f32>) {
    let count = layout.learned();
    if count == 0 {
        return;
    }
    let all = inputs.extra(Extra::Coefficients);
    for (head, values) in layout.heads.iter_mut().zip(all.chunks_exact(count)) {
        if head.learned > 0 {
            let mut wide = [0.0; crate::parts::kernel::taylor::MAX_ORDER + 1];
            for (wide, &value) in wide.iter_mut().zip(values) {
                *wide = value as f64;
            }
            head.kernel.bind(&wide[..count]);
        }
    }
    *factors = layout.factors();
}

impl Attention<f32> for Fused {
    fn forward(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        inputs.check(&self.variants, &self.layout.shape)?;
        let s = self.layout.shape;
        check_length(format_args!("y"), s.batch * s.time * s.heads * s.e, y.len())?;
        bind(&mut self.layout, &mut self.factors, inputs);
        let scratch = self.scratch.clone();
        let mut guard = scratch.lock();
        let workspace = &mut *guard;
        let l = &self.layout;
        workspace.ensure_forward(l);
        prepare_all(l, inputs, workspace, false, None);
        let kept = Kept { u: Shared::new(&mut self.u), z: Shared::new(&mut self.z), rho: Shared::new(&mut self.rho) };
        Ok(Report { nonpositive: run_forward(l, inputs, workspace, &self.factors, kept, y, None) })
    }

    fn backward(&mut self, inputs: &Inputs<f32>, dy: &[f32], grads: &mut Grads<f32>) -> Result<(), Error> {
        inputs.check(&self.variants, &self.layout.shape)?;
        grads.check(&self.variants, &self.layout.shape)?;
        let s = self.layout.shape;
        check_length(format_args!("dy"), s.batch * s.time * s.heads * s.e, dy.len())?;
        bind(&mut self.layout, &mut self.factors, inputs);
        let scratch = self.scratch.clone();
        let mut guard = scratch.lock();
        let workspace = &mut *guard;
        let l = &self.layout;
        workspace.ensure_forward(l);
        workspace.ensure_backward(l);
        prepare_all(l, inputs, workspace, true, None);

        let Workspace { du, dz, dout, dpost, dnorm, .. } = workspace;
        let (du, dz) = (Shared::new(du.as_mut_slice()), Shared::new(dz.as_mut_slice()));
        let (dout, dpost, dnorm) = (Shared::new(dout.as_mut_slice()), Shared::new(dpost.as_mut_slice()), Shared::new(dnorm.as_mut_slice()));
        let context = tile_backward::EpilogueContext {
            layout: l,
            gates: gates(l, inputs, workspace),
            lengths: inputs.lengths,
            u: self.u.as_slice(),
            z: self.z.as_slice(),
            rho: self.rho.as_slice(),
            dy,
            du,
            dz,
            dout,
            dpost,
            dnorm,
        };
        (0..l.head_count()).into_par_iter().with_max_len(1).for_each(|n| {
            dispatch(tile_backward::EpilogueHead { context: &context, b: n / s.heads, h: n % s.heads });
        });

        workspace.ddecay.fill(0.0);
        workspace.dlearned.fill(0.0);
        let mut turns = std::mem::take(&mut workspace.turns);
        let Workspace { dq, dk, dv, dkey_weights, ddecay, dlearned, .. } = workspace;
        let (dq, dk, dv) = (Shared::new(dq.as_mut_slice()), Shared::new(dk.as_mut_slice()), Shared::new(dv.as_mut_slice()));
        let (dkey_weights, ddecay, dlearned) = (Shared::new(dkey_weights.as_mut_slice()), Shared::new(ddecay), Shared::new(dlearned));
        let states = Shared::new(workspace.states.as_mut_slice());
        let context = tile_backward::Context {
            layout: l,
            q: workspace.q.as_slice(),
            k: workspace.k.as_slice(),
            kt: workspace.kt.as_slice(),
            vt: workspace.vt.as_slice(),
            v: workspace.v.as_slice(),
            gates: gates(l, inputs, workspace),
            lengths: inputs.lengths,
            rho: self.rho.as_slice(),
            du: workspace.du.as_slice(),
            dz: workspace.dz.as_slice(),
            dq,
            dk,
            dv,
            dkey_weights,
            ddecay,
            dlearned,
        };
        if l.parallel() {
            tile_backward::backward(&context, &mut turns);
        }
        let queries = chunk::QueryGrads { q: context.q, du: context.du, dz: context.dz };
        chunk::run::backward(&context, &chunk::Chunks { queries, ..chunks(l, inputs, workspace, &self.factors, states, false) });
        workspace.turns = turns;
        finish::finish(l, inputs, workspace, grads);
        Ok(())
    }
}

/// What a forward pass keeps: U [B, H, T, ep], z and ρ [B, H, T].
struct Kept {
    u: Shared<f32>,
    z: Shared<f32>,
    rho: Shared<f32>,
}

/// From prepared tensors in the workspace to y; `state` holds caches where the call continues from one.
fn run_forward(
    l: &Layout,
    inputs: &Inputs<f32>,
    workspace: &mut Workspace,
    factors: &[Vec<f32>],
    kept: Kept,
    y: &mut [f32],
    state: Option<&State>,
) -> Option<Nonpositive> {
    let s = l.shape;
    let states = Shared::new(workspace.states.as_mut_slice());
    let largest = Shared::new(workspace.largest.as_mut_slice());
    let context = tile_forward::Context {
        layout: l,
        sources: sources(inputs, workspace),
        kt: workspace.kt.as_slice(),
        v: workspace.v.as_slice(),
        gates: gates(l, inputs, workspace),
        lengths: inputs.lengths,
        u: kept.u,
        z: kept.z,
        rho: kept.rho,
        y: Shared::new(y),
    };
    let parallel = (0..l.head_count() * l.tiles)
        .into_par_iter()
        .with_max_len(1)
        .filter_map(|task| {
            // Head by head, so that its keys and values stay in the second-level cache; long tiles first.
            let (n, tile) = (task / l.tiles, l.tiles - 1 - task % l.tiles);
            let (b, h) = (n / s.heads, n % s.heads);
            if l.heads[h].chunked {
                return None;
            }
            let past = state.and_then(|state| state.cache_of(b, h)).map(|(cache, column)| Past { cache, column, largest });
            let (position, value) = with_room(TILE * l.dp, |q| {
                let q = Queries::Room(q);
                dispatch(CallTile(ForwardTile { context: &context, b, h, tile, from: 0, begun: false, q, past }))
            })?;
            Some(Nonpositive { row: b, head: h, position, value: value as f64 })
        })
        .min_by_key(|at| (at.row, at.head, at.position));
    let chunks = chunks(l, inputs, workspace, factors, states, state.is_some());
    let chunked = chunk::run::forward(&context, &chunks);
    [parallel, chunked].into_iter().flatten().min_by_key(|at| (at.row, at.head, at.position))
}

/// Runs f with room for `len` values, which each thread keeps.
fn with_room<T>(len: usize, f: impl FnOnce(&mut [f32]) -> T) -> T {
    thread_local! {
        static ROOM: RefCell<Buffer> = RefCell::default();
    }
    ROOM.with_borrow_mut(|buffer| {
        buffer.ensure(len);
        f(buffer.as_mut_slice())
    })
}
