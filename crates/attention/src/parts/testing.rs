//! Shared test utilities of the parts: finite differences, and the checks that every part of a slot must pass.

use crate::parts::decay::{DecayParams, DecayPart};
use crate::parts::denominator::DenominatorPart;
use crate::parts::gate::GatePart;
use crate::parts::kernel::KernelPart;
use crate::parts::norm::{NormGrads, NormParams, NormPart};
use crate::parts::qk_norm::QkNormPart;
use crate::parts::slot::Part;
use termwise_kernels::combinatorics::factorial;
use termwise_kernels::score_rows::UNSCALED_LOG_LIMIT;
use termwise_kernels::simd::{Isa, Simd, Task, dispatch_on};
pub use termwise_kernels::testing::{assert_all_close, assert_close, assert_gradient, derivative, numbers};

/// Every example parses, and its printed form parses to the same value.
#[track_caller]
pub fn assert_examples<P: Part>() {
    assert!(!P::INFO.examples.is_empty() && !P::INFO.about.is_empty() && !P::INFO.formula.is_empty());
    for example in P::INFO.examples {
        // Denominators, gates, decays and norms list their word with the arguments, kernels only the arguments.
        let args = match example.strip_prefix(P::INFO.word) {
            Some(rest) => rest.trim_start_matches(','),
            None => example,
        };
        let part = P::parse(args).unwrap_or_else(|error| panic!("{example}: {error}"));
        assert_eq!(P::parse(&part.args()), Ok(part), "{example}");
    }
}

fn pairing(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Gradients of a norm, and that the log scale λ is equivalent to scaling x by e^λ.
pub fn check_norm<N: NormPart>(norm: &N) {
    assert_examples::<N>();
    for (e, lambda) in [(1, 0.0f64), (5, 0.0), (5, -3.0), (20, 2.5)] {
        let (x, dy, weight, bias) = (numbers(e, 1), numbers(e, 2), numbers(e, 3), numbers(e, 4));
        let run = |x: &[f64], weight: &[f64], bias: &[f64], log_scale: f64| {
            let mut y = x.to_vec();
            norm.forward(&mut y, NormParams { weight, bias, log_scale });
            y
        };
        let scaled: Vec<f64> = x.iter().map(|x| x * lambda.exp()).collect();
        assert_all_close(&run(&x, &weight, &bias, lambda), &run(&scaled, &weight, &bias, 0.0), 1e-13);

        let (mut dx, mut dweight, mut dbias) = (dy.clone(), vec![0.5; e], vec![0.5; e]);
        let params = NormParams { weight: &weight, bias: &bias, log_scale: lambda };
        norm.backward(&x, params, &mut dx, NormGrads { weight: &mut dweight, bias: &mut dbias });
        assert_gradient(&x, &dx, |x| pairing(&run(x, &weight, &bias, lambda), &dy));
        let added = |gradient: &[f64]| gradient.iter().map(|g| g - 0.5).collect::<Vec<f64>>();
        assert_gradient(&weight, &added(&dweight), |weight| pairing(&run(&x, weight, &bias, lambda), &dy));
        assert_gradient(&bias, &added(&dbias), |bias| pairing(&run(&x, &weight, bias, lambda), &dy));
    }
}

/// Gradient of a gate over time.
pub fn check_gate<G: GatePart>(gate: &G, g: &[f64]) {
    assert_examples::<G>();
    let run = |g: &[f64]| {
        let mut factors = g.to_vec();
        gate.forward(&mut factors, &mut 0.0);
        factors
    };
    let (factors, weights) = (run(g), numbers(g.len(), 7));
    for split in 0..=g.len() {
        let (mut parts, mut sum) = (g.to_vec(), 0.0);
        let (first, rest) = parts.split_at_mut(split);
        gate.forward(first, &mut sum);
        gate.forward(rest, &mut sum);
        assert_eq!(parts, factors, "split at {split}");
    }
    let mut gradient = weights.clone();
    gate.backward(g, &factors, &mut gradient);
    assert_gradient(g, &gradient, |g| pairing(&run(g), &weights));
}

/// Parameters for decays that read none.
pub fn decay_params() -> DecayParams<f64> {
    DecayParams { head: 0, rate: f64::NAN }
}

/// Gradients of a decay over time.
pub fn check_decay<D: DecayPart>(decay: &D) {
    assert_examples::<D>();
    let of = |rate: f64| DecayParams { head: 1, rate };
    for time in [1, 2, 9] {
        let (mut g, dc) = (numbers(time, 1), numbers(time, 2));
        g.truncate(if decay.has_logits() { time } else { 0 });
        let half = g.len() / 2;
        let (mut whole, mut parts, mut sum) = (vec![f64::NAN; time], vec![f64::NAN; time], 0.0);
        decay.forward(&g, of(-0.3), &mut whole, &mut 0.0);
        let (first, rest) = parts.split_at_mut(time / 2);
        decay.forward(&g[..half], of(-0.3), first, &mut sum);
        decay.forward(&g[half..], of(-0.3), rest, &mut sum);
        assert_eq!(parts, whole);
        let mut dg = vec![f64::NAN; g.len()];
        let drate = decay.backward(&g, of(-0.3), &dc, &mut dg);
        let loss = |g: &[f64], rate: f64| {
            let mut c = vec![f64::NAN; time];
            decay.forward(g, of(rate), &mut c, &mut 0.0);
            pairing(&c, &dc)
        };
        assert_gradient(&g, &dg, |g| loss(g, -0.3));
        assert_close(drate, if decay.has_rate() { derivative(|rate| loss(&g, rate), -0.3) } else { 0.0 }, 1e-8);
    }
}

/// Gradients of a norm of q and k.
pub fn check_qk_norm<N: QkNormPart>(norm: &N) {
    assert_examples::<N>();
    for n in [1, 5, 20] {
        let (x, dy) = (numbers(n, 1), numbers(n, 2));
        let weight = numbers(if norm.has_weight() { n } else { 0 }, 3);
        let run = |x: &[f64], weight: &[f64]| {
            let mut y = x.to_vec();
            norm.forward(&mut y, weight);
            pairing(&y, &dy)
        };
        let (mut dx, mut dweight) = (dy.clone(), vec![0.5; weight.len()]);
        norm.backward(&x, &weight, &mut dx, &mut dweight);
        assert_gradient(&x, &dx, |x| run(x, &weight));
        assert_gradient(&weight, &dweight.iter().map(|g| g - 0.5).collect::<Vec<_>>(), |weight| run(&x, weight));
    }
}

/// Derivative of a denominator, and that the log scale ρ is equivalent to a sum multiplied by e^ρ.
pub fn check_denominator<D: DenominatorPart>(denominator: &D, detached: bool) {
    for z in [0.2, 0.7, 1.6, 40.0] {
        for rho in [0.0, -2.0, 3.0] {
            let slope = derivative(|z| denominator.value(z, 7.0, rho), z);
            assert_close(denominator.slope(z, 7.0, rho), if detached { 0.0 } else { slope }, 1e-9);
            if denominator.sums() {
                let (scaled, plain) = (denominator.value(z, 7.0, rho), denominator.value(z * rho.exp(), 7.0, 0.0));
                assert_close(scaled * rho.exp(), plain, 1e-14);
            }
        }
    }
}

/// Closed form and slope of a kernel in float64.
pub fn check_kernel<K: KernelPart>(kernel: &K, closed_form: impl Fn(f64) -> f64) {
    assert_examples::<K>();
    for x in [-3.7, -1.0, -0.2, 0.0, 0.4, 1.0, 2.9] {
        assert_close(kernel.value(x), closed_form(x), 1e-13);
        assert_close(kernel.slope(x), derivative(|x| kernel.value(x), x), 1e-8);
        if let Some(polynomial) = kernel.polynomial() {
            let term = |(n, a): (usize, f64)| a * x.powi(n as i32) / factorial(n);
            assert_close(polynomial.into_iter().map(term).sum(), closed_form(x), 1e-13);
        }
    }
}

/// w, then w and w' together, over a slice.
pub struct Vectors<'a, K> {
    pub kernel: &'a K,
    pub x: &'a [f32],
}

impl<K: KernelPart> Task for Vectors<'_, K> {
    type Output = [Vec<f32>; 3];
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut out = [self.x.to_vec(), self.x.to_vec(), self.x.to_vec()];
        for i in (0..out[0].len()).step_by(S::LANES) {
            let x = simd.load_at(&out[0], i);
            let (value, slope) = self.kernel.values_and_slopes(simd, x);
            simd.store_at(&mut out[0], i, self.kernel.values(simd, x));
            simd.store_at(&mut out[1], i, value);
            simd.store_at(&mut out[2], i, slope);
        }
        out
    }
}

/// w·e^{−ρ} and its slope, over a slice.
pub struct ScaledSlice<'a, K> {
    pub kernel: &'a K,
    pub x: &'a [f32],
    pub rho: f32,
}

impl<K: KernelPart> Task for ScaledSlice<'_, K> {
    type Output = [Vec<f32>; 2];
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut out = [self.x.to_vec(), self.x.to_vec()];
        for i in (0..self.x.len()).step_by(S::LANES) {
            let (value, slope) = self.kernel.scaled(simd, simd.load_at(self.x, i), self.rho);
            simd.store_at(&mut out[0], i, value);
            simd.store_at(&mut out[1], i, slope);
        }
        out
    }
}

/// A kernel with rescaled rows: weights up to |x| = `reach` stay below 1 with the log scale of their bound, are accurate, and need no
/// log scale up to `unscaled_limit`.
pub fn check_scaled<K: KernelPart>(kernel: &K, reach: f32) {
    let x: Vec<f32> = (-64..64).map(|i| i as f32 / 63.0 * reach).map(|x| x.clamp(-reach, reach)).collect();
    assert!(
        (kernel.log_bound(kernel.unscaled_limit()) - UNSCALED_LOG_LIMIT).abs() < 1e-2 && kernel.unscaled_limit() < reach,
        "{kernel:?}: unscaled_limit up to {}",
        kernel.unscaled_limit()
    );
    let rho = kernel.log_bound(reach);
    let factor = (-rho as f64).exp();
    for isa in Isa::available() {
        let [values, slopes] = dispatch_on(isa, ScaledSlice { kernel, x: &x, rho });
        for (i, &x) in x.iter().enumerate() {
            let (w, slope) = (factor * kernel.value(x as f64), factor * kernel.slope(x as f64));
            // Subnormal float32 numbers are sparse.
            let close = |found: f32, expected: f64| (found as f64 - expected).abs() <= 2e-5 * expected.abs() + 1e-37;
            assert!(values[i].abs() < 1.001 && close(values[i], w), "{} {kernel:?} at {x}: {:e}, expected {w:e}", isa.name(), values[i]);
            assert!(close(slopes[i], slope), "{} {kernel:?} at {x}: slope {:e}, expected {slope:e}", isa.name(), slopes[i]);
        }
    }
}

/// Compares the SIMD forms on every instruction set with the float64 forms: |error| ≤ `bound`(x) for w and `bound_slope`(x) for w'.
pub fn check_vectors<K: KernelPart>(kernel: &K, x: &[f32], bound: impl Fn(f64) -> f64, bound_slope: impl Fn(f64) -> f64) {
    for isa in Isa::available() {
        let [values, again, slopes] = dispatch_on(isa, Vectors { kernel, x });
        for (i, &x) in x.iter().enumerate() {
            let wide = x as f64;
            for (found, expected, bound) in [
                (values[i], kernel.value(wide), bound(wide)),
                (again[i], kernel.value(wide), bound(wide)),
                (slopes[i], kernel.slope(wide), bound_slope(wide)),
            ] {
                let error = (found as f64 - expected).abs();
                assert!(error <= bound, "{} {kernel:?} at {x}: {found:e}, expected {expected:e}, off by {error:e}", isa.name());
            }
        }
    }
}
