//! The formula once more, written for the tests alone: dense T×T arithmetic in float64 from the fields of a variant,
//! sharing no computation with the crate. Denominators can be held fixed, which is what `detached` means to a derivative.

use termwise_attention::parts::gate::{OutGate, PostGate};
use termwise_attention::parts::kernel::taylor::Coefficients;
use termwise_attention::{Decay, Denominator, Extra, Kernel, Map, Norm, Shape, Variant};

use super::{Case, Name};

pub struct Output {
    pub y: Vec<f64>,
    /// D_t before it divides, [B, H, T].
    pub denominators: Vec<f64>,
    /// The smallest |Σ w| / Σ |w| among rows that divide by a sum: how far cancellation went.
    pub steadiness: f64,
}

/// y of a case; rows with a detached denominator divide by `frozen` instead, where given.
pub fn forward(case: &Case<f64>, frozen: Option<&[f64]>) -> Output {
    let Shape { batch, time, heads, e, .. } = case.shape;
    let mut output = Output { y: vec![0.0; case.dy.len()], denominators: vec![0.0; batch * heads * time], steadiness: 1.0 };
    for b in 0..batch {
        for h in 0..heads {
            let head = Head::new(case, b, h);
            for t in 0..head.length {
                let at = (b * heads + h) * time + t;
                let row = head.row(t, frozen.map(|frozen| frozen[at]), &mut output.denominators[at], &mut output.steadiness);
                output.y[((b * time + t) * heads + h) * e..][..e].copy_from_slice(&row);
            }
        }
    }
    output
}

pub fn loss(case: &Case<f64>, frozen: Option<&[f64]>) -> f64 {
    forward(case, frozen).y.iter().zip(&case.dy).map(|(y, dy)| y * dy).sum()
}

type Matrix = Vec<Vec<f64>>;

struct Head<'a> {
    case: &'a Case<f64>,
    variant: &'a Variant,
    head: usize,
    length: usize,
    q: Matrix,
    k: Matrix,
    v: Matrix,
    in_gate: Vec<f64>,
    out_gate: Vec<f64>,
    post_gate: Vec<f64>,
    decay: Vec<f64>,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl<'a> Head<'a> {
    fn new(case: &'a Case<f64>, b: usize, h: usize) -> Self {
        let Shape { time, heads, kv_heads, d, e, .. } = case.shape;
        let variant = &case.heads[h];
        let length = case.lengths.as_ref().map_or(time, |lengths| lengths[b]);
        let g = h * kv_heads / heads;
        let signal = |extra: Extra, heads: usize, h: usize| -> Vec<f64> {
            (0..length).map(|t| case.get(Name::Extra(extra))[(b * time + t) * heads + h]).collect()
        };
        let tensor = |name: Name, conv: Extra, heads: usize, h: usize, dim: usize| -> Matrix {
            let x = case.get(name);
            let at = |t: usize, i: usize| x[((b * time + t) * heads + h) * dim + i];
            let filtered = |t: usize, i: usize| match variant.conv {
                None => at(t, i),
                Some(width) => {
                    let taps = &case.get(Name::Extra(conv))[(h * dim + i) * width..][..width];
                    let sum: f64 = (0..width.min(t + 1)).map(|back| taps[width - 1 - back] * at(t - back, i)).sum();
                    sum * sigmoid(sum)
                }
            };
            (0..length).map(|t| (0..dim).map(|i| filtered(t, i)).collect()).collect()
        };
        let placed = |x: Matrix| -> Matrix { x.into_iter().enumerate().map(|(t, x)| map(variant, rotated(case, variant, t, x))).collect() };
        let ones = vec![1.0; length];
        let out_gate: Vec<f64> = match variant.out_gate {
            None => ones.clone(),
            Some(OutGate::Sigmoid(_)) => signal(Extra::OutGate, heads, h).into_iter().map(sigmoid).collect(),
            Some(OutGate::Cumulative(_)) => {
                let g = signal(Extra::OutGate, heads, h);
                (0..length).map(|t| 1.0 / g[..=t].iter().map(|g| g.exp()).sum::<f64>().max(1.0)).collect()
            }
        };
        let decay = match variant.decay {
            None => vec![0.0; length],
            Some(Decay::LinearDecay(_)) => {
                let g = signal(Extra::DecayGate, heads, h);
                (0..length).map(|t| g[..t].iter().sum::<f64>() / 1024.0).collect()
            }
            Some(Decay::SoftplusDecay(_)) => {
                let g = signal(Extra::DecayGate, heads, h);
                (0..length).map(|t| -g[..=t].iter().map(|g| g.exp().ln_1p()).sum::<f64>()).collect()
            }
        };
        Head {
            case,
            variant,
            head: h,
            length,
            q: placed(tensor(Name::Q, Extra::ConvQ, heads, h, d)),
            k: placed(tensor(Name::K, Extra::ConvK, kv_heads, g, d)),
            v: tensor(Name::V, Extra::ConvV, kv_heads, g, e),
            in_gate: match variant.in_gate {
                Some(_) => signal(Extra::InGate, kv_heads, g).into_iter().map(sigmoid).collect(),
                None => ones.clone(),
            },
            post_gate: match variant.post_gate {
                Some(PostGate::Sigmoid(_)) => signal(Extra::PostGate, heads, h).into_iter().map(sigmoid).collect(),
                Some(PostGate::Shared(_)) => out_gate.clone(),
                None => ones,
            },
            out_gate,
            decay,
        }
    }

    fn weight(&self, t: usize, s: usize) -> f64 {
        let d = self.case.shape.d as f64;
        let scale = self.variant.scale.unwrap_or(1.0 / d.sqrt());
        let product: f64 = self.q[t].iter().zip(&self.k[s]).map(|(q, k)| q * k).sum();
        let x = (scale * product).min(self.variant.clamp.unwrap_or(f64::INFINITY));
        let w = match &self.variant.kernel {
            Kernel::Exp(_) => x.exp(),
            Kernel::Feature(_) => x,
            Kernel::Power(power) => x.powi(power.p as i32),
            Kernel::Taylor(taylor) => {
                let n = taylor.orders().len();
                let coefficient = |i: usize| match taylor.coefficients() {
                    Coefficients::Ones => 1.0,
                    Coefficients::Given(given) => given[i],
                    Coefficients::Learned => self.case.get(Name::Extra(Extra::Coefficients))[self.head * n + i],
                };
                let term = |order: usize| (1..=order).map(|i| (x - taylor.centre()) / i as f64).product::<f64>();
                (0..n).map(|i| coefficient(i) * term(taylor.orders()[i])).sum()
            }
        };
        w * (self.decay[t] - self.decay[s]).exp()
    }

    fn row(&self, t: usize, frozen: Option<f64>, denominator: &mut f64, steadiness: &mut f64) -> Vec<f64> {
        let (e, count) = (self.case.shape.e, (t + 1) as f64);
        let weights: Vec<f64> = (0..=t).map(|s| self.weight(t, s)).collect();
        let sum: f64 = weights.iter().sum();
        *denominator = match &self.variant.denominator {
            Denominator::Sum(part) => {
                let magnitude: f64 = weights.iter().map(|w| w.abs()).sum();
                let guarded = sum.max(part.floor.unwrap_or(f64::NEG_INFINITY)) + part.eps.unwrap_or(0.0);
                let steady = guarded.abs() / (magnitude + part.floor.unwrap_or(0.0) + part.eps.unwrap_or(0.0));
                // `min` would pass over NaN.
                *steadiness = if steady >= *steadiness { *steadiness } else { steady };
                match (part.detached, frozen) {
                    (true, Some(frozen)) => frozen,
                    _ => guarded,
                }
            }
            Denominator::Length(_) => count,
            Denominator::NoDenominator(_) | Denominator::Position(_) => 1.0,
        };
        let mut u = vec![0.0; e];
        for (s, w) in weights.iter().enumerate() {
            let key = match self.variant.denominator {
                Denominator::Position(_) => ((s + 1) as f64).powf(-sigmoid(self.case.get(Name::Extra(Extra::NormConst))[self.head])),
                _ => 1.0,
            };
            for (u, v) in u.iter_mut().zip(&self.v[s]) {
                *u += w * self.in_gate[s] * key * v;
            }
        }
        u.iter_mut().for_each(|u| *u *= self.out_gate[t] / *denominator);
        let mut y = self.normed(&u);
        y.iter_mut().for_each(|y| *y *= self.post_gate[t]);
        y
    }

    fn normed(&self, x: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let parameter = |extra| self.case.get(Name::Extra(extra));
        let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
        match self.variant.norm {
            Norm::NoNorm(_) => x.to_vec(),
            Norm::L2(_) => x.iter().map(|x| x / norm.max(1e-12)).collect(),
            Norm::ScaledL2(_) => x.iter().map(|x| n * x / norm.max(1e-12)).collect(),
            Norm::Rms(_) => {
                let rms = (norm * norm / n + 1.1920929e-7).sqrt();
                x.iter().zip(parameter(Extra::NormWeight)).map(|(x, w)| w * x / rms).collect()
            }
            Norm::Layer(_) => {
                let mean = x.iter().sum::<f64>() / n;
                let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + 1e-5).sqrt();
                let parameters = parameter(Extra::NormWeight).iter().zip(parameter(Extra::NormBias));
                x.iter().zip(parameters).map(|(x, (w, b))| w * (x - mean) / deviation + b).collect()
            }
        }
    }
}

fn rotated(case: &Case<f64>, variant: &Variant, t: usize, x: Vec<f64>) -> Vec<f64> {
    if !variant.rope {
        return x;
    }
    let half = x.len() / 2;
    let angle = |i: usize| t as f64 * case.rope.frequencies()[i];
    let low = (0..half).map(|i| x[i] * angle(i).cos() - x[i + half] * angle(i).sin());
    let high = (0..half).map(|i| x[i + half] * angle(i).cos() + x[i] * angle(i).sin());
    low.chain(high).collect()
}

fn map(variant: &Variant, x: Vec<f64>) -> Vec<f64> {
    let Kernel::Feature(feature) = &variant.kernel else { return x };
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
    x.into_iter()
        .map(|x| match feature.map {
            Map::Identity => x,
            Map::Elu => {
                if x > 0.0 {
                    x + 1.0
                } else {
                    x.exp()
                }
            }
            Map::Relu => x.max(0.0),
            Map::L2 => x / norm.max(1e-12),
        })
        .collect()
}
