//! Experiments on text: loss against order, and loss against bytes of state.
//!
//! Every experiment exists twice, without a short convolution and with `conv=4` in every variant. No comparison mixes the two. Each variant gets
//! its learning rate from one grid, at a third of the tokens, with [`TUNING_SEED`](super::TUNING_SEED), on a tuning part of the held-out text.
//! Variants are compared on the other part with other seeds.

use std::path::{Path, PathBuf};

use termwise_data::DataConfig;
use termwise_data::bpe::{self, BpeConfig};
use toml::{Table, Value};

use super::claim::{Claim, Rule};
use super::experiment::{Experiment, Id, Metric, Task, Variant};
use super::list::{LINEAR, SOFTMAX, series, variant};
use super::scale::{Scale, table};
use super::{Options, SHARE};
use crate::Error;

/// Each a factor of 2 from the next. An earlier run had 1.2e-2 in place of 7.5e-4: no variant chose 1.2e-2, and eight of eleven chose the lowest rate.
const RATES: [f64; 4] = [7.5e-4, 1.5e-3, 3e-3, 6e-3];
/// The smallest difference that counts, in nats per token.
const MIN_DIFFERENCE: f64 = 0.02;
/// Default number of training tokens per run: 2,048 steps.
pub const TOKENS: u64 = 1 << 22;
/// The part of the held-out text on which learning rates are chosen, and the part on which variants are compared.
const TUNING_RANGE: &str = "0..0.3";
const FINAL_RANGE: &str = "0.3..1";
/// Held-out tokens of an evaluation during training.
const VALID_TOKENS: i64 = 1 << 16;
/// Seeds of variants that no claim needs.
const FEWER_SEEDS: usize = 2;
/// Vocabulary sizes of the BPE tokenizers.
const VOCABULARIES: [usize; 2] = [512, 4096];

const MODEL: &str = r#"
recipe = "default"
hidden = 128
mlp = 344
heads = 8
layers = 4
length = 512
batch = 4
eval_batches = 0
log_every = 20
checkpoint_every = 100
keep = 1
"#;

/// A few steps, for tests: overrides of [`MODEL`].
const TEST: &str = "hidden = 32\nmlp = 16\nheads = 2\nlayers = 1\nlength = 32\nbatch = 2\nlog_every = 2\ncheckpoint_every = 0\n";

/// The training text and the held-out text that the options name: one folder with `train.txt` and `valid.txt`, or files. Without a held-out text the end
/// of the training text is held out.
///
/// # Errors
/// If there is no text.
pub fn files(options: &Options) -> Result<(Vec<String>, Vec<String>), Error> {
    if options.data.is_empty() {
        let problem = "--scale text needs a text: name a folder with train.txt and valid.txt, or files, with --data";
        return Err(Error::Sizes(problem.into()));
    }
    let pair = |folder: &Path| ["train.txt", "valid.txt"].map(|name| folder.join(name));
    if let ([folder], true) = (&options.data[..], options.valid_data.is_empty()) {
        let [train, valid] = pair(Path::new(folder));
        if train.is_file() && valid.is_file() {
            let text = |path: PathBuf| vec![path.display().to_string()];
            return Ok((text(train), text(valid)));
        }
    }
    Ok((options.data.clone(), options.valid_data.clone()))
}

/// The BPE tokenizer of this vocabulary in the folder of results.
fn tokenizer_path(out: &Path, vocabulary: usize) -> PathBuf {
    out.join("tokenizers").join(format!("bpe-{vocabulary}")).join("tokenizer.json")
}

/// Trains the BPE tokenizers that these experiments need and that are not there yet, on the training text.
///
/// # Errors
/// If the text cannot be read or a file cannot be written.
pub fn train_tokenizers(options: &Options, experiments: &[Experiment]) -> Result<(), Error> {
    if !experiments.iter().any(|experiment| experiment.id == Id::Tokenization) {
        return Ok(());
    }
    let (sources, _) = files(options)?;
    for vocabulary in vocabularies(options.scale) {
        let path = tokenizer_path(&options.out, vocabulary);
        if path.is_file() {
            continue;
        }
        let folder = path.parent().unwrap_or(&options.out);
        std::fs::create_dir_all(folder).map_err(termwise_model::Error::io("create", folder))?;
        let config = BpeConfig { vocabulary, ..BpeConfig::default() };
        bpe::train(&DataConfig { sources: sources.clone(), ..DataConfig::default() }, &config, &path)
            .map_err(termwise_train::Error::from)?;
    }
    Ok(())
}

fn vocabularies(scale: Scale) -> Vec<usize> {
    if scale == Scale::Test { vec![260] } else { VOCABULARIES.into() }
}

/// The task of a tokenization; `words` are added to every attention.
fn task(options: &Options, name: &str, tokenizer: Option<&Path>, words: &'static str) -> Result<Task, Error> {
    let (train, valid) = files(options)?;
    let mut base = table(&[MODEL, if options.scale == Scale::Test { TEST } else { "" }]);
    let number = |key: &str| base.get(key).and_then(Value::as_integer).unwrap_or(1).max(1) as u64;
    let per_step = number("batch") * number("length");
    let steps = (options.tokens.unwrap_or(TOKENS) / per_step).max(3);
    let list = |names: Vec<String>| Value::Array(names.into_iter().map(Value::String).collect());
    base.insert("data".into(), list(train));
    if !valid.is_empty() {
        base.insert("valid_data".into(), list(valid));
    }
    if let Some(path) = tokenizer {
        base.insert("tokenizer".into(), Value::String(path.display().to_string()));
    }
    base.insert("valid_tokens".into(), Value::Integer(VALID_TOKENS));
    base.insert("valid_range".into(), Value::String(FINAL_RANGE.into()));
    base.extend(duration(steps, (steps / 4).max(1)));
    let mut tuning = duration((steps / 3).max(1), (steps / 3).max(1));
    tuning.insert("valid_range".into(), Value::String(TUNING_RANGE.into()));
    let rates = if options.scale == Scale::Test { &RATES[1..3] } else { &RATES[..] };
    Ok(Task { name: name.into(), base, words, metric: Metric::Loss, rates: rates.into(), tuning })
}

/// Steps, warmup (4 % of the steps) and evaluation interval.
fn duration(steps: u64, eval_every: u64) -> Table {
    let entries = [("steps", steps), ("warmup", (steps / 25).max(1)), ("eval_every", eval_every)];
    entries.map(|(key, value)| (key.to_owned(), Value::Integer(value as i64))).into_iter().collect()
}

/// Whether an experiment is declared here.
pub fn is_text(id: Id) -> bool {
    plain(id).is_some()
}

/// The experiment without a convolution, and whether this one has it.
pub fn plain(id: Id) -> Option<(Id, bool)> {
    Some(match id {
        Id::Orders => (Id::Orders, false),
        Id::OrdersConv => (Id::Orders, true),
        Id::State => (Id::State, false),
        Id::StateConv => (Id::State, true),
        Id::Delta => (Id::Delta, false),
        Id::DeltaConv => (Id::Delta, true),
        Id::Families => (Id::Families, false),
        Id::FamiliesConv => (Id::Families, true),
        Id::Tokenization => (Id::Tokenization, false),
        _ => return None,
    })
}

/// The experiment of this name; `None` where it is not one on text.
///
/// # Errors
/// If there is no text.
pub fn experiment(id: Id, options: &Options) -> Result<Option<Experiment>, Error> {
    let Some((kind, conv)) = plain(id) else { return Ok(None) };
    let words = if conv { "conv=4" } else { "conv=off" };
    let mut experiment = match kind {
        Id::Orders => orders(),
        Id::State => state(),
        Id::Delta => delta(),
        Id::Families => families(),
        _ => tokenization(),
    };
    experiment.id = id;
    let name = if conv { "bytes, conv=4" } else { "bytes" };
    experiment.tasks = vec![task(options, name, None, words)?];
    if kind == Id::Tokenization {
        for vocabulary in vocabularies(options.scale) {
            let path = tokenizer_path(&options.out, vocabulary);
            experiment.tasks.push(task(options, &format!("BPE-{vocabulary}"), Some(&path), words)?);
        }
    }
    let needed: Vec<String> = experiment.claims.iter().flat_map(|claim| claim.rule.sides()).map(str::to_owned).collect();
    if kind != Id::Orders {
        for variant in experiment.variants.iter_mut().filter(|variant| !needed.contains(&variant.name)) {
            variant.seeds = Some(FEWER_SEEDS);
        }
    }
    if options.scale == Scale::Test {
        experiment.variants.retain(|variant| needed.contains(&variant.name));
    }
    Ok(Some(experiment))
}

fn lower(low: &str, high: &str, text: &str) -> Claim {
    Claim { text: text.into(), rule: Rule::Lower { low: low.into(), high: high.into(), least: MIN_DIFFERENCE } }
}

fn equal(one: &str, text: &str) -> Claim {
    let (low, high) = (SOFTMAX.into(), LINEAR.into());
    Claim { text: text.into(), rule: Rule::Equal { one: one.into(), other: SOFTMAX.into(), low, high, share: SHARE } }
}

/// With heads of another dimension d; width is 128, so there are 128 / d of them.
fn with_head_dim(name: &str, attention: &str, d: i64) -> Variant {
    let settings = Table::from_iter([("heads".to_owned(), Value::Integer(128 / d))]);
    Variant { settings, ..variant(&format!("{name}, d {d}"), attention) }
}

fn taylor(order: usize) -> Variant {
    variant(&series(order), &format!("taylor=0..{order}"))
}

fn taylor_of(order: usize, d: i64) -> Variant {
    with_head_dim(&series(order), &format!("taylor=0..{order}"), d)
}

/// The highest orders of Figure 1.
pub const ORDERS: [usize; 7] = [1, 2, 3, 4, 6, 8, 10];

fn orders() -> Experiment {
    let mut variants = vec![variant(SOFTMAX, "softmax"), variant(LINEAR, "linear_elu")];
    variants.extend(ORDERS.map(taylor));
    variants.extend([variant("Norm", "norm"), variant("Gate", "gate")]);
    Experiment {
        id: Id::Orders,
        question: "How does held-out loss on text depend on the highest Taylor order?",
        paper: "At 275 M parameters higher orders close the gap to softmax with shrinking steps, Norm coincides with softmax, and Gate is \
            worse by about 0.045 nats (arXiv 2507.23632).",
        variants,
        tasks: Vec::new(),
        claims: vec![
            lower(SOFTMAX, LINEAR, "softmax is better than linear attention"),
            lower(SOFTMAX, &series(1), "softmax is better than orders 0..1"),
            lower(&series(2), &series(1), "orders 0..2 are better than 0..1"),
            lower(&series(4), &series(2), "orders 0..4 are better than 0..2"),
            equal(&series(10), "orders 0..10 coincide with softmax"),
            equal("Norm", "Norm coincides with softmax"),
            lower(SOFTMAX, "Gate", "Gate is worse than softmax"),
        ],
    }
}

/// The name of a sliding window.
pub fn window(keys: usize) -> String {
    format!("window {keys}")
}

fn state() -> Experiment {
    let mut variants = vec![variant(SOFTMAX, "softmax")];
    variants.extend([8, 16, 32, 64, 128, 256].map(|keys| variant(&window(keys), &format!("softmax window={keys}"))));
    variants.push(variant(LINEAR, "linear_elu"));
    variants.extend([taylor(1), taylor(2), taylor_of(2, 8), taylor_of(2, 32), taylor_of(3, 8)]);
    variants.extend([with_head_dim("DeltaNet", "deltanet", 32), with_head_dim("DeltaNet", "deltanet", 64)]);
    variants.push(with_head_dim("Gated DeltaNet", "gated_deltanet", 32));
    Experiment {
        id: Id::State,
        question: "How does held-out loss on text depend on the bytes of recurrent state or KV cache?",
        paper: "For trained models nothing is published; arXiv 2602.00294 proposes states of four Taylor terms and tests random vectors.",
        variants,
        tasks: Vec::new(),
        claims: vec![
            lower(&series(2), &window(64), "orders 0..2 are better than a window of no more bytes"),
            lower("DeltaNet, d 32", &window(16), "DeltaNet is better than a window of about as many bytes"),
            lower("DeltaNet, d 32", LINEAR, "DeltaNet is better than linear attention"),
            lower(SOFTMAX, &window(16), "full softmax is better than a window of 16 keys"),
        ],
    }
}

/// Unit queries and keys, an output norm in place of a denominator, no RoPE, as in DeltaNet.
const DELTA_FORM: &str = "qk_norm=l2 rope=off over=none norm=rms";

fn delta() -> Experiment {
    let attention = |kernel: &str, words: &str| format!("{kernel} {DELTA_FORM}{words}");
    // With unit keys the delta rule is stable if w(k·k) is below 2: 2.5 for orders 0..2 at scale 1, 1.625 at scale ½.
    let kernels = [
        ("order 1", "power=1", "write=delta"),
        ("order 2", "power=2", "write=delta"),
        ("orders 0..2", "taylor=0..2", "write=delta,scale=0.5"),
    ];
    let mut variants = vec![variant(SOFTMAX, "softmax")];
    for (name, kernel, rule) in kernels {
        for (write, word) in [("", String::new()), (", delta", format!(" {rule}"))] {
            for (decay, more) in [("", ""), (", decay", " decay=mamba")] {
                let (name, words) = (format!("{name}{write}{decay}"), format!("{word}{more}"));
                variants.push(variant(&named(&name), &attention(kernel, &words)));
                if !write.is_empty() && kernel != "power=1" {
                    variants.push(with_head_dim(&named(&name), &attention(kernel, &words), 8));
                }
            }
        }
    }
    let claim = |low: &str, high: &str, text: &str| lower(&named(low), &named(high), text);
    Experiment {
        id: Id::Delta,
        question: "Does the delta rule add to higher orders?",
        paper: "The delta rule is published for order 1 (DeltaNet, Gated DeltaNet); for higher orders nothing is.",
        variants,
        tasks: Vec::new(),
        claims: vec![
            claim("order 1, delta", "order 1", "the delta rule improves order 1"),
            claim("order 2, delta", "order 2", "the delta rule improves order 2"),
            claim("orders 0..2, delta", "orders 0..2", "the delta rule improves orders 0..2"),
            claim("order 2, delta, decay", "order 2, decay", "with decay, the delta rule improves order 2"),
            claim("orders 0..2, delta, decay", "orders 0..2, decay", "with decay, the delta rule improves orders 0..2"),
            claim("order 2, delta", "order 1, delta", "with the delta rule, order 2 is better than order 1 at the same head dimension"),
        ],
    }
}

/// Distinct from the series of Figure 1, which has a denominator.
fn named(name: &str) -> String {
    format!("{name}, unit keys")
}

fn families() -> Experiment {
    let mut variants = vec![variant(SOFTMAX, "softmax"), variant(LINEAR, "linear_elu")];
    variants.extend([4, 8, 32].map(|d| with_head_dim(LINEAR, "linear_elu", d)));
    variants.extend([4, 8, 32].map(|d| taylor_of(1, d)));
    variants.extend([taylor_of(2, 4), taylor_of(3, 4), taylor_of(4, 4)]);
    variants.extend([variant("RetNet", "retnet"), variant("GLA", "gla"), variant("Mamba-2", "mamba2")]);
    variants.push(with_head_dim("Gated DeltaNet", "gated_deltanet", 64));
    variants.extend([1, 2].map(|order| {
        let name = format!("window 32 and far orders 0..{order}");
        variant(&name, &format!("softmax window=32 far(taylor=0..{order})"))
    }));
    variants.push(variant("Based (all layers)", "based"));
    Experiment {
        id: Id::Families,
        question: "How do other recurrent families compare with linear attention and softmax?",
        paper: "Each family is published at other sizes, on other data, with other tokenizers.",
        variants,
        tasks: Vec::new(),
        claims: Vec::new(),
    }
}

fn tokenization() -> Experiment {
    let mut variants = vec![variant(SOFTMAX, "softmax"), variant(LINEAR, "linear_elu")];
    variants.extend([1, 2, 4].map(taylor));
    variants.push(variant("Norm", "norm"));
    Experiment {
        id: Id::Tokenization,
        question: "After how many training tokens does the gap to softmax appear, and for which tokenization?",
        paper: "Published comparisons choose one tokenizer and one budget.",
        variants,
        tasks: Vec::new(),
        claims: vec![
            lower(SOFTMAX, LINEAR, "softmax is better than linear attention"),
            lower(SOFTMAX, &series(2), "softmax is better than orders 0..2"),
        ],
    }
}
