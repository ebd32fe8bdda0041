//! From rows after RoPE to what meets in a score: a projection, learned features, φ, a centre; and back.
//!
//! ```text
//! keys      k' = φ(A·k) − μ                              queries      q' = scale·φ(A·q),   log factor c + γ/2·qᵀΣq,   c = q'·μ
//! running   k' = [φ(A·k), 1]                                          q' = [scale·φ(A·q), −c_t],                    c_t = q'·μ_t
//! ```
//!
//! Both ways q'·k' is the score less the centre c, which a polynomial is then expanded around. A vector μ that stays is taken from the keys. One that moves
//! would change the keys of a state; as one more coordinate it changes the query alone, and one state serves every μ_t.

use crate::kernels::simd::{Simd, Task};
use crate::layer::{Class, Head, Layer};
use crate::parts::bits::Channels;
use crate::parts::kernel::feature::Map;
use crate::parts::kernel::hedgehog;
use crate::real::dot;
use crate::{Extra, Inputs};

/// How the rows of one head of q or k become those of a class.
#[derive(Clone, Copy)]
pub(crate) struct Features<'a> {
    map: Map,
    /// What the result is multiplied by; 1 for keys.
    scale: f32,
    /// A [dim, d], empty for none.
    matrix: &'a [f32],
    learned: Option<hedgehog::Weights<'a, f32>>,
    /// μ where it stays; empty for none.
    mean: &'a [f32],
    /// Whether μ and γ are trained.
    trained: bool,
    /// Whether there is a coordinate for a mean that moves.
    running: bool,
    /// Whether these are queries.
    query: bool,
    /// Σ and γ, of queries; empty for none.
    spread: &'a [f32],
    gamma: f32,
    /// Numbers of a row.
    pub width: usize,
}

/// Where the gradients of the tensors of one head go; empty where it reads none.
pub(crate) struct FeatureGrads<'a> {
    pub matrix: &'a mut [f32],
    pub weight: &'a mut [f32],
    pub bias: &'a mut [f32],
    pub mean: &'a mut [f32],
    pub gamma: &'a mut [f32],
}

impl<'a> FeatureGrads<'a> {
    /// For rows that read no tensors.
    pub fn none() -> FeatureGrads<'a> {
        FeatureGrads { matrix: &mut [], weight: &mut [], bias: &mut [], mean: &mut [], gamma: &mut [] }
    }

    /// Divides values up, [`Class::tensor_len`] of them.
    pub fn of(class: &Class, d: usize, values: &'a mut [f32]) -> FeatureGrads<'a> {
        let [matrix, weight, bias, mean, _] = class.tensor_lens(d);
        let (matrix, rest) = values.split_at_mut(matrix);
        let (weight, rest) = rest.split_at_mut(weight);
        let (bias, rest) = rest.split_at_mut(bias);
        let (mean, rest) = rest.split_at_mut(mean);
        FeatureGrads { matrix, weight, bias, mean, gamma: &mut rest[..1] }
    }
}

impl Class {
    /// Values of the tensors of one head: A, W, b, μ and γ.
    pub fn tensor_lens(&self, d: usize) -> [usize; 5] {
        let n = self.dim.unwrap_or(d);
        let learned = self.hedgehog as usize;
        [self.dim.map_or(0, |dim| dim * d), learned * n * n, learned * n, self.shift as usize * self.width, 1]
    }

    /// All of them.
    pub fn tensor_len(&self, d: usize) -> usize {
        self.tensor_lens(d).iter().sum()
    }

    /// The centre and range of the codes of a kv head, where there are any.
    pub fn channels_of<'a>(&self, inputs: &Inputs<'a, f32>, d: usize, g: usize) -> Option<Channels<'a>> {
        self.bits?;
        let of = |extra| &inputs.extra(extra)[g * d..][..d];
        Some(Channels { centre: of(Extra::CodeCentre), range: of(Extra::CodeRange) })
    }

    fn own<'a>(&self, inputs: &Inputs<'a, f32>, there: bool, extra: Extra, head: usize, len: usize) -> &'a [f32] {
        if there { &inputs.extra(self.tensor(extra))[head * len..][..len] } else { &[] }
    }

    fn features<'a>(&self, inputs: &Inputs<'a, f32>, d: usize, kv_head: usize, head: usize, tensors: [Extra; 3]) -> Features<'a> {
        let [matrix, weight, bias, mean, _] = self.tensor_lens(d);
        let [dim, feature, feature_bias] = tensors;
        Features {
            map: self.map,
            scale: 1.0,
            matrix: self.own(inputs, self.dim.is_some(), dim, head, matrix),
            learned: self.hedgehog.then(|| hedgehog::Weights {
                weight: self.own(inputs, true, feature, head, weight),
                bias: self.own(inputs, true, feature_bias, head, bias),
            }),
            mean: self.own(inputs, self.shift, Extra::Mean, kv_head, mean),
            trained: self.trained,
            running: self.running.is_some(),
            query: false,
            spread: &[],
            gamma: 0.0,
            width: self.width,
        }
    }

    /// Of the keys of a kv head.
    pub fn of_keys<'a>(&self, inputs: &Inputs<'a, f32>, d: usize, g: usize) -> Features<'a> {
        self.features(inputs, d, g, g, [Extra::DimK, Extra::FeatureK, Extra::FeatureKBias])
    }

    /// Of the queries of head h, which reads kv head g.
    pub fn of_queries<'a>(&self, inputs: &Inputs<'a, f32>, d: usize, head: &Head, h: usize, g: usize) -> Features<'a> {
        let features = self.features(inputs, d, g, h, [Extra::DimQ, Extra::FeatureQ, Extra::FeatureQBias]);
        let of = |extra: Extra| inputs.extra(if head.far { extra.of_far() } else { extra });
        let n = self.width - self.running.is_some() as usize;
        // Around the mean of whole keys, a walk adds what the spread does.
        let (spread, gamma) =
            if head.gauss && !self.whole { (&of(Extra::Spread)[g * n * n..][..n * n], of(Extra::Gamma)[h]) } else { (&[][..], 0.0) };
        Features { scale: head.scale, query: true, trained: head.trained, spread, gamma, ..features }
    }
}

impl Layer {
    /// Σ of the kv head that a head reads and its γ, around the mean of whole keys.
    pub(crate) fn whole_spread<'a>(&self, inputs: &Inputs<'a, f32>, head: usize) -> (&'a [f32], f32) {
        let gauss = self.far_plans()[head].as_ref().is_some_and(|far| far.gauss && far.variant.has_whole_centre());
        if !gauss {
            return (&[], 0.0);
        }
        let (d, [q, k, _]) = (self.head_dim(), self.widths());
        let g = head / (q / k).max(1);
        (&inputs.extra(Extra::FarSpread)[g * d * d..][..d * d], inputs.extra(Extra::FarGamma)[head])
    }
}

/// y_i = row i of A · x
#[inline(always)]
fn project(matrix: &[f32], x: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(matrix.chunks_exact(x.len())).for_each(|(y, row)| *y = dot(row, x));
}

/// qᵀΣq
fn quadratic(q: &[f32], spread: &[f32]) -> f32 {
    spread.chunks_exact(q.len()).zip(q).map(|(row, q_i)| q_i * dot(row, q)).sum()
}

fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

impl<'a> Features<'a> {
    /// Rows of this many values as they are.
    pub fn none(width: usize) -> Features<'a> {
        Features {
            map: Map::Identity,
            scale: 1.0,
            matrix: &[],
            learned: None,
            mean: &[],
            trained: false,
            running: false,
            query: false,
            spread: &[],
            gamma: 0.0,
            width,
        }
    }

    /// Whether rows are at most scaled: their gradients then need nothing of the rows themselves.
    #[inline(always)]
    pub fn only_scales(&self) -> bool {
        self.matrix.is_empty()
            && self.learned.is_none()
            && self.map == Map::Identity
            && self.mean.is_empty()
            && !self.running
            && self.spread.is_empty()
    }

    /// Multiplies by the scale.
    #[inline(always)]
    pub fn scale_row(&self, row: &mut [f32]) {
        if self.scale != 1.0 {
            row.iter_mut().for_each(|x| *x *= self.scale);
        }
    }

    /// Features without the coordinate of a moving mean.
    #[inline(always)]
    fn features(&self) -> usize {
        self.width - self.running as usize
    }

    /// x [d] becomes `row` [width]; μ_t [features] where the mean moves.
    #[inline(always)]
    pub fn forward<S: Simd>(&self, simd: S, x: &[f32], mean: &[f32], row: &mut [f32]) {
        simd.call(Forward { features: self, x, mean, row });
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

    /// Whether rows of weights have a factor of their own.
    pub fn has_log_factor(&self) -> bool {
        self.running || !self.mean.is_empty() || !self.spread.is_empty()
    }

    /// The log of what multiplies the weights of a prepared query.
    pub fn log_factor(&self, row: &[f32]) -> f32 {
        let q = &row[..self.features()];
        let centre = if self.running { -row[q.len()] } else { dot(q, self.mean) };
        centre + if self.spread.is_empty() { 0.0 } else { self.half_gamma() * quadratic(q, self.spread) }
    }

    /// γ/2 for queries that are scaled already.
    fn half_gamma(&self) -> f32 {
        0.5 * self.gamma / (self.scale * self.scale)
    }

    /// The gradient of a prepared row [width] becomes that of x [d], in `dx`; `dlog` is that of its log factor. Gradients of tensors are added
    /// to. Of a query whose mean moves, `row` holds that of μ_t afterwards.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "a row, what made it, and where its gradients go")]
    pub fn backward<S: Simd>(&self, simd: S, x: &[f32], mean: &[f32], dlog: f32, row: &mut [f32], dx: &mut [f32], to: FeatureGrads) {
        simd.call(Backward { features: self, x, mean, dlog, row, dx, to });
    }

    /// Adds the gradient through the log factor, and through the coordinate of a moving mean, to that of a prepared query.
    fn log_backward(&self, q: &[f32], mean: &[f32], dlog: f32, row: &mut [f32], dgamma: &mut [f32]) {
        let (row, last) = row.split_at_mut(q.len());
        if self.running {
            add_scaled(row, dlog - last[0], mean);
        } else {
            add_scaled(row, dlog, self.mean);
        }
        if !self.spread.is_empty() {
            if self.trained {
                dgamma[0] += dlog * 0.5 / (self.scale * self.scale) * quadratic(q, self.spread);
            }
            let factor = dlog * self.half_gamma();
            for (i, (line, q_i)) in self.spread.chunks_exact(q.len()).zip(q).enumerate() {
                row[i] += factor * dot(line, q);
                add_scaled(row, factor * q_i, line);
            }
        }
    }
}

/// [`Features::forward`], compiled once for all who call it.
struct Forward<'a> {
    features: &'a Features<'a>,
    x: &'a [f32],
    mean: &'a [f32],
    row: &'a mut [f32],
}

impl Task for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Forward { features: f, x, mean, row } = self;
        let (row, last) = row.split_at_mut(f.features());
        let mut buffer = [0.0f32; 256];
        match f.learned {
            None if f.matrix.is_empty() => row.copy_from_slice(x),
            None => project(f.matrix, x, row),
            Some(weights) => hedgehog::forward(f.projected(x, &mut buffer), weights, row),
        }
        f.map.forward_simd(simd, row);
        f.scale_row(row);
        if !f.query && !f.mean.is_empty() {
            row.iter_mut().zip(f.mean).for_each(|(x, mean)| *x -= mean);
        }
        if f.running {
            last[0] = if f.query { -dot(row, mean) } else { 1.0 };
        }
    }
}

/// [`Features::backward`], compiled once for all who call it.
struct Backward<'a> {
    features: &'a Features<'a>,
    x: &'a [f32],
    mean: &'a [f32],
    dlog: f32,
    row: &'a mut [f32],
    dx: &'a mut [f32],
    to: FeatureGrads<'a>,
}

impl Task for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Backward { features: f, x, mean, dlog, row, dx, to } = self;
        let mut buffer = [0.0f32; 256];
        let mut wide = [0.0f32; 528];
        let n = f.features();
        let prepared = &mut wide[..f.width];
        if f.query && f.has_log_factor() {
            f.forward(simd, x, mean, prepared);
            f.log_backward(&prepared[..n], mean, dlog, row, to.gamma);
            if !f.mean.is_empty() && f.trained {
                add_scaled(to.mean, dlog, &prepared[..n]);
            }
        }
        let dc = if f.query && f.running { dlog - row[n] } else { 0.0 };
        if !f.query && !f.mean.is_empty() && f.trained {
            add_scaled(to.mean, -1.0, &row[..n]);
        }
        let gradient = &mut row[..n];
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
                let own = &mut own[..n / 2];
                let phi = &mut wide[..n];
                let projected = f.projected(x, &mut buffer);
                hedgehog::forward(projected, weights, phi);
                hedgehog::backward(projected, weights, phi, gradient, own, to.weight, to.bias);
                if f.matrix.is_empty() { dx.copy_from_slice(own) } else { matrix_backward(f.matrix, x, own, dx, to.matrix) }
            }
        }
        if f.query && f.running {
            // The prepared query was needed for the gradients above; now it is that of μ_t itself.
            f.forward(simd, x, mean, &mut wide[..f.width]);
            row[..n].iter_mut().zip(&wide).for_each(|(to, q)| *to = dc * q);
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
