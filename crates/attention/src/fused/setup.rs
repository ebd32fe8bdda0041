//! What every pass starts from: prepared tensors and factors in the workspace, and views of them.

use rayon::prelude::*;

use crate::fused::chunk::{Chunks, QueryGrads};
use crate::fused::gates::{self, Carried};
use crate::fused::plan::Layout;
use crate::fused::prepare::{Pack, Sources, Which, channels_last};
use crate::fused::tile_forward::Gates;
use crate::fused::with_room;
use crate::fused::workspace::Workspace;
use crate::kernels::disjoint::Shared;
use crate::kernels::simd::dispatch;
use crate::{Buffer, Extra, Inputs};

/// Gate factors, key weights, decays and the packed tiles of q, k and v.
pub fn prepare_all(l: &Layout, inputs: &Inputs<f32>, workspace: &mut Workspace, backward: bool, carried: Option<Carried>) {
    let s = l.shape;
    if l.classes.iter().any(|class| class.rope) {
        angles(l, inputs, workspace);
    }
    for ((buffer, extra), dim) in workspace.taps.iter_mut().zip([Extra::ConvQ, Extra::ConvK, Extra::ConvV]).zip([s.d, s.d, s.e]) {
        if l.taps > 0 {
            channels_last(inputs.extra(extra), dim, l.taps, buffer.as_mut_slice());
        }
    }
    gates::forward(l, inputs, workspace, carried);

    let Workspace { q, k, kt, v, vt, .. } = workspace;
    let [q, k, kt, v, vt] = [q, k, kt, v, vt].map(|buffer| Shared::new(buffer.as_mut_slice()));
    let sources = sources(inputs, workspace);
    // The forward pass prepares queries tile by tile and reads keys only transposed.
    let (heads, kvs) = (if backward { l.head_count() } else { 0 }, l.kv_count());
    let keeps_v = !backward || l.heads.iter().any(|head| head.weighs_keys || head.chunked);
    (0..heads + 2 * kvs).into_par_iter().with_max_len(1).for_each(|task| {
        // SAFETY of the shared slices: each task is the only one with its head, or its kv head of k or of v.
        if task < heads {
            let (b, h) = (task / s.heads, task % s.heads);
            // SAFETY: see above.
            let rows = unsafe { q.slice(task * l.tp() * l.dp, l.tp() * l.dp) };
            let (side, transposed, local) = (sources.query(l, b, h), &mut [][..], &mut [][..]);
            dispatch(Pack { side, time: s.time, tile: l.tile, pitch: l.pitch, padded: l.dp, rows, transposed, local });
            return;
        }
        let (kv, which) = ((task - heads) / 2, if (task - heads) % 2 == 0 { Which::K } else { Which::V });
        let (class, pair) = (l.classes[kv / (s.batch * s.kv_heads)], kv % (s.batch * s.kv_heads));
        let side = sources.side(l, class, which, pair / s.kv_heads, pair % s.kv_heads, 1.0);
        let (dim, padded) = (side.dim, side.dim.next_multiple_of(crate::kernels::PAD));
        let (rows, transposed) = if which == Which::K { (&k, &kt) } else { (&v, &vt) };
        let (by_rows, by_columns) = if which == Which::K { (backward, true) } else { (keeps_v, backward) };
        let row_size = if by_rows { l.tp() * padded } else { 0 };
        let column_size = if by_columns { l.tiles * l.pitch * dim } else { 0 };
        // SAFETY: see above.
        let (rows, transposed) = unsafe { (rows.slice(kv * row_size, row_size), transposed.slice(kv * column_size, column_size)) };
        with_room(l.pitch * padded, |local| {
            dispatch(Pack { side, time: s.time, tile: l.tile, pitch: l.pitch, padded, rows, transposed, local });
        });
    });
}

pub fn sources<'a>(inputs: &Inputs<'a, f32>, workspace: &'a Workspace) -> Sources<'a> {
    let slices = |buffers: &'a [Buffer; 3]| buffers.each_ref().map(|buffer| buffer.as_slice());
    Sources {
        x: [inputs.q, inputs.k, inputs.v],
        cos: workspace.cos.as_slice(),
        sin: workspace.sin.as_slice(),
        angle_stride: workspace.angle_stride,
        taps: slices(&workspace.taps),
        tails: slices(&workspace.tails),
    }
}

pub fn chunks<'a>(
    l: &'a Layout,
    inputs: &Inputs<'a, f32>,
    workspace: &'a Workspace,
    factors: &'a [Vec<f32>],
    states: Shared<f32>,
    given: bool,
) -> Chunks<'a> {
    Chunks {
        layout: l,
        gates: gates(l, inputs, workspace),
        lengths: inputs.lengths,
        kt: workspace.kt.as_slice(),
        v: workspace.v.as_slice(),
        factors,
        states,
        queries: QueryGrads::default(),
        given,
    }
}

pub fn gates<'a>(l: &Layout, inputs: &Inputs<'a, f32>, workspace: &'a Workspace) -> Gates<'a> {
    let parameter =
        |extra| if l.heads.iter().any(|head| head.variant.needs(extra)) { *inputs.extras.get(extra).expect("checked") } else { &[] };
    Gates {
        out: workspace.out_gate.as_slice(),
        post: workspace.post_gate.as_slice(),
        key_weights: workspace.key_weights.as_slice(),
        decay: &workspace.decay,
        before: &workspace.before,
        offsets: &workspace.offsets,
        norm_weight: parameter(Extra::NormWeight),
        norm_bias: parameter(Extra::NormBias),
    }
}

/// cos and sin of all positions, kept while frequencies and T stay the same; of each batch row where rows start at their own.
fn angles(l: &Layout, inputs: &Inputs<f32>, workspace: &mut Workspace) {
    let (time, half) = (l.shape.time, l.shape.d / 2);
    let current = workspace.angles_of.as_ref().is_some_and(|(frequencies, t)| frequencies == inputs.rope.frequencies() && *t == time);
    let stride = workspace.angle_stride;
    if (current && stride == 0) || half == 0 {
        return;
    }
    let (cos, sin, offsets) = (workspace.cos.as_mut_slice(), workspace.sin.as_mut_slice(), &workspace.offsets);
    cos.par_chunks_exact_mut(half).zip(sin.par_chunks_exact_mut(half)).enumerate().for_each(|(i, (cos, sin))| {
        let offset = if stride > 0 { offsets[i / time] } else { 0 };
        inputs.rope.angles(offset + i % time, cos, sin);
    });
    workspace.angles_of = (stride == 0).then(|| (inputs.rope.frequencies().to_vec(), time));
}
