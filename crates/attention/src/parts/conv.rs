//! Short convolution: y_t = silu( Σ_j W_j · x_{t−w+1+j} ), causal, one filter per channel

use crate::Real;
use crate::parts::gate::sigmoid::sigmoid;

/// The maximum filter width.
pub const MAX_WIDTH: usize = 64;

/// One channel over time: x [T] becomes y [T]; `taps` [w], the last for the current position.
#[inline(always)]
pub fn forward<R: Real>(x: &[R], taps: &[R], y: &mut [R]) {
    for (t, y) in y.iter_mut().enumerate() {
        let sum = filtered(x, taps, t);
        *y = sum * sigmoid(sum);
    }
}

/// Adds the gradients of one channel to dx [T] and dtaps [w].
#[inline(always)]
pub fn backward<R: Real>(x: &[R], taps: &[R], dy: &[R], dx: &mut [R], dtaps: &mut [R]) {
    let w = taps.len();
    for (t, &dy) in dy.iter().enumerate() {
        let sum = filtered(x, taps, t);
        let s = sigmoid(sum);
        let d = dy * s * (R::one() + sum * (R::one() - s));
        for j in (w - 1).saturating_sub(t)..w {
            let source = t + j + 1 - w;
            dx[source] += d * taps[j];
            dtaps[j] += d * x[source];
        }
    }
}

#[inline(always)]
fn filtered<R: Real>(x: &[R], taps: &[R], t: usize) -> R {
    let w = taps.len();
    let mut sum = R::zero();
    for j in (w - 1).saturating_sub(t)..w {
        sum += taps[j] * x[t + j + 1 - w];
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, assert_gradient, numbers};

    #[test]
    fn the_last_tap_is_the_current_position() {
        let mut y = [f64::NAN; 3];
        forward(&[1.0, 2.0, 3.0], &[10.0, 1.0], &mut y);
        let silu = |x: f64| x / (1.0 + (-x).exp());
        assert_all_close(&y, &[silu(1.0), silu(12.0), silu(23.0)], 1e-15);
    }

    #[test]
    fn gradients() {
        for (time, width) in [(1, 1), (1, 4), (3, 5), (9, 3)] {
            let (x, taps, dy) = (numbers(time, 1), numbers(width, 2), numbers(time, 3));
            let loss = |x: &[f64], taps: &[f64]| {
                let mut y = vec![f64::NAN; time];
                forward(x, taps, &mut y);
                y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
            };
            let (mut dx, mut dtaps) = (vec![0.0; time], vec![0.0; width]);
            backward(&x, &taps, &dy, &mut dx, &mut dtaps);
            assert_gradient(&x, &dx, |x| loss(x, &taps));
            assert_gradient(&taps, &dtaps, |taps| loss(&x, taps));
        }
    }
}
