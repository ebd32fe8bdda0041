//! Gradient norm and clipping.

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};
use termwise_model::Params;
use termwise_model::ops::chunks::CHUNK_LEN;

/// ‖g‖ over all parameters: float32 within chunks of fixed size, float64 over the chunks in order. NaN and infinity propagate.
pub fn gradient_norm(grads: &Params) -> f64 {
    // Padding between parameters is zero.
    let sums: Vec<f64> = grads.values().par_chunks(CHUNK_LEN).map(|piece| dispatch(Squares(piece)) as f64).collect();
    sums.iter().sum::<f64>().sqrt()
}

/// The factor that clips a gradient of this norm to `limit`: PyTorch's limit/(norm + 1e-6), at most 1.
pub fn clip(norm: f64, limit: f64) -> f64 {
    let factor = limit / (norm + 1e-6);
    // Not `min`, which would turn NaN into 1.
    if factor > 1.0 { 1.0 } else { factor }
}

struct Squares<'a>(&'a [f32]);

impl Task for Squares<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        // Several accumulators, to hide the latency of additions.
        let mut sums = [simd.splat(0.0); 4];
        for start in (0..self.0.len()).step_by(4 * S::LANES) {
            for (j, sum) in sums.iter_mut().enumerate() {
                let i = start + j * S::LANES;
                if i < self.0.len() {
                    let x = simd.load_at(self.0, i);
                    *sum = simd.fma(x, x, *sum);
                }
            }
        }
        simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{filled, model, with_threads};

    #[test]
    fn the_norm_covers_all_parameters_and_does_not_depend_on_threads() {
        let grads = filled(&model().params, 3);
        let expected = grads.values().iter().map(|&g| (g as f64).powi(2)).sum::<f64>().sqrt();
        let norm = with_threads(1, || gradient_norm(&grads));
        assert!((norm - expected).abs() < 1e-6 * expected, "{norm} {expected}");
        for threads in [2, 3, 5] {
            assert_eq!(with_threads(threads, || gradient_norm(&grads)).to_bits(), norm.to_bits());
        }
    }

    #[test]
    fn clipping_only_shrinks_and_keeps_nan() {
        assert_eq!(clip(0.5, 1.0), 1.0);
        assert!((clip(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert!(clip(f64::NAN, 1.0).is_nan(), "NaN must not be clipped to a small value");
    }
}
