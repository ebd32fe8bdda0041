//! Helpers shared by the tests of all operations.

use termwise_attention::relative_rms;

/// Uniform numbers in [−1, 1), deterministic per seed.
pub fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Asserts a relative RMS error of at most `tolerance`.
pub fn assert_close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    let error = relative_rms(found, expected);
    assert!(error <= tolerance, "{what}: relative RMS {error:.2e}, allowed {tolerance:.0e}");
}

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

/// Runs in a separate thread pool.
pub fn with_threads<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads").install(run)
}
