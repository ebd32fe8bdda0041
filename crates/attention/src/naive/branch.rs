//! Step 5: the near or the far branch of a head. Scores and weights of pairs (t, s), and their gradients.

use crate::naive::features::HeadFeatures;
use crate::naive::head_slice::HeadSlice;
use crate::naive::{add_scaled, add_to};
use crate::parts::cap;
use crate::parts::kernel::hedgehog;
use crate::{AuxKind, AuxTensor, Grads, Inputs, Kernel, KeyRange, Real, ScoreFn};
use termwise_kernels::real::dot;

/// The near or the far branch of one head of one batch row.
pub(crate) struct Branch<'a, R> {
    pub range: KeyRange,
    tensors: Tensors<'a, R>,
    /// With learned coefficients inserted.
    pub score_fn: ScoreFn,
    /// The factor of the scores of each query, [length].
    pub scales: Vec<f64>,
    pub q: HeadFeatures<'a, R>,
    pub k: HeadFeatures<'a, R>,
    /// c_{t,i}, [length, width]; empty without a decay per channel.
    pub decay: Vec<f64>,
}

/// One score x_ts and its weight factor·w(argument).
#[derive(Clone, Copy)]
pub(crate) struct Score<R> {
    pub s: usize,
    pub range: KeyRange,
    /// The argument of w: x after cap and clamp.
    pub argument: R,
    /// ∂argument/∂x: the slope of the cap, 0 above the clamp.
    pub slope: R,
    /// The log of the decay M_ts, before the row maximum is subtracted.
    pub log: R,
    pub factor: R,
}

/// Gradients of the inputs of a branch.
pub(crate) struct BranchGrads<R> {
    /// Of mapped queries and keys, [length, width].
    pub q: Vec<R>,
    pub k: Vec<R>,
    /// Of c_{t,i}.
    pub decay: Vec<f64>,
    /// Of learned a_n.
    pub coefficients: Vec<f64>,
}

impl<R: Real> BranchGrads<R> {
    pub fn new(branch: &Branch<R>) -> Self {
        let (length, width) = (branch.q.rows(), branch.q.width);
        let zeros = |n: usize| vec![R::zero(); n];
        BranchGrads {
            q: zeros(length * width),
            k: zeros(length * width),
            decay: vec![0.0; branch.decay.len()],
            coefficients: vec![0.0; branch.score_fn.learned()],
        }
    }
}

/// The auxiliary tensors of a head.
#[derive(Clone, Copy)]
pub(crate) struct Tensors<'a, R> {
    pub inputs: &'a Inputs<'a, R>,
    pub query: HeadSlice,
    pub key: HeadSlice,
}

impl<'a, R: Real> Tensors<'a, R> {
    /// The n entries of one head in an auxiliary tensor; empty if the branch does not read it.
    fn own(&self, is_read: bool, aux: AuxTensor, index: usize, n: usize) -> &'a [R] {
        if is_read { &self.inputs.aux(aux)[index * n..][..n] } else { &[] }
    }
}

impl<'a, R: Real> Branch<'a, R> {
    /// Of q and k [length, d] after RoPE.
    pub fn new(tensors: Tensors<'a, R>, range: KeyRange, score_fn: ScoreFn, (q, k, d): (&[R], &[R], usize), decay: Vec<f64>) -> Self {
        let (head, kv_head) = (tensors.query.head, tensors.key.head);
        let dim = score_fn.dim.unwrap_or(d);
        let matrix = |kind: AuxKind, index| tensors.own(score_fn.dim.is_some(), kind.of(range), index, dim * d);
        let learned = |weight: AuxKind, bias: AuxKind, index| {
            score_fn.kernel.has_learned_map().then(|| hedgehog::Weights {
                weight: tensors.own(true, weight.of(range), index, dim * dim),
                bias: tensors.own(true, bias.of(range), index, dim),
            })
        };
        let map = score_fn.kernel.map();
        let q = HeadFeatures::new(q, d, matrix(AuxKind::DimQ, head), learned(AuxKind::FeatureQ, AuxKind::FeatureQBias, head), map);
        let k = HeadFeatures::new(k, d, matrix(AuxKind::DimK, kv_head), learned(AuxKind::FeatureK, AuxKind::FeatureKBias, kv_head), map);
        let scales = vec![score_fn.scale_for(d); q.rows()];
        Branch { range, tensors, score_fn, scales, q, k, decay }
    }

    pub fn kernel(&self) -> &Kernel {
        &self.score_fn.kernel
    }

    /// exp(c_t,i − c_s,i)
    fn channel_decay(&self, t: usize, s: usize, i: usize) -> R {
        R::of((self.decay[t * self.q.width + i] - self.decay[s * self.q.width + i]).exp())
    }

    /// Σ_i a_i·b_i, with a at position t and b at s, decayed per channel from s to t.
    fn product(&self, a: &[R], b: &[R], t: usize, s: usize) -> R {
        match self.decay.is_empty() {
            true => dot(a, b),
            false => (0..a.len()).map(|i| a[i] * b[i] * self.channel_decay(t, s, i)).sum(),
        }
    }

    /// The score after cap and clamp, and its slope.
    fn bounded(&self, x: R) -> (R, R) {
        let (mut value, mut slope) = (x, R::one());
        if let Some(c) = self.score_fn.cap.map(R::of) {
            value = cap::value(x, c);
            slope = cap::slope(x, c);
        }
        match self.score_fn.clamp.map(R::of) {
            Some(clamp) if value > clamp => (clamp, R::zero()),
            _ => (value, slope),
        }
    }

    /// The score of query t and key s; `log_decay` is c_t − c_s of a decay per head.
    pub fn score(&self, t: usize, s: usize, log_decay: R) -> Score<R> {
        let (value, slope) = self.bounded(R::of(self.scales[t]) * self.product(self.q.row(t), self.k.row(s), t, s));
        Score { s, range: self.range, argument: value, slope, log: log_decay, factor: R::one() }
    }

    /// The score of key t and key s < t for the delta rule.
    pub fn key_score(&self, t: usize, s: usize, scale: R, log_decay: R) -> Score<R> {
        let (argument, slope) = self.bounded(scale * self.product(self.k.row(t), self.k.row(s), t, s));
        Score { s, range: self.range, argument, slope, log: log_decay, factor: log_decay.exp() }
    }

    pub fn weight(&self, score: &Score<R>) -> R {
        score.factor * self.kernel().value(score.argument)
    }

    /// Adds the gradients of a query t and a key s; returns the gradient of the log of their weight.
    pub fn pair_backward(&self, t: usize, score: &Score<R>, dweight: R, g: &mut BranchGrads<R>) -> R {
        let dargument = self.argument_backward(score, dweight, g);
        let log = dweight * self.weight(score);
        let BranchGrads { q: dq, k: dk, decay: ddecay, .. } = g;
        self.product_backward(dargument * score.slope * R::of(self.scales[t]), (t, self.q.row(t), dq), (score.s, dk), ddecay);
        log
    }

    /// Adds the gradients of two keys t and s; returns the gradient of the log of their weight.
    pub fn key_pair_backward(&self, t: usize, score: &Score<R>, scale: R, dweight: R, g: &mut BranchGrads<R>) -> R {
        let dx = self.argument_backward(score, dweight, g) * score.slope * scale;
        let width = self.q.width;
        let mut dt = vec![R::zero(); width * (t + 1)];
        let BranchGrads { k: dk, decay: ddecay, .. } = g;
        self.product_backward(dx, (t, self.k.row(t), &mut dt), (score.s, dk), ddecay);
        add_scaled(&mut dk[t * width..][..width], R::one(), &dt[t * width..]);
        dweight * self.weight(score)
    }

    fn argument_backward(&self, score: &Score<R>, dweight: R, g: &mut BranchGrads<R>) -> R {
        let dvalue = dweight * score.factor;
        if !g.coefficients.is_empty() {
            let mut slopes = vec![0.0; g.coefficients.len()];
            self.kernel().learned_slopes(score.argument.wide(), &mut slopes);
            g.coefficients.iter_mut().zip(&slopes).for_each(|(da, slope)| *da += dvalue.wide() * slope);
        }
        dvalue * self.kernel().slope(score.argument)
    }

    /// From dx, the gradient of the product of a_t and k_s, to those of both and of the decay between them.
    fn product_backward(&self, dx: R, (t, a, da): (usize, &[R], &mut [R]), (s, dk): (usize, &mut [R]), ddecay: &mut [f64]) {
        let (width, k) = (self.q.width, self.k.row(s));
        for i in 0..width {
            let m = if self.decay.is_empty() { R::one() } else { self.channel_decay(t, s, i) };
            da[t * width + i] += dx * k[i] * m;
            dk[s * width + i] += dx * a[i] * m;
            if !ddecay.is_empty() {
                let dc = (dx * a[i] * k[i] * m).wide();
                ddecay[t * width + i] += dc;
                ddecay[s * width + i] -= dc;
            }
        }
    }

    /// Adds the gradients of q and k after RoPE, [length, d], and of the auxiliary tensors of the branch.
    pub fn inputs_backward(&self, g: &BranchGrads<R>, (q, dq): (&[R], &mut [R]), (k, dk): (&[R], &mut [R]), grads: &mut Grads<R>) {
        let (of_q, of_k) = (self.q.backward(q, &g.q, dq), self.k.backward(k, &g.k, dk));
        let coefficients: Vec<R> = g.coefficients.iter().map(|&a| R::of(a)).collect();
        let (head, kv_head) = (self.tensors.query.head, self.tensors.key.head);
        for (kind, index, values) in [
            (AuxKind::DimQ, head, &of_q.matrix),
            (AuxKind::FeatureQ, head, &of_q.weight),
            (AuxKind::FeatureQBias, head, &of_q.bias),
            (AuxKind::DimK, kv_head, &of_k.matrix),
            (AuxKind::FeatureK, kv_head, &of_k.weight),
            (AuxKind::FeatureKBias, kv_head, &of_k.bias),
            (AuxKind::Coefficients, head, &coefficients),
        ] {
            add_to(grads, kind.of(self.range), index * values.len(), values);
        }
    }
}
