//! Declarations of the experiments of arXiv 2507.23632: questions, results of the paper, variants and rules.

use super::claim::{Claim, Rule};
use super::experiment::{Experiment, Id, Task, Variant};
use super::scale::Scale;
use super::{Options, mqar, second_half, text};
use crate::Error;

/// The name of the baseline.
pub const SOFTMAX: &str = "softmax";
/// The linear attention that defines the margin of "equal": a share of its distance from softmax.
pub const LINEAR: &str = "linear ELU";
/// Margin of "equal" as a share of the distance between softmax and linear attention.
pub(super) const SHARE: f64 = 0.1;
/// The smallest difference that counts, in nats: an eighth of the distance between softmax and linear attention in A′ (0.30 at 300 M).
const MIN_DIFFERENCE: f64 = 0.04;

pub(super) fn variant(name: &str, attention: &str) -> Variant {
    Variant { name: name.into(), attention: attention.into(), settings: toml::Table::new(), seeds: None }
}

pub(super) fn lower(low: &str, high: &str, text: &str) -> Claim {
    Claim { text: text.into(), rule: Rule::Lower { low: low.into(), high: high.into(), least: MIN_DIFFERENCE } }
}

fn equal(one: &str, other: &str, text: &str) -> Claim {
    let (low, high) = (SOFTMAX.into(), LINEAR.into());
    Claim { text: text.into(), rule: Rule::Equal { one: one.into(), other: other.into(), low, high, share: SHARE } }
}

/// The trained experiments among these; `separation` and `bridge` train nothing.
///
/// # Errors
/// If an experiment on text has none.
pub fn experiments(options: &Options) -> Result<Vec<Experiment>, Error> {
    let mut found = Vec::new();
    for &id in &options.ids {
        found.extend(match (id, options.scale) {
            (Id::Mqar, _) => mqar::experiment(options),
            (_, Scale::Text | Scale::Test) if text::is_text(id) => text::experiment(id, options)?,
            _ => experiment(id, options.scale, &options.data),
        });
    }
    Ok(found)
}

fn experiment(id: Id, scale: Scale, text: &[String]) -> Option<Experiment> {
    let language = scale.language();
    // Text if given: in addition to synthetic recall, and always at the paper's scale.
    let with_text = || language.iter().cloned().chain(scale.text(text)).collect::<Vec<Task>>();
    let only_language = || if language.is_some() { language.iter().cloned().collect() } else { with_text() };
    let built = match id {
        Id::E1 => e1(with_text()),
        Id::E2 => Experiment { id, question: E2, paper: E2_FINDING, ..e1(scale.larger(text)) },
        Id::E3 => e3(with_text()),
        Id::E4 => e4(with_text()),
        Id::E5 => e5(scale, only_language()),
        Id::E6 => e6(language.iter().cloned().collect()),
        Id::E7 => e7(only_language()),
        Id::Overwrite => second_half::overwrite(scale),
        Id::Parity => second_half::parity(scale),
        Id::Distance => second_half::distance(scale),
        _ => return None,
    };
    (!built.tasks.is_empty()).then_some(built)
}

const E2: &str = "Does E1 hold for a wider model and for a longer context?";
const E2_FINDING: &str = "At 2 B parameters and at length 4096 Norm again coincides with softmax (log-loss 0.960 / 0.963, 1.151 / 1.154) and \
    Gate is worse (0.987, 1.170); at 2 B it blows up once and recovers.";

fn e1(tasks: Vec<Task>) -> Experiment {
    Experiment {
        id: Id::E1,
        question: "Can a norm or a gate replace the denominator of softmax?",
        paper: "Norm coincides with softmax (log-loss 0.946 against 0.945 on The Pile); Gate is worse by about 0.045 nats and spikes.",
        variants: vec![variant(SOFTMAX, "softmax"), variant("Norm", "norm"), variant("Gate", "gate"), variant(LINEAR, "linear_elu")],
        tasks,
        claims: vec![
            equal("Norm", SOFTMAX, "Norm coincides with softmax"),
            lower(SOFTMAX, "Gate", "Gate is worse than softmax"),
            lower(SOFTMAX, LINEAR, "softmax is better than linear attention"),
        ],
    }
}

fn e3(tasks: Vec<Task>) -> Experiment {
    let variants = vec![
        variant(SOFTMAX, "softmax"),
        variant("Norm", "norm"),
        variant("Gate", "gate"),
        variant(LINEAR, "linear_elu"),
        variant("linear ReLU", "linear_relu"),
        variant("linear cosine", "linear_cosine"),
        variant("ReLU with norm", "gated_ReLU_no_gate_L2norm_nodivS_noclamp"),
        variant("ReLU with gate", "gated_relu_no_in_gate_no_norm"),
    ];
    let claims = vec![
        lower(SOFTMAX, LINEAR, "linear attention with ELU + 1 is worse than softmax"),
        lower(SOFTMAX, "linear ReLU", "linear attention with ReLU is worse than softmax"),
        lower(SOFTMAX, "linear cosine", "linear attention with cosine is worse than softmax"),
        lower("Norm", LINEAR, "Norm is better than linear attention"),
        lower("Norm", "ReLU with norm", "under the same norm exp is better than ReLU"),
        lower("Gate", "ReLU with gate", "under the same gate exp is better than ReLU"),
    ];
    Experiment {
        id: Id::E3,
        question: "How much worse is linear attention, and is the kernel or the denominator the cause?",
        paper: "Linear attention is clearly worse; exp and a norm are what matters.",
        variants,
        tasks,
        claims,
    }
}

/// The name of the Taylor series up to an order.
pub fn series(order: usize) -> String {
    format!("orders 0..{order}")
}

fn e4(tasks: Vec<Task>) -> Experiment {
    let (lowest, highest) = (series(2), series(10));
    let mut variants = vec![variant(SOFTMAX, "softmax"), variant(LINEAR, "linear_elu")];
    variants.extend([1, 2, 4, 6, 8, 10].map(|order| variant(&series(order), &format!("taylor=0..{order}"))));
    Experiment {
        id: Id::E4,
        question: "How many Taylor orders are needed to match softmax?",
        paper: "Higher orders close the gap with shrinking steps: log-loss 1.34, 1.245, 1.23, 1.20, 1.20 for orders up to 2, 4, 6, 8, 10 \
            against 1.20 for softmax.",
        variants,
        tasks,
        claims: vec![
            lower(SOFTMAX, &lowest, "orders up to 2 are worse than softmax"),
            lower(&lowest, &series(1), "orders up to 2 are better than up to 1"),
            lower(&series(4), &lowest, "orders up to 4 are better than up to 2"),
            lower(&highest, &lowest, "orders up to 10 are better than up to 2"),
            lower(&lowest, LINEAR, "orders up to 2 are better than linear attention"),
            equal(&highest, SOFTMAX, "orders up to 10 coincide with softmax"),
        ],
    }
}

fn e5(scale: Scale, tasks: Vec<Task>) -> Experiment {
    let relu = "ReLU with norm";
    let mut variants = vec![
        variant(SOFTMAX, "softmax"),
        variant(LINEAR, "linear_elu"),
        variant("Norm", "norm"),
        variant("RMS norm", "gated_softmax_no_gate_rmsnorm"),
        variant(relu, "gated_ReLU_no_gate_L2norm_nodivS_noclamp"),
        variant("neither norm nor gate", "gated_softmax_no_gate_no_norm"),
    ];
    let mut claims = vec![
        equal("Norm", SOFTMAX, "an L2 norm does as well as the denominator"),
        equal("RMS norm", SOFTMAX, "an RMS norm does as well as the denominator"),
        lower("Norm", relu, "exp exchanged for ReLU is worse"),
        lower("RMS norm", "neither norm nor gate", "without a norm it is worse"),
    ];
    if !scale.is_short() {
        let parts = [
            ("Gate", "gate"),
            ("in and out gate, Layer norm", "gated_softmax"),
            ("no in gate", "gated_softmax_no_in_gate"),
            ("no out gate", "gated_softmax_no_out_gate"),
            ("both gates, no norm", "gated_softmax_no_norm"),
            ("in gate alone, no norm", "gated_softmax_no_out_gate_no_norm"),
            ("Layer norm", "gated_softmax_no_gate"),
            ("scaled L2 norm", "gated_softmax_no_gate_customnorm"),
            ("RMS norm, not divided by length", "gated_softmax_no_gate_rmsnorm_nodivS"),
            ("L2 norm, clamped", "gated_softmax_no_gate_L2norm_nodivS"),
            ("gate before the norm", "gated_softmax_out_gate_L2norm_nodivS_noclamp"),
            ("gate before and after the norm", "gated_softmax_post_out_gate_L2norm_nodivS_noclamp"),
            ("gate, not divided by length", "softmax_gate"),
            ("cumulative gate", "gated_softmax_cumgate"),
            ("ReLU with gate", "gated_relu_no_in_gate_no_norm"),
            ("denominator at least 1, clamped", "softmax_clamp_denom"),
            ("denominator detached", "softmax_detach_denom"),
            ("denominator detached, gate", "softmax_detach_denom_gate"),
        ];
        variants.extend(parts.iter().map(|(name, attention)| variant(name, attention)));
        claims.push(equal("Layer norm", SOFTMAX, "a Layer norm does as well as the denominator"));
        claims.push(lower("in and out gate, Layer norm", "both gates, no norm", "with gates, too, it is worse without a norm"));
        claims.push(lower("Gate", "ReLU with gate", "under the same gate exp is better than ReLU"));
    }
    Experiment {
        id: Id::E5,
        question: "Which parts matter?",
        paper: "Any of the norms does as well as the denominator; exp and a norm are the crucial parts.",
        variants,
        tasks,
        claims,
    }
}

/// Its claims are decided by the term spectra of the trained models: see [`super::inside`].
fn e6(tasks: Vec<Task>) -> Experiment {
    Experiment {
        id: Id::E6,
        question: "How large are the terms of the series inside trained models?",
        paper: "In Llama-3-8B the dominant order is 5 to 23 in all layers but the last, where it is 74.",
        variants: vec![variant(SOFTMAX, "softmax")],
        tasks,
        claims: Vec::new(),
    }
}

fn e7(tasks: Vec<Task>) -> Experiment {
    Experiment {
        id: Id::E7,
        question: "Does the series, summed term by term, train like softmax?",
        paper: "The curves are equal.",
        variants: vec![variant(SOFTMAX, "softmax"), variant(LINEAR, "linear_elu"), variant("80 terms", "softmax_taylor_80terms")],
        tasks,
        claims: vec![equal("80 terms", SOFTMAX, "80 terms train like softmax")],
    }
}

/// The reason why an experiment has no runs at this scale.
pub fn why_left_out(id: Id, scale: Scale) -> String {
    match id {
        Id::E2 => format!("a wider model and a longer context take more time than --scale {} has; use --scale laptop", scale.name()),
        Id::Overwrite | Id::Parity | Id::Distance => {
            format!("tuning a learning rate per variant takes more time than --scale {} has; use --scale laptop", scale.name())
        }
        _ if text::is_text(id) => "it needs a training text; use --scale text --data FOLDER".into(),
        Id::Mqar => "it has its own sizes; use --scale mini or --scale zoology".into(),
        Id::E6 => "it analyzes models that were trained here; `termwise spectrum` analyzes other models".into(),
        _ => format!("it has no runs at --scale {}", scale.name()),
    }
}
