//! A variant as plain data, so that other programs need not parse variant strings: the PyTorch engine of the Python package reads it as JSON, and exported
//! modules are generated from it.

use serde::Serialize;
use termwise_attention::parts::gate::PostGate;
use termwise_attention::parts::kernel::taylor::Coefficients;
use termwise_attention::{Decay, Denominator, Kernel, Map, QkNorm, Rescale, Variant};

/// The part in each slot of the formula; `None` for an empty slot.
#[derive(Clone, Debug, Serialize)]
pub struct Parts {
    /// The variant string.
    pub text: String,
    /// Score function of all keys, or of the near keys if there is a window.
    pub near: ScoreFn,
    /// Score function of far keys.
    pub far: Option<ScoreFn>,
    /// Window length in keys.
    pub window: Option<usize>,
    /// Attention sinks: first keys that stay near.
    pub sinks: Option<usize>,
    /// The delta rule.
    pub write: Option<Write>,
    /// The denominator.
    pub denominator: &'static str,
    /// Options of the denominator `sum`.
    pub sum: Option<Sum>,
    /// Whether values have an input gate.
    pub in_gate: bool,
    /// The output gate before the norm.
    pub out_gate: Option<&'static str>,
    /// The output gate after the norm.
    pub post_gate: Option<Post>,
    /// The decay.
    pub decay: Option<Fading>,
    /// The norm of q and k.
    pub qk_norm: Option<Norm>,
    /// The norm of the output.
    pub norm: &'static str,
    /// Whether q and k have rotary position embeddings.
    pub rope: bool,
    /// Kernel size of the short convolution.
    pub conv: Option<usize>,
    /// How rows are rescaled to stay within float32: none, subtract, multiply.
    pub rescale: &'static str,
    /// The part that requires the KV store of the native engine, as in the variant string.
    pub pooled: Option<&'static str>,
}

/// The score function of near or far keys.
#[derive(Clone, Debug, Serialize)]
pub struct ScoreFn {
    /// The kernel w.
    pub kernel: Weight,
    /// The scale of scores, if given.
    pub scale: Option<f64>,
    /// Soft cap: scores x become cap·tanh(x/cap).
    pub cap: Option<f64>,
    /// Clamp: the largest score.
    pub clamp: Option<f64>,
    /// Dimension to which q and k are projected.
    pub dim: Option<usize>,
    /// Orders and a_n of w(x) = Σ a_n·x^n/n!, if the kernel has a finite state.
    pub state: Option<Vec<(usize, f64)>>,
}

/// A kernel.
#[derive(Clone, Debug, Serialize)]
pub struct Weight {
    /// exp, taylor, power or feature.
    pub kind: &'static str,
    /// The order of `taylor`, or the exponent of `power`.
    pub orders: Vec<usize>,
    /// a_n, if given.
    pub given: Option<Vec<f64>>,
    /// Whether a_n are learned per head.
    pub learned: bool,
    /// The feature map φ, unless it is the identity.
    pub map: Option<&'static str>,
}

/// The delta rule.
#[derive(Clone, Debug, Serialize)]
pub struct Write {
    /// Upper bound of β.
    pub range: f64,
    /// The scale of the product of a key with itself.
    pub scale: f64,
}

/// A denominator that is the sum of weights.
#[derive(Clone, Debug, Serialize)]
pub struct Sum {
    /// The lower bound of the sum.
    pub floor: Option<f64>,
    /// The constant added to the sum.
    pub eps: Option<f64>,
    /// Whether its gradient is zero.
    pub detached: bool,
    /// Whether a learned weight is added to the sum.
    pub sink: bool,
}

/// A gate after the norm.
#[derive(Clone, Debug, Serialize)]
pub struct Post {
    /// Its name in a variant string.
    pub kind: &'static str,
    /// Whether it is per channel.
    pub channel: bool,
}

/// A decay.
#[derive(Clone, Debug, Serialize)]
pub struct Fading {
    /// Its name in a variant string.
    pub kind: &'static str,
    /// Whether it is per channel.
    pub channel: bool,
    /// The divisor of the log of the decay.
    pub divisor: f64,
    /// Whether it is computed from logits.
    pub logits: bool,
    /// Whether the projection of the logits has a bias.
    pub bias: bool,
}

/// A norm of q and k.
#[derive(Clone, Debug, Serialize)]
pub struct Norm {
    /// Its name in a variant string.
    pub kind: &'static str,
    /// Whether it is computed over all heads at once.
    pub over_heads: bool,
    /// The constant added to the mean of squares.
    pub eps: f64,
}

impl Parts {
    /// The parts of a variant. A scale that is not given is `None`.
    pub fn new(variant: &Variant) -> Parts {
        let sum = if let Denominator::Sum(sum) = &variant.denominator { Some(sum) } else { None };
        Parts {
            text: variant.to_string(),
            near: ScoreFn::new(&variant.near),
            far: variant.far.as_ref().map(ScoreFn::new),
            window: variant.window,
            sinks: variant.sinks,
            write: variant.write.map(|delta| Write { range: delta.range, scale: delta.scale }),
            denominator: variant.denominator.info().word,
            sum: sum.map(|sum| Sum { floor: sum.floor, eps: sum.eps, detached: sum.detached, sink: sum.sink }),
            in_gate: variant.in_gate.is_some(),
            out_gate: variant.out_gate.as_ref().map(|gate| gate.info().word),
            post_gate: variant.post_gate.as_ref().map(|gate| Post { kind: gate.info().word, channel: PostGate::by_channel(gate) }),
            decay: variant.decay.as_ref().map(|decay| Fading {
                kind: decay.info().word,
                channel: decay.by_channel(),
                divisor: if let Decay::SigmoidDecay(sigmoid) = decay { sigmoid.divisor } else { 1.0 },
                logits: decay.has_logits(),
                bias: decay.has_bias(),
            }),
            qk_norm: variant.qk_norm.as_ref().map(|norm| match norm {
                QkNorm::QkRms(rms) => Norm { kind: "rms", over_heads: rms.all, eps: rms.eps },
                QkNorm::QkL2(_) => Norm { kind: "l2", over_heads: false, eps: 0.0 },
            }),
            norm: variant.norm.info().word,
            rope: variant.rope,
            conv: variant.conv,
            rescale: match variant.rescale() {
                Rescale::None => "none",
                Rescale::SubtractMax => "subtract",
                Rescale::Multiply => "multiply",
            },
            pooled: variant.inference_only(),
        }
    }

    /// With the default scales for this head dimension.
    pub fn at_dim(mut self, variant: &Variant, d: usize) -> Parts {
        self.near.scale = Some(variant.near.scale_for(d));
        if let (Some(own), Some(far)) = (&mut self.far, &variant.far) {
            own.scale = Some(far.scale_for(d));
        }
        self
    }
}

impl ScoreFn {
    fn new(score_fn: &termwise_attention::ScoreFn) -> ScoreFn {
        ScoreFn {
            kernel: Weight::new(&score_fn.kernel),
            scale: score_fn.scale,
            cap: score_fn.cap,
            clamp: score_fn.clamp,
            dim: score_fn.dim,
            state: if score_fn.has_finite_map() { score_fn.kernel.polynomial() } else { None },
        }
    }
}

impl Weight {
    fn new(kernel: &Kernel) -> Weight {
        let plain = Weight { kind: kernel.info().word, orders: Vec::new(), given: None, learned: false, map: None };
        match kernel {
            Kernel::Exp(_) => plain,
            Kernel::Power(power) => Weight { orders: vec![power.p as usize], ..plain },
            Kernel::Feature(feature) => {
                let map = match feature.map {
                    Map::Identity => None,
                    Map::Elu => Some("elu"),
                    Map::Relu => Some("relu"),
                    Map::L2 => Some("l2"),
                    Map::Hedgehog => Some("hedgehog"),
                };
                Weight { map, ..plain }
            }
            Kernel::Taylor(taylor) => Weight {
                orders: taylor.orders().to_vec(),
                given: if let Coefficients::Given(given) = taylor.coefficients() { Some(given.to_vec()) } else { None },
                learned: *taylor.coefficients() == Coefficients::Learned,
                ..plain
            },
        }
    }
}
