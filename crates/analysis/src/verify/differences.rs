//! Gradients of the reference against differences of its own forward pass, in float64, entry by entry.

use termwise_attention::parts::denominator::none::NoDenominator;
use termwise_attention::parts::norm::none::NoNorm;
use termwise_attention::{Attention, Denominator, Error, Norm, Reference, Shape};

use super::engines::{Subject, begin, layer};
use super::outcome::{Case, Identity, Unit};
use crate::layer::Layer;

/// Clamps, relu, floors and the cumulative gate have kinks, and a step that crosses one says nothing about the slope: such an entry
/// is tried again with finer steps, which rarely reach it. A wrong gradient agrees with none of them.
const STEPS: [f64; 4] = [1e-3, 1e-4, 1e-5, 1e-6];

/// Every entry of every gradient. An entry's error is |found − slope| / (|slope| + 0.01), since differences themselves carry rounding.
pub fn central(subject: &Subject, seed: u64) -> Case {
    let (mut case, mut rng) = begin(Identity::Differences, subject, seed);
    let mut subject = subject.clone();
    if is_detached(&subject.variant.denominator) && !matches!(subject.variant.norm, Norm::NoNorm(_)) {
        // What a frozen denominator means under a norm cannot be had from forward passes alone.
        subject.variant.norm = Norm::NoNorm(NoNorm);
        case.subject += " (norm off)";
    }
    case.fill(|case| {
        let shape = Shape { batch: 1, time: 5, heads: 2, kv_heads: 1, d: 4, e: 3 };
        let mut layer = layer::<f64>(&subject, shape, 1.5, &mut rng, case)?;
        let results = layer.run(&mut layer.naive()?)?;
        let mut slopes = Slopes::at(&layer)?;
        for (tensor, (name, gradient)) in results.gradients.iter().enumerate() {
            let mut worst = 0.0;
            for (i, &found) in gradient.iter().enumerate() {
                let mut least = f64::INFINITY;
                for h in STEPS {
                    let slope = slopes.difference(&mut layer, tensor, i, h)?;
                    least = least.min((found - slope).abs() / (slope.abs() + 0.01));
                    if least <= BOUND {
                        break;
                    }
                }
                // Not `max`, which would pass over NaN.
                worst = if least <= worst { worst } else { least };
            }
            case.measure(format!("d{name}"), worst, BOUND, Unit::Absolute);
        }
        Ok::<(), Error>(())
    })
}

const BOUND: f64 = 1e-5;

fn is_detached(denominator: &Denominator) -> bool {
    matches!(denominator, Denominator::Sum(sum) if sum.detached)
}

/// Slopes of Σ y·dy.
///
/// A detached denominator is a constant to the gradient: there, differences are taken of the variant without denominator, and its
/// rows are divided by the denominators at the point itself.
struct Slopes {
    engine: Reference<f64>,
    /// dy, divided by frozen denominators.
    dy: Vec<f64>,
    y: Vec<f64>,
}

impl Slopes {
    fn at(layer: &Layer<f64>) -> Result<Slopes, Error> {
        let mut heads = layer.heads.clone();
        let mut dy = layer.dy.clone();
        let mut y = vec![0.0; dy.len()];
        if heads.iter().any(|head| is_detached(&head.denominator)) {
            heads.iter_mut().for_each(|head| head.denominator = Denominator::NoDenominator(NoDenominator));
            let mut divided = vec![0.0; dy.len()];
            layer.naive()?.infer(&layer.inputs(), &mut divided)?;
            Layer { heads: heads.clone(), ..layer.clone() }.naive()?.infer(&layer.inputs(), &mut y)?;
            for ((dy, divided), whole) in dy.iter_mut().zip(divided).zip(&y) {
                // Without a norm every value of a row is divided by the same positive number; zero stays zero.
                *dy *= if *whole == 0.0 { 0.0 } else { divided / whole };
            }
        }
        Ok(Slopes { engine: Layer { heads, ..layer.clone() }.naive()?, dy, y })
    }

    /// By the four-point rule, whose error is h⁴/30 of the fifth derivative.
    fn difference(&mut self, layer: &mut Layer<f64>, tensor: usize, i: usize, h: f64) -> Result<f64, Error> {
        let x = layer.tensors[tensor].1[i];
        let mut at = |step: f64| -> Result<f64, Error> {
            layer.tensors[tensor].1[i] = x + step * h;
            // The gates' and parameters' tensors are the same with and without a denominator, except that of `position`, which is no sum.
            self.engine.infer(&layer.inputs(), &mut self.y)?;
            Ok(self.y.iter().zip(&self.dy).map(|(y, dy)| y * dy).sum())
        };
        let slope = (8.0 * (at(1.0)? - at(-1.0)?) - (at(2.0)? - at(-2.0)?)) / (12.0 * h);
        layer.tensors[tensor].1[i] = x;
        Ok(slope)
    }
}
