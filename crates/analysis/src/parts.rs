//! A variant as plain data, for code that is written elsewhere and need not parse texts: the PyTorch engine of the Python package reads it as JSON, exported
//! modules are made from it.

use serde::Serialize;
use termwise_attention::parts::gate::PostGate;
use termwise_attention::parts::kernel::taylor::Coefficients;
use termwise_attention::{Decay, Denominator, Kernel, Map, QkNorm, Rescale, Variant};

/// What stands in each slot of the formula; absent parts are `None`.
#[derive(Clone, Debug, Serialize)]
pub struct Parts {
    /// As it is written.
    pub text: String,
    /// How keys are weighed, with a window those in it.
    pub near: ScoreFn,
    /// How keys behind the window are.
    pub far: Option<ScoreFn>,
    /// Keys that are near.
    pub window: Option<usize>,
    /// First keys that stay near.
    pub sinks: Option<usize>,
    /// The delta rule.
    pub write: Option<Write>,
    /// The word of the denominator.
    pub denominator: &'static str,
    /// What belongs to a sum.
    pub sum: Option<Sum>,
    /// Whether values are gated.
    pub in_gate: bool,
    /// The gate before the norm.
    pub out_gate: Option<&'static str>,
    /// The gate after it.
    pub post_gate: Option<Post>,
    /// How weights fade with distance.
    pub decay: Option<Fading>,
    /// That of q and k.
    pub qk_norm: Option<Norm>,
    /// That of the output.
    pub norm: &'static str,
    /// Whether q and k are turned by their position.
    pub rope: bool,
    /// Positions that a short convolution sees.
    pub conv: Option<usize>,
    /// How rows are kept within float32: none, subtract, multiply.
    pub rescale: &'static str,
    /// The part that needs the KV store of the native engine, as written in the variant string.
    pub pooled: Option<&'static str>,
}

/// How the keys of a class are weighed.
#[derive(Clone, Debug, Serialize)]
pub struct ScoreFn {
    /// w
    pub kernel: Weight,
    /// Of scores, where it is given.
    pub scale: Option<f64>,
    /// Scores x become cap·tanh(x/cap).
    pub cap: Option<f64>,
    /// The largest score.
    pub clamp: Option<f64>,
    /// What q and k are projected to.
    pub dim: Option<usize>,
    /// Orders and a_n of w(x) = Σ a_n·x^n/n!, where a state can hold them.
    pub state: Option<Vec<(usize, f64)>>,
}

/// w
#[derive(Clone, Debug, Serialize)]
pub struct Weight {
    /// exp, taylor, power or feature.
    pub kind: &'static str,
    /// Of a taylor; the power.
    pub orders: Vec<usize>,
    /// a_n, where they are given.
    pub given: Option<Vec<f64>>,
    /// Whether a_n are learned per head.
    pub learned: bool,
    /// φ, unless it is the identity.
    pub map: Option<&'static str>,
}

/// What is written is what was not there yet.
#[derive(Clone, Debug, Serialize)]
pub struct Write {
    /// β is between 0 and this.
    pub range: f64,
    /// Of the product of a key with itself.
    pub scale: f64,
}

/// A denominator that is the sum of weights.
#[derive(Clone, Debug, Serialize)]
pub struct Sum {
    /// The least that the sum can be.
    pub floor: Option<f64>,
    /// What is added to it.
    pub eps: Option<f64>,
    /// Whether it has no gradient.
    pub detached: bool,
    /// Whether a learned weight is added to it.
    pub sink: bool,
}

/// A gate after the norm.
#[derive(Clone, Debug, Serialize)]
pub struct Post {
    /// Its word.
    pub kind: &'static str,
    /// Whether it has a number for each channel.
    pub channel: bool,
}

/// A decay.
#[derive(Clone, Debug, Serialize)]
pub struct Fading {
    /// Its word.
    pub kind: &'static str,
    /// Whether it has a number for each channel.
    pub channel: bool,
    /// What the log of the decay is divided by.
    pub divisor: f64,
    /// Whether it reads logits.
    pub logits: bool,
    /// Whether their projection has a bias.
    pub bias: bool,
}

/// A norm of q and k.
#[derive(Clone, Debug, Serialize)]
pub struct Norm {
    /// Its word.
    pub kind: &'static str,
    /// Whether it is taken over all heads at once.
    pub over_heads: bool,
    /// What is added to the mean of squares.
    pub eps: f64,
}

impl Parts {
    /// Those of a variant; the scale of scores stays open where it is not given.
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

    /// With scales of scores as they are for this head dimension.
    pub fn at_dim(mut self, variant: &Variant, d: usize) -> Parts {
        self.near.scale = Some(variant.near.scale_for(d));
        if let (Some(own), Some(far)) = (&mut self.far, &variant.far) {
            own.scale = Some(far.scale_for(d));
        }
        self
    }
}

impl ScoreFn {
    fn new(weighing: &termwise_attention::ScoreFn) -> ScoreFn {
        ScoreFn {
            kernel: Weight::new(&weighing.kernel),
            scale: weighing.scale,
            cap: weighing.cap,
            clamp: weighing.clamp,
            dim: weighing.dim,
            state: if weighing.has_finite_map() { weighing.kernel.polynomial() } else { None },
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
