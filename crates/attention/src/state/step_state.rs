//! The state between tokens besides keys: position, last inputs of the short convolution, running sums of gates and decays.

use crate::{Error, Inputs, Layer, Shape};
use termwise_kernels::buffer::resize;

/// The values of all batch rows. Everything is zero before the first position.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StepState {
    /// Positions seen, [B].
    pub positions: Vec<usize>,
    /// The last width − 1 inputs of the short convolution over q, k and v, [B, heads, width − 1, dimension], oldest first.
    pub tails: [Vec<f32>; 3],
    /// Running sums of the input gates, [B, G].
    pub in_gate: Vec<f64>,
    /// Running sums of the output gates, [B, H].
    pub out_gate: Vec<f64>,
    /// Running sums of the post gates, [B, H].
    pub post_gate: Vec<f64>,
    /// Running sums of the decays, [B, H], or [B, H, d] per channel.
    pub decay: Vec<f64>,
    /// c of the last position, [B, H] or [B, H, d]: memories with a decay refer to it.
    pub log_decay: Vec<f64>,
    /// Bound of |x| over all scores so far, [B, H].
    pub scores: Vec<f32>,
    /// Width of the short convolution, 0 for none.
    pub width: usize,
}

impl StepState {
    /// Before the first position.
    pub fn new(layer: &Layer, shape: &Shape) -> Result<StepState, Error> {
        let Shape { batch, heads: h, kv_heads: g, .. } = *shape;
        let width = layer.taps();
        let mut new = StepState { width, ..StepState::default() };
        resize(&mut new.positions, batch)?;
        for (tail, channels) in new.tails.iter_mut().zip(shape.widths()) {
            resize(tail, batch * channels * width.saturating_sub(1))?;
        }
        resize(&mut new.in_gate, batch * g)?;
        let channels = layer.decay_channels();
        for (sums, width) in [(&mut new.out_gate, 1), (&mut new.post_gate, 1), (&mut new.decay, channels), (&mut new.log_decay, channels)] {
            resize(sums, batch * h * width)?;
        }
        resize(&mut new.scores, batch * h)?;
        Ok(new)
    }

    /// Resets to before the first position.
    pub fn clear(&mut self) {
        self.positions.fill(0);
        self.tails.iter_mut().for_each(|tail| tail.fill(0.0));
        for sums in [&mut self.in_gate, &mut self.out_gate, &mut self.post_gate, &mut self.decay, &mut self.log_decay] {
            sums.fill(0.0);
        }
        self.scores.fill(0.0);
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        let narrow = self.tails.iter().map(Vec::len).sum::<usize>() + self.scores.len();
        let wide = [&self.in_gate, &self.out_gate, &self.post_gate, &self.decay, &self.log_decay];
        size_of::<usize>() * self.positions.len() + 4 * narrow + 8 * wide.map(Vec::len).iter().sum::<usize>()
    }

    /// Advances by one token: its inputs enter the tails, positions increase.
    pub fn advance(&mut self, inputs: &Inputs<f32>, shape: &Shape) {
        for b in (0..shape.batch).filter(|&b| inputs.length(b, shape) > 0) {
            for (which, [heads, dim]) in shape.rows_of_heads().into_iter().enumerate() {
                self.keep_tail(which, b, [heads, dim], std::iter::once(inputs.x[which].row(b, heads * dim)));
            }
            self.positions[b] += 1;
        }
    }

    /// Shifts the inputs of some positions of one batch row, [heads, dimension] each, into the tail of tensor `which` (0 q, 1 k, 2 v).
    pub fn keep_tail<'a>(&mut self, which: usize, row: usize, [heads, dim]: [usize; 2], inputs: impl Iterator<Item = &'a [f32]>) {
        let size = self.width.saturating_sub(1) * dim;
        if size == 0 {
            return;
        }
        let tail = &mut self.tails[which][row * heads * size..][..heads * size];
        for x in inputs {
            for (tail, x) in tail.chunks_exact_mut(size).zip(x.chunks_exact(dim)) {
                tail.copy_within(dim.., 0);
                tail[size - dim..].copy_from_slice(x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::numbers;

    #[test]
    fn a_tail_contains_the_last_inputs_of_each_head() {
        let shape = Shape { batch: 2, time: 1, heads: 2, kv_heads: 2, d: 3, e: 2 };
        let layer = Layer::new(2, 2, 3).value_dim(2).variant("exp rope=off conv=3").expect("possible");
        let mut steps = StepState::new(&layer, &shape).expect("memory");
        let x: Vec<f32> = numbers(8 * 4, 1).into_iter().map(|x| x as f32).collect();
        steps.keep_tail(2, 1, [2, 2], x[..6 * 4].chunks_exact(4));
        steps.keep_tail(2, 1, [2, 2], x[6 * 4..].chunks_exact(4));
        let row = |t: usize, head: usize| &x[t * 4 + head * 2..][..2];
        assert_eq!(steps.tails[2][8..], [row(6, 0), row(7, 0), row(6, 1), row(7, 1)].concat());
        assert!(steps.tails[2][..8].iter().all(|x| *x == 0.0));
    }
}
