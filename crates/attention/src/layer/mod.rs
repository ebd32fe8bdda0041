//! A layer of attention as a value: heads, sizes, RoPE, auxiliary inputs, and the heads that share keys and states. It is validated
//! and planned once; all engines use it.

mod aux_tensors;
mod features;
mod gates;
mod rows;
mod state_groups;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use crate::parts::kernel::feature::Map;
use crate::parts::kernel::taylor::MAX_ORDER;
use crate::parts::qk_norm::QkNorm;
use crate::parts::quantize::CacheBits;
use crate::parts::write::Delta;
use crate::{AuxKind, AuxTensor, Error, Grads, Inputs, Kernel, KeyRange, Real, Rope, ScoreFn, Shape, Variant};
use termwise_kernels::basis::Basis;
use termwise_kernels::score_rows::Rescale;

pub use crate::layer::aux_tensors::{AuxSource, AuxSpec, Init};
pub(crate) use crate::layer::features::{FeatureGrads, Features};
pub(crate) use crate::layer::gates::{GateInputs, gather};
pub(crate) use crate::layer::rows::{HeadRows, QkvTensor, RowSources, channels_last};
pub use crate::layer::state_groups::StateKind;
pub(crate) use crate::layer::state_groups::{CacheLayout, StateGroup, StatePlan};

/// A layer of attention. Clones are cheap: they share the plan.
///
/// ```
/// use termwise_attention::{Inputs, Layer, Rope};
///
/// let layer = Layer::new(4, 2, 8).rope(Rope::new(8, 10_000.0, None)?).variant("taylor=0..4 norm=l2")?;
/// let mut attention = layer.fused(1, 3)?;
/// let (q, kv, mut y) = (vec![0.1; 3 * 4 * 8], vec![0.2; 3 * 2 * 8], vec![0.0; 3 * 4 * 8]);
/// attention.infer(&Inputs::new(&q, &kv, &kv), &mut y)?;
/// assert!(y.iter().all(|y| (y - 1.0 / 8f32.sqrt()).abs() < 1e-6));
/// # use termwise_attention::Attention;
/// # Ok::<(), termwise_attention::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Layer {
    plan: Arc<Plan>,
}

#[derive(Debug)]
struct Plan {
    sizes: LayerSizes,
    variants: Vec<Variant>,
    heads: Vec<HeadPlan>,
    far: Vec<Option<HeadPlan>>,
    key_transforms: Vec<KeyTransform>,
    aux_specs: Vec<AuxSpec>,
    natural: StatePlan,
    cache: StatePlan,
    /// Bases requested so far: large ones take memory, and not every engine needs them.
    bases: Mutex<Vec<Arc<Basis>>>,
}

/// The sizes of a [`Layer`], which its variants complete.
#[derive(Clone, Debug)]
#[must_use = "call `.variant(…)` or `.heads(…)` to complete the layer"]
pub struct LayerSizes {
    heads: usize,
    kv_heads: usize,
    d: usize,
    e: usize,
    rope: Option<Rope>,
}

/// The preparation of keys and values. Heads with the same preparation share the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct KeyTransform {
    /// RoPE on q and k.
    pub rope: bool,
    /// Short convolution on q, k and v.
    pub conv: bool,
    /// The layer's norm of q and k.
    pub norm: bool,
    /// φ on q and k.
    pub map: Map,
    /// Index of the head in its group, if its keys have their own decay per channel.
    pub channels: Option<usize>,
    /// Learned features on q and k, before φ.
    pub hedgehog: bool,
    /// q and k are projected to this many dimensions, after RoPE.
    pub dim: Option<usize>,
    /// The bits of stored keys and values, and the number of sinks, which have 16.
    pub bits: Option<(CacheBits, usize)>,
    /// The branch whose tensors it reads; near if it reads none.
    pub range: KeyRange,
    /// Dimension of the scalar product of a score.
    pub width: usize,
    /// Index of the layer's write rule that replaces the values, if there is one.
    pub write: Option<usize>,
}

/// Everything that determines the written values for prepared keys and values.
#[derive(PartialEq)]
struct Writing {
    rule: Delta,
    kernel: Kernel,
    cap: Option<f64>,
    clamp: Option<f64>,
    /// Index of the head in its group, if it has its own decay or learned coefficients.
    own: Option<usize>,
}

impl KeyTransform {
    /// q and k of dimension d, unchanged.
    pub fn plain(d: usize) -> KeyTransform {
        KeyTransform {
            rope: false,
            conv: false,
            norm: false,
            map: Map::Identity,
            channels: None,
            hedgehog: false,
            dim: None,
            bits: None,
            range: KeyRange::Near,
            width: d,
            write: None,
        }
    }

    /// The key transform of a variant for one of its branches.
    fn of(variant: &Variant, score_fn: &ScoreFn, range: KeyRange, d: usize) -> KeyTransform {
        let hedgehog = score_fn.kernel.has_learned_map();
        KeyTransform {
            rope: variant.rope,
            conv: variant.conv.is_some(),
            norm: variant.qk_norm.is_some(),
            map: score_fn.kernel.map(),
            channels: None,
            hedgehog,
            dim: score_fn.dim,
            bits: variant.bits.map(|bits| (bits, variant.sinks.unwrap_or(0))),
            range: if hedgehog || score_fn.dim.is_some() { range } else { KeyRange::Near },
            width: score_fn.score_dim(d),
            write: None,
        }
    }

    /// The tensor of this kind that this transform reads.
    pub fn tensor(&self, kind: AuxKind) -> AuxTensor {
        kind.of(self.range)
    }
}

/// One branch of a head: the score function of its near or far keys. Values that engines read per row are precomputed.
#[derive(Clone, Debug)]
pub(crate) struct HeadPlan {
    /// Its parts.
    pub variant: Variant,
    /// The branch of the variant.
    pub range: KeyRange,
    /// The kernel w.
    pub kernel: Kernel,
    /// Index of its [`KeyTransform`].
    pub key_transform: usize,
    /// The factor of q·k.
    pub scale: f32,
    /// Soft cap of scores.
    pub cap: Option<f32>,
    /// Upper bound of scores.
    pub clamp: f32,
    /// How these weights are rescaled for float32.
    pub rescale: Rescale,
    /// Whether keys have weights: an input gate or a position denominator.
    pub weighs_keys: bool,
    /// Learned coefficients.
    pub learned: usize,
    /// a_n of its polynomial; empty for other kernels. A plan of a call binds learned coefficients here and in [`HeadPlan::kernel`].
    pub coefficients: Vec<f64>,
    /// Whether the sums of the head have a common log scale ρ, since a denominator or norm cancels it.
    pub has_log_scale: bool,
    /// Whether the norm receives ρ, since no denominator cancels it.
    pub norm_reads_scale: bool,
    /// Whether it reads earlier chunks from a state instead of scoring all keys; false outside of the plan of a call.
    pub chunked: bool,
}

impl HeadPlan {
    /// Whether any gate, decay or key weight has to be computed.
    pub fn has_gates(&self) -> bool {
        let v = &self.variant;
        self.weighs_keys || v.out_gate.is_some() || v.post_gate.is_some() || v.decay.is_some()
    }
}

impl LayerSizes {
    /// Sets the dimension e of values, if it differs from d.
    pub fn value_dim(self, e: usize) -> LayerSizes {
        LayerSizes { e, ..self }
    }

    /// Sets the rotary frequencies, for variants with RoPE.
    pub fn rope(self, rope: Rope) -> LayerSizes {
        LayerSizes { rope: Some(rope), ..self }
    }

    /// The layer with the same variant in every head: a variant string, or a [`Variant`].
    pub fn variant<V: TryInto<Variant>>(self, variant: V) -> Result<Layer, Error>
    where
        Error: From<V::Error>,
    {
        let variant = variant.try_into()?;
        // Checked before a list of this length is allocated.
        Shape { batch: 1, time: 1, heads: self.heads, kv_heads: self.kv_heads, d: self.d, e: self.e }.validate()?;
        let heads = vec![variant; self.heads];
        self.plan(heads)
    }

    /// The layer with one variant per head: variant strings, or [`Variant`]s.
    pub fn heads<V: TryInto<Variant>>(self, heads: impl IntoIterator<Item = V>) -> Result<Layer, Error>
    where
        Error: From<V::Error>,
    {
        let heads = heads.into_iter().map(|variant| Ok(variant.try_into()?)).collect::<Result<_, Error>>()?;
        self.plan(heads)
    }

    fn plan(self, variants: Vec<Variant>) -> Result<Layer, Error> {
        let LayerSizes { heads, kv_heads, d, e, .. } = self;
        let shape = Shape { batch: 1, time: 1, heads, kv_heads, d, e };
        shape.validate()?;
        if variants.len() != heads {
            return Err(Error::Shape(format!("{heads} heads but {} variants: give one per head", variants.len())));
        }
        variants.iter().try_for_each(|variant| variant.validate_for(&shape))?;
        if let Some(variant) = variants.iter().find(|variant| variant.rope) {
            match &self.rope {
                Some(rope) if (1..=d / 2).contains(&rope.frequencies().len()) => {}
                Some(rope) => {
                    let found = rope.frequencies().len();
                    return Err(Error::Shape(format!(
                        "{found} rotary frequencies for a head dimension of {d}: give 1 to {}, one per rotated pair of coordinates",
                        d / 2
                    )));
                }
                None => {
                    let reason =
                        "it rotates q and k, and the layer has no rotary frequencies; give them with `.rope(…)`, or write `rope=off`";
                    return Err(Error::Combination { variant: variant.to_string(), reason: reason.into() });
                }
            }
        }
        let aux_specs = aux_tensors::layer_aux_specs(&variants, &shape)?;
        let (mut key_transforms, mut writings): (Vec<KeyTransform>, Vec<Writing>) = (Vec::new(), Vec::new());
        let mut head = |h: usize, variant: &Variant, score_fn: &ScoreFn, range: KeyRange| {
            let write = variant.write.map(|rule| {
                let own = (variant.decay.is_some() || variant.near.learned() > 0).then_some(h % shape.group());
                let writing = Writing { rule, kernel: variant.near.kernel.clone(), cap: variant.near.cap, clamp: variant.near.clamp, own };
                index_of(&mut writings, writing)
            });
            let channels = variant.decays_by_channel().then_some(h % shape.group());
            let index = index_of(&mut key_transforms, KeyTransform { channels, write, ..KeyTransform::of(variant, score_fn, range, d) });
            HeadPlan {
                range,
                key_transform: index,
                scale: score_fn.scale_for(d) as f32,
                cap: score_fn.cap.map(|c| c as f32),
                clamp: score_fn.clamp.map_or(f32::INFINITY, |c| c as f32),
                rescale: if variant.rescale() == Rescale::None { Rescale::None } else { score_fn.kernel.rescale() },
                weighs_keys: variant.in_gate.is_some() || variant.denominator.key_side(),
                learned: score_fn.learned(),
                coefficients: score_fn.kernel.polynomial().into_iter().flatten().map(|(_, a)| a).collect(),
                has_log_scale: variant.rescale() != Rescale::None,
                norm_reads_scale: variant.norm_restores_scale(),
                chunked: false,
                kernel: score_fn.kernel.clone(),
                variant: variant.clone(),
            }
        };
        let heads: Vec<HeadPlan> =
            variants.iter().enumerate().map(|(h, variant)| head(h, variant, &variant.near, KeyRange::Near)).collect();
        let far: Vec<Option<HeadPlan>> = variants
            .iter()
            .enumerate()
            .map(|(h, variant)| variant.far.as_ref().map(|score_fn| head(h, variant, score_fn, KeyRange::Far)))
            .collect();
        let transforms_of: Vec<(usize, Option<usize>)> =
            heads.iter().zip(&far).map(|(near, far)| (near.key_transform, far.as_ref().map(|far| far.key_transform))).collect();
        let plan = |memory| StatePlan::new(&variants, &transforms_of, &shape, memory);
        let (natural, cache) = (plan(StateKind::Auto), plan(StateKind::Cache));
        Ok(Layer {
            plan: Arc::new(Plan { sizes: self, variants, heads, far, key_transforms, aux_specs, natural, cache, bases: Mutex::default() }),
        })
    }
}

/// The index of a value in a list of distinct values; appends it if it is new.
fn index_of<T: PartialEq>(known: &mut Vec<T>, value: T) -> usize {
    known.iter().position(|other| *other == value).unwrap_or_else(|| {
        known.push(value);
        known.len() - 1
    })
}

impl Layer {
    /// H query heads that read G kv heads (head h reads kv head h / (H / G)) of dimension d; see [`LayerSizes`] for the rest.
    #[allow(clippy::new_ret_no_self, reason = "a layer is complete with its variants")]
    pub fn new(heads: usize, kv_heads: usize, d: usize) -> LayerSizes {
        LayerSizes { heads, kv_heads, d, e: d, rope: None }
    }

    /// The same sizes and RoPE with other variants, one per head.
    pub fn with_heads<V: TryInto<Variant>>(&self, heads: impl IntoIterator<Item = V>) -> Result<Layer, Error>
    where
        Error: From<V::Error>,
    {
        self.plan.sizes.clone().heads(heads)
    }

    /// The variant of each head.
    pub fn heads(&self) -> &[Variant] {
        &self.plan.variants
    }

    /// The rotary frequencies, if given.
    pub fn rope(&self) -> Option<&Rope> {
        self.plan.sizes.rope.as_ref()
    }

    /// The auxiliary inputs, in the order of [`AuxTensor::all`].
    pub fn aux_specs(&self) -> &[AuxSpec] {
        &self.plan.aux_specs
    }

    /// Values in a row of q, k and v: H·d, G·d, G·e.
    pub fn widths(&self) -> [usize; 3] {
        let LayerSizes { heads, kv_heads, d, e, .. } = self.plan.sizes;
        [heads * d, kv_heads * d, kv_heads * e]
    }

    /// d, the head dimension of q and k.
    pub fn head_dim(&self) -> usize {
        self.plan.sizes.d
    }

    /// The shape of a call with B rows of T positions, if valid.
    pub fn shape(&self, batch: usize, time: usize) -> Result<Shape, Error> {
        let LayerSizes { heads, kv_heads, d, e, .. } = self.plan.sizes;
        let shape = Shape { batch, time, heads, kv_heads, d, e };
        shape.validate().map(|()| shape)
    }

    /// Whether two layers have the same sizes, RoPE and variants.
    pub fn is_same(&self, other: &Layer) -> bool {
        let sizes = |layer: &Layer| layer.shape(1, 1).ok();
        Arc::ptr_eq(&self.plan, &other.plan)
            || (sizes(self) == sizes(other)
                && self.heads() == other.heads()
                && (self.plan.key_transforms.iter().all(|key_transform| !key_transform.rope) || self.rope() == other.rope()))
    }

    pub(crate) fn head_plans(&self) -> &[HeadPlan] {
        &self.plan.heads
    }

    /// The far branch of each head that has one.
    pub(crate) fn far_plans(&self) -> &[Option<HeadPlan>] {
        &self.plan.far
    }

    /// The key transforms of the layer.
    pub(crate) fn key_transforms(&self) -> &[KeyTransform] {
        &self.plan.key_transforms
    }

    /// Whether any head rotates q and k.
    pub(crate) fn rotates(&self) -> bool {
        self.plan.key_transforms.iter().any(|key_transform| key_transform.rope)
    }

    /// Pairs of coordinates of q and k that are rotated; 0 if no head rotates.
    pub(crate) fn rotary_pairs(&self) -> usize {
        self.rope().filter(|_| self.rotates()).map_or(0, |rope| rope.frequencies().len())
    }

    /// Width of the short convolution, 0 for none.
    pub(crate) fn taps(&self) -> usize {
        self.plan.variants.iter().find_map(|variant| variant.conv).unwrap_or(0)
    }

    /// The inputs of the norm of q and k: for each, whether they are rows after the short convolution. Both if heads differ in it.
    pub(crate) fn norm_sources(&self) -> impl Iterator<Item = bool> + '_ {
        [false, true]
            .into_iter()
            .filter(|&conv| self.plan.key_transforms.iter().any(|key_transform| key_transform.norm && key_transform.conv == conv))
    }

    /// Index of the source that a key transform reads.
    pub(crate) fn norm_source(&self, key_transform: KeyTransform) -> Option<usize> {
        if key_transform.norm { self.norm_sources().position(|conv| conv == key_transform.conv) } else { None }
    }

    /// The norm of q and k, which is the same for all heads that have one.
    pub(crate) fn qk_norm(&self) -> Option<&QkNorm> {
        self.plan.variants.iter().find_map(|variant| variant.qk_norm.as_ref())
    }

    /// Whether any head has a decay per channel.
    pub(crate) fn decays_by_channel(&self) -> bool {
        self.plan.key_transforms.iter().any(|key_transform| key_transform.channels.is_some())
    }

    /// Number of decay values per head and position.
    pub(crate) fn decay_channels(&self) -> usize {
        if self.decays_by_channel() { self.head_dim() } else { 1 }
    }

    /// Whether any head has a write rule.
    pub(crate) fn writes(&self) -> bool {
        self.plan.key_transforms.iter().any(|key_transform| key_transform.write.is_some())
    }

    /// The largest number of learned coefficients of a head in this branch.
    pub(crate) fn learned(&self, range: KeyRange) -> usize {
        self.plan.variants.iter().filter_map(|variant| Some(variant.score_fn(range)?.learned())).max().unwrap_or(0)
    }

    /// The state groups.
    pub(crate) fn state_plan(&self, memory: StateKind) -> &StatePlan {
        match memory {
            StateKind::Auto => &self.plan.natural,
            StateKind::Cache => &self.plan.cache,
        }
    }

    /// The monomials of these orders for the keys of a key transform, built once.
    pub(crate) fn basis(&self, key_transform: usize, orders: &[usize]) -> Result<Arc<Basis>, Error> {
        let width = self.plan.key_transforms[key_transform].width;
        let mut bases = self.plan.bases.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = bases.iter().find(|basis| basis.d() == width && basis.orders() == orders) {
            return Ok(known.clone());
        }
        let basis = Arc::new(Basis::new(width, orders)?);
        bases.push(basis.clone());
        Ok(basis)
    }

    /// Sets the learned coefficients of the kernel of head h in this branch, if it has any.
    pub(crate) fn bind<R: Real>(&self, h: usize, range: KeyRange, inputs: &Inputs<R>, kernel: &mut Kernel) {
        let count = self.plan.variants[h].score_fn(range).map_or(0, ScoreFn::learned);
        if count > 0 {
            let learned = &inputs.aux(AuxKind::Coefficients.of(range))[h * count..][..count];
            let mut wide = [0.0; MAX_ORDER + 1];
            wide.iter_mut().zip(learned).for_each(|(wide, a)| *wide = a.wide());
            kernel.bind(&wide[..count]);
        }
    }

    /// Checks that every head has a backward pass: heavy hitters (`chosen`) and quantized caches (`bits`) are inference-only.
    pub fn check_trainable(&self) -> Result<(), Error> {
        self.heads().iter().try_for_each(Variant::validate_for_training)
    }

    fn aux_lengths(&self, shape: &Shape) -> impl Iterator<Item = (AuxTensor, usize)> {
        let rows = shape.rows();
        self.plan.aux_specs.iter().map(move |spec| (spec.aux, spec.values(rows)))
    }

    /// Checks the inputs of a call; rows may be as short as `shortest`.
    pub(crate) fn check<R>(&self, shape: &Shape, inputs: &Inputs<R>, shortest: usize) -> Result<(), Error> {
        inputs.check(shape, self.aux_lengths(shape), shortest)
    }

    /// Checks the destinations of the gradients of a call.
    pub(crate) fn check_grads<R>(&self, shape: &Shape, grads: &Grads<R>) -> Result<(), Error> {
        grads.check(shape, self.aux_lengths(shape))
    }
}

impl From<&Variant> for Variant {
    fn from(variant: &Variant) -> Variant {
        variant.clone()
    }
}

impl TryFrom<&str> for Variant {
    type Error = Error;

    fn try_from(text: &str) -> Result<Variant, Error> {
        text.parse()
    }
}

impl From<Infallible> for Error {
    fn from(never: Infallible) -> Error {
        match never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope() -> Rope {
        Rope::new(4, 100.0, None).expect("a rope")
    }

    #[test]
    fn missing_parameters_are_reported() {
        let said = |layer: Result<Layer, Error>| layer.expect_err("impossible").to_string();
        assert!(said(Layer::new(4, 2, 4).variant("softmax")).contains(".rope("));
        assert!(
            said(Layer::new(4, 2, 6).rope(Rope::new(8, 100.0, None).expect("a rope")).variant("softmax"))
                .contains("4 rotary frequencies for a head dimension of 6")
        );
        assert!(said(Layer::new(4, 3, 4).variant("exp rope=off")).contains("multiple"));
        assert!(said(Layer::new(4, 2, 4).rope(rope()).heads(["softmax"; 3])).contains("4 heads but 3 variants"));
        assert!(said(Layer::new(4, 2, 5).variant("exp")).contains("odd"));
        assert!(said(Layer::new(4, 2, 4).variant("sofmax")).contains("softmax"));
        assert!(said(Layer::new(4, 2, 300).variant("exp rope=off")).contains("between 1 and 256"));
        assert!(said(Layer::new(usize::MAX, 1, 4).variant("exp rope=off")).contains("address"));
        assert!(Layer::new(4, 2, 4).variant("exp rope=off").is_ok_and(|layer| layer.rope().is_none()));
    }

    #[test]
    fn calls_beyond_the_address_space_are_rejected() {
        let layer = Layer::new(4, 2, 4).rope(rope()).variant("softmax").expect("possible");
        for (batch, time) in [(0, 1), (1, 0), (usize::MAX, 1), (1, usize::MAX), (1 << 32, 1 << 32), (1 << 50, 1)] {
            assert!(matches!(layer.shape(batch, time), Err(Error::Shape(_))), "{batch} {time}");
        }
        assert_eq!(layer.shape(3, 5), Ok(Shape { batch: 3, time: 5, heads: 4, kv_heads: 2, d: 4, e: 4 }));
    }

    #[test]
    fn layers_are_compared_by_their_computation() {
        let layer = |sizes: LayerSizes, text: &str| sizes.variant(text).expect("possible");
        let a = layer(Layer::new(4, 2, 4).rope(rope()), "softmax");
        assert!(a.is_same(&a.clone()) && a.is_same(&layer(Layer::new(4, 2, 4).rope(rope()), "exp")));
        assert!(!a.is_same(&layer(Layer::new(4, 2, 4).rope(Rope::new(4, 50.0, None).expect("a rope")), "softmax")));
        assert!(!a.is_same(&layer(Layer::new(4, 2, 4).rope(rope()).value_dim(6), "softmax")));
        assert!(!a.is_same(&layer(Layer::new(4, 2, 4).rope(rope()), "taylor=0..2")));
        assert!(a.with_heads(vec![Variant::default(); 4]).is_ok_and(|other| other.is_same(&a)));
    }
}
