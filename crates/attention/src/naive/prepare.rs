//! The way of q, k and v to the scores: short convolution, RoPE, φ; and back.

use crate::parts::kernel::feature::Map;
use crate::parts::{conv, rope};
use crate::{Real, Rope};

/// One of q, k and v of a head, [length, dim] each, at the stages that the backward pass needs.
pub(crate) struct Stages<'a, R> {
    dim: usize,
    /// [dim, width], empty for no convolution.
    pub(crate) taps: &'a [R],
    rope: Option<&'a Rope>,
    map: Map,
    /// As given.
    raw: Vec<R>,
    /// After convolution and RoPE.
    rotated: Vec<R>,
    /// After φ.
    mapped: Vec<R>,
}

impl<'a, R: Real> Stages<'a, R> {
    pub(crate) fn new(raw: Vec<R>, dim: usize, taps: &'a [R], rope: Option<&'a Rope>, map: Map) -> Self {
        let mut rotated = raw.clone();
        let mut filtered = vec![R::zero(); raw.len() / dim];
        for (channel, taps) in channels(taps, dim).enumerate() {
            conv::forward(&column(&raw, dim, channel), taps, &mut filtered);
            filtered.iter().enumerate().for_each(|(t, &y)| rotated[t * dim + channel] = y);
        }
        rotate_rows(rope, &mut rotated, dim, rope::rotate);
        let mut mapped = rotated.clone();
        mapped.chunks_exact_mut(dim).for_each(|row| map.forward(row));
        Stages { dim, taps, rope, map, raw, rotated, mapped }
    }

    pub(crate) fn row(&self, t: usize) -> &[R] {
        &self.mapped[t * self.dim..][..self.dim]
    }

    /// The gradient of `raw` from that of `mapped`; the filters' gradient is added to `dtaps`.
    pub(crate) fn backward(&self, mut gradient: Vec<R>, dtaps: &mut [R]) -> Vec<R> {
        let dim = self.dim;
        for (gradient, x) in gradient.chunks_exact_mut(dim).zip(self.rotated.chunks_exact(dim)) {
            self.map.backward(x, gradient);
        }
        rotate_rows(self.rope, &mut gradient, dim, rope::rotate_back);
        let width = self.taps.len() / dim;
        for (channel, taps) in channels(self.taps, dim).enumerate() {
            let (x, dy) = (column(&self.raw, dim, channel), column(&gradient, dim, channel));
            let mut dx = vec![R::zero(); x.len()];
            conv::backward(&x, taps, &dy, &mut dx, &mut dtaps[channel * width..][..width]);
            dx.iter().enumerate().for_each(|(t, &dx)| gradient[t * dim + channel] = dx);
        }
        gradient
    }
}

fn channels<R>(taps: &[R], dim: usize) -> impl Iterator<Item = &[R]> {
    taps.chunks_exact((taps.len() / dim).max(1))
}

fn column<R: Real>(x: &[R], dim: usize, channel: usize) -> Vec<R> {
    x.iter().skip(channel).step_by(dim).copied().collect()
}

fn rotate_rows<R: Real>(rope: Option<&Rope>, x: &mut [R], dim: usize, rotation: fn(&mut [R], &[R], &[R])) {
    let Some(rope) = rope else { return };
    let (mut cos, mut sin) = (vec![R::zero(); dim / 2], vec![R::zero(); dim / 2]);
    for (t, row) in x.chunks_exact_mut(dim).enumerate() {
        rope.angles(t, &mut cos, &mut sin);
        rotation(row, &cos, &sin);
    }
}
