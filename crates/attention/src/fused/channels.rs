//! Decays by channel: x_ts = Σ_i q_ti·k_si·e^{c_ti − c_si}, by products of tiles in which no exponent is positive
//!
//! ```text
//! keys of an earlier tile    relative to c', that of the last position of their tile:      (q_t ∘ e^{c_t − c'}) · (k_s ∘ e^{c' − c_s})
//! keys of the same tile      the same by blocks of 16 keys, for the rows behind each; within a block pair by pair
//! states                     queries relative to the position before their chunk, keys to the last of theirs; rows of H decay by the monomials of e^{c' − c}
//! gradient                   dc_t = q_t ∘ dq_t − k_t ∘ dk_t, where a key that reads for a write rule is like a query
//! ```

use std::ops::Range;

use rayon::prelude::*;

use crate::fused::gates::gather;
use crate::fused::plan::Layout;
use crate::fused::prepare::transpose_tile;
use crate::fused::scratch::CallScratch;
use crate::kernels::basis::{Basis, decay_rows};
use crate::kernels::disjoint::Blocks;
use crate::kernels::gemm::multiply;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::kernels::{PAD, ROWS, TILE};
use crate::{Error, Extra, Grads, Inputs};

/// Numbers of a row of q or k at most: other heads may have learned features, twice as many as channels.
const WIDEST: usize = 528;

/// Keys of a block.
const BLOCK: usize = PAD;

/// What all heads of a call with such a decay read.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// c [N, Tp, d], and before the first position [N, d].
    c: &'a [f64],
    before: &'a [f64],
    /// Keys by rows [K, Tp, dp] as they are; transposed by tile [K, tiles, width, pitch], relative to the last position of their tile and of their block.
    k: &'a [f32],
    kt: &'a [f32],
    kb: &'a [f32],
    lengths: Option<&'a [usize]>,
}

/// Those of one head of one batch row.
#[derive(Clone, Copy)]
pub struct Channels<'a> {
    pub d: usize,
    /// Those in whole vectors, and from one row to the next.
    wide: usize,
    dp: usize,
    /// Positions of a tile, and in whole vectors.
    tile: usize,
    pitch: usize,
    /// From the transposed keys of one tile to those of the next.
    size: usize,
    /// Positions that count.
    length: usize,
    /// [Tp, d] and [d]
    c: &'a [f64],
    pub before: &'a [f64],
    /// [Tp, dp], and [tiles, width, pitch]
    pub k: &'a [f32],
    kt: &'a [f32],
    kb: &'a [f32],
}

impl<'a> Source<'a> {
    /// Of a call whose gates have been computed and whose keys have been prepared.
    pub fn new(inputs: &Inputs<'a, f32>, w: &'a CallScratch) -> Source<'a> {
        Source { c: &w.channel_decay, before: &w.initial.log_decay, k: &w.k, kt: &w.kt, kb: &w.kb, lengths: inputs.lengths }
    }

    /// Those of a head, if it has such a decay.
    pub fn head(&self, l: &Layout, b: usize, h: usize) -> Option<Channels<'a>> {
        let (s, head) = (&l.shape, &l.heads[h]);
        if !head.variant.decays_by_channel() {
            return None;
        }
        let (n, kv) = (b * s.heads + h, l.kv_index(head.class, b, h / s.group()));
        let (rows, columns) = (l.tp(), l.tiles * l.width * l.pitch);
        Some(Channels {
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
            // Not there yet where keys are just being prepared.
            kt: self.kt.get(kv * columns..(kv + 1) * columns).unwrap_or_default(),
            kb: self.kb.get(kv * columns..(kv + 1) * columns).unwrap_or_default(),
        })
    }
}

/// e^{c − reference}, zero behind the channels.
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

/// Values of room that [`Channels::backward`] takes.
pub fn room_len(l: &Layout) -> usize {
    if l.layer.decays_by_channel() { 5 * TILE * l.dp } else { 0 }
}

#[repr(align(64))]
struct Queries([f32; ROWS * WIDEST]);

impl<'a> Channels<'a> {
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

    /// Scores of up to ROWS rows, whose queries [rows, dp] are given, with the first `width` keys of a tile, [rows, TILE]; of keys behind a row
    /// anything.
    #[inline(always)]
    pub fn scores<S: Simd>(&self, simd: S, rows: Range<usize>, q: &[f32], tile: usize, width: usize, x: &mut [f32]) {
        simd.call(Scores { channels: *self, rows, q, tile, width, x });
    }

    #[inline(always)]
    fn all_scores<S: Simd>(&self, simd: S, rows: Range<usize>, q: &[f32], tile: usize, width: usize, x: &mut [f32]) {
        let size = self.size;
        if (tile + 1) * self.tile <= rows.start {
            let kt = &self.kt[tile * size..][..self.d * self.pitch];
            self.product(simd, rows.clone(), rows.start, q, self.tile_end(tile), (kt, self.pitch), width, x);
            return;
        }
        for start in (0..width).step_by(BLOCK) {
            let keys = self.block(tile, start);
            let behind = tile * self.tile + start + BLOCK;
            if rows.end > behind {
                let kb = &self.kb[tile * size + start..][..self.d * self.pitch - start];
                self.product(simd, rows.clone(), behind, q, self.after(keys.end), (kb, self.pitch), BLOCK, &mut x[start..]);
            }
            for t in rows.start.max(keys.start)..rows.end.min(keys.end) {
                let q = &q[(t - rows.start) * self.dp..][..self.wide];
                for s in keys.start..=t {
                    x[(t - rows.start) * TILE + start + s - keys.start] = self.pair(simd, q, t, s);
                }
            }
        }
    }

    /// Scores of rows with keys that were kept from earlier calls, relative to the position before the first.
    #[inline(always)]
    pub fn cached_scores<S: Simd>(&self, simd: S, rows: Range<usize>, q: &[f32], keys: (&[f32], usize), width: usize, x: &mut [f32]) {
        self.product(simd, rows.clone(), rows.start, q, self.before, keys, width, x);
    }

    /// (q_t ∘ e^{c_t − c'})·k̃ for the rows from `from` on, 0 for those before.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "both sides of a product")]
    fn product<S: Simd>(
        &self,
        simd: S,
        rows: Range<usize>,
        from: usize,
        q: &[f32],
        reference: &[f64],
        keys: (&[f32], usize),
        width: usize,
        x: &mut [f32],
    ) {
        let mut scaled = Queries([0.0; ROWS * WIDEST]);
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

    /// Adds the gradients of queries `dq` [rows, dp] and of keys `dk` [tile, dp], from those of the scores of up to TILE rows with the first `count` keys of
    /// a tile, [rows, TILE], zero for pairs that are not seen.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "both sides of a product and their gradients")]
    pub fn backward<S: Simd>(
        &self,
        simd: S,
        rows: Range<usize>,
        q: &[f32],
        of: (usize, usize),
        dx: &[f32],
        dq: &mut [f32],
        dk: &mut [f32],
        room: &mut [f32],
    ) {
        simd.call(Gradients { channels: *self, rows, q, of, dx, dq, dk, room });
    }

    #[inline(always)]
    fn all_gradients<S: Simd>(&self, simd: S, of: Gradients) {
        let Gradients { rows, q, of: (tile, count), dx, dq, dk, room, .. } = of;
        let first = tile * self.tile;
        if first + self.tile <= rows.start {
            let keys = first..first + count;
            self.product_backward(simd, rows, q, keys, dx, dq, dk, room);
            return;
        }
        for start in (0..count).step_by(BLOCK) {
            let keys = self.block(tile, start);
            let behind = rows.start.max(first + start + BLOCK);
            let dk = &mut dk[start * self.dp..];
            if rows.end > behind && !keys.is_empty() {
                let skip = behind - rows.start;
                let (q, dq, dx) = (&q[skip * self.dp..], &mut dq[skip * self.dp..], &dx[skip * TILE + start..]);
                self.product_backward(simd, behind..rows.end, q, keys.clone(), dx, dq, dk, room);
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

    /// The gradients of [`Channels::product`] with these keys, relative to the last of them.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "both sides of a product and their gradients")]
    fn product_backward<S: Simd>(
        &self,
        simd: S,
        rows: Range<usize>,
        q: &[f32],
        keys: Range<usize>,
        dx: &[f32],
        dq: &mut [f32],
        dk: &mut [f32],
        room: &mut [f32],
    ) {
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

    /// e^{c_t − reference}, or its inverse, of some positions as columns [d, len], zero behind them.
    #[inline(always)]
    pub fn columns<S: Simd>(&self, simd: S, positions: Range<usize>, reference: &[f64], forward: bool, out: &mut [f32], len: usize) {
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

/// [`Channels::scores`] as a function of its own: within the tiles it would slow down those that have no such decay.
struct Scores<'a> {
    channels: Channels<'a>,
    rows: Range<usize>,
    q: &'a [f32],
    tile: usize,
    width: usize,
    x: &'a mut [f32],
}

impl Task for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.channels.all_scores(simd, self.rows, self.q, self.tile, self.width, self.x);
    }
}

/// [`Channels::backward`], likewise.
struct Gradients<'a> {
    channels: Channels<'a>,
    rows: Range<usize>,
    q: &'a [f32],
    of: (usize, usize),
    dx: &'a [f32],
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    room: &'a mut [f32],
}

impl Task for Gradients<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let channels = self.channels;
        channels.all_gradients(simd, self);
    }
}

/// Rows of a state times the monomials of e^{c' − c}; `room` has the rows of the basis and of its lower_orders.
#[inline(always)]
pub fn decay_state<S: Simd>(simd: S, basis: &Basis, [before, after]: [&[f64]; 2], h: &mut [f32], z: &mut [f32], room: &mut [f32]) {
    let mut factors = [0.0; WIDEST];
    relative(simd, after, before, &mut factors[..before.len()]);
    decay_rows(basis, &factors[..before.len()], h, z, room);
}

/// Keys transposed by tile, relative to the last position of their tile and of their block, in place of those that are not.
pub fn prepare(l: &Layout, inputs: &Inputs<f32>, w: &mut CallScratch) -> Result<(), Error> {
    if !l.layer.decays_by_channel() {
        return Ok(());
    }
    let (s, kvs) = (l.shape, l.kv_count());
    w.tasks.ensure(2 * l.pitch * l.dp)?;
    let [mut kt, mut kb] = [&mut w.kt, &mut w.kb].map(std::mem::take);
    let source = &Source::new(inputs, w);
    Blocks::pieces(&mut kt, kvs).par().zip(Blocks::pieces(&mut kb, kvs).par()).enumerate().with_max_len(1).for_each(
        |(kv, (mut kt, mut kb))| {
            let (class, pair) = (kv / (s.batch * s.kv_heads), kv % (s.batch * s.kv_heads));
            let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
            let head = (g * s.group()..(g + 1) * s.group()).find(|&h| l.heads[h].class == class);
            if let Some(channels) = head.and_then(|h| source.head(l, b, h)) {
                w.tasks.with(|room| dispatch(Relative { channels, kt: kt.piece(), kb: kb.piece(), room }));
            }
        },
    );
    (w.kt, w.kb) = (kt, kb);
    Ok(())
}

/// The keys of one head.
struct Relative<'a> {
    channels: Channels<'a>,
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

/// Adds the gradients of the logits and rates of decays by channel, once those of prepared queries and keys are complete.
pub fn backward(l: &Layout, inputs: &Inputs<f32>, w: &mut CallScratch, grads: &mut Grads<f32>) -> Result<(), Error> {
    if !l.layer.decays_by_channel() {
        return Ok(());
    }
    let (s, tp, d) = (l.shape, l.tp(), l.shape.d);
    w.dchannels.ensure(l.head_count() * s.time * d)?;
    crate::buffer::resize(&mut w.dchannel_sums, l.head_count() * s.time)?;
    let (mut dlogits, mut sums) = (std::mem::take(&mut w.dchannels), std::mem::take(&mut w.dchannel_sums));
    let (mut rates, mut logits) = (std::mem::take(&mut w.drate), std::mem::take(&mut w.logits));
    let by_head = dlogits.par_chunks_exact_mut(s.time * d).zip(sums.par_chunks_exact_mut(s.time));
    let by_head = by_head.zip(rates.par_iter_mut()).zip(logits.par_chunks_exact_mut(s.time));
    by_head.enumerate().for_each(|(n, (((dlogits, dc), rate), logits))| {
        let (b, h) = (n / s.heads, n % s.heads);
        let Some(decay) = l.heads[h].variant.decay.as_ref().filter(|decay| decay.by_channel()) else { return };
        let (kv, len) = (l.kv_index(l.heads[h].class, b, h / s.group()), inputs.length(b, &s));
        let params = l.heads[h].variant.decay_params(inputs, h);
        let mut total = 0.0;
        for i in 0..d {
            dc.fill(0.0);
            for (t, dc) in dc[..len].iter_mut().enumerate() {
                let (query, key) = ((n * tp + t) * l.dp + i, (kv * tp + t) * l.dp + i);
                let dq = w.dq[(n * s.time + t) * l.dp + i];
                // A key that reads for a write rule has the sign of a query.
                let reader = if l.layer.writes() { 2.0 * w.dreaders[key] as f64 } else { 0.0 };
                *dc = w.q[query] as f64 * dq as f64 + w.k[key] as f64 * (reader - w.dk[key] as f64);
            }
            if decay.has_logits() {
                gather(inputs.extra(Extra::DecayGate), b, s.heads * d, h * d + i, logits);
            }
            // The gradient of the logits takes the place of those of c, a channel after the other.
            let (own, place) = (&logits[..], &mut dlogits[i * s.time..(i + 1) * s.time]);
            total += decay.backward(&own[..len], params, &dc[..len], &mut place[..len]);
            place[len..].fill(0.0);
        }
        *rate = total as f32;
    });
    if l.heads.iter().any(|head| head.variant.needs(Extra::DecayGate)) {
        grads.extra(Extra::DecayGate).par_chunks_exact_mut(s.heads * d).with_min_len(16).enumerate().for_each(|(row, to)| {
            let (b, t) = (row / s.time, row % s.time);
            for h in (0..s.heads).filter(|&h| l.heads[h].variant.decays_by_channel()) {
                let from = &dlogits[(b * s.heads + h) * s.time * d..][..s.time * d];
                to[h * d..][..d].iter_mut().enumerate().for_each(|(i, to)| *to += from[i * s.time + t]);
            }
        });
    }
    (w.dchannels, w.dchannel_sums, w.drate, w.logits) = (dlogits, sums, rates, logits);
    Ok(())
}
