//! From values to what is written, forward in time.

use crate::fused::chunk::ChunkScratch;
use crate::fused::gates::decay_columns;
use crate::fused::plan::ChunkGroup;
use crate::fused::prepare::transpose_tile;
use crate::fused::write::{Keys, Writer};
use crate::kernels::features::{Points, Read};
use crate::kernels::simd::{Simd, Task};
use crate::kernels::triangular::Strict;
use crate::kernels::{ROWS, TILE};
use crate::state::cache::{BLOCK, Cache};

/// All positions of one writer.
pub(super) struct Solve<'a> {
    pub writer: Writer<'a>,
    /// [T]
    pub beta: &'a [f32],
    /// v [Tp, ep], which becomes u.
    pub v: &'a mut [f32],
    /// u transposed by tile and r [Tp, ep]; empty where they are not wanted.
    pub vt: &'a mut [f32],
    pub kept: &'a mut [f32],
    /// What was written in earlier calls, and the head's place in it.
    pub cache: Option<(&'a Cache, usize)>,
    /// Room for H.
    pub state: &'a mut [f32],
    pub scratch: ChunkScratch<&'a mut [f32]>,
}

#[repr(align(64))]
struct Weights([f32; ROWS * TILE]);

impl Task for Solve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (writer, l) = (self.writer, self.writer.layout());
        let state = std::mem::take(&mut self.state);
        if let Some(group) = writer.group {
            match writer.initial {
                [] => state[..group.len].fill(0.0),
                initial => state[..group.len].copy_from_slice(initial),
            }
        }
        for chunk in 0..writer.chunk_count() {
            for tile in writer.tiles(chunk) {
                if let Some(group) = writer.group.filter(|_| chunk > 0 || !writer.initial.is_empty()) {
                    self.read(simd, group, chunk, tile, state);
                }
                self.tile(simd, chunk, tile);
            }
            if let Some(group) = writer.group.filter(|_| chunk + 1 < writer.chunk_count()) {
                writer.absorb_written(simd, group, chunk, self.v, state, &mut self.scratch);
            }
        }
        for (tile, columns) in self.vt.chunks_exact_mut(l.shape.e * l.pitch).enumerate() {
            transpose_tile(simd, &self.v[tile * l.tile * l.ep..][..l.pitch * l.ep], l.ep, columns, l.pitch);
        }
    }
}

impl Solve<'_> {
    /// r −= e^{c_t − c}·Φ̂(k_t)ᵀ·H
    #[inline(always)]
    fn read<S: Simd>(&mut self, simd: S, group: &ChunkGroup, chunk: usize, tile: usize, state: &[f32]) {
        let (writer, l, scratch) = (self.writer, self.writer.layout(), &mut self.scratch);
        let count = writer.count(tile);
        let x = writer.columns(simd, group, tile, true, scratch.x, scratch.channels);
        let factors = &writer.chunks.factors[writer.h];
        let points = Points::new(simd, &group.basis, (l.pitch, count), x, scratch.lower_orders, factors);
        let (rows, weights, block) = (&mut *scratch.rows, &mut *scratch.weights, &mut *scratch.block);
        simd.call(Read { points, h: state, z: &[], ep: l.ep, rows, weights, block });
        writer.chunks.decays(group, writer.b, tile, writer.log_decays(group, chunk)[0], 1.0, scratch.decays);
        let values = self.v[tile * l.tile * l.ep..][..count * l.ep].chunks_exact_mut(l.ep);
        for ((value, read), decay) in values.zip(scratch.rows.chunks_exact(l.ep)).zip(&*scratch.decays) {
            value.iter_mut().zip(read).for_each(|(value, read)| *value -= decay * read);
        }
    }

    /// One tile: what earlier tiles of its chunk and the cache answer, then its own system.
    #[inline(always)]
    fn tile<S: Simd>(&mut self, simd: S, chunk: usize, tile: usize) {
        let (writer, l) = (self.writer, self.writer.layout());
        let (count, first) = (writer.count(tile), tile * l.tile);
        let (before, own) = self.v.split_at_mut(first * l.ep);
        let own = &mut own[..count * l.ep];
        let mut weights = Weights([0.0; ROWS * TILE]);
        let weights = &mut weights.0;
        if let Some((cache, column)) = self.cache {
            for block in 0..cache.blocks() {
                let kept = block * BLOCK;
                let kept = kept..cache.len.min(kept + BLOCK);
                let mut columns = [0.0; TILE];
                let decay = &cache.columns[column].decay;
                let base = if decay.is_empty() { 0.0 } else { decay_columns(&decay[kept.clone()], &mut columns) };
                let kt = &cache.keys[block * cache.d * BLOCK..][..cache.d * BLOCK];
                let keys = Keys { kt, pitch: BLOCK, count: kept.len(), tile: None, columns, base };
                writer.answer(simd, tile, &keys, &cache.values[kept.start * l.ep..kept.end * l.ep], weights, own);
            }
        }
        for earlier in writer.tiles(chunk).start..tile {
            writer.answer(simd, tile, &writer.keys(earlier), &before[earlier * l.tile * l.ep..][..l.tile * l.ep], weights, own);
        }
        let keys = writer.keys(tile);
        for start in (0..count).step_by(ROWS) {
            let rows = start..(start + ROWS).min(count);
            writer.weights(simd, tile, rows.clone(), &keys, true, weights);
            let kept = if self.kept.is_empty() { &mut [][..] } else { &mut self.kept[(first + start) * l.ep..][..rows.len() * l.ep] };
            let system = Strict { n: &weights[..], beta: &self.beta[first..], ep: l.ep };
            system.forward(simd, start, rows.len(), own, kept);
        }
    }
}
