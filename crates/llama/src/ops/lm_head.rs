//! The last projection and the loss in one: logits = cap(h Wᵀ) for h [M, C], W [V, C], then cross-entropy. Some models have the soft cap
//! cap(x) = c·tanh(x/c), whose slope is 1 − (cap(x)/c)².
//!
//! Logits exist only for [`ROWS`] rows at a time: a block of logits becomes its gradient in place, goes into dW and dh, and is
//! overwritten by the next.

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::cross_entropy::{self, IGNORE};
use super::{Buffer, zeros};
use crate::error::Result;
use crate::kernels::gemm::{Matrix, Write, product};

/// Rows of a block. Fewer would read and write dW more often than the product needs, more would leave the caches.
pub const ROWS: usize = 256;

/// Room for one block of logits.
pub struct LmHead {
    /// [min(M, ROWS), V], rows `step` apart.
    logits: Buffer,
    /// The same after the cap, which its slope is computed from once the logits are gradients; empty without one.
    capped: Buffer,
    cap: Option<f32>,
    vocabulary: usize,
    /// Vocabularies are powers of two more often than not, and columns that far apart would share a few cache sets: 16 more spread them.
    step: usize,
}

impl LmHead {
    /// For up to M rows and a vocabulary of V.
    pub fn new(rows: usize, vocabulary: usize, cap: Option<f32>) -> Result<LmHead> {
        let step = vocabulary.saturating_add(16);
        let block = |rows: usize| zeros("a block of logits", rows.min(ROWS), step);
        Ok(LmHead { logits: block(rows)?, capped: block(if cap.is_some() { rows } else { 0 })?, cap, vocabulary, step })
    }

    /// The loss of every row into `losses` [M], zero where the label is [`IGNORE`].
    pub fn forward(&mut self, h: &[f32], weight: &[f32], labels: &[i32], losses: &mut [f64]) {
        let LmHead { vocabulary, step, cap, .. } = *self;
        let width = weight.len() / vocabulary;
        for ((h, labels), losses) in h.chunks(ROWS * width).zip(labels.chunks(ROWS)).zip(losses.chunks_mut(ROWS)) {
            let logits = &mut self.logits[..labels.len() * step];
            product(logits, step, Write::Replace, Matrix::new(h, labels.len(), width), Matrix::new(weight, vocabulary, width).transposed());
            (logits.par_chunks_mut(step), labels, losses).into_par_iter().for_each(|(row, &label, loss)| {
                let row = &mut row[..vocabulary];
                soft_cap(row, cap);
                *loss = if label == IGNORE { 0.0 } else { cross_entropy::forward(row, label as usize) };
            });
        }
    }

    /// As [LmHead::forward]; dW += the gradient of `scale`·Σ losses, and h becomes its own gradient.
    pub fn backward(&mut self, h: &mut [f32], weight: &[f32], labels: &[i32], scale: f32, dweight: &mut [f32], losses: &mut [f64]) {
        let LmHead { vocabulary, step, cap, .. } = *self;
        let width = weight.len() / vocabulary;
        for ((h, labels), losses) in h.chunks_mut(ROWS * width).zip(labels.chunks(ROWS)).zip(losses.chunks_mut(ROWS)) {
            if labels.iter().all(|&label| label == IGNORE) {
                h.fill(0.0);
                losses.fill(0.0);
                continue;
            }
            let rows = labels.len();
            let logits = &mut self.logits[..rows * step];
            product(logits, step, Write::Replace, Matrix::new(h, rows, width), Matrix::new(weight, vocabulary, width).transposed());
            if let Some(cap) = cap {
                let capped = &mut self.capped[..rows * step];
                (logits.par_chunks_mut(step), capped.par_chunks_mut(step)).into_par_iter().for_each(|(row, capped)| {
                    soft_cap(row, Some(cap));
                    capped.copy_from_slice(row);
                });
            }
            (logits.par_chunks_mut(step), labels, losses).into_par_iter().for_each(|(row, &label, loss)| {
                let row = &mut row[..vocabulary];
                if label == IGNORE {
                    row.fill(0.0);
                    *loss = 0.0;
                } else {
                    *loss = cross_entropy::backward(row, label as usize, scale);
                }
            });
            if let Some(cap) = cap {
                let capped = &self.capped[..rows * step];
                (logits.par_chunks_mut(step), capped.par_chunks(step)).into_par_iter().for_each(|(row, capped)| {
                    row.iter_mut().zip(capped).for_each(|(g, y)| *g *= 1.0 - (y / cap) * (y / cap));
                });
            }
            let dlogits = Matrix::strided(logits, rows, vocabulary, step);
            product(dweight, width, Write::Add, dlogits.transposed(), Matrix::new(h, rows, width));
            product(h, width, Write::Replace, dlogits, Matrix::new(weight, vocabulary, width));
        }
    }
}

/// Logits become c·tanh(x/c), where there is a c.
pub fn soft_cap(logits: &mut [f32], cap: Option<f32>) {
    if let Some(cap) = cap {
        dispatch(SoftCap { logits, cap });
    }
}

struct SoftCap<'a> {
    logits: &'a mut [f32],
    cap: f32,
}

impl Task for SoftCap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // tanh(x) = 2σ(2x) − 1: what is lost near zero is below the rounding of the largest logits.
        let (to, cap, twice) = (simd.splat(2.0 / self.cap), simd.splat(self.cap), simd.splat(2.0 * self.cap));
        for i in (0..self.logits.len()).step_by(S::LANES) {
            let s = simd.sigmoid(simd.mul(simd.load_at(self.logits, i), to));
            simd.store_at(self.logits, i, simd.sub(simd.mul(twice, s), cap));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradient, numbers};

    /// Σ of the losses of the rows that count.
    fn naive(h: &[f64], w: &[f64], labels: &[i32], c: usize, cap: Option<f32>) -> Vec<f64> {
        let row = |h: &[f64], label: i32| {
            let x = w.chunks(c).map(|w| w.iter().zip(h).map(|(a, b)| a * b).sum::<f64>());
            let x: Vec<f64> = x.map(|x| cap.map_or(x, |cap| cap as f64 * (x / cap as f64).tanh())).collect();
            if label == IGNORE { 0.0 } else { x.iter().map(|x| x.exp()).sum::<f64>().ln() - x[label as usize] }
        };
        h.chunks(c).zip(labels).map(|(h, &label)| row(h, label)).collect()
    }

    #[test]
    fn loss_and_gradients_match_float64_over_several_blocks() {
        let (c, v) = (3, 5);
        let rows = [1, 7, ROWS, ROWS + 3, 2 * ROWS + 1];
        for (m, cap) in rows.into_iter().flat_map(|m| [(m, None), (m, Some(0.75))]) {
            let (h, w) = (numbers(m * c, 1), numbers(v * c, 2));
            let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
            let labels: Vec<i32> =
                (0..m).map(|i| if i % 4 == 1 || (ROWS..ROWS + 3).contains(&i) { IGNORE } else { (i * i) as i32 % v as i32 }).collect();
            let expected = naive(&wide(&h), &wide(&w), &labels, c, cap);
            let mut head = LmHead::new(m, v, cap).expect("room");
            let mut losses = vec![f64::NAN; m];
            head.forward(&h, &w, &labels, &mut losses);
            let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
            assert_close(&narrow(&losses), &expected, 1e-6, "losses");
            let (mut dh, mut dw, scale) = (h.clone(), vec![0.0; v * c], 0.3);
            losses.fill(f64::NAN);
            head.backward(&mut dh, &w, &labels, scale, &mut dw, &mut losses);
            assert_close(&narrow(&losses), &expected, 1e-6, "losses while training");
            let scales = vec![scale; m];
            assert_gradient(&dw, &w, &scales, |w| naive(&wide(&h), w, &labels, c, cap), "dw");
            if m < 10 {
                assert_gradient(&dh, &h, &scales, |h| naive(h, &wide(&w), &labels, c, cap), "dh");
            }
        }
    }
}
