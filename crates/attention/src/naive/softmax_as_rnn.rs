//! Softmax attention as a sum of recurrent neural networks, one per Taylor order.
//!
//! This file states the result of Mongaras and Larson, *On the Expressiveness of Softmax Attention: A Recurrent Neural Network Perspective*
//! (arXiv 2507.23632), for one causal head in float64. It favours clarity over speed and generality. The fused engine and
//! [`State`](crate::State) compute the same sums with distinct monomials in place of full tensor powers.
//!
//! Notation: q_t and k_t are vectors of d numbers, v_t and y_t of e numbers. The factor 1/√d is part of q.
//!
//! **Parallel form.** Every query is compared with every earlier key ([`softmax_attention`]):
//!
//! ```text
//! y_t = Σ_{s≤t} exp(q_t·k_s) v_s  /  Σ_{s≤t} exp(q_t·k_s)
//! ```
//!
//! **Taylor expansion.** The exponential is a sum over orders n ([`taylor_attention`]):
//!
//! ```text
//! exp(q·k) = Σ_{n≥0} (q·k)^n / n!
//! ```
//!
//! **Tensor powers.** A power of a dot product is a dot product of tensor powers ([`tensor_power`]):
//!
//! ```text
//! (q·k)^n = q^{⊗n} · k^{⊗n},        q^{⊗n} = q ⊗ q ⊗ … ⊗ q   has d^n entries
//! ```
//!
//! **One RNN per order.** The query therefore moves out of the sum over keys, and the rest of the sum is a recurrent state ([`OrderRnn`]):
//!
//! ```text
//! Σ_{s≤t} (q_t·k_s)^n / n! · v_s  =  q_t^{⊗n} · H_n,t
//!
//! H_n,t = H_n,t−1 + k_t^{⊗n} v_tᵀ / n!        matrix d^n × e, the numerator
//! z_n,t = z_n,t−1 + k_t^{⊗n} / n!             vector d^n, the denominator
//! ```
//!
//! **Sum over orders.** Softmax attention is the sum of these networks over all n ([`SoftmaxRnn`]):
//!
//! ```text
//! y_t = Σ_n q_t^{⊗n} · H_n,t  /  Σ_n q_t^{⊗n} · z_n,t
//! ```
//!
//! Order 0 is the running mean of v. Order 1 alone is linear attention with the identity feature map. A sum truncated at order p has a state
//! of constant size, and its error is that of the Taylor polynomial of degree p.

use crate::naive::add_scaled;
use termwise_kernels::combinatorics::factorial;
use termwise_kernels::real::dot;

/// One row per position.
pub type Matrix = Vec<Vec<f64>>;

/// Causal softmax attention, computed from all pairs of a query and a key.
pub fn softmax_attention(q: &Matrix, k: &Matrix, v: &Matrix) -> Matrix {
    attention(q, k, v, f64::exp)
}

/// The same with exp replaced by its Taylor polynomial of this degree.
pub fn taylor_attention(q: &Matrix, k: &Matrix, v: &Matrix, degree: usize) -> Matrix {
    attention(q, k, v, |x| (0..=degree).map(|n| x.powi(n as i32) / factorial(n)).sum())
}

/// y_t = Σ_{s≤t} w(q_t·k_s) v_s / Σ_{s≤t} w(q_t·k_s)
fn attention(q: &Matrix, k: &Matrix, v: &Matrix, w: impl Fn(f64) -> f64) -> Matrix {
    let mut y = Vec::new();
    for t in 0..q.len() {
        let mut numerator = vec![0.0; v[t].len()];
        let mut denominator = 0.0;
        for s in 0..=t {
            let weight = w(dot(&q[t], &k[s]));
            add_scaled(&mut numerator, weight, &v[s]);
            denominator += weight;
        }
        y.push(numerator.iter().map(|u| u / denominator).collect());
    }
    y
}

/// x^{⊗n}: all products of n entries of x, in lexicographic order of their indices. The empty product is 1.
pub fn tensor_power(x: &[f64], n: usize) -> Vec<f64> {
    let mut power = vec![1.0];
    for _ in 0..n {
        power = power.iter().flat_map(|&p| x.iter().map(move |&x| p * x)).collect();
    }
    power
}

/// The recurrent network of Taylor order n.
pub struct OrderRnn {
    n: usize,
    /// H_n: d^n rows of e numbers.
    h: Matrix,
    /// z_n: d^n numbers.
    z: Vec<f64>,
}

impl OrderRnn {
    /// The state before the first token: zero.
    pub fn new(n: usize, d: usize, e: usize) -> OrderRnn {
        let rows = d.pow(n as u32);
        OrderRnn { n, h: vec![vec![0.0; e]; rows], z: vec![0.0; rows] }
    }

    /// H_n ← H_n + k^{⊗n} vᵀ / n!   and   z_n ← z_n + k^{⊗n} / n!
    pub fn update(&mut self, k: &[f64], v: &[f64]) {
        for (i, entry) in tensor_power(k, self.n).into_iter().enumerate() {
            let entry = entry / factorial(self.n);
            add_scaled(&mut self.h[i], entry, v);
            self.z[i] += entry;
        }
    }

    /// q^{⊗n} · H_n   and   q^{⊗n} · z_n
    pub fn read(&self, q: &[f64]) -> (Vec<f64>, f64) {
        let mut numerator = vec![0.0; self.h[0].len()];
        let mut denominator = 0.0;
        for (i, entry) in tensor_power(q, self.n).into_iter().enumerate() {
            add_scaled(&mut numerator, entry, &self.h[i]);
            denominator += entry * self.z[i];
        }
        (numerator, denominator)
    }

    /// Multiplies the state by m. Softmax attention has no decay; [`recurrence`](super::recurrence) does.
    pub fn decay(&mut self, m: f64) {
        self.h.iter_mut().flatten().for_each(|h| *h *= m);
        self.z.iter_mut().for_each(|z| *z *= m);
    }

    /// Numbers in H_n and z_n.
    pub fn size(&self) -> usize {
        self.z.len() * (self.h[0].len() + 1)
    }
}

/// Softmax attention truncated after order p: the sum of p + 1 recurrent networks.
pub struct SoftmaxRnn {
    e: usize,
    orders: Vec<OrderRnn>,
}

impl SoftmaxRnn {
    /// Orders 0 to `degree`, before the first token.
    pub fn new(degree: usize, d: usize, e: usize) -> SoftmaxRnn {
        SoftmaxRnn { e, orders: (0..=degree).map(|n| OrderRnn::new(n, d, e)).collect() }
    }

    /// Reads one token and returns y_t. Each state is updated first: a position attends to itself.
    pub fn step(&mut self, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
        let mut numerator = vec![0.0; self.e];
        let mut denominator = 0.0;
        for order in &mut self.orders {
            order.update(k, v);
            let (u, z) = order.read(q);
            add_scaled(&mut numerator, 1.0, &u);
            denominator += z;
        }
        numerator.iter().map(|u| u / denominator).collect()
    }

    /// Numbers in the states of all orders.
    pub fn size(&self) -> usize {
        self.orders.iter().map(OrderRnn::size).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relative_rms;
    use std::f64::consts::E;

    /// q, k of d columns and v of e columns, entries between −1 and 1.
    fn sequence(time: usize, d: usize, e: usize) -> [Matrix; 3] {
        let matrix = |columns: usize, seed: usize| -> Matrix {
            let entry = |t: usize, i: usize| ((t * columns + i + 1) as f64 * 0.7 + seed as f64).sin();
            (0..time).map(|t| (0..columns).map(|i| entry(t, i)).collect()).collect()
        };
        [matrix(d, 1), matrix(d, 20), matrix(e, 300)]
    }

    fn recurrent(degree: usize, q: &Matrix, k: &Matrix, v: &Matrix) -> Matrix {
        let mut rnn = SoftmaxRnn::new(degree, q[0].len(), v[0].len());
        (0..q.len()).map(|t| rnn.step(&q[t], &k[t], &v[t])).collect()
    }

    fn error(found: &Matrix, expected: &Matrix) -> f64 {
        relative_rms(&found.concat(), &expected.concat())
    }

    #[test]
    fn softmax_of_two_keys_matches_values_computed_by_hand() {
        let (q, k, v) = (vec![vec![7.0], vec![1.0]], vec![vec![1.0], vec![0.0]], vec![vec![2.0], vec![5.0]]);
        // The scores of the second query are 1 and 0.
        let expected = vec![vec![2.0], vec![(2.0 * E + 5.0) / (E + 1.0)]];
        assert!(error(&softmax_attention(&q, &k, &v), &expected) < 1e-15);
        // The Taylor polynomial of degree 2 gives 1 + 1 + 1/2 and 1.
        let expected = vec![vec![2.0], vec![(2.0 * 2.5 + 5.0) / 3.5]];
        assert!(error(&taylor_attention(&q, &k, &v, 2), &expected) < 1e-15);
        assert!(error(&recurrent(2, &q, &k, &v), &expected) < 1e-15);
    }

    #[test]
    fn powers_of_dot_products_are_dot_products_of_tensor_powers() {
        assert_eq!(tensor_power(&[2.0, 3.0], 0), [1.0]);
        assert_eq!(tensor_power(&[2.0, 3.0], 2), [4.0, 6.0, 6.0, 9.0]);
        let (q, k) = ([0.3, -1.2, 0.8], [0.5, 0.4, -0.9]);
        for n in 0..=6 {
            let found = dot(&tensor_power(&q, n), &tensor_power(&k, n));
            assert!((found - dot(&q, &k).powi(n as i32)).abs() < 1e-13, "order {n}");
        }
    }

    #[test]
    fn each_order_is_its_term_of_the_series() {
        let [q, k, v] = sequence(6, 3, 2);
        for n in 0..=4 {
            let mut order = OrderRnn::new(n, 3, 2);
            for t in 0..6 {
                order.update(&k[t], &v[t]);
                let (numerator, denominator) = order.read(&q[t]);
                let terms: Vec<f64> = (0..=t).map(|s| dot(&q[t], &k[s]).powi(n as i32) / factorial(n)).collect();
                assert!((denominator - terms.iter().sum::<f64>()).abs() < 1e-13, "order {n}, position {t}");
                for i in 0..2 {
                    let expected: f64 = (0..=t).map(|s| terms[s] * v[s][i]).sum();
                    assert!((numerator[i] - expected).abs() < 1e-13, "order {n}, position {t}");
                }
            }
        }
    }

    #[test]
    fn recurrent_form_equals_truncated_parallel_form() {
        let [q, k, v] = sequence(8, 3, 2);
        for degree in [0, 1, 2, 4, 6] {
            let found = recurrent(degree, &q, &k, &v);
            assert!(error(&found, &taylor_attention(&q, &k, &v, degree)) < 1e-12, "degree {degree}");
        }
    }

    #[test]
    fn sum_of_recurrent_networks_converges_to_softmax_attention() {
        // |q·k| ≤ 2: the first omitted term bounds each error up to a small factor.
        let [q, k, v] = sequence(8, 2, 3);
        let softmax = softmax_attention(&q, &k, &v);
        for degree in [2, 4, 8, 12, 16] {
            let bound = 10.0 * 2f64.powi(degree as i32 + 1) / factorial(degree + 1);
            let found = error(&recurrent(degree, &q, &k, &v), &softmax);
            assert!(found < bound, "degree {degree}: {found:e}, bound {bound:e}");
        }
        assert!(error(&recurrent(16, &q, &k, &v), &softmax) < 1e-9);
        assert!(error(&recurrent(1, &q, &k, &v), &softmax) > 1e-2, "order 1 is not enough");
    }

    #[test]
    fn order_zero_is_the_running_mean_of_the_values() {
        let [q, k, v] = sequence(5, 2, 1);
        for (t, y) in recurrent(0, &q, &k, &v).into_iter().enumerate() {
            let mean = v[..=t].iter().map(|v| v[0]).sum::<f64>() / (t + 1) as f64;
            assert!((y[0] - mean).abs() < 1e-15);
        }
    }

    #[test]
    fn state_size_does_not_depend_on_the_sequence() {
        assert_eq!(SoftmaxRnn::new(2, 3, 4).size(), (1 + 3 + 9) * 5);
    }
}
