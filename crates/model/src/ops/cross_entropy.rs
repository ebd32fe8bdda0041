//! Cross-entropy of one row of logits x [V]: ℓ = log Σ_v e^{x_v} − x_label. Backward: dx_v = s·(e^{x_v}/Σ − [v = label]) for the weight s of the row.

use termwise_attention::simd::{Simd, Task, dispatch};

/// The label of positions without a loss, as in PyTorch.
pub const IGNORE: i32 = -100;

/// The loss of one row.
pub fn forward(logits: &[f32], label: usize) -> f64 {
    let at_label = logits[label];
    let (max, sum) = dispatch(LogSumExp(logits));
    sum.ln() + (max - at_label as f64)
}

/// The loss of one row. The logits are replaced by their gradients times `scale`.
pub fn backward(logits: &mut [f32], label: usize, scale: f32) -> f64 {
    let at_label = logits[label];
    let (max, sum) = dispatch(SoftmaxGradient { logits, scale });
    logits[label] -= scale;
    sum.ln() + (max - at_label as f64)
}

/// The vector at i, with `fill` in lanes past the end.
#[inline(always)]
fn padded<S: Simd>(simd: S, x: &[f32], i: usize, fill: f32) -> S::V {
    let v = simd.load_at(x, i);
    if i + S::LANES <= x.len() { v } else { simd.select(simd.first(x.len() - i), v, simd.splat(fill)) }
}

#[inline(always)]
fn maximum<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let mut max = simd.splat(f32::NEG_INFINITY);
    for i in (0..x.len()).step_by(S::LANES) {
        max = simd.max(padded(simd, x, i, f32::NEG_INFINITY), max);
    }
    simd.maximum(max)
}

struct LogSumExp<'a>(&'a [f32]);

impl Task for LogSumExp<'_> {
    type Output = (f64, f64);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> (f64, f64) {
        let x = self.0;
        let max = maximum(simd, x);
        let mut sum = simd.splat(0.0);
        for i in (0..x.len()).step_by(S::LANES) {
            sum = simd.add(sum, simd.exp(simd.sub(padded(simd, x, i, f32::NEG_INFINITY), simd.splat(max))));
        }
        (max as f64, simd.sum(sum) as f64)
    }
}

struct SoftmaxGradient<'a> {
    logits: &'a mut [f32],
    scale: f32,
}

impl Task for SoftmaxGradient<'_> {
    type Output = (f64, f64);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> (f64, f64) {
        let x = self.logits;
        let max = maximum(simd, x);
        let mut sum = simd.splat(0.0);
        for i in (0..x.len()).step_by(S::LANES) {
            let e = simd.exp(simd.sub(padded(simd, x, i, f32::NEG_INFINITY), simd.splat(max)));
            sum = simd.add(sum, e);
            simd.store_at(x, i, e);
        }
        let sum = simd.sum(sum);
        let factor = simd.splat(self.scale / sum);
        for i in (0..x.len()).step_by(S::LANES) {
            simd.store_at(x, i, simd.mul(simd.load_at(x, i), factor));
        }
        (max as f64, sum as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_gradient, numbers};

    fn naive(x: &[f64], label: usize) -> Vec<f64> {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        vec![x.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max - x[label]]
    }

    #[test]
    fn loss_and_gradient_match_float64() {
        for (v, label) in [(1, 0), (7, 6), (16, 3), (37, 36), (100, 0)] {
            let logits: Vec<f32> = numbers(v, 1).iter().map(|x| 10.0 * x - 300.0).collect();
            let expected = naive(&logits.iter().map(|&x| x as f64).collect::<Vec<_>>(), label)[0];
            let mut gradient = logits.clone();
            for found in [forward(&logits, label), backward(&mut gradient, label, 0.25)] {
                assert!((found - expected).abs() <= 1e-6 * expected.max(1.0), "{found} {expected}");
            }
            assert_gradient(&gradient, &logits, &[0.25], |x| naive(x, label), "dx");
        }
    }

    #[test]
    fn nan_and_infinity_propagate_to_the_loss() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 20, 36] {
                let mut logits = numbers(37, 1);
                logits[at] = bad;
                assert!(!forward(&logits, 1).is_finite() && !backward(&mut logits, 1, 1.0).is_finite(), "{bad} at {at}");
            }
        }
    }
}
