//! φ(x) = softmax([2(Wx + b), −2(Wx + b)]): learned features, twice as many as coordinates

use crate::Real;
use termwise_kernels::real::dot;

/// The weights of one head: W [n, n] and b [n].
#[derive(Clone, Copy)]
pub struct Weights<'a, R> {
    /// The learned weights W.
    pub weight: &'a [R],
    /// The learned bias b.
    pub bias: &'a [R],
}

/// Gradients of [`Weights`], to which the backward pass adds.
pub struct WeightGrads<'a, R> {
    /// dW
    pub weight: &'a mut [R],
    /// db
    pub bias: &'a mut [R],
}

/// x [n] becomes φ(x) [2n].
pub fn forward<R: Real>(x: &[R], p: Weights<R>, phi: &mut [R]) {
    let n = x.len();
    for (i, (row, &bias)) in p.weight.chunks_exact(n).zip(p.bias).enumerate() {
        let y = R::of(2.0) * (dot(row, x) + bias);
        (phi[i], phi[n + i]) = (y, -y);
    }
    let largest = phi.iter().fold(R::neg_infinity(), |max, &y| max.max(y));
    phi.iter_mut().for_each(|y| *y = (*y - largest).exp());
    let inverse = R::one() / phi.iter().copied().sum();
    phi.iter_mut().for_each(|y| *y *= inverse);
}

/// Adds dx [n], dW and db, from dφ [2n] and φ, the result of `forward` for x.
pub fn backward<R: Real>(x: &[R], p: Weights<R>, phi: &[R], dphi: &[R], dx: &mut [R], grads: WeightGrads<R>) {
    let n = x.len();
    let along = dot(phi, dphi);
    for i in 0..n {
        let dy = R::of(2.0) * (phi[i] * (dphi[i] - along) - phi[n + i] * (dphi[n + i] - along));
        grads.bias[i] += dy;
        for j in 0..n {
            grads.weight[i * n + j] += dy * x[j];
            dx[j] += dy * p.weight[i * n + j];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_close, assert_gradient, numbers};

    #[test]
    fn probabilities_and_gradients() {
        for n in [1, 3, 6] {
            let (x, weight, bias, dphi) = (numbers(n, 1), numbers(n * n, 2), numbers(n, 3), numbers(2 * n, 4));
            let run = |x: &[f64], weight: &[f64], bias: &[f64]| {
                let mut phi = vec![f64::NAN; 2 * n];
                forward(x, Weights { weight, bias }, &mut phi);
                phi
            };
            let loss = |phi: Vec<f64>| phi.iter().zip(&dphi).map(|(a, b)| a * b).sum::<f64>();
            let phi = run(&x, &weight, &bias);
            assert_close(phi.iter().sum(), 1.0, 1e-14);
            let y = bias[0] + (0..n).map(|j| weight[j] * x[j]).sum::<f64>();
            assert_close((phi[0] / phi[n]).ln(), 4.0 * y, 1e-10);
            let (mut dx, mut dweight, mut dbias) = (vec![0.0; n], vec![0.0; n * n], vec![0.0; n]);
            let grads = WeightGrads { weight: &mut dweight, bias: &mut dbias };
            backward(&x, Weights { weight: &weight, bias: &bias }, &phi, &dphi, &mut dx, grads);
            assert_gradient(&x, &dx, |x| loss(run(x, &weight, &bias)));
            assert_gradient(&weight, &dweight, |weight| loss(run(&x, weight, &bias)));
            assert_gradient(&bias, &dbias, |bias| loss(run(&x, &weight, bias)));
        }
    }
}
