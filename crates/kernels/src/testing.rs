//! Helpers for the tests of this crate and of the crates that use it.

/// df/dx by central differences of fourth order.
pub fn derivative(f: impl Fn(f64) -> f64, x: f64) -> f64 {
    let h = 1e-3;
    (8.0 * (f(x + h) - f(x - h)) - (f(x + 2.0 * h) - f(x - 2.0 * h))) / (12.0 * h)
}

/// |found − expected| ≤ tolerance · max(1, |expected|).
#[track_caller]
pub fn assert_close(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance * expected.abs().max(1.0), "found {found:e}, expected {expected:e}");
}

/// [`assert_close`] for every value.
#[track_caller]
pub fn assert_all_close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).for_each(|(&found, &expected)| assert_close(found, expected, tolerance));
}

/// Compares `gradient` with central differences of `loss` in every coordinate of x.
#[track_caller]
pub fn assert_gradient(x: &[f64], gradient: &[f64], loss: impl Fn(&[f64]) -> f64) {
    assert_eq!(x.len(), gradient.len());
    for (i, &found) in gradient.iter().enumerate() {
        let along = |value: f64| {
            let mut x = x.to_vec();
            x[i] = value;
            loss(&x)
        };
        assert_close(found, derivative(along, x[i]), 1e-8);
    }
}

/// n pseudo-random numbers between −2 and 2.
pub fn numbers(n: usize, seed: usize) -> Vec<f64> {
    (0..n).map(|i| (((i * 37 + seed * 101) as f64 * 12.9898).sin() * 43758.5453).fract() * 2.0).collect()
}

/// n pseudo-random numbers, uniform between −1 and 1.
pub fn uniform(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Asserts a relative RMS error of at most `tolerance`.
pub fn assert_rows_close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    let error = crate::real::relative_rms(found, expected);
    assert!(error <= tolerance, "{what}: relative RMS {error:.2e}, allowed {tolerance:.0e}");
}

/// Runs in a new thread pool.
pub fn with_threads<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool").install(run)
}
