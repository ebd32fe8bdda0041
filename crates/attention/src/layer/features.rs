//! Features of q and k after RoPE, and their gradients: a projection, learned features, φ; k' = φ(A·k), q' = scale·φ(A·q).

use crate::layer::{HeadPlan, KeyTransform};
use crate::parts::kernel::feature::Map;
use crate::parts::kernel::hedgehog;
use crate::{AuxKind, Inputs};
use termwise_kernels::real::dot;
use termwise_kernels::simd::{Simd, Task};

/// The features of one head of q or k in one key transform.
#[derive(Clone, Copy)]
pub(crate) struct Features<'a> {
    map: Map,
    /// The factor of the result; 1 for keys.
    scale: f32,
    /// A [dim, d], empty for none.
    matrix: &'a [f32],
    learned: Option<hedgehog::Weights<'a, f32>>,
    /// Number of values of a row.
    pub width: usize,
}

/// Destination of the gradients of the tensors of one head; empty if it reads none.
pub(crate) struct FeatureGrads<'a> {
    pub matrix: &'a mut [f32],
    pub weight: &'a mut [f32],
    pub bias: &'a mut [f32],
}

impl<'a> FeatureGrads<'a> {
    /// For rows that read no tensors.
    pub fn none() -> FeatureGrads<'a> {
        FeatureGrads { matrix: &mut [], weight: &mut [], bias: &mut [] }
    }

    /// Divides [`KeyTransform::tensor_len`] values into fields.
    pub fn of(key_transform: &KeyTransform, d: usize, values: &'a mut [f32]) -> FeatureGrads<'a> {
        let [matrix, weight, bias] = key_transform.tensor_lens(d);
        let (matrix, rest) = values.split_at_mut(matrix);
        let (weight, rest) = rest.split_at_mut(weight);
        FeatureGrads { matrix, weight, bias: &mut rest[..bias] }
    }
}

impl KeyTransform {
    /// Number of values of the tensors of one head: A, W and b.
    pub fn tensor_lens(&self, d: usize) -> [usize; 3] {
        let n = self.dim.unwrap_or(d);
        let learned = self.hedgehog as usize;
        [self.dim.map_or(0, |dim| dim * d), learned * n * n, learned * n]
    }

    /// Their total.
    pub fn tensor_len(&self, d: usize) -> usize {
        self.tensor_lens(d).iter().sum()
    }

    fn own<'a>(&self, inputs: &Inputs<'a, f32>, there: bool, aux: AuxKind, head: usize, len: usize) -> &'a [f32] {
        if there { &inputs.aux(self.tensor(aux))[head * len..][..len] } else { &[] }
    }

    fn features<'a>(&self, inputs: &Inputs<'a, f32>, d: usize, head: usize, tensors: [AuxKind; 3]) -> Features<'a> {
        let [matrix, weight, bias] = self.tensor_lens(d);
        let [dim, feature, feature_bias] = tensors;
        Features {
            map: self.map,
            scale: 1.0,
            matrix: self.own(inputs, self.dim.is_some(), dim, head, matrix),
            learned: self.hedgehog.then(|| hedgehog::Weights {
                weight: self.own(inputs, true, feature, head, weight),
                bias: self.own(inputs, true, feature_bias, head, bias),
            }),
            width: self.width,
        }
    }

    /// Of the keys of a kv head.
    pub fn of_keys<'a>(&self, inputs: &Inputs<'a, f32>, d: usize, g: usize) -> Features<'a> {
        self.features(inputs, d, g, [AuxKind::DimK, AuxKind::FeatureK, AuxKind::FeatureKBias])
    }

    /// Of the queries of head h.
    pub fn of_queries<'a>(&self, inputs: &Inputs<'a, f32>, d: usize, head: &HeadPlan, h: usize) -> Features<'a> {
        let features = self.features(inputs, d, h, [AuxKind::DimQ, AuxKind::FeatureQ, AuxKind::FeatureQBias]);
        Features { scale: head.scale, ..features }
    }
}

/// y_i = row i of A · x
#[inline(always)]
fn project(matrix: &[f32], x: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(matrix.chunks_exact(x.len())).for_each(|(y, row)| *y = dot(row, x));
}

fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

impl<'a> Features<'a> {
    /// Rows of this many values, unchanged.
    pub fn none(width: usize) -> Features<'a> {
        Features { map: Map::Identity, scale: 1.0, matrix: &[], learned: None, width }
    }

    /// Whether rows are at most scaled: their gradients then do not depend on the rows.
    #[inline(always)]
    pub fn only_scales(&self) -> bool {
        self.matrix.is_empty() && self.learned.is_none() && self.map == Map::Identity
    }

    /// Multiplies by the scale.
    #[inline(always)]
    pub fn scale_row(&self, row: &mut [f32]) {
        if self.scale != 1.0 {
            row.iter_mut().for_each(|x| *x *= self.scale);
        }
    }

    /// x [d] becomes `row` [width].
    #[inline(always)]
    pub fn forward<S: Simd>(&self, simd: S, x: &[f32], row: &mut [f32]) {
        simd.call(ForwardFeatures { features: self, x, row });
    }

    #[inline(always)]
    fn projected<'b>(&self, x: &'b [f32], buffer: &'b mut [f32; 256]) -> &'b [f32] {
        if self.matrix.is_empty() {
            return x;
        }
        let y = &mut buffer[..self.matrix.len() / x.len()];
        project(self.matrix, x, y);
        y
    }

    /// From the gradient of a prepared row [width] to that of x [d], in `dx`. Adds the gradients of the tensors.
    #[inline(always)]
    pub fn backward<S: Simd>(&self, simd: S, x: &[f32], row: &mut [f32], dx: &mut [f32], to: FeatureGrads) {
        simd.call(BackwardFeatures { features: self, x, row, dx, to });
    }
}

/// [`Features::forward`], compiled once for all callers.
struct ForwardFeatures<'a> {
    features: &'a Features<'a>,
    x: &'a [f32],
    row: &'a mut [f32],
}

impl Task for ForwardFeatures<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ForwardFeatures { features: f, x, row } = self;
        let mut buffer = [0.0f32; 256];
        match f.learned {
            None if f.matrix.is_empty() => row.copy_from_slice(x),
            None => project(f.matrix, x, row),
            Some(weights) => hedgehog::forward(f.projected(x, &mut buffer), weights, row),
        }
        f.map.forward_simd(simd, row);
        f.scale_row(row);
    }
}

/// [`Features::backward`], compiled once for all callers.
struct BackwardFeatures<'a> {
    features: &'a Features<'a>,
    x: &'a [f32],
    row: &'a mut [f32],
    dx: &'a mut [f32],
    to: FeatureGrads<'a>,
}

impl Task for BackwardFeatures<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let BackwardFeatures { features: f, x, row: gradient, dx, to } = self;
        let mut buffer = [0.0f32; 256];
        f.scale_row(gradient);
        match f.learned {
            None if f.matrix.is_empty() => {
                if f.map != Map::Identity {
                    f.map.backward_simd(simd, x, gradient);
                }
                dx.copy_from_slice(gradient);
            }
            None => {
                if f.map != Map::Identity {
                    f.map.backward_simd(simd, f.projected(x, &mut buffer), gradient);
                }
                matrix_backward(f.matrix, x, gradient, dx, to.matrix);
            }
            Some(weights) => {
                let mut own = [0.0f32; 256];
                let own = &mut own[..f.width / 2];
                let mut wide = [0.0f32; 512];
                let phi = &mut wide[..f.width];
                let projected = f.projected(x, &mut buffer);
                hedgehog::forward(projected, weights, phi);
                hedgehog::backward(projected, weights, phi, gradient, own, hedgehog::WeightGrads { weight: to.weight, bias: to.bias });
                if f.matrix.is_empty() { dx.copy_from_slice(own) } else { matrix_backward(f.matrix, x, own, dx, to.matrix) }
            }
        }
    }
}

/// dx [d] = Aᵀ·dy; dA += dy·xᵀ.
#[inline(always)]
fn matrix_backward(matrix: &[f32], x: &[f32], dy: &[f32], dx: &mut [f32], dmatrix: &mut [f32]) {
    dx.fill(0.0);
    for ((row, drow), &dy) in matrix.chunks_exact(x.len()).zip(dmatrix.chunks_exact_mut(x.len())).zip(dy) {
        add_scaled(dx, dy, row);
        add_scaled(drow, dy, x);
    }
}
