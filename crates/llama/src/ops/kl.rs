//! KL(p ‖ q) = Σ_v p_v·(ln p_v − ln q_v) for the predictions p of a teacher and q of a student, one row of logits [V] each. Backward: dx_v = s·(q_v − p_v) for the
//! student's logits x and the weight s of the row.

use termwise_attention::simd::{Simd, Task, dispatch};

use super::cross_entropy::{maximum, padded};

/// The divergence of one row, whose logits are replaced by their gradients times `scale`.
pub fn backward(logits: &mut [f32], teacher: &[f32], scale: f32) -> f64 {
    dispatch(Divergence { logits, teacher, scale })
}

struct Divergence<'a> {
    logits: &'a mut [f32],
    teacher: &'a [f32],
    scale: f32,
}

impl Task for Divergence<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f64 {
        let Divergence { logits: x, teacher: y, scale } = self;
        let lowest = f32::NEG_INFINITY;
        let (most, most_of_teacher) = (maximum(simd, x), maximum(simd, y));
        let (mut sum, mut sum_of_teacher) = (simd.splat(0.0), simd.splat(0.0));
        for i in (0..x.len()).step_by(S::LANES) {
            sum = simd.add(sum, simd.exp(simd.sub(padded(simd, x, i, lowest), simd.splat(most))));
            sum_of_teacher = simd.add(sum_of_teacher, simd.exp(simd.sub(padded(simd, y, i, lowest), simd.splat(most_of_teacher))));
        }
        let (sum, sum_of_teacher) = (simd.sum(sum), simd.sum(sum_of_teacher));
        // What the maxima and the sums leave of ln p − ln q, besides the difference of the logits; in float64, since both are near 10 and their difference may be small.
        let offset = f64::from(most) - f64::from(most_of_teacher) + f64::from(sum).ln() - f64::from(sum_of_teacher).ln();
        let (factor, factor_of_teacher) = (simd.splat(scale / sum), simd.splat(scale / sum_of_teacher));
        let inverse = simd.splat(1.0 / sum_of_teacher);
        let mut along = 0.0f64;
        // Float32 within pieces, float64 over them.
        for start in (0..x.len()).step_by(1024) {
            let mut part = simd.splat(0.0);
            for i in (start..(start + 1024).min(x.len())).step_by(S::LANES) {
                let (own, other) = (padded(simd, x, i, 0.0), padded(simd, y, i, 0.0));
                let e = simd.exp(simd.sub(padded(simd, x, i, lowest), simd.splat(most)));
                let p = simd.exp(simd.sub(padded(simd, y, i, lowest), simd.splat(most_of_teacher)));
                part = simd.fma(simd.mul(p, inverse), simd.sub(other, own), part);
                simd.store_at(x, i, simd.sub(simd.mul(e, factor), simd.mul(p, factor_of_teacher)));
            }
            along += f64::from(simd.sum(part));
        }
        along + offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_gradient, numbers};

    fn naive(x: &[f64], y: &[f64]) -> f64 {
        let logs = |x: &[f64]| {
            let log = x.iter().map(|x| x.exp()).sum::<f64>().ln();
            x.iter().map(|x| x - log).collect::<Vec<f64>>()
        };
        logs(y).iter().zip(&logs(x)).map(|(p, q)| p.exp() * (p - q)).sum()
    }

    #[test]
    fn divergence_and_gradient_match_float64() {
        for (v, spread) in [(1, 3.0), (7, 3.0), (16, 1.0), (37, 10.0), (1100, 4.0), (5000, 0.1)] {
            let logits: Vec<f32> = numbers(v, 1).iter().map(|x| spread * x + 20.0).collect();
            let teacher: Vec<f32> = numbers(v, 2).iter().map(|x| 5.0 * x - 7.0).collect();
            let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let (expected, of_teacher) = (naive(&wide(&logits), &wide(&teacher)), wide(&teacher));
            let mut gradient = logits.clone();
            let found = backward(&mut gradient, &teacher, 0.25);
            assert!((found - expected).abs() <= 2e-6 * expected.max(1.0), "{v}: {found} {expected}");
            if (2..1000).contains(&v) {
                assert_gradient(&gradient, &logits, &[0.25], |x| vec![naive(x, &of_teacher)], "dx");
            }
        }
    }

    /// A student that is its teacher has nothing to learn, to the last bit.
    #[test]
    fn a_teacher_of_its_own_is_at_rest() {
        let logits = numbers(1000, 3);
        let mut gradient = logits.clone();
        assert!(backward(&mut gradient, &logits, 1.0).abs() < 1e-7);
        assert!(gradient.iter().all(|&g| g == 0.0));
        for bad in [f32::NAN, f32::INFINITY] {
            let mut wrong = logits.clone();
            wrong[500] = bad;
            assert!(!backward(&mut wrong, &logits, 1.0).is_finite(), "{bad}");
        }
    }
}
