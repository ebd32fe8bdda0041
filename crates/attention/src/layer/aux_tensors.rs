//! The auxiliary tensors that the heads of a layer read: gate logits and parameters, with their shapes and their names in checkpoints.

use crate::parts::decay::DecayParams;
use crate::parts::gate::PostGate;
use crate::{AuxKind, AuxTensor, Error, Inputs, KeyRange, Real, ScoreFn, Shape, Variant};

/// The description of an auxiliary tensor that a model must provide.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AuxSpec {
    /// The tensor.
    pub aux: AuxTensor,
    /// Its name below `self_attn.` in a checkpoint: of the projection for gate logits, of the tensor for parameters.
    pub name: &'static str,
    /// Whether it is projected from the hidden state or a parameter.
    pub source: AuxSource,
}

/// The source of an auxiliary tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum AuxSource {
    /// Gate logits: `name.weight` [outputs, hidden] times the hidden state, plus `name.bias` [outputs].
    Projection {
        /// Heads or kv heads.
        outputs: usize,
        /// Whether there is a bias.
        bias: bool,
    },
    /// A parameter of this shape in the checkpoint.
    Parameter {
        /// Shape, row-major.
        shape: Vec<usize>,
        /// Its initial values.
        init: Init,
    },
}

/// The initial values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same number everywhere.
    Constant(f64),
    /// Uniform between −x and x.
    Uniform(f64),
}

impl AuxSpec {
    /// Number of values in a call with B·T `rows`.
    pub fn values(&self, rows: usize) -> usize {
        match &self.source {
            AuxSource::Projection { outputs, .. } => rows * outputs,
            AuxSource::Parameter { shape, .. } => shape.iter().product(),
        }
    }
}

/// Sizes of the tensors of the near or the far branch.
struct BranchSizes {
    orders: usize,
    dim: usize,
    /// Of learned features.
    features: usize,
}

impl BranchSizes {
    fn new(heads: &[Variant], d: usize, range: KeyRange) -> Result<BranchSizes, Error> {
        let learned = |v: &Variant| v.score_fn(range).map(ScoreFn::learned).filter(|&n| n > 0);
        let features = |v: &Variant| v.score_fn(range).filter(|near| near.kernel.has_learned_map()).map(|near| near.dim.unwrap_or(d));
        Ok(BranchSizes {
            orders: shared(heads, "number of learned coefficients", learned)?.unwrap_or(0),
            dim: shared(heads, "`dim`", |v| v.score_fn(range)?.dim)?.unwrap_or(d),
            features: shared(heads, "dimension of learned features", features)?.unwrap_or(d),
        })
    }
}

/// The auxiliary tensors of a layer whose heads have these variants, in the order of [`AuxTensor::all`].
/// A tensor that only some heads read has values for all heads; the other heads ignore theirs.
pub(crate) fn layer_aux_specs(heads: &[Variant], shape: &Shape) -> Result<Vec<AuxSpec>, Error> {
    let Shape { heads: h, kv_heads: g, d, e, .. } = *shape;
    let width = shared(heads, "width of the short convolution", |v| v.conv)?;
    let decay = shared(heads, "kind of decay", |v| v.decay.clone())?;
    let by_channel = |v: &Variant| v.decay.as_ref().filter(|decay| decay.by_channel()).map(|_| v.near.score_dim(d));
    let decay_channels = shared(heads, "number of channels of the decay", by_channel)?.unwrap_or(1);
    let post_kind = |v: &Variant| v.post_gate.as_ref().filter(|_| v.needs(AuxKind::PostGate)).map(PostGate::by_channel);
    let post_channels = if shared(heads, "kind of post gate", post_kind)? == Some(true) { e } else { 1 };
    let norm_over_heads = shared(heads, "norm of q and k", |v| v.qk_norm.clone())?.is_some_and(|norm| norm.over_heads());
    let branches = [BranchSizes::new(heads, d, KeyRange::Near)?, BranchSizes::new(heads, d, KeyRange::Far)?];
    let parameter = |shape: Vec<usize>, init| AuxSource::Parameter { shape, init };
    let projection = |outputs, bias| AuxSource::Projection { outputs, bias };
    Ok(AuxTensor::all()
        .filter(|&aux| heads.iter().any(|v| v.needs(aux)))
        .map(|aux| {
            let far = aux.range.is_far();
            let BranchSizes { orders, dim, features } = branches[far as usize];
            let taps = width.unwrap_or(0);
            // PyTorch's initialization of a convolution: uniform within ±1/√width.
            let conv = |channels: usize| parameter(vec![channels, 1, taps], Init::Uniform(1.0 / (taps as f64).sqrt()));
            // Entries of variance 1/n preserve the scale of their inputs.
            let matrix = |heads: usize, rows: usize, n: usize| parameter(vec![heads, rows, n], Init::Uniform((3.0 / n as f64).sqrt()));
            let norm = |heads: usize| parameter(vec![if norm_over_heads { heads * d } else { d }], Init::Constant(1.0));
            let zeros = |shape: Vec<usize>| parameter(shape, Init::Constant(0.0));
            let (name, far_name, source) = match aux.kind {
                AuxKind::InGate => ("in_gate_proj", "", projection(g, true)),
                AuxKind::OutGate => ("out_gate_proj", "", projection(h, true)),
                AuxKind::PostGate => ("post_gate_proj", "", projection(h * post_channels, true)),
                AuxKind::DecayGate => {
                    ("decay_gate_proj", "", projection(h * decay_channels, decay.as_ref().is_none_or(|part| part.has_bias())))
                }
                AuxKind::Beta => ("beta_proj", "", projection(g, true)),
                // Gates of ½ then decay by about 3% per step.
                AuxKind::DecayRate => ("decay_rate", "", parameter(vec![h], Init::Constant(-3.0))),
                AuxKind::QNorm => ("q_norm.weight", "", norm(h)),
                AuxKind::KNorm => ("k_norm.weight", "", norm(g)),
                AuxKind::NormWeight => ("out_norm.weight", "", parameter(vec![e], Init::Constant(1.0))),
                AuxKind::NormBias => ("out_norm.bias", "", zeros(vec![e])),
                AuxKind::NormConst => ("norm_const", "", parameter(vec![1, h, 1, 1], Init::Constant(0.5))),
                AuxKind::Sink => ("sinks", "", zeros(vec![h])),
                AuxKind::ConvQ => ("q_conv1d.weight", "", conv(h * d)),
                AuxKind::ConvK => ("k_conv1d.weight", "", conv(g * d)),
                AuxKind::ConvV => ("v_conv1d.weight", "", conv(g * e)),
                AuxKind::Coefficients => ("coefficients", "far.coefficients", parameter(vec![h, orders], Init::Constant(1.0))),
                AuxKind::DimQ => ("q_dim.weight", "far.q_dim.weight", matrix(h, dim, d)),
                AuxKind::DimK => ("k_dim.weight", "far.k_dim.weight", matrix(g, dim, d)),
                AuxKind::FeatureQ => ("q_feature.weight", "far.q_feature.weight", matrix(h, features, features)),
                AuxKind::FeatureQBias => ("q_feature.bias", "far.q_feature.bias", zeros(vec![h, features])),
                AuxKind::FeatureK => ("k_feature.weight", "far.k_feature.weight", matrix(g, features, features)),
                AuxKind::FeatureKBias => ("k_feature.bias", "far.k_feature.bias", zeros(vec![g, features])),
            };
            AuxSpec { aux, name: if far { far_name } else { name }, source }
        })
        .collect())
}

/// The value on which all heads that have one must agree, since they share one tensor.
fn shared<T: PartialEq>(heads: &[Variant], what: &str, value: impl Fn(&Variant) -> Option<T>) -> Result<Option<T>, Error> {
    let mut found: Option<(T, &Variant)> = None;
    for variant in heads {
        match (value(variant), &found) {
            (Some(value), None) => found = Some((value, variant)),
            (Some(value), Some((first, other))) if value != *first => {
                return Err(Error::Combination {
                    variant: variant.to_string(),
                    reason: format!("the heads of one layer share the {what}, and another head has `{other}`"),
                });
            }
            _ => {}
        }
    }
    Ok(found.map(|(value, _)| value))
}

impl Variant {
    /// The parameters of the decay of a head.
    pub(crate) fn decay_params<R: Real>(&self, inputs: &Inputs<R>, head: usize) -> DecayParams<R> {
        let rate = if self.needs(AuxKind::DecayRate) { inputs.aux(AuxKind::DecayRate)[head] } else { R::zero() };
        DecayParams { head, rate }
    }

    /// Whether this variant reads that tensor.
    pub fn needs(&self, aux: impl Into<AuxTensor>) -> bool {
        let AuxTensor { kind, range } = aux.into();
        let weighed = |needs: fn(&ScoreFn) -> bool| self.score_fn(range).is_some_and(needs);
        match kind {
            AuxKind::InGate => self.in_gate.is_some(),
            AuxKind::OutGate => self.out_gate.is_some(),
            AuxKind::PostGate => self.post_gate.as_ref().is_some_and(|gate| !matches!(gate, PostGate::Shared(_))),
            AuxKind::DecayGate => self.decay.as_ref().is_some_and(|decay| decay.has_logits()),
            AuxKind::Beta => self.write.is_some(),
            AuxKind::DecayRate => self.decay.as_ref().is_some_and(|decay| decay.has_rate()),
            AuxKind::QNorm | AuxKind::KNorm => self.qk_norm.as_ref().is_some_and(|norm| norm.has_weight()),
            AuxKind::NormWeight => self.norm.has_weight(),
            AuxKind::NormBias => self.norm.has_bias(),
            AuxKind::NormConst => self.denominator.key_side(),
            AuxKind::Sink => self.denominator.has_sink(),
            AuxKind::ConvQ | AuxKind::ConvK | AuxKind::ConvV => self.conv.is_some(),
            AuxKind::Coefficients => weighed(|score_fn| score_fn.learned() > 0),
            AuxKind::DimQ | AuxKind::DimK => weighed(|score_fn| score_fn.dim.is_some()),
            AuxKind::FeatureQ | AuxKind::FeatureQBias | AuxKind::FeatureK | AuxKind::FeatureKBias => {
                weighed(|score_fn| score_fn.kernel.has_learned_map())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, time: 3, heads: 4, kv_heads: 2, d: 6, e: 5 };

    fn heads(texts: [&str; 4]) -> Vec<Variant> {
        texts.map(|text| text.parse().unwrap_or_else(|error| panic!("{error}"))).to_vec()
    }

    #[test]
    fn names_and_shapes_of_checkpoints() {
        let specs = layer_aux_specs(&heads(["exp in out post decay=linear norm=layer conv=3"; 4]), &SHAPE).expect("possible");
        let names: Vec<&str> = specs.iter().map(|spec| spec.name).collect();
        let gates = ["in_gate_proj", "out_gate_proj", "post_gate_proj", "decay_gate_proj"];
        assert_eq!(names[..4], gates);
        assert_eq!(names[4..], ["out_norm.weight", "out_norm.bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"]);
        assert_eq!(specs[0].source, AuxSource::Projection { outputs: 2, bias: true });
        assert_eq!(specs[1].source, AuxSource::Projection { outputs: 4, bias: true });
        let shapes: Vec<_> = specs[4..]
            .iter()
            .map(|spec| if let AuxSource::Parameter { shape, .. } = &spec.source { shape.clone() } else { vec![] })
            .collect();
        assert_eq!(shapes, [vec![5], vec![5], vec![24, 1, 3], vec![12, 1, 3], vec![10, 1, 3]]);
        let learned = layer_aux_specs(&heads(["taylor=0..2,coef=learned over=position decay=softplus"; 4]), &SHAPE).expect("possible");
        assert_eq!(learned[0].source, AuxSource::Projection { outputs: 4, bias: false });
        assert_eq!(learned[1].source, AuxSource::Parameter { shape: vec![1, 4, 1, 1], init: Init::Constant(0.5) });
        assert_eq!(learned[2].source, AuxSource::Parameter { shape: vec![4, 3], init: Init::Constant(1.0) });
        assert_eq!(layer_aux_specs(&heads(["softmax"; 4]), &SHAPE), Ok(vec![]));
        let far = "exp window=4 far(feature=hedgehog dim=3) over=sum,sink post=silu,channel decay=mamba qk_norm=rms,all";
        let sizes: Vec<(&str, usize)> =
            layer_aux_specs(&heads([far; 4]), &SHAPE).expect("possible").iter().map(|spec| (spec.name, spec.values(1))).collect();
        let expected = [
            ("post_gate_proj", 20),
            ("decay_gate_proj", 4),
            ("decay_rate", 4),
            ("q_norm.weight", 24),
            ("k_norm.weight", 12),
            ("sinks", 4),
            ("far.q_dim.weight", 72),
            ("far.k_dim.weight", 36),
            ("far.q_feature.weight", 36),
            ("far.q_feature.bias", 12),
            ("far.k_feature.weight", 18),
            ("far.k_feature.bias", 6),
        ];
        assert_eq!(sizes, expected);
    }

    #[test]
    fn lengths_follow_the_shapes() {
        let specs =
            layer_aux_specs(&heads(["taylor=0..2,coef=learned in out decay=softplus conv=3 over=position"; 4]), &SHAPE).expect("possible");
        let lengths: Vec<(AuxKind, usize)> = specs.iter().map(|spec| (spec.aux.kind, spec.values(6))).collect();
        let gates = [(AuxKind::InGate, 12), (AuxKind::OutGate, 24), (AuxKind::DecayGate, 24)];
        assert_eq!(lengths[..3], gates);
        assert_eq!(
            lengths[3..],
            [(AuxKind::NormConst, 4), (AuxKind::Coefficients, 12), (AuxKind::ConvQ, 72), (AuxKind::ConvK, 36), (AuxKind::ConvV, 30)]
        );
    }

    #[test]
    fn heads_must_agree_on_shared_tensors() {
        for other in ["exp conv=4", "taylor=0..3,coef=learned conv=3", "exp decay=softplus"] {
            let mixed = heads(["exp conv=3 decay=linear", "taylor=0..2,coef=learned", other, "softmax"]);
            assert!(matches!(layer_aux_specs(&mixed, &SHAPE), Err(Error::Combination { .. })), "{other}");
        }
        assert!(layer_aux_specs(&heads(["exp conv=3", "softmax", "norm", "exp conv=3"]), &SHAPE).is_ok());
    }
}
