//! Preparation of q, k and v: convolution, QK norm, RoPE and feature map, packed into padded rows and tiles per head.

mod backward;
pub(in crate::fused) mod channel_decay;
pub(in crate::fused) mod gates;
mod qk_norm;

use rayon::prelude::*;

use crate::fused::call::Call;
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::{CallPlan, HeadPlan};
pub(in crate::fused) use crate::fused::prepare::backward::PrepareGrads;
pub use crate::fused::prepare::backward::backward;
use crate::fused::prepare::qk_norm::NORMED;
use crate::layer::{HeadRows, QkvTensor, RowSources, channels_last};
use crate::{AuxKind, Buffer, Error, KeyRange, Rope};
use termwise_kernels::disjoint::{Block, Blocks};
use termwise_kernels::simd::{Simd, Task, dispatch};
use termwise_kernels::{TILE, transpose};

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
    let reads_v = |head: &HeadPlan| head.weighs_keys || head.chunked || head.variant.write.is_some();
    let keeps_v = !backward || l.heads.iter().any(reads_v);
    let (heads, kvs) = (l.head_count(), l.kv_count());
    let pack = |side: HeadRows, padded: usize, columns: usize, mut rows: Block<f32>, mut transposed: Block<f32>| {
        let (rows, transposed) = (rows.piece(), transposed.piece());
        call.tasks.with(|local| {
            dispatch(Pack { side, time: s.time, tile: l.tile, pitch: l.pitch, padded, columns, rows, transposed, local });
        });
    };
    let key_value = |tensor: QkvTensor, rows: &mut Buffer, by_rows: bool, transposed: &mut Buffer, by_columns: bool| {
        let rows = if by_rows { Blocks::pieces(&mut rows[..], kvs) } else { Blocks::empty(kvs) };
        let transposed = if by_columns { Blocks::pieces(&mut transposed[..], kvs) } else { Blocks::empty(kvs) };
        rows.par().zip(transposed.par()).enumerate().with_max_len(1).for_each(|(kv, (rows, transposed))| {
            let (transform, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
            let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
            match tensor {
                QkvTensor::V => pack(sources.values(transform, b, g), l.ep, s.e, rows, transposed),
                _ => pack(sources.keys(transform, b, g), l.dp, l.width, rows, transposed),
            }
        });
    };
    let (PreparedRows { q, k, kt }, PreparedValues { v, vt }) = (to, values);
    let keys_and_values = || {
        rayon::join(
            || key_value(QkvTensor::K, k, backward || l.layer.decays_by_channel(), kt, true),
            || key_value(QkvTensor::V, v, keeps_v, vt, backward),
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

impl HeadRows<'_> {
    /// Rows `first`.. of a head, prepared, into `rows` [count, padded]; rows after T become zero.
    #[inline(always)]
    pub fn fill<S: Simd>(&self, simd: S, first: usize, time: usize, rows: &mut [f32], padded: usize) {
        simd.call(Fill { side: *self, first, time, rows, padded });
    }
}

/// [`HeadRows::fill`], compiled once for all callers.
struct Fill<'a> {
    side: HeadRows<'a>,
    first: usize,
    time: usize,
    rows: &'a mut [f32],
    padded: usize,
}

impl Task for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let side = &self.side;
        for (t, row) in (self.first..).zip(self.rows.chunks_exact_mut(self.padded)) {
            // The stride of rows is too large for the hardware prefetcher.
            let ahead = side.x.as_ptr().wrapping_add((t + 8) * side.stride);
            for line in (0..side.dim).step_by(16) {
                simd.prefetch(ahead.wrapping_add(line));
            }
            if t < self.time { side.forward(simd, t, row) } else { row.fill(0.0) }
        }
    }
}

/// Packs a whole kv head: by rows [Tp, padded], by transposed tiles [tiles, columns, pitch], or both; an empty slice is skipped.
pub struct Pack<'a> {
    pub side: HeadRows<'a>,
    pub time: usize,
    /// Positions of a tile, and the same padded to whole vectors.
    pub tile: usize,
    pub pitch: usize,
    pub padded: usize,
    /// Rows of a transposed tile.
    pub columns: usize,
    pub rows: &'a mut [f32],
    pub transposed: &'a mut [f32],
    /// Memory for one tile of rows [pitch, padded], if `rows` is empty.
    pub local: &'a mut [f32],
}

impl Task for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (padded, dim, pitch) = (self.padded, self.side.features.width, self.pitch);
        for (tile, first) in (0..self.time).step_by(self.tile).enumerate() {
            let rows: &mut [f32] = if self.rows.is_empty() {
                &mut self.local[..pitch * padded]
            } else {
                // Rows past the tile belong to the next one, which overwrites them.
                &mut self.rows[first * padded..][..pitch * padded]
            };
            self.side.fill(simd, first, self.time, rows, padded);
            if self.transposed.is_empty() {
                continue;
            }
            transpose_tile(simd, rows, padded, &mut self.transposed[tile * self.columns * pitch..][..dim * pitch], pitch);
        }
    }
}

/// Rows of a tile [pitch, padded] as columns [dimension, pitch].
#[inline(always)]
pub fn transpose_tile<S: Simd>(simd: S, rows: &[f32], padded: usize, columns: &mut [f32], pitch: usize) {
    let dim = columns.len() / pitch;
    // Dimensions after dim are transposed with the rest of their block of 16, but not kept.
    let mut spare = [0.0f32; 16 * TILE];
    for column in (0..dim).step_by(16) {
        let whole = column + 16 <= dim;
        for row in (0..pitch).step_by(16) {
            let to = if whole { &mut columns[column * pitch + row..] } else { &mut spare[row..] };
            transpose(simd, &rows[row * padded + column..], padded, to, pitch);
        }
        if !whole {
            columns[column * pitch..].copy_from_slice(&spare[..(dim - column) * pitch]);
        }
    }
}
