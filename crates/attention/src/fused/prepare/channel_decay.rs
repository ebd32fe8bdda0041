//! Decays per channel: x_ts = Σ_i q_ti·k_si·e^{c_ti − c_si}, by products of tiles in which no exponent is positive
//!
//! ```text
//! keys of an earlier tile    relative to c', that of the last position of their tile:      (q_t ∘ e^{c_t − c'}) · (k_s ∘ e^{c' − c_s})
//! keys of the same tile      the same in blocks of 16 keys, for the rows after each; pairwise within a block
//! states                     queries relative to the position before their chunk, keys to the last of theirs; rows of H decay by the monomials of e^{c' − c}
//! gradient                   dc_t = q_t ∘ dq_t − k_t ∘ dk_t, where a key that reads for a write rule has the sign of a query
//! ```

use std::ops::Range;

use rayon::prelude::*;

use crate::fused::call::Call;
use crate::fused::gradients::TileGrads;
use crate::fused::heap_bytes::scratch_memory;
use crate::fused::plan::CallPlan;
use crate::fused::prepare::gates::GateScratch;
use crate::fused::prepare::{PreparedRows, transpose_tile};
use crate::layer::gather;
use crate::{AuxKind, Buffer, Error, Grads};
use termwise_kernels::basis::{Basis, decay_rows};
use termwise_kernels::buffer::resize;
use termwise_kernels::disjoint::Blocks;
use termwise_kernels::simd::{Simd, Task, dispatch};
use termwise_kernels::tile_gemm::multiply;
use termwise_kernels::{PAD, ROWS, TILE};

/// Maximum number of values of a row of q or k: other heads may have learned features, twice as many as channels.
const WIDEST: usize = 528;

/// Keys of a block.
const BLOCK: usize = PAD;

scratch_memory! {
    /// Keys for products within a tile, of heads with a decay per channel.
    ChannelDecayScratch {
        /// Keys transposed per tile, relative to the last position of their block [K, tiles, width, pitch].
        kb: Buffer,
    }
}

scratch_memory! {
    /// Gradients of decays per channel.
    ChannelDecayGrads {
        /// Of logits [N, d, T].
        dlogits: Buffer,
        /// Of c of one channel [N, T].
        dsums: Vec<f64>,
        /// Of decay rates [N].
        drate: Buffer,
        /// Logits of one channel [N, T].
        logits: Buffer,
    }
}

impl ChannelDecayScratch {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        Ok(self.kb.ensure(if l.layer.decays_by_channel() { l.kv_count() * l.tiles * l.width * l.pitch } else { 0 })?)
    }
}

impl ChannelDecayGrads {
    pub fn ensure(&mut self, l: &CallPlan) -> Result<(), Error> {
        let n = if l.layer.decays_by_channel() { l.head_count() } else { 0 };
        self.dlogits.ensure(n * l.shape.time * l.shape.d)?;
        resize(&mut self.dsums, n * l.shape.time)?;
        self.drate.ensure(n)?;
        Ok(self.logits.ensure(n * l.shape.time)?)
    }
}

/// Values of task memory that [`forward`] needs.
pub fn task_len(l: &CallPlan) -> usize {
    if l.layer.decays_by_channel() { 2 * l.pitch * l.dp } else { 0 }
}

/// Decays per channel of all heads, with the keys that they scale.
#[derive(Clone, Copy)]
pub struct ChannelDecays<'a> {
    /// c [N, Tp, d], and before the first position [N, d].
    c: &'a [f64],
    before: &'a [f64],
    /// Unscaled keys by rows [K, Tp, dp]; keys transposed per tile [K, tiles, width, pitch], relative to the last position of their tile and of
    /// their block.
    k: &'a [f32],
    kt: &'a [f32],
    kb: &'a [f32],
    lengths: Option<&'a [usize]>,
}

/// The decay per channel of one head of one batch row.
#[derive(Clone, Copy)]
pub struct ChannelDecay<'a> {
    pub d: usize,
    /// d padded to whole vectors, and the stride of rows.
    wide: usize,
    dp: usize,
    /// Positions of a tile, and the same padded to whole vectors.
    tile: usize,
    pitch: usize,
    /// Stride of transposed tiles of keys.
    size: usize,
    /// Positions that are not padding.
    length: usize,
    /// [Tp, d] and [d]
    c: &'a [f64],
    pub before: &'a [f64],
    /// [Tp, dp], and [tiles, width, pitch]
    pub k: &'a [f32],
    kt: &'a [f32],
    kb: &'a [f32],
}

impl<'a> ChannelDecays<'a> {
    /// Of a call whose gates have been computed and whose keys have been prepared.
    pub fn new(call: &Call<'a>, gates: &'a GateScratch, rows: &'a PreparedRows, own: &'a ChannelDecayScratch) -> ChannelDecays<'a> {
        let (c, before) = (&gates.channel_decay, &call.initial.log_decay);
        ChannelDecays { c, before, k: &rows.k, kt: &rows.kt, kb: &own.kb, lengths: call.inputs.lengths }
    }

    /// The decay of a head, if it is per channel.
    pub fn head(&self, l: &CallPlan, b: usize, h: usize) -> Option<ChannelDecay<'a>> {
        let (s, head) = (&l.shape, &l.heads[h]);
        if !head.variant.decays_by_channel() {
            return None;
        }
        let (n, kv) = (b * s.heads + h, l.kv_index(head.key_transform, b, h / s.group()));
        let (rows, columns) = (l.tp(), l.tiles * l.width * l.pitch);
        Some(ChannelDecay {
            d: s.d,
            wide: s.d.next_multiple_of(PAD),
            dp: l.dp,
            tile: l.tile,
            pitch: l.pitch,
            size: l.width * l.pitch,
            length: self.lengths.map_or(s.time, |lengths| lengths[b]),
            c: &self.c[n * rows * s.d..][..rows * s.d],
            before: &self.before[n * s.d..][..s.d],
            k: &self.k[kv * rows * l.dp..][..rows * l.dp],
            // Empty while keys are being prepared.
            kt: self.kt.get(kv * columns..(kv + 1) * columns).unwrap_or_default(),
            kb: self.kb.get(kv * columns..(kv + 1) * columns).unwrap_or_default(),
        })
    }
}

/// e^{c − reference}, zero after the channels.
#[inline(always)]
fn relative<S: Simd>(simd: S, c: &[f64], reference: &[f64], out: &mut [f32]) {
    let (own, rest) = out.split_at_mut(c.len());
    own.iter_mut().zip(c.iter().zip(reference)).for_each(|(out, (c, reference))| *out = (c - reference) as f32);
    for i in (0..own.len()).step_by(S::LANES) {
        let x = simd.load_at(own, i);
        simd.store_at(own, i, simd.exp(x));
    }
    rest.fill(0.0);
}

/// to = a∘b
#[inline(always)]
fn hadamard(to: &mut [f32], a: &[f32], b: &[f32]) {
    to.iter_mut().zip(a.iter().zip(b)).for_each(|(to, (a, b))| *to = a * b);
}

/// to += a∘b
#[inline(always)]
fn add_hadamard(to: &mut [f32], a: &[f32], b: &[f32]) {
    to.iter_mut().zip(a.iter().zip(b)).for_each(|(to, (a, b))| *to += a * b);
}

/// Number of scratch values that [`ChannelDecay::backward`] takes.
pub fn room_len(l: &CallPlan) -> usize {
    if l.layer.decays_by_channel() { 5 * TILE * l.dp } else { 0 }
}

#[repr(align(64))]
struct ScaledQueries([f32; ROWS * WIDEST]);

impl<'a> ChannelDecay<'a> {
    /// c of a position.
    pub fn at(&self, t: usize) -> &'a [f64] {
        &self.c[t * self.d..][..self.d]
    }

    /// c of the last of the first p positions.
    pub fn after(&self, p: usize) -> &'a [f64] {
        if p == 0 { self.before } else { self.at(p - 1) }
    }

    /// c of the last position of a tile that counts.
    fn tile_end(&self, tile: usize) -> &'a [f64] {
        self.after(((tile + 1) * self.tile).min(self.length))
    }

    /// The keys of the block of a tile from key `start` on.
    fn block(&self, tile: usize, start: usize) -> Range<usize> {
        let end = ((tile + 1) * self.tile).min(self.length);
        let first = (tile * self.tile + start).min(end);
        first..(first + BLOCK).min(end)
    }

    /// Scores of rows with the first keys of a tile. Those of keys after a row are unspecified.
    #[inline(always)]
    pub fn scores<S: Simd>(&self, simd: S, of: ScoreRows, tile: usize) {
        simd.call(DecayedScores { channels: *self, of, tile });
    }

    #[inline(always)]
    fn all_scores<S: Simd>(&self, simd: S, of: ScoreRows, tile: usize) {
        let size = self.size;
        if (tile + 1) * self.tile <= of.rows.start {
            let kt = &self.kt[tile * size..][..self.d * self.pitch];
            let first = of.rows.start;
            self.product(simd, of, first, self.tile_end(tile), (kt, self.pitch));
            return;
        }
        let ScoreRows { rows, q, width, x } = of;
        for start in (0..width).step_by(BLOCK) {
            let keys = self.block(tile, start);
            let behind = tile * self.tile + start + BLOCK;
            if rows.end > behind {
                let kb = &self.kb[tile * size + start..][..self.d * self.pitch - start];
                let block = ScoreRows { rows: rows.clone(), q, width: BLOCK, x: &mut x[start..] };
                self.product(simd, block, behind, self.after(keys.end), (kb, self.pitch));
            }
            for t in rows.start.max(keys.start)..rows.end.min(keys.end) {
                let q = &q[(t - rows.start) * self.dp..][..self.wide];
                for s in keys.start..=t {
                    x[(t - rows.start) * TILE + start + s - keys.start] = self.pair(simd, q, t, s);
                }
            }
        }
    }

    /// Scores of rows with keys that were cached by earlier calls, relative to the position before the first.
    #[inline(always)]
    pub fn cached_scores<S: Simd>(&self, simd: S, of: ScoreRows, keys: (&[f32], usize)) {
        let first = of.rows.start;
        self.product(simd, of, first, self.before, keys);
    }

    /// (q_t ∘ e^{c_t − c'})·k̃ for the rows from `from` on, 0 for those before.
    #[inline(always)]
    fn product<S: Simd>(&self, simd: S, of: ScoreRows, from: usize, reference: &[f64], keys: (&[f32], usize)) {
        let ScoreRows { rows, q, width, x } = of;
        let mut scaled = ScaledQueries([0.0; ROWS * WIDEST]);
        let mut factors = [0.0; WIDEST];
        let factors = &mut factors[..self.wide];
        for t in rows.start.max(from)..rows.end {
            let at = (t - rows.start) * self.dp;
            relative(simd, self.at(t), reference, factors);
            hadamard(&mut scaled.0[at..][..self.wide], &q[at..][..self.wide], factors);
        }
        multiply::<S, false>(simd, [rows.len(), width, self.d], (&scaled.0, self.dp, 1), keys, (x, TILE));
    }

    /// Σ_i q_i·k_si·e^{c_ti − c_si}
    #[inline(always)]
    fn pair<S: Simd>(&self, simd: S, q: &[f32], t: usize, s: usize) -> f32 {
        let k = &self.k[s * self.dp..][..self.wide];
        let mut factors = [0.0; WIDEST];
        let factors = &mut factors[..self.wide];
        relative(simd, self.at(t), self.at(s), factors);
        let mut sum = simd.splat(0.0);
        for i in (0..self.wide).step_by(S::LANES) {
            sum = simd.fma(simd.mul(simd.load_at(q, i), simd.load_at(k, i)), simd.load_at(factors, i), sum);
        }
        simd.sum(sum)
    }

    /// Adds the gradients of queries and keys, from those of the scores of rows with the first `count` keys of a tile.
    #[inline(always)]
    pub fn backward<S: Simd>(&self, simd: S, of: ScoreRowGrads, tile: usize, count: usize) {
        simd.call(DecayedScoresBackward { channels: *self, of, tile, count });
    }

    #[inline(always)]
    fn all_gradients<S: Simd>(&self, simd: S, of: ScoreRowGrads, tile: usize, count: usize) {
        let first = tile * self.tile;
        if first + self.tile <= of.rows.start {
            self.product_backward(simd, of, first..first + count);
            return;
        }
        let ScoreRowGrads { rows, q, dx, dq, dk, room } = of;
        for start in (0..count).step_by(BLOCK) {
            let keys = self.block(tile, start);
            let behind = rows.start.max(first + start + BLOCK);
            let dk = &mut dk[start * self.dp..];
            if rows.end > behind && !keys.is_empty() {
                let skip = behind - rows.start;
                let (q, dq, dx) = (&q[skip * self.dp..], &mut dq[skip * self.dp..], &dx[skip * TILE + start..]);
                let block = ScoreRowGrads { rows: behind..rows.end, q, dx, dq, dk: &mut *dk, room: &mut *room };
                self.product_backward(simd, block, keys.clone());
            }
            let mut factors = [0.0; WIDEST];
            let factors = &mut factors[..self.wide];
            for t in rows.start.max(keys.start)..rows.end.min(keys.end) {
                let at = t - rows.start;
                for s in keys.start..=t {
                    let slope = dx[at * TILE + start + s - keys.start];
                    relative(simd, self.at(t), self.at(s), factors);
                    factors.iter_mut().for_each(|factor| *factor *= slope);
                    add_hadamard(&mut dq[at * self.dp..][..self.wide], factors, &self.k[s * self.dp..][..self.wide]);
                    add_hadamard(&mut dk[(s - keys.start) * self.dp..][..self.wide], factors, &q[at * self.dp..][..self.wide]);
                }
            }
        }
    }

    /// The gradients of [`ChannelDecay::product`] with these keys, relative to the last of them.
    #[inline(always)]
    fn product_backward<S: Simd>(&self, simd: S, of: ScoreRowGrads, keys: Range<usize>) {
        let ScoreRowGrads { rows, q, dx, dq, dk, room } = of;
        let (dp, wide, reference, m, n) = (self.dp, self.wide, self.after(keys.end), rows.len(), keys.len());
        let mut parts = room.chunks_exact_mut(TILE * dp);
        let [of_q, scaled_q, of_k, scaled_k, sums] = [(); 5].map(|()| parts.next().expect("room for five"));
        for (i, t) in rows.enumerate() {
            relative(simd, self.at(t), reference, &mut of_q[i * wide..][..wide]);
            hadamard(&mut scaled_q[i * wide..][..wide], &q[i * dp..][..wide], &of_q[i * wide..][..wide]);
        }
        for (i, s) in keys.enumerate() {
            relative(simd, reference, self.at(s), &mut of_k[i * wide..][..wide]);
            hadamard(&mut scaled_k[i * wide..][..wide], &self.k[s * dp..][..wide], &of_k[i * wide..][..wide]);
        }
        multiply::<S, false>(simd, [m, wide, n], (dx, TILE, 1), (scaled_k, wide), (&mut *sums, wide));
        for (i, dq) in dq.chunks_mut(dp).take(m).enumerate() {
            add_hadamard(dq, &sums[i * wide..][..wide], &of_q[i * wide..][..wide]);
        }
        multiply::<S, false>(simd, [n, wide, m], (dx, 1, TILE), (scaled_q, wide), (&mut *sums, wide));
        for (i, dk) in dk.chunks_mut(dp).take(n).enumerate() {
            add_hadamard(dk, &sums[i * wide..][..wide], &of_k[i * wide..][..wide]);
        }
    }

    /// e^{c_t − reference}, or its inverse, of some positions as columns [d, pitch], zero after them.
    #[inline(always)]
    pub fn columns<S: Simd>(&self, simd: S, positions: Range<usize>, reference: &[f64], forward: bool, out: &mut [f32]) {
        let len = self.pitch;
        let mut factors = [0.0; WIDEST];
        let factors = &mut factors[..self.d];
        out[..self.d * len].fill(0.0);
        for (i, t) in positions.enumerate() {
            match forward {
                true => relative(simd, self.at(t), reference, factors),
                false => relative(simd, reference, self.at(t), factors),
            }
            out.iter_mut().skip(i).step_by(len).zip(&*factors).for_each(|(out, factor)| *out = *factor);
        }
    }
}

/// Rows of scores to be computed.
pub struct ScoreRows<'a> {
    /// Positions, at most ROWS.
    pub rows: Range<usize>,
    /// Their queries [rows, dp].
    pub q: &'a [f32],
    /// The number of keys.
    pub width: usize,
    /// The scores [rows, TILE].
    pub x: &'a mut [f32],
}

/// Gradients of rows of scores, and the destination of those of queries and keys.
pub struct ScoreRowGrads<'a> {
    /// Positions, at most TILE.
    pub rows: Range<usize>,
    /// Their queries [rows, dp].
    pub q: &'a [f32],
    /// Gradients of scores [rows, TILE], zero for pairs that are masked.
    pub dx: &'a [f32],
    /// Gradients of queries [rows, dp] and of the keys of the tile [tile, dp].
    pub dq: &'a mut [f32],
    pub dk: &'a mut [f32],
    /// [`room_len`] values.
    pub room: &'a mut [f32],
}

/// [`ChannelDecay::scores`] as a separate function: inlined into the tiles, it would slow down heads without such a decay.
struct DecayedScores<'a> {
    channels: ChannelDecay<'a>,
    of: ScoreRows<'a>,
    tile: usize,
}

impl Task for DecayedScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.channels.all_scores(simd, self.of, self.tile);
    }
}

/// [`ChannelDecay::backward`] as a separate function, for the same reason as [`DecayedScores`].
struct DecayedScoresBackward<'a> {
    channels: ChannelDecay<'a>,
    of: ScoreRowGrads<'a>,
    tile: usize,
    count: usize,
}

impl Task for DecayedScoresBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.channels.all_gradients(simd, self.of, self.tile, self.count);
    }
}

/// Rows of a state times the monomials of e^{c' − c}; `room` contains the rows of the basis and of its lower_orders.
#[inline(always)]
pub fn decay_state<S: Simd>(simd: S, basis: &Basis, [before, after]: [&[f64]; 2], h: &mut [f32], z: &mut [f32], room: &mut [f32]) {
    let mut factors = [0.0; WIDEST];
    relative(simd, after, before, &mut factors[..before.len()]);
    decay_rows(basis, &factors[..before.len()], h, z, room);
}

/// Replaces transposed keys by keys relative to the last position of their tile, and adds those relative to their block.
pub fn forward(call: &Call, gates: &GateScratch, rows: &mut PreparedRows, to: &mut ChannelDecayScratch) {
    let (l, s, kvs) = (call.plan, call.plan.shape, call.plan.kv_count());
    let (c, before, lengths) = (&gates.channel_decay, &call.initial.log_decay, call.inputs.lengths);
    let source = ChannelDecays { c, before, k: &rows.k, kt: &[], kb: &[], lengths };
    Blocks::pieces(&mut rows.kt, kvs).par().zip(Blocks::pieces(&mut to.kb, kvs).par()).enumerate().with_max_len(1).for_each(
        |(kv, (mut kt, mut kb))| {
            let (transform, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
            let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
            let head = (g * s.group()..(g + 1) * s.group()).find(|&h| l.heads[h].key_transform == transform);
            if let Some(channels) = head.and_then(|h| source.head(l, b, h)) {
                call.tasks.with(|room| dispatch(Relative { channels, kt: kt.piece(), kb: kb.piece(), room }));
            }
        },
    );
}

/// The keys of one head.
struct Relative<'a> {
    channels: ChannelDecay<'a>,
    kt: &'a mut [f32],
    kb: &'a mut [f32],
    /// Two tiles of rows.
    room: &'a mut [f32],
}

impl Task for Relative<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let c = self.channels;
        let wide = c.wide;
        let (by_tile, by_block) = self.room[..2 * c.pitch * wide].split_at_mut(c.pitch * wide);
        let mut factors = [0.0; WIDEST];
        let factors = &mut factors[..wide];
        for (tile, (kt, kb)) in self.kt.chunks_exact_mut(c.size).zip(self.kb.chunks_exact_mut(c.size)).enumerate() {
            by_tile.fill(0.0);
            by_block.fill(0.0);
            for start in (0..c.tile).step_by(BLOCK) {
                let keys = c.block(tile, start);
                for (i, s) in keys.clone().enumerate() {
                    let (k, at) = (&c.k[s * c.dp..][..wide], (start + i) * wide);
                    relative(simd, c.tile_end(tile), c.at(s), factors);
                    hadamard(&mut by_tile[at..][..wide], k, factors);
                    relative(simd, c.after(keys.end), c.at(s), factors);
                    hadamard(&mut by_block[at..][..wide], k, factors);
                }
            }
            transpose_tile(simd, by_tile, wide, &mut kt[..c.d * c.pitch], c.pitch);
            transpose_tile(simd, by_block, wide, &mut kb[..c.d * c.pitch], c.pitch);
        }
    }
}

/// Adds the gradients of the logits and rates of decays per channel, from the complete gradients of prepared queries and keys.
///
/// `dreaders` [K, Tp, dp] is the share of dk that keys have as readers for a write rule; empty without one.
pub fn backward(call: &Call, rows: &PreparedRows, from: &TileGrads, dreaders: &[f32], own: &mut ChannelDecayGrads, grads: &mut Grads<f32>) {
    let (l, s, tp, d) = (call.plan, call.plan.shape, call.plan.tp(), call.plan.shape.d);
    let ChannelDecayGrads { dlogits, dsums, drate, logits } = own;
    let by_head = dlogits.par_chunks_exact_mut(s.time * d).zip(dsums.par_chunks_exact_mut(s.time));
    let by_head = by_head.zip(drate.par_iter_mut()).zip(logits.par_chunks_exact_mut(s.time));
    by_head.enumerate().for_each(|(n, (((dlogits, dc), rate), logits))| {
        let (b, h) = (n / s.heads, n % s.heads);
        let Some(decay) = l.heads[h].variant.decay.as_ref().filter(|decay| decay.by_channel()) else { return };
        let (kv, len) = (l.kv_index(l.heads[h].key_transform, b, h / s.group()), call.length(b));
        let params = l.heads[h].variant.decay_params(call.inputs, h);
        let mut total = 0.0;
        for i in 0..d {
            dc.fill(0.0);
            for (t, dc) in dc[..len].iter_mut().enumerate() {
                let (query, key) = ((n * tp + t) * l.dp + i, (kv * tp + t) * l.dp + i);
                let dq = from.dq[(n * s.time + t) * l.dp + i];
                // A key that reads for a write rule has the sign of a query.
                let reader = if l.layer.writes() { 2.0 * dreaders[key] as f64 } else { 0.0 };
                *dc = rows.q[query] as f64 * dq as f64 + rows.k[key] as f64 * (reader - from.dk[key] as f64);
            }
            if decay.has_logits() {
                gather(call.inputs.aux(AuxKind::DecayGate), b, s.heads * d, h * d + i, logits);
            }
            // The gradient of the logits replaces that of c, channel by channel.
            let (own, place) = (&logits[..], &mut dlogits[i * s.time..(i + 1) * s.time]);
            total += decay.backward(&own[..len], params, &dc[..len], &mut place[..len]);
            place[len..].fill(0.0);
        }
        *rate = total as f32;
    });
    if l.heads.iter().any(|head| head.variant.needs(AuxKind::DecayGate)) {
        grads.aux(AuxKind::DecayGate).par_chunks_exact_mut(s.heads * d).with_min_len(16).enumerate().for_each(|(row, to)| {
            let (b, t) = (row / s.time, row % s.time);
            for h in (0..s.heads).filter(|&h| l.heads[h].variant.decays_by_channel()) {
                let from = &dlogits[(b * s.heads + h) * s.time * d..][..s.time * d];
                to[h * d..][..d].iter_mut().enumerate().for_each(|(i, to)| *to += from[i * s.time + t]);
            }
        });
    }
    for (n, rate) in drate.iter().enumerate() {
        let variant = &l.heads[n % s.heads].variant;
        if variant.decays_by_channel() && variant.needs(AuxKind::DecayRate) {
            grads.aux(AuxKind::DecayRate)[n % s.heads] += rate;
        }
    }
}
