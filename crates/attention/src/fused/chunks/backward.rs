//! Backward pass through the states: forward in time for queries, backward in time for keys and values.

use crate::fused::chunks::{GroupChunks, Split, StateRead, StateValues, multiply_columns};
use crate::fused::gradients::{KeyGrads, QueryGrads};
use termwise_kernels::features::{FeatureTile, ReadState};
use termwise_kernels::real::dot;
use termwise_kernels::simd::{Simd, Task};

/// The queries of one split against the states before their chunks: dq, and the queries' part of dc and da.
pub struct QuerySplit<'a> {
    pub of: Split<'a>,
    pub to: QueryGrads<'a>,
}

impl Task for QuerySplit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (c, l, b) = (self.of.chunks, self.of.chunks.plan, self.of.b);
        for group in l.groups_of(self.of.g) {
            let memory = self.of.take_state(group);
            let mut state = StateValues::of(group, c, memory);
            let of = c.group(group, b);
            let chunks = l.split(self.of.split);
            for chunk in chunks.clone() {
                if chunk > 0 {
                    for &h in &group.heads {
                        self.head(simd, of, h, chunk, &state);
                    }
                }
                if chunk + 1 < chunks.end {
                    of.absorb_keys(simd, chunk, &mut state, &mut self.of.scratch);
                }
            }
            self.of.put_back(memory);
        }
    }
}

impl QuerySplit<'_> {
    #[inline(always)]
    fn head<S: Simd>(&mut self, simd: S, of: GroupChunks, h: usize, chunk: usize, state: &StateValues) {
        let (l, group) = (self.of.chunks.plan, of.group);
        let s = l.shape;
        let (in_group, start) = (h % s.group(), l.split_parts.positions[self.of.split]);
        let (head, range) = (l.branch(h, group.range), group.range as usize);
        let before = of.log_decay_at(chunk * l.chunk_len());
        for tile in l.tiles_of(chunk) {
            let count = of.count(tile);
            if count == 0 {
                break;
            }
            let scratch = &mut self.of.scratch;
            of.decays(tile, before, 1.0, scratch.decays);
            of.query_rows(simd, h, tile, scratch);
            of.decay_queries(simd, tile, scratch.x, scratch.channels);
            let back = &mut scratch.backward;
            back.turn(simd, l, scratch.rows, count);
            let wanted = if group.decays || head.learned > 0 { group.basis.orders().len() * l.pitch } else { 0 };
            let features = FeatureTile::new(simd, &group.basis, (l.pitch, count), scratch.x, scratch.lower_orders, &l.factors[h]);
            let read = StateRead { features, h: state.h, z: state.z, weights: scratch.weights };
            back.slope(simd, l, read, scratch.block, wanted);
            if group.channels {
                multiply_columns(back.dx, &scratch.channels[..s.d * l.pitch]);
            }
            let (from, to) = (tile * l.tile - start, tile * l.tile - start + count);
            let dq = self.to.dq[range].rows(in_group, from, to);
            back.add_slope(simd, l, group, dq, count);
            if group.decays {
                let ddecay = self.to.ddecay.rows(in_group, from, to);
                for (part, a) in back.parts[..wanted].chunks_exact(l.pitch).zip(&head.coefficients) {
                    ddecay.iter_mut().zip(part).for_each(|(d, &part)| *d += a * part as f64);
                }
            }
            if head.learned > 0 {
                let dlearned = &mut self.to.dlearned[range].row(in_group, 0)[..head.learned];
                for (d, part) in dlearned.iter_mut().zip(back.parts.chunks_exact(l.pitch)) {
                    *d += part[..count].iter().map(|&part| part as f64).sum::<f64>();
                }
            }
        }
    }
}

/// The keys of one split that enter states with this lag, against the gradients of the states after their chunks: dk, dv, and the keys' part of dκ and
/// dc.
pub struct KeySplit<'a> {
    pub of: Split<'a>,
    pub lag: usize,
    /// The first position of the split's keys.
    pub start: usize,
    pub to: KeyGrads<'a>,
}

impl Task for KeySplit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (c, l, b) = (self.of.chunks, self.of.chunks.plan, self.of.b);
        let lag = self.lag;
        for group in l.groups_of(self.of.g).filter(|group| group.lag == lag) {
            let memory = self.of.take_state(group);
            let mut state = StateValues::of(group, c, memory);
            let of = c.group(group, b);
            let chunks = l.split(self.of.split);
            for chunk in chunks.clone().rev() {
                // No query comes after the last chunk.
                if (chunk + 1) * l.chunk_len() < c.length(b) {
                    self.keys(simd, of, chunk, &state);
                }
                if chunk > chunks.start {
                    of.absorb_queries(simd, chunk, &mut state, &mut self.of.scratch);
                }
            }
            self.of.put_back(memory);
        }
    }
}

impl KeySplit<'_> {
    #[inline(always)]
    fn keys<S: Simd>(&mut self, simd: S, of: GroupChunks, chunk: usize, state: &StateValues) {
        let (c, l, b, group) = (self.of.chunks, self.of.chunks.plan, self.of.b, of.group);
        let s = l.shape;
        // Weights of keys are shared by the heads of a group: the first has their gradient for all.
        let (in_group, start) = (group.heads[0] % s.group(), self.start);
        let end = of.log_decay_at(((chunk + 1) * l.chunk_len()).min(c.length(b)));
        for tile in l.entering(chunk, group.lag) {
            let count = of.count(tile);
            if !of.enters(tile) {
                break;
            }
            let scratch = &mut self.of.scratch;
            let back = &mut scratch.backward;
            of.key_decays(tile, end, scratch.decays);
            of.weighted_values(tile, scratch.decays, scratch.rows);
            back.turn(simd, l, scratch.rows, count);
            let x = of.keys(simd, tile, scratch.x, scratch.channels);
            let features = FeatureTile::new(simd, &group.basis, (l.pitch, count), x, scratch.lower_orders, &[]);
            let (rows, weights) = (&mut *back.drows, &mut *back.line);
            simd.call(ReadState { features, h: state.h, z: state.z, ep: l.ep, rows, weights, block: scratch.block });
            back.slope(simd, l, StateRead { features, h: state.h, z: state.z, weights: scratch.decays }, scratch.block, 0);
            if group.channels {
                multiply_columns(back.dx, &scratch.channels[..s.d * l.pitch]);
            }
            let (first, last) = (tile * l.tile - start, tile * l.tile - start + count);
            let (dk, dv) = (self.to.dk.rows(group.key_transform, first, last), self.to.dv.rows(group.key_transform, first, last));
            back.add_slope(simd, l, group, dk, count);
            let key_weights = of.key_weights(tile);
            for (i, (dv, from)) in dv.chunks_exact_mut(l.ep).zip(back.drows.chunks_exact(l.ep)).enumerate() {
                let factor = scratch.decays[i] * key_weights.map_or(1.0, |weights| weights[i]);
                dv.iter_mut().zip(from).for_each(|(d, g)| *d += factor * g);
            }
            if !group.decays && !group.weighs_keys {
                continue;
            }
            for (i, (v, from)) in of.values(tile).chunks_exact(l.ep).zip(back.drows.chunks_exact(l.ep)).take(count).enumerate() {
                let along = scratch.decays[i] * dot(from, v);
                if group.weighs_keys {
                    self.to.dkey_weights.row(in_group, first + i)[0] += along;
                }
                if group.decays {
                    let z = if group.sums { scratch.decays[i] * back.line[i] } else { 0.0 };
                    let total = along * key_weights.map_or(1.0, |weights| weights[i]) + z;
                    self.to.ddecay.row(in_group, first + i)[0] -= total as f64;
                }
            }
        }
    }
}
