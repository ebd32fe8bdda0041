//! What the template asks of a variant.

use serde::Serialize;
use termwise_attention::parts::centre::Mean;
use termwise_attention::parts::gate::PostGate;
use termwise_attention::parts::kernel::taylor::{Coefficients, Taylor};
use termwise_attention::{Decay, Denominator, Kernel, Map, QkNorm, Rescale, Variant, Weighing};

use crate::Error;
use crate::export::reference::Reference;

/// Rows of a state beyond which keys are kept instead, at this head dimension unless the variant projects to fewer.
const MOST_ROWS: u128 = 1_000_000;
const USUAL_DIM: usize = 64;

#[derive(Serialize)]
pub struct Facts {
    title: String,
    head: String,
    near: Class,
    far: Option<Class>,
    classes: Vec<Class>,
    /// Whether a log scale ρ is taken out of each row.
    shifts: bool,
    /// Whether it is still missing when the norm is reached.
    restores: bool,
    /// Whether the mean of the keys seen is followed.
    running: bool,
    windowed: Option<Windowed>,
    /// What is kept between tokens: moments, window, cache.
    state_kind: &'static str,
    moments: Option<Moments>,
    /// What is kept of each key, as Python writes it.
    kept: String,
    over: &'static str,
    sums: bool,
    sink: bool,
    sum_floor: Option<String>,
    sum_eps: Option<String>,
    sum_detached: bool,
    in_gate: bool,
    out_gate: Option<&'static str>,
    post: Option<&'static str>,
    post_channel: bool,
    decay: Option<&'static str>,
    decay_logits: bool,
    decay_bias: &'static str,
    decay_divisor: String,
    /// Whether there is a decay by channel, and of how many channels.
    channel: bool,
    channels: String,
    delta: Option<Delta>,
    qk_norm: Option<&'static str>,
    qk_norm_all: bool,
    qk_norm_eps: String,
    norm: Option<&'static str>,
    rope: bool,
    conv: Option<usize>,
    test: Reference,
}

#[derive(Serialize)]
struct Windowed {
    window: usize,
    sinks: Option<usize>,
}

#[derive(Serialize)]
struct Delta {
    range: String,
    scale: String,
}

/// A kernel with a finite map, as a state.
#[derive(Serialize)]
struct Moments {
    of: &'static str,
    place: &'static str,
    /// Orders with a_n, as Python writes them.
    orders: String,
    /// Coordinates of a key, and of what its monomials are made of.
    plain: String,
    width: String,
    learned: bool,
    running: bool,
    /// The log of what multiplies all that is read.
    log: Option<String>,
}

/// How near or far keys are weighed.
#[derive(Clone, Serialize)]
struct Class {
    far: bool,
    /// In names.
    of: &'static str,
    /// In sentences.
    name: &'static str,
    /// Where its tensors are.
    place: &'static str,
    /// Which pairs are of the class: a name, and an expression.
    mask: &'static str,
    class: String,
    kernel: &'static str,
    formula: String,
    power: usize,
    map: Option<&'static str>,
    scale: Option<String>,
    cap: Option<String>,
    clamp: Option<String>,
    dim: Option<usize>,
    orders: Vec<usize>,
    learned: bool,
    coefficients: Option<String>,
    coefficients_about: String,
    at: Option<String>,
    /// Whether keys are shifted by a vector, whether by their mean so far, and whether what belongs to it is trained.
    shifted: bool,
    running: bool,
    gauss: bool,
    trained: &'static str,
    /// Whether queries bring the log of a factor.
    row: bool,
    /// Whether weights are computed in float64, and whether their size is taken out.
    wide: bool,
    rescaled: bool,
    /// Whether a function for w is needed.
    has_kernel: bool,
    /// Whether a state remembers its keys.
    remembered: bool,
    /// The log of what multiplies w: of pairs, and of rows alone.
    log: Option<String>,
    log_row: Option<String>,
}

fn python(x: f64) -> String {
    format!("{x:?}")
}

fn truth(x: bool) -> &'static str {
    if x { "True" } else { "False" }
}

fn added(terms: Vec<String>) -> Option<String> {
    (!terms.is_empty()).then(|| terms.join(" + "))
}

/// The weighing whose keys a state can remember, if there is a state of a size that one would want.
fn remembered(variant: &Variant) -> Option<Weighing> {
    let weighing = variant.remembered().filter(|weighing| weighing.has_finite_map() && weighing.kernel.rescale() == Rescale::None)?;
    weighing.state_rows(USUAL_DIM.max(weighing.dim.unwrap_or(0))).filter(|&rows| rows <= MOST_ROWS).map(|_| weighing)
}

impl Class {
    fn new(variant: &Variant, weighing: &Weighing, far: bool) -> Class {
        let of = if far { "far" } else { "near" };
        let sinks = |comparison: &str| format!("keys.position.mT {comparison} self.first");
        let class = match (variant.window, variant.sinks, far) {
            (None, ..) => "distance >= 0".into(),
            (_, None, false) => "(distance >= 0) & (distance < self.window)".into(),
            (_, Some(_), false) => format!("(distance >= 0) & ((distance < self.window) | ({}))", sinks("<")),
            (_, None, true) => "distance >= self.window".into(),
            (_, Some(_), true) => format!("(distance >= self.window) & ({})", sinks(">=")),
        };
        // For exp a centre is an identity.
        let is_exp = matches!(weighing.kernel, Kernel::Exp(_));
        let centre = weighing.centre;
        let mean = centre.filter(|_| !is_exp).map(|centre| centre.mean);
        let (shifted, running) = (mean.is_some_and(|mean| mean != Mean::Running), mean == Some(Mean::Running));
        let gauss = centre.is_some_and(|centre| centre.gauss);
        let row = shifted || gauss;
        let shifts = variant.rescale() != Rescale::None;
        let wide = weighing.kernel.rescale() == Rescale::Multiply;
        let (rescaled, by_head) = (wide && shifts, variant.decay.as_ref().is_some_and(|decay| !decay.by_channel()));
        let mut logs: Vec<String> = row.then(|| format!("i.{of}_row")).into_iter().collect();
        logs.extend(running.then(|| format!("i.{of}_centre")));
        let log_row = added(logs.clone());
        logs.extend(rescaled.then(|| "size".to_string()));
        logs.extend(by_head.then(|| "log_decay".to_string()));
        let taylor = if let Kernel::Taylor(taylor) = &weighing.kernel { Some(taylor) } else { None };
        let learned = weighing.learned() > 0;
        Class {
            far,
            of,
            name: if far { "far keys" } else { "keys" },
            place: if far { "self.far." } else { "self." },
            mask: if variant.window.is_none() { "seen" } else { of },
            class,
            kernel: weighing.kernel.info().word,
            formula: formula(&weighing.kernel),
            power: if let Kernel::Power(power) = &weighing.kernel { power.p as usize } else { 0 },
            map: match &weighing.kernel {
                Kernel::Feature(feature) => match feature.map {
                    Map::Identity => None,
                    Map::Elu => Some("elu"),
                    Map::Relu => Some("relu"),
                    Map::L2 => Some("l2"),
                    Map::Hedgehog => Some("hedgehog"),
                },
                _ => None,
            },
            scale: weighing.scale.map(python),
            cap: weighing.cap.map(python),
            clamp: weighing.clamp.map(python),
            dim: weighing.dim,
            orders: taylor.map_or(Vec::new(), |taylor| taylor.orders().to_vec()),
            learned,
            coefficients: taylor.filter(|_| !learned).map(coefficients),
            coefficients_about: format!("What x^n is multiplied by{}.", if far { " for far keys" } else { "" }),
            at: taylor.map(Taylor::centre).filter(|&c| c != 0.0).map(python),
            shifted,
            running,
            gauss,
            trained: truth(centre.is_some_and(|centre| centre.is_trained())),
            row,
            wide,
            rescaled,
            has_kernel: !(is_exp && shifts) || variant.write.is_some(),
            remembered: remembered(variant).is_some() && far == variant.window.is_some(),
            log: added(logs),
            log_row,
        }
    }
}

fn formula(kernel: &Kernel) -> String {
    match kernel {
        Kernel::Exp(_) => "e^x".into(),
        Kernel::Power(power) => format!("x^{}", power.p),
        Kernel::Feature(_) => "x".into(),
        Kernel::Taylor(taylor) => {
            let a = if *taylor.coefficients() == Coefficients::Ones { "" } else { "a_n·" };
            let x = match taylor.centre() {
                0.0 => "x".to_string(),
                c => format!("(x − ({c:?}))"),
            };
            format!("Σ_n {a}{x}^n/n!, n in {:?}", taylor.orders())
        }
    }
}

/// a_n/n! for n = 0, 1, …, as Python computes them.
fn coefficients(taylor: &Taylor) -> String {
    let (orders, degree) = (taylor.orders(), taylor.degree());
    match taylor.coefficients() {
        Coefficients::Given(given) => {
            let pairs: Vec<String> = orders.iter().zip(given).map(|(n, a)| format!("{n}: {a:?}")).collect();
            format!("[{{{}}}.get(n, 0.0) / math.factorial(n) for n in range({})]", pairs.join(", "), degree + 1)
        }
        _ if taylor.is_prefix() => format!("[1 / math.factorial(n) for n in range({})]", degree + 1),
        _ => {
            let orders: Vec<String> = orders.iter().map(usize::to_string).collect();
            format!("[1 / math.factorial(n) if n in {{{}}} else 0.0 for n in range({})]", orders.join(", "), degree + 1)
        }
    }
}

impl Facts {
    pub fn new(variant: &Variant, made_by: &str) -> Result<Facts, Error> {
        let near = Class::new(variant, &variant.near(), false);
        let far = variant.far.as_ref().map(|far| Class::new(variant, far, true));
        let state = remembered(variant);
        let state_kind = match (variant.window, &variant.far, &state) {
            (None, _, Some(_)) => "moments",
            (Some(_), None, _) | (Some(_), _, Some(_)) => "window",
            _ => "cache",
        };
        let decay = variant.decay.as_ref();
        let channel = decay.is_some_and(Decay::by_channel);
        let doubled = |map: Option<&str>, dim: &str| if map == Some("hedgehog") { format!("2 * {dim}") } else { dim.to_string() };
        let width = |class: &Class| doubled(class.map, if class.dim.is_none() { "d" } else { ["dim", "far_dim"][class.far as usize] });
        let moments = state.map(|weighing| {
            let class = if variant.window.is_some() { far.as_ref().unwrap_or(&near) } else { &near };
            let orders = weighing.kernel.polynomial().unwrap_or_default();
            let orders: Vec<String> = orders.iter().map(|(n, a)| format!("({n}, {a:?})")).collect();
            let decays = decay.is_some_and(|decay| !decay.by_channel());
            let log = class.log_row.clone().into_iter().chain(decays.then(|| "(i.c - past[\"c\"]).to(sums.dtype)".to_string())).collect();
            let plain = width(class);
            Moments {
                of: class.of,
                place: class.place,
                orders: format!("[{}]", orders.join(", ")),
                width: if class.running { format!("{plain} + 1") } else { plain.clone() },
                plain,
                learned: class.learned,
                running: class.running,
                log: added(log),
            }
        });
        let mut kept = vec!["\"position\"", "\"near_k\""];
        kept.extend(far.is_some().then_some("\"far_k\""));
        kept.push("\"v\"");
        kept.extend(decay.is_some().then_some("\"c\""));
        let sum = if let Denominator::Sum(sum) = &variant.denominator { Some(sum) } else { None };
        let norm = variant.norm.info().word;
        let (qk_norm_all, qk_norm_eps) = match &variant.qk_norm {
            Some(QkNorm::QkRms(rms)) => (rms.all, python(rms.eps)),
            _ => (false, String::new()),
        };
        Ok(Facts {
            title: format!("Attention `{variant}` for PyTorch."),
            head: head(variant, state_kind, moments.is_some(), made_by),
            shifts: variant.rescale() != Rescale::None,
            restores: variant.rescale() != Rescale::None && sum.is_none(),
            running: near.running || far.as_ref().is_some_and(|far| far.running),
            windowed: variant.window.map(|window| Windowed { window, sinks: variant.sinks }),
            state_kind,
            kept: format!("({})", kept.join(", ")),
            over: variant.denominator.info().word,
            sums: sum.is_some(),
            sink: sum.is_some_and(|sum| sum.sink),
            sum_floor: sum.and_then(|sum| sum.floor).map(python),
            sum_eps: sum.and_then(|sum| sum.eps).map(python),
            sum_detached: sum.is_some_and(|sum| sum.detached),
            in_gate: variant.in_gate.is_some(),
            out_gate: variant.out_gate.as_ref().map(|gate| gate.info().word),
            post: variant.post_gate.as_ref().map(|gate| gate.info().word),
            post_channel: variant.post_gate.as_ref().is_some_and(PostGate::by_channel),
            decay: decay.map(|decay| decay.info().word),
            decay_logits: decay.is_some_and(Decay::has_logits),
            decay_bias: truth(decay.is_some_and(Decay::has_bias)),
            decay_divisor: if let Some(Decay::SigmoidDecay(sigmoid)) = decay { python(sigmoid.divisor) } else { python(1.0) },
            channel,
            channels: match width(&near) {
                wide if wide.contains(' ') => format!("({wide})"),
                plain => plain,
            },
            delta: variant.write.map(|delta| Delta { range: python(delta.range), scale: python(delta.scale) }),
            qk_norm: variant.qk_norm.as_ref().map(|norm| norm.info().word),
            qk_norm_all,
            qk_norm_eps,
            norm: (norm != "none").then_some(norm),
            rope: variant.rope,
            conv: variant.conv,
            classes: [Some(&near), far.as_ref()].into_iter().flatten().cloned().collect(),
            test: Reference::new(variant)?,
            near,
            far,
            moments,
        })
    }
}

/// What the file says about itself, after its first line.
fn head(variant: &Variant, state_kind: &str, moments: bool, made_by: &str) -> String {
    let state = match (state_kind, moments) {
        ("moments", _) => "a matrix of constant size: the sum of Φ(k)·vᵀ over all keys, Φ the monomials of the kernel's orders",
        ("window", true) => "the keys and values of the window, and a matrix of constant size that a key enters when it leaves the window",
        ("window", false) => "the keys and values of the window",
        _ if variant.remembered().is_some_and(|weighing| weighing.has_finite_map()) => {
            "all keys and values: the kernel has a finite map, but a larger one than anybody would keep"
        }
        _ => "all keys and values: the kernel has no finite map",
    };
    format!(
        "    {}\n~\n\
         Written by {made_by}: `termwise export torch \"{variant}\"`. It needs PyTorch alone; run as a program it compares itself with reference\n\
         values, which stand at the end.\n~\n\
         Three forms of one computation: `parallel` takes all pairs of positions at once, `chunk` all pairs inside a chunk and a state between\n\
         chunks, `recurrent` one position after the other. The state is {state}.\n\
         `extend` and `step` go on from it. Parameters have the names that checkpoints of termwise have below `self_attn.`; q, k and v of grouped\n\
         heads are repeated, so that everything is per query head.",
        variant.formula()
    )
}
