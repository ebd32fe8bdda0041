//! The exact keys of a window in memory of a fixed size: sinks, a ring of the last W keys, places for chosen keys.
//!
//! ```text
//! places     sinks 0..S · ring S..S + W, position s ≥ S at S + (s − S) mod W · chosen S + W..S + W + N
//! a block    keys transposed [d, places], values by rows [places, ep]; at most 128 places, made when the first of them is needed
//! with bits  the sinks in float32; all others as codes: keys [d, places], values [places, e], and low and step of each value
//! ```
//!
//! The places that are filled are always the first ones. What a query sees is all of them: no key is held that it must not see.

use crate::buffer::resize;
use crate::kernels::score_rows::{ForwardRow, Rescale, Visible, soft_cap};
use crate::kernels::simd::Simd;
use crate::layer::Places;
use crate::parts::bits::{self, Channels};
use crate::parts::chosen::Chosen;
use crate::parts::distance::Distance;
use crate::state::cache::{BLOCK, Sums, largest_score, weighted_sum};
use crate::{Buffer, Error, Kernel, Variant};

/// Loads of whole vectors may reach so far behind the last key.
const BEHIND: usize = 64;

impl Places {
    /// Places in float32, and as codes.
    fn split(self) -> [usize; 2] {
        let floats = if self.bits.is_some() { self.distance.sinks } else { self.count() };
        [floats, self.count() - floats]
    }

    /// Bytes of the whole memory of heads of these dimensions, of which values have ep numbers: those of all places, which are made as keys come.
    pub fn bytes(self, d: usize, e: usize, ep: usize) -> usize {
        let [floats, codes] = self.split();
        let whole = |places: usize, block: &dyn Fn(usize) -> usize| {
            (places / BLOCK).saturating_mul(block(BLOCK)).saturating_add(if places.is_multiple_of(BLOCK) {
                0
            } else {
                block(places % BLOCK)
            })
        };
        let of_floats = whole(floats, &|n| 4 * (d * n + BEHIND + n * ep));
        let of_codes = whole(codes, &|n| d * self.code_bytes(n) + n * self.code_bytes(e) + 8 * n);
        let received = if self.chosen.is_some() { self.count().saturating_mul(4) } else { 0 };
        of_floats.saturating_add(of_codes).saturating_add(received)
    }

    /// Places that are made for so many keys: whole blocks of them, and no more than there are.
    fn made(self, keys: usize) -> usize {
        keys.checked_next_multiple_of(BLOCK).map_or(self.count(), |made| made.min(self.count()))
    }

    /// Bytes of so many codes in a row.
    fn code_bytes(self, n: usize) -> usize {
        if self.bits == Some(4) { n.div_ceil(2) } else { n }
    }
}

/// Keys and values of one state group of one batch row.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub d: usize,
    pub e: usize,
    pub ep: usize,
    pub places: Places,
    /// The position of the next key.
    pub next: usize,
    /// Keys that are chosen.
    pub kept: usize,
    /// In float32, then as codes.
    floats: Vec<Floats>,
    codes: Vec<Codes>,
    /// r of each place; empty where none is chosen.
    pub received: Vec<f32>,
}

#[derive(Clone, Debug)]
struct Floats {
    places: usize,
    keys: Buffer,
    values: Buffer,
}

#[derive(Clone, Debug)]
struct Codes {
    places: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
    scales: Vec<[f32; 2]>,
}

/// One query of one head.
pub(crate) struct PoolQuery<'a> {
    pub q: &'a [f32],
    pub kernel: &'a Kernel,
    pub cap: Option<f32>,
    pub clamp: f32,
    pub rescale: Rescale,
    /// U [ep], zero at first.
    pub u: &'a mut [f32],
    pub sums: &'a mut Sums,
}

/// Memory for one token.
pub(crate) struct PoolScratch<'a> {
    /// One block of codes as numbers, [d, BLOCK] and [BLOCK, ep]; empty where there are none.
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// The weights of the places that are made, [heads, places], and ρ of each block, [heads, blocks]; empty where none is chosen.
    weights: &'a mut [f32],
    rhos: &'a mut [f32],
}

impl<'a> PoolScratch<'a> {
    /// How much it is for a memory of at most so many keys.
    pub fn len(places: Places, keys: usize, d: usize, ep: usize, heads: usize) -> usize {
        let codes = if places.bits.is_some() { BLOCK * (d + ep) + BEHIND } else { 0 };
        let made = places.made(keys);
        // Float32 and codes each end with a block that may not be whole.
        codes + if places.chosen.is_some() { heads * (made + made.div_ceil(BLOCK) + 1) } else { 0 }
    }

    /// Divides it up; what is left comes after.
    pub fn of(pool: &Pool, heads: usize, scratch: &'a mut [f32]) -> (PoolScratch<'a>, &'a mut [f32]) {
        let (coded, chosen) = (pool.places.bits.is_some(), pool.places.chosen.is_some());
        let (keys, scratch) = scratch.split_at_mut(if coded { BLOCK * pool.d + BEHIND } else { 0 });
        let (values, scratch) = scratch.split_at_mut(if coded { BLOCK * pool.ep } else { 0 });
        let (weights, scratch) = scratch.split_at_mut(if chosen { heads * pool.received.len() } else { 0 });
        let (rhos, scratch) = scratch.split_at_mut(if chosen { heads * pool.blocks().end } else { 0 });
        (PoolScratch { keys, values, weights, rhos }, scratch)
    }
}

impl Pool {
    /// Empty.
    pub fn new(d: usize, e: usize, ep: usize, places: Places) -> Pool {
        Pool { d, e, ep, places, next: 0, kept: 0, floats: Vec::new(), codes: Vec::new(), received: Vec::new() }
    }

    /// Forgets everything; memory stays.
    pub fn clear(&mut self) {
        (self.next, self.kept) = (0, 0);
        self.received.fill(0.0);
    }

    /// Of its buffers.
    pub fn bytes(&self) -> usize {
        let floats: usize = self.floats.iter().map(|block| block.keys.bytes() + block.values.bytes()).sum();
        let codes: usize =
            self.codes.iter().map(|block| block.keys.capacity() + block.values.capacity() + 8 * block.scales.capacity()).sum();
        floats + codes + 4 * self.received.capacity()
    }

    /// Keys that are held.
    pub fn len(&self) -> usize {
        self.next.min(self.places.distance.sinks.saturating_add(self.places.distance.window)) + self.kept
    }

    /// Keys that came and are held no longer.
    pub fn lost(&self) -> usize {
        self.next - self.len()
    }

    /// Makes room for so many keys more.
    pub fn reserve(&mut self, more: usize) -> Result<(), Error> {
        let all = self.len().saturating_add(more).min(self.places.count());
        let [floats, codes] = self.places.split();
        let (d, e, ep) = (self.d, self.e, self.ep);
        while self.floats.len() * BLOCK < all.min(floats) {
            let places = (floats - self.floats.len() * BLOCK).min(BLOCK);
            self.floats.push(Floats { places, keys: Buffer::zeros(d * places + BEHIND)?, values: Buffer::zeros(places * ep)? });
        }
        while self.codes.len() * BLOCK < all.saturating_sub(floats) {
            let places = (codes - self.codes.len() * BLOCK).min(BLOCK);
            let zeros = |n: usize| vec![0u8; n];
            let (keys, values) = (zeros(d * self.places.code_bytes(places)), zeros(places * self.places.code_bytes(e)));
            self.codes.push(Codes { places, keys, values, scales: vec![[0.0; 2]; places] });
        }
        if self.places.chosen.is_some() && self.received.len() < all {
            resize(&mut self.received, self.places.made(all))?;
        }
        Ok(())
    }

    /// The numbers of the blocks that are made, where those of codes follow all of float32.
    fn blocks(&self) -> std::ops::Range<usize> {
        let coded_from = self.places.split()[0].div_ceil(BLOCK);
        0..if self.codes.is_empty() { self.floats.len() } else { coded_from + self.codes.len() }
    }

    /// The block of a place and the place in it; of codes where the second is true.
    fn find(&self, place: usize) -> (usize, bool, usize) {
        let [floats, _] = self.places.split();
        if place < floats { (place / BLOCK, false, place % BLOCK) } else { ((place - floats) / BLOCK, true, (place - floats) % BLOCK) }
    }

    /// The key at a place, into `key` [d].
    pub fn key(&self, place: usize, channels: Option<Channels>, key: &mut [f32]) {
        let (block, coded, lane) = self.find(place);
        if !coded {
            let Floats { places, keys, .. } = &self.floats[block];
            key.iter_mut().enumerate().for_each(|(j, key)| *key = keys[j * places + lane]);
            return;
        }
        let (Codes { places, keys, .. }, Some(bits), Some(channels)) = (&self.codes[block], self.places.bits, channels) else { return };
        let (levels, row) = (bits::levels(bits), self.places.code_bytes(*places));
        for (j, key) in key.iter_mut().enumerate() {
            let code = read_code(bits, &keys[j * row..], lane);
            *key = bits::key_value(code, channels.centre[j], channels.range[j], levels);
        }
    }

    /// The value at a place, into `value` [ep].
    pub fn value(&self, place: usize, value: &mut [f32]) {
        let (block, coded, lane) = self.find(place);
        value[self.e..].fill(0.0);
        if !coded {
            value[..self.e].copy_from_slice(&self.floats[block].values[lane * self.ep..][..self.e]);
            return;
        }
        let (Codes { values, scales, .. }, Some(bits)) = (&self.codes[block], self.places.bits) else { return };
        let row = &values[lane * self.places.code_bytes(self.e)..];
        let [low, step] = scales[lane];
        value[..self.e].iter_mut().enumerate().for_each(|(i, v)| *v = low + step * read_code(bits, row, i));
    }

    /// Writes a key and a value, of whose numbers the first e count, to a place for which there is room.
    pub fn write(&mut self, place: usize, key: &[f32], value: &[f32], channels: Option<Channels>) {
        let (block, coded, lane) = self.find(place);
        if !coded {
            let (ep, e) = (self.ep, self.e);
            let Floats { places, keys, values } = &mut self.floats[block];
            key.iter().enumerate().for_each(|(j, &k)| keys[j * *places + lane] = k);
            values[lane * ep..][..e].copy_from_slice(&value[..e]);
            return;
        }
        let (Some(bits), Some(channels)) = (self.places.bits, channels) else { return };
        let (levels, of_value) = (bits::levels(bits), self.places.code_bytes(self.e));
        let (e, row) = (self.e, self.places.code_bytes(self.codes[block].places));
        let Codes { keys, values, scales, .. } = &mut self.codes[block];
        for (j, &k) in key.iter().enumerate() {
            let code = bits::key_code(k, channels.centre[j], channels.range[j], levels) as u8;
            write_code(bits, &mut keys[j * row..][..row], lane, code);
        }
        scales[lane] = bits::value_scale(bits, &value[..e]);
        for (i, &v) in value[..e].iter().enumerate() {
            let code = bits::value_code(v, scales[lane], levels) as u8;
            write_code(bits, &mut values[lane * of_value..][..of_value], i, code);
        }
    }

    /// Takes the next key in, for which there is room. The key that it costs, if one, is left in `key_out` [d] and `value_out` [ep];
    /// returns whether there is one.
    pub fn advance(&mut self, key: &[f32], value: &[f32], channels: Option<Channels>, key_out: &mut [f32], value_out: &mut [f32]) -> bool {
        let (t, Distance { window, sinks }) = (self.next, self.places.distance);
        let place = if t < sinks { t } else { sinks + (t - sinks) % window };
        let full = t >= sinks.saturating_add(window);
        let mut loser = full.then_some(place);
        if let Some(chosen) = self.places.chosen.filter(|_| full) {
            let first = sinks + window;
            if self.kept < chosen.keys {
                self.copy(place, first + self.kept, channels);
                self.kept += 1;
                loser = None;
            } else {
                let least = Chosen::loser(&self.received[first..first + self.kept]);
                if self.received[first + least] <= self.received[place] {
                    loser = Some(first + least);
                }
            }
        }
        if let Some(loser) = loser {
            self.key(loser, channels, key_out);
            self.value(loser, value_out);
            if loser != place {
                self.copy(place, loser, channels);
            }
        }
        self.write(place, key, value, channels);
        if let Some(received) = self.received.get_mut(place) {
            *received = 0.0;
        }
        self.next += 1;
        loser.is_some()
    }

    fn copy(&mut self, from: usize, to: usize, channels: Option<Channels>) {
        let (mut key, mut value) = ([0.0f32; 256], [0.0f32; 256]);
        self.key(from, channels, &mut key[..self.d]);
        self.value(from, &mut value[..self.ep]);
        self.write(to, &key[..self.d], &value[..self.ep], channels);
        self.received[to] = self.received[from];
    }

    /// Adds all keys to U and z of every query; where keys are chosen, what each received is added up.
    #[inline(always)]
    pub fn attend<S: Simd>(&mut self, simd: S, channels: Option<Channels>, queries: &mut [Option<PoolQuery>], scratch: &mut PoolScratch) {
        let ([floats, _], len) = (self.places.split(), self.len());
        let (there, count, made) = (self.blocks(), self.places.count(), self.received.len());
        let all = there.end;
        let chosen = self.places.chosen;
        let coded_from = floats.div_ceil(BLOCK);
        let filled = |index: usize| {
            let (first, end) = if index < coded_from { (index * BLOCK, floats) } else { (floats + (index - coded_from) * BLOCK, count) };
            (first, len.min(end).saturating_sub(first).min(BLOCK))
        };
        for index in there.clone() {
            let (first, n) = filled(index);
            if n == 0 {
                continue;
            }
            let (keys, pitch, values) = if index < coded_from {
                let block = &self.floats[index];
                (&block.keys[..], block.places, &block.values[..])
            } else {
                self.unpack(index - coded_from, n, channels, scratch.keys, scratch.values);
                (&*scratch.keys, BLOCK, &*scratch.values)
            };
            for (i, query) in queries.iter_mut().flatten().enumerate() {
                let mut x = [0.0f32; BLOCK];
                scores(simd, query.q, keys, pitch, n, &mut x);
                let seen = Visible::first(n);
                query.sums.largest = largest_score(simd, seen, &x, query.sums.largest);
                if let Some(cap) = query.cap {
                    soft_cap(simd, &mut x, cap);
                }
                let rho = query.rescale.of(query.sums.rho);
                let sums = &mut query.sums.lanes;
                let row = ForwardRow { x: &mut x, visible: seen, clamp: query.clamp, decay: None, rho, sums, key_weights: None };
                if let Some((now, factor)) = query.kernel.forward_row(simd, row) {
                    query.sums.rho = now;
                    query.u.iter_mut().for_each(|u| *u *= factor);
                }
                weighted_sum(simd, &x[..n], values, query.u);
                if chosen.is_some() {
                    scratch.weights[i * made + first..][..n].copy_from_slice(&x[..n]);
                    scratch.rhos[i * all + index] = query.sums.rho;
                }
            }
        }
        let Some(chosen) = chosen else { return };
        if chosen.fade.is_some() {
            let fade = chosen.factor();
            self.received[..len].iter_mut().for_each(|r| *r *= fade);
        }
        for (i, query) in queries.iter().flatten().enumerate() {
            let inverse = 1.0 / query.sums.z();
            for index in there.clone() {
                let (first, n) = filled(index);
                let factor = (scratch.rhos[i * all + index] - query.sums.rho).exp() * inverse;
                let weights = &scratch.weights[i * made + first..][..n];
                self.received[first..first + n].iter_mut().zip(weights).for_each(|(r, w)| *r += factor * w);
            }
        }
    }

    /// The first n places of a block of codes, as numbers.
    #[inline(always)]
    fn unpack(&self, block: usize, n: usize, channels: Option<Channels>, to_keys: &mut [f32], to_values: &mut [f32]) {
        let (Some(bits), Some(channels)) = (self.places.bits, channels) else { return };
        let Codes { places, keys, values, scales } = &self.codes[block];
        let (levels, row, of_value) = (bits::levels(bits), self.places.code_bytes(*places), self.places.code_bytes(self.e));
        for (j, to) in to_keys.chunks_exact_mut(BLOCK).take(self.d).enumerate() {
            let (centre, range) = (channels.centre[j], channels.range[j]);
            unpack_row(bits, &keys[j * row..], n, to, |code| bits::key_value(code, centre, range, levels));
        }
        for (s, to) in to_values.chunks_exact_mut(self.ep).take(n).enumerate() {
            let [low, step] = scales[s];
            unpack_row(bits, &values[s * of_value..], self.e, to, |code| low + step * code);
            to[self.e..].fill(0.0);
        }
    }

    /// As if it had come to this position, with keys [floats, d] and values [floats, e] that `read` gives for so many places in float32; codes are to be filled in.
    pub fn resume(&mut self, position: usize, read: impl FnOnce(usize, usize) -> Result<(Vec<f32>, Vec<f32>), Error>) -> Result<(), Error> {
        let Distance { window, sinks } = self.places.distance;
        let behind = position.saturating_sub(sinks.saturating_add(window));
        let kept = behind.min(self.places.chosen.map_or(0, |chosen| chosen.keys));
        let len = (position - behind) + kept;
        let (keys, values) = read(len.min(self.places.split()[0]), self.d)?;
        (self.next, self.kept) = (0, 0);
        self.reserve(len)?;
        (self.next, self.kept) = (position, kept);
        for (place, (key, value)) in keys.chunks_exact(self.d).zip(values.chunks_exact(self.e)).enumerate() {
            self.write(place, key, value, None);
        }
        Ok(())
    }

    /// The raw codes of all blocks, for files: keys, values, low and step.
    pub fn code_parts(&self) -> impl Iterator<Item = (&[u8], &[u8], &[[f32; 2]])> {
        self.codes.iter().map(|block| (&block.keys[..], &block.values[..], &block.scales[..]))
    }

    /// The same, to be filled.
    pub fn code_parts_mut(&mut self) -> impl Iterator<Item = (&mut [u8], &mut [u8], &mut [[f32; 2]])> {
        self.codes.iter_mut().map(|block| (&mut block.keys[..], &mut block.values[..], &mut block.scales[..]))
    }

    /// Places in float32 that are filled.
    pub fn float_len(&self) -> usize {
        self.len().min(self.places.split()[0])
    }
}

#[inline(always)]
fn unpack_row(bits: u32, codes: &[u8], n: usize, to: &mut [f32], number: impl Fn(f32) -> f32) {
    if bits == 8 {
        to[..n].iter_mut().zip(codes).for_each(|(to, &code)| *to = number(f32::from(code)));
    } else {
        for (to, &code) in to[..n].chunks_mut(2).zip(codes) {
            to[0] = number(f32::from(code & 15));
            if let Some(to) = to.get_mut(1) {
                *to = number(f32::from(code >> 4));
            }
        }
    }
}

#[inline(always)]
fn read_code(bits: u32, codes: &[u8], at: usize) -> f32 {
    f32::from(if bits == 8 { codes[at] } else { (codes[at / 2] >> (4 * (at % 2))) & 15 })
}

#[inline(always)]
fn write_code(bits: u32, codes: &mut [u8], at: usize, code: u8) {
    if bits == 8 {
        codes[at] = code;
    } else {
        let shift = 4 * (at % 2);
        codes[at / 2] = (codes[at / 2] & !(15 << shift)) | (code << shift);
    }
}

/// x_s = Σ_j q_j·K_js over the first n places of a block whose rows are `pitch` apart.
#[inline(always)]
fn scores<S: Simd>(simd: S, q: &[f32], keys: &[f32], pitch: usize, n: usize, x: &mut [f32; BLOCK]) {
    for start in (0..n).step_by(4 * S::LANES) {
        let vectors = (n - start).div_ceil(S::LANES).min(4);
        let mut sums = [simd.splat(0.0); 4];
        if vectors == 4 {
            for (j, &q) in q.iter().enumerate() {
                let (q, row) = (simd.splat(q), &keys[j * pitch + start..][..4 * S::LANES]);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.fma(q, simd.load_at(row, i * S::LANES), *sum);
                }
            }
        } else {
            for (j, &q) in q.iter().enumerate() {
                let (q, row) = (simd.splat(q), &keys[j * pitch + start..][..vectors * S::LANES]);
                for (i, sum) in sums[..vectors].iter_mut().enumerate() {
                    *sum = simd.fma(q, simd.load_at(row, i * S::LANES), *sum);
                }
            }
        }
        for (i, &sum) in sums[..vectors].iter().enumerate() {
            if start + i * S::LANES < BLOCK {
                simd.store_at(x, start + i * S::LANES, sum);
            }
        }
    }
}

impl Variant {
    /// Bytes in which the exact keys of its window are kept once it is full, for one kv head with keys of dimension d and values of dimension e: those of
    /// the buffers. `None` where there is no window, or its memory is not of a fixed size.
    pub fn window_bytes(&self, d: usize, e: usize) -> Option<usize> {
        Some(Places::of(self)?.bytes(d, e, e.next_multiple_of(crate::kernels::PAD)))
    }
}
