//! float32 and float64, and vectorisable sums in a fixed order.

use num_traits::Float;

/// float32 or float64. The reference implementation uses float64, the fused kernels float32; the parts of a variant are generic over both.
pub trait Real: Float + std::fmt::Debug + std::ops::AddAssign + std::ops::MulAssign + std::iter::Sum + Send + Sync + 'static {
    /// Rounds a float64 constant to this type.
    fn of(x: f64) -> Self;
    /// Widens to float64.
    fn wide(self) -> f64;
}

impl Real for f32 {
    #[inline(always)]
    fn of(x: f64) -> f32 {
        x as f32
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self as f64
    }
}

impl Real for f64 {
    #[inline(always)]
    fn of(x: f64) -> f64 {
        x
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
}

/// The larger of two values, or NaN if either is NaN: the bound of scores that contain NaN is NaN.
pub fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

/// Number of partial sums of a reduction. It is fixed, so the order of summation is the same on every machine and the compiler can use vector registers.
const LANES: usize = 16;

/// Σ_i f(a_i, b_i, c_i) in a fixed order, over the length of a.
///
/// # Panics
/// If b or c is shorter than a.
#[inline(always)]
pub fn sum_of3<R: Real>(a: &[R], b: &[R], c: &[R], f: impl Fn(R, R, R) -> R) -> R {
    let n = a.len();
    let (b, c) = (&b[..n], &c[..n]);
    let mut lanes = [R::zero(); LANES];
    let chunks = a.chunks_exact(LANES).zip(b.chunks_exact(LANES)).zip(c.chunks_exact(LANES));
    for ((a, b), c) in chunks {
        for l in 0..LANES {
            lanes[l] += f(a[l], b[l], c[l]);
        }
    }
    let whole = n - n % LANES;
    for (l, i) in (whole..n).enumerate() {
        lanes[l] += f(a[i], b[i], c[i]);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Σ_i f(a_i) in a fixed order.
#[inline(always)]
pub fn sum_of<R: Real>(a: &[R], f: impl Fn(R) -> R) -> R {
    sum_of3(a, a, a, |a, _, _| f(a))
}

/// Dot product a·b over the shorter length.
#[inline(always)]
pub fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    let n = a.len().min(b.len());
    sum_of3(&a[..n], &b[..n], &a[..n], |a, b, _| a * b)
}

/// RMS(x − reference) / RMS(reference). 0 if both are zero; NaN propagates.
///
/// # Panics
/// If the lengths differ.
pub fn relative_rms<A: Real, B: Real>(x: &[A], reference: &[B]) -> f64 {
    assert_eq!(x.len(), reference.len(), "compared tensors differ in length");
    let (mut error, mut norm) = (0.0, 0.0);
    for (a, b) in x.iter().zip(reference) {
        error += (a.wide() - b.wide()).powi(2);
        norm += b.wide().powi(2);
    }
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_cover_every_index_once() {
        for n in [0usize, 1, 15, 16, 17, 64, 100] {
            let expected = (n * n.saturating_sub(1) / 2) as f64;
            let x: Vec<f64> = (0..n).map(|i| i as f64).collect();
            assert_eq!(sum_of(&x, |x| x), expected, "n = {n}");
        }
    }

    #[test]
    fn relative_rms_measures_the_error_and_keeps_nan() {
        assert_eq!(relative_rms(&[1.0f32, 2.0], &[1.0f64, 2.0]), 0.0);
        assert!((relative_rms(&[1.1f64], &[1.0f64]) - 0.1).abs() < 1e-12);
        assert!(relative_rms(&[f32::NAN], &[1.0f64]).is_nan());
    }
}
