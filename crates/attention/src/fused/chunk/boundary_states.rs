//! States at the boundaries of spans: what each span adds, then their sums in order.

use crate::fused::chunk::{Chunks, State, Work};
use crate::kernels::simd::{Simd, Task};

/// What one span adds to the state behind it, or its queries to the gradient before it, put into that span's place.
pub struct SpanSum<'a> {
    pub chunks: &'a Chunks<'a>,
    /// Whether the gradient is meant.
    pub backward: bool,
    pub b: usize,
    pub g: usize,
    pub span: usize,
    pub work: Work<'a>,
}

impl Task for SpanSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (c, l) = (self.chunks, self.chunks.layout);
        for unit in l.units_of(self.g) {
            let to = if self.backward { self.span - 1 } else { self.span + 1 };
            // SAFETY: only this task's span adds to the next place.
            let values = unsafe { c.slot(unit, self.b, to) };
            values.fill(0.0);
            let mut state = State::of(unit, l.ep, values);
            match self.backward {
                false => l.span(self.span).for_each(|chunk| c.absorb_keys(simd, unit, self.b, chunk, &mut state, &mut self.work)),
                true => {
                    for chunk in l.span(self.span).rev() {
                        c.absorb_queries(simd, unit, self.b, chunk, &mut state, &mut self.work);
                    }
                }
            }
        }
    }
}

/// From what spans add to the states at their starts, in the order of time, or to the gradients at their ends, against it.
pub fn combine(c: &Chunks, b: usize, g: usize, backward: bool) {
    let l = c.layout;
    for unit in l.units_of(g) {
        for i in 1..l.spans {
            // In the order of the sums: span `from` lies between the places `from` and `to`.
            let (from, to) = if backward { (l.spans - i, l.spans - i - 1) } else { (i - 1, i) };
            let position = |chunk: usize| (chunk * l.chunk_len()).min(c.length(b));
            let span = l.span(from);
            let keep = (c.clock(unit, b, position(span.end)) - c.clock(unit, b, position(span.start))).exp() as f32;
            // SAFETY: each kv head of a batch row is combined by one task, and the two places differ.
            let (before, own) = unsafe { (c.slot(unit, b, from), c.slot(unit, b, to)) };
            own.iter_mut().zip(&*before).for_each(|(own, before)| *own += keep * before);
        }
    }
}

/// Clears the places that no span adds to: before the first span, or behind the last.
pub fn clear_end(c: &Chunks, b: usize, g: usize, span: usize) {
    for unit in c.layout.units_of(g) {
        // SAFETY: each kv head of a batch row is cleared by one task.
        unsafe { c.slot(unit, b, span) }.fill(0.0);
    }
}
