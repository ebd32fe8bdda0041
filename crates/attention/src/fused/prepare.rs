//! Before and after the tiles: convolution, RoPE and feature map turn the rows of q, k and v into packed, padded
//! tiles by head, and the gradients of these back into those of q, k and v.

mod head_rows;
mod qk_norm;

use rayon::prelude::*;

use crate::fused::plan::{Head, Layout};
use crate::fused::prepare::head_rows::{Codes, Pack, Unfilter, Unpack};
pub use crate::fused::prepare::head_rows::{HeadRows, transpose_tile};
use crate::fused::prepare::qk_norm::NORMED;
use crate::fused::scratch::CallScratch;
use crate::kernels::disjoint::{Axes, Axis, Block, Blocks, Disjoint};
use crate::kernels::simd::dispatch;
use crate::layer::{Class, Features};
use crate::{Buffer, Error, Extra, Grads, Inputs, Shape};

/// Filters [heads·dimension, w] with the channel last: [heads, w, dimension].
fn channels_last(taps: &[f32], dim: usize, w: usize, out: &mut [f32]) {
    for (head, out) in taps.chunks_exact(dim * w).zip(out.chunks_exact_mut(dim * w)) {
        for (channel, taps) in head.chunks_exact(w).enumerate() {
            for (j, &tap) in taps.iter().enumerate() {
                out[j * dim + channel] = tap;
            }
        }
    }
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

/// The three tensors that are prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    /// q
    Q,
    /// k
    K,
    /// v
    V,
}

/// What all [`HeadRows`] of a call refer to.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    inputs: &'a Inputs<'a, f32>,
    cos: &'a [f32],
    sin: &'a [f32],
    /// From the angles of one batch row to those of the next; 0 where all share them.
    angle_stride: usize,
    /// Filters of q, k and v, channel last.
    taps: [&'a [f32]; 3],
    /// Inputs before the first position, [B, heads, w − 1, dimension]; empty where there are none.
    tails: [&'a [f32]; 3],
    /// Normed rows of q and k, [sources, B, T, heads·d]; empty where there are none.
    normed: [&'a [f32]; 2],
    /// Where batch rows start; empty where all do at 0.
    positions: &'a [usize],
}

impl<'a> Sources<'a> {
    /// Of a call whose scratch has been prepared.
    pub fn new(l: &Layout, inputs: &'a Inputs<'a, f32>, w: &'a CallScratch) -> Sources<'a> {
        let slices = |buffers: &'a [Buffer; 3]| buffers.each_ref().map(|buffer| buffer.as_slice());
        Sources {
            inputs,
            cos: &w.cos,
            sin: &w.sin,
            angle_stride: angle_stride(l, w),
            taps: slices(&w.taps),
            tails: slices(&w.initial.tails),
            normed: w.normed.each_ref().map(|buffer| buffer.as_slice()),
            positions: if w.initial.given { &w.initial.positions } else { &[] },
        }
    }

    /// The queries of head h in batch row b, for its near or its far keys.
    pub fn query(&self, l: &Layout, b: usize, h: usize, far: bool) -> HeadRows<'a> {
        let head = l.pass(h, far);
        let class = l.classes[head.class];
        self.rows(l, class, Tensor::Q, b, h, class.of_queries(self.inputs, l.shape.d, head, h))
    }

    /// The keys of kv head g in batch row b.
    pub fn keys(&self, l: &Layout, class: usize, b: usize, g: usize) -> HeadRows<'a> {
        let class = l.classes[class];
        self.rows(l, class, Tensor::K, b, g, class.of_keys(self.inputs, l.shape.d, g))
    }

    /// The values of kv head g in batch row b.
    pub fn values(&self, l: &Layout, class: usize, b: usize, g: usize) -> HeadRows<'a> {
        self.rows(l, l.classes[class], Tensor::V, b, g, Features::none(l.shape.e))
    }

    /// One head of one tensor in one batch row as the norm of q and k takes it: after the short convolution, or as it is.
    pub fn before_norm(&self, l: &Layout, (tensor, conv): (Tensor, bool), b: usize, head: usize) -> HeadRows<'a> {
        self.rows(l, Class { conv, ..Class::plain(l.shape.d) }, tensor, b, head, Features::none(l.shape.d))
    }

    /// One head of one tensor in one batch row.
    fn rows(&self, l: &Layout, class: Class, tensor: Tensor, b: usize, head: usize, features: Features<'a>) -> HeadRows<'a> {
        let (s, i) = (&l.shape, tensor as usize);
        let (heads, dim) = [(s.heads, s.d), (s.kv_heads, s.d), (s.kv_heads, s.e)][i];
        let stride = self.inputs.x[i].stride(heads * dim);
        let rope = class.rope && tensor != Tensor::V;
        // Normed rows have been through the convolution, if their class has one.
        let normed = l.layer.norm_source(class).filter(|_| tensor != Tensor::V);
        let (x, stride) = match normed {
            Some(source) => (&self.normed[i][source * s.rows() * heads * dim..], heads * dim),
            None => (self.inputs.x[i].values(), stride),
        };
        let conv = class.conv && normed.is_none();
        HeadRows {
            x: &x[b * s.time * stride + head * dim..],
            stride,
            dim,
            pairs: l.layer.rotary_pairs(),
            cos: if rope { &self.cos[b * self.angle_stride..] } else { &[] },
            sin: if rope { &self.sin[b * self.angle_stride..] } else { &[] },
            taps: if conv { &self.taps[i][head * dim * l.taps..][..dim * l.taps] } else { &[] },
            tail: if conv && !self.tails[i].is_empty() {
                let size = dim * (l.taps - 1);
                &self.tails[i][(b * heads + head) * size..][..size]
            } else {
                &[]
            },
            features,
            codes: class.bits.filter(|_| tensor != Tensor::Q).map(|(bits, sinks)| Codes {
                bits,
                from: sinks.saturating_sub(self.positions.get(b).copied().unwrap_or(0)),
                channels: class.channels_of(self.inputs, s.d, head).filter(|_| tensor == Tensor::K),
            }),
        }
    }
}

fn angle_stride(l: &Layout, w: &CallScratch) -> usize {
    if w.initial.given { l.shape.time * l.layer.rotary_pairs() } else { 0 }
}

/// cos and sin of all positions, kept while frequencies and T stay the same; of each batch row where rows start at their own.
fn angles(l: &Layout, w: &mut CallScratch) {
    let (time, half, stride) = (l.shape.time, l.layer.rotary_pairs(), angle_stride(l, w));
    let Some(rope) = l.layer.rope().filter(|_| half > 0) else { return };
    let current = w.angles_of.as_ref().is_some_and(|(known, t)| known == rope && *t >= time);
    if current && stride == 0 {
        return;
    }
    let (cos, sin, positions) = (w.cos.as_mut_slice(), w.sin.as_mut_slice(), &w.initial.positions);
    cos.par_chunks_exact_mut(half).zip(sin.par_chunks_exact_mut(half)).enumerate().for_each(|(i, (cos, sin))| {
        rope.angles(if stride > 0 { positions[i / time] } else { 0 } + i % time, cos, sin);
    });
    w.angles_of = (stride == 0).then(|| (rope.clone(), time));
}

/// The packed tiles of k and v, and for the backward pass of q; the forward pass prepares queries tile by tile and reads keys only transposed.
pub fn forward(l: &Layout, inputs: &Inputs<f32>, w: &mut CallScratch, backward: bool) -> Result<(), Error> {
    let s = l.shape;
    angles(l, w);
    for ((buffer, extra), dim) in w.taps.iter_mut().zip([Extra::ConvQ, Extra::ConvK, Extra::ConvV]).zip([s.d, s.d, s.e]) {
        if l.taps > 0 {
            channels_last(inputs.extra(extra), dim, l.taps, buffer.as_mut_slice());
        }
    }
    if l.layer.qk_norm().is_some() {
        let mut normed = std::mem::take(&mut w.normed);
        let sources = Sources::new(l, inputs, w);
        normed.iter_mut().zip(NORMED).for_each(|(rows, which)| qk_norm::forward(l, inputs, &sources, which, rows));
        w.normed = normed;
    }
    w.tasks.ensure(l.pitch * l.dp.max(l.ep))?;
    let [mut q, mut k, mut kt, mut v, mut vt] = [&mut w.q, &mut w.k, &mut w.kt, &mut w.v, &mut w.vt].map(std::mem::take);
    let (sources, tasks) = (Sources::new(l, inputs, w), &w.tasks);
    let reads_v = |head: &Head| head.weighs_keys || head.chunked || head.variant.write.is_some();
    let keeps_v = !backward || l.heads.iter().any(reads_v);
    let (heads, kvs) = (l.head_count(), l.kv_count());
    let pack = |side: HeadRows, padded: usize, columns: usize, mut rows: Block<f32>, mut transposed: Block<f32>| {
        let (rows, transposed) = (rows.piece(), transposed.piece());
        tasks.with(|local| {
            dispatch(Pack { side, time: s.time, tile: l.tile, pitch: l.pitch, padded, columns, rows, transposed, local });
        });
    };
    let key_value = |tensor: Tensor, rows: &mut Buffer, by_rows: bool, transposed: &mut Buffer, by_columns: bool| {
        let rows = if by_rows { Blocks::pieces(&mut rows[..], kvs) } else { Blocks::empty(kvs) };
        let transposed = if by_columns { Blocks::pieces(&mut transposed[..], kvs) } else { Blocks::empty(kvs) };
        rows.par().zip(transposed.par()).enumerate().with_max_len(1).for_each(|(kv, (rows, transposed))| {
            let (class, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
            let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
            match tensor {
                Tensor::V => pack(sources.values(l, class, b, g), l.ep, s.e, rows, transposed),
                _ => pack(sources.keys(l, class, b, g), l.dp, l.width, rows, transposed),
            }
        });
    };
    let keys_and_values = || {
        rayon::join(
            || key_value(Tensor::K, &mut k, backward || l.layer.decays_by_channel(), &mut kt, true),
            || key_value(Tensor::V, &mut v, keeps_v, &mut vt, backward),
        );
    };
    let queries = |q: &mut Buffer| {
        let passes = heads * l.passes();
        let places = Blocks::pieces(&mut q[..], passes).par().zip(Blocks::empty(passes).par());
        places.enumerate().with_max_len(1).for_each(|(n, (rows, none))| {
            let (far, n) = (n >= heads, n % heads);
            if !far || l.far[n % s.heads].is_some() {
                pack(sources.query(l, n / s.heads, n % s.heads, far), l.dp, 0, rows, none);
            }
        });
    };
    rayon::join(|| backward.then(|| queries(&mut q)), keys_and_values);
    (w.q, w.k, w.kt, w.v, w.vt) = (q, k, kt, v, vt);
    Ok(())
}

/// Adds the gradients of q, k, v and of all that prepares them, from those of the prepared tensors.
pub fn backward(l: &Layout, inputs: &Inputs<f32>, w: &mut CallScratch, grads: &mut Grads<f32>) {
    let s = l.shape;
    let (heads, pairs, whole) = (l.head_count(), s.batch * s.kv_heads, [0, s.time]);
    let [mut dq, mut dk, mut dv] = [&mut w.dq, &mut w.dk, &mut w.dv].map(std::mem::take);
    let mut dtaps = std::mem::take(&mut w.dtaps);
    dtaps.iter_mut().for_each(|buffer| buffer.fill(0.0));
    let (mut dnormed, mut room) = (std::mem::take(&mut w.dnormed), std::mem::take(&mut w.norm_room));
    dnormed.iter_mut().for_each(|buffer| buffer.fill(0.0));
    let mut dtensors = std::mem::take(&mut w.dtensors);
    dtensors.iter_mut().for_each(|buffer| buffer.fill(0.0));
    let sources = &Sources::new(l, inputs, w);
    let [to_q, to_k, to_v] = grads.columns(&s);
    // Rows that are normed have their gradients gathered first, since a norm may run over all heads.
    let [normed_q, normed_k] = &mut dnormed;
    let [taps_q, taps_k, taps_v] = &mut dtaps;
    let [tensors_q, tensors_k] = &mut dtensors;
    let (normed_queries, normed_keys) = (normed_blocks(normed_q, &s, s.heads, &whole), normed_blocks(normed_k, &s, s.kv_heads, &whole));
    let len_of = l.tensor_len();
    let queries = |dq: &mut Buffer| {
        let [first, second] = normed_queries;
        let targets = to_q.blocks(1, &whole).par().zip(first.par().zip(second.par()));
        let places = targets.zip(Blocks::pieces(taps_q, heads).par()).zip(Blocks::pieces(tensors_q, heads).par());
        let (near, far) = dq.split_at_mut(heads * s.time * l.dp);
        let rows = Blocks::pieces(near, heads).par().zip(Blocks::pieces(far, heads).par());
        rows.zip(places).enumerate().with_max_len(1).for_each(
            |(n, ((near, far), (((mut to, (mut first, mut second)), mut dtaps), mut tensors)))| {
                let (b, h) = (n / s.heads, n % s.heads);
                for (mut rows, is_far) in [(near, false), (far, true)] {
                    if is_far && l.far[h].is_none() {
                        continue;
                    }
                    let class = l.classes[l.pass(h, is_far).class];
                    let to = match l.layer.norm_source(class) {
                        None => to.again(),
                        Some(0) => first.again(),
                        Some(_) => second.again(),
                    };
                    let (side, len) = (sources.query(l, b, h, is_far), inputs.length(b, &s));
                    let tensors = tensors.piece().get_mut(is_far as usize * len_of..).unwrap_or_default();
                    let (rows, dtaps) = (rows.piece(), dtaps.piece());
                    dispatch(Unpack { side, class, len, rows, padded: l.dp, to, dtaps, tensors });
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
        // One task for each kv head, with its rows in every class.
        let axes = Axes {
            batch: Axis { count: pairs, step: size },
            heads: Axis { count: l.classes.len(), step: pairs * size },
            rows: Axis { count: 1, step: 0 },
            width: size,
        };
        let places = to.blocks(1, &whole).par().zip(first.par().zip(second.par())).zip(Blocks::pieces(dtaps, pairs).par());
        let places = places.zip(Blocks::pieces(dtensors, pairs).par());
        Disjoint::new(from, axes).blocks(l.classes.len(), &[0, 1]).par().zip(places).enumerate().with_max_len(1).for_each(
            |(pair, (mut from, (((mut to, (mut first, mut second)), mut dtaps), mut dtensors)))| {
                let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
                for index in (0..l.classes.len()).filter(|&class| l.group_has_class(g, class)) {
                    let class = l.classes[index];
                    let side = if tensor == Tensor::K { sources.keys(l, index, b, g) } else { sources.values(l, index, b, g) };
                    let (rows, len) = (from.row(index, 0), inputs.length(b, &s));
                    let dtaps = dtaps.piece();
                    let to = match l.layer.norm_source(class).filter(|_| tensor == Tensor::K) {
                        None => to.again(),
                        Some(0) => first.again(),
                        Some(_) => second.again(),
                    };
                    let tensors = dtensors.piece().get_mut(index * len_of..).unwrap_or_default();
                    dispatch(Unpack { side, class, len, rows, padded, to, dtaps, tensors });
                }
            },
        );
    };
    let none = [Blocks::empty(pairs), Blocks::empty(pairs)];
    let keys_and_values = |dk: &mut Buffer| {
        rayon::join(|| keys(Tensor::K, dk, to_k, normed_keys, taps_k, tensors_k), || keys(Tensor::V, &mut dv, to_v, none, taps_v, &mut []));
    };
    rayon::join(|| queries(&mut dq), || keys_and_values(&mut dk));
    if let Some(norm) = l.layer.qk_norm() {
        for (((tensor, extra), rows), count) in NORMED.into_iter().zip(&mut dnormed).zip([s.heads, s.kv_heads]) {
            for (conv, rows) in l.layer.norm_sources().zip(rows.chunks_exact_mut(s.rows() * count * s.d)) {
                let dweight = if norm.has_weight() { grads.extra(extra) } else { &mut [] };
                qk_norm::backward(l, inputs, sources, ((tensor, conv), extra), rows, dweight, &mut room);
                let [to_q, to_k, _] = grads.columns(&s);
                let to = if tensor == Tensor::Q { to_q } else { to_k };
                let filters = Blocks::pieces(&mut dtaps[tensor as usize], s.batch * count).par();
                to.blocks(1, &whole).par().zip(filters).enumerate().with_max_len(1).for_each(|(n, (to, mut dtaps))| {
                    let (b, head) = (n / count, n % count);
                    let (side, len) = (sources.before_norm(l, (tensor, conv), b, head), inputs.length(b, &s));
                    let from = &rows[b * s.time * count * s.d + head * s.d..];
                    dispatch(Unfilter { side, len, from, stride: count * s.d, to, dtaps: dtaps.piece() });
                });
            }
        }
    }
    for (i, (extra, dim)) in [(Extra::ConvQ, s.d), (Extra::ConvK, s.d), (Extra::ConvV, s.e)].into_iter().enumerate() {
        if l.taps > 0 {
            for dtaps in dtaps[i].chunks_exact(s.widths()[i] * l.taps) {
                add_channels_first(dtaps, dim, l.taps, grads.extra(extra));
            }
        }
    }
    tensors_backward(l, &dtensors, grads);
    (w.dq, w.dk, w.dv, w.dtaps) = (dq, dk, dv, dtaps);
    (w.dnormed, w.norm_room, w.dtensors) = (dnormed, room, dtensors);
}

/// Adds the gradients of projections and learned features, which tasks have left by batch row and head.
fn tensors_backward(l: &Layout, [queries, keys]: &[Buffer; 2], grads: &mut Grads<f32>) {
    let (s, len) = (l.shape, l.tensor_len());
    let add = |grads: &mut Grads<f32>, class: &Class, values: &[f32], names: [Extra; 3], head: usize| {
        let mut from = values;
        for (extra, count) in names.into_iter().zip(class.tensor_lens(s.d)) {
            let (own, rest) = from.split_at(count);
            from = rest;
            if count > 0 {
                let to = &mut grads.extra(class.tensor(extra))[head * count..][..count];
                to.iter_mut().zip(own).for_each(|(to, from)| *to += from);
            }
        }
    };
    for (n, values) in queries.chunks_exact((l.passes() * len).max(1)).enumerate() {
        let h = n % s.heads;
        for (far, values) in [false, true].into_iter().zip(values.chunks_exact(len)) {
            let Some(head) = (if far { l.far[h].as_ref() } else { Some(&l.heads[h]) }) else { continue };
            let names = [Extra::DimQ, Extra::FeatureQ, Extra::FeatureQBias];
            add(grads, &l.classes[head.class], values, names, h);
        }
    }
    for (i, values) in keys.chunks_exact(len.max(1)).enumerate() {
        let (g, class) = (i / l.classes.len() % s.kv_heads, &l.classes[i % l.classes.len()]);
        add(grads, class, values, [Extra::DimK, Extra::FeatureK, Extra::FeatureKBias], g);
    }
}

/// Gradients of normed rows [B, T, heads·d] by batch row and head, of each source.
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
