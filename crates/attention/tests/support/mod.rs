//! Test cases: a layer of variants with random inputs, and functions that run an engine on them.
#![allow(dead_code, reason = "each test binary uses some of it")]

pub mod combos;
pub mod oracle;

use std::sync::{RwLock, RwLockReadGuard};

use termwise_attention::simd::{self, Isa};
use termwise_attention::{
    Attention, AuxKind, AuxTensor, AuxTensors, Decay, Error, Fused, FusedOptions, Grads, Inputs, Layer, Mode, Nonpositive, Real, Reference,
    Report, Rope, Saved, Scratch, Shape, State, StateKind, Variant,
};

/// The instruction set is a setting of the whole process.
static ISA: RwLock<()> = RwLock::new(());

/// Keeps the instruction set fixed while the guard exists, for tests that compare bits.
pub fn same_isa() -> RwLockReadGuard<'static, ()> {
    ISA.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs with each instruction set of this machine while no other test requires a fixed one.
pub fn on_every_isa(mut run: impl FnMut(Isa)) {
    struct Before(Isa);
    impl Drop for Before {
        fn drop(&mut self) {
            simd::choose(self.0);
        }
    }
    let _guard = ISA.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    let _before = Before(simd::isa());
    for isa in Isa::available() {
        assert!(simd::choose(isa));
        run(isa);
    }
}

/// The SplitMix64 generator.
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1).
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}

/// A tensor that has a gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Name {
    Q,
    K,
    V,
    AuxTensor(AuxTensor),
}

impl Name {
    pub fn aux(aux: impl Into<AuxTensor>) -> Name {
        Name::AuxTensor(aux.into())
    }
}

/// Named tensors; q, k and v come first.
pub type Tensors<R> = Vec<(Name, Vec<R>)>;

/// A layer of variants with all inputs of one call.
#[derive(Clone)]
pub struct Case<R> {
    pub heads: Vec<Variant>,
    pub shape: Shape,
    pub tensors: Tensors<R>,
    pub lengths: Option<Vec<usize>>,
    pub rope: Rope,
    pub dy: Vec<R>,
}

impl<R: Real> Case<R> {
    /// Standard normal inputs; q has standard deviation `spread`.
    pub fn random(heads: &[Variant], shape: Shape, lengths: Option<Vec<usize>>, spread: f64, rng: &mut Rng) -> Case<R> {
        let Shape { batch, time, heads: h, kv_heads: g, d, e } = shape;
        let rows = batch * time;
        let mut normals = |n: usize, mean: f64, spread: f64| (0..n).map(|_| R::of(mean + spread * rng.normal())).collect::<Vec<R>>();
        let mut tensors = vec![
            (Name::Q, normals(rows * h * d, 0.0, spread)),
            (Name::K, normals(rows * g * d, 0.0, 1.0)),
            (Name::V, normals(rows * g * e, 0.0, 1.0)),
        ];
        for spec in planned(heads, &shape).expect("a possible layer").aux_specs() {
            let n = spec.values(rows);
            let (mean, spread) = match spec.aux.kind {
                AuxKind::NormWeight | AuxKind::Coefficients | AuxKind::QNorm | AuxKind::KNorm => (1.0, 0.3),
                AuxKind::NormBias => (0.0, 0.3),
                // A given decay is the log of the factor per step.
                AuxKind::DecayGate if heads.iter().any(|head| matches!(head.decay, Some(Decay::GivenDecay(_)))) => (-0.3, 0.2),
                AuxKind::DecayRate => (-1.0, 0.3),
                AuxKind::ConvQ | AuxKind::ConvK | AuxKind::ConvV => (0.4, 0.6),
                _ => (0.0, 1.0),
            };
            tensors.push((Name::AuxTensor(spec.aux), normals(n, mean, spread)));
        }
        let dy = normals(rows * h * e, 0.0, 1.0);
        Case { heads: heads.to_vec(), shape, tensors, lengths, rope: Rope::new(d, 100.0, None).expect("a possible theta"), dy }
    }

    /// The same values in another type.
    pub fn cast<S: Real>(&self) -> Case<S> {
        let cast = |x: &[R]| x.iter().map(|x| S::of(x.wide())).collect::<Vec<S>>();
        Case {
            heads: self.heads.clone(),
            shape: self.shape,
            tensors: self.tensors.iter().map(|(name, x)| (*name, cast(x))).collect(),
            lengths: self.lengths.clone(),
            rope: self.rope.clone(),
            dy: cast(&self.dy),
        }
    }

    pub fn get(&self, name: Name) -> &[R] {
        &self.tensors.iter().find(|(other, _)| *other == name).unwrap_or_else(|| panic!("{name:?} is not part of the case")).1
    }

    pub fn get_mut(&mut self, name: Name) -> &mut Vec<R> {
        &mut self.tensors.iter_mut().find(|(other, _)| *other == name).unwrap_or_else(|| panic!("{name:?} is not part of the case")).1
    }

    pub fn inputs(&self) -> Inputs<'_, R> {
        let mut aux_tensors = AuxTensors::default();
        for (name, values) in &self.tensors {
            if let Name::AuxTensor(aux) = name {
                aux_tensors.set(*aux, &values[..]);
            }
        }
        let (q, k, v) = (self.get(Name::Q), self.get(Name::K), self.get(Name::V));
        Inputs::new(q, k, v).with_aux(aux_tensors).lengths(self.lengths.as_deref())
    }

    pub fn layer(&self) -> Layer {
        let Shape { heads, kv_heads, d, e, .. } = self.shape;
        let sizes = Layer::new(heads, kv_heads, d).value_dim(e).rope(self.rope.clone());
        sizes.heads(&self.heads).unwrap_or_else(|error| panic!("{self}: {error}"))
    }

    pub fn naive(&self) -> Reference<R> {
        self.layer().naive(self.shape.batch, self.shape.time).unwrap_or_else(|error| panic!("{self}: {error}"))
    }

    pub fn fused(&self, mode: Mode, scratch: &Scratch) -> Result<Fused, Error> {
        self.layer().fused_with(self.shape.batch, self.shape.time, FusedOptions::default().mode(mode).scratch(scratch))
    }

    pub fn continuing(&self, memory: StateKind, mode: Mode, scratch: &Scratch) -> Result<Fused, Error> {
        let options = FusedOptions::default().mode(mode).scratch(scratch).continues(memory);
        self.layer().fused_with(self.shape.batch, self.shape.time, options)
    }

    pub fn state(&self, memory: StateKind) -> State {
        self.layer().state_with(self.shape.batch, memory).unwrap_or_else(|error| panic!("{self}: {error}"))
    }

    /// y, computed into a buffer of NaN.
    pub fn forward(&self, engine: &mut (impl Attention<R> + ?Sized)) -> (Vec<R>, Report) {
        let mut y = vec![R::nan(); self.dy.len()];
        let report = engine.infer(&self.inputs(), &mut y).unwrap_or_else(|error| panic!("{self}: {error}"));
        (y, report)
    }

    /// The gradients of Σ y·dy, added to zeros.
    pub fn backward(&self, engine: &mut (impl Attention<R> + ?Sized)) -> Tensors<R> {
        self.backward_onto(engine, R::zero())
    }

    /// The gradients of Σ y·dy, added to `start` everywhere.
    pub fn backward_onto(&self, engine: &mut (impl Attention<R> + ?Sized), start: R) -> Tensors<R> {
        let mut y = vec![R::nan(); self.dy.len()];
        let saved = engine.forward(&self.inputs(), &mut y).unwrap_or_else(|error| panic!("{self}: {error}"));
        self.add_gradients(engine, &saved, start)
    }

    /// The gradients of Σ y·dy after a forward pass.
    pub fn backward_from(&self, engine: &mut (impl Attention<R> + ?Sized), saved: &Saved) -> Tensors<R> {
        self.add_gradients(engine, saved, R::zero())
    }

    fn add_gradients(&self, engine: &mut (impl Attention<R> + ?Sized), saved: &Saved, start: R) -> Tensors<R> {
        let mut gradients = self.tensors_of(start);
        let mut grads = grads_of(&mut gradients);
        engine.backward(&self.inputs(), saved, &self.dy, &mut grads).unwrap_or_else(|error| panic!("{self}: {error}"));
        gradients
    }

    /// Tensors of the same shapes, filled with one value.
    pub fn tensors_of(&self, value: R) -> Tensors<R> {
        self.tensors.iter().map(|(name, x)| (*name, vec![value; x.len()])).collect()
    }
}

/// Gradients that are written to these tensors.
pub fn grads_of<R: Real>(tensors: &mut Tensors<R>) -> Grads<'_, R> {
    let mut slices = tensors.iter_mut();
    let mut next = || slices.next().map(|(_, x)| &mut x[..]).expect("q, k and v come first");
    let (q, k, v) = (next(), next(), next());
    let mut aux_tensors = AuxTensors::default();
    for (name, values) in slices {
        if let Name::AuxTensor(aux) = name {
            aux_tensors.set(*aux, &mut values[..]);
        }
    }
    Grads::new(q, k, v).with_aux(aux_tensors)
}

impl<R> std::fmt::Display for Case<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut texts: Vec<String> = self.heads.iter().map(|variant| variant.to_string()).collect();
        texts.dedup();
        write!(f, "[{}] {:?} lengths {:?}", texts.join(" | "), self.shape, self.lengths)
    }
}

/// Position t as a case with one position.
pub fn token(case: &Case<f32>, t: usize) -> Case<f32> {
    let Shape { batch, time, heads, e, .. } = case.shape;
    let mut one = case.clone();
    one.shape.time = 1;
    one.lengths = case.lengths.as_ref().map(|lengths| lengths.iter().map(|&length| (t < length) as usize).collect());
    let cut = |x: &[f32]| {
        let width = x.len() / (batch * time);
        (0..batch).flat_map(|b| &x[(b * time + t) * width..][..width]).copied().collect::<Vec<f32>>()
    };
    for (name, x) in &mut one.tensors {
        if !matches!(name, Name::AuxTensor(aux) if !aux.is_gate_logits()) {
            *x = cut(x);
        }
    }
    one.dy = vec![0.0; batch * heads * e];
    one
}

/// Runs a state over a case token by token; rows stop at their length.
pub fn stepped(case: &Case<f32>, state: &mut State) -> (Vec<f32>, Report) {
    let Shape { batch, time, heads, e, .. } = case.shape;
    let mut y = vec![0.0; case.dy.len()];
    let mut first: Option<Nonpositive> = None;
    for t in 0..time {
        let mut row = vec![f32::NAN; batch * heads * e];
        let report = state.step(&token(case, t).inputs(), &mut row).unwrap_or_else(|error| panic!("{case}: {error}"));
        for b in 0..batch {
            y[(b * time + t) * heads * e..][..heads * e].copy_from_slice(&row[b * heads * e..][..heads * e]);
        }
        let at = |n: &Nonpositive| (n.row, n.head, n.position);
        if let Some(found) = report.nonpositive {
            assert_eq!(found.position, t);
            if first.as_ref().is_none_or(|first| at(&found) < at(first)) {
                first = Some(found);
            }
        }
    }
    for b in 0..batch {
        assert_eq!(state.position(b), Some(case.lengths.as_ref().map_or(time, |lengths| lengths[b])));
    }
    let mut report = Report::default();
    report.nonpositive = first;
    (y, report)
}

pub fn shape(batch: usize, time: usize, heads: usize, kv_heads: usize, d: usize, e: usize) -> Shape {
    Shape { batch, time, heads, kv_heads, d, e }
}

/// A layer of these heads with the RoPE of all cases.
pub fn planned(heads: &[Variant], shape: &Shape) -> Result<Layer, Error> {
    let rope = Rope::new(shape.d, 100.0, None)?;
    Layer::new(shape.heads, shape.kv_heads, shape.d).value_dim(shape.e).rope(rope).heads(heads)
}

/// An empty state of such a layer.
pub fn state_of(heads: &[Variant], shape: &Shape, memory: StateKind) -> Result<State, Error> {
    planned(heads, shape)?.state_with(shape.batch, memory)
}

/// The same variant for every head. A preset's `dim` may be more than the head dimension of a test.
pub fn layer(text: &str, shape: &Shape) -> Vec<Variant> {
    let mut variant: Variant = text.parse().unwrap_or_else(|error| panic!("{error}"));
    variant.near.dim = variant.near.dim.map(|dim| dim.min(shape.d));
    vec![variant; shape.heads]
}
