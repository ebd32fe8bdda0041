//! Fused float32 kernels: tiles of scores that live in the first-level cache and are never stored.
//!
//! ```text
//! forward    prepare q, k, v by head → for each tile of queries: scores, weights, U += W·V, z → epilogue → y
//! backward   prepare again → epilogue → for each tile of keys: scores and weights once more, dV, dK, dQ → finish
//! ```
//!
//! Promises: memory linear in T; no allocation once the workspace has grown; every sum has a fixed order, so that
//! results are bit-identical for any number of threads (not across instruction sets).

mod backward;
mod finish;
mod forward;
mod layout;
mod prepare;
mod product;
pub mod rows;
mod shared;
mod signals;
mod workspace;

use std::cell::RefCell;

use rayon::prelude::*;

use forward::Gates;
use layout::{Layout, TILE};
use prepare::{Pack, Sources, Which, channels_last};
use shared::Shared;
pub use workspace::Scratch;
use workspace::Workspace;

use crate::extras::check_heads;
use crate::io::check_length;
use crate::simd::dispatch;
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
    /// U [B, H, T, ep], z and ρ [B, H, T] of the last forward pass.
    u: Buffer,
    z: Buffer,
    rho: Buffer,
}

impl Fused {
    /// An attention whose heads have these variants, one each; memory for intermediate results comes from `scratch`.
    pub fn new(heads: &[Variant], shape: Shape, scratch: &Scratch) -> Result<Fused, Error> {
        check_heads(heads, &shape)?;
        crate::layer_extras(heads, &shape)?;
        let layout = Layout::new(heads, shape);
        let mut fused = Fused {
            layout,
            variants: heads.to_vec(),
            scratch: scratch.clone(),
            u: Buffer::default(),
            z: Buffer::default(),
            rho: Buffer::default(),
        };
        let rows = shape.batch * shape.heads * shape.time;
        fused.u.ensure(rows * fused.layout.ep);
        fused.z.ensure(rows);
        fused.rho.ensure(rows);
        Ok(fused)
    }

    /// Bytes kept between `forward` and `backward`, besides the shared workspace.
    pub fn saved_bytes(&self) -> usize {
        self.u.bytes() + self.z.bytes() + self.rho.bytes()
    }

    /// Takes learned coefficients in.
    fn bind(&mut self, inputs: &Inputs<f32>) {
        let count = self.layout.learned();
        if count == 0 {
            return;
        }
        let all = inputs.extra(Extra::Coefficients);
        for (head, values) in self.layout.heads.iter_mut().zip(all.chunks_exact(count)) {
            if head.learned > 0 {
                let mut wide = [0.0; crate::parts::taylor::MAX_ORDER + 1];
                for (wide, &value) in wide.iter_mut().zip(values) {
                    *wide = value as f64;
                }
                head.kernel.bind(&wide[..count]);
            }
        }
    }
}

impl Attention<f32> for Fused {
    fn forward(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        inputs.check(&self.variants, &self.layout.shape)?;
        let s = self.layout.shape;
        check_length(format_args!("y"), s.batch * s.time * s.heads * s.e, y.len())?;
        self.bind(inputs);
        let scratch = self.scratch.clone();
        let mut guard = scratch.lock();
        let workspace = &mut *guard;
        let l = &self.layout;
        workspace.ensure_forward(l);
        prepare_all(l, inputs, workspace, false);
        let context = forward::Context {
            layout: l,
            sources: sources(inputs, workspace),
            kt: workspace.kt.as_slice(),
            v: workspace.v.as_slice(),
            gates: gates(l, inputs, workspace),
            lengths: inputs.lengths,
            u: Shared::new(self.u.as_mut_slice()),
            z: Shared::new(self.z.as_mut_slice()),
            rho: Shared::new(self.rho.as_mut_slice()),
            y: Shared::new(y),
        };
        let (heads, tiles) = (l.shape.heads, l.tiles);
        let nonpositive = (0..l.head_count() * tiles)
            .into_par_iter()
            .with_max_len(1)
            .filter_map(|task| {
                // Head by head, so that its keys and values stay in the second-level cache; long tiles first.
                let (n, tile) = (task / tiles, tiles - 1 - task % tiles);
                let (b, h) = (n / heads, n % heads);
                let (position, value) = with_room(TILE * l.dp, |q| dispatch(forward::ForwardTile { context: &context, b, h, tile, q }))?;
                Some(Nonpositive { row: b, head: h, position, value: value as f64 })
            })
            .min_by_key(|at| (at.row, at.head, at.position));
        Ok(Report { nonpositive })
    }

    fn backward(&mut self, inputs: &Inputs<f32>, dy: &[f32], grads: &mut Grads<f32>) -> Result<(), Error> {
        inputs.check(&self.variants, &self.layout.shape)?;
        grads.check(&self.variants, &self.layout.shape)?;
        let s = self.layout.shape;
        check_length(format_args!("dy"), s.batch * s.time * s.heads * s.e, dy.len())?;
        self.bind(inputs);
        let scratch = self.scratch.clone();
        let mut guard = scratch.lock();
        let workspace = &mut *guard;
        let l = &self.layout;
        workspace.ensure_forward(l);
        workspace.ensure_backward(l);
        prepare_all(l, inputs, workspace, true);

        let Workspace { du, dz, dout, dpost, dnorm, .. } = workspace;
        let (du, dz) = (Shared::new(du.as_mut_slice()), Shared::new(dz.as_mut_slice()));
        let (dout, dpost, dnorm) = (Shared::new(dout.as_mut_slice()), Shared::new(dpost.as_mut_slice()), Shared::new(dnorm.as_mut_slice()));
        let context = backward::EpilogueContext {
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
            dispatch(backward::EpilogueHead { context: &context, b: n / s.heads, h: n % s.heads });
        });

        workspace.ddecay.fill(0.0);
        workspace.dlearned.fill(0.0);
        let Workspace { dq, dk, dv, dkey_weights, ddecay, dlearned, .. } = workspace;
        let (dq, dk, dv) = (Shared::new(dq.as_mut_slice()), Shared::new(dk.as_mut_slice()), Shared::new(dv.as_mut_slice()));
        let (dkey_weights, ddecay, dlearned) = (Shared::new(dkey_weights.as_mut_slice()), Shared::new(ddecay), Shared::new(dlearned));
        let context = backward::Context {
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
        (0..s.batch * s.kv_heads * l.segments).into_par_iter().with_max_len(1).for_each(|task| {
            let (pair, segment) = (task / l.segments, task % l.segments);
            let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
            with_room(backward::tiles_len(l), |room| dispatch(backward::BackwardSegment { context: &context, b, g, segment, room }));
        });
        finish::finish(l, inputs, workspace, grads);
        Ok(())
    }
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

/// Gate factors, key weights, decays and the packed tiles of q, k and v.
fn prepare_all(l: &Layout, inputs: &Inputs<f32>, workspace: &mut Workspace, backward: bool) {
    let s = l.shape;
    if l.classes.iter().any(|class| class.rope) {
        angles(l, inputs, workspace);
    }
    for ((buffer, extra), dim) in workspace.taps.iter_mut().zip([Extra::ConvQ, Extra::ConvK, Extra::ConvV]).zip([s.d, s.d, s.e]) {
        if l.taps > 0 {
            channels_last(inputs.extra(extra), dim, l.taps, buffer.as_mut_slice());
        }
    }
    signals::forward(l, inputs, workspace);

    let Workspace { q, k, kt, v, vt, .. } = workspace;
    let [q, k, kt, v, vt] = [q, k, kt, v, vt].map(|buffer| Shared::new(buffer.as_mut_slice()));
    let sources = sources(inputs, workspace);
    // The forward pass prepares queries tile by tile and reads keys only transposed.
    let (heads, kvs) = (if backward { l.head_count() } else { 0 }, l.kv_count());
    let keeps_v = !backward || l.heads.iter().any(|head| head.weighs_keys);
    (0..heads + 2 * kvs).into_par_iter().with_max_len(1).for_each(|task| {
        // SAFETY of the shared slices: each task is the only one with its head, or its kv head of k or of v.
        if task < heads {
            let (b, h) = (task / s.heads, task % s.heads);
            // SAFETY: see above.
            let rows = unsafe { q.slice(task * l.tp() * l.dp, l.tp() * l.dp) };
            dispatch(Pack { side: sources.query(l, b, h), time: s.time, padded: l.dp, rows, transposed: &mut [], local: &mut [] });
            return;
        }
        let (kv, which) = ((task - heads) / 2, if (task - heads) % 2 == 0 { Which::K } else { Which::V });
        let (class, pair) = (l.classes[kv / (s.batch * s.kv_heads)], kv % (s.batch * s.kv_heads));
        let side = sources.side(l, class, which, pair / s.kv_heads, pair % s.kv_heads, 1.0);
        let (dim, padded) = (side.dim, side.dim.next_multiple_of(layout::PAD));
        let (rows, transposed) = if which == Which::K { (&k, &kt) } else { (&v, &vt) };
        let (by_rows, by_columns) = if which == Which::K { (backward, true) } else { (keeps_v, backward) };
        let row_size = if by_rows { l.tp() * padded } else { 0 };
        let column_size = if by_columns { l.tp() * dim } else { 0 };
        // SAFETY: see above.
        let (rows, transposed) = unsafe { (rows.slice(kv * row_size, row_size), transposed.slice(kv * column_size, column_size)) };
        with_room(TILE * padded, |local| dispatch(Pack { side, time: s.time, padded, rows, transposed, local }));
    });
}

fn sources<'a>(inputs: &Inputs<'a, f32>, workspace: &'a Workspace) -> Sources<'a> {
    let [tq, tk, tv] = &workspace.taps;
    Sources {
        x: [inputs.q, inputs.k, inputs.v],
        cos: workspace.cos.as_slice(),
        sin: workspace.sin.as_slice(),
        taps: [tq.as_slice(), tk.as_slice(), tv.as_slice()],
    }
}

fn gates<'a>(l: &Layout, inputs: &Inputs<'a, f32>, workspace: &'a Workspace) -> Gates<'a> {
    let parameter =
        |extra| if l.heads.iter().any(|head| head.variant.needs(extra)) { *inputs.extras.get(extra).expect("checked") } else { &[] };
    Gates {
        out: workspace.out_gate.as_slice(),
        post: workspace.post_gate.as_slice(),
        key_weights: workspace.key_weights.as_slice(),
        decay: &workspace.decay,
        norm_weight: parameter(Extra::NormWeight),
        norm_bias: parameter(Extra::NormBias),
    }
}

/// cos and sin of all positions, kept while frequencies and T stay the same.
fn angles(l: &Layout, inputs: &Inputs<f32>, workspace: &mut Workspace) {
    let (time, half) = (l.shape.time, l.shape.d / 2);
    let current = workspace.angles_of.as_ref().is_some_and(|(frequencies, t)| frequencies == inputs.rope.frequencies() && *t == time);
    if current || half == 0 {
        return;
    }
    let (cos, sin) = (workspace.cos.as_mut_slice(), workspace.sin.as_mut_slice());
    cos.par_chunks_exact_mut(half)
        .zip(sin.par_chunks_exact_mut(half))
        .enumerate()
        .for_each(|(t, (cos, sin))| inputs.rope.angles(t, cos, sin));
    workspace.angles_of = Some((inputs.rope.frequencies().to_vec(), time));
}
