//! Multi-query associative recall: which mixers solve it, at which bytes of state.

use toml::Value;

use super::claim::{Claim, Rule};
use super::experiment::{Experiment, Id, Metric, Task, Variant};
use super::list::{LINEAR, SOFTMAX, series, variant};
use super::scale::{Scale, table};
use super::text::window;
use super::{Options, second_half};

/// Four learning rates of Zoology, 10^−3 to 10^−1.5 in equal ratios.
const RATES: [f64; 4] = [1e-3, 3.162e-3, 1e-2, 3.162e-2];
/// Minimum accuracy of a run that has solved the task.
pub const SOLVED: f64 = 0.9;
/// Every attention has the short convolution of Zoology's layers and no positions.
const WORDS: &str = "conv=3 rope=off";

/// The settings of `--data mqar-mini` with fewer steps: softmax solves it within 300.
const MINI: &str = r#"
data = ["mqar-mini"]
steps = 1000
eval_every = 250
checkpoint_every = 500
keep = 1
"#;

/// 32 epochs of 180,000 examples in batches of 256.
const ZOOLOGY: &str = r#"
data = ["mqar"]
steps = 22500
warmup = 2250
eval_every = 2250
checkpoint_every = 500
keep = 1
"#;

/// A few steps, for tests.
const TEST: &str = r#"
data = ["mqar-mini"]
language = "vocabulary=32 train=16:2:40 test=16:2:10"
hidden = 16
mlp = 8
layers = 1
heads = 1
length = 16
eval_length = 16
batch = 2
steps = 4
warmup = 1
eval_every = 2
log_every = 2
checkpoint_every = 0
keep = 1
"#;

/// The experiment at this scale; `None` at scales without one.
pub fn experiment(options: &Options) -> Option<Experiment> {
    let (base, published) = match options.scale {
        Scale::Test => (TEST, false),
        Scale::Mini => (MINI, false),
        Scale::Zoology => (ZOOLOGY, true),
        _ => return None,
    };
    let base = table(&[base]);
    let mut tuning = second_half::tuning_documents(&base);
    if options.scale == Scale::Mini {
        tuning.extend([("steps", 500), ("eval_every", 500)].map(|(key, value)| (key.to_owned(), Value::Integer(value))));
    }
    let rates = if options.scale == Scale::Test { &RATES[1..3] } else { &RATES[..] };
    let name = if published { "MQAR" } else { "mini MQAR" };
    let task = Task { name: name.into(), base, words: WORDS, metric: Metric::Error, rates: rates.into(), tuning };
    let claims = if published { Vec::new() } else { claims() };
    let mut variants = if published { published_points() } else { families() };
    if options.scale == Scale::Test {
        variants.retain(|variant| claims.iter().any(|claim| claim.rule.sides().contains(&variant.name.as_str())));
        variants.iter_mut().for_each(|variant| variant.settings.clear());
    }
    Some(Experiment {
        id: Id::Mqar,
        question: "Which sequence mixers solve multi-query associative recall, and at how many bytes of state?",
        paper: "Attention solves MQAR; rivals need states that grow with the number of pairs (arXiv 2312.04927, arXiv 2402.18668). Zoology's models \
            have no MLP, LayerNorm, and stop early at 0.99; these have a small MLP, RMSNorm and no early stop.",
        variants,
        tasks: vec![task],
        claims,
    })
}

/// With heads of dimension d in a model of this width.
fn sized(name: &str, attention: &str, width: i64, d: i64) -> Variant {
    let settings = [("hidden", width), ("mlp", width), ("heads", width / d)];
    let settings = settings.map(|(key, value)| (key.to_owned(), Value::Integer(value))).into_iter().collect();
    Variant { settings, ..variant(&format!("{name}, d {d}"), attention) }
}

/// The mini frontier: width 64.
fn families() -> Vec<Variant> {
    let mut variants = vec![variant(SOFTMAX, "softmax")];
    variants.extend([16, 64].map(|keys| variant(&window(keys), &format!("softmax window={keys}"))));
    let of = |name: &str, attention: &str, d| sized(name, attention, 64, d);
    variants.extend([of(LINEAR, "linear_elu", 16), of(LINEAR, "linear_elu", 64)]);
    variants.extend([of(&series(2), "taylor=0..2", 16), of(&series(4), "taylor=0..4", 8)]);
    variants.extend([of("DeltaNet", "deltanet", 64), of("Gated DeltaNet", "gated_deltanet", 64)]);
    variants
}

/// Points of Zoology with the accuracy that it publishes.
fn published_points() -> Vec<Variant> {
    let of = |name: &str, attention: &str, width, published: f64| {
        let variant = sized(name, attention, width, width);
        Variant { name: format!("{} (published {published})", variant.name), ..variant }
    };
    vec![
        of("attention", "softmax", 64, 1.0),
        of("DeltaNet", "deltanet", 64, 0.793),
        of("Based, feature 16", "based", 64, 0.913),
        of("window 64", "softmax window=64", 128, 0.515),
        of("DeltaNet", "deltanet", 128, 0.963),
        of("Gated DeltaNet", "gated_deltanet", 64, 0.89),
        of("GLA", "gla", 128, 0.77),
    ]
}

fn claims() -> Vec<Claim> {
    let solves = |one: &str, other: &str, text: &str| Claim {
        text: text.into(),
        rule: Rule::Solves { one: one.into(), other: other.into(), accuracy: SOLVED },
    };
    let (linear, taylor) = (format!("{LINEAR}, d 16"), format!("{}, d 16", series(2)));
    vec![
        solves(SOFTMAX, &window(16), "softmax solves it more often than a window of 16 keys"),
        solves(SOFTMAX, &linear, "softmax solves it more often than linear attention"),
        solves(&taylor, &linear, "orders 0..2 solve it more often than linear attention at the same head dimension"),
        solves(
            "DeltaNet, d 64",
            &format!("{LINEAR}, d 64"),
            "DeltaNet solves it more often than linear attention at the same head dimension",
        ),
        solves(&taylor, &window(64), "orders 0..2 solve it more often than a window of 64 keys"),
    ]
}
