//! Written values from values, forward in time.

use crate::fused::chunks::{ChunkScratch, GroupChunks};
use crate::fused::delta::{KeyTile, TileRows, Writer};
use crate::fused::prepare::gates::decay_columns;
use crate::fused::prepare::transpose_tile;
use crate::state::block::BLOCK;
use crate::state::kv_cache::KvCache;
use termwise_kernels::features::{FeatureTile, ReadState};
use termwise_kernels::simd::{Simd, Task};
use termwise_kernels::triangular::UnitLowerTriangular;
use termwise_kernels::{ROWS, TILE};

/// All positions of one writer.
pub(in crate::fused) struct Solve<'a> {
    pub writer: Writer<'a>,
    /// [T]
    pub beta: &'a [f32],
    /// v [Tp, ep], which becomes u.
    pub v: &'a mut [f32],
    /// u transposed per tile and r [Tp, ep]; only for the backward pass.
    pub vt: &'a mut [f32],
    pub residuals: &'a mut [f32],
    /// Values written in earlier calls, and the index of the head in their group.
    pub cache: Option<(&'a KvCache, usize)>,
    /// Scratch for H.
    pub state: &'a mut [f32],
    pub scratch: ChunkScratch<&'a mut [f32]>,
}

#[repr(align(64))]
struct WeightTile([f32; ROWS * TILE]);

impl Task for Solve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (writer, l) = (self.writer, self.writer.plan());
        let state = std::mem::take(&mut self.state);
        if let Some(group) = writer.group {
            match writer.initial {
                [] => state[..group.group.len].fill(0.0),
                initial => state[..group.group.len].copy_from_slice(initial),
            }
        }
        for chunk in 0..writer.chunk_count() {
            for tile in writer.tiles(chunk) {
                if let Some(group) = writer.group.filter(|_| chunk > 0 || !writer.initial.is_empty()) {
                    self.read(simd, group, chunk, tile, state);
                }
                self.tile(simd, chunk, tile);
            }
            if chunk + 1 < writer.chunk_count() {
                writer.absorb_written(simd, chunk, self.v, state, &mut self.scratch);
            }
        }
        for (tile, columns) in self.vt.chunks_exact_mut(l.shape.e * l.pitch).enumerate() {
            transpose_tile(simd, &self.v[tile * l.tile * l.ep..][..l.pitch * l.ep], l.ep, columns, l.pitch);
        }
    }
}

impl<'a> Solve<'a> {
    /// r −= e^{c_t − c}·Φ̂(k_t)ᵀ·H
    #[inline(always)]
    fn read<S: Simd>(&mut self, simd: S, group: GroupChunks<'a>, chunk: usize, tile: usize, state: &[f32]) {
        let (writer, l, scratch) = (self.writer, self.writer.plan(), &mut self.scratch);
        let count = writer.count(tile);
        let x = writer.reader_columns(simd, group, tile, scratch.x, scratch.channels);
        let factors = &l.factors[writer.h];
        let features = FeatureTile::new(simd, &group.group.basis, (l.pitch, count), x, scratch.lower_orders, factors);
        let (rows, weights, block) = (&mut *scratch.rows, &mut *scratch.weights, &mut *scratch.block);
        simd.call(ReadState { features, h: state, z: &[], ep: l.ep, rows, weights, block });
        group.decays(tile, writer.log_decays(group, chunk)[0], 1.0, scratch.decays);
        let values = self.v[tile * l.tile * l.ep..][..count * l.ep].chunks_exact_mut(l.ep);
        for ((value, read), decay) in values.zip(scratch.rows.chunks_exact(l.ep)).zip(&*scratch.decays) {
            value.iter_mut().zip(read).for_each(|(value, read)| *value -= decay * read);
        }
    }

    /// One tile: reads of the cache and of earlier tiles of the chunk, then its own system.
    #[inline(always)]
    fn tile<S: Simd>(&mut self, simd: S, chunk: usize, tile: usize) {
        let (writer, l) = (self.writer, self.writer.plan());
        let (count, first) = (writer.count(tile), tile * l.tile);
        let (before, own) = self.v.split_at_mut(first * l.ep);
        let own = &mut own[..count * l.ep];
        let mut weights = WeightTile([0.0; ROWS * TILE]);
        let weights = &mut weights.0;
        if let Some((cache, head)) = self.cache {
            for block in 0..cache.blocks() {
                let kept = block * BLOCK;
                let kept = kept..cache.len.min(kept + BLOCK);
                let mut columns = [0.0; TILE];
                let decay = &cache.per_key[head].log_decay;
                let base = if decay.is_empty() { 0.0 } else { decay_columns(&decay[kept.clone()], &mut columns) };
                let kt = &cache.keys[block * cache.d * BLOCK..][..cache.d * BLOCK];
                let written = &cache.values[kept.start * l.ep..kept.end * l.ep];
                let keys = KeyTile { kt, written, pitch: BLOCK, count: kept.len(), tile: None, columns, base };
                writer.subtract_read(simd, tile, &keys, weights, own);
            }
        }
        for earlier in writer.tiles(chunk).start..tile {
            let keys = writer.key_tile(earlier, &before[earlier * l.tile * l.ep..][..l.tile * l.ep]);
            writer.subtract_read(simd, tile, &keys, weights, own);
        }
        let keys = writer.key_tile(tile, &[]);
        for start in (0..count).step_by(ROWS) {
            let rows = start..(start + ROWS).min(count);
            writer.weights(simd, TileRows { tile, rows: rows.clone() }, &keys, true, weights);
            let residuals =
                if self.residuals.is_empty() { &mut [][..] } else { &mut self.residuals[(first + start) * l.ep..][..rows.len() * l.ep] };
            let system = UnitLowerTriangular { n: &weights[..], beta: &self.beta[first..], ep: l.ep };
            system.forward(simd, start, rows.len(), own, residuals);
        }
    }
}
