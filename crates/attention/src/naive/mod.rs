//! The formula computed plainly: what every faster engine is compared with.
//!
//! ```text
//! q, k, v ← silu(conv(·))                      where there is a short convolution
//! q, k    ← rotate(·)                          where there is RoPE
//! x_ts    = min( scale · φ(q_t)·φ(k_s), clamp )
//! M_ts    = exp(c_t − c_s)
//! U_t     = Σ_{s ≤ t} M_ts · w(x_ts) · I_s · κ_s · v_s        κ_s = S_s^−σ(m) with the `position` denominator, else 1
//! z_t     = Σ_{s ≤ t} M_ts · w(x_ts)
//! y_t     = P_t · N( O_t · U_t / D(z_t, S_t) )
//! ```
//!
//! Row by row with explicit loops, memory linear in T. Where the parts allow it, the row maximum ρ of x + c_t − c_s is
//! subtracted; y does not depend on ρ, so it is a constant in the backward pass.

pub(crate) mod head;
mod prepare;
pub mod recurrent;
pub mod view;

use std::marker::PhantomData;

use std::sync::Arc;

use crate::engine::Home;
use crate::naive::head::{Head, HeadGrads, add_scaled};
use crate::parts::norm::NormGrads;
use crate::real::dot;
use crate::{Attention, Error, Grads, Inputs, Layer, Real, Report, Saved, Shape, epilogue};

/// The naive computation, in float64 or float32. Saves nothing: `backward` computes each row anew.
pub struct Reference<R: Real> {
    layer: Layer,
    shape: Shape,
    home: Arc<Home>,
    real: PhantomData<R>,
}

impl Layer {
    /// The naive engine for B rows of T positions, in float64 or float32.
    pub fn naive<R: Real>(&self, batch: usize, time: usize) -> Result<Reference<R>, Error> {
        Ok(Reference { layer: self.clone(), shape: self.shape(batch, time)?, home: Arc::default(), real: PhantomData })
    }
}

impl<R: Real> Attention<R> for Reference<R> {
    fn infer(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Report, Error> {
        let Shape { heads, e, .. } = self.shape;
        self.layer.check(&self.shape, inputs, 1)?;
        self.shape.check_outputs("y", y.len())?;
        y.fill(R::zero());
        let mut report = Report::default();
        for (at, shape, inputs) in inputs.each_document(&self.shape) {
            let y = &mut y[at.start * heads * e..at.end * heads * e];
            let mut found = Report::default();
            for (b, h) in (0..shape.batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                let head = Head::gather(&self.layer, &inputs, &shape, b, h);
                let mut scores = Vec::with_capacity(head.length);
                let mut u = vec![R::zero(); e];
                for t in 0..head.length {
                    let (z, rho) = head.sums(t, &mut scores, &mut u);
                    let row = &mut y[head.at_query.index(t) * e..][..e];
                    let denominator = epilogue::forward(&head.variant, head.row(t, z, rho), &u, row);
                    if head.variant.denominator.sums() {
                        found.see((b, h, t), denominator, rho);
                    }
                }
            }
            report = report.or(found.of_document(at.start, &self.shape));
        }
        Ok(report)
    }

    fn forward(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Saved, Error> {
        let report = self.infer(inputs, y)?;
        Ok(self.home.saved(report, self.home.take()))
    }

    fn backward(&mut self, inputs: &Inputs<R>, saved: &Saved, dy: &[R], grads: &mut Grads<R>) -> Result<(), Error> {
        let Shape { heads, e, .. } = self.shape;
        self.home.check(saved)?;
        self.layer.check(&self.shape, inputs, 1)?;
        self.layer.check_grads(&self.shape, grads)?;
        self.shape.check_outputs("gradient of y", dy.len())?;
        for (at, shape, inputs) in inputs.each_document(&self.shape) {
            let (dy, mut grads) = (&dy[at.start * heads * e..at.end * heads * e], grads.part(&at, &self.shape));
            for (b, h) in (0..shape.batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                Head::gather(&self.layer, &inputs, &shape, b, h).backward(dy, &mut grads);
            }
        }
        Ok(())
    }
}

/// One score x_ts on its way to a weight, which is decay · w(argument).
struct Score<R> {
    /// x before the clamp.
    raw: R,
    /// What enters w.
    argument: R,
    /// M_ts; 1 where it is part of the argument.
    decay: R,
}

impl<'a, R: Real> Head<'a, R> {
    /// The scores of row t, and the row maximum ρ that was subtracted from their arguments.
    fn scores(&self, t: usize, scores: &mut Vec<Score<R>>) -> R {
        let q = self.q.row(t);
        scores.clear();
        scores.extend((0..=t).map(|s| {
            let raw = self.scale * dot(q, self.k.row(s));
            let clamped = if self.beyond_clamp(raw) { R::of(self.variant.clamp.unwrap_or(f64::INFINITY)) } else { raw };
            let log_decay = R::of(self.log_decay[t] - self.log_decay[s]);
            match self.variant.shifts() {
                true => Score { raw, argument: clamped + log_decay, decay: R::one() },
                false => Score { raw, argument: clamped, decay: log_decay.exp() },
            }
        }));
        if !self.variant.shifts() {
            return R::zero();
        }
        let rho = scores.iter().fold(R::neg_infinity(), |rho, score| rho.max(score.argument));
        scores.iter_mut().for_each(|score| score.argument = score.argument - rho);
        rho
    }

    fn beyond_clamp(&self, x: R) -> bool {
        self.variant.clamp.is_some_and(|clamp| x > R::of(clamp))
    }

    /// U_t into `u`; returns z_t and ρ.
    fn sums(&self, t: usize, scores: &mut Vec<Score<R>>, u: &mut [R]) -> (R, R) {
        let rho = self.scores(t, scores);
        let mut z = R::zero();
        u.fill(R::zero());
        for (s, score) in scores.iter().enumerate() {
            let weight = score.decay * self.variant.kernel.value(score.argument);
            z += weight;
            add_scaled(u, weight * self.in_gate[s] * self.key_weights[s], self.v.row(s));
        }
        (z, rho)
    }

    fn backward(&self, dy: &[R], grads: &mut Grads<R>) {
        let (variant, length, d, e) = (&self.variant, self.length, self.d, self.e);
        let mut g = HeadGrads::new(self);
        let mut slopes = vec![0.0; g.coefficients.len()];
        let zeros = |n: usize| vec![R::zero(); n];
        let (mut scores, mut u, mut scratch) = (Vec::with_capacity(length), zeros(e), zeros(2 * e));
        for t in 0..length {
            let (z, rho) = self.sums(t, &mut scores, &mut u);
            let mut du = dy[self.at_query.index(t) * e..][..e].to_vec();
            let norm_grads = NormGrads { weight: &mut g.norm_weight, bias: &mut g.norm_bias };
            let row = epilogue::backward(variant, self.row(t, z, rho), &u, &mut du, &mut scratch, norm_grads);
            g.out[t] = row.out;
            g.post[t] = row.post;
            for (s, score) in scores.iter().enumerate() {
                let weight = score.decay * variant.kernel.value(score.argument);
                let along = dot(&du, self.v.row(s));
                let factor = self.in_gate[s] * self.key_weights[s];
                let dweight = along * factor + row.z;
                add_scaled(&mut g.v[s * e..][..e], weight * factor, &du);
                g.in_gate[s] += weight * self.key_weights[s] * along;
                g.key_weights[s] += weight * self.in_gate[s] * along;
                g.log_decay[t] += (dweight * weight).wide();
                g.log_decay[s] -= (dweight * weight).wide();
                if !slopes.is_empty() {
                    variant.kernel.learned_slopes(score.argument.wide(), &mut slopes);
                    let dvalue = (dweight * score.decay).wide();
                    g.coefficients.iter_mut().zip(&slopes).for_each(|(da, slope)| *da += dvalue * slope);
                }
                if !self.beyond_clamp(score.raw) {
                    let dx = dweight * score.decay * variant.kernel.slope(score.argument) * self.scale;
                    add_scaled(&mut g.q[t * d..][..d], dx, self.k.row(s));
                    add_scaled(&mut g.k[s * d..][..d], dx, self.q.row(t));
                }
            }
        }
        self.finish(g, grads);
    }
}
