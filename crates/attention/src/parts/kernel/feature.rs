//! w(q, k) = scale · φ(q)·φ(k), φ ∈ elu(x)+1, relu, l2, identity, hedgehog

use termwise_base::nearest;

use crate::Real;
use crate::parts::kernel::{KernelPart, Sign};
use crate::parts::norm::l2::{L2, unit_backward};
use crate::parts::norm::{NormParams, NormPart};
use crate::parts::slot::{Info, Part};
use termwise_kernels::score_rows::ScoreKernel;
use termwise_kernels::simd::Simd;

/// φ, the feature map of q and k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// φ(x) = x
    Identity,
    /// φ(x) = elu(x) + 1
    Elu,
    /// φ(x) = max(x, 0)
    Relu,
    /// φ(x) = x / max(‖x‖, 1e-12)
    L2,
    /// φ(x) = softmax([2(Wx + b), −2(Wx + b)]), twice as wide as x. Computed by [`hedgehog`](super::hedgehog) with learned weights; as
    /// an in-place map it is the identity.
    Hedgehog,
}

impl Map {
    const WORDS: [(&'static str, Map); 5] =
        [("elu", Map::Elu), ("relu", Map::Relu), ("l2", Map::L2), ("identity", Map::Identity), ("hedgehog", Map::Hedgehog)];

    /// x [d] becomes φ(x).
    #[inline(always)]
    pub fn forward<R: Real>(self, x: &mut [R]) {
        let zero = R::zero();
        match self {
            Map::Identity | Map::Hedgehog => {}
            Map::Elu => x.iter_mut().for_each(|x| *x = if *x > zero { *x + R::one() } else { x.exp() }),
            Map::Relu => x.iter_mut().for_each(|x| *x = x.max(zero)),
            Map::L2 => L2.forward(x, NormParams { weight: &[], bias: &[], log_scale: zero }),
        }
    }

    /// dφ [d] becomes dx, at the x that entered `forward`.
    #[inline(always)]
    pub fn backward<R: Real>(self, x: &[R], dphi: &mut [R]) {
        let zero = R::zero();
        match self {
            Map::Identity | Map::Hedgehog => {}
            Map::Elu => dphi.iter_mut().zip(x).for_each(|(d, &x)| {
                if x <= zero {
                    *d *= x.exp();
                }
            }),
            Map::Relu => dphi.iter_mut().zip(x).for_each(|(d, &x)| {
                if x <= zero {
                    *d = zero;
                }
            }),
            Map::L2 => unit_backward(x, zero, R::one(), dphi),
        }
    }

    /// Like [`Map::forward`], with SIMD.
    #[inline(always)]
    pub fn forward_simd<S: Simd>(self, simd: S, x: &mut [f32]) {
        match self {
            Map::Elu => {
                for i in (0..x.len()).step_by(S::LANES) {
                    let v = simd.load_at(x, i);
                    let positive = simd.gt(v, simd.splat(0.0));
                    simd.store_at(x, i, simd.select(positive, simd.add(v, simd.splat(1.0)), simd.exp(v)));
                }
            }
            _ => self.forward(x),
        }
    }

    /// Like [`Map::backward`], with SIMD.
    #[inline(always)]
    pub fn backward_simd<S: Simd>(self, simd: S, x: &[f32], dphi: &mut [f32]) {
        match self {
            Map::Elu => {
                for i in (0..x.len()).step_by(S::LANES) {
                    let v = simd.load_at(x, i);
                    let slope = simd.select(simd.gt(v, simd.splat(0.0)), simd.splat(1.0), simd.exp(v));
                    simd.store_at(dphi, i, simd.mul(simd.load_at(dphi, i), slope));
                }
            }
            _ => self.backward(x, dphi),
        }
    }
}

/// Linear attention: the product of feature maps.
#[derive(Clone, Debug, PartialEq)]
pub struct Feature {
    /// The feature map φ.
    pub map: Map,
}

impl Part for Feature {
    const INFO: Info = Info {
        word: "feature",
        usage: "feature=elu|relu|l2|identity|hedgehog",
        formula: "w = scale · φ(q)·φ(k), φ = elu(x)+1, max(x, 0), x/‖x‖, x or softmax([2(Wx+b), −2(Wx+b)])",
        about: "Linear attention with a feature map; that of hedgehog is learned, per head for q and per KV head for k.",
        examples: &["elu", "relu", "l2", "identity", "hedgehog"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        match Map::WORDS.iter().find(|(word, _)| *word == args) {
            Some(&(_, map)) => Ok(Feature { map }),
            None => {
                let words = Map::WORDS.map(|(word, _)| word);
                let hint = nearest(args, words).map(|word| format!("; did you mean `feature={word}`?")).unwrap_or_default();
                Err(format!("`feature` takes one of {}, found `{args}`{hint}", words.join(", ")))
            }
        }
    }

    fn args(&self) -> String {
        let (word, _) = Map::WORDS.iter().find(|(_, map)| *map == self.map).expect("every map has a word");
        word.to_string()
    }
}

impl KernelPart for Feature {
    fn map(&self) -> Map {
        if self.map == Map::Hedgehog { Map::Identity } else { self.map }
    }

    fn has_learned_map(&self) -> bool {
        self.map == Map::Hedgehog
    }

    fn sign(&self) -> Sign {
        match self.map {
            Map::Elu | Map::Hedgehog => Sign::Positive,
            Map::Relu => Sign::Nonnegative,
            Map::L2 | Map::Identity => Sign::Mixed,
        }
    }

    fn polynomial(&self) -> Option<Vec<(usize, f64)>> {
        Some(vec![(1, 1.0)])
    }

    #[inline(always)]
    fn value<R: Real>(&self, x: R) -> R {
        x
    }

    #[inline(always)]
    fn slope<R: Real>(&self, _: R) -> R {
        R::one()
    }
}

impl ScoreKernel for Feature {
    #[inline(always)]
    fn values<S: Simd>(&self, _: S, x: S::V) -> S::V {
        x
    }

    #[inline(always)]
    fn values_and_slopes<S: Simd>(&self, simd: S, x: S::V) -> (S::V, S::V) {
        (x, simd.splat(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::testing::{assert_all_close, assert_examples, assert_gradient, check_kernel, check_vectors, numbers};

    #[test]
    fn maps_in_closed_form() {
        let run = |map: Map| {
            let mut x = [3.0f64, -4.0];
            map.forward(&mut x);
            x
        };
        assert_all_close(&run(Map::Identity), &[3.0, -4.0], 0.0);
        assert_all_close(&run(Map::Elu), &[4.0, (-4f64).exp()], 1e-15);
        assert_all_close(&run(Map::Relu), &[3.0, 0.0], 0.0);
        assert_all_close(&run(Map::L2), &[0.6, -0.8], 1e-15);
    }

    #[test]
    fn gradients_of_the_maps() {
        for map in [Map::Identity, Map::Elu, Map::Relu, Map::L2] {
            let (x, dphi) = (numbers(9, 1), numbers(9, 2));
            let mut dx = dphi.clone();
            map.backward(&x, &mut dx);
            assert_gradient(&x, &dx, |x| {
                let mut phi = x.to_vec();
                map.forward(&mut phi);
                phi.iter().zip(&dphi).map(|(a, b)| a * b).sum()
            });
        }
    }

    #[test]
    fn the_weight_is_the_product_itself() {
        assert_examples::<Feature>();
        let feature = Feature { map: Map::Relu };
        check_kernel(&feature, |x| x);
        check_vectors(&feature, &[-3.0, 0.0, 7.5], |_| 0.0, |_| 0.0);
    }

    #[test]
    fn misspelled_maps_get_a_suggestion() {
        assert!(Feature::parse("relo").is_err_and(|error| error.contains("feature=relu")));
    }
}
