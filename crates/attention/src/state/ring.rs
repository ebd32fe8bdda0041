//! The windowed KV cache: sinks, a ring of the last W keys, and slots for heavy hitters, in memory of a fixed size.
//!
//! ```text
//! slots      sinks 0..S · ring S..S + W, position s ≥ S at S + (s − S) mod W · heavy hitters S + W..S + W + N
//! a block    keys transposed [d, slots], values as rows [slots, ep]; at most 128 slots, allocated when the first of them is needed
//! quantized  the sinks in float32; all others as codes: keys [d, slots], values [slots, e], and low and step of each value
//! ```
//!
//! The occupied slots are always the first ones. A query sees all of them.

use crate::layer::{CacheLayout, Features, KeyTransform, StateGroup};
use crate::parts::distance::Distance;
use crate::parts::heavy_hitters::HeavyHitters;
use crate::parts::quantize::{self, QuantRange};
use crate::state::block::{BLOCK, PerKey, QuerySums};
use crate::{Buffer, Error, Variant};
use termwise_kernels::buffer::resize;
use termwise_kernels::simd::Simd;

/// Values after the last key that loads of whole vectors may read.
const LOAD_PADDING: usize = 64;

impl CacheLayout {
    /// Number of float32 and of quantized slots.
    fn split(self) -> [usize; 2] {
        let floats = if self.bits.is_some() { self.distance.sinks } else { self.places() };
        [floats, self.places() - floats]
    }

    /// Bytes of all slots, for keys of d and values of e numbers, the latter padded to ep.
    pub fn bytes(self, d: usize, e: usize, ep: usize) -> usize {
        let [floats, codes] = self.split();
        let whole = |places: usize, block: &dyn Fn(usize) -> usize| {
            (places / BLOCK).saturating_mul(block(BLOCK)).saturating_add(if places.is_multiple_of(BLOCK) {
                0
            } else {
                block(places % BLOCK)
            })
        };
        let of_floats = whole(floats, &|n| 4 * (d * n + LOAD_PADDING + n * ep));
        let of_codes = whole(codes, &|n| d * self.code_bytes(n) + n * self.code_bytes(e) + 8 * n);
        let attention = if self.heavy_hitters.is_some() { self.places().saturating_mul(4) } else { 0 };
        of_floats.saturating_add(of_codes).saturating_add(attention)
    }

    /// Number of slots allocated for this many keys: whole blocks, up to all slots.
    fn allocated(self, keys: usize) -> usize {
        keys.checked_next_multiple_of(BLOCK).map_or(self.places(), |made| made.min(self.places()))
    }

    /// Bytes of a row of n codes.
    fn code_bytes(self, n: usize) -> usize {
        if self.bits == Some(4) { n.div_ceil(2) } else { n }
    }

    /// The slot into which the key of a position is inserted.
    pub fn place(self, position: usize) -> usize {
        let Distance { window, sinks } = self.distance;
        if position < sinks { position } else { sinks + (position - sinks) % window }
    }

    /// The positions of the sinks and of the ring before position `next`, ascending.
    pub fn positions(self, next: usize) -> impl Iterator<Item = usize> {
        let Distance { window, sinks } = self.distance;
        (0..next.min(sinks)).chain(next.saturating_sub(window).max(sinks)..next)
    }
}

/// Keys and values of one state group of one batch row.
#[derive(Clone, Debug)]
pub(crate) struct RingKvCache {
    /// Values of a stored key.
    pub d: usize,
    pub e: usize,
    /// e in whole vectors.
    pub ep: usize,
    pub layout: CacheLayout,
    /// Index of the first value for far queries among the d values of a key. `None` if the far key is computed from the near one at eviction.
    pub far_row: Option<usize>,
    /// The position of the next key.
    pub next: usize,
    /// Heavy hitters in the cache.
    pub kept: usize,
    /// float32 slots, then quantized ones.
    floats: Vec<FloatBlock>,
    codes: Vec<CodeBlock>,
    /// r of each slot; empty without heavy hitters.
    pub accumulated_attention: Vec<f32>,
    /// Per head of the group, by slot.
    pub per_key: Vec<PerKey>,
}

#[derive(Clone, Debug)]
struct FloatBlock {
    places: usize,
    keys: Buffer,
    values: Buffer,
}

#[derive(Clone, Debug)]
struct CodeBlock {
    places: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
    scales: Vec<[f32; 2]>,
}

/// Scratch memory of one token.
pub(crate) struct RingScratch<'a> {
    /// One dequantized block, [d, BLOCK] and [BLOCK, ep]; empty without quantization.
    pub keys: &'a mut [f32],
    pub values: &'a mut [f32],
    /// The weights of all allocated slots, [heads, slots], and ρ after each block, [heads, blocks]; empty without heavy hitters.
    pub weights: &'a mut [f32],
    pub rhos: &'a mut [f32],
}

impl<'a> RingScratch<'a> {
    /// Values of scratch memory for a cache of at most this many keys.
    pub fn len(layout: CacheLayout, keys: usize, d: usize, ep: usize, heads: usize) -> usize {
        let codes = if layout.bits.is_some() { BLOCK * (d + ep) + LOAD_PADDING } else { 0 };
        let allocated = layout.allocated(keys);
        // float32 and quantized slots each end with a partial block.
        codes + if layout.heavy_hitters.is_some() { heads * (allocated + allocated.div_ceil(BLOCK) + 1) } else { 0 }
    }

    /// Splits it off the scratch memory; returns the rest.
    pub fn split(ring: &RingKvCache, heads: usize, scratch: &'a mut [f32]) -> (RingScratch<'a>, &'a mut [f32]) {
        let (quantized, heavy) = (ring.layout.bits.is_some(), ring.layout.heavy_hitters.is_some());
        let (keys, scratch) = scratch.split_at_mut(if quantized { BLOCK * ring.d + LOAD_PADDING } else { 0 });
        let (values, scratch) = scratch.split_at_mut(if quantized { BLOCK * ring.ep } else { 0 });
        let (weights, scratch) = scratch.split_at_mut(if heavy { heads * ring.accumulated_attention.len() } else { 0 });
        let (rhos, scratch) = scratch.split_at_mut(if heavy { heads * ring.blocks() } else { 0 });
        (RingScratch { keys, values, weights, rhos }, scratch)
    }

    /// Records the weights of one block for the head with this index in the group.
    #[inline(always)]
    pub fn record(&mut self, ring: &RingKvCache, head: usize, block: usize, weights: &[f32], rho: f32) {
        if ring.layout.heavy_hitters.is_some() {
            let (first, n) = ring.block_places(block);
            self.weights[head * ring.accumulated_attention.len() + first..][..n].copy_from_slice(&weights[..n]);
            self.rhos[head * ring.blocks() + block] = rho;
        }
    }
}

impl RingKvCache {
    /// The empty cache of a state group with a window, whose keys are transformed by one of these.
    pub fn new(group: &StateGroup, transforms: &[KeyTransform], [e, ep]: [usize; 2], layout: CacheLayout) -> RingKvCache {
        let near = &transforms[group.class];
        let far = group.far.as_ref().filter(|_| !layout.plain);
        let own = far.filter(|far| far.class != group.class).map_or(0, |far| transforms[far.class].width);
        let far_row = far.map(|_| if own > 0 { near.width } else { 0 });
        RingKvCache {
            d: near.width + own,
            e,
            ep,
            layout,
            far_row,
            next: 0,
            kept: 0,
            floats: Vec::new(),
            codes: Vec::new(),
            accumulated_attention: Vec::new(),
            per_key: vec![PerKey::default(); group.heads.len()],
        }
    }

    /// Removes all keys; memory stays allocated.
    pub fn clear(&mut self) {
        (self.next, self.kept) = (0, 0);
        self.accumulated_attention.fill(0.0);
        self.per_key.iter_mut().for_each(PerKey::clear);
    }

    pub fn bytes(&self) -> usize {
        let floats: usize = self.floats.iter().map(|block| block.keys.bytes() + block.values.bytes()).sum();
        let codes: usize =
            self.codes.iter().map(|block| block.keys.capacity() + block.values.capacity() + 8 * block.scales.capacity()).sum();
        floats + codes + 4 * self.accumulated_attention.capacity() + self.per_key.iter().map(PerKey::bytes).sum::<usize>()
    }

    /// Keys in the cache.
    pub fn len(&self) -> usize {
        self.next.min(self.layout.distance.sinks.saturating_add(self.layout.distance.window)) + self.kept
    }

    /// Keys that were evicted.
    pub fn evicted(&self) -> usize {
        self.next - self.len()
    }

    /// Allocates memory for `more` keys.
    pub fn reserve(&mut self, more: usize) -> Result<(), Error> {
        let all = self.len().saturating_add(more).min(self.layout.places());
        let [floats, codes] = self.layout.split();
        let (d, e, ep) = (self.d, self.e, self.ep);
        while self.floats.len() * BLOCK < all.min(floats) {
            let places = (floats - self.floats.len() * BLOCK).min(BLOCK);
            self.floats.push(FloatBlock { places, keys: Buffer::zeros(d * places + LOAD_PADDING)?, values: Buffer::zeros(places * ep)? });
        }
        while self.codes.len() * BLOCK < all.saturating_sub(floats) {
            let places = (codes - self.codes.len() * BLOCK).min(BLOCK);
            let zeros = |n: usize| vec![0u8; n];
            let (keys, values) = (zeros(d * self.layout.code_bytes(places)), zeros(places * self.layout.code_bytes(e)));
            self.codes.push(CodeBlock { places, keys, values, scales: vec![[0.0; 2]; places] });
        }
        if self.layout.heavy_hitters.is_some() && self.accumulated_attention.len() < all {
            resize(&mut self.accumulated_attention, self.layout.allocated(all))?;
        }
        Ok(())
    }

    /// The number of the first quantized block: they follow all blocks in float32.
    fn first_code_block(&self) -> usize {
        self.layout.split()[0].div_ceil(BLOCK)
    }

    /// The end of the block numbers.
    pub fn blocks(&self) -> usize {
        if self.codes.is_empty() { self.floats.len() } else { self.first_code_block() + self.codes.len() }
    }

    /// The first slot of a block, and the number of its occupied slots.
    #[inline(always)]
    pub fn block_places(&self, block: usize) -> (usize, usize) {
        let ([floats, _], first_code_block) = (self.layout.split(), self.first_code_block());
        let (first, end) = if block < first_code_block {
            (block * BLOCK, floats)
        } else {
            (floats + (block - first_code_block) * BLOCK, self.layout.places())
        };
        (first, self.len().min(end).saturating_sub(first).min(BLOCK))
    }

    /// The block of a slot and its index in it; in the quantized blocks if the second is true.
    fn find(&self, place: usize) -> (usize, bool, usize) {
        let [floats, _] = self.layout.split();
        if place < floats { (place / BLOCK, false, place % BLOCK) } else { ((place - floats) / BLOCK, true, (place - floats) % BLOCK) }
    }

    /// The key in a slot, into `key` [d].
    pub fn key(&self, place: usize, range: Option<QuantRange>, key: &mut [f32]) {
        let (block, quantized, lane) = self.find(place);
        if !quantized {
            let FloatBlock { places, keys, .. } = &self.floats[block];
            key.iter_mut().enumerate().for_each(|(j, key)| *key = keys[j * places + lane]);
            return;
        }
        let (CodeBlock { places, keys, .. }, Some(bits), Some(range)) = (&self.codes[block], self.layout.bits, range) else { return };
        let (levels, row) = (quantize::levels(bits), self.layout.code_bytes(*places));
        for (j, key) in key.iter_mut().enumerate() {
            let code = read_code(bits, &keys[j * row..], lane);
            *key = quantize::key_value(code, range.centre[j], range.range[j], levels);
        }
    }

    /// The value in a slot, into `value` [ep].
    pub fn value(&self, place: usize, value: &mut [f32]) {
        let (block, quantized, lane) = self.find(place);
        value[self.e..].fill(0.0);
        if !quantized {
            value[..self.e].copy_from_slice(&self.floats[block].values[lane * self.ep..][..self.e]);
            return;
        }
        let (CodeBlock { values, scales, .. }, Some(bits)) = (&self.codes[block], self.layout.bits) else { return };
        let row = &values[lane * self.layout.code_bytes(self.e)..];
        let [low, step] = scales[lane];
        value[..self.e].iter_mut().enumerate().for_each(|(i, v)| *v = low + step * read_code(bits, row, i));
    }

    /// Writes a key [d] and a value [≥ e] to an allocated slot.
    pub fn write(&mut self, place: usize, key: &[f32], value: &[f32], range: Option<QuantRange>) {
        let (block, quantized, lane) = self.find(place);
        if !quantized {
            let (ep, e) = (self.ep, self.e);
            let FloatBlock { places, keys, values } = &mut self.floats[block];
            key.iter().enumerate().for_each(|(j, &k)| keys[j * *places + lane] = k);
            values[lane * ep..][..e].copy_from_slice(&value[..e]);
            return;
        }
        let (Some(bits), Some(range)) = (self.layout.bits, range) else { return };
        let (levels, of_value) = (quantize::levels(bits), self.layout.code_bytes(self.e));
        let (e, row) = (self.e, self.layout.code_bytes(self.codes[block].places));
        let CodeBlock { keys, values, scales, .. } = &mut self.codes[block];
        for (j, &k) in key.iter().enumerate() {
            let code = quantize::key_code(k, range.centre[j], range.range[j], levels) as u8;
            write_code(bits, &mut keys[j * row..][..row], lane, code);
        }
        scales[lane] = quantize::value_scale(bits, &value[..e]);
        for (i, &v) in value[..e].iter().enumerate() {
            let code = quantize::value_code(v, scales[lane], levels) as u8;
            write_code(bits, &mut values[lane * of_value..][..of_value], i, code);
        }
    }

    /// Inserts the next key, for which memory is allocated. An evicted key is stored in `key_out` [d] and `value_out` [ep]; returns whether there is one.
    pub fn push(&mut self, (key, value): (&[f32], &[f32]), range: Option<QuantRange>, key_out: &mut [f32], value_out: &mut [f32]) -> bool {
        let (t, Distance { window, sinks }) = (self.next, self.layout.distance);
        let place = self.layout.place(t);
        let full = t >= sinks.saturating_add(window);
        let mut evicted = full.then_some(place);
        if let Some(heavy_hitters) = self.layout.heavy_hitters.filter(|_| full) {
            let first = sinks + window;
            if self.kept < heavy_hitters.keys {
                self.copy(place, first + self.kept, range);
                self.kept += 1;
                evicted = None;
            } else {
                let least = HeavyHitters::evicted(&self.accumulated_attention[first..first + self.kept]);
                if self.accumulated_attention[first + least] <= self.accumulated_attention[place] {
                    evicted = Some(first + least);
                }
            }
        }
        if let Some(evicted) = evicted {
            self.key(evicted, range, key_out);
            self.value(evicted, value_out);
            if evicted != place {
                self.copy(place, evicted, range);
            }
        }
        self.write(place, key, value, range);
        if let Some(attention) = self.accumulated_attention.get_mut(place) {
            *attention = 0.0;
        }
        self.next += 1;
        evicted.is_some()
    }

    fn copy(&mut self, from: usize, to: usize, range: Option<QuantRange>) {
        let (mut key, mut value) = ([0.0f32; 256], [0.0f32; 256]);
        self.key(from, range, &mut key[..self.d]);
        self.value(from, &mut value[..self.ep]);
        self.write(to, &key[..self.d], &value[..self.ep], range);
        self.accumulated_attention[to] = self.accumulated_attention[from];
    }

    /// The far key [width] of a stored key; computed by these features if it is not stored.
    #[inline(always)]
    pub fn far_key<S: Simd>(&self, simd: S, features: Features, key: &[f32], to: &mut [f32]) {
        match self.far_row {
            Some(row) => to.copy_from_slice(&key[row..][..to.len()]),
            None => features.forward(simd, key, to),
        }
    }

    /// Multiplies each channel of all keys, which are in float32.
    pub fn decay_keys(&mut self, m: &[f32]) {
        for FloatBlock { places, keys, .. } in &mut self.floats {
            for (row, m) in keys.chunks_exact_mut(*places).zip(m) {
                row.iter_mut().for_each(|k| *k *= m);
            }
        }
    }

    /// Dequantizes the first n slots of a block into the scratch memory, if it is quantized.
    #[inline(always)]
    pub fn dequantize_block(&self, block: usize, n: usize, range: Option<QuantRange>, scratch: &mut RingScratch) {
        if let Some(block) = block.checked_sub(self.first_code_block()) {
            self.dequantize(block, n, range, scratch.keys, scratch.values);
        }
    }

    /// The transposed keys of a block, the pitch of their rows, and the values; of a quantized block those in the scratch memory.
    #[inline(always)]
    pub fn block<'a>(&'a self, block: usize, scratch: &'a RingScratch) -> (&'a [f32], usize, &'a [f32]) {
        match self.floats.get(block).filter(|_| block < self.first_code_block()) {
            Some(block) => (&block.keys[..], block.places, &block.values[..]),
            None => (&*scratch.keys, BLOCK, &*scratch.values),
        }
    }

    /// r_s ← e^{−1/L}·r_s + Σ_h w_hs / z_h, from the recorded weights of all heads.
    #[inline(always)]
    pub fn accumulate(&mut self, sums: &[QuerySums], scratch: &RingScratch) {
        let Some(heavy_hitters) = self.layout.heavy_hitters else { return };
        let (len, blocks, allocated) = (self.len(), self.blocks(), self.accumulated_attention.len());
        if heavy_hitters.fade.is_some() {
            let fade = heavy_hitters.factor();
            self.accumulated_attention[..len].iter_mut().for_each(|r| *r *= fade);
        }
        for (i, sums) in sums.iter().enumerate() {
            let inverse = 1.0 / sums.z();
            for block in 0..blocks {
                let (first, n) = self.block_places(block);
                let factor = (scratch.rhos[i * blocks + block] - sums.rho).exp() * inverse;
                let weights = &scratch.weights[i * allocated + first..][..n];
                self.accumulated_attention[first..first + n].iter_mut().zip(weights).for_each(|(r, w)| *r += factor * w);
            }
        }
    }

    /// The first n slots of a quantized block in float32.
    #[inline(always)]
    fn dequantize(&self, block: usize, n: usize, range: Option<QuantRange>, to_keys: &mut [f32], to_values: &mut [f32]) {
        let (Some(bits), Some(range)) = (self.layout.bits, range) else { return };
        let CodeBlock { places, keys, values, scales } = &self.codes[block];
        let (levels, row, of_value) = (quantize::levels(bits), self.layout.code_bytes(*places), self.layout.code_bytes(self.e));
        for (j, to) in to_keys.chunks_exact_mut(BLOCK).take(self.d).enumerate() {
            let (centre, width) = (range.centre[j], range.range[j]);
            unpack_row(bits, &keys[j * row..], n, to, |code| quantize::key_value(code, centre, width, levels));
        }
        for (s, to) in to_values.chunks_exact_mut(self.ep).take(n).enumerate() {
            let [low, step] = scales[s];
            unpack_row(bits, &values[s * of_value..], self.e, to, |code| low + step * code);
            to[self.e..].fill(0.0);
        }
    }

    /// Number of keys in the cache at a position: without heavy hitters, and heavy hitters.
    fn len_at(&self, position: usize) -> (usize, usize) {
        let Distance { window, sinks } = self.layout.distance;
        let exact = position.min(sinks.saturating_add(window));
        (exact, (position - exact).min(self.layout.heavy_hitters.map_or(0, |heavy_hitters| heavy_hitters.keys)))
    }

    /// Number of occupied float32 slots at a position.
    pub fn float_len(&self, position: usize) -> usize {
        let (exact, kept) = self.len_at(position);
        (exact + kept).min(self.layout.split()[0])
    }

    /// Moves an empty cache to a position, whose keys remain to be written.
    pub fn resume(&mut self, position: usize) -> Result<(), Error> {
        let (exact, kept) = self.len_at(position);
        self.reserve(exact + kept)?;
        (self.next, self.kept) = (position, kept);
        Ok(())
    }

    /// The positions between the sinks and the other keys that a file with `len` rows in the order of positions does not contain; `None` if a cache at
    /// position `next` cannot be restored from it. Earlier versions stored up to a block of keys more than the window, and without a far kernel one
    /// less.
    pub fn skipped_positions(&self, len: usize, next: usize) -> Option<usize> {
        let Distance { window, sinks } = self.layout.distance;
        let all = sinks.saturating_add(window);
        let least = if self.far_row.is_some() { all } else { all - 1 };
        let fits = len == next || (len < next && (least..all.saturating_add(BLOCK)).contains(&len));
        fits.then(|| next - len)
    }

    /// The codes of all quantized blocks, for files: keys, values, low and step.
    pub fn code_blocks(&self) -> impl Iterator<Item = (&[u8], &[u8], &[[f32; 2]])> {
        self.codes.iter().map(|block| (&block.keys[..], &block.values[..], &block.scales[..]))
    }

    /// Like [`RingKvCache::code_blocks`], mutable.
    pub fn code_blocks_mut(&mut self) -> impl Iterator<Item = (&mut [u8], &mut [u8], &mut [[f32; 2]])> {
        self.codes.iter_mut().map(|block| (&mut block.keys[..], &mut block.values[..], &mut block.scales[..]))
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

impl Variant {
    /// Bytes of the keys and values of a full windowed KV cache, for one kv head with keys of dimension d and values of dimension e. `None` without a
    /// window, or if far keys are in the cache. Weights and log decays per key are not included.
    pub fn window_bytes(&self, d: usize, e: usize) -> Option<usize> {
        Some(CacheLayout::of(self)?.bytes(self.kept_width(d), e, e.next_multiple_of(termwise_kernels::PAD)))
    }
}
