//! One class of keys of a head: q and k as it sees them, and the scores of its pairs.

use crate::naive::prepare::{FeatureGrads, Features};
use crate::parts::cap;
use crate::parts::kernel::hedgehog;
use crate::real::dot;
use crate::{Extra, Inputs, Kernel, Real, Weighing};

/// Near or far keys of one head of one batch row.
pub(crate) struct Class<'a, R> {
    pub far: bool,
    /// With learned coefficients taken in.
    pub weighing: Weighing,
    pub scale: R,
    pub q: Features<'a, R>,
    pub k: Features<'a, R>,
    /// c_{t,i}, empty without a decay by channel; [length, width].
    pub decay: Vec<f64>,
}

/// One score x_ts on its way to a weight factor·w(argument).
#[derive(Clone, Copy)]
pub(crate) struct Score<R> {
    pub s: usize,
    pub far: bool,
    /// What enters w.
    pub argument: R,
    /// ∂argument/∂x: the slope of the cap, 0 beyond the clamp.
    pub slope: R,
    /// Log of the decay that multiplies w, before the row maximum is taken out.
    pub log: R,
    pub factor: R,
}

/// Gradients of what a class reads.
pub(crate) struct ClassGrads<R> {
    /// Of mapped queries and keys, [length, width].
    pub q: Vec<R>,
    pub k: Vec<R>,
    /// Of c_{t,i}.
    pub decay: Vec<f64>,
    /// Of learned a_n.
    pub coefficients: Vec<f64>,
}

impl<R: Real> ClassGrads<R> {
    pub fn new(class: &Class<R>) -> Self {
        let (length, width) = (class.q.rows(), class.q.width);
        let zeros = |n: usize| vec![R::zero(); n];
        ClassGrads {
            q: zeros(length * width),
            k: zeros(length * width),
            decay: vec![0.0; class.decay.len()],
            coefficients: vec![0.0; class.weighing.learned()],
        }
    }
}

/// Where a class finds its tensors.
#[derive(Clone, Copy)]
pub(crate) struct Tensors<'a, R> {
    pub inputs: &'a Inputs<'a, R>,
    pub head: usize,
    pub kv_head: usize,
}

impl<'a, R: Real> Tensors<'a, R> {
    /// The part of one head in a tensor that has `heads` of them; empty where the class does not read it.
    fn own(&self, weighing: bool, extra: Extra, far: bool, index: usize, n: usize) -> &'a [R] {
        let extra = if far { extra.of_far() } else { extra };
        if weighing { &self.inputs.extra(extra)[index * n..][..n] } else { &[] }
    }
}

impl<'a, R: Real> Class<'a, R> {
    /// Of q and k [length, d] after RoPE.
    pub fn new(tensors: Tensors<'a, R>, far: bool, weighing: Weighing, (q, k, d): (&[R], &[R], usize), decay: Vec<f64>) -> Self {
        let Tensors { head, kv_head, .. } = tensors;
        let dim = weighing.dim.unwrap_or(d);
        let matrix = |extra, index| tensors.own(weighing.dim.is_some(), extra, far, index, dim * d);
        let learned = |weight, bias, index| {
            weighing.kernel.has_learned_map().then(|| hedgehog::Weights {
                weight: tensors.own(true, weight, far, index, dim * dim),
                bias: tensors.own(true, bias, far, index, dim),
            })
        };
        let map = weighing.kernel.map();
        let q = Features::new(q, d, matrix(Extra::DimQ, head), learned(Extra::FeatureQ, Extra::FeatureQBias, head), map);
        let k = Features::new(k, d, matrix(Extra::DimK, kv_head), learned(Extra::FeatureK, Extra::FeatureKBias, kv_head), map);
        let scale = R::of(weighing.scale_for(d));
        Class { far, weighing, scale, q, k, decay }
    }

    pub fn kernel(&self) -> &Kernel {
        &self.weighing.kernel
    }

    /// exp(c_t,i − c_s,i)
    fn channel_decay(&self, t: usize, s: usize, i: usize) -> R {
        R::of((self.decay[t * self.q.width + i] - self.decay[s * self.q.width + i]).exp())
    }

    /// Σ_i a_i·b_i, with a at position t and b at s, decayed by channel between them.
    fn product(&self, a: &[R], b: &[R], t: usize, s: usize) -> R {
        match self.decay.is_empty() {
            true => dot(a, b),
            false => (0..a.len()).map(|i| a[i] * b[i] * self.channel_decay(t, s, i)).sum(),
        }
    }

    /// Cap and clamp, with their slope.
    fn bounded(&self, x: R) -> (R, R) {
        let (mut value, mut slope) = (x, R::one());
        if let Some(c) = self.weighing.cap.map(R::of) {
            value = cap::value(x, c);
            slope = cap::slope(x, c);
        }
        match self.weighing.clamp.map(R::of) {
            Some(clamp) if value > clamp => (clamp, R::zero()),
            _ => (value, slope),
        }
    }

    /// The score of query t and key s; `log_decay` is c_t − c_s of a decay by head.
    pub fn score(&self, t: usize, s: usize, log_decay: R) -> Score<R> {
        let (value, slope) = self.bounded(self.scale * self.product(self.q.row(t), self.k.row(s), t, s));
        Score { s, far: self.far, argument: value, slope, log: log_decay, factor: R::one() }
    }

    /// The score of key t and key s < t for a write rule.
    pub fn key_score(&self, t: usize, s: usize, scale: R, log_decay: R) -> Score<R> {
        let (argument, slope) = self.bounded(scale * self.product(self.k.row(t), self.k.row(s), t, s));
        Score { s, far: self.far, argument, slope, log: log_decay, factor: log_decay.exp() }
    }

    pub fn weight(&self, score: &Score<R>) -> R {
        score.factor * self.kernel().value(score.argument)
    }

    /// Adds the gradients of a pair (t, s) of a query and a key; returns that of the log of its weight.
    pub fn pair_backward(&self, t: usize, score: &Score<R>, dweight: R, g: &mut ClassGrads<R>) -> R {
        let dargument = self.argument_backward(score, dweight, g);
        let log = dweight * self.weight(score);
        let ClassGrads { q: dq, k: dk, decay: ddecay, .. } = g;
        self.product_backward(dargument * score.slope * self.scale, (t, self.q.row(t), dq), (score.s, dk), ddecay);
        log
    }

    /// Adds the gradients of a pair (t, s) of keys; returns that of the log of its weight.
    pub fn key_pair_backward(&self, t: usize, score: &Score<R>, scale: R, dweight: R, g: &mut ClassGrads<R>) -> R {
        let dx = self.argument_backward(score, dweight, g) * score.slope * scale;
        let width = self.q.width;
        let mut dt = vec![R::zero(); width * (t + 1)];
        let ClassGrads { k: dk, decay: ddecay, .. } = g;
        self.product_backward(dx, (t, self.k.row(t), &mut dt), (score.s, dk), ddecay);
        add(&mut dk[t * width..][..width], &dt[t * width..]);
        dweight * self.weight(score)
    }

    fn argument_backward(&self, score: &Score<R>, dweight: R, g: &mut ClassGrads<R>) -> R {
        let dvalue = dweight * score.factor;
        if !g.coefficients.is_empty() {
            let mut slopes = vec![0.0; g.coefficients.len()];
            self.kernel().learned_slopes(score.argument.wide(), &mut slopes);
            g.coefficients.iter_mut().zip(&slopes).for_each(|(da, slope)| *da += dvalue.wide() * slope);
        }
        dvalue * self.kernel().slope(score.argument)
    }

    /// From dx, the gradient of the product of a_t and k_s, to those of both and of the decays between.
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

    /// Adds the gradients of q and k after RoPE, [length, d]; gives those of the tensors of q and of k.
    pub fn features_backward(&self, g: &ClassGrads<R>, (q, dq): (&[R], &mut [R]), (k, dk): (&[R], &mut [R])) -> [FeatureGrads<R>; 2] {
        [self.q.backward(q, &g.q, dq), self.k.backward(k, &g.k, dk)]
    }
}

fn add<R: Real>(to: &mut [R], from: &[R]) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to += from);
}
