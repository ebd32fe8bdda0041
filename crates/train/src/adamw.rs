//! AdamW (Loshchilov and Hutter 2019) with PyTorch's arithmetic:
//!
//! ```text
//! w ← w·(1 − lr·decay)
//! m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
//! w ← w − lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + eps)
//! ```

use std::ops::Range;

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};
use termwise_model::Params;
use termwise_model::ops::chunks::CHUNK_LEN;
use termwise_model::params::ParamEntry;

/// AdamW hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// β₁, decay rate of the first moment.
    pub beta1: f64,
    /// β₂, decay rate of the second moment.
    pub beta2: f64,
    /// ε, added to √v.
    pub eps: f64,
    /// Weight decay coefficient.
    pub weight_decay: f64,
    /// Exclude norms, biases and scalars from weight decay.
    pub decay_matrices_only: bool,
}

/// PyTorch's defaults, with weight decay on matrices only.
impl Default for AdamWConfig {
    fn default() -> AdamWConfig {
        AdamWConfig { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, decay_matrices_only: true }
    }
}

/// Optimizer state. A step is one pass over weights, gradients and both moments, bit-identical for any number of threads.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// Hyperparameters; may change between steps.
    pub config: AdamWConfig,
    /// First moments.
    pub first: Params,
    /// Second moments.
    pub second: Params,
    /// Number of steps taken.
    pub steps: u64,
}

impl AdamW {
    /// Zero moments for parameters of this layout.
    pub fn new(params: &Params, config: AdamWConfig) -> termwise_model::Result<AdamW> {
        Ok(AdamW { config, first: params.zeros_like()?, second: params.zeros_like()?, steps: 0 })
    }

    /// One step at this learning rate with the gradients `grads` · `scale` (see [`crate::clip`]).
    ///
    /// # Panics
    /// If the layout of `params` or `grads` differs from that of the moments.
    pub fn step(&mut self, params: &mut Params, grads: &Params, learning_rate: f64, scale: f64) {
        let len = self.first.values().len();
        assert!(params.values().len() == len && grads.values().len() == len, "parameters, gradients and moments differ in layout");
        self.steps += 1;
        let AdamWConfig { beta1, beta2, eps, weight_decay, decay_matrices_only } = self.config;
        let (unbias1, unbias2) = (1.0 - beta1.powf(self.steps as f64), 1.0 - beta2.powf(self.steps as f64));
        let layout = params.layout().clone();
        for run in decay_runs(layout.entries(), decay_matrices_only) {
            let decay = if run.decays { weight_decay } else { 0.0 };
            let numbers = Numbers {
                keep: (1.0 - learning_rate * decay) as f32,
                beta1: beta1 as f32,
                fresh1: ((1.0 - beta1) * scale) as f32,
                beta2: beta2 as f32,
                fresh2: ((1.0 - beta2) * scale * scale) as f32,
                step: (learning_rate / unbias1) as f32,
                unbias2: (1.0 / unbias2.sqrt()) as f32,
                eps: eps as f32,
            };
            (
                params.values_mut()[run.range.clone()].par_chunks_mut(CHUNK_LEN),
                grads.values()[run.range.clone()].par_chunks(CHUNK_LEN),
                self.first.values_mut()[run.range.clone()].par_chunks_mut(CHUNK_LEN),
                self.second.values_mut()[run.range.clone()].par_chunks_mut(CHUNK_LEN),
            )
                .into_par_iter()
                .for_each(|(w, g, m, v)| dispatch(Step { w, g, m, v, numbers }));
        }
    }
}

/// A contiguous range of the buffer with the same weight decay.
struct Run {
    range: Range<usize>,
    decays: bool,
}

/// Contiguous ranges with the same weight decay. They are merged: hundreds of small parameters would otherwise need hundreds of parallel calls.
fn decay_runs(entries: &[ParamEntry], matrices_only: bool) -> impl Iterator<Item = Run> {
    let decays = move |entry: &ParamEntry| !matrices_only || entry.is_matrix();
    entries.chunk_by(move |a, b| decays(a) == decays(b)).filter_map(move |run| {
        let (first, last) = (run.first()?, run.last()?);
        Some(Run { range: first.offset..last.range().end, decays: decays(first) })
    })
}

#[derive(Clone, Copy)]
struct Numbers {
    keep: f32,
    beta1: f32,
    fresh1: f32,
    beta2: f32,
    fresh2: f32,
    step: f32,
    unbias2: f32,
    eps: f32,
}

struct Step<'a> {
    w: &'a mut [f32],
    g: &'a [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    numbers: Numbers,
}

impl Task for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Step { w, g, m, v, numbers } = self;
        let [keep, beta1, fresh1, beta2, fresh2, step, unbias2, eps] =
            [numbers.keep, numbers.beta1, numbers.fresh1, numbers.beta2, numbers.fresh2, -numbers.step, numbers.unbias2, numbers.eps]
                .map(|x| simd.splat(x));
        for i in (0..w.len()).step_by(S::LANES) {
            let gradient = simd.load_at(g, i);
            let first = simd.fma(simd.load_at(m, i), beta1, simd.mul(gradient, fresh1));
            let second = simd.fma(simd.load_at(v, i), beta2, simd.mul(simd.mul(gradient, gradient), fresh2));
            let denominator = simd.fma(simd.sqrt(second), unbias2, eps);
            let kept = simd.mul(simd.load_at(w, i), keep);
            simd.store_at(m, i, first);
            simd.store_at(v, i, second);
            simd.store_at(w, i, simd.fma(simd.div(first, denominator), step, kept));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{filled, model, with_threads};

    /// The update formula in scalar float64.
    struct Scalar {
        w: f64,
        m: f64,
        v: f64,
    }

    impl Scalar {
        fn step(&mut self, g: f64, t: i32, lr: f64, decay: f64, config: &AdamWConfig) {
            let AdamWConfig { beta1, beta2, eps, .. } = *config;
            self.w *= 1.0 - lr * decay;
            self.m = beta1 * self.m + (1.0 - beta1) * g;
            self.v = beta2 * self.v + (1.0 - beta2) * g * g;
            let denominator = self.v.sqrt() / (1.0 - beta2.powi(t)).sqrt() + eps;
            self.w -= lr / (1.0 - beta1.powi(t)) * self.m / denominator;
        }
    }

    #[test]
    fn steps_match_a_float64_reference_with_selective_weight_decay() {
        for matrices_only in [true, false] {
            let config = AdamWConfig { beta1: 0.8, beta2: 0.95, eps: 1e-3, weight_decay: 0.3, decay_matrices_only: matrices_only };
            let mut params = model().params;
            let mut plain: Vec<Scalar> = params.values().iter().map(|&w| Scalar { w: w as f64, m: 0.0, v: 0.0 }).collect();
            let mut optimizer = AdamW::new(&params, config).expect("memory");
            let layout = params.layout().clone();
            for t in 1..=5 {
                let grads = filled(&params, t as u64);
                let (lr, scale) = (0.01 * t as f64, 0.5);
                optimizer.step(&mut params, &grads, lr, scale);
                for entry in layout.entries() {
                    let decay = if matrices_only && !entry.is_matrix() { 0.0 } else { 0.3 };
                    for i in entry.range() {
                        plain[i].step(grads.values()[i] as f64 * scale, t, lr, decay, &config);
                    }
                }
            }
            assert_eq!(optimizer.steps, 5);
            for (entry, values) in params.iter() {
                let expected: Vec<f64> = plain[entry.range()].iter().map(|scalar| scalar.w).collect();
                let error = termwise_attention::relative_rms(values, &expected);
                assert!(error < 1e-6, "{}: relative RMS {error:.2e}", entry.spec.name);
            }
        }
    }

    #[test]
    fn the_first_step_has_the_size_of_the_learning_rate() {
        // By hand: m = 0.1·g, v = 0.001·g², both unbiased to g and g², so the step is lr·g/(|g| + eps) = lr·sign(g).
        let mut params = model().params;
        let before = params.clone();
        let grads = filled(&params, 1);
        AdamW::new(&params, AdamWConfig { weight_decay: 0.0, ..AdamWConfig::default() }).expect("memory").step(
            &mut params,
            &grads,
            1e-2,
            1.0,
        );
        for (entry, values) in params.iter() {
            for ((value, before), g) in values.iter().zip(&before.values()[entry.range()]).zip(&grads.values()[entry.range()]) {
                assert!((value - (before - 1e-2 * g.signum())).abs() < 1e-5, "{}: {before} went to {value} on {g}", entry.spec.name);
            }
        }
    }

    #[test]
    fn padding_stays_zero_and_results_do_not_depend_on_threads() {
        let run = |threads| {
            with_threads(threads, || {
                let mut params = model().params;
                let mut optimizer = AdamW::new(&params, AdamWConfig::default()).expect("memory");
                for t in 1..=3 {
                    let grads = filled(&params, t);
                    optimizer.step(&mut params, &grads, 1e-2, 1.0);
                }
                params
            })
        };
        let one = run(1);
        for threads in [2, 3, 5] {
            assert_eq!(one.values(), run(threads).values(), "{threads} threads");
        }
        let mut outside = one.values().to_vec();
        one.layout().entries().iter().for_each(|entry| outside[entry.range()].fill(0.0));
        assert!(outside.iter().all(|&x| x == 0.0));
    }
}
