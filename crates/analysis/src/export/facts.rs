//! What the template asks of a variant.

use serde::Serialize;
use termwise_attention::parts::kernel::taylor::{Coefficients, Taylor};
use termwise_attention::{Kernel, Rescale, Variant};

use crate::Error;
use crate::export::reference::Reference;
use crate::parts::{Parts, ScoreFn};

/// Rows of a state beyond which keys are kept instead, at this head dimension unless the variant projects to fewer.
const MOST_ROWS: u128 = 1_000_000;
const USUAL_DIM: usize = 64;

#[derive(Serialize)]
pub struct Facts {
    title: String,
    head: String,
    /// The variant.
    v: Parts,
    /// How its keys are weighed, with what follows from it.
    near: Class,
    far: Option<Class>,
    classes: Vec<Class>,
    /// Whether a log scale ρ is taken out of each row.
    shifts: bool,
    /// Whether it is still missing when the norm is reached.
    restores: bool,
    /// What is kept between tokens: moments, window, cache.
    state_kind: &'static str,
    moments: Option<Moments>,
    /// What is kept of each key, as Python writes it.
    kept: String,
    /// Of a decay by channel, as Python writes it.
    channels: String,
    test: Reference,
}

/// A kernel with a finite map, as a state.
#[derive(Serialize)]
struct Moments {
    of: &'static str,
    place: &'static str,
    /// Orders with a_n, as Python writes them.
    orders: String,
    /// Coordinates of a key.
    width: String,
    learned: bool,
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
    #[serde(flatten)]
    weighing: ScoreFn,
    formula: String,
    coefficients: Option<String>,
    coefficients_about: String,
    /// Whether weights are computed in float64, and whether their size is taken out.
    wide: bool,
    rescaled: bool,
    /// Whether a function for w is needed.
    has_kernel: bool,
    /// Whether a state remembers its keys.
    remembered: bool,
    /// The log of what multiplies w.
    log: Option<String>,
}

/// A number as Python writes it, for the template.
pub fn python(x: f64) -> String {
    format!("{x:?}")
}

fn added(terms: Vec<String>) -> Option<String> {
    (!terms.is_empty()).then(|| terms.join(" + "))
}

/// The weighing whose keys a state can remember, if there is a state of a size that one would want.
fn remembered(variant: &Variant) -> Option<&termwise_attention::ScoreFn> {
    let weighing = variant.remembered().filter(|weighing| weighing.has_finite_map() && weighing.kernel.rescale() == Rescale::None)?;
    weighing.state_rows(USUAL_DIM.max(weighing.dim.unwrap_or(0))).filter(|&rows| rows <= MOST_ROWS).map(|_| weighing)
}

impl Class {
    fn new(variant: &Variant, weighing: &termwise_attention::ScoreFn, own: ScoreFn, far: bool) -> Class {
        let of = if far { "far" } else { "near" };
        let sinks = |comparison: &str| format!("keys.position.mT {comparison} self.first");
        let class = match (variant.window, variant.sinks, far) {
            (None, ..) => "distance >= 0".into(),
            (_, None, false) => "(distance >= 0) & (distance < self.window)".into(),
            (_, Some(_), false) => format!("(distance >= 0) & ((distance < self.window) | ({}))", sinks("<")),
            (_, None, true) => "distance >= self.window".into(),
            (_, Some(_), true) => format!("(distance >= self.window) & ({})", sinks(">=")),
        };
        let is_exp = matches!(weighing.kernel, Kernel::Exp(_));
        let shifts = variant.rescale() != Rescale::None;
        let wide = weighing.kernel.rescale() == Rescale::Multiply;
        let (rescaled, by_head) = (wide && shifts, variant.decay.as_ref().is_some_and(|decay| !decay.by_channel()));
        let logs = [(rescaled, "size"), (by_head, "log_decay")].into_iter().filter(|(there, _)| *there).map(|(_, name)| name.to_string());
        let taylor = if let Kernel::Taylor(taylor) = &weighing.kernel { Some(taylor) } else { None };
        Class {
            far,
            of,
            name: if far { "far keys" } else { "keys" },
            place: if far { "self.far." } else { "self." },
            mask: if variant.window.is_none() { "seen" } else { of },
            class,
            formula: formula(&weighing.kernel),
            coefficients: taylor.filter(|_| !own.kernel.learned).map(coefficients),
            coefficients_about: format!("What x^n is multiplied by{}.", if far { " for far keys" } else { "" }),
            weighing: own,
            wide,
            rescaled,
            has_kernel: !(is_exp && shifts) || variant.write.is_some(),
            remembered: remembered(variant).is_some() && far == variant.window.is_some(),
            log: added(logs.collect()),
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
            format!("Σ_n {a}x^n/n!, n in {:?}", taylor.orders())
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
        let v = Parts::new(variant);
        let near = Class::new(variant, &variant.near, v.near.clone(), false);
        let far = variant.far.as_ref().zip(v.far.clone()).map(|(far, own)| Class::new(variant, far, own, true));
        let state = remembered(variant);
        let state_kind = match (variant.window, &variant.far, &state) {
            (None, _, Some(_)) => "moments",
            (Some(_), None, _) | (Some(_), _, Some(_)) => "window",
            _ => "cache",
        };
        let doubled = |map: Option<&str>, dim: &str| if map == Some("hedgehog") { format!("2 * {dim}") } else { dim.to_string() };
        let width = |class: &Class| {
            let dim = if class.weighing.dim.is_none() { "d" } else { ["dim", "far_dim"][class.far as usize] };
            doubled(class.weighing.kernel.map, dim)
        };
        let moments = state.map(|weighing| {
            let class = if variant.window.is_some() { far.as_ref().unwrap_or(&near) } else { &near };
            let orders = weighing.kernel.polynomial().unwrap_or_default();
            let orders: Vec<String> = orders.iter().map(|(n, a)| format!("({n}, {a:?})")).collect();
            let decays = v.decay.as_ref().is_some_and(|decay| !decay.channel);
            Moments {
                of: class.of,
                place: class.place,
                orders: format!("[{}]", orders.join(", ")),
                width: width(class),
                learned: class.weighing.kernel.learned,
                log: decays.then(|| "(i.c - past[\"c\"]).to(sums.dtype)".to_string()),
            }
        });
        let mut kept = vec!["\"position\"", "\"near_k\""];
        kept.extend(far.is_some().then_some("\"far_k\""));
        kept.push("\"v\"");
        kept.extend(v.decay.is_some().then_some("\"c\""));
        Ok(Facts {
            title: format!("Attention `{variant}` for PyTorch."),
            head: head(variant, state_kind, moments.is_some(), made_by),
            shifts: variant.rescale() != Rescale::None,
            restores: variant.rescale() != Rescale::None && v.sum.is_none(),
            state_kind,
            kept: format!("({})", kept.join(", ")),
            channels: match width(&near) {
                wide if wide.contains(' ') => format!("({wide})"),
                plain => plain,
            },
            classes: [Some(&near), far.as_ref()].into_iter().flatten().cloned().collect(),
            test: Reference::new(variant)?,
            v,
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
