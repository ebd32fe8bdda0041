//! Step 1: the preparation of q, k and v. Short convolution, norm, RoPE, and their gradients.

use crate::parts::qk_norm::QkNorm;
use crate::parts::{conv, rope};
use crate::{Real, Rope};

/// The parts that act on q, k or v before the scores.
pub(crate) struct Steps<'a, R> {
    /// Filters of the convolution [width, taps], empty for none.
    pub taps: &'a [R],
    /// The norm with its weights.
    pub norm: Option<(&'a QkNorm, &'a [R])>,
    pub rope: Option<&'a Rope>,
}

/// q, k or v of a head at the stages that the backward pass reads. A norm over all heads reads the columns of the other heads, so rows are
/// `width` wide before the norm, and the columns of the head start at `first`.
pub(crate) struct PreparedTensor<'a, R> {
    dim: usize,
    pub width: usize,
    pub first: usize,
    pub steps: Steps<'a, R>,
    /// The input, [length, width].
    raw: Vec<R>,
    /// After the convolution, [length, width].
    convolved: Vec<R>,
    /// After norm and RoPE, [length, dim].
    pub rotated: Vec<R>,
}

impl<'a, R: Real> PreparedTensor<'a, R> {
    /// `raw` [length, width] contains the head in the columns from `first` on.
    pub fn new(raw: Vec<R>, dim: usize, (width, first): (usize, usize), steps: Steps<'a, R>) -> Self {
        let mut convolved = raw.clone();
        let mut one = vec![R::zero(); raw.len() / width];
        for (channel, taps) in filters(steps.taps, width).enumerate() {
            conv::forward(&column(&raw, width, channel), taps, &mut one);
            one.iter().enumerate().for_each(|(t, &y)| convolved[t * width + channel] = y);
        }
        let mut rotated = Vec::with_capacity(raw.len() / width * dim);
        for row in convolved.chunks_exact(width) {
            let mut row = row.to_vec();
            if let Some((norm, weight)) = steps.norm {
                norm.forward(&mut row, weight);
            }
            rotated.extend_from_slice(&row[first..first + dim]);
        }
        rotate_rows(steps.rope, &mut rotated, dim, rope::rotate);
        PreparedTensor { dim, width, first, steps, raw, convolved, rotated }
    }

    pub fn row(&self, t: usize) -> &[R] {
        &self.rotated[t * self.dim..][..self.dim]
    }

    /// Returns the gradient of `raw` [length, width] from that of `rotated`; adds the gradients of the filters and of the norm weights.
    pub fn backward(&self, mut gradient: Vec<R>, dtaps: &mut [R], dnorm: &mut [R]) -> Vec<R> {
        let (dim, width) = (self.dim, self.width);
        rotate_rows(self.steps.rope, &mut gradient, dim, rope::rotate_back);
        let mut wide = vec![R::zero(); self.raw.len()];
        for ((wide, own), x) in wide.chunks_exact_mut(width).zip(gradient.chunks_exact(dim)).zip(self.convolved.chunks_exact(width)) {
            wide[self.first..][..dim].copy_from_slice(own);
            if let Some((norm, weight)) = self.steps.norm {
                norm.backward(x, weight, wide, dnorm);
            }
        }
        let taps_per_channel = self.steps.taps.len() / width;
        for (channel, taps) in filters(self.steps.taps, width).enumerate() {
            let (x, dy) = (column(&self.raw, width, channel), column(&wide, width, channel));
            let mut dx = vec![R::zero(); x.len()];
            conv::backward(&x, taps, &dy, &mut dx, &mut dtaps[channel * taps_per_channel..][..taps_per_channel]);
            dx.iter().enumerate().for_each(|(t, &dx)| wide[t * width + channel] = dx);
        }
        wide
    }
}

/// The filter of each channel.
fn filters<R>(taps: &[R], width: usize) -> impl Iterator<Item = &[R]> {
    taps.chunks_exact((taps.len() / width).max(1))
}

fn column<R: Real>(x: &[R], width: usize, channel: usize) -> Vec<R> {
    x.iter().skip(channel).step_by(width).copied().collect()
}

fn rotate_rows<R: Real>(rope: Option<&Rope>, x: &mut [R], dim: usize, rotation: fn(&mut [R], &[R], &[R])) {
    let Some(rope) = rope else { return };
    let (mut cos, mut sin) = (vec![R::zero(); rope.frequencies().len()], vec![R::zero(); rope.frequencies().len()]);
    for (t, row) in x.chunks_exact_mut(dim).enumerate() {
        rope.angles(t, &mut cos, &mut sin);
        rotation(row, &cos, &sin);
    }
}
