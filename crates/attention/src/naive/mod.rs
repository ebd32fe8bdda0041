//! The reference engine: the formula of all parts in plain loops, with gradients. Faster engines are compared with it.
//!
//! Start with [`softmax_as_rnn`], which states softmax attention and its recurrent form without further parts. The reference engine computes
//! the following steps, each in its own file:
//!
//! ```text
//! prepare    q, k, v ← silu(conv(·)),   q, k ← rope(norm(·))                       each if the variant has it
//! features   q, k    ← φ(A·(·))                                                     separately for the near and the far branch
//! gates      I_s, O_t, P_t, β_t,   κ_s = S_s^−σ(m) with the `position` denominator, else 1
//! decay      M_ts    = exp(c_t − c_s)
//! branch     x_ts    = min( cap( scale · Σ_i q_ti·k_si·exp(c_ti − c_si) ), clamp )  the exponential with a decay per channel
//!            w_ts    = w(x_ts)                                                      near or far, by the distance t − s
//! delta      u_t     = v_t,  or  β_t·( v_t − Σ_{s<t} M_ts · w(x̂_ts) · u_s )         x̂ = scale_k·k_t·k_s
//! this file  U_t     = Σ_{s visible} M_ts · w_ts · I_s · κ_s · u_s
//!            z_t     = Σ_{s visible} M_ts · w_ts  (+ e^b)
//! epilogue   y_t     = P_t ⊙ N( O_t · U_t / D(z_t, S_t) )
//! ```
//!
//! Rows are computed one after another, so memory is linear in T. If the parts allow it, the row maximum ρ is subtracted from the logarithms of
//! the weights. y does not depend on ρ, so ρ is a constant in the backward pass.

mod branch;
mod decay;
mod delta;
mod features;
mod gates;
mod head;
mod head_slice;
mod heavy_hitters;
mod prepare;
pub mod recurrence;
pub mod softmax_as_rnn;
pub mod view;

use std::marker::PhantomData;
use std::sync::Arc;

use crate::engine::SavedBufferPool;
use crate::naive::branch::Score;
use crate::naive::head::{Head, HeadGrads};
use crate::parts::norm::NormGrads;
use crate::{Attention, AuxTensor, Error, Grads, Inputs, Layer, Real, Report, Saved, Shape, epilogue};
use termwise_kernels::real::dot;

/// The reference engine, in float64 or float32. It saves no intermediate results: `backward` recomputes each row.
pub struct Reference<R: Real> {
    layer: Layer,
    shape: Shape,
    saved_buffers: Arc<SavedBufferPool>,
    real: PhantomData<R>,
}

impl Layer {
    /// The reference engine for B rows of T positions, in float64 or float32.
    pub fn naive<R: Real>(&self, batch: usize, time: usize) -> Result<Reference<R>, Error> {
        Ok(Reference { layer: self.clone(), shape: self.shape(batch, time)?, saved_buffers: Arc::default(), real: PhantomData })
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
            for (b, h) in batch_heads(&shape) {
                Head::new(&self.layer, &inputs, &shape, b, h).forward((b, h), y, &mut found);
            }
            report = report.or(found.of_document(at.start, &self.shape));
        }
        Ok(report)
    }

    fn forward(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Saved, Error> {
        self.layer.check_trainable()?;
        let report = self.infer(inputs, y)?;
        Ok(self.saved_buffers.saved(report, self.saved_buffers.take()))
    }

    fn backward(&mut self, inputs: &Inputs<R>, saved: &Saved, dy: &[R], grads: &mut Grads<R>) -> Result<(), Error> {
        self.saved_buffers.check(saved)?;
        self.layer.check(&self.shape, inputs, 1)?;
        self.layer.check_grads(&self.shape, grads)?;
        self.shape.check_outputs("gradient of y", dy.len())?;
        self.layer.check_trainable()?;
        let width = self.shape.heads * self.shape.e;
        for (at, shape, inputs) in inputs.each_document(&self.shape) {
            let (dy, mut grads) = (&dy[at.start * width..at.end * width], grads.part(&at, &self.shape));
            for (b, h) in batch_heads(&shape) {
                Head::new(&self.layer, &inputs, &shape, b, h).backward(dy, &mut grads);
            }
        }
        Ok(())
    }
}

/// Every pair of a batch row and a head.
fn batch_heads(shape: &Shape) -> impl Iterator<Item = (usize, usize)> + use<> {
    let Shape { batch, heads, .. } = *shape;
    (0..batch).flat_map(move |b| (0..heads).map(move |h| (b, h)))
}

/// The sums over the keys of one row, scaled by e^−ρ.
struct ScoredRow<R> {
    scores: Vec<Score<R>>,
    rho: R,
    /// U_t [e]
    u: Vec<R>,
    /// z_t
    z: R,
}

impl<R: Real> Head<'_, R> {
    fn row_sums(&self, t: usize, u: &[R]) -> ScoredRow<R> {
        let (scores, rho) = self.scores(t);
        let mut sums = ScoredRow { scores, rho, u: vec![R::zero(); self.e], z: R::zero() };
        for score in &sums.scores {
            let (s, weight) = (score.s, self.weight(score));
            sums.z += weight;
            add_scaled(&mut sums.u, weight * self.gates.input[s] * self.gates.key_weights[s], &u[s * self.e..][..self.e]);
        }
        sums
    }

    fn forward(&self, (b, h): (usize, usize), y: &mut [R], report: &mut Report) {
        let u = self.written();
        for t in 0..self.length {
            let sums = self.row_sums(t, &u);
            let y = &mut y[self.query.index(t) * self.e..][..self.e];
            let denominator = epilogue::forward(&self.variant, self.row(t, sums.z, sums.rho), &sums.u, y);
            if self.variant.denominator.sums() {
                report.see((b, h, t), denominator, sums.rho);
            }
        }
    }

    fn backward(&self, dy: &[R], grads: &mut Grads<R>) {
        let e = self.e;
        let mut g = HeadGrads::new(self);
        let u = self.written();
        let mut du = vec![R::zero(); self.length * e];
        let mut scratch = vec![R::zero(); 2 * e];
        for t in 0..self.length {
            let sums = self.row_sums(t, &u);
            let mut dsum = dy[self.query.index(t) * e..][..e].to_vec();
            let norm_grads = NormGrads { weight: &mut g.norm_weight, bias: &mut g.norm_bias };
            let row = epilogue::backward(&self.variant, self.row(t, sums.z, sums.rho), &sums.u, &mut dsum, &mut scratch, norm_grads);
            self.row_backward(t, sums.rho, &row, &scratch[e..], &mut g);
            for score in &sums.scores {
                let (s, weight) = (score.s, self.weight(score));
                let along = dot(&dsum, &u[s * e..][..e]);
                let factor = self.gates.input[s] * self.gates.key_weights[s];
                add_scaled(&mut du[s * e..][..e], weight * factor, &dsum);
                g.gates.input[s] += weight * self.gates.key_weights[s] * along;
                g.gates.key_weights[s] += weight * self.gates.input[s] * along;
                self.pair_backward(t, score, along * factor + row.z, &mut g);
            }
        }
        self.written_backward(&u, du, &mut g);
        self.inputs_backward(g, grads);
    }
}

/// to ← to + factor·from
fn add_scaled<R: Real>(to: &mut [R], factor: R, from: &[R]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// Adds values to the gradient of an auxiliary tensor, from entry `start` on.
fn add_to<R: Real>(grads: &mut Grads<R>, aux: impl Into<AuxTensor>, start: usize, values: &[R]) {
    if let Some(to) = grads.aux_tensors.get_mut(aux).filter(|_| !values.is_empty()) {
        add_scaled(&mut to[start..][..values.len()], R::one(), values);
    }
}
