//! Step 6: the written values u. They are v, or with the delta rule
//!
//! ```text
//! u_t = β_t·( v_t − Σ_{s<t} M_ts·w(x̂_ts)·u_s ),      x̂_ts = scale_k·k_t·k_s
//! ```

use crate::Real;
use crate::naive::add_scaled;
use crate::naive::branch::Score;
use crate::naive::head::{Head, HeadGrads};
use termwise_kernels::real::dot;

impl<R: Real> Head<'_, R> {
    /// u [length, e].
    pub fn written(&self) -> Vec<R> {
        let mut u = Vec::with_capacity(self.length * self.e);
        for t in 0..self.length {
            let mut row = self.v.row(t).to_vec();
            if let Some(&beta) = self.gates.beta.get(t) {
                row = self.residual(t, &self.key_scores(t), &u);
                row.iter_mut().for_each(|u| *u *= beta);
            }
            u.extend(row);
        }
        u
    }

    /// From du to the gradients of v, and with the delta rule of β and k. Rows are processed in reverse order, since a row reads earlier ones.
    pub fn written_backward(&self, u: &[R], mut du: Vec<R>, g: &mut HeadGrads<R>) {
        let e = self.e;
        for t in (0..self.length).rev() {
            let mut dresidual = du[t * e..][..e].to_vec();
            if let Some(&beta) = self.gates.beta.get(t) {
                let scores = self.key_scores(t);
                g.gates.beta[t] += dot(&dresidual, &self.residual(t, &scores, u));
                dresidual.iter_mut().for_each(|r| *r *= beta);
                for score in &scores {
                    let s = score.s;
                    let dweight = -dot(&dresidual, &u[s * e..][..e]);
                    add_scaled(&mut du[s * e..][..e], -self.near.weight(score), &dresidual);
                    let log = self.near.key_pair_backward(t, score, self.key_scale(), dweight, &mut g.near).wide();
                    g.log_decay[t] += log;
                    g.log_decay[s] -= log;
                }
            }
            add_scaled(&mut g.v[t * e..][..e], R::one(), &dresidual);
        }
    }

    /// v_t − Σ_{s<t} M_ts·w(x̂_ts)·u_s
    fn residual(&self, t: usize, scores: &[Score<R>], u: &[R]) -> Vec<R> {
        let mut residual = self.v.row(t).to_vec();
        for score in scores {
            add_scaled(&mut residual, -self.near.weight(score), &u[score.s * self.e..][..self.e]);
        }
        residual
    }

    /// The scores of key t with all earlier keys.
    fn key_scores(&self, t: usize) -> Vec<Score<R>> {
        (0..t).map(|s| self.near.key_score(t, s, self.key_scale(), self.log_decay(t, s))).collect()
    }

    /// scale_k
    fn key_scale(&self) -> R {
        R::of(self.variant.write.map_or(1.0, |delta| delta.scale))
    }
}
