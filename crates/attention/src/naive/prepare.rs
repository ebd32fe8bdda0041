//! The way of q, k and v to the scores: short convolution, norm, RoPE; then for each class of keys a projection and φ; and back.

use crate::parts::kernel::feature::Map;
use crate::parts::kernel::hedgehog;
use crate::parts::qk_norm::QkNorm;
use crate::parts::{conv, rope};
use crate::real::dot;
use crate::{Real, Rope};

/// One of q, k and v of a head, [length, dim], at the stages that the backward pass needs. A norm over all heads reads those of the others,
/// too: rows are then `width` wide, and the head's own columns start at `first`.
pub(crate) struct Stages<'a, R> {
    dim: usize,
    width: usize,
    first: usize,
    /// [width, taps], empty for no convolution.
    pub(crate) taps: &'a [R],
    /// The norm with its weights.
    norm: Option<(&'a QkNorm, &'a [R])>,
    rope: Option<&'a Rope>,
    /// As given, [length, width].
    raw: Vec<R>,
    /// After the convolution, [length, width].
    filtered: Vec<R>,
    /// After norm and RoPE, [length, dim].
    pub(crate) rotated: Vec<R>,
}

/// What acts on q, k or v before the scores.
pub(crate) struct Steps<'a, R> {
    pub taps: &'a [R],
    pub norm: Option<(&'a QkNorm, &'a [R])>,
    pub rope: Option<&'a Rope>,
}

impl<'a, R: Real> Stages<'a, R> {
    /// `raw` [length, width] holds the head in the columns from `first` on.
    pub(crate) fn new(raw: Vec<R>, dim: usize, width: usize, first: usize, steps: Steps<'a, R>) -> Self {
        let Steps { taps, norm, rope } = steps;
        let mut filtered = raw.clone();
        let mut one = vec![R::zero(); raw.len() / width];
        for (channel, taps) in channels(taps, width).enumerate() {
            conv::forward(&column(&raw, width, channel), taps, &mut one);
            one.iter().enumerate().for_each(|(t, &y)| filtered[t * width + channel] = y);
        }
        let mut rotated = Vec::with_capacity(raw.len() / width * dim);
        for row in filtered.chunks_exact(width) {
            let mut row = row.to_vec();
            if let Some((norm, weight)) = norm {
                norm.forward(&mut row, weight);
            }
            rotated.extend_from_slice(&row[first..first + dim]);
        }
        rotate_rows(rope, &mut rotated, dim, rope::rotate);
        Stages { dim, width, first, taps, norm, rope, raw, filtered, rotated }
    }

    pub(crate) fn row(&self, t: usize) -> &[R] {
        &self.rotated[t * self.dim..][..self.dim]
    }

    /// The gradient of `raw` [length, width] from that of `rotated`; those of filters and weights are added to.
    pub(crate) fn backward(&self, mut gradient: Vec<R>, dtaps: &mut [R], dnorm: &mut [R]) -> Vec<R> {
        let (dim, width) = (self.dim, self.width);
        rotate_rows(self.rope, &mut gradient, dim, rope::rotate_back);
        let mut wide = vec![R::zero(); self.raw.len()];
        for ((wide, own), x) in wide.chunks_exact_mut(width).zip(gradient.chunks_exact(dim)).zip(self.filtered.chunks_exact(width)) {
            wide[self.first..][..dim].copy_from_slice(own);
            if let Some((norm, weight)) = self.norm {
                norm.backward(x, weight, wide, dnorm);
            }
        }
        let taps_each = self.taps.len() / width;
        for (channel, taps) in channels(self.taps, width).enumerate() {
            let (x, dy) = (column(&self.raw, width, channel), column(&wide, width, channel));
            let mut dx = vec![R::zero(); x.len()];
            conv::backward(&x, taps, &dy, &mut dx, &mut dtaps[channel * taps_each..][..taps_each]);
            dx.iter().enumerate().for_each(|(t, &dx)| wide[t * width + channel] = dx);
        }
        wide
    }
}

/// q or k of a head as one class of keys sees it: projected, then mapped.
pub(crate) struct Features<'a, R> {
    d: usize,
    dim: usize,
    /// Numbers of a row after φ.
    pub(crate) width: usize,
    /// A [dim, d], empty for none.
    matrix: &'a [R],
    learned: Option<hedgehog::Weights<'a, R>>,
    map: Map,
    /// [length, dim]
    projected: Vec<R>,
    /// [length, width]
    mapped: Vec<R>,
}

/// Where the gradients of features go; empty where there is no such tensor.
pub(crate) struct FeatureGrads<R> {
    pub matrix: Vec<R>,
    pub weight: Vec<R>,
    pub bias: Vec<R>,
}

impl<'a, R: Real> Features<'a, R> {
    /// Of x [length, d].
    pub(crate) fn new(x: &[R], d: usize, matrix: &'a [R], learned: Option<hedgehog::Weights<'a, R>>, map: Map) -> Self {
        let dim = if matrix.is_empty() { d } else { matrix.len() / d };
        let projected: Vec<R> = match matrix.is_empty() {
            true => x.to_vec(),
            false => x.chunks_exact(d).flat_map(|x| matrix.chunks_exact(d).map(move |row| dot(row, x))).collect(),
        };
        let width = if learned.is_some() { 2 * dim } else { dim };
        let mut mapped = projected.clone();
        if let Some(weights) = learned {
            mapped = vec![R::zero(); projected.len() * 2];
            projected.chunks_exact(dim).zip(mapped.chunks_exact_mut(width)).for_each(|(x, phi)| hedgehog::forward(x, weights, phi));
        }
        mapped.chunks_exact_mut(width).for_each(|row| map.forward(row));
        Features { d, dim, width, matrix, learned, map, projected, mapped }
    }

    pub(crate) fn rows(&self) -> usize {
        self.mapped.len() / self.width
    }

    pub(crate) fn row(&self, t: usize) -> &[R] {
        &self.mapped[t * self.width..][..self.width]
    }

    /// Adds the gradient of x [length, d] from that of the mapped rows, and gives those of the tensors.
    pub(crate) fn backward(&self, x: &[R], gradient: &[R], dx: &mut [R]) -> FeatureGrads<R> {
        let zeros = |n: usize| vec![R::zero(); n];
        let learned = self.learned.map_or((0, 0), |weights| (weights.weight.len(), weights.bias.len()));
        let mut grads = FeatureGrads { matrix: zeros(self.matrix.len()), weight: zeros(learned.0), bias: zeros(learned.1) };
        for (t, (gradient, dx)) in gradient.chunks_exact(self.width).zip(dx.chunks_exact_mut(self.d)).enumerate() {
            let projected = &self.projected[t * self.dim..][..self.dim];
            let mut own = gradient.to_vec();
            match self.learned {
                None => self.map.backward(projected, &mut own),
                Some(weights) => {
                    own = zeros(self.dim);
                    hedgehog::backward(projected, weights, self.row(t), gradient, &mut own, &mut grads.weight, &mut grads.bias);
                }
            }
            if self.matrix.is_empty() {
                dx.iter_mut().zip(&own).for_each(|(dx, &g)| *dx += g);
                continue;
            }
            let x = &x[t * self.d..][..self.d];
            for ((row, drow), &g) in self.matrix.chunks_exact(self.d).zip(grads.matrix.chunks_exact_mut(self.d)).zip(&own) {
                for i in 0..self.d {
                    drow[i] += g * x[i];
                    dx[i] += g * row[i];
                }
            }
        }
        grads
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
    let (mut cos, mut sin) = (vec![R::zero(); rope.frequencies().len()], vec![R::zero(); rope.frequencies().len()]);
    for (t, row) in x.chunks_exact_mut(dim).enumerate() {
        rope.angles(t, &mut cos, &mut sin);
        rotation(row, &cos, &sin);
    }
}
