//! An attention layer with all inputs of a call, and functions that run an engine on it.

use std::fmt;

use serde::Serialize;
use termwise_attention::{
    Attention, AuxKind, AuxTensor, AuxTensors, Decay, Error, Fused, FusedOptions, Grads, Inputs, Layer as Planned, Real, Reference, Report,
    Rope, Shape, State, Variant,
};

use termwise_base::rng::Rng;

/// A tensor that has a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// A gate signal or parameter.
    AuxTensor(AuxTensor),
}

impl Name {
    /// The name of an auxiliary tensor.
    pub fn aux(aux: impl Into<AuxTensor>) -> Name {
        Name::AuxTensor(aux.into())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Name::Q => "q",
            Name::K => "k",
            Name::V => "v",
            Name::AuxTensor(AuxTensor { kind: AuxKind::ConvQ, .. }) => "conv of q",
            Name::AuxTensor(AuxTensor { kind: AuxKind::ConvK, .. }) => "conv of k",
            Name::AuxTensor(AuxTensor { kind: AuxKind::ConvV, .. }) => "conv of v",
            Name::AuxTensor(aux) => return f.write_str(&aux.to_string().replace('_', " ")),
        })
    }
}

/// Values by name; q, k and v come first.
pub type Tensors<R> = Vec<(Name, Vec<R>)>;

/// The output of a layer, the statistics of the forward pass, and all gradients.
#[derive(Clone, Debug)]
pub struct Results<R> {
    /// [B, T, H, e]
    pub y: Vec<R>,
    /// Statistics of the forward pass.
    pub report: Report,
    /// Gradients of Σ y·dy, in the order of the tensors.
    pub gradients: Tensors<R>,
}

/// A layer, its inputs, and the output gradient dy.
#[derive(Clone, Debug)]
pub struct Layer<R> {
    /// One variant per head.
    pub heads: Vec<Variant>,
    /// Sizes.
    pub shape: Shape,
    /// q, k, v and the auxiliary inputs of the variants.
    pub tensors: Tensors<R>,
    /// Lengths of the batch rows; default: the full length.
    pub lengths: Option<Vec<usize>>,
    /// Rotary frequencies.
    pub rope: Rope,
    /// [B, T, H, e]
    pub dy: Vec<R>,
}

impl<R: Real> Layer<R> {
    /// Standard normal inputs, with q `spread` times as large, gates around zero and norms around their start.
    pub fn random(heads: &[Variant], shape: Shape, spread: f64, rng: &mut Rng) -> Result<Layer<R>, Error> {
        let Shape { batch, time, heads: h, kv_heads: g, d, e } = shape;
        let rows = batch * time;
        let mut normals = |n: usize, mean: f64, spread: f64| (0..n).map(|_| R::of(mean + spread * rng.normal())).collect::<Vec<R>>();
        let rope = Rope::new(d, 100.0, None)?;
        let planned = plan(heads, &shape, &rope)?;
        let mut tensors = vec![
            (Name::Q, normals(rows * h * d, 0.0, spread)),
            (Name::K, normals(rows * g * d, 0.0, 1.0)),
            (Name::V, normals(rows * g * e, 0.0, 1.0)),
        ];
        for spec in planned.aux_specs() {
            let n = spec.values(rows);
            let (mean, spread) = match spec.aux.kind {
                AuxKind::NormWeight | AuxKind::Coefficients | AuxKind::QNorm | AuxKind::KNorm => (1.0, 0.3),
                // A given decay is the log of the decay factor per step.
                AuxKind::DecayGate if heads.iter().any(|head| matches!(head.decay, Some(Decay::GivenDecay(_)))) => (-0.3, 0.2),
                AuxKind::DecayRate => (-1.0, 0.3),
                AuxKind::NormBias => (0.0, 0.3),
                AuxKind::ConvQ | AuxKind::ConvK | AuxKind::ConvV => (0.4, 0.6),
                _ => (0.0, 1.0),
            };
            tensors.push((Name::AuxTensor(spec.aux), normals(n, mean, spread)));
        }
        let dy = normals(rows * h * e, 0.0, 1.0);
        Ok(Layer { heads: heads.to_vec(), shape, tensors, lengths: None, rope, dy })
    }

    /// The same variant in every head; `dim` is limited to the head dimension.
    pub fn uniform(variant: &Variant, shape: Shape, spread: f64, rng: &mut Rng) -> Result<Layer<R>, Error> {
        let mut variant = variant.clone();
        variant.near.dim = variant.near.dim.map(|dim| dim.min(shape.d));
        Layer::random(&vec![variant; shape.heads], shape, spread, rng)
    }

    /// The same values in another type.
    pub fn cast<S: Real>(&self) -> Layer<S> {
        let cast = |x: &[R]| x.iter().map(|x| S::of(x.wide())).collect::<Vec<S>>();
        Layer {
            heads: self.heads.clone(),
            shape: self.shape,
            tensors: self.tensors.iter().map(|(name, x)| (*name, cast(x))).collect(),
            lengths: self.lengths.clone(),
            rope: self.rope.clone(),
            dy: cast(&self.dy),
        }
    }

    /// A tensor of the layer, if it has it.
    pub fn get(&self, name: Name) -> Option<&[R]> {
        self.tensors.iter().find(|(other, _)| *other == name).map(|(_, values)| &values[..])
    }

    /// A mutable tensor of the layer, if it has it.
    pub fn get_mut(&mut self, name: Name) -> Option<&mut [R]> {
        self.tensors.iter_mut().find(|(other, _)| *other == name).map(|(_, values)| &mut values[..])
    }

    /// The layer as engines read it.
    pub fn inputs(&self) -> Inputs<'_, R> {
        let mut extras = AuxTensors::default();
        for (name, values) in &self.tensors {
            if let Name::AuxTensor(extra) = name {
                extras.set(*extra, &values[..]);
            }
        }
        let tensor = |index: usize| &self.tensors[index].1[..];
        Inputs::new(tensor(0), tensor(1), tensor(2)).with_aux(extras).lengths(self.lengths.as_deref())
    }

    /// The layer as a value.
    pub fn planned(&self) -> Result<Planned, Error> {
        plan(&self.heads, &self.shape, &self.rope)
    }

    /// Its naive engine.
    pub fn naive(&self) -> Result<Reference<R>, Error> {
        self.planned()?.naive(self.shape.batch, self.shape.time)
    }

    /// Its fused engine.
    pub fn fused(&self, options: FusedOptions) -> Result<Fused, Error> {
        self.planned()?.fused_with(self.shape.batch, self.shape.time, options)
    }

    /// Its empty state.
    pub fn state(&self) -> Result<State, Error> {
        self.planned()?.state(self.shape.batch)
    }

    /// Only position t.
    fn token(&self, t: usize) -> Layer<R> {
        let Shape { batch, time, .. } = self.shape;
        let cut = |x: &[R]| {
            let width = x.len() / (batch * time);
            (0..batch).flat_map(|b| &x[(b * time + t) * width..][..width]).copied().collect::<Vec<R>>()
        };
        let own = |(name, x): &(Name, Vec<R>)| match name {
            Name::AuxTensor(extra) if !extra.is_gate_logits() => (*name, x.clone()),
            _ => (*name, cut(x)),
        };
        Layer { shape: Shape { time: 1, ..self.shape }, tensors: self.tensors.iter().map(own).collect(), dy: cut(&self.dy), ..self.clone() }
    }

    /// y, written over NaN, so values that are not written are detected.
    pub fn forward(&self, engine: &mut impl Attention<R>) -> Result<(Vec<R>, Report), Error> {
        let mut y = vec![R::nan(); self.dy.len()];
        let report = engine.infer(&self.inputs(), &mut y)?;
        Ok((y, report))
    }

    /// y and the gradients of Σ y·dy.
    pub fn run(&self, engine: &mut impl Attention<R>) -> Result<Results<R>, Error> {
        let mut y = vec![R::nan(); self.dy.len()];
        let saved = engine.forward(&self.inputs(), &mut y)?;
        let mut gradients = self.no_gradients();
        engine.backward(&self.inputs(), &saved, &self.dy, &mut grads(&mut gradients))?;
        Ok(Results { y, report: saved.report(), gradients })
    }

    /// Zero gradients of all tensors.
    pub fn no_gradients(&self) -> Tensors<R> {
        self.tensors.iter().map(|(name, x)| (*name, vec![R::zero(); x.len()])).collect()
    }

    /// The distinct variant strings.
    pub fn text(&self) -> String {
        let mut texts: Vec<String> = self.heads.iter().map(Variant::to_string).collect();
        texts.dedup();
        texts.join(" | ")
    }
}

impl Layer<f32> {
    /// y computed token by token with the recurrent state.
    pub fn token_by_token(&self) -> Result<Vec<f32>, Error> {
        let Shape { batch, time, heads, e, .. } = self.shape;
        let (mut state, width) = (self.state()?, heads * e);
        let mut y = vec![f32::NAN; self.dy.len()];
        for t in 0..time {
            let mut row = vec![f32::NAN; batch * width];
            state.step(&self.token(t).inputs(), &mut row)?;
            (0..batch).for_each(|b| y[(b * time + t) * width..][..width].copy_from_slice(&row[b * width..][..width]));
        }
        Ok(y)
    }
}

/// Gradient tensors in the form that engines accumulate into.
pub fn grads<R>(tensors: &mut Tensors<R>) -> Grads<'_, R> {
    let (first, others) = tensors.split_at_mut(3);
    let [(_, q), (_, k), (_, v)] = first else { unreachable!("q, k and v come first") };
    let mut extras = AuxTensors::default();
    for (name, values) in others {
        if let Name::AuxTensor(extra) = name {
            extras.set(*extra, &mut values[..]);
        }
    }
    Grads::new(q, k, v).with_aux(extras)
}

fn plan(heads: &[Variant], shape: &Shape, rope: &Rope) -> Result<Planned, Error> {
    Planned::new(shape.heads, shape.kv_heads, shape.d).value_dim(shape.e).rope(rope.clone()).heads(heads)
}

/// A shape in the symbols of the legend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sizes {
    /// Batch rows, B.
    pub batch: usize,
    /// Positions, T.
    pub time: usize,
    /// Query heads, H.
    pub heads: usize,
    /// KV heads, G.
    pub kv_heads: usize,
    /// Head dimension of q and k, d.
    pub d: usize,
    /// Head dimension of v, e.
    pub e: usize,
}

impl From<Shape> for Sizes {
    fn from(Shape { batch, time, heads, kv_heads, d, e }: Shape) -> Sizes {
        Sizes { batch, time, heads, kv_heads, d, e }
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { batch, time, heads, kv_heads, d, e } = self;
        write!(f, "B{batch} T{time} H{heads} G{kv_heads} d{d} e{e}")
    }
}
