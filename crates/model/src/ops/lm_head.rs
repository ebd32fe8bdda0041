//! The output projection fused with the cross-entropy loss: logits = cap(h Wᵀ) for h [M, C] and W [V, C]. Some models apply the soft cap
//! cap(x) = c·tanh(x/c), whose derivative is 1 − (cap(x)/c)².
//!
//! Only [`ROWS`] rows of logits are in memory at a time. A block of logits is replaced by its gradient in place, multiplied into dW and dh, and
//! overwritten by the next block.

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};

use super::cross_entropy::{self, IGNORE};
use super::products::{Products, Weight};
use super::{Buffer, zeros};
use crate::error::Result;
use termwise_kernels::gemm::{Matrix, Write};

/// Rows per block of logits. Smaller blocks read and write dW more often; larger blocks do not fit into the cache.
pub const ROWS: usize = 256;

/// Buffers for one block of logits.
pub struct LmHead {
    /// [min(M, ROWS), V] with row stride `step`.
    logits: Buffer,
    /// A copy of the capped logits, from which the derivative of the cap is computed. Empty without a cap.
    capped: Buffer,
    cap: Option<f32>,
    vocabulary: usize,
    /// Rows with a label, where most have none; empty until they are needed.
    packed: Packed,
    /// V + 16. Many vocabulary sizes are powers of two; the padding avoids cache set conflicts between rows.
    step: usize,
}

/// Rows with a label, next to each other.
#[derive(Default)]
struct Packed {
    h: Vec<f32>,
    labels: Vec<i32>,
    losses: Vec<f64>,
}

impl Packed {
    /// Collects the rows of h that have a label. Buffers grow once to the largest number of rows.
    fn fill(&mut self, h: &[f32], labels: &[i32], width: usize) {
        self.h.clear();
        self.labels.clear();
        for (h, &label) in h.chunks(width).zip(labels).filter(|(_, label)| **label != IGNORE) {
            self.h.extend_from_slice(h);
            self.labels.push(label);
        }
        self.losses.clear();
        self.losses.resize(self.labels.len(), 0.0);
    }

    /// Writes losses back to their rows; the others have loss zero.
    fn spread_losses(&self, labels: &[i32], losses: &mut [f64]) {
        let mut packed = self.losses.iter();
        for (loss, &label) in losses.iter_mut().zip(labels) {
            *loss = if label == IGNORE { 0.0 } else { packed.next().copied().unwrap_or(0.0) };
        }
    }
}

/// Whether so few rows have a label that collecting them is faster.
fn is_sparse(labels: &[i32]) -> bool {
    4 * labels.iter().filter(|&&label| label != IGNORE).count() <= labels.len()
}

/// The targets of a loss with gradient.
#[derive(Clone, Copy)]
pub struct Targets<'a> {
    /// The label of each row, or [`IGNORE`]. [M]
    pub labels: &'a [i32],
    /// Weight of the loss of one row.
    pub scale: f32,
}

/// The weight [V, C] of the output projection, and its products.
pub struct Projection<'a> {
    pub weight: Weight<'a>,
    pub products: &'a mut Products,
}

impl LmHead {
    /// Buffers for up to M rows and a vocabulary of V tokens.
    pub fn new(rows: usize, vocabulary: usize, cap: Option<f32>) -> Result<LmHead> {
        let step = vocabulary.saturating_add(16);
        let block = |rows: usize| zeros("a block of logits", rows.min(ROWS), step);
        Ok(LmHead {
            logits: block(rows)?,
            capped: block(if cap.is_some() { rows } else { 0 })?,
            cap,
            vocabulary,
            packed: Packed::default(),
            step,
        })
    }

    /// Writes the loss of each row to `losses` [M]. Rows with the label [`IGNORE`] have loss zero. If most rows have it, only the others are computed.
    pub fn forward(&mut self, h: &[f32], projection: Projection, labels: &[i32], losses: &mut [f64]) -> Result<()> {
        if !is_sparse(labels) {
            return self.forward_rows(h, projection, labels, losses);
        }
        let mut packed = std::mem::take(&mut self.packed);
        packed.fill(h, labels, projection.weight.inputs());
        let result = self.forward_rows(&packed.h, projection, &packed.labels, &mut packed.losses);
        packed.spread_losses(labels, losses);
        self.packed = packed;
        result
    }

    fn forward_rows(&mut self, h: &[f32], projection: Projection, labels: &[i32], losses: &mut [f64]) -> Result<()> {
        let LmHead { vocabulary, step, cap, .. } = *self;
        let Projection { weight, products } = projection;
        let width = weight.inputs();
        for ((h, labels), losses) in h.chunks(ROWS * width).zip(labels.chunks(ROWS)).zip(losses.chunks_mut(ROWS)) {
            let logits = &mut self.logits[..labels.len() * step];
            products.forward(logits, step, Write::Replace, Matrix::new(h, labels.len(), width), weight)?;
            (logits.par_chunks_mut(step), labels, losses).into_par_iter().for_each(|(row, &label, loss)| {
                let row = &mut row[..vocabulary];
                soft_cap(row, cap);
                *loss = if label == IGNORE { 0.0 } else { cross_entropy::forward(row, label as usize) };
            });
        }
        Ok(())
    }

    /// As [`LmHead::forward`]; also adds the gradient of `scale`·Σ losses to `dweight` and overwrites h by its gradient.
    pub fn backward(
        &mut self,
        h: &mut [f32],
        projection: Projection,
        targets: Targets,
        dweight: &mut [f32],
        losses: &mut [f64],
    ) -> Result<()> {
        let Targets { labels, scale } = targets;
        if !is_sparse(labels) {
            return self.backward_rows(h, projection, targets, dweight, losses);
        }
        let width = projection.weight.inputs();
        let mut packed = std::mem::take(&mut self.packed);
        packed.fill(h, labels, width);
        let targets = Targets { labels: &packed.labels, scale };
        let result = self.backward_rows(&mut packed.h, projection, targets, dweight, &mut packed.losses);
        packed.spread_losses(labels, losses);
        let mut gradients = packed.h.chunks(width);
        for (h, &label) in h.chunks_mut(width).zip(labels) {
            match if label == IGNORE { None } else { gradients.next() } {
                Some(gradient) => h.copy_from_slice(gradient),
                None => h.fill(0.0),
            }
        }
        self.packed = packed;
        result
    }

    fn backward_rows(
        &mut self,
        h: &mut [f32],
        projection: Projection,
        targets: Targets,
        dweight: &mut [f32],
        losses: &mut [f64],
    ) -> Result<()> {
        let Targets { labels, scale } = targets;
        let LmHead { vocabulary, step, cap, .. } = *self;
        let Projection { weight, products } = projection;
        let width = weight.inputs();
        for ((h, labels), losses) in h.chunks_mut(ROWS * width).zip(labels.chunks(ROWS)).zip(losses.chunks_mut(ROWS)) {
            if labels.iter().all(|&label| label == IGNORE) {
                h.fill(0.0);
                losses.fill(0.0);
                continue;
            }
            let rows = labels.len();
            let logits = &mut self.logits[..rows * step];
            products.forward(logits, step, Write::Replace, Matrix::new(h, rows, width), weight)?;
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
            products.weight_gradient(dweight, dlogits, Matrix::new(h, rows, width))?;
            products.input_gradient(h, Write::Replace, dlogits, weight)?;
        }
        Ok(())
    }
}

/// Replaces logits x by c·tanh(x/c) if there is a cap c.
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
        // tanh(x) = 2σ(2x) − 1. The cancellation near zero is below the rounding error of the largest logits.
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

    /// The loss of each row.
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
        let cases = rows.into_iter().flat_map(|m| [(m, None, false), (m, Some(0.75), false), (m, None, true), (m, Some(0.75), true)]);
        for (m, cap, sparse) in cases {
            let (h, w) = (numbers(m * c, 1), numbers(v * c, 2));
            let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<_>>();
            let ignored = |i: usize| i % 4 == 1 || (ROWS..ROWS + 3).contains(&i) || sparse && i % 7 != 3;
            let labels: Vec<i32> = (0..m).map(|i| if ignored(i) { IGNORE } else { (i * i) as i32 % v as i32 }).collect();
            assert_eq!(is_sparse(&labels), sparse);
            let expected = naive(&wide(&h), &wide(&w), &labels, c, cap);
            let mut head = LmHead::new(m, v, cap).expect("room");
            let mut losses = vec![f64::NAN; m];
            let mut products = Products::F32;
            let projection = Projection { weight: Weight::new(&w, 0, c), products: &mut products };
            head.forward(&h, projection, &labels, &mut losses).expect("a loss");
            let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
            assert_close(&narrow(&losses), &expected, 1e-6, "losses");
            let (mut dh, mut dw, scale) = (h.clone(), vec![0.0; v * c], 0.3);
            losses.fill(f64::NAN);
            let projection = Projection { weight: Weight::new(&w, 0, c), products: &mut products };
            head.backward(&mut dh, projection, Targets { labels: &labels, scale }, &mut dw, &mut losses).expect("a loss");
            assert_close(&narrow(&losses), &expected, 1e-6, "losses while training");
            let scales = vec![scale; m];
            assert_gradient(&dw, &w, &scales, |w| naive(&wide(&h), w, &labels, c, cap), "dw");
            if m < 10 {
                assert_gradient(&dh, &h, &scales, |h| naive(h, &wide(&w), &labels, c, cap), "dh");
            }
        }
    }
}
