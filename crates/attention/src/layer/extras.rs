//! Which inputs beyond q, k and v the heads of a layer ask for, under their names in checkpoints.

use crate::parts::gate::PostGate;
use crate::parts::kernel::taylor::Coefficients;
use crate::{Error, Extra, Kernel, Shape, Variant};

/// An additional input as a model must provide it.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtraSpec {
    /// Which.
    pub extra: Extra,
    /// Its name below `self_attn.` in a checkpoint: of the projection for gate logits, of the tensor for parameters.
    pub name: &'static str,
    /// How it comes about.
    pub source: Source,
}

/// Where an additional input comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
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
        /// How it starts.
        init: Init,
    },
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same number everywhere.
    Constant(f64),
    /// Uniform between −x and x.
    Uniform(f64),
}

impl ExtraSpec {
    /// Values of this input in a call with B·T `rows`.
    pub fn values(&self, rows: usize) -> usize {
        match &self.source {
            Source::Projection { outputs, .. } => rows * outputs,
            Source::Parameter { shape, .. } => shape.iter().product(),
        }
    }
}

/// The additional inputs of a layer whose heads have these variants (one each), in the order of [`Extra::ALL`].
/// Where only some heads ask for one, it covers all heads and the others ignore theirs.
pub(crate) fn layer_extras(heads: &[Variant], shape: &Shape) -> Result<Vec<ExtraSpec>, Error> {
    let Shape { heads: h, kv_heads: g, d, e, .. } = *shape;
    let orders = shared(heads, "number of learned coefficients", learned_orders)?;
    let width = shared(heads, "width of the short convolution", |v| v.conv)?;
    let decays = shared(heads, "kind of decay", |v| v.decay.clone())?;
    let bias = decays.is_none_or(|decay| decay.has_bias());
    let parameter = |shape: Vec<usize>, init| Source::Parameter { shape, init };
    let projection = |outputs, bias| Source::Projection { outputs, bias };
    Ok(Extra::ALL
        .into_iter()
        .filter(|&extra| heads.iter().any(|v| v.needs(extra)))
        .map(|extra| {
            let taps = width.unwrap_or(0);
            // PyTorch's start for a convolution: uniform within 1/√width.
            let conv = |channels: usize| parameter(vec![channels, 1, taps], Init::Uniform(1.0 / (taps as f64).sqrt()));
            let (name, source) = match extra {
                Extra::InGate => ("in_gate_proj", projection(g, true)),
                Extra::OutGate => ("out_gate_proj", projection(h, true)),
                Extra::PostGate => ("post_gate_proj", projection(h, true)),
                Extra::DecayGate => ("decay_gate_proj", projection(h, bias)),
                Extra::NormWeight => ("out_norm.weight", parameter(vec![e], Init::Constant(1.0))),
                Extra::NormBias => ("out_norm.bias", parameter(vec![e], Init::Constant(0.0))),
                Extra::NormConst => ("norm_const", parameter(vec![1, h, 1, 1], Init::Constant(0.5))),
                Extra::Coefficients => ("coefficients", parameter(vec![h, orders.unwrap_or(0)], Init::Constant(1.0))),
                Extra::ConvQ => ("q_conv1d.weight", conv(h * d)),
                Extra::ConvK => ("k_conv1d.weight", conv(g * d)),
                Extra::ConvV => ("v_conv1d.weight", conv(g * e)),
            };
            ExtraSpec { extra, name, source }
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

fn learned_orders(variant: &Variant) -> Option<usize> {
    match &variant.kernel {
        Kernel::Taylor(taylor) if *taylor.coefficients() == Coefficients::Learned => Some(taylor.orders().len()),
        _ => None,
    }
}

impl Variant {
    /// Number of learned coefficients of each head.
    pub fn learned(&self) -> usize {
        learned_orders(self).unwrap_or(0)
    }

    /// Whether this variant reads that input.
    pub fn needs(&self, extra: Extra) -> bool {
        match extra {
            Extra::InGate => self.in_gate.is_some(),
            Extra::OutGate => self.out_gate.is_some(),
            Extra::PostGate => matches!(self.post_gate, Some(PostGate::Sigmoid(_))),
            Extra::DecayGate => self.decay.is_some(),
            Extra::NormWeight => self.norm.has_weight(),
            Extra::NormBias => self.norm.has_bias(),
            Extra::NormConst => self.denominator.key_side(),
            Extra::Coefficients => learned_orders(self).is_some(),
            Extra::ConvQ | Extra::ConvK | Extra::ConvV => self.conv.is_some(),
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
        let specs = layer_extras(&heads(["exp in out post decay=linear norm=layer conv=3"; 4]), &SHAPE).expect("possible");
        let names: Vec<&str> = specs.iter().map(|spec| spec.name).collect();
        let gates = ["in_gate_proj", "out_gate_proj", "post_gate_proj", "decay_gate_proj"];
        assert_eq!(names[..4], gates);
        assert_eq!(names[4..], ["out_norm.weight", "out_norm.bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"]);
        assert_eq!(specs[0].source, Source::Projection { outputs: 2, bias: true });
        assert_eq!(specs[1].source, Source::Projection { outputs: 4, bias: true });
        let shapes: Vec<_> =
            specs[4..].iter().map(|spec| if let Source::Parameter { shape, .. } = &spec.source { shape.clone() } else { vec![] }).collect();
        assert_eq!(shapes, [vec![5], vec![5], vec![24, 1, 3], vec![12, 1, 3], vec![10, 1, 3]]);
        let learned = layer_extras(&heads(["taylor=0..2,coef=learned over=position decay=softplus"; 4]), &SHAPE).expect("possible");
        assert_eq!(learned[0].source, Source::Projection { outputs: 4, bias: false });
        assert_eq!(learned[1].source, Source::Parameter { shape: vec![1, 4, 1, 1], init: Init::Constant(0.5) });
        assert_eq!(learned[2].source, Source::Parameter { shape: vec![4, 3], init: Init::Constant(1.0) });
        assert_eq!(layer_extras(&heads(["softmax"; 4]), &SHAPE), Ok(vec![]));
    }

    #[test]
    fn lengths_follow_the_shapes() {
        let specs =
            layer_extras(&heads(["taylor=0..2,coef=learned in out decay=softplus conv=3 over=position"; 4]), &SHAPE).expect("possible");
        let lengths: Vec<(Extra, usize)> = specs.iter().map(|spec| (spec.extra, spec.values(6))).collect();
        let gates = [(Extra::InGate, 12), (Extra::OutGate, 24), (Extra::DecayGate, 24)];
        assert_eq!(lengths[..3], gates);
        assert_eq!(
            lengths[3..],
            [(Extra::NormConst, 4), (Extra::Coefficients, 12), (Extra::ConvQ, 72), (Extra::ConvK, 36), (Extra::ConvV, 30)]
        );
    }

    #[test]
    fn heads_must_agree_on_what_they_share() {
        for other in ["exp conv=4", "taylor=0..3,coef=learned conv=3", "exp decay=softplus"] {
            let mixed = heads(["exp conv=3 decay=linear", "taylor=0..2,coef=learned", other, "softmax"]);
            assert!(matches!(layer_extras(&mixed, &SHAPE), Err(Error::Combination { .. })), "{other}");
        }
        assert!(layer_extras(&heads(["exp conv=3", "softmax", "norm", "exp conv=3"]), &SHAPE).is_ok());
    }
}
