//! A layer of attention as a value: heads, sizes, rope, what it reads beyond q, k and v, and which heads share keys and states. Checked
//! and planned once; all engines work from it.

mod extras;
mod features;
mod state_groups;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use crate::kernels::basis::Basis;
use crate::kernels::score_rows::Rescale;
use crate::parts::kernel::feature::Map;
use crate::parts::kernel::taylor::MAX_ORDER;
use crate::parts::qk_norm::QkNorm;
use crate::parts::write::Delta;
use crate::{Error, Extra, Grads, Inputs, Kernel, Real, Rope, Shape, Variant, Weighing};

pub use crate::layer::extras::{ExtraSpec, Init, Source};
pub(crate) use crate::layer::features::{FeatureGrads, Features};
pub use crate::layer::state_groups::Memory;
pub(crate) use crate::layer::state_groups::{Places, StateGroup, StatePlan};

/// Heads that can share chosen keys.
pub(crate) const MOST_CHOOSING: usize = 64;

/// A layer of attention. Clones are cheap: they share what was checked and planned.
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
    heads: Vec<Head>,
    far: Vec<Option<Head>>,
    classes: Vec<Class>,
    extras: Vec<ExtraSpec>,
    natural: StatePlan,
    cache: StatePlan,
    /// Those asked for so far: the large ones take memory, and not every engine needs them.
    bases: Mutex<Vec<Arc<Basis>>>,
}

/// The sizes of a [`Layer`], which its variants complete.
#[derive(Clone, Debug)]
#[must_use = "a layer is complete with its variants: `.variant(…)` or `.heads(…)`"]
pub struct LayerSizes {
    heads: usize,
    kv_heads: usize,
    d: usize,
    e: usize,
    rope: Option<Rope>,
}

/// How keys and values are prepared; heads that agree in it share the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Class {
    /// RoPE on q and k.
    pub rope: bool,
    /// Short convolution on q, k and v.
    pub conv: bool,
    /// The layer's norm of q and k.
    pub norm: bool,
    /// φ on q and k.
    pub map: Map,
    /// The head's place in its group, where its keys decay by channels of its own.
    pub channels: Option<usize>,
    /// Learned features on q and k, ahead of φ.
    pub hedgehog: bool,
    /// q and k are projected to this many dimensions, after RoPE.
    pub dim: Option<usize>,
    /// The bits of codes of keys and values, and the sinks that have none.
    pub bits: Option<(u32, usize)>,
    /// Whether the tensors that it reads are those of far keys; false where it reads none.
    pub far: bool,
    /// Numbers of q and k that meet in a score.
    pub width: usize,
    /// Which of the layer's write rules turns values into what is written, where there is one.
    pub write: Option<usize>,
}

/// All that decides what a write rule writes for prepared keys and values.
#[derive(PartialEq)]
struct Writing {
    rule: Delta,
    kernel: Kernel,
    cap: Option<f64>,
    clamp: Option<f64>,
    /// The head's place in its group, where a decay or learned coefficients are its own.
    own: Option<usize>,
}

impl Class {
    /// q and k of dimension d as they are.
    pub fn plain(d: usize) -> Class {
        Class {
            rope: false,
            conv: false,
            norm: false,
            map: Map::Identity,
            channels: None,
            hedgehog: false,
            dim: None,
            bits: None,
            far: false,
            width: d,
            write: None,
        }
    }

    /// How a variant prepares the keys of a class that it weighs like this.
    fn of(variant: &Variant, weighing: &Weighing, far: bool, d: usize) -> Class {
        let hedgehog = weighing.kernel.has_learned_map();
        Class {
            rope: variant.rope,
            conv: variant.conv.is_some(),
            norm: variant.qk_norm.is_some(),
            map: weighing.kernel.map(),
            channels: None,
            hedgehog,
            dim: weighing.dim,
            bits: variant.bits.map(|bits| (bits, variant.sinks.unwrap_or(0))),
            far: far && (hedgehog || weighing.dim.is_some()),
            width: weighing.score_dim(d),
            write: None,
        }
    }

    /// A tensor of near keys, or the same of far keys: whichever this class reads.
    pub fn tensor(&self, extra: Extra) -> Extra {
        if self.far { extra.of_far() } else { extra }
    }
}

/// What engines ask of a head, besides its parts: how it weighs its near keys, or its far keys.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    /// Its parts.
    pub variant: Variant,
    /// Whether this is how far keys are weighed.
    pub far: bool,
    /// w
    pub kernel: Kernel,
    /// Index of its [`Class`].
    pub class: usize,
    /// What q·k is multiplied by.
    pub scale: f32,
    /// Soft cap of scores.
    pub cap: Option<f32>,
    /// Upper bound of scores.
    pub clamp: f32,
    /// How these weights are kept within float32.
    pub rescale: Rescale,
    /// Whether keys have weights: an input gate or a position denominator.
    pub weighs_keys: bool,
    /// Learned coefficients.
    pub learned: usize,
}

impl Head {
    /// Whether any gate, decay or key weight has to be computed.
    pub fn has_gates(&self) -> bool {
        let v = &self.variant;
        self.weighs_keys || v.out_gate.is_some() || v.post_gate.is_some() || v.decay.is_some()
    }
}

impl LayerSizes {
    /// With values of dimension e instead of d.
    pub fn value_dim(self, e: usize) -> LayerSizes {
        LayerSizes { e, ..self }
    }

    /// With rotary frequencies, for variants that rotate q and k.
    pub fn rope(self, rope: Rope) -> LayerSizes {
        LayerSizes { rope: Some(rope), ..self }
    }

    /// The layer with the same variant in every head: a text, or a [`Variant`].
    pub fn variant<V: TryInto<Variant>>(self, variant: V) -> Result<Layer, Error>
    where
        Error: From<V::Error>,
    {
        let variant = variant.try_into()?;
        // Before a list of that many is made.
        Shape { batch: 1, time: 1, heads: self.heads, kv_heads: self.kv_heads, d: self.d, e: self.e }.validate()?;
        let heads = vec![variant; self.heads];
        self.plan(heads)
    }

    /// The layer with a variant for each head: texts, or [`Variant`]s.
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
            return Err(Error::Shape(format!("{heads} heads but {} variants: one for each head is needed", variants.len())));
        }
        variants.iter().try_for_each(|variant| variant.validate_for(&shape))?;
        if let Some(variant) = variants.iter().find(|variant| variant.rope) {
            match &self.rope {
                Some(rope) if (1..=d / 2).contains(&rope.frequencies().len()) => {}
                Some(rope) => {
                    let found = rope.frequencies().len();
                    return Err(Error::Shape(format!(
                        "{found} rotary frequencies for a head dimension of {d}: give 1 to {}, one for each rotated pair of coordinates",
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
        if let Some(variant) = variants.iter().find(|variant| variant.chosen.is_some()).filter(|_| shape.group() > MOST_CHOOSING) {
            let reason =
                format!("at most {MOST_CHOOSING} heads can choose the keys that they share, and {} share a kv head here", shape.group());
            return Err(Error::Combination { variant: variant.to_string(), reason });
        }
        let extras = extras::layer_extras(&variants, &shape)?;
        let (mut classes, mut writings): (Vec<Class>, Vec<Writing>) = (Vec::new(), Vec::new());
        let mut head = |h: usize, variant: &Variant, weighing: Weighing, far: bool| {
            let write = variant.write.map(|rule| {
                let own = (variant.decay.is_some() || variant.learned() > 0).then_some(h % shape.group());
                let writing = Writing { rule, kernel: variant.kernel.clone(), cap: variant.cap, clamp: variant.clamp, own };
                index_of(&mut writings, writing)
            });
            let channels = variant.decays_by_channel().then_some(h % shape.group());
            let index = index_of(&mut classes, Class { channels, write, ..Class::of(variant, &weighing, far, d) });
            Head {
                far,
                class: index,
                scale: weighing.scale_for(d) as f32,
                cap: weighing.cap.map(|c| c as f32),
                clamp: weighing.clamp.map_or(f32::INFINITY, |c| c as f32),
                rescale: if variant.rescale() == Rescale::None { Rescale::None } else { weighing.kernel.rescale() },
                weighs_keys: variant.in_gate.is_some() || variant.denominator.key_side(),
                learned: weighing.learned(),
                kernel: weighing.kernel,
                variant: variant.clone(),
            }
        };
        let heads: Vec<Head> = variants.iter().enumerate().map(|(h, variant)| head(h, variant, variant.near(), false)).collect();
        let far: Vec<Option<Head>> =
            variants.iter().enumerate().map(|(h, variant)| variant.far.clone().map(|weighing| head(h, variant, weighing, true))).collect();
        let class_of: Vec<(usize, Option<usize>)> =
            heads.iter().zip(&far).map(|(near, far)| (near.class, far.as_ref().map(|far| far.class))).collect();
        let plan = |memory| StatePlan::new(&variants, &class_of, &shape, memory);
        let (natural, cache) = (plan(Memory::Natural), plan(Memory::Cache));
        Ok(Layer { plan: Arc::new(Plan { sizes: self, variants, heads, far, classes, extras, natural, cache, bases: Mutex::default() }) })
    }
}

/// The place of a value in a list of different ones, which it joins where it is new.
fn index_of<T: PartialEq>(known: &mut Vec<T>, value: T) -> usize {
    known.iter().position(|other| *other == value).unwrap_or_else(|| {
        known.push(value);
        known.len() - 1
    })
}

impl Layer {
    /// H query heads that read G kv heads (head h reads kv head h / (H / G)) of dimension d; [`LayerSizes`] takes the rest.
    #[allow(clippy::new_ret_no_self, reason = "a layer is complete with its variants")]
    pub fn new(heads: usize, kv_heads: usize, d: usize) -> LayerSizes {
        LayerSizes { heads, kv_heads, d, e: d, rope: None }
    }

    /// The same sizes and rope with other variants, one for each head.
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

    /// The rotary frequencies, where it was given any.
    pub fn rope(&self) -> Option<&Rope> {
        self.plan.sizes.rope.as_ref()
    }

    /// The inputs that it reads beyond q, k and v, in the order of [`Extra::ALL`].
    pub fn extras(&self) -> &[ExtraSpec] {
        &self.plan.extras
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

    /// The sizes of a call with B rows of T positions, if that is possible.
    pub fn shape(&self, batch: usize, time: usize) -> Result<Shape, Error> {
        let LayerSizes { heads, kv_heads, d, e, .. } = self.plan.sizes;
        let shape = Shape { batch, time, heads, kv_heads, d, e };
        shape.validate().map(|()| shape)
    }

    /// Whether two are the same: sizes, rope and variants.
    pub fn is_same(&self, other: &Layer) -> bool {
        let sizes = |layer: &Layer| layer.shape(1, 1).ok();
        Arc::ptr_eq(&self.plan, &other.plan)
            || (sizes(self) == sizes(other)
                && self.heads() == other.heads()
                && (self.plan.classes.iter().all(|class| !class.rope) || self.rope() == other.rope()))
    }

    pub(crate) fn head_plans(&self) -> &[Head] {
        &self.plan.heads
    }

    /// How each head weighs its far keys, where it sees any.
    pub(crate) fn far_plans(&self) -> &[Option<Head>] {
        &self.plan.far
    }

    /// Ways in which keys are prepared.
    pub(crate) fn classes(&self) -> &[Class] {
        &self.plan.classes
    }

    /// Whether any head rotates q and k.
    pub(crate) fn rotates(&self) -> bool {
        self.plan.classes.iter().any(|class| class.rope)
    }

    /// Pairs of coordinates of q and k that are rotated; 0 if no head rotates.
    pub(crate) fn rotary_pairs(&self) -> usize {
        self.rope().filter(|_| self.rotates()).map_or(0, |rope| rope.frequencies().len())
    }

    /// Width of the short convolution, 0 for none.
    pub(crate) fn taps(&self) -> usize {
        self.plan.variants.iter().find_map(|variant| variant.conv).unwrap_or(0)
    }

    /// What the norm of q and k is taken of: for each, whether of rows after the short convolution. Both where heads differ in it.
    pub(crate) fn norm_sources(&self) -> impl Iterator<Item = bool> + '_ {
        [false, true].into_iter().filter(|&conv| self.plan.classes.iter().any(|class| class.norm && class.conv == conv))
    }

    /// Which of these a class reads.
    pub(crate) fn norm_source(&self, class: Class) -> Option<usize> {
        if class.norm { self.norm_sources().position(|conv| conv == class.conv) } else { None }
    }

    /// The norm of q and k, on which all heads that have one agree.
    pub(crate) fn qk_norm(&self) -> Option<&QkNorm> {
        self.plan.variants.iter().find_map(|variant| variant.qk_norm.as_ref())
    }

    /// Whether any head has a decay by channel.
    pub(crate) fn decays_by_channel(&self) -> bool {
        self.plan.classes.iter().any(|class| class.channels.is_some())
    }

    /// Numbers of a decay for each head and position.
    pub(crate) fn decay_channels(&self) -> usize {
        if self.decays_by_channel() { self.head_dim() } else { 1 }
    }

    /// Whether any head has a write rule.
    pub(crate) fn writes(&self) -> bool {
        self.plan.classes.iter().any(|class| class.write.is_some())
    }

    /// Learned coefficients of each head that has any, for near or for far keys.
    pub(crate) fn learned(&self, far: bool) -> usize {
        let all = self.plan.heads.iter().filter(|_| !far).chain(self.plan.far.iter().flatten().filter(|_| far));
        all.map(|head| head.learned).max().unwrap_or(0)
    }

    /// Which heads share a state or a cache.
    pub(crate) fn state_plan(&self, memory: Memory) -> &StatePlan {
        match memory {
            Memory::Natural => &self.plan.natural,
            Memory::Cache => &self.plan.cache,
        }
    }

    /// The monomials of these orders of keys of a class, built once.
    pub(crate) fn basis(&self, class: usize, orders: &[usize]) -> Result<Arc<Basis>, Error> {
        let width = self.plan.classes[class].width;
        let mut bases = self.plan.bases.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = bases.iter().find(|basis| basis.d() == width && basis.orders() == orders) {
            return Ok(known.clone());
        }
        let basis = Arc::new(Basis::new(width, orders)?);
        bases.push(basis.clone());
        Ok(basis)
    }

    /// Takes the learned coefficients of head h into its kernel, where it has any.
    pub(crate) fn bind<R: Real>(&self, h: usize, inputs: &Inputs<R>, kernel: &mut Kernel) {
        let count = self.plan.heads[h].learned;
        if count > 0 {
            bind(kernel, &inputs.extra(Extra::Coefficients)[h * count..][..count]);
        }
    }

    /// Takes the learned coefficients of head h for far keys into their kernel, where it has any.
    pub(crate) fn bind_far<R: Real>(&self, h: usize, inputs: &Inputs<R>, kernel: &mut Kernel) {
        let count = self.plan.variants[h].far.as_ref().map_or(0, |far| far.learned());
        if count > 0 {
            bind(kernel, &inputs.extra(Extra::FarCoefficients)[h * count..][..count]);
        }
    }

    /// Refuses, for engines other than the naive one, what that one alone computes so far.
    pub(crate) fn check_fused(&self) -> Result<(), Error> {
        match self.heads().iter().find_map(|variant| Some((variant, variant.naive_only()?))) {
            Some((variant, part)) => Err(Error::Combination {
                variant: variant.to_string(),
                reason: format!("`{part}` is computed by the naive engine alone so far; use that one, or leave `{part}` out"),
            }),
            None => Ok(()),
        }
    }

    /// Refuses variants that are for inference alone: heavy hitters (`chosen`) and quantized caches (`bits`) have no gradients.
    pub fn check_trainable(&self) -> Result<(), Error> {
        match self.heads().iter().find_map(|variant| Some((variant, variant.inference_only()?))) {
            Some((variant, part)) => Err(Error::Combination {
                variant: variant.to_string(),
                reason: format!("`{part}` is inference-only and has no backward pass; train without `{part}`"),
            }),
            None => Ok(()),
        }
    }

    fn extra_lengths(&self, shape: &Shape) -> impl Iterator<Item = (Extra, usize)> {
        let rows = shape.rows();
        self.plan.extras.iter().map(move |spec| (spec.extra, spec.values(rows)))
    }

    /// Checks the inputs of a call; rows may be as short as `shortest`.
    pub(crate) fn check<R>(&self, shape: &Shape, inputs: &Inputs<R>, shortest: usize) -> Result<(), Error> {
        inputs.check(shape, self.extra_lengths(shape), shortest)
    }

    /// Checks the places for the gradients of a call.
    pub(crate) fn check_grads<R>(&self, shape: &Shape, grads: &Grads<R>) -> Result<(), Error> {
        grads.check(shape, self.extra_lengths(shape))
    }
}

fn bind<R: Real>(kernel: &mut Kernel, learned: &[R]) {
    let mut wide = [0.0; MAX_ORDER + 1];
    wide.iter_mut().zip(learned).for_each(|(wide, a)| *wide = a.wide());
    kernel.bind(&wide[..learned.len()]);
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
    fn what_is_missing_is_named() {
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
    fn calls_that_no_memory_can_hold_are_refused() {
        let layer = Layer::new(4, 2, 4).rope(rope()).variant("softmax").expect("possible");
        for (batch, time) in [(0, 1), (1, 0), (usize::MAX, 1), (1, usize::MAX), (1 << 32, 1 << 32), (1 << 50, 1)] {
            assert!(matches!(layer.shape(batch, time), Err(Error::Shape(_))), "{batch} {time}");
        }
        assert_eq!(layer.shape(3, 5), Ok(Shape { batch: 3, time: 5, heads: 4, kv_heads: 2, d: 4, e: 4 }));
    }

    #[test]
    fn layers_are_the_same_by_what_they_compute() {
        let layer = |sizes: LayerSizes, text: &str| sizes.variant(text).expect("possible");
        let a = layer(Layer::new(4, 2, 4).rope(rope()), "softmax");
        assert!(a.is_same(&a.clone()) && a.is_same(&layer(Layer::new(4, 2, 4).rope(rope()), "exp")));
        assert!(!a.is_same(&layer(Layer::new(4, 2, 4).rope(Rope::new(4, 50.0, None).expect("a rope")), "softmax")));
        assert!(!a.is_same(&layer(Layer::new(4, 2, 4).rope(rope()).value_dim(6), "softmax")));
        assert!(!a.is_same(&layer(Layer::new(4, 2, 4).rope(rope()), "taylor=0..2")));
        assert!(a.with_heads(vec![Variant::default(); 4]).is_ok_and(|other| other.is_same(&a)));
    }
}
