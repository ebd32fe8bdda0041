//! The passes over chunks, in parallel over kv heads and spans.

use rayon::prelude::*;

use crate::Nonpositive;
use crate::fused::chunk::backward::{KeySpan, QuerySpan};
use crate::fused::chunk::boundary_states::{SpanSum, clear_end, combine};
use crate::fused::chunk::forward::ForwardSpan;
use crate::fused::chunk::{Chunks, Work};
use crate::fused::tile_backward::{self, BackwardSegment};
use crate::fused::{tile_forward, with_room};
use crate::kernels::simd::dispatch;

/// Runs f for every kv head and span.
fn each<F: Fn(usize, usize, usize) + Sync>(c: &Chunks, spans: std::ops::Range<usize>, f: F) {
    let s = c.layout.shape;
    let count = spans.len();
    (0..s.batch * s.kv_heads * count).into_par_iter().with_max_len(1).for_each(|task| {
        let (pair, span) = (task / count, spans.start + task % count);
        let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
        if c.layout.units_of(g).next().is_some() {
            f(b, g, span);
        }
    });
}

/// The states at the starts of all spans, or their gradients at the ends.
fn states(c: &Chunks, backward: bool) {
    let l = c.layout;
    if l.spans < 2 {
        return;
    }
    let (spans, end) = if backward { (1..l.spans, l.spans - 1) } else { (0..l.spans - 1, 0) };
    each(c, spans, |b, g, span| {
        with_room(Work::len(l, false, c.given), |room| {
            dispatch(SpanSum { chunks: c, backward, b, g, span, work: Work::new(room, l, false, c.given) });
        });
    });
    each(c, 0..1, |b, g, _| {
        if !c.given {
            clear_end(c, b, g, end);
        }
        combine(c, b, g, backward);
    });
}

/// All heads that run in chunks, forward.
pub fn forward(context: &tile_forward::Context, c: &Chunks) -> Option<Nonpositive> {
    let l = c.layout;
    let s = l.shape;
    states(c, false);
    (0..s.batch * s.kv_heads * l.spans)
        .into_par_iter()
        .with_max_len(1)
        .filter_map(|task| {
            let (pair, span) = (task / l.spans, task % l.spans);
            let (b, g) = (pair / s.kv_heads, pair % s.kv_heads);
            let (head, position, value) = with_room(Work::len(l, false, c.given), |room| {
                dispatch(ForwardSpan { context, chunks: c, b, g, span, work: Work::new(room, l, false, c.given) })
            })?;
            Some(Nonpositive { row: b, head, position, value: value as f64 })
        })
        .min_by_key(|at| (at.row, at.head, at.position))
}

/// All heads that run in chunks, backward.
pub fn backward(context: &tile_backward::Context, c: &Chunks) {
    let l = c.layout;
    if l.units.is_empty() {
        return;
    }
    each(c, 0..l.spans, |b, g, span| {
        with_room(tile_backward::tiles_len(l), |room| {
            let chunks = l.span(span);
            let keys = l.tiles_of(chunks.start).start..l.tiles_of(chunks.end - 1).end;
            dispatch(BackwardSegment { context, b, g, keys, chunked: true, turns: None, clear: !l.parallel(), room });
        });
    });
    states(c, false);
    each(c, 0..l.spans, |b, g, span| {
        with_room(Work::len(l, true, false), |room| {
            dispatch(QuerySpan { context, chunks: c, b, g, span, work: Work::new(room, l, true, false) });
        });
    });
    states(c, true);
    each(c, 0..l.spans, |b, g, span| {
        with_room(Work::len(l, true, false), |room| {
            dispatch(KeySpan { context, chunks: c, b, g, span, work: Work::new(room, l, true, false) });
        });
    });
}
