//! The KV cache of kernels without a finite feature map: all keys and values, appended one by one.
//!
//! Keys are transposed in blocks, [blocks, d, BLOCK]; values are rows, [keys, ep].
//!
//! Prefill reads windows in the same form: a copy of a ring in the order of positions, with a gap between the sinks and the window.

use crate::layer::{KeyTransform, StateGroup};
use crate::parts::distance::Distance;
use crate::state::block::{BLOCK, KeyBlock, PerKey};
use crate::{Buffer, Error};
use termwise_kernels::score_rows::Visible;

/// Keys and values of one state group of one batch row.
#[derive(Clone, Debug, Default)]
pub(crate) struct KvCache {
    /// Values of a key: for near queries, then for far queries if those read other ones.
    pub d: usize,
    /// e in whole vectors.
    pub ep: usize,
    /// Keys in the cache.
    pub len: usize,
    /// Positions between the sinks and the other keys that are not in the cache: 0 except in the copy of a ring.
    pub gap: usize,
    /// Index of the first value for far queries among the d values of a key: 0 if near and far queries read the same ones.
    pub far_row: usize,
    /// [blocks, d, BLOCK]
    pub keys: Buffer,
    /// [blocks·BLOCK, ep]
    pub values: Buffer,
    /// Per head of the group.
    pub per_key: Vec<PerKey>,
}

impl KvCache {
    pub fn new(d: usize, ep: usize, heads: usize, far_row: usize) -> KvCache {
        KvCache { d, ep, far_row, per_key: vec![PerKey::default(); heads], ..KvCache::default() }
    }

    /// The empty cache of a state group, whose keys are transformed by one of these.
    pub fn of_group(group: &StateGroup, transforms: &[KeyTransform], ep: usize) -> KvCache {
        let near = transforms[group.key_transform].width;
        let own =
            group.far.as_ref().filter(|far| far.key_transform != group.key_transform).map_or(0, |far| transforms[far.key_transform].width);
        KvCache::new(near + own, ep, group.heads.len(), if own > 0 { near } else { 0 })
    }

    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes() + self.per_key.iter().map(PerKey::bytes).sum::<usize>()
    }

    /// Removes all keys; memory stays allocated.
    pub fn clear(&mut self) {
        (self.len, self.gap) = (0, 0);
        self.per_key.iter_mut().for_each(PerKey::clear);
    }

    /// Empties the cache for keys of other sizes; memory stays allocated.
    pub fn reset(&mut self, d: usize, ep: usize, heads: usize, far_row: usize) {
        self.clear();
        (self.d, self.ep, self.far_row) = (d, ep, far_row);
        self.per_key.resize_with(heads, PerKey::default);
    }

    /// Allocates memory for `more` keys; grows by at least half, so copying has constant cost per key.
    pub fn reserve(&mut self, more: usize) -> Result<(), Error> {
        let capacity = (self.values.len() / (self.ep * BLOCK)).min(self.keys.len() / (self.d * BLOCK)) * BLOCK;
        let needed = self.len + more;
        if needed <= capacity {
            return Ok(());
        }
        let blocks = needed.max(capacity + capacity / 2).div_ceil(BLOCK);
        let used = self.blocks();
        let grown = |old: &Buffer, block: usize| -> Result<Buffer, Error> {
            let missing = Error::Memory { values: usize::MAX, bytes: 4 };
            let mut new = Buffer::zeros(blocks.checked_mul(block).ok_or(missing)?)?;
            new[..used * block].copy_from_slice(&old[..used * block]);
            Ok(new)
        };
        let (keys, values) = (grown(&self.keys, self.d * BLOCK)?, grown(&self.values, BLOCK * self.ep)?);
        (self.keys, self.values) = (keys, values);
        Ok(())
    }

    /// The position of the next key.
    pub fn next_position(&self) -> usize {
        self.len + self.gap
    }

    pub fn blocks(&self) -> usize {
        self.len.div_ceil(BLOCK)
    }

    /// Keys of a block that the query at position t sees with the near kernel.
    #[inline(always)]
    pub fn near_visible(&self, distance: Distance, block: usize, t: usize) -> Visible {
        let (first, Distance { window, sinks }) = (block * BLOCK, distance);
        let until = (self.len - first).min(BLOCK);
        let from = (t + 1).saturating_sub(window).saturating_sub(self.gap + first);
        Visible { from: from.min(until), until, sinks: sinks.saturating_sub(first).min(until) }
    }

    /// Keys of a block that the query at position t sees with the far kernel: those that have left the window.
    #[inline(always)]
    pub fn far_visible(&self, distance: Distance, block: usize, t: usize) -> Visible {
        let first = block * BLOCK;
        let count = (self.len - first).min(BLOCK);
        let until = (t + 1).saturating_sub(distance.window).saturating_sub(self.gap + first).min(count);
        let from = distance.sinks.saturating_sub(first).min(count);
        Visible { from: from.min(until), until, sinks: 0 }
    }

    /// The keys of a block as near or far queries of this width read them.
    pub fn block_keys(&self, block: usize, far: bool, width: usize) -> &[f32] {
        let first = if far { self.far_row } else { 0 };
        &self.keys[(block * self.d + first) * BLOCK..][..width * BLOCK]
    }

    /// One block for the near or far queries of this width of the head with this index in the group.
    #[inline(always)]
    pub fn block(&self, block: usize, far: bool, width: usize, head: usize, visible: Visible) -> KeyBlock<'_> {
        let (keys, first) = (self.block_keys(block, far, width), block * BLOCK);
        KeyBlock { keys, pitch: BLOCK, values: &self.values[first * self.ep..], visible, per_key: &self.per_key[head], first }
    }

    /// Appends a prepared key [d] and value [at least e], for which memory is allocated.
    pub fn push(&mut self, key: &[f32], value: &[f32]) {
        let (block, lane) = (self.len / BLOCK, self.len % BLOCK);
        let keys = &mut self.keys[block * self.d * BLOCK..][..self.d * BLOCK];
        for (row, &key) in keys.chunks_exact_mut(BLOCK).zip(key) {
            row[lane] = key;
        }
        self.values[self.len * self.ep..][..value.len()].copy_from_slice(value);
        self.len += 1;
    }

    /// Multiplies each channel of all keys.
    pub fn decay_keys(&mut self, m: &[f32]) {
        let used = self.blocks() * self.d * BLOCK;
        for (row, m) in self.keys[..used].chunks_exact_mut(BLOCK).zip(m.iter().cycle()) {
            row.iter_mut().for_each(|k| *k *= m);
        }
    }

    /// Key s into `key` [d].
    pub fn key(&self, s: usize, key: &mut [f32]) {
        let keys = &self.keys[s / BLOCK * self.d * BLOCK..][..self.d * BLOCK];
        for (key, row) in key.iter_mut().zip(keys.chunks_exact(BLOCK)) {
            *key = row[s % BLOCK];
        }
    }

    /// Value s, padded [ep].
    pub fn value(&self, s: usize) -> &[f32] {
        &self.values[s * self.ep..][..self.ep]
    }
}
