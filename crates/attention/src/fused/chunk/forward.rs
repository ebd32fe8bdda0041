//! Chunks, forward: one span of the chunks of one kv head.

use crate::fused::chunk::{Chunks, Work};
use crate::fused::state_group::Unit;
use crate::fused::tile_forward::{Context, ForwardTile, Queries};
use crate::kernels::features::{Points, Read, Stem, Transpose};
use crate::kernels::simd::{Simd, Task};

/// The chunks of one span, from the state at its start to y; the state moves to the span's end where that is wanted.
pub struct ForwardSpan<'a> {
    pub context: &'a Context<'a>,
    pub chunks: &'a Chunks<'a>,
    pub b: usize,
    pub g: usize,
    pub span: usize,
    pub work: Work<'a>,
}

impl Task for ForwardSpan<'_> {
    /// The first head and row whose denominator is not positive, with its value.
    type Output = Option<(usize, usize, f32)>;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> Self::Output {
        let (c, l) = (self.chunks, self.chunks.layout);
        let mut nonpositive: Self::Output = None;
        for unit in l.units_of(self.g) {
            let own = std::mem::take(&mut self.work.state);
            // SAFETY: this task is the only one with this span of this kv head.
            let mut state = unsafe { c.state(unit, self.b, self.span, &mut *own) };
            for chunk in l.span(self.span) {
                for &h in &unit.heads {
                    let known = (chunk > 0 || c.given).then_some((&*state.h, &*state.z));
                    let found = self.head(simd, unit, h, chunk, known);
                    if let Some((t, value)) = found
                        && nonpositive.is_none_or(|(head, position, _)| (h, t) < (head, position))
                    {
                        nonpositive = Some((h, t, value));
                    }
                }
                if chunk + 1 < l.span(self.span).end || c.given {
                    c.absorb_keys(simd, unit, self.b, chunk, &mut state, &mut self.work);
                }
            }
            self.work.state = own;
        }
        nonpositive
    }
}

impl ForwardSpan<'_> {
    /// One head's queries of one chunk.
    #[inline(always)]
    fn head<S: Simd>(&mut self, simd: S, unit: &Unit, h: usize, chunk: usize, known: Option<(&[f32], &[f32])>) -> Option<(usize, f32)> {
        let (c, l, b) = (self.chunks, self.chunks.layout, self.b);
        let s = l.shape;
        let n = b * s.heads + h;
        let tiles = l.tiles_of(chunk);
        let (first, last) = (tiles.start * l.tile, (tiles.end * l.tile).min(s.time));
        let work = &mut self.work;
        self.context.sources.query(l, b, h).fill(simd, first, s.time, &mut work.queries[..(last - first) * l.dp], l.dp);
        let before = c.clock(unit, b, first);
        let mut nonpositive = None;
        for tile in tiles.clone() {
            let count = c.count(b, tile);
            let at = (tile - tiles.start) * l.tile;
            let queries = &work.queries[at * l.dp..];
            let mut begun = false;
            if let Some((state_h, state_z)) = known.filter(|_| count > 0) {
                simd.call(Transpose { rows: queries, stride: l.dp, count, dim: s.d, columns: work.x, len: l.pitch });
                simd.call(Stem { basis: &unit.basis, len: l.pitch, x: work.x, stem: work.stem });
                let points = Points { basis: &unit.basis, len: l.pitch, count, x: work.x, stem: work.stem, factors: &c.factors[h] };
                let at = n * s.time + tile * l.tile;
                // SAFETY: these rows of u and z belong to this task.
                let (u, z) = unsafe { (self.context.u.slice(at * l.ep, count * l.ep), self.context.z.slice(at, count)) };
                z.fill(0.0);
                let weights = &mut *work.weights;
                simd.call(Read { points, h: state_h, z: state_z, ep: l.ep, rows: u, weights, block: work.block });
                if unit.sums {
                    z.copy_from_slice(&work.weights[..count]);
                }
                if unit.decays {
                    c.fade(unit, b, tile, before, 1.0, work.fades);
                    for ((u, z), &fade) in u.chunks_exact_mut(l.ep).zip(z).zip(&*work.fades) {
                        u.iter_mut().for_each(|u| *u *= fade);
                        *z *= fade;
                    }
                }
                begun = true;
            }
            let q = Queries::Prepared(queries);
            let task = ForwardTile { context: self.context, b, h, tile, from: tiles.start, begun, q, past: None };
            nonpositive = nonpositive.or(simd.call(task));
        }
        nonpositive
    }
}
