//! Chunk mode, forward: one split of the chunks of one kv head.

use crate::fused::chunks::{GroupChunks, Split, StateValues};
use crate::fused::epilogue::{Outputs, RowSums};
use crate::fused::tiles::forward::{CachedKeys, ForwardTile, SeenKeys, TileQueries};
use crate::{KeyRange, Report};
use termwise_kernels::bf16_tile::TileF32;
use termwise_kernels::disjoint::Block;
use termwise_kernels::features::{FeatureTile, ReadState, Transpose};
use termwise_kernels::simd::{Simd, Task};

/// Computes y of the chunks of one split from the state at its start. If requested, the state advances to the end of the split.
pub struct ForwardSplit<'a, 'b> {
    pub of: Split<'a>,
    /// U, z and ρ of the heads of the kv head in this split; empty if they are not saved.
    pub sums: [Block<'b, f32>; 3],
    /// y of the same rows.
    pub y: Block<'b, f32>,
}

impl Task for ForwardSplit<'_, '_> {
    type Output = Report;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> Report {
        let (c, l, b) = (self.of.chunks, self.of.chunks.plan, self.of.b);
        let mut report = Report::default();
        for group in l.groups_of(self.of.g) {
            let memory = self.of.take_state(group);
            let mut state = StateValues::of(group, c, memory);
            let of = c.group(group, b);
            for chunk in l.split(self.of.split) {
                for &h in &group.heads {
                    let known = (chunk > 0 || c.has_initial_state()).then_some((&*state.h, &*state.z));
                    report = report.or(self.head(simd, of, h, chunk, known));
                }
                if chunk + 1 < l.split(self.of.split).end || c.has_initial_state() {
                    of.absorb_keys(simd, chunk, &mut state, &mut self.of.scratch);
                }
            }
            self.of.put_back(memory);
        }
        report
    }
}

impl ForwardSplit<'_, '_> {
    /// One head's queries of one chunk.
    #[inline(always)]
    fn head<S: Simd>(&mut self, simd: S, of: GroupChunks, h: usize, chunk: usize, known: Option<(&[f32], &[f32])>) -> Report {
        let (c, l, b, group) = (self.of.chunks, self.of.chunks.plan, self.of.b, of.group);
        let s = l.shape;
        let tiles = l.tiles_of(chunk);
        let (first, last) = (tiles.start * l.tile, (tiles.end * l.tile).min(s.time));
        let (in_group, start) = (h % s.group(), l.split_parts.positions[self.of.split]);
        let scratch = &mut self.of.scratch;
        c.prepared.sources.query(b, h, group.range.is_far()).fill(simd, first, s.time, &mut scratch.queries[..(last - first) * l.dp], l.dp);
        let before = of.log_decay_at(first);
        let mut report = Report::default();
        for tile in tiles.clone() {
            let count = of.count(tile);
            let (from, to) = (tile * l.tile - start, ((tile + 1) * l.tile).min(s.time) - start);
            let [u, z, rho] = &mut self.sums;
            let mut sums = if u.is_empty() {
                RowSums { u: scratch.u, z: scratch.z, rho: scratch.rho }
            } else {
                RowSums { u: u.rows(in_group, from, to), z: z.rows(in_group, from, to), rho: rho.rows(in_group, from, to) }
            };
            let mut far_sums = RowSums { u: scratch.far_u, z: scratch.far_z, rho: scratch.far_rho };
            let queries = &scratch.queries[(tile - tiles.start) * l.tile * l.dp..];
            let mut begun = false;
            if let Some((state_h, state_z)) = known.filter(|_| count > 0) {
                let dim = group.basis.d();
                simd.call(Transpose { rows: queries, stride: l.dp, count, dim, columns: scratch.x, len: l.pitch });
                of.decay_queries(simd, tile, scratch.x, scratch.channels);
                let features = FeatureTile::new(simd, &group.basis, (l.pitch, count), scratch.x, scratch.lower_orders, &l.factors[h]);
                let remembered = if group.range.is_far() { &mut far_sums } else { &mut sums };
                let (u, z) = (&mut remembered.u[..count * l.ep], &mut remembered.z[..count]);
                z.fill(0.0);
                let weights = &mut *scratch.weights;
                simd.call(ReadState { features, h: state_h, z: state_z, ep: l.ep, rows: u, weights, block: scratch.block });
                if group.sums {
                    z.copy_from_slice(&scratch.weights[..count]);
                }
                if group.decays {
                    of.decays(tile, before, 1.0, scratch.decays);
                    for ((u, z), &decay) in u.chunks_exact_mut(l.ep).zip(z).zip(&*scratch.decays) {
                        u.iter_mut().for_each(|u| *u *= decay);
                        *z *= decay;
                    }
                }
                begun = true;
            }
            let q = TileQueries::Prepared(queries);
            let (near, far, cached) = match group.range {
                KeyRange::Near => (SeenKeys { from: tiles.start, begun, q }, None, None),
                KeyRange::Far => {
                    let near = SeenKeys { from: 0, begun: false, q: TileQueries::Scratch(scratch.near) };
                    (near, Some(SeenKeys { from: l.frontier(chunk, group.lag), begun, q }), CachedKeys::of(&c.prepared.call, b, h, None))
                }
            };
            let to = Outputs { y: &mut self.y, head: in_group, row: from };
            let (precision, converted) = (TileF32, &mut [][..]);
            let task = ForwardTile { precision, converted, prepared: c.prepared, b, h, tile, near, far, cached, sums, far_sums, to };
            report = report.or(simd.call(task));
        }
        report
    }
}
