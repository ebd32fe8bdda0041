//! Helpers shared by the tests of all operations.

pub use termwise_kernels::testing::{assert_rows_close as assert_close, uniform as numbers, with_threads};

/// Compares `gradient` with central differences of Σ f(x)·dy in float64.
pub fn assert_gradient(gradient: &[f32], x: &[f32], dy: &[f32], f: impl Fn(&[f64]) -> Vec<f64>, what: &str) {
    let objective = |x: &[f64]| f(x).iter().zip(dy).map(|(y, &dy)| y * dy as f64).sum::<f64>();
    let mut x: Vec<f64> = x.iter().map(|&x| x as f64).collect();
    let step = 1e-5;
    let differences: Vec<f64> = (0..x.len())
        .map(|i| {
            let at = x[i];
            x[i] = at + step;
            let above = objective(&x);
            x[i] = at - step;
            let below = objective(&x);
            x[i] = at;
            (above - below) / (2.0 * step)
        })
        .collect();
    assert_close(gradient, &differences, 1e-5, what);
}
