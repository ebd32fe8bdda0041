//! An independent implementation of the formula for tests: dense T×T arithmetic in float64 from the fields of a variant. It shares no
//! computation with the crate. Denominators can be held constant, as `detached` requires for central differences.
//!
//! [`recurrent`] replaces the sums over pairs by the recurrence of `naive::recurrence`.

use termwise_attention::naive::recurrence::{PolynomialKernel, Recurrence, RecurrenceInput};
use termwise_attention::parts::gate::{OutGate, PostGate};
use termwise_attention::parts::kernel::taylor::{Coefficients, Taylor};
use termwise_attention::{AuxKind, Decay, Denominator, Kernel, KeyRange, Map, Norm, QkNorm, ScoreFn, Shape, Variant};

use super::{Case, Name};

pub struct Output {
    pub y: Vec<f64>,
    /// D_t before it divides, [B, H, T].
    pub denominators: Vec<f64>,
    /// The smallest |Σ w| / Σ |w| among rows with a sum denominator: the degree of cancellation.
    pub steadiness: f64,
}

/// y of a case; if `frozen` is given, rows with a detached denominator are divided by it.
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

/// y of the recurrence and its condition number.
pub struct RecurrentOutput {
    pub y: Vec<f64>,
    /// The largest ratio of sums over absolute values of monomials to the sums themselves: the amplification of rounding errors.
    pub condition: f64,
}

/// y by one recurrent network per order; `None` if the recurrence does not support the variant of some head.
pub fn recurrent(case: &Case<f64>) -> Option<RecurrentOutput> {
    let Shape { batch, time, heads, e, .. } = case.shape;
    let mut output = RecurrentOutput { y: vec![0.0; case.dy.len()], condition: 1.0 };
    let absolute = |x: &[f64]| x.iter().map(|x| x.abs()).collect::<Vec<f64>>();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        let head = Head::new(case, b, h);
        let kernel = head.polynomial()?;
        let d = head.near.q[0].len();
        let terms = kernel.terms.iter().map(|&(n, a)| (n, a.abs())).collect();
        let mut magnitudes = Recurrence::new(PolynomialKernel { terms, scale: kernel.scale.abs(), key_scale: 0.0 }, d, e);
        let mut recurrence = Recurrence::new(kernel, d, e);
        for t in 0..head.length {
            let (q, k) = (&head.near.q[t], &head.near.k[t]);
            let v: Vec<f64> = head.v[t].iter().map(|v| v * head.in_gate[t] * head.key_weight(t)).collect();
            let decay = if t == 0 { 1.0 } else { head.decay_by_head(t, t - 1) };
            let (sums, z) = recurrence.step(RecurrenceInput { q, k, v: &v, decay, beta: head.beta.get(t).copied() });
            let token = RecurrenceInput { q: &absolute(q), k: &absolute(k), v: &absolute(&v), decay, beta: None };
            let (_, magnitude) = magnitudes.step(token);
            output.condition = output.condition.max(magnitude / z.abs());
            let row = head.finish(t, sums, (z, z.abs()), None, &mut 0.0, &mut 1.0);
            output.y[((b * time + t) * heads + h) * e..][..e].copy_from_slice(&row);
        }
    }
    Some(output)
}

type Matrix = Vec<Vec<f64>>;

/// q and k of the near or the far branch.
struct KeyTransform {
    weighing: ScoreFn,
    range: KeyRange,
    q: Matrix,
    k: Matrix,
}

struct Head<'a> {
    case: &'a Case<f64>,
    variant: &'a Variant,
    head: usize,
    kv_head: usize,
    length: usize,
    near: KeyTransform,
    far: Option<KeyTransform>,
    /// Values after the convolution.
    v: Matrix,
    /// β_t of the delta rule, else empty.
    beta: Vec<f64>,
    /// The written values: v, or u of the delta rule.
    u: Matrix,
    in_gate: Vec<f64>,
    out_gate: Vec<f64>,
    /// [length, 1 or e]
    post_gate: Matrix,
    /// [length, 1 or channels]
    decay: Matrix,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.exp().ln_1p()
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl<'a> Head<'a> {
    fn new(case: &'a Case<f64>, b: usize, h: usize) -> Self {
        let Shape { time, heads, kv_heads, d, e, .. } = case.shape;
        let variant = &case.heads[h];
        let length = case.lengths.as_ref().map_or(time, |lengths| lengths[b]);
        let g = h * kv_heads / heads;
        let signals = |aux: AuxKind, heads: usize, h: usize, dim: usize| -> Matrix {
            let row = |t: usize| case.get(Name::aux(aux))[((b * time + t) * heads + h) * dim..][..dim].to_vec();
            (0..length).map(row).collect()
        };
        let signal = |aux: AuxKind, heads: usize, h: usize| signals(aux, heads, h, 1).concat();
        let tensor = |name: Name, conv: AuxKind, heads: usize, h: usize, dim: usize| -> Matrix {
            let x = case.get(name);
            let at = |t: usize, i: usize| x[((b * time + t) * heads + h) * dim + i];
            let filtered = |t: usize, i: usize| match variant.conv {
                None => at(t, i),
                Some(width) => {
                    let taps = &case.get(Name::aux(conv))[(h * dim + i) * width..][..width];
                    let sum: f64 = (0..width.min(t + 1)).map(|back| taps[width - 1 - back] * at(t - back, i)).sum();
                    sum * sigmoid(sum)
                }
            };
            (0..length).map(|t| (0..dim).map(|i| filtered(t, i)).collect()).collect()
        };
        let qk = |name: Name, conv: AuxKind, weight: AuxKind, heads: usize, h: usize| -> Matrix {
            let own = tensor(name, conv, heads, h, d);
            let normed: Matrix = match &variant.qk_norm {
                None => own,
                Some(QkNorm::QkL2(_)) => {
                    own.into_iter().map(|x| x.iter().map(|y| y / product(&x, &x).sqrt().max(1e-12)).collect()).collect()
                }
                Some(QkNorm::QkRms(norm)) => {
                    let others: Vec<Matrix> =
                        if norm.all { (0..heads).map(|h| tensor(name, conv, heads, h, d)).collect() } else { vec![own.clone()] };
                    let rms = |t: usize| {
                        (others.iter().map(|x| product(&x[t], &x[t])).sum::<f64>() / (others.len() * d) as f64 + norm.eps).sqrt()
                    };
                    let weights = &case.get(Name::aux(weight))[if norm.all { h * d } else { 0 }..][..d];
                    own.iter().enumerate().map(|(t, x)| x.iter().zip(weights).map(|(x, w)| w * x / rms(t)).collect()).collect()
                }
            };
            normed.into_iter().enumerate().map(|(t, x)| rotated(case, variant, t, x)).collect()
        };
        let q = qk(Name::Q, AuxKind::ConvQ, AuxKind::QNorm, heads, h);
        let k = qk(Name::K, AuxKind::ConvK, AuxKind::KNorm, kv_heads, g);
        let class = |weighing: ScoreFn, range: KeyRange| {
            let of = |aux: AuxKind| case.get(Name::AuxTensor(aux.of(range)));
            let features = |x: &Matrix, dims: AuxKind, weight: AuxKind, bias: AuxKind, h: usize| -> Matrix {
                let projected = |x: &Vec<f64>| match weighing.dim {
                    None => x.clone(),
                    Some(dim) => of(dims)[h * dim * d..][..dim * d].chunks(d).map(|row| product(row, x)).collect(),
                };
                x.iter().map(projected).map(|x| map(&weighing.kernel, x, |i| (of(weight), of(bias), h, i))).collect()
            };
            KeyTransform {
                q: features(&q, AuxKind::DimQ, AuxKind::FeatureQ, AuxKind::FeatureQBias, h),
                k: features(&k, AuxKind::DimK, AuxKind::FeatureK, AuxKind::FeatureKBias, g),
                weighing: weighing.clone(),
                range,
            }
        };
        let near = class(variant.near.clone(), KeyRange::Near);
        let ones = vec![1.0; length];
        let out_gate: Vec<f64> = match variant.out_gate {
            None => ones.clone(),
            Some(OutGate::Sigmoid(_)) => signal(AuxKind::OutGate, heads, h).into_iter().map(sigmoid).collect(),
            Some(OutGate::Cumulative(_)) => {
                let g = signal(AuxKind::OutGate, heads, h);
                (0..length).map(|t| 1.0 / g[..=t].iter().map(|g| g.exp()).sum::<f64>().max(1.0)).collect()
            }
        };
        let post = |channel: bool, f: fn(f64) -> f64| -> Matrix {
            let gates = signals(AuxKind::PostGate, heads, h, if channel { e } else { 1 });
            gates.into_iter().map(|row| row.into_iter().map(f).collect()).collect()
        };
        let channels = if variant.decay.as_ref().is_some_and(|decay| decay.by_channel()) { near.q[0].len() } else { 1 };
        // c_t as a sum of steps up to and including t; the published decay is shifted by one step.
        let steps: Matrix = match &variant.decay {
            None => vec![vec![0.0]; length],
            Some(Decay::FixedDecay(_)) => vec![vec![(1.0 - 0.5f64.powi(5 + h as i32)).ln()]; length],
            Some(decay) => {
                let rate = || case.get(Name::aux(AuxKind::DecayRate))[h].exp();
                let step = |x: f64| match decay {
                    Decay::LinearDecay(_) => x / 1024.0,
                    Decay::SoftplusDecay(_) => -softplus(x),
                    Decay::SigmoidDecay(part) => sigmoid(x).ln() / part.divisor,
                    Decay::MambaDecay(_) => -rate() * softplus(x),
                    Decay::FixedDecay(_) | Decay::GivenDecay(_) => x,
                };
                signals(AuxKind::DecayGate, heads, h, channels).into_iter().map(|row| row.into_iter().map(step).collect()).collect()
            }
        };
        let late = matches!(variant.decay, Some(Decay::LinearDecay(_))) as usize;
        let decay = (0..length).map(|t| (0..channels).map(|i| steps[..t + 1 - late].iter().map(|row| row[i]).sum()).collect()).collect();
        let v = tensor(Name::V, AuxKind::ConvV, kv_heads, g, e);
        let beta = variant
            .write
            .map_or(Vec::new(), |delta| signal(AuxKind::Beta, kv_heads, g).into_iter().map(|beta| delta.range * sigmoid(beta)).collect());
        let mut head = Head {
            case,
            variant,
            head: h,
            kv_head: g,
            length,
            near,
            far: variant.far.clone().map(|far| class(far, KeyRange::Far)),
            u: v.clone(),
            v,
            beta,
            in_gate: match variant.in_gate {
                Some(_) => signal(AuxKind::InGate, kv_heads, g).into_iter().map(sigmoid).collect(),
                None => ones.clone(),
            },
            post_gate: match &variant.post_gate {
                Some(PostGate::PostSigmoid(gate)) => post(gate.channel, sigmoid),
                Some(PostGate::Silu(gate)) => post(gate.channel, |x| x * sigmoid(x)),
                Some(PostGate::Shared(_)) => out_gate.iter().map(|&gate| vec![gate]).collect(),
                None => vec![vec![1.0]; length],
            },
            out_gate,
            decay,
        };
        if let Some(delta) = variant.write {
            for t in 0..length {
                for s in 0..t {
                    let x = head.bounded(&head.near, delta.scale * head.decayed(&head.near.k[t], &head.near.k[s], t, s));
                    let weight = head.kernel(&head.near, x) * head.decay_by_head(t, s);
                    for i in 0..e {
                        head.u[t][i] -= weight * head.u[s][i];
                    }
                }
                let beta = head.beta[t];
                head.u[t].iter_mut().for_each(|u| *u *= beta);
            }
        }
        head
    }

    fn by_channel(&self) -> bool {
        self.variant.decay.as_ref().is_some_and(|decay| decay.by_channel())
    }

    fn decay_by_head(&self, t: usize, s: usize) -> f64 {
        if self.by_channel() { 1.0 } else { (self.decay[t][0] - self.decay[s][0]).exp() }
    }

    /// a·b, decayed per channel from s to t.
    fn decayed(&self, a: &[f64], b: &[f64], t: usize, s: usize) -> f64 {
        let m = |i: usize| if self.by_channel() { (self.decay[t][i] - self.decay[s][i]).exp() } else { 1.0 };
        (0..a.len()).map(|i| a[i] * b[i] * m(i)).sum()
    }

    fn bounded(&self, class: &KeyTransform, x: f64) -> f64 {
        let x = class.weighing.cap.map_or(x, |c| c * (x / c).tanh());
        x.min(class.weighing.clamp.unwrap_or(f64::INFINITY))
    }

    fn kernel(&self, class: &KeyTransform, x: f64) -> f64 {
        match &class.weighing.kernel {
            Kernel::Exp(_) => x.exp(),
            Kernel::Feature(_) => x,
            Kernel::Power(power) => x.powi(power.p as i32),
            Kernel::Taylor(taylor) => {
                let term = |order: usize| (1..=order).map(|i| x / i as f64).product::<f64>();
                (0..taylor.orders().len()).map(|i| self.coefficient(class, taylor, i) * term(taylor.orders()[i])).sum()
            }
        }
    }

    fn is_near(&self, t: usize, s: usize) -> bool {
        self.variant.window.is_none_or(|window| s + window > t) || s < self.variant.sinks.unwrap_or(0)
    }

    /// The branch of key s at position t; `None` if it is not visible.
    fn class(&self, t: usize, s: usize) -> Option<&KeyTransform> {
        if self.is_near(t, s) { Some(&self.near) } else { self.far.as_ref() }
    }

    fn scale(&self, class: &KeyTransform) -> f64 {
        class.weighing.scale.unwrap_or(1.0 / (class.weighing.dim.unwrap_or(self.case.shape.d) as f64).sqrt())
    }

    /// a_n of the i-th order of a Taylor kernel.
    fn coefficient(&self, class: &KeyTransform, taylor: &Taylor, i: usize) -> f64 {
        let aux = AuxKind::Coefficients.of(class.range);
        match taylor.coefficients() {
            Coefficients::Ones => 1.0,
            Coefficients::Given(given) => given[i],
            Coefficients::Learned => self.case.get(Name::aux(aux))[self.head * taylor.orders().len() + i],
        }
    }

    /// The kernel as a polynomial, if the recurrence supports the variant and its tensor powers are small.
    fn polynomial(&self) -> Option<PolynomialKernel> {
        let (variant, near) = (self.variant, &self.near);
        let gated_write = variant.write.is_some() && (variant.in_gate.is_some() || matches!(variant.denominator, Denominator::Position(_)));
        if variant.window.is_some() || near.weighing.clamp.is_some() || near.weighing.cap.is_some() || self.by_channel() || gated_write {
            return None;
        }
        let terms: Vec<(usize, f64)> = match &near.weighing.kernel {
            Kernel::Exp(_) => return None,
            Kernel::Feature(_) => vec![(1, 1.0)],
            Kernel::Power(power) => vec![(power.p as usize, (1..=power.p).map(f64::from).product())],
            Kernel::Taylor(taylor) => taylor.orders().iter().enumerate().map(|(i, &n)| (n, self.coefficient(near, taylor, i))).collect(),
        };
        let rows = |n: usize| near.q[0].len().checked_pow(n as u32).unwrap_or(usize::MAX);
        if terms.iter().any(|&(n, _)| n > 12 || rows(n) > 5000) {
            return None;
        }
        Some(PolynomialKernel { terms, scale: self.scale(near), key_scale: variant.write.map_or(1.0, |delta| delta.scale) })
    }

    /// κ_s of the `position` denominator.
    fn key_weight(&self, s: usize) -> f64 {
        match self.variant.denominator {
            Denominator::Position(_) => self.visible(s).powf(-sigmoid(self.case.get(Name::aux(AuxKind::NormConst))[self.head])),
            _ => 1.0,
        }
    }

    /// M·w of the formula.
    fn weight(&self, t: usize, s: usize) -> f64 {
        let Some(class) = self.class(t, s) else { return 0.0 };
        let x = self.scale(class) * self.decayed(&class.q[t], &class.k[s], t, s);
        self.decay_by_head(t, s) * self.kernel(class, self.bounded(class, x))
    }

    fn visible(&self, t: usize) -> f64 {
        (0..=t).filter(|&s| self.class(t, s).is_some()).count() as f64
    }

    fn row(&self, t: usize, frozen: Option<f64>, denominator: &mut f64, steadiness: &mut f64) -> Vec<f64> {
        let weights: Vec<f64> = (0..=t).map(|s| self.weight(t, s)).collect();
        let mut sums = vec![0.0; self.case.shape.e];
        for (s, w) in weights.iter().enumerate() {
            for (sum, u) in sums.iter_mut().zip(&self.u[s]) {
                *sum += w * self.in_gate[s] * self.key_weight(s) * u;
            }
        }
        let z = (weights.iter().sum(), weights.iter().map(|w| w.abs()).sum());
        self.finish(t, sums, z, frozen, denominator, steadiness)
    }

    /// y_t from U_t, from Σ M·w and from Σ |M·w|.
    fn finish(
        &self,
        t: usize,
        mut sums: Vec<f64>,
        (mut sum, magnitude): (f64, f64),
        frozen: Option<f64>,
        denominator: &mut f64,
        steadiness: &mut f64,
    ) -> Vec<f64> {
        *denominator = match &self.variant.denominator {
            Denominator::Sum(part) => {
                let sink = if part.sink { self.case.get(Name::aux(AuxKind::Sink))[self.head].exp() } else { 0.0 };
                sum += sink;
                let magnitude = magnitude + sink;
                let guarded = sum.max(part.floor.unwrap_or(f64::NEG_INFINITY)) + part.eps.unwrap_or(0.0);
                let steady = guarded.abs() / (magnitude + part.floor.unwrap_or(0.0) + part.eps.unwrap_or(0.0));
                // `min` would ignore NaN.
                *steadiness = if steady >= *steadiness { *steadiness } else { steady };
                match (part.detached, frozen) {
                    (true, Some(frozen)) => frozen,
                    _ => guarded,
                }
            }
            Denominator::Length(_) => self.visible(t),
            Denominator::NoDenominator(_) | Denominator::Position(_) => 1.0,
        };
        sums.iter_mut().for_each(|sum| *sum *= self.out_gate[t] / *denominator);
        let mut y = self.normed(&sums);
        y.iter_mut().zip(self.post_gate[t].iter().cycle()).for_each(|(y, gate)| *y *= gate);
        y
    }

    fn normed(&self, x: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let parameter = |aux| self.case.get(Name::aux(aux));
        let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
        match self.variant.norm {
            Norm::NoNorm(_) => x.to_vec(),
            Norm::L2(_) => x.iter().map(|x| x / norm.max(1e-12)).collect(),
            Norm::ScaledL2(_) => x.iter().map(|x| n * x / norm.max(1e-12)).collect(),
            Norm::Rms(_) => {
                let rms = (norm * norm / n + 1.1920929e-7).sqrt();
                x.iter().zip(parameter(AuxKind::NormWeight)).map(|(x, w)| w * x / rms).collect()
            }
            Norm::Layer(_) => {
                let mean = x.iter().sum::<f64>() / n;
                let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + 1e-5).sqrt();
                let parameters = parameter(AuxKind::NormWeight).iter().zip(parameter(AuxKind::NormBias));
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

/// φ(x); `learned(i)` returns the weights and biases of all heads, the head and i.
fn map<'a>(kernel: &Kernel, x: Vec<f64>, learned: impl Fn(usize) -> (&'a [f64], &'a [f64], usize, usize)) -> Vec<f64> {
    let Kernel::Feature(feature) = kernel else { return x };
    let (norm, n) = (product(&x, &x).sqrt(), x.len());
    if feature.map == Map::Hedgehog {
        let logit = |i: usize| {
            let (weight, bias, h, i) = learned(i);
            2.0 * (product(&weight[(h * n + i) * n..][..n], &x) + bias[h * n + i])
        };
        let logits: Vec<f64> = (0..n).map(logit).chain((0..n).map(|i| -logit(i))).collect();
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        return logits.iter().map(|x| x.exp() / sum).collect();
    }
    x.into_iter()
        .map(|x| match feature.map {
            Map::Identity | Map::Hedgehog => x,
            Map::Elu if x > 0.0 => x + 1.0,
            Map::Elu => x.exp(),
            Map::Relu => x.max(0.0),
            Map::L2 => x / norm.max(1e-12),
        })
        .collect()
}
