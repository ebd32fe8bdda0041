//! The windowed KV cache: sinks, a ring of the last W keys, and slots for heavy hitters, in memory of a fixed size.
//!
//! ```text
//! slots      sinks 0..S · ring S..S + W, position s ≥ S at S + (s − S) mod W · heavy hitters S + W..S + W + N
//! a block    keys transposed [d, slots], values as rows [slots, ep]; at most 128 slots, allocated when the first of them is needed
//! 16, 8 or   codes of keys [d, slots] and of values [slots, e], in bytes; scales of keys [groups of d, slots] and of values [slots, groups of e];
//! 4 bits     the sinks have 16 bits in blocks of their own; vectors of 4 bits are rotated
//! ```
//!
//! The occupied slots are always the first ones. A query sees all of them.

use crate::layer::{CacheLayout, Features, KeyTransform, StateGroup};
use crate::parts::distance::Distance;
use crate::parts::heavy_hitters::HeavyHitters;
use crate::parts::quantize::{self, GROUP, RowFormat};
use crate::state::block::{BLOCK, PerKey, QuerySums};
use crate::{Buffer, Error, Variant};
use half::bf16;
use termwise_kernels::buffer::resize;
use termwise_kernels::simd::Simd;

/// Values after the last key that loads of whole vectors may read.
const LOAD_PADDING: usize = 64;

impl CacheLayout {
    /// Number of sinks in blocks of their own, and of all other slots.
    fn split(self) -> [usize; 2] {
        let sinks = if self.bits.is_some() { self.distance.sinks } else { 0 };
        [sinks, self.slots() - sinks]
    }

    /// The formats of stored keys and values: of the sinks, or of all other slots; `None` for float32.
    fn formats(self, sink: bool) -> Option<[RowFormat; 2]> {
        self.bits.map(|bits| [bits.key_format(sink), bits.value_format(sink)])
    }

    /// Bytes of a block of n slots.
    fn block_bytes(self, n: usize, sink: bool, [d, e, ep]: [usize; 3]) -> usize {
        let Some([key, value]) = self.formats(sink) else { return 4 * (d * n + LOAD_PADDING + n * ep) };
        d * key.code_bytes(n) + n * value.code_bytes(e) + 2 * n * (key.scales(d) + value.scales(e))
    }

    /// Bytes of all slots, for keys of d and values of e numbers, the latter padded to ep.
    pub fn bytes(self, d: usize, e: usize, ep: usize) -> usize {
        let all = |slots: usize, sink: bool| {
            let rest = if slots.is_multiple_of(BLOCK) { 0 } else { self.block_bytes(slots % BLOCK, sink, [d, e, ep]) };
            (slots / BLOCK).saturating_mul(self.block_bytes(BLOCK, sink, [d, e, ep])).saturating_add(rest)
        };
        let [sinks, others] = self.split();
        let attention = if self.heavy_hitters.is_some() { self.slots().saturating_mul(4) } else { 0 };
        all(sinks, true).saturating_add(all(others, false)).saturating_add(attention)
    }

    /// Number of slots allocated for this many keys: whole blocks, up to all slots.
    fn allocated(self, keys: usize) -> usize {
        keys.checked_next_multiple_of(BLOCK).map_or(self.slots(), |made| made.min(self.slots()))
    }

    /// The slot into which the key of a position is inserted.
    pub fn slot(self, position: usize) -> usize {
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
    pub heavy_hitter_count: usize,
    /// The slots: the sinks in blocks of their own if there are codes, then all others.
    blocks: Vec<SlotBlock>,
    /// r of each slot; empty without heavy hitters.
    pub accumulated_attention: Vec<f32>,
    /// Per head of the group, by slot.
    pub per_key: Vec<PerKey>,
}

/// At most 128 slots.
#[derive(Clone, Debug)]
enum SlotBlock {
    Floats { slots: usize, keys: Buffer, values: Buffer },
    Codes(CodeBlock),
}

#[derive(Clone, Debug)]
pub(crate) struct CodeBlock {
    slots: usize,
    key: RowFormat,
    value: RowFormat,
    /// The tensors of a file.
    pub keys: Vec<u8>,
    pub values: Vec<u8>,
    /// bfloat16
    pub key_scales: Vec<u16>,
    pub value_scales: Vec<u16>,
}

impl SlotBlock {
    fn new(layout: CacheLayout, slots: usize, sink: bool, [d, e, ep]: [usize; 3]) -> Result<SlotBlock, Error> {
        let Some([key, value]) = layout.formats(sink) else {
            let (keys, values) = (Buffer::zeros(d * slots + LOAD_PADDING)?, Buffer::zeros(slots * ep)?);
            return Ok(SlotBlock::Floats { slots, keys, values });
        };
        Ok(SlotBlock::Codes(CodeBlock {
            slots,
            key,
            value,
            keys: vec![0; d * key.code_bytes(slots)],
            values: vec![0; slots * value.code_bytes(e)],
            key_scales: vec![0; key.scales(d) * slots],
            value_scales: vec![0; slots * value.scales(e)],
        }))
    }

    fn bytes(&self) -> usize {
        match self {
            SlotBlock::Floats { keys, values, .. } => keys.bytes() + values.bytes(),
            SlotBlock::Codes(block) => {
                block.keys.capacity() + block.values.capacity() + 2 * (block.key_scales.capacity() + block.value_scales.capacity())
            }
        }
    }
}

impl CodeBlock {
    /// Writes a key and a value in the basis of storage.
    fn write(&mut self, lane: usize, key: &[f32], value: &[f32]) {
        let row = self.key.code_bytes(self.slots);
        for (group, values) in key.chunks(GROUP).enumerate() {
            let scale = quantize::scale(self.key.bits, values);
            if let Some(to) = self.key_scales.get_mut(group * self.slots + lane) {
                *to = bf16::from_f32(scale).to_bits();
            }
            for (j, &k) in values.iter().enumerate() {
                let codes = &mut self.keys[(group * GROUP + j) * row..][..row];
                quantize::write_code(self.key.bits, codes, lane, quantize::code(self.key.bits, k, scale));
            }
        }
        let (row, scales) = (self.value.code_bytes(value.len()), self.value.scales(value.len()));
        let codes = &mut self.values[lane * row..][..row];
        for (group, values) in value.chunks(GROUP).enumerate() {
            let scale = quantize::scale(self.value.bits, values);
            if let Some(to) = self.value_scales.get_mut(lane * scales + group).filter(|_| scales > 0) {
                *to = bf16::from_f32(scale).to_bits();
            }
            for (i, &v) in values.iter().enumerate() {
                quantize::write_code(self.value.bits, codes, group * GROUP + i, quantize::code(self.value.bits, v, scale));
            }
        }
    }

    /// The key of a slot in the basis of storage.
    fn key(&self, lane: usize, key: &mut [f32]) {
        let (bits, row) = (self.key.bits, self.key.code_bytes(self.slots));
        for (j, k) in key.iter_mut().enumerate() {
            let scale = self.key_scales.get(j / GROUP * self.slots + lane).map_or(1.0, |&scale| widen(scale));
            *k = quantize::value(bits, quantize::read_code(bits, &self.keys[j * row..], lane), scale);
        }
    }

    /// The value of a slot in the basis of storage.
    #[inline(always)]
    fn value(&self, lane: usize, value: &mut [f32]) {
        let (bits, row, scales) = (self.value.bits, self.value.code_bytes(value.len()), self.value.scales(value.len()));
        let codes = &self.values[lane * row..][..row];
        for (group, to) in value.chunks_mut(GROUP).enumerate() {
            let scale = if scales > 0 { widen(self.value_scales[lane * scales + group]) } else { 1.0 };
            let first = group * GROUP;
            unpack(bits, &codes[self.value.code_bytes(first)..], to, |_| scale);
        }
    }

    /// The first n slots in float32: keys [d, BLOCK] and values [n, ep], in the basis of storage.
    #[inline(always)]
    fn dequantize(&self, n: usize, [d, e, ep]: [usize; 3], keys: &mut [f32], values: &mut [f32]) {
        let row = self.key.code_bytes(self.slots);
        let mut scales = [1.0f32; BLOCK];
        for (j, to) in keys.chunks_exact_mut(BLOCK).take(d).enumerate() {
            if j % GROUP == 0 && self.key.bits < 16 {
                let from = &self.key_scales[j / GROUP * self.slots..][..n];
                scales.iter_mut().zip(from).for_each(|(to, &scale)| *to = widen(scale));
            }
            unpack(self.key.bits, &self.keys[j * row..][..row], &mut to[..n], |lane| scales[lane]);
        }
        for (lane, to) in values.chunks_exact_mut(ep).take(n).enumerate() {
            self.value(lane, &mut to[..e]);
            to[e..].fill(0.0);
        }
    }
}

#[inline(always)]
fn widen(scale: u16) -> f32 {
    f32::from_bits(u32::from(scale) << 16)
}

/// The values of consecutive codes with these scales.
#[inline(always)]
fn unpack(bits: u32, codes: &[u8], to: &mut [f32], scale: impl Fn(usize) -> f32) {
    match bits {
        16 => {
            for (to, code) in to.iter_mut().zip(codes.chunks_exact(2)) {
                *to = quantize::value(16, u16::from_le_bytes([code[0], code[1]]), 1.0);
            }
        }
        8 => to.iter_mut().zip(codes).enumerate().for_each(|(i, (to, &code))| *to = quantize::value(8, u16::from(code), scale(i))),
        _ => {
            for (pair, (to, &code)) in to.chunks_mut(2).zip(codes).enumerate() {
                to[0] = quantize::value(4, u16::from(code & 15), scale(2 * pair));
                if let Some(to) = to.get_mut(1) {
                    *to = quantize::value(4, u16::from(code >> 4), scale(2 * pair + 1));
                }
            }
        }
    }
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
        // The sinks and all other slots each end with a partial block.
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
            let (first, n) = ring.block_slots(block);
            self.weights[head * ring.accumulated_attention.len() + first..][..n].copy_from_slice(&weights[..n]);
            self.rhos[head * ring.blocks() + block] = rho;
        }
    }
}

impl RingKvCache {
    /// The empty cache of a state group with a window, whose keys are transformed by one of these.
    pub fn new(group: &StateGroup, transforms: &[KeyTransform], [e, ep]: [usize; 2], layout: CacheLayout) -> RingKvCache {
        let near = &transforms[group.key_transform];
        let far = group.far.as_ref().filter(|_| !layout.plain);
        let own = far.filter(|far| far.key_transform != group.key_transform).map_or(0, |far| transforms[far.key_transform].width);
        let far_row = far.map(|_| if own > 0 { near.width } else { 0 });
        RingKvCache {
            d: near.width + own,
            e,
            ep,
            layout,
            far_row,
            next: 0,
            heavy_hitter_count: 0,
            blocks: Vec::new(),
            accumulated_attention: Vec::new(),
            per_key: vec![PerKey::default(); group.heads.len()],
        }
    }

    /// Removes all keys; memory stays allocated.
    pub fn clear(&mut self) {
        (self.next, self.heavy_hitter_count) = (0, 0);
        self.accumulated_attention.fill(0.0);
        self.per_key.iter_mut().for_each(PerKey::clear);
    }

    pub fn bytes(&self) -> usize {
        let blocks: usize = self.blocks.iter().map(SlotBlock::bytes).sum();
        blocks + 4 * self.accumulated_attention.capacity() + self.per_key.iter().map(PerKey::bytes).sum::<usize>()
    }

    /// Keys in the cache.
    pub fn len(&self) -> usize {
        self.next.min(self.layout.distance.sinks.saturating_add(self.layout.distance.window)) + self.heavy_hitter_count
    }

    /// Keys that were evicted.
    pub fn evicted(&self) -> usize {
        self.next - self.len()
    }

    /// Allocates memory for `more` keys.
    pub fn reserve(&mut self, more: usize) -> Result<(), Error> {
        let all = self.len().saturating_add(more).min(self.layout.slots());
        let [sinks, others] = self.layout.split();
        let sink_blocks = sinks.div_ceil(BLOCK);
        loop {
            let (count, sink) = (self.blocks.len(), self.blocks.len() < sink_blocks);
            let (first, region, at) = if sink { (0, sinks, count) } else { (sinks, others, count - sink_blocks) };
            if first + at * BLOCK >= all || at * BLOCK >= region {
                break;
            }
            let slots = (region - at * BLOCK).min(BLOCK);
            self.blocks.push(SlotBlock::new(self.layout, slots, sink, [self.d, self.e, self.ep])?);
        }
        if self.layout.heavy_hitters.is_some() && self.accumulated_attention.len() < all {
            resize(&mut self.accumulated_attention, self.layout.allocated(all))?;
        }
        Ok(())
    }

    /// Number of blocks of sinks.
    fn sink_blocks(&self) -> usize {
        self.layout.split()[0].div_ceil(BLOCK)
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// The first slot of a block, and the number of its occupied slots.
    #[inline(always)]
    pub fn block_slots(&self, block: usize) -> (usize, usize) {
        let ([sinks, _], sink_blocks) = (self.layout.split(), self.sink_blocks());
        let (first, end) =
            if block < sink_blocks { (block * BLOCK, sinks) } else { (sinks + (block - sink_blocks) * BLOCK, self.layout.slots()) };
        (first, self.len().min(end).saturating_sub(first).min(BLOCK))
    }

    /// The block of a slot and its index in it.
    fn find(&self, slot: usize) -> (usize, usize) {
        let [sinks, _] = self.layout.split();
        if slot < sinks { (slot / BLOCK, slot % BLOCK) } else { (self.sink_blocks() + (slot - sinks) / BLOCK, (slot - sinks) % BLOCK) }
    }

    /// The key in a slot, into `key` [d], in the basis of storage.
    pub fn key(&self, slot: usize, key: &mut [f32]) {
        let (block, lane) = self.find(slot);
        match &self.blocks[block] {
            SlotBlock::Floats { slots, keys, .. } => key.iter_mut().enumerate().for_each(|(j, key)| *key = keys[j * slots + lane]),
            SlotBlock::Codes(codes) => codes.key(lane, key),
        }
    }

    /// The value in a slot, into `value` [ep].
    pub fn value(&self, slot: usize, value: &mut [f32]) {
        self.stored_value(slot, value);
        if self.rotates_values() {
            quantize::rotate(&mut value[..self.e]);
        }
    }

    /// The value in a slot, into `value` [ep], in the basis of storage.
    fn stored_value(&self, slot: usize, value: &mut [f32]) {
        let (block, lane) = self.find(slot);
        value[self.e..].fill(0.0);
        match &self.blocks[block] {
            SlotBlock::Floats { values, .. } => value[..self.e].copy_from_slice(&values[lane * self.ep..][..self.e]),
            SlotBlock::Codes(codes) => codes.value(lane, &mut value[..self.e]),
        }
    }

    /// Writes a key [d] in the basis of storage and a value [≥ e] to an allocated slot.
    pub fn write(&mut self, slot: usize, key: &[f32], value: &[f32]) {
        if self.rotates_values() {
            let mut rotated = [0.0f32; 256];
            let rotated = &mut rotated[..self.e];
            rotated.copy_from_slice(&value[..self.e]);
            quantize::rotate(rotated);
            self.store(slot, key, rotated);
        } else {
            self.store(slot, key, value);
        }
    }

    /// Writes a key [d] and a value [≥ e] in the basis of storage to an allocated slot.
    fn store(&mut self, slot: usize, key: &[f32], value: &[f32]) {
        let ((block, lane), ep, e) = (self.find(slot), self.ep, self.e);
        match &mut self.blocks[block] {
            SlotBlock::Floats { slots, keys, values } => {
                key.iter().enumerate().for_each(|(j, &k)| keys[j * *slots + lane] = k);
                values[lane * ep..][..e].copy_from_slice(&value[..e]);
            }
            SlotBlock::Codes(codes) => codes.write(lane, key, &value[..e]),
        }
    }

    /// Whether values are stored rotated.
    pub fn rotates_values(&self) -> bool {
        self.layout.bits.is_some_and(|bits| bits.values == 4)
    }

    /// Inserts the next key, for which memory is allocated. An evicted key is stored in `key_out` [d] and `value_out` [ep]; returns whether there is one.
    pub fn push(&mut self, (key, value): (&[f32], &[f32]), key_out: &mut [f32], value_out: &mut [f32]) -> bool {
        let (t, Distance { window, sinks }) = (self.next, self.layout.distance);
        let slot = self.layout.slot(t);
        let full = t >= sinks.saturating_add(window);
        let mut evicted = full.then_some(slot);
        if let Some(heavy_hitters) = self.layout.heavy_hitters.filter(|_| full) {
            let first = sinks + window;
            if self.heavy_hitter_count < heavy_hitters.keys {
                self.copy(slot, first + self.heavy_hitter_count);
                self.heavy_hitter_count += 1;
                evicted = None;
            } else {
                let least = HeavyHitters::evicted(&self.accumulated_attention[first..first + self.heavy_hitter_count]);
                if self.accumulated_attention[first + least] <= self.accumulated_attention[slot] {
                    evicted = Some(first + least);
                }
            }
        }
        if let Some(evicted) = evicted {
            self.key(evicted, key_out);
            self.value(evicted, value_out);
            if evicted != slot {
                self.copy(slot, evicted);
            }
        }
        self.write(slot, key, value);
        if let Some(attention) = self.accumulated_attention.get_mut(slot) {
            *attention = 0.0;
        }
        self.next += 1;
        evicted.is_some()
    }

    fn copy(&mut self, from: usize, to: usize) {
        let (mut key, mut value) = ([0.0f32; 256], [0.0f32; 256]);
        self.key(from, &mut key[..self.d]);
        self.stored_value(from, &mut value[..self.ep]);
        self.store(to, &key[..self.d], &value[..self.ep]);
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
        for block in &mut self.blocks {
            let SlotBlock::Floats { slots, keys, .. } = block else { continue };
            for (row, m) in keys.chunks_exact_mut(*slots).zip(m) {
                row.iter_mut().for_each(|k| *k *= m);
            }
        }
    }

    /// Dequantizes the first n slots of a block into the scratch memory, if it has codes.
    #[inline(always)]
    pub fn dequantize_block(&self, block: usize, n: usize, scratch: &mut RingScratch) {
        if let SlotBlock::Codes(codes) = &self.blocks[block] {
            codes.dequantize(n, [self.d, self.e, self.ep], scratch.keys, scratch.values);
        }
    }

    /// The transposed keys of a block, the pitch of their rows, and the values; of a block with codes those in the scratch memory.
    #[inline(always)]
    pub fn block<'a>(&'a self, block: usize, scratch: &'a RingScratch) -> (&'a [f32], usize, &'a [f32]) {
        match &self.blocks[block] {
            SlotBlock::Floats { slots, keys, values } => (&keys[..], *slots, &values[..]),
            SlotBlock::Codes(_) => (&*scratch.keys, BLOCK, &*scratch.values),
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
                let (first, n) = self.block_slots(block);
                let factor = (scratch.rhos[i * blocks + block] - sums.rho).exp() * inverse;
                let weights = &scratch.weights[i * allocated + first..][..n];
                self.accumulated_attention[first..first + n].iter_mut().zip(weights).for_each(|(r, w)| *r += factor * w);
            }
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
        let (exact, heavy_hitter_count) = self.len_at(position);
        if self.layout.bits.is_some() { 0 } else { exact + heavy_hitter_count }
    }

    /// Moves an empty cache to a position, whose keys remain to be written.
    pub fn resume(&mut self, position: usize) -> Result<(), Error> {
        let (exact, heavy_hitter_count) = self.len_at(position);
        self.reserve(exact + heavy_hitter_count)?;
        (self.next, self.heavy_hitter_count) = (position, heavy_hitter_count);
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

    /// The blocks with codes, for files.
    pub fn code_blocks(&self) -> impl Iterator<Item = &CodeBlock> {
        self.blocks.iter().filter_map(|block| if let SlotBlock::Codes(codes) = block { Some(codes) } else { None })
    }

    /// Like [`RingKvCache::code_blocks`], mutable.
    pub fn code_blocks_mut(&mut self) -> impl Iterator<Item = &mut CodeBlock> {
        self.blocks.iter_mut().filter_map(|block| if let SlotBlock::Codes(codes) = block { Some(codes) } else { None })
    }
}

impl Variant {
    /// Bytes of the keys and values of a full windowed KV cache, for one kv head with keys of dimension d and values of dimension e. `None` without a
    /// window, or if far keys are in the cache. Weights and log decays per key are not included.
    pub fn window_bytes(&self, d: usize, e: usize) -> Option<usize> {
        Some(CacheLayout::of(self)?.bytes(self.kept_width(d), e, e.next_multiple_of(termwise_kernels::PAD)))
    }
}
