//! The backward pass of the preparation: from the gradients of prepared rows to those of q, k, v and the parameters.

use rayon::prelude::*;

use crate::fused::call::Call;
use crate::fused::gradients::TileGrads;
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::CallPlan;
use crate::fused::prepare::qk_norm::NORMED;
use crate::fused::prepare::{RowTables, qk_norm};
use crate::layer::{FeatureGrads, HeadRows, KeyTransform, QkvTensor, RowSources};
use crate::parts::rope::rotate_back;
use crate::{AuxKind, Buffer, Error, Grads, KeyRange, Shape};
use termwise_kernels::disjoint::{Axes, Axis, Block, Blocks, Disjoint};
use termwise_kernels::simd::{Simd, Task, dispatch};

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
    let keys = |tensor: QkvTensor,
                from: &mut Buffer,
                to: Disjoint<f32>,
                [first, second]: [Blocks<f32>; 2],
                dtaps: &mut Buffer,
                dtensors: &mut [f32]| {
        let padded = if tensor == QkvTensor::K { l.dp } else { l.ep };
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
                    let side = if tensor == QkvTensor::K { sources.keys(index, b, g) } else { sources.values(index, b, g) };
                    let (rows, len) = (from.row(index, 0), call.length(b));
                    let dx = match l.layer.norm_source(transform).filter(|_| tensor == QkvTensor::K) {
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
    let keys_and_values = || {
        rayon::join(|| keys(QkvTensor::K, dk, to_k, normed_keys, taps_k, tensors_k), || keys(QkvTensor::V, dv, to_v, none, taps_v, &mut []))
    };
    rayon::join(queries, keys_and_values);
    if let Some(norm) = l.layer.qk_norm() {
        for (((tensor, aux), rows), count) in NORMED.into_iter().zip(&mut *dnormed).zip([s.heads, s.kv_heads]) {
            for (conv, rows) in l.layer.norm_sources().zip(rows.chunks_exact_mut(s.rows() * count * s.d)) {
                let dweight = if norm.has_weight() { grads.aux(aux) } else { &mut [] };
                qk_norm::backward(sources, ((tensor, conv), aux), rows, dweight, norm_room);
                let [to_q, to_k, _] = grads.columns(&s);
                let to = if tensor == QkvTensor::Q { to_q } else { to_k };
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

/// Where the gradients of the inputs of one head are added.
pub struct InputGrads<'a> {
    /// Rows of q, k or v.
    pub dx: Block<'a, f32>,
    /// Convolution filters, laid out like [`HeadRows::taps`].
    pub dtaps: &'a mut [f32],
}

/// Backward pass through the short convolution, from the gradients of one head's rows before the norm, which are `stride` apart.
pub struct ConvBackward<'a> {
    pub side: HeadRows<'a>,
    pub len: usize,
    pub from: &'a [f32],
    pub stride: usize,
    pub to: InputGrads<'a>,
}

impl Task for ConvBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut buffer = [0.0f32; 256];
        let row = &mut buffer[..self.side.dim];
        for t in 0..self.len {
            row.copy_from_slice(&self.from[t * self.stride..][..self.side.dim]);
            self.side.before_map_backward(simd, t, row, &mut self.to);
        }
    }
}

/// Backward pass from the prepared rows of one head [T, padded] to its inputs.
pub struct UnpackBackward<'a> {
    pub side: HeadRows<'a>,
    pub transform: KeyTransform,
    pub len: usize,
    pub rows: &'a mut [f32],
    pub padded: usize,
    pub to: InputGrads<'a>,
    /// Gradients of the tensors of the key transform; empty if it reads none.
    pub tensors: &'a mut [f32],
}

impl Task for UnpackBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        for (t, row) in self.rows.chunks_exact_mut(self.padded).take(self.len).enumerate() {
            let tensors = match self.tensors.is_empty() {
                true => FeatureGrads::none(),
                false => FeatureGrads::of(&self.transform, self.side.dim, self.tensors),
            };
            self.side.backward(simd, t, &mut row[..self.side.features.width], &mut self.to, tensors);
        }
    }
}

impl HeadRows<'_> {
    /// Adds the gradient of row t, from that of the prepared row, to those of the inputs and of the parameters of the features.
    #[inline(always)]
    fn backward<S: Simd>(&self, simd: S, t: usize, row: &mut [f32], to: &mut InputGrads, features: FeatureGrads) {
        let mut own;
        let row = if self.features.only_scales() {
            self.features.scale_row(row);
            row
        } else {
            let mut x = [0.0f32; 256];
            let x = &mut x[..self.dim];
            own = [0.0f32; 256];
            self.before_map(simd, t, x);
            self.features.backward(simd, x, row, &mut own[..self.dim], features);
            &mut own[..self.dim]
        };
        self.before_map_backward(simd, t, row, to);
    }

    /// Adds the gradient of row t, from that of the row up to φ, which it changes.
    #[inline(always)]
    fn before_map_backward<S: Simd>(&self, simd: S, t: usize, row: &mut [f32], to: &mut InputGrads) {
        let InputGrads { dx, dtaps } = to;
        if !self.cos.is_empty() {
            let half = self.pairs;
            rotate_back(row, &self.cos[t * half..][..half], &self.sin[t * half..][..half]);
        }
        if self.taps.is_empty() {
            dx.row(0, t).iter_mut().zip(&*row).for_each(|(dx, g)| *dx += *g);
            return;
        }
        let mut buffer = [0.0f32; 256];
        let scratch = &mut buffer[..self.dim];
        self.filtered(t, scratch);
        let one = simd.splat(1.0);
        for i in (0..scratch.len()).step_by(S::LANES) {
            let x = simd.load_at(scratch, i);
            let s = simd.sigmoid(x);
            simd.store_at(scratch, i, simd.mul(s, simd.fma(x, simd.sub(one, s), one)));
        }
        row.iter_mut().zip(&*scratch).for_each(|(g, slope)| *g *= *slope);
        let w = self.taps.len() / self.dim;
        for j in 0..w {
            let Some(source) = (t + j + 1).checked_sub(w) else { continue };
            let (taps, dtaps) = (&self.taps[j * self.dim..][..self.dim], &mut dtaps[j * self.dim..][..self.dim]);
            for ((((dx, dtap), &g), &tap), &x) in dx.row(0, source).iter_mut().zip(dtaps).zip(&*row).zip(taps).zip(self.raw(source)) {
                *dx += g * tap;
                *dtap += g * x;
            }
        }
    }
}
