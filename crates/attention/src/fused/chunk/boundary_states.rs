//! States at the boundaries of splits: what each split adds, then their sums in order.

use crate::fused::chunk::{Chunks, Split, State};
use crate::kernels::simd::{Simd, Task};

/// What one split adds to the state after it, or its queries to the gradient before it, put into `states`.
pub struct SplitSum<'a> {
    pub of: Split<'a>,
    /// Whether the gradient is meant.
    pub backward: bool,
}

impl Task for SplitSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (c, l, b) = (self.of.chunks, self.of.chunks.layout, self.of.b);
        let values = std::mem::take(&mut self.of.states);
        values.fill(0.0);
        for group in l.groups_of(self.of.g) {
            let mut state = State::of(group, c, values);
            let chunks = l.split(self.of.split);
            match self.backward {
                false => chunks.for_each(|chunk| c.absorb_keys(simd, group, b, chunk, &mut state, &mut self.of.scratch)),
                true => chunks.rev().for_each(|chunk| c.absorb_queries(simd, group, b, chunk, &mut state, &mut self.of.scratch)),
            }
        }
    }
}

/// From what splits add to the states at their starts, in the order of time, or to the gradients at their ends, against it. `states` are
/// those of all splits of a kv head.
pub fn combine(c: &Chunks, b: usize, g: usize, states: &mut [f32], backward: bool) {
    let l = c.layout;
    for i in 1..l.splits {
        // In the order of the sums: split `from` lies between the places `from` and `to`.
        let (from, to) = if backward { (l.splits - i, l.splits - i - 1) } else { (i - 1, i) };
        let position = |chunk: usize| (chunk * l.chunk_len()).min(c.length(b));
        let (start, end) = (position(l.split(from).start), position(l.split(from).end));
        let (low, high) = states.split_at_mut(from.max(to) * l.state_len);
        let (low, high) = (&mut low[from.min(to) * l.state_len..][..l.state_len], &mut high[..l.state_len]);
        let (before, own) = if backward { (high, low) } else { (low, high) };
        for group in l.groups_of(g) {
            let keep = (c.log_decay_at(group, b, end) - c.log_decay_at(group, b, start)).exp() as f32;
            let place = group.at..group.at + group.len;
            own[place.clone()].iter_mut().zip(&before[place]).for_each(|(own, before)| *own += keep * before);
        }
    }
}
