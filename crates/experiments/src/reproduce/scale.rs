//! Scales: the settings that all runs of a scale share.
//!
//! On synthetic recall every variant, including linear attention, has the same recipe and the same short convolution over q, k and v
//! (`conv=3`). With the convolution a small model learns to recall within seconds, without it within hours. Rotary frequencies are low
//! (`rope_theta = 1e6`), so keys match at any distance. On text there is no convolution, as in the paper.
//!
//! Minute: one layer, one head with d = 16, documents with 12 of 32 keys. The state of orders 0..2 has 153 rows there.

use serde::{Deserialize, Serialize};
use termwise_data::language::LanguageConfig;
use toml::{Table, Value};

use super::experiment::{Metric, Task};

/// Compute budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// A few steps, for tests of the program.
    Test,
    /// At most five minutes on two cores.
    Minute,
    /// At most two hours on two cores.
    Laptop,
    /// A text given by the user; hours on two cores.
    Text,
    /// MQAR with a vocabulary of 1,024; minutes per run.
    Mini,
    /// MQAR by the protocol of Zoology.
    Zoology,
    /// The paper's models and data.
    Paper,
}

/// On synthetic recall only.
const CONVOLUTION: &str = "conv=3";

const TEST: &str = r#"
language = "length=16 facts=2 keys=4 values=4 words=4 held_out=8"
hidden = 8
mlp = 8
heads = 1
layers = 1
length = 16
batch = 2
steps = 4
warmup = 1
eval_every = 2
log_every = 2
checkpoint_every = 0
"#;

/// Models with one layer and one head, which learn synthetic recall within seconds.
pub(super) const ONE_LAYER: &str = r#"
hidden = 64
mlp = 64
heads = 1
head_dim = 16
layers = 1
rope_theta = 1e6
batch = 16
warmup = 30
eval_batches = 0
checkpoint_every = 0
keep = 1
"#;

/// In addition to [`ONE_LAYER`]. Chosen from about twenty settings of task and model such that softmax, Norm and orders up to 4 recall within seconds and order 2 recalls
/// less well. Learning rate and initialization were chosen in the same way; the other variants were not tuned.
const MINUTE: &str = r#"
language = "length=64 facts=12 keys=32 values=32 words=8 fact_rate=0.95 question_rate=0.95 held_out=256"
init_std = 0.25
length = 64
steps = 1200
lr = 1e-2
eval_every = 100
log_every = 20
"#;

const LAPTOP: &str = r#"
language = "held_out=256"
model = "tiny"
rope_theta = 1e6
init_std = 0.125
batch = 16
length = 128
steps = 800
lr = 1e-2
warmup = 50
eval_every = 100
eval_batches = 0
checkpoint_every = 500
keep = 1
"#;

/// Overrides of [`LAPTOP`].
const WIDER: &str = r#"
hidden = 128
mlp = 256
heads = 8
init_std = 0.088
lr = 5e-3
steps = 600
"#;

/// Overrides of [`LAPTOP`].
const LONGER: &str = r#"
language = "length=256 held_out=128"
length = 256
batch = 8
"#;

/// Bytes of a text given by the user.
const TEXT: &str = r#"
recipe = "default"
model = "tiny"
length = 128
batch = 16
steps = 600
lr = 3e-3
warmup = 50
eval_every = 100
eval_batches = 32
checkpoint_every = 500
keep = 1
"#;

const PAPER: &str = r#"
recipe = "paper"
"#;

/// The default text at the paper's scale.
pub const PAPER_DATA: &str = "hf://datasets/HuggingFaceFW/fineweb/data/CC-MAIN-2024-51/*.parquet";

impl Scale {
    /// Every scale with its name and its cost.
    pub const ALL: [(Scale, &str, &str); 7] = [
        (Scale::Test, "test", "A few steps, for tests"),
        (Scale::Minute, "minute", "At most five minutes on two cores"),
        (Scale::Laptop, "laptop", "At most two hours on two cores"),
        (Scale::Text, "text", "Your own text; hours on two cores, see --tokens and --hours"),
        (Scale::Mini, "mini", "MQAR with a vocabulary of 1,024; minutes per run"),
        (Scale::Zoology, "zoology", "MQAR by the protocol of Zoology; days on two cores"),
        (Scale::Paper, "paper", "The paper's models and data"),
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Scale::ALL.iter().find(|row| row.0 == self).map_or("", |row| row.1)
    }

    /// The scale of this name.
    pub fn named(name: &str) -> Option<Scale> {
        Scale::ALL.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Default number of seeds. The paper has one.
    pub fn seeds(self) -> usize {
        match self {
            Scale::Test | Scale::Paper | Scale::Zoology => 1,
            Scale::Minute => 4,
            Scale::Laptop | Scale::Text => 3,
            Scale::Mini => 5,
        }
    }

    /// Whether experiments are reduced to their main variants.
    pub fn is_short(self) -> bool {
        matches!(self, Scale::Test | Scale::Minute)
    }

    /// Synthetic recall; absent at the paper's scale.
    pub(super) fn language(self) -> Option<Task> {
        let base = match self {
            Scale::Test => table(&[TEST]),
            Scale::Minute => table(&[ONE_LAYER, MINUTE]),
            Scale::Laptop => table(&[LAPTOP]),
            Scale::Text | Scale::Mini | Scale::Zoology | Scale::Paper => return None,
        };
        Some(untuned("language", base, CONVOLUTION, Metric::Recall))
    }

    /// The loss of uniform predictions over the values on recall tokens of the built-in language, in nats.
    pub(super) fn chance(self) -> Option<f64> {
        let task = self.language()?;
        let language = task.base.get("language").and_then(Value::as_str).unwrap_or_default();
        Some((language.parse::<LanguageConfig>().ok()?.values as f64).ln())
    }

    /// Tasks on text: one per file, at the paper's scale one for all files.
    pub(super) fn text(self, files: &[String]) -> Vec<Task> {
        let task = |name: String, base: &str, data: &[String]| {
            let mut base = table(&[base]);
            base.insert("data".into(), Value::Array(data.iter().cloned().map(Value::String).collect()));
            untuned(&name, base, "", Metric::Loss)
        };
        let short = |file: &str| file.rsplit(['/', '\\']).next().unwrap_or(file).to_owned();
        match self {
            Scale::Test | Scale::Minute | Scale::Text | Scale::Mini | Scale::Zoology => Vec::new(),
            Scale::Laptop => files.iter().map(|file| task(short(file), TEXT, std::slice::from_ref(file))).collect(),
            Scale::Paper if files.is_empty() => vec![task("text".into(), PAPER, &[PAPER_DATA.to_owned()])],
            Scale::Paper => vec![task("text".into(), PAPER, files)],
        }
    }

    /// A wider model and a longer context; empty at scales without time for them.
    pub(super) fn larger(self, files: &[String]) -> Vec<Task> {
        match self {
            Scale::Test | Scale::Minute | Scale::Text | Scale::Mini | Scale::Zoology => Vec::new(),
            Scale::Laptop => {
                let task = |name, above| untuned(name, table(&[LAPTOP, above]), CONVOLUTION, Metric::Recall);
                vec![task("language, wider", WIDER), task("language, longer", LONGER)]
            }
            Scale::Paper => {
                let changes = [("2 B parameters", "model = \"paper-large\""), ("length 4096", "length = 4096")];
                let above = |text: &Task, (name, change): (&str, &str)| {
                    let mut task = Task { name: format!("{}, {name}", text.name), ..text.clone() };
                    task.base.extend(table(&[change]));
                    task
                };
                self.text(files).iter().flat_map(|text| changes.map(|change| above(text, change))).collect()
            }
        }
    }
}

/// A task on which all variants have the learning rate of the base.
fn untuned(name: &str, base: Table, words: &'static str, metric: Metric) -> Task {
    Task { name: name.into(), base, words, metric, rates: Vec::new(), tuning: Table::new() }
}

/// The settings of these TOML texts; later ones override earlier ones.
pub(super) fn table(texts: &[&str]) -> Table {
    let mut all = Table::new();
    for text in texts {
        all.extend(text.parse::<Table>().expect("texts of the program are valid TOML; a test resolves each"));
    }
    all
}
