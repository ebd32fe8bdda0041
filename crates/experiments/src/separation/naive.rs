//! F by definition: matrices of n × d and n × n, row by row. Time and memory are O(n²); [`Pair`](super::Pair) is tested
//! against it.

use super::output::SLACK;
use super::{Draw, Network, Setting};

/// The data: n rows of d numbers, with the spike a at row j3.
pub fn data(setting: &Setting, a: f64, j3: usize) -> Vec<Vec<f64>> {
    let Setting { n, d, b, c, .. } = *setting;
    let length = setting.length();
    let row = |j: usize| {
        let mut row = vec![0.0; d];
        row[0] = if j == j3 { a * length } else { 0.0 };
        row[1 + j % (d - 2)] = b * length;
        row[d - 1] = c * length;
        row
    };
    (0..n as usize).map(row).collect()
}

/// F of a network on the data with this a.
pub fn output(network: Network, setting: &Setting, a: f64, draw: &Draw) -> f64 {
    let Setting { n, d, m, c, cross, .. } = *setting;
    let n = n as usize;
    let values = data(setting, a, draw.j3 as usize);
    let keys: Vec<f64> = values.iter().map(|row| row.iter().sum()).collect();
    let queries = if cross { vec![setting.length(); n] } else { keys.clone() };
    let threshold = (c + SLACK) * (n as f64).ln().sqrt();
    let mut sum = 0.0;
    for query in queries {
        let u: Vec<f64> = keys.iter().map(|key| unnormalised(network, query * key)).collect();
        let total: f64 = u.iter().sum();
        let f: Vec<f64> = u.iter().map(|u| u / total).collect();
        let column = |k: usize| f.iter().zip(&values).map(|(f, row)| f * row[k]).sum();
        let c_j: Vec<f64> = (0..d).map(column).collect();
        for i in 0..m {
            let y = |k: usize| if draw.negative(i, k) { -1.0 } else { 1.0 };
            let product: f64 = c_j.iter().enumerate().map(|(k, c)| c * y(k)).sum();
            sum += (product - threshold).max(0.0);
        }
    }
    sum.max(0.0)
}

fn unnormalised(network: Network, score: f64) -> f64 {
    match network {
        Network::Softmax => score.exp(),
        Network::Linear => score,
        Network::Power(p) => score.powf(p as f64),
        Network::Taylor(p) => {
            let terms = (1..=p).scan(1.0, |term, k| {
                *term *= score / k as f64;
                Some(*term)
            });
            1.0 + terms.sum::<f64>()
        }
    }
}
