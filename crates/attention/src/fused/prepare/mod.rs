//! Preparation of q, k and v: convolution, QK norm, RoPE and feature map, packed into padded rows and tiles per head; and its backward pass.

pub(in crate::fused) mod channel_decay;
pub(in crate::fused) mod gates;
mod head_rows;
mod qk_norm;

use rayon::prelude::*;

use crate::fused::call::Call;
use crate::fused::gradients::TileGrads;
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::{CallPlan, Head};
pub use crate::fused::prepare::head_rows::transpose_tile;
use crate::fused::prepare::head_rows::{ConvBackward, InputGrads, Pack, UnpackBackward};
use crate::fused::prepare::qk_norm::NORMED;
use crate::layer::{HeadRows, KeyTransform, RowSources, Tensor, channels_last};
use crate::{AuxKind, Buffer, Error, Grads, KeyRange, Rope, Shape};
use termwise_kernels::disjoint::{Axes, Axis, Block, Blocks, Disjoint};
use termwise_kernels::simd::dispatch;

/// Adds gradients of filters [heads, w, dimension] to [heads·dimension, w].
fn add_channels_first(dtaps: &[f32], dim: usize, w: usize, out: &mut [f32]) {
    for (dtaps, out) in dtaps.chunks_exact(dim * w).zip(out.chunks_exact_mut(dim * w)) {
        for (channel, out) in out.chunks_exact_mut(w).enumerate() {
            for (j, out) in out.iter_mut().enumerate() {
                *out += dtaps[j * dim + channel];
            }
        }
    }
}

scratch_memory! {
    /// Tables that the preparation of rows reads in addition to the inputs.
    RowTables {
        /// Rotary angles [T, pairs], or [B, T, pairs] if the call continues from a state.
        cos: Buffer,
        sin: Buffer,
        /// The rotary frequencies of the angles and their number of positions.
        angles_of: Option<(Rope, usize)>,
        /// Filters of the short convolution with the channel last, [heads, w, dimension] for q, k and v.
        taps: [Buffer; 3],
        /// Rows of q and k after the QK norm, [sources, B, T, heads·d].
        normed: [Buffer; 2],
    }
}

scratch_memory! {
    /// Prepared queries and keys, padded to whole vectors.
    PreparedRows {
        /// Queries [branches, N, Tp, dp], scaled. Only the backward pass stores them.
        q: Buffer,
        /// Keys [K, Tp, dp], for the backward pass and for decays per channel.
        k: Buffer,
        /// Keys transposed per tile [K, tiles, width, pitch].
        kt: Buffer,
    }
}

scratch_memory! {
    /// Prepared values, which a write rule replaces by the written values.
    PreparedValues {
        /// Values [K, Tp, ep].
        v: Buffer,
        /// Values transposed per tile [K, tiles, e, pitch], for the backward pass.
        vt: Buffer,
    }
}

scratch_memory! {
    /// Gradients that arise in the preparation of rows.
    PrepareGrads {
        /// Of convolution filters, per batch row and head.
        dtaps: [Buffer; 3],
        /// Of the rows after the QK norm.
        dnormed: [Buffer; 2],
        /// Of projections and learned features, of queries [N, branches, values] and keys [B, G, key transforms, values].
        dtensors: [Buffer; 2],
        /// Temporary rows and weight gradients of the QK norm's backward pass.
        norm_room: Buffer,
    }
}

impl RowTables {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let angles = l.shape.time * l.layer.rotary_pairs();
        if l.layer.rotates() {
            // A reallocation discards the angles, even if it fails.
            if self.cos.bytes().min(self.sin.bytes()) / size_of::<f32>() < angles {
                self.angles_of = None;
            }
            self.cos.ensure(angles)?;
            self.sin.ensure(angles)?;
        }
        for (buffer, channels) in self.taps.iter_mut().zip(l.shape.widths()) {
            buffer.ensure(channels * l.taps)?;
        }
        for (buffer, len) in self.normed.iter_mut().zip(l.normed_lens()) {
            buffer.ensure(len)?;
        }
        Ok(())
    }

    /// Memory for the angles of every batch row, whose first positions differ.
    pub fn ensure_angles_per_row(&mut self, l: &CallPlan) -> Result<(), Error> {
        if l.layer.rotates() {
            self.cos.ensure(l.shape.rows() * l.layer.rotary_pairs())?;
            self.sin.ensure(l.shape.rows() * l.layer.rotary_pairs())?;
        }
        Ok(())
    }
}

impl PreparedRows {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let (kv, tp) = (l.kv_count(), l.tp());
        self.kt.ensure(kv * l.tiles * l.width * l.pitch)?;
        if l.layer.decays_by_channel() {
            self.k.ensure(kv * tp * l.dp)?;
        }
        Ok(())
    }

    pub fn ensure_backward(&mut self, l: &CallPlan) -> Result<(), Error> {
        let (kv, tp) = (l.kv_count(), l.tp());
        self.q.ensure(l.branches() * l.head_count() * tp * l.dp)?;
        Ok(self.k.ensure(kv * tp * l.dp)?)
    }
}

impl PreparedValues {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        Ok(self.v.ensure(l.kv_count() * l.tp() * l.ep)?)
    }

    pub fn ensure_backward(&mut self, l: &CallPlan) -> Result<(), Error> {
        Ok(self.vt.ensure(l.kv_count() * l.tiles * l.shape.e * l.pitch)?)
    }
}

impl PrepareGrads {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        for (buffer, channels) in self.dtaps.iter_mut().zip(l.shape.widths()) {
            buffer.ensure(l.shape.batch * channels * l.taps)?;
        }
        self.norm_room.ensure(l.norm_room())?;
        for (buffer, len) in self.dnormed.iter_mut().zip(l.normed_lens()) {
            buffer.ensure(len)?;
        }
        let [queries, keys] = &mut self.dtensors;
        queries.ensure(l.head_count() * l.branches() * l.tensor_len())?;
        Ok(keys.ensure(l.kv_count() * l.tensor_len())?)
    }
}

/// Values of task memory that [`forward`] needs.
pub fn task_len(l: &CallPlan) -> usize {
    l.pitch * l.dp.max(l.ep)
}

impl<'a> RowSources<'a> {
    /// The rows of a call whose tables have been filled.
    pub(in crate::fused) fn of_call(call: &Call<'a>, tables: &'a RowTables) -> RowSources<'a> {
        RowSources {
            normed: tables.normed.each_ref().map(Buffer::as_slice),
            ..RowSources::before_norms(call, &tables.cos, &tables.sin, &tables.taps)
        }
    }

    /// The rows of a call before the QK norm.
    fn before_norms(call: &Call<'a>, cos: &'a [f32], sin: &'a [f32], taps: &'a [Buffer; 3]) -> RowSources<'a> {
        let (l, initial) = (call.plan, call.initial);
        RowSources {
            layer: &l.layer,
            shape: l.shape,
            inputs: call.inputs,
            pairs: l.layer.rotary_pairs(),
            width: l.taps,
            cos,
            sin,
            angle_stride: angle_stride(call),
            taps: taps.each_ref().map(Buffer::as_slice),
            tails: initial.conv_tails.each_ref().map(Buffer::as_slice),
            normed: [&[], &[]],
            positions: &initial.positions,
        }
    }
}

/// From the angles of one batch row to those of the next; 0 if all rows share them.
fn angle_stride(call: &Call) -> usize {
    if call.initial.given { call.plan.shape.time * call.plan.layer.rotary_pairs() } else { 0 }
}

/// cos and sin of all positions, cached while frequencies and T stay the same; per batch row if the call continues from a state.
fn angles(call: &Call, tables: &mut RowTables) {
    let l = call.plan;
    let (time, half, stride) = (l.shape.time, l.layer.rotary_pairs(), angle_stride(call));
    let Some(rope) = l.layer.rope().filter(|_| half > 0) else { return };
    let current = tables.angles_of.as_ref().is_some_and(|(known, t)| known == rope && *t >= time);
    if current && stride == 0 {
        return;
    }
    let (cos, sin, positions) = (tables.cos.as_mut_slice(), tables.sin.as_mut_slice(), &call.initial.positions);
    cos.par_chunks_exact_mut(half).zip(sin.par_chunks_exact_mut(half)).enumerate().for_each(|(i, (cos, sin))| {
        rope.angles(if stride > 0 { positions[i / time] } else { 0 } + i % time, cos, sin);
    });
    tables.angles_of = (stride == 0).then(|| (rope.clone(), time));
}

/// Fills the tables, then packs k and v into tiles, and q for the backward pass. The forward pass prepares queries tile by tile and reads keys
/// only transposed.
pub fn forward(call: &Call, backward: bool, tables: &mut RowTables, to: &mut PreparedRows, values: &mut PreparedValues) {
    let (l, inputs, s) = (call.plan, call.inputs, call.plan.shape);
    angles(call, tables);
    for ((buffer, aux), dim) in tables.taps.iter_mut().zip([AuxKind::ConvQ, AuxKind::ConvK, AuxKind::ConvV]).zip([s.d, s.d, s.e]) {
        if l.taps > 0 {
            channels_last(inputs.aux(aux), dim, l.taps, buffer.as_mut_slice());
        }
    }
    if l.layer.qk_norm().is_some() {
        let RowTables { cos, sin, taps, normed, .. } = tables;
        let sources = RowSources::before_norms(call, cos, sin, taps);
        normed.iter_mut().zip(NORMED).for_each(|(rows, which)| qk_norm::forward(&sources, which, rows));
    }
    let sources = RowSources::of_call(call, tables);
    let reads_v = |head: &Head| head.weighs_keys || head.chunked || head.variant.write.is_some();
    let keeps_v = !backward || l.heads.iter().any(reads_v);
    let (heads, kvs) = (l.head_count(), l.kv_count());
    let pack = |side: HeadRows, padded: usize, columns: usize, mut rows: Block<f32>, mut transposed: Block<f32>| {
        let (rows, transposed) = (rows.piece(), transposed.piece());
        call.tasks.with(|local| {
            dispatch(Pack { side, time: s.time, tile: l.tile, pitch: l.pitch, padded, columns, rows, transposed, local });
        });
    };
    let key_value = |tensor: Tensor, rows: &mut Buffer, by_rows: bool, transposed: &mut Buffer, by_columns: bool| {
        let rows = if by_rows { Blocks::pieces(&mut rows[..], kvs) } else { Blocks::empty(kvs) };
        let transposed = if by_columns { Blocks::pieces(&mut transposed[..], kvs) } else { Blocks::empty(kvs) };
        rows.par().zip(transposed.par()).enumerate().with_max_len(1).for_each(|(kv, (rows, transposed))| {
            let (transform, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
            let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
            match tensor {
                Tensor::V => pack(sources.values(transform, b, g), l.ep, s.e, rows, transposed),
                _ => pack(sources.keys(transform, b, g), l.dp, l.width, rows, transposed),
            }
        });
    };
    let (PreparedRows { q, k, kt }, PreparedValues { v, vt }) = (to, values);
    let keys_and_values = || {
        rayon::join(
            || key_value(Tensor::K, k, backward || l.layer.decays_by_channel(), kt, true),
            || key_value(Tensor::V, v, keeps_v, vt, backward),
        );
    };
    let queries = |q: &mut Buffer| {
        let passes = heads * l.branches();
        let places = Blocks::pieces(&mut q[..], passes).par().zip(Blocks::empty(passes).par());
        places.enumerate().with_max_len(1).for_each(|(n, (rows, none))| {
            let (range, n) = (KeyRange::ALL[n / heads], n % heads);
            if range == KeyRange::Near || l.far[n % s.heads].is_some() {
                pack(sources.query(n / s.heads, n % s.heads, range.is_far()), l.dp, 0, rows, none);
            }
        });
    };
    rayon::join(|| backward.then(|| queries(q)), keys_and_values);
}

/// Adds the gradients of q, k, v and of the parameters of their preparation, from those of the prepared rows, which it overwrites.
pub fn backward(call: &Call, tables: &RowTables, prepared: &mut TileGrads, own: &mut PrepareGrads, grads: &mut Grads<f32>) {
    let (l, s) = (call.plan, call.plan.shape);
    let (heads, pairs, whole) = (l.head_count(), s.batch * s.kv_heads, [0, s.time]);
    let (sources, len_of) = (&RowSources::of_call(call, tables), l.tensor_len());
    let TileGrads { dq, dk, dv, .. } = prepared;
    let PrepareGrads { dtaps, dnormed, dtensors, norm_room } = own;
    dtaps.iter_mut().chain(&mut *dnormed).chain(&mut *dtensors).for_each(|buffer| buffer.fill(0.0));
    let [to_q, to_k, to_v] = grads.columns(&s);
    // The gradients of normed rows are gathered first, since a norm may run over all heads.
    let [normed_q, normed_k] = dnormed;
    let [taps_q, taps_k, taps_v] = dtaps;
    let [tensors_q, tensors_k] = dtensors;
    let (normed_queries, normed_keys) = (normed_blocks(normed_q, &s, s.heads, &whole), normed_blocks(normed_k, &s, s.kv_heads, &whole));
    let queries = || {
        let [first, second] = normed_queries;
        let targets = to_q.blocks(1, &whole).par().zip(first.par().zip(second.par()));
        let places = targets.zip(Blocks::pieces(taps_q, heads).par()).zip(Blocks::pieces(tensors_q, heads).par());
        let (near, far) = dq.split_at_mut(heads * s.time * l.dp);
        let rows = Blocks::pieces(near, heads).par().zip(Blocks::pieces(far, heads).par());
        rows.zip(places).enumerate().with_max_len(1).for_each(
            |(n, ((near, far), (((mut to, (mut first, mut second)), mut dtaps), mut tensors)))| {
                let (b, h) = (n / s.heads, n % s.heads);
                for (mut rows, range) in [near, far].into_iter().zip(KeyRange::ALL) {
                    if range.is_far() && l.far[h].is_none() {
                        continue;
                    }
                    let transform = l.key_transforms[l.branch(h, range).key_transform];
                    let to = match l.layer.norm_source(transform) {
                        None => to.reborrow(),
                        Some(0) => first.reborrow(),
                        Some(_) => second.reborrow(),
                    };
                    let (side, len) = (sources.query(b, h, range.is_far()), call.length(b));
                    let tensors = tensors.piece().get_mut(range as usize * len_of..).unwrap_or_default();
                    let (rows, to) = (rows.piece(), InputGrads { dx: to, dtaps: dtaps.piece() });
                    dispatch(UnpackBackward { side, transform, len, rows, padded: l.dp, to, tensors });
                }
            },
        );
    };
    let keys = |tensor: Tensor,
                from: &mut Buffer,
                to: Disjoint<f32>,
                [first, second]: [Blocks<f32>; 2],
                dtaps: &mut Buffer,
                dtensors: &mut [f32]| {
        let padded = if tensor == Tensor::K { l.dp } else { l.ep };
        let size = l.tp() * padded;
        // One task per kv head, with its rows in every key transform.
        let axes = Axes {
            batch: Axis { count: pairs, step: size },
            heads: Axis { count: l.key_transforms.len(), step: pairs * size },
            rows: Axis { count: 1, step: 0 },
            width: size,
        };
        let places = to.blocks(1, &whole).par().zip(first.par().zip(second.par())).zip(Blocks::pieces(dtaps, pairs).par());
        let places = places.zip(Blocks::pieces(dtensors, pairs).par());
        Disjoint::new(from, axes).blocks(l.key_transforms.len(), &[0, 1]).par().zip(places).enumerate().with_max_len(1).for_each(
            |(pair, (mut from, (((mut to, (mut first, mut second)), mut dtaps), mut dtensors)))| {
                let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
                for index in (0..l.key_transforms.len()).filter(|&transform| l.group_has_transform(g, transform)) {
                    let transform = l.key_transforms[index];
                    let side = if tensor == Tensor::K { sources.keys(index, b, g) } else { sources.values(index, b, g) };
                    let (rows, len) = (from.row(index, 0), call.length(b));
                    let dx = match l.layer.norm_source(transform).filter(|_| tensor == Tensor::K) {
                        None => to.reborrow(),
                        Some(0) => first.reborrow(),
                        Some(_) => second.reborrow(),
                    };
                    let tensors = dtensors.piece().get_mut(index * len_of..).unwrap_or_default();
                    let to = InputGrads { dx, dtaps: dtaps.piece() };
                    dispatch(UnpackBackward { side, transform, len, rows, padded, to, tensors });
                }
            },
        );
    };
    let none = [Blocks::empty(pairs), Blocks::empty(pairs)];
    let keys_and_values =
        || rayon::join(|| keys(Tensor::K, dk, to_k, normed_keys, taps_k, tensors_k), || keys(Tensor::V, dv, to_v, none, taps_v, &mut []));
    rayon::join(queries, keys_and_values);
    if let Some(norm) = l.layer.qk_norm() {
        for (((tensor, aux), rows), count) in NORMED.into_iter().zip(&mut *dnormed).zip([s.heads, s.kv_heads]) {
            for (conv, rows) in l.layer.norm_sources().zip(rows.chunks_exact_mut(s.rows() * count * s.d)) {
                let dweight = if norm.has_weight() { grads.aux(aux) } else { &mut [] };
                qk_norm::backward(sources, ((tensor, conv), aux), rows, dweight, norm_room);
                let [to_q, to_k, _] = grads.columns(&s);
                let to = if tensor == Tensor::Q { to_q } else { to_k };
                let filters = Blocks::pieces(&mut dtaps[tensor as usize], s.batch * count).par();
                to.blocks(1, &whole).par().zip(filters).enumerate().with_max_len(1).for_each(|(n, (to, mut dtaps))| {
                    let (b, head) = (n / count, n % count);
                    let (side, len) = (sources.before_norm((tensor, conv), b, head), call.length(b));
                    let from = &rows[b * s.time * count * s.d + head * s.d..];
                    let to = InputGrads { dx: to, dtaps: dtaps.piece() };
                    dispatch(ConvBackward { side, len, from, stride: count * s.d, to });
                });
            }
        }
    }
    for (i, (aux, dim)) in [(AuxKind::ConvQ, s.d), (AuxKind::ConvK, s.d), (AuxKind::ConvV, s.e)].into_iter().enumerate() {
        if l.taps > 0 {
            for dtaps in dtaps[i].chunks_exact(s.widths()[i] * l.taps) {
                add_channels_first(dtaps, dim, l.taps, grads.aux(aux));
            }
        }
    }
    tensors_backward(l, dtensors, grads);
}

/// Adds the gradients of projections and learned features, from those per batch row and head.
fn tensors_backward(l: &CallPlan, [queries, keys]: &[Buffer; 2], grads: &mut Grads<f32>) {
    let (s, len) = (l.shape, l.tensor_len());
    let add = |grads: &mut Grads<f32>, transform: &KeyTransform, values: &[f32], names: [AuxKind; 3], head: usize| {
        let mut from = values;
        for (aux, count) in names.into_iter().zip(transform.tensor_lens(s.d)) {
            let (own, rest) = from.split_at(count);
            from = rest;
            if count > 0 {
                let to = &mut grads.aux(transform.tensor(aux))[head * count..][..count];
                to.iter_mut().zip(own).for_each(|(to, from)| *to += from);
            }
        }
    };
    for (n, values) in queries.chunks_exact((l.branches() * len).max(1)).enumerate() {
        let h = n % s.heads;
        for (head, values) in [Some(&l.heads[h]), l.far[h].as_ref()].into_iter().zip(values.chunks_exact(len)) {
            let Some(head) = head else { continue };
            let names = [AuxKind::DimQ, AuxKind::FeatureQ, AuxKind::FeatureQBias];
            add(grads, &l.key_transforms[head.key_transform], values, names, h);
        }
    }
    for (i, values) in keys.chunks_exact(len.max(1)).enumerate() {
        let (g, transform) = (i / l.key_transforms.len() % s.kv_heads, &l.key_transforms[i % l.key_transforms.len()]);
        add(grads, transform, values, [AuxKind::DimK, AuxKind::FeatureK, AuxKind::FeatureKBias], g);
    }
}

/// Gradients of normed rows [B, T, heads·d] in blocks per batch row and head, of each source.
fn normed_blocks<'a>(rows: &'a mut [f32], s: &Shape, heads: usize, whole: &'a [usize]) -> [Blocks<'a, f32>; 2] {
    let axes = Axes {
        batch: Axis { count: s.batch, step: s.time * heads * s.d },
        heads: Axis { count: heads, step: s.d },
        rows: Axis { count: s.time, step: heads * s.d },
        width: s.d,
    };
    let (first, second) = rows.split_at_mut(rows.len().min(s.rows() * heads * s.d));
    let blocks = |rows: &'a mut [f32], axes| {
        if rows.is_empty() { Blocks::empty(s.batch * heads) } else { Disjoint::new(rows, axes).blocks(1, whole) }
    };
    [blocks(first, axes), blocks(second, axes)]
}
