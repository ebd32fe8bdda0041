//! Chunks, backward, beyond what tiles within a chunk give: forward in time for queries, backward in time for keys and values.

use crate::fused::chunk::{Chunks, Work};
use crate::fused::state_group::Unit;
use crate::fused::tile_backward::Context;
use crate::kernels::features::{AddTransposed, Points, Read, Slope, Stem, Transpose};
use crate::kernels::simd::{Simd, Task};
use crate::real::dot;

/// The queries of one span against the states before their chunks: dq, and the queries' part of dc and da.
pub struct QuerySpan<'a> {
    pub context: &'a Context<'a>,
    pub chunks: &'a Chunks<'a>,
    pub b: usize,
    pub g: usize,
    pub span: usize,
    pub work: Work<'a>,
}

impl Task for QuerySpan<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (c, l) = (self.chunks, self.chunks.layout);
        for unit in l.units_of(self.g) {
            let own = std::mem::take(&mut self.work.state);
            // SAFETY: this task is the only one with this span of this kv head.
            let mut state = unsafe { c.state(unit, self.b, self.span, &mut *own) };
            let chunks = l.span(self.span);
            for chunk in chunks.clone() {
                if chunk > 0 {
                    for &h in &unit.heads {
                        self.head(simd, unit, h, chunk, state.h, state.z);
                    }
                }
                if chunk + 1 < chunks.end {
                    c.absorb_keys(simd, unit, self.b, chunk, &mut state, &mut self.work);
                }
            }
            self.work.state = own;
        }
    }
}

impl QuerySpan<'_> {
    #[inline(always)]
    fn head<S: Simd>(&mut self, simd: S, unit: &Unit, h: usize, chunk: usize, state_h: &[f32], state_z: &[f32]) {
        let (c, x, l, b) = (self.chunks, self.context, self.chunks.layout, self.b);
        let s = l.shape;
        let n = b * s.heads + h;
        let head = &l.heads[h];
        let before = c.clock(unit, b, chunk * l.chunk_len());
        for tile in l.tiles_of(chunk) {
            let count = c.count(b, tile);
            if count == 0 {
                break;
            }
            let work = &mut self.work;
            c.fade(unit, b, tile, before, 1.0, work.fades);
            c.query_rows(simd, b, h, tile, work);
            let back = &mut work.backward;
            simd.call(Transpose { rows: work.rows, stride: l.ep, count, dim: s.e, columns: back.columns, len: l.pitch });
            simd.call(Stem { basis: &unit.basis, len: l.pitch, x: work.x, stem: work.stem });
            let orders = unit.basis.orders().len();
            let wanted = if unit.decays || head.learned > 0 { orders * l.pitch } else { 0 };
            back.parts[..wanted].fill(0.0);
            let points = Points { basis: &unit.basis, len: l.pitch, count, x: work.x, stem: work.stem, factors: &c.factors[h] };
            simd.call(Slope {
                points,
                h: state_h,
                z: state_z,
                ep: l.ep,
                columns: back.columns,
                e: s.e,
                weights: work.weights,
                dx: back.dx,
                dstem: back.dstem,
                gradient: back.gradient,
                block: work.block,
                parts: &mut back.parts[..wanted],
            });
            // SAFETY: these rows of this head belong to this task.
            let dq = unsafe { x.dq.slice((n * s.time + tile * l.tile) * l.dp, count * l.dp) };
            simd.call(AddTransposed { columns: back.dx, len: l.pitch, rows: dq, stride: l.dp, count, dim: s.d });
            if unit.decays {
                // SAFETY: as above.
                let ddecay = unsafe { x.ddecay.slice(n * l.tp() + tile * l.tile, count) };
                let polynomial = head.kernel.polynomial().unwrap_or_default();
                for (part, (_, a)) in back.parts[..wanted].chunks_exact(l.pitch).zip(polynomial) {
                    ddecay.iter_mut().zip(part).for_each(|(d, &part)| *d += a * part as f64);
                }
            }
            if head.learned > 0 {
                // SAFETY: each span has its own copy.
                let dlearned = unsafe { x.dlearned.slice((self.span * l.head_count() + n) * l.learned(), head.learned) };
                for (d, part) in dlearned.iter_mut().zip(back.parts.chunks_exact(l.pitch)) {
                    *d += part[..count].iter().map(|&part| part as f64).sum::<f64>();
                }
            }
        }
    }
}

/// The keys of one span against the gradients of the states behind their chunks: dk, dv, and the keys' part of dκ and dc.
pub struct KeySpan<'a> {
    pub context: &'a Context<'a>,
    pub chunks: &'a Chunks<'a>,
    pub b: usize,
    pub g: usize,
    pub span: usize,
    pub work: Work<'a>,
}

impl Task for KeySpan<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (c, l) = (self.chunks, self.chunks.layout);
        for unit in l.units_of(self.g) {
            let own = std::mem::take(&mut self.work.state);
            // SAFETY: as in `QuerySpan`.
            let mut state = unsafe { c.state(unit, self.b, self.span, &mut *own) };
            let chunks = l.span(self.span);
            for chunk in chunks.clone().rev() {
                if (chunk + 1) * l.chunk_len() < c.length(self.b) {
                    self.keys(simd, unit, chunk, state.h, state.z);
                }
                if chunk > chunks.start {
                    c.absorb_queries(simd, unit, self.b, chunk, &mut state, &mut self.work);
                }
            }
            self.work.state = own;
        }
    }
}

impl KeySpan<'_> {
    #[inline(always)]
    fn keys<S: Simd>(&mut self, simd: S, unit: &Unit, chunk: usize, state_h: &[f32], state_z: &[f32]) {
        let (c, to, l, b) = (self.chunks, self.context, self.chunks.layout, self.b);
        let s = l.shape;
        // Weights of keys are shared by the heads of a unit: the first has their gradient for all.
        let n = b * s.heads + unit.heads[0];
        let kv = l.kv_index(unit.class, b, unit.g);
        let end = c.clock(unit, b, (chunk + 1) * l.chunk_len());
        for tile in l.tiles_of(chunk) {
            let count = c.count(b, tile);
            let work = &mut self.work;
            let back = &mut work.backward;
            c.fade(unit, b, tile, end, -1.0, work.fades);
            c.weighted_values(unit, b, tile, work.fades, work.rows);
            simd.call(Transpose { rows: work.rows, stride: l.ep, count, dim: s.e, columns: back.columns, len: l.pitch });
            let x = c.keys(unit, b, tile, work.x);
            simd.call(Stem { basis: &unit.basis, len: l.pitch, x, stem: work.stem });
            let points = Points { basis: &unit.basis, len: l.pitch, count, x, stem: work.stem, factors: &[] };
            let (rows, weights) = (&mut *back.drows, &mut *back.line);
            simd.call(Read { points, h: state_h, z: state_z, ep: l.ep, rows, weights, block: work.block });
            simd.call(Slope {
                points,
                h: state_h,
                z: state_z,
                ep: l.ep,
                columns: back.columns,
                e: s.e,
                weights: work.fades,
                dx: back.dx,
                dstem: back.dstem,
                gradient: back.gradient,
                block: work.block,
                parts: &mut [],
            });
            let first = kv * l.tp() + tile * l.tile;
            // SAFETY: these rows of this kv head belong to this task.
            let (dk, dv) = unsafe { (to.dk.slice(first * l.dp, count * l.dp), to.dv.slice(first * l.ep, count * l.ep)) };
            simd.call(AddTransposed { columns: back.dx, len: l.pitch, rows: dk, stride: l.dp, count, dim: s.d });
            let key_weights = c.key_weights(unit, b, tile);
            for (i, (dv, from)) in dv.chunks_exact_mut(l.ep).zip(back.drows.chunks_exact(l.ep)).enumerate() {
                let factor = work.fades[i] * key_weights.map_or(1.0, |weights| weights[i]);
                dv.iter_mut().zip(from).for_each(|(d, g)| *d += factor * g);
            }
            if !unit.decays && !unit.weighs_keys {
                continue;
            }
            let at = n * l.tp() + tile * l.tile;
            for (i, (v, from)) in c.values(unit, b, tile).chunks_exact(l.ep).zip(back.drows.chunks_exact(l.ep)).take(count).enumerate() {
                let along = work.fades[i] * dot(from, v);
                if unit.weighs_keys {
                    // SAFETY: as above, for the first head of the unit.
                    unsafe { to.dkey_weights.slice(at + i, 1)[0] += along };
                }
                if unit.decays {
                    let z = if unit.sums { work.fades[i] * back.line[i] } else { 0.0 };
                    let total = along * key_weights.map_or(1.0, |weights| weights[i]) + z;
                    // SAFETY: as above.
                    unsafe { to.ddecay.slice(at + i, 1)[0] -= total as f64 };
                }
            }
        }
    }
}
