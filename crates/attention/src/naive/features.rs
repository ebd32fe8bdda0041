//! Step 2: the features of q and k. A projection A and a feature map φ per branch, and their gradients.

use crate::Real;
use crate::parts::kernel::feature::Map;
use crate::parts::kernel::hedgehog;
use termwise_kernels::real::dot;

/// q or k of a head in one branch.
pub(crate) struct HeadFeatures<'a, R> {
    d: usize,
    dim: usize,
    /// The dimension after φ.
    pub width: usize,
    /// A [dim, d], empty for none.
    matrix: &'a [R],
    learned: Option<hedgehog::Weights<'a, R>>,
    map: Map,
    /// [length, dim]
    projected: Vec<R>,
    /// [length, width]
    mapped: Vec<R>,
}

/// Gradients of the tensors that a feature map reads; empty if it reads none.
pub(crate) struct HeadFeatureGrads<R> {
    pub matrix: Vec<R>,
    pub weight: Vec<R>,
    pub bias: Vec<R>,
}

impl<'a, R: Real> HeadFeatures<'a, R> {
    /// φ(A·x) of x [length, d].
    pub fn new(x: &[R], d: usize, matrix: &'a [R], learned: Option<hedgehog::Weights<'a, R>>, map: Map) -> Self {
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
        HeadFeatures { d, dim, width, matrix, learned, map, projected, mapped }
    }

    pub fn rows(&self) -> usize {
        self.mapped.len() / self.width
    }

    pub fn row(&self, t: usize) -> &[R] {
        &self.mapped[t * self.width..][..self.width]
    }

    /// Adds the gradient of x [length, d], given that of the mapped rows; returns the gradients of the tensors.
    pub fn backward(&self, x: &[R], gradient: &[R], dx: &mut [R]) -> HeadFeatureGrads<R> {
        let zeros = |n: usize| vec![R::zero(); n];
        let learned = self.learned.map_or((0, 0), |weights| (weights.weight.len(), weights.bias.len()));
        let mut grads = HeadFeatureGrads { matrix: zeros(self.matrix.len()), weight: zeros(learned.0), bias: zeros(learned.1) };
        for (t, (gradient, dx)) in gradient.chunks_exact(self.width).zip(dx.chunks_exact_mut(self.d)).enumerate() {
            let projected = &self.projected[t * self.dim..][..self.dim];
            let mut own = gradient.to_vec();
            match self.learned {
                None => self.map.backward(projected, &mut own),
                Some(weights) => {
                    own = zeros(self.dim);
                    let to = hedgehog::WeightGrads { weight: &mut grads.weight, bias: &mut grads.bias };
                    hedgehog::backward(projected, weights, self.row(t), gradient, &mut own, to);
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
