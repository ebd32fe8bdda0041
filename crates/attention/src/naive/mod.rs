//! The formula computed plainly: what every faster engine is compared with.
//!
//! ```text
//! q, k, v ← silu(conv(·))                      where there is a short convolution
//! q, k    ← rope(norm(·))                      where there is a norm of q and k, and RoPE
//! q, k    ← φ(A·(·))                           of near and of far keys each, where there is a projection
//! x_ts    = min( cap( scale · Σ_i q_ti·k_si·exp(c_ti − c_si) ), clamp )         the exponential with a decay by channel
//! M_ts    = exp(c_t − c_s)
//! w_ts    = w(x_ts)                                                            near or far by the distance of s
//! u_t     = v_t,  or  β_t·( v_t − Σ_{s<t} M_ts · w(x̂_ts) · u_s )               x̂ = scale_k·k_t·k_s
//! U_t     = Σ_{s visible} M_ts · w_ts · I_s · κ_s · u_s                        κ_s = S_s^−σ(m) with the `position` denominator, else 1
//! z_t     = Σ_{s visible} M_ts · w_ts  (+ e^b)
//! y_t     = P_t ⊙ N( O_t · U_t / D(z_t, S_t) )
//! ```
//!
//! Row by row with explicit loops, memory linear in T. Where the parts allow it, the row maximum ρ of all classes is taken out of the weights;
//! y does not depend on ρ, so it is a constant in the backward pass.

mod chosen;
mod class;
pub(crate) mod head;
mod prepare;
pub mod recurrent;
pub mod view;

use std::marker::PhantomData;

use std::sync::Arc;

use crate::engine::Home;
use crate::naive::class::Score;
use crate::naive::head::{Head, HeadGrads, add_scaled, backward_heads};
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
                let (u, mut sum) = (head.written(), vec![R::zero(); e]);
                for t in 0..head.length {
                    let (z, rho) = head.sums(t, &u, &mut scores, &mut sum);
                    let row = &mut y[head.at_query.index(t) * e..][..e];
                    let denominator = epilogue::forward(&head.variant, head.row(t, z, rho), &sum, row);
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
        self.layer.check_trainable()?;
        let report = self.infer(inputs, y)?;
        Ok(self.home.saved(report, self.home.take()))
    }

    fn backward(&mut self, inputs: &Inputs<R>, saved: &Saved, dy: &[R], grads: &mut Grads<R>) -> Result<(), Error> {
        self.home.check(saved)?;
        backward_heads(&self.layer, &self.shape, inputs, dy, grads, |inputs, shape, (b, h), dy, grads| {
            Head::gather(&self.layer, inputs, shape, b, h).backward(dy, grads);
        })
    }
}

impl<R: Real> Head<'_, R> {
    /// u [length, e]: the values, or what the write rule makes of them, row after row.
    fn written(&self) -> Vec<R> {
        let mut u = Vec::with_capacity(self.length * self.e);
        for t in 0..self.length {
            let mut row = self.v.row(t).to_vec();
            if let Some(&beta) = self.beta.get(t) {
                for score in self.key_scores(t) {
                    add_scaled(&mut row, -self.near.weight(&score), &u[score.s * self.e..][..self.e]);
                }
                row.iter_mut().for_each(|u| *u *= beta);
            }
            u.extend(row);
        }
        u
    }

    /// The scores of key t with all earlier keys.
    fn key_scores(&self, t: usize) -> impl Iterator<Item = Score<R>> {
        (0..t).map(move |s| self.near.key_score(t, s, self.key_scale(), self.log_decay(t, s)))
    }

    /// U_t into `sum`; returns z_t and ρ.
    fn sums(&self, t: usize, u: &[R], scores: &mut Vec<Score<R>>, sum: &mut [R]) -> (R, R) {
        let rho = self.scores(t, 0..t + 1, None, scores);
        let mut z = R::zero();
        sum.fill(R::zero());
        for score in scores {
            let (s, weight) = (score.s, self.weight(score));
            z += weight;
            add_scaled(sum, weight * self.in_gate[s] * self.key_weights[s], &u[s * self.e..][..self.e]);
        }
        (z, rho)
    }

    fn backward(&self, dy: &[R], grads: &mut Grads<R>) {
        let (variant, length, e) = (&self.variant, self.length, self.e);
        let mut g = HeadGrads::new(self);
        let zeros = |n: usize| vec![R::zero(); n];
        let (u, mut du) = (self.written(), zeros(length * e));
        let (mut scores, mut sum, mut scratch) = (Vec::with_capacity(length), zeros(e), zeros(2 * e));
        for t in 0..length {
            let (z, rho) = self.sums(t, &u, &mut scores, &mut sum);
            let mut dsum = dy[self.at_query.index(t) * e..][..e].to_vec();
            let norm_grads = NormGrads { weight: &mut g.norm_weight, bias: &mut g.norm_bias };
            let row = epilogue::backward(variant, self.row(t, z, rho), &sum, &mut dsum, &mut scratch, norm_grads);
            g.take_row(t, &row, &scratch[e..], self.scaled_sink(rho));
            for score in &scores {
                let (s, weight) = (score.s, self.weight(score));
                let along = dot(&dsum, &u[s * e..][..e]);
                let factor = self.in_gate[s] * self.key_weights[s];
                add_scaled(&mut du[s * e..][..e], weight * factor, &dsum);
                g.in_gate[s] += weight * self.key_weights[s] * along;
                g.key_weights[s] += weight * self.in_gate[s] * along;
                self.pair_backward(t, score, along * factor + row.z, &mut g);
            }
        }
        self.written_backward(&u, du, &mut g);
        self.finish(g, grads);
    }

    /// From du to the gradients of v, and of β and k where there is a write rule: the last row first, since it reads those before.
    fn written_backward(&self, u: &[R], mut du: Vec<R>, g: &mut HeadGrads<R>) {
        let e = self.e;
        for t in (0..self.length).rev() {
            let mut residual = du[t * e..][..e].to_vec();
            if let Some(&beta) = self.beta.get(t) {
                let scores: Vec<Score<R>> = self.key_scores(t).collect();
                let mut kept = self.v.row(t).to_vec();
                scores.iter().for_each(|score| add_scaled(&mut kept, -self.near.weight(score), &u[score.s * e..][..e]));
                g.beta[t] += dot(&residual, &kept);
                residual.iter_mut().for_each(|r| *r *= beta);
                for score in &scores {
                    let s = score.s;
                    let dweight = -dot(&residual, &u[s * e..][..e]);
                    add_scaled(&mut du[s * e..][..e], -self.near.weight(score), &residual);
                    let log = self.near.key_pair_backward(t, score, self.key_scale(), dweight, &mut g.near).wide();
                    g.log_decay[t] += log;
                    g.log_decay[s] -= log;
                }
            }
            add_scaled(&mut g.v[t * e..][..e], R::one(), &residual);
        }
    }
}
