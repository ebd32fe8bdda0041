//! Softmax attention as a sum of recurrent networks, one per Taylor order: the parallel form next to truncated recurrences.
//!
//! ```text
//! cargo run -p termwise-attention --example softmax_as_rnn
//! ```

use termwise_attention::combinatorics::monomials;
use termwise_attention::naive::softmax_as_rnn::{Matrix, SoftmaxRnn, softmax_attention};
use termwise_attention::relative_rms;

const TIME: usize = 8;
/// Dimension of queries and keys.
const D: usize = 4;
/// Dimension of values.
const E: usize = 2;
const DEGREES: [usize; 5] = [0, 1, 2, 4, 8];

fn main() {
    let (q, k, v) = (random_matrix(TIME, D, 1), random_matrix(TIME, D, 2), random_matrix(TIME, E, 3));
    let scores = (0..TIME).flat_map(|t| (0..=t).map(move |s| (t, s))).map(|(t, s)| dot(&q[t], &k[s]));
    let largest_score = scores.fold(0.0, |largest: f64, x| largest.max(x.abs()));

    println!("Softmax attention:   y_t = Σ_s exp(q_t·k_s) v_s / Σ_s exp(q_t·k_s)");
    println!("Taylor order n:      H_n ← H_n + k^{{⊗n}} vᵀ/n!,  z_n ← z_n + k^{{⊗n}}/n!   (one recurrent network)");
    println!("Orders 0 to p:       y_t = Σ_n q_t^{{⊗n}}·H_n / Σ_n q_t^{{⊗n}}·z_n");
    println!("{TIME} positions, d = {D}, e = {E}, largest |q·k| = {largest_score:.2}\n");

    let parallel = softmax_attention(&q, &k, &v);
    let recurrent = DEGREES.map(|degree| {
        let mut rnn = SoftmaxRnn::new(degree, D, E);
        (0..TIME).map(|t| rnn.step(&q[t], &k[t], &v[t])).collect::<Matrix>()
    });

    println!("First entry of y_t:");
    print!("{:>3}  {:>11}", "t", "softmax");
    DEGREES.iter().for_each(|degree| print!("  {:>11}", orders(*degree)));
    println!();
    for t in 0..TIME {
        print!("{t:>3}  {:>11.6}", parallel[t][0]);
        recurrent.iter().for_each(|y| print!("  {:>11.6}", y[t][0]));
        println!();
    }

    println!("\nRelative error of y and size of the state in floats, with full tensor powers and with distinct monomials:");
    println!("{:>11}  {:>9}  {:>13}  {:>18}", "recurrence", "error", "tensor powers", "distinct monomials");
    for (degree, y) in DEGREES.into_iter().zip(&recurrent) {
        let error = relative_rms(&y.concat(), &parallel.concat());
        let packed: u128 = (0..=degree).map(|n| monomials(D, n) * (E as u128 + 1)).sum();
        println!("{:>11}  {error:>9.1e}  {:>13}  {packed:>18}", orders(degree), SoftmaxRnn::new(degree, D, E).size());
    }
    println!(
        "\nThe error falls with every order. The state has the same size at every position; a KV cache grows by {} per position.",
        D + E
    );
    println!("`termwise_attention::State` stores distinct monomials: equal entries of a tensor power are stored once.");
}

fn orders(degree: usize) -> String {
    if degree == 0 { "order 0".into() } else { format!("orders 0..{degree}") }
}

/// Entries between −1 and 1 from a linear congruential generator.
fn random_matrix(rows: usize, columns: usize, seed: u64) -> Matrix {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..rows).map(|_| (0..columns).map(|_| next()).collect()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
