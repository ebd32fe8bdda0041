//! States at the boundaries of splits: the contribution of each split, then the sums in order.

use crate::fused::chunks::{Chunks, Split, StateValues};
use termwise_kernels::simd::{Simd, Task};

/// The contribution of one split to the state after it, or to the gradient before it.
pub struct SplitSum<'a> {
    pub of: Split<'a>,
    /// Whether it contributes to the gradient.
    pub backward: bool,
}

impl Task for SplitSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (c, l, b) = (self.of.chunks, self.of.chunks.plan, self.of.b);
        let values = std::mem::take(&mut self.of.states);
        values.fill(0.0);
        for group in l.groups_of(self.of.g) {
            let mut state = StateValues::of(group, c, values);
            let (group, chunks) = (c.group(group, b), l.split(self.of.split));
            match self.backward {
                false => chunks.for_each(|chunk| group.absorb_keys(simd, chunk, &mut state, &mut self.of.scratch)),
                true => chunks.rev().for_each(|chunk| group.absorb_queries(simd, chunk, &mut state, &mut self.of.scratch)),
            }
        }
    }
}

/// Sums the contributions of splits to the states at their starts, in the order of time, or to the gradients at their ends, in reverse order.
/// `states` are those of all splits of a kv head.
pub fn combine(c: &Chunks, b: usize, g: usize, states: &mut [f32], backward: bool) {
    let l = c.plan;
    for i in 1..l.splits {
        // Split `from` is between the boundaries `from` and `to`.
        let (from, to) = if backward { (l.splits - i, l.splits - i - 1) } else { (i - 1, i) };
        let position = |chunk: usize| (chunk * l.chunk_len()).min(c.length(b));
        let (start, end) = (position(l.split(from).start), position(l.split(from).end));
        let (low, high) = states.split_at_mut(from.max(to) * l.state_len);
        let (low, high) = (&mut low[from.min(to) * l.state_len..][..l.state_len], &mut high[..l.state_len]);
        let (before, own) = if backward { (high, low) } else { (low, high) };
        for group in l.groups_of(g) {
            let keep = (c.group(group, b).log_decay_at(end) - c.group(group, b).log_decay_at(start)).exp() as f32;
            let place = group.at..group.at + group.len;
            own[place.clone()].iter_mut().zip(&before[place]).for_each(|(own, before)| *own += keep * before);
        }
    }
}
