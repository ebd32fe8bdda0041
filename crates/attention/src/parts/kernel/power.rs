//! w(x) = x^p

use crate::Real;
use crate::parts::kernel::taylor::{MAX_ORDER, pair_from};
use crate::parts::kernel::{KernelPart, Sign};
use crate::parts::slot::{Info, Part};
use termwise_kernels::combinatorics::factorial;
use termwise_kernels::score_rows::{Rescale, SCALED_FROM, ScoreKernel, UNSCALED_LOG_LIMIT};
use termwise_kernels::simd::{Simd, Task};

/// One power of the score.
#[derive(Clone, Debug, PartialEq)]
pub struct Power {
    /// The exponent p.
    pub p: u32,
}

impl Part for Power {
    const INFO: Info =
        Info { word: "power", usage: "power=P", formula: "w(x) = x^p", about: "One power of the score.", examples: &["1", "2", "3"] };

    fn parse(args: &str) -> Result<Self, String> {
        match args.parse::<u32>() {
            Ok(p) if p as usize <= MAX_ORDER => Ok(Power { p }),
            _ => Err(format!("`power` takes a whole number from 0 to {MAX_ORDER}, as in `power=2`; found `{args}`")),
        }
    }

    fn args(&self) -> String {
        self.p.to_string()
    }
}

impl KernelPart for Power {
    fn rescale(&self) -> Rescale {
        if self.p as usize >= SCALED_FROM { Rescale::Multiply } else { Rescale::None }
    }

    fn sign(&self) -> Sign {
        match self.p {
            0 => Sign::Positive,
            p if p % 2 == 0 => Sign::Nonnegative,
            _ => Sign::Mixed,
        }
    }

    fn polynomial(&self) -> Option<Vec<(usize, f64)>> {
        Some(vec![(self.p as usize, factorial(self.p as usize))])
    }

    #[inline(always)]
    fn value<R: Real>(&self, x: R) -> R {
        x.powi(self.p as i32)
    }

    #[inline(always)]
    fn slope<R: Real>(&self, x: R) -> R {
        if self.p == 0 { R::zero() } else { R::of(self.p as f64) * x.powi(self.p as i32 - 1) }
    }
}

impl ScoreKernel for Power {
    const RESCALE: Rescale = Rescale::Multiply;

    #[inline(always)]
    fn values<S: Simd>(&self, simd: S, x: S::V) -> S::V {
        let mut w = simd.splat(1.0);
        for _ in 0..self.p {
            w = simd.mul(w, x);
        }
        w
    }

    #[inline(always)]
    fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V) {
        if self.p == 0 {
            return (simd.splat(1.0), simd.splat(0.0));
        }
        let lower = Power { p: self.p - 1 }.values(simd, x);
        (simd.mul(lower, x), simd.mul(lower, simd.splat(self.p as f32)))
    }

    fn unscaled_limit(&self) -> f32 {
        (UNSCALED_LOG_LIMIT / self.p as f32).exp()
    }

    fn log_bound(&self, reach: f32) -> f32 {
        self.p as f32 * reach.ln()
    }

    #[inline(always)]
    fn scaled<S: Simd>(&self, simd: S, x: S::V, rho: f32) -> (S::V, S::V) {
        pair_from(simd, simd.call(ScaledPair { power: self, x: simd.to_array(x), factor: (-rho as f64).exp() }))
    }
}

/// Value and slope times a factor, in float64.
struct ScaledPair<'a> {
    power: &'a Power,
    x: [f32; 16],
    factor: f64,
}

impl Task for ScaledPair<'_> {
    type Output = ([f32; 16], [f32; 16]);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> ([f32; 16], [f32; 16]) {
        let of = |f: &dyn Fn(f64) -> f64| self.x.map(|x| (f(x as f64) * self.factor) as f32);
        (of(&|x| self.power.value(x)), of(&|x| self.power.slope(x)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{check_kernel, check_scaled, check_vectors};

    #[test]
    fn closed_form_and_slope() {
        for p in [0, 1, 2, 3, 5] {
            check_kernel(&Power { p }, |x| (0..p).map(|_| x).product());
        }
    }

    #[test]
    fn vectors_agree_with_float64() {
        let x: Vec<f32> = (-240..=240).map(|i| i as f32 / 8.0).collect();
        for p in [0, 1, 2, 3, 6, 20] {
            let power = Power { p };
            // One rounding per factor.
            let relative = p as f64 * f32::EPSILON as f64;
            check_vectors(&power, &x, |x| relative * power.value(x).abs(), |x| relative * power.slope(x).abs());
        }
    }

    #[test]
    fn high_powers_are_rescaled() {
        for p in [8, 9, 40] {
            check_scaled(&Power { p }, 300.0);
        }
    }

    #[test]
    fn signs() {
        assert_eq!([0, 1, 2, 3].map(|p| Power { p }.sign()), [Sign::Positive, Sign::Mixed, Sign::Nonnegative, Sign::Mixed]);
    }
}
