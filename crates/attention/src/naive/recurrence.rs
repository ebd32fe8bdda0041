//! A recurrence for polynomial kernels with a scalar decay and the delta rule.
//!
//! It extends [`softmax_as_rnn`](super::softmax_as_rnn) from the Taylor series of exp to any polynomial kernel, for one head in float64:
//!
//! ```text
//! w(x) = Σ_n a_n·x^n / n!,      x = scale·q·k
//!
//! decay     H_n ← m_t·H_n                                                   z_n ← m_t·z_n
//! write     u_t = v_t,   or   β_t·( v_t − Σ_n a_n·scale_k^n · k_t^{⊗n}·H_n )     the delta rule
//! update    H_n ← H_n + k_t^{⊗n} u_tᵀ / n!                                  z_n ← z_n + k_t^{⊗n} / n!
//! read      U_t = Σ_n a_n·scale^n · q_t^{⊗n}·H_n                            z_t = Σ_n a_n·scale^n · q_t^{⊗n}·z_n
//! ```
//!
//! The delta rule first reads the value that is stored under k_t and then writes the difference to v_t, scaled by β_t. Coefficients and scales
//! act when the state is read, so the state does not depend on them.
//!
//! Tests compare [`State`](crate::State) with this recurrence. Full tensor powers need d^n rows per order: use it for small d and n.

use crate::naive::add_scaled;
use crate::naive::softmax_as_rnn::OrderRnn;

/// A polynomial kernel w(x) = Σ_n a_n·x^n / n! and its scales.
#[derive(Clone, Debug)]
pub struct PolynomialKernel {
    /// Pairs (n, a_n).
    pub terms: Vec<(usize, f64)>,
    /// x = scale·q·k between a query and a key.
    pub scale: f64,
    /// x = key_scale·k·k' between two keys, for the delta rule.
    pub key_scale: f64,
}

/// The inputs of one position.
#[derive(Clone, Copy, Debug)]
pub struct RecurrenceInput<'a> {
    /// [d]
    pub q: &'a [f64],
    /// [d]
    pub k: &'a [f64],
    /// [e]
    pub v: &'a [f64],
    /// m_t; 1 without a decay.
    pub decay: f64,
    /// β_t of the delta rule. `None` writes v as it is.
    pub beta: Option<f64>,
}

/// One recurrent network per order of the kernel.
pub struct Recurrence {
    kernel: PolynomialKernel,
    e: usize,
    orders: Vec<OrderRnn>,
}

impl Recurrence {
    /// The state before the first token: zero.
    pub fn new(kernel: PolynomialKernel, d: usize, e: usize) -> Recurrence {
        let orders = kernel.terms.iter().map(|&(n, _)| OrderRnn::new(n, d, e)).collect();
        Recurrence { kernel, e, orders }
    }

    /// Reads one token and returns U_t [e] and z_t.
    pub fn step(&mut self, token: RecurrenceInput) -> (Vec<f64>, f64) {
        self.orders.iter_mut().for_each(|order| order.decay(token.decay));
        let mut u = token.v.to_vec();
        if let Some(beta) = token.beta {
            let (stored, _) = self.read(token.k, self.kernel.key_scale);
            add_scaled(&mut u, -1.0, &stored);
            u.iter_mut().for_each(|u| *u *= beta);
        }
        self.orders.iter_mut().for_each(|order| order.update(token.k, &u));
        self.read(token.q, self.kernel.scale)
    }

    /// Σ_n a_n·scale^n · x^{⊗n}·H_n   and   Σ_n a_n·scale^n · x^{⊗n}·z_n
    fn read(&self, x: &[f64], scale: f64) -> (Vec<f64>, f64) {
        let mut numerator = vec![0.0; self.e];
        let mut denominator = 0.0;
        for (order, &(n, a)) in self.orders.iter().zip(&self.kernel.terms) {
            let factor = a * scale.powi(n as i32);
            let (u, z) = order.read(x);
            add_scaled(&mut numerator, factor, &u);
            denominator += factor * z;
        }
        (numerator, denominator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relative_rms;

    const D: usize = 3;
    const E: usize = 2;
    const TIME: usize = 7;

    fn rows(columns: usize, seed: f64) -> Vec<Vec<f64>> {
        (0..TIME).map(|t| (0..columns).map(|i| ((t * columns + i) as f64 * 0.9 + seed).sin()).collect()).collect()
    }

    /// U_t and z_t as sums over all earlier keys, concatenated.
    fn by_pairs(kernel: &PolynomialKernel, [q, k, v]: [&[Vec<f64>]; 3], m: &[f64], beta: Option<&[f64]>) -> Vec<f64> {
        let weight = |a: &[f64], b: &[f64], scale: f64, t: usize, s: usize| -> f64 {
            let x = scale * a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let w: f64 = kernel.terms.iter().map(|&(n, a)| a * (1..=n).map(|i| x / i as f64).product::<f64>()).sum();
            w * m[s + 1..=t].iter().product::<f64>()
        };
        let mut u: Vec<Vec<f64>> = Vec::new();
        let mut sums = Vec::new();
        for t in 0..TIME {
            let mut own = v[t].clone();
            if let Some(beta) = beta {
                for (s, u) in u.iter().enumerate() {
                    add_scaled(&mut own, -weight(&k[t], &k[s], kernel.key_scale, t, s), u);
                }
                own.iter_mut().for_each(|u| *u *= beta[t]);
            }
            u.push(own);
            let weights: Vec<f64> = (0..=t).map(|s| weight(&q[t], &k[s], kernel.scale, t, s)).collect();
            sums.extend((0..E).map(|i| (0..=t).map(|s| weights[s] * u[s][i]).sum::<f64>()));
            sums.push(weights.iter().sum());
        }
        sums
    }

    #[test]
    fn recurrence_equals_the_sum_over_pairs() {
        let (q, k, v) = (rows(D, 0.3), rows(D, 1.1), rows(E, 2.7));
        let (ones, decays) = ([1.0; TIME], [0.2, 0.9, 0.7, 1.0, 0.5, 0.8, 0.95]);
        let betas = [0.4, 1.0, 0.0, 1.7, 0.6, 0.3, 1.2];
        let kernels = [vec![(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)], vec![(2, 2.0)], vec![(0, 0.7), (1, -0.4), (4, 1.3)]];
        for terms in kernels {
            for (m, beta) in [(&ones, None), (&decays, None), (&ones, Some(&betas)), (&decays, Some(&betas))] {
                let kernel = PolynomialKernel { terms: terms.clone(), scale: 0.6, key_scale: 0.3 };
                let expected = by_pairs(&kernel, [&q, &k, &v], m, beta.map(|beta| &beta[..]));
                let mut recurrence = Recurrence::new(kernel, D, E);
                let mut found = Vec::new();
                for t in 0..TIME {
                    let token = RecurrenceInput { q: &q[t], k: &k[t], v: &v[t], decay: m[t], beta: beta.map(|beta| beta[t]) };
                    let (u, z) = recurrence.step(token);
                    found.extend(u);
                    found.push(z);
                }
                let error = relative_rms(&found, &expected);
                assert!(error < 1e-13, "terms {terms:?}, decays {m:?}, beta {beta:?}: {error:e}");
            }
        }
    }

    #[test]
    fn delta_rule_replaces_the_value_of_a_repeated_key() {
        let kernel = PolynomialKernel { terms: vec![(1, 1.0)], scale: 1.0, key_scale: 1.0 };
        let mut recurrence = Recurrence::new(kernel, 2, 1);
        let (k, other) = ([1.0, 0.0], [0.0, 1.0]);
        let mut step = |k: &[f64], v: f64| recurrence.step(RecurrenceInput { q: &[1.0, 0.0], k, v: &[v], decay: 1.0, beta: Some(1.0) }).0;
        assert_eq!(step(&k, 3.0), [3.0]);
        assert_eq!(step(&other, 5.0), [3.0]);
        assert_eq!(step(&k, 7.0), [7.0]);
    }
}
