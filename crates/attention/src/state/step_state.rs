//! What passes from token to token besides the memory of keys: position, tails of the short convolution, running sums.

use crate::buffer::resize;
use crate::parts::gate::sigmoid::sigmoid;
use crate::{Error, Layer, Shape};

/// The numbers of all batch rows. Everything is zero before the first position.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StepState {
    /// Positions seen, [B].
    pub positions: Vec<usize>,
    /// The last width − 1 inputs of the short convolution over q, k and v, [B, channels, width − 1], oldest first.
    pub tails: [Vec<f32>; 3],
    /// Running sums of the input gates, [B, G].
    pub in_gate: Vec<f64>,
    /// Running sums of the output gates, [B, H].
    pub out_gate: Vec<f64>,
    /// Running sums of the post gates, [B, H].
    pub post_gate: Vec<f64>,
    /// Running sums of the decays, [B, H], or [B, H, d] by channel.
    pub decay: Vec<f64>,
    /// c of the last position, [B, H] or [B, H, d]: memories with a decay are as of then.
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

    /// Back to before the first position.
    pub fn clear(&mut self) {
        self.positions.fill(0);
        self.tails.iter_mut().for_each(|tail| tail.fill(0.0));
        for sums in [&mut self.in_gate, &mut self.out_gate, &mut self.post_gate, &mut self.decay, &mut self.log_decay] {
            sums.fill(0.0);
        }
        self.scores.fill(0.0);
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let narrow = self.tails.iter().map(Vec::len).sum::<usize>() + self.scores.len();
        let wide = [&self.in_gate, &self.out_gate, &self.post_gate, &self.decay, &self.log_decay];
        size_of::<usize>() * self.positions.len() + 4 * narrow + 8 * wide.map(Vec::len).iter().sum::<usize>()
    }

    /// One position of the short convolution over tensor `which` (0 q, 1 k, 2 v) of one batch row: x and y [channels], taps
    /// [channels, width]. The tail moves on by one.
    pub fn convolve(&mut self, which: usize, row: usize, x: &[f32], taps: &[f32], y: &mut [f32]) {
        let kept = self.width - 1;
        let tail = &mut self.tails[which][row * x.len() * kept..][..x.len() * kept];
        for (channel, (&x, y)) in x.iter().zip(y).enumerate() {
            let tail = &mut tail[channel * kept..][..kept];
            let (last, earlier) = taps[channel * self.width..][..self.width].split_last().expect("a filter has a tap");
            let sum = earlier.iter().zip(&*tail).map(|(tap, x)| tap * x).sum::<f32>() + last * x;
            *y = sum * sigmoid(sum);
            if kept > 0 {
                tail.copy_within(1.., 0);
                tail[kept - 1] = x;
            }
        }
    }

    /// Takes the inputs of some positions of one batch row, [channels] each, into the tail of tensor `which`, without computing anything.
    pub fn keep_tail<'a>(&mut self, which: usize, row: usize, channels: usize, inputs: impl Iterator<Item = &'a [f32]>) {
        let kept = self.width.saturating_sub(1);
        let tail = &mut self.tails[which][row * channels * kept..][..channels * kept];
        for x in inputs {
            for (tail, &x) in tail.chunks_exact_mut(kept.max(1)).zip(x) {
                tail.copy_within(1.., 0);
                tail[kept - 1] = x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::conv;
    use crate::parts::testing::numbers;

    #[test]
    fn a_convolution_token_by_token() {
        for width in [1, 2, 5] {
            let shape = Shape { batch: 2, time: 1, heads: 1, kv_heads: 1, d: 3, e: 2 };
            let layer = Layer::new(1, 1, 3).value_dim(2).variant(&*format!("exp rope=off conv={width}")).expect("possible");
            let mut steps = StepState::new(&layer, &shape).expect("memory");
            let mut other = steps.clone();
            let narrow = |n, seed| numbers(n, seed).into_iter().map(|x| x as f32).collect::<Vec<f32>>();
            let (x, taps) = (narrow(8 * 2, 1), narrow(2 * width, 2));
            let mut y = vec![0.0; 16];
            for t in 0..8 {
                steps.convolve(2, 1, &x[t * 2..][..2], &taps, &mut y[t * 2..][..2]);
            }
            for channel in 0..2 {
                let column = |x: &[f32]| x.iter().skip(channel).step_by(2).copied().collect::<Vec<f32>>();
                let mut whole = vec![0.0; 8];
                conv::forward(&column(&x), &taps[channel * width..][..width], &mut whole);
                column(&y).iter().zip(&whole).for_each(|(a, b)| assert!((a - b).abs() < 1e-6));
            }
            other.keep_tail(2, 1, 2, x[..6].chunks_exact(2));
            other.keep_tail(2, 1, 2, x[6..].chunks_exact(2));
            assert_eq!(steps, other);
        }
    }
}
