//! One class of keys of a head: q and k as it sees them, its centre, and the scores of its pairs.

use crate::naive::prepare::{FeatureGrads, Features};
use crate::parts::cap;
use crate::parts::centre::{Mean, bounded_gauss, bounded_gauss_slope};
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
    /// μ_t [length, width], empty without a centre.
    means: Vec<R>,
    /// Keys that μ_t is the mean of, where it is running.
    counted: Vec<Vec<usize>>,
    /// What is taken from scores: scale·q_t·μ_t, zero without a centre.
    pub shift: Vec<R>,
    /// What the weights are multiplied back by: the same, or that of whole keys.
    pub centre: Vec<R>,
    /// γ/2·q_tᵀΣq_t
    gauss: Vec<R>,
    gamma: R,
    spread: &'a [R],
    /// Whether the log factor is that of whole keys.
    whole: bool,
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
    /// Log of what multiplies w, before the row maximum is taken out.
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
    /// Of c_t in the argument and of the log factor.
    pub centre: Vec<R>,
    pub log_factor: Vec<R>,
    /// Of learned a_n.
    pub coefficients: Vec<f64>,
}

impl<R: Real> ClassGrads<R> {
    pub fn new(class: &Class<R>) -> Self {
        let (length, width) = (class.centre.len(), class.q.width);
        let zeros = |n: usize| vec![R::zero(); n];
        ClassGrads {
            q: zeros(length * width),
            k: zeros(length * width),
            decay: vec![0.0; class.decay.len()],
            centre: zeros(length),
            log_factor: zeros(length),
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
    /// Of q and k [length, d] after RoPE. `keys(t)` are the class's keys that position t sees.
    pub fn new(
        tensors: Tensors<'a, R>,
        far: bool,
        weighing: Weighing,
        (q, k, d): (&[R], &[R], usize),
        decay: Vec<f64>,
        keys: impl Fn(usize) -> Vec<usize>,
    ) -> Self {
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
        let (whole_q, whole_k) = (q, k);
        let q = Features::new(q, d, matrix(Extra::DimQ, head), learned(Extra::FeatureQ, Extra::FeatureQBias, head), map);
        let k = Features::new(k, d, matrix(Extra::DimK, kv_head), learned(Extra::FeatureK, Extra::FeatureKBias, kv_head), map);
        let (width, scale) = (q.width, R::of(weighing.scale_for(d)));
        let length = q.rows();
        let (mut means, mut counted) = (Vec::new(), Vec::new());
        match weighing.centre.map(|centre| centre.mean) {
            None => {}
            Some(Mean::Running | Mean::Whole) => {
                counted = (0..length).map(keys).collect();
                for keys in &counted {
                    let inverse = R::one() / R::of(keys.len().max(1) as f64);
                    let mean = |i: usize| keys.iter().map(|&s| k.row(s)[i]).sum::<R>() * inverse;
                    means.extend((0..width).map(mean));
                }
            }
            Some(Mean::Given | Mean::Learned) => {
                let mean = tensors.own(true, Extra::Mean, far, kv_head, width);
                means = mean.iter().copied().cycle().take(length * width).collect();
            }
        }
        let shift: Vec<R> = match means.is_empty() {
            true => vec![R::zero(); length],
            false => (0..length).map(|t| scale * dot(q.row(t), &means[t * width..][..width])).collect(),
        };
        let mut centre = shift.clone();
        let has_gauss = weighing.centre.is_some_and(|centre| centre.gauss);
        let is_whole = weighing.centre.is_some_and(|centre| centre.mean == Mean::Whole);
        let spread_dim = if is_whole { d } else { width };
        let spread = tensors.own(has_gauss, Extra::Spread, far, kv_head, spread_dim * spread_dim);
        let gamma = tensors.own(has_gauss, Extra::Gamma, far, head, 1).first().copied().unwrap_or(R::zero());
        let half = R::of(0.5);
        let mut gauss: Vec<R> = vec![R::zero(); length];
        for t in 0..length {
            if is_whole {
                let row = &whole_q[t * d..][..d];
                let keys = &counted[t];
                let mean = |i: usize| keys.iter().map(|&s| whole_k[s * d + i].wide()).sum::<f64>() / keys.len().max(1) as f64;
                centre[t] = R::of((0..d).map(|i| row[i].wide() * mean(i)).sum::<f64>() / (d as f64).sqrt());
                if has_gauss {
                    gauss[t] = R::of(bounded_gauss((gamma * quadratic(row, spread)).wide(), keys.len()));
                }
            } else if has_gauss {
                gauss[t] = half * gamma * quadratic(q.row(t), spread);
            }
        }
        Class { far, weighing, scale, q, k, decay, means, counted, shift, centre, gauss, gamma, spread, whole: is_whole }
    }

    pub fn kernel(&self) -> &Kernel {
        &self.weighing.kernel
    }

    /// The centre and spread of row t in the log of its weights.
    pub fn log_factor(&self, t: usize) -> R {
        self.centre[t] + self.gauss[t]
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
            slope = cap::slope_from_value(value, c);
        }
        match self.weighing.clamp.map(R::of) {
            Some(clamp) if value > clamp => (clamp, R::zero()),
            _ => (value, slope),
        }
    }

    /// The score of query t and key s; `log_decay` is c_t − c_s of a decay by head.
    pub fn score(&self, t: usize, s: usize, log_decay: R) -> Score<R> {
        let (value, slope) = self.bounded(self.scale * self.product(self.q.row(t), self.k.row(s), t, s));
        Score { s, far: self.far, argument: value - self.shift[t], slope, log: self.log_factor(t) + log_decay, factor: R::one() }
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
        g.centre[t] += -dargument;
        let log = dweight * self.weight(score);
        g.log_factor[t] += log;
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

    /// Adds the gradients through the centre to those of q and k; gives those of μ [width] and γ.
    pub fn centre_backward(&self, g: &mut ClassGrads<R>) -> (Vec<R>, R) {
        let width = self.q.width;
        let (mut dmean, mut dgamma) = (vec![R::zero(); width], R::zero());
        for t in 0..self.centre.len() {
            // The log factor has another centre than the argument where that is of whole keys.
            let (q, dlog) = (self.q.row(t), if self.whole { R::zero() } else { g.log_factor[t] });
            let dc = g.centre[t] + dlog;
            if !self.means.is_empty() {
                let mean = &self.means[t * width..][..width];
                for i in 0..width {
                    g.q[t * width + i] += self.scale * dc * mean[i];
                    let dmu = self.scale * dc * q[i];
                    match self.counted.get(t) {
                        Some(keys) => {
                            let share = dmu / R::of(keys.len().max(1) as f64);
                            keys.iter().for_each(|&s| g.k[s * width + i] += share);
                        }
                        None => dmean[i] += dmu,
                    }
                }
            }
            if !self.spread.is_empty() && !self.whole {
                dgamma += dlog * R::of(0.5) * quadratic(q, self.spread);
                for i in 0..width {
                    let both = (0..width).map(|j| (self.spread[i * width + j] + self.spread[j * width + i]) * q[j]).sum::<R>();
                    g.q[t * width + i] += dlog * R::of(0.5) * self.gamma * both;
                }
            }
        }
        (dmean, dgamma)
    }

    /// Adds the gradients through the log factor of whole keys to those of q and k after RoPE [length, d]; gives those of γ and Σ.
    pub fn whole_backward(&self, g: &ClassGrads<R>, (q, dq): (&[R], &mut [R]), (k, dk): (&[R], &mut [R])) -> (R, Vec<R>) {
        let (mut dgamma, mut dspread) = (R::zero(), vec![R::zero(); self.spread.len()]);
        if !self.whole {
            return (dgamma, dspread);
        }
        let d = q.len() / self.centre.len().max(1);
        let root = R::of((d as f64).sqrt());
        for (t, keys) in self.counted.iter().enumerate() {
            let (row, dlog) = (&q[t * d..][..d], g.log_factor[t]);
            let share = dlog / (root * R::of(keys.len().max(1) as f64));
            for &s in keys {
                for i in 0..d {
                    dq[t * d + i] += share * k[s * d + i];
                    dk[s * d + i] += share * row[i];
                }
            }
            if !self.spread.is_empty() {
                let quadratic = quadratic(row, self.spread);
                let slope = dlog * R::of(bounded_gauss_slope((self.gamma * quadratic).wide(), keys.len()));
                dgamma += slope * quadratic;
                for i in 0..d {
                    let both = (0..d).map(|j| (self.spread[i * d + j] + self.spread[j * d + i]) * row[j]).sum::<R>();
                    dq[t * d + i] += slope * self.gamma * both;
                    (0..d).for_each(|j| dspread[i * d + j] += slope * self.gamma * row[i] * row[j]);
                }
            }
        }
        (dgamma, dspread)
    }

    /// Adds the gradients of q and k after RoPE, [length, d]; gives those of the tensors of q and of k.
    pub fn features_backward(&self, g: &ClassGrads<R>, (q, dq): (&[R], &mut [R]), (k, dk): (&[R], &mut [R])) -> [FeatureGrads<R>; 2] {
        [self.q.backward(q, &g.q, dq), self.k.backward(k, &g.k, dk)]
    }
}

/// qᵀΣq
fn quadratic<R: Real>(q: &[R], spread: &[R]) -> R {
    spread.chunks_exact(q.len()).zip(q).map(|(row, &q_i)| q_i * dot(row, q)).sum()
}

fn add<R: Real>(to: &mut [R], from: &[R]) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to += from);
}
