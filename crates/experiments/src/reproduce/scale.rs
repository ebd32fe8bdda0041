//! How large: the settings that all runs of a scale share.
//!
//! On the built-in language every variant has the same recipe and the same short convolution over q, k and v (`conv=3`), linear attention
//! too: with it a small model finds the circuit that recalls within seconds, without it in hours. Rotary frequencies are low
//! (`rope_theta = 1e6`), so that a key is found at any distance. On text there is no convolution, as in the paper.
//!
//! Minute: one layer, one head of d = 16, documents with 12 of 32 keys. There orders up to 2 have 153 rows and cannot tell twelve facts
//! apart as sharply as softmax does.

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::experiment::{Metric, Task};

/// How much is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// A few steps that show nothing: for tests of the program.
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

/// On the built-in language alone.
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

/// Chosen among about twenty settings of language and model as one in which softmax, Norm and orders up to 4 recall within seconds and
/// order 2 does so less well, learning rate and initial weights likewise; the other variants had no tuning of their own.
const MINUTE: &str = r#"
language = "length=64 facts=12 keys=32 values=32 words=8 fact_rate=0.95 question_rate=0.95 held_out=256"
hidden = 64
mlp = 64
heads = 1
head_dim = 16
layers = 1
rope_theta = 1e6
init_std = 0.25
length = 64
batch = 16
steps = 1200
lr = 1e-2
warmup = 30
eval_every = 100
eval_batches = 0
log_every = 20
checkpoint_every = 0
keep = 1
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

/// Above [`LAPTOP`].
const WIDER: &str = r#"
hidden = 128
mlp = 256
heads = 8
init_std = 0.088
lr = 5e-3
steps = 600
"#;

/// Above [`LAPTOP`].
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

/// Where the paper's text comes from, if nobody names another.
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

    /// Seeds where nobody asks for another number. The paper had one each.
    pub fn seeds(self) -> usize {
        match self {
            Scale::Test | Scale::Paper | Scale::Zoology => 1,
            Scale::Minute => 4,
            Scale::Laptop | Scale::Text => 3,
            Scale::Mini => 5,
        }
    }

    /// Whether experiments are cut to their main points.
    pub fn is_short(self) -> bool {
        matches!(self, Scale::Test | Scale::Minute)
    }

    /// The built-in language; absent at the paper's scale.
    pub(super) fn language(self) -> Option<Task> {
        let base = match self {
            Scale::Test => TEST,
            Scale::Minute => MINUTE,
            Scale::Laptop => LAPTOP,
            Scale::Text | Scale::Mini | Scale::Zoology | Scale::Paper => return None,
        };
        Some(Task {
            name: "language".into(),
            base: table(&[base]),
            words: CONVOLUTION,
            metric: Metric::Recall,
            rates: Vec::new(),
            tuning: Table::new(),
        })
    }

    /// Text, where there is some: a task for each file, at the paper's scale one for all.
    pub(super) fn text(self, files: &[String]) -> Vec<Task> {
        let task = |name: String, base: &str, data: &[String]| {
            let mut base = table(&[base]);
            base.insert("data".into(), Value::Array(data.iter().cloned().map(Value::String).collect()));
            Task { name, base, words: "", metric: Metric::Loss, rates: Vec::new(), tuning: Table::new() }
        };
        let short = |file: &str| file.rsplit(['/', '\\']).next().unwrap_or(file).to_owned();
        match self {
            Scale::Test | Scale::Minute | Scale::Text | Scale::Mini | Scale::Zoology => Vec::new(),
            Scale::Laptop => files.iter().map(|file| task(short(file), TEXT, std::slice::from_ref(file))).collect(),
            Scale::Paper if files.is_empty() => vec![task("text".into(), PAPER, &[PAPER_DATA.to_owned()])],
            Scale::Paper => vec![task("text".into(), PAPER, files)],
        }
    }

    /// A wider model and a longer context; none where there is no time for them.
    pub(super) fn larger(self, files: &[String]) -> Vec<Task> {
        match self {
            Scale::Test | Scale::Minute | Scale::Text | Scale::Mini | Scale::Zoology => Vec::new(),
            Scale::Laptop => {
                let task = |name: &str, above| Task {
                    name: name.into(),
                    base: table(&[LAPTOP, above]),
                    words: CONVOLUTION,
                    metric: Metric::Recall,
                    rates: Vec::new(),
                    tuning: Table::new(),
                };
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

/// The settings of these texts, later ones above earlier ones.
pub(super) fn table(texts: &[&str]) -> Table {
    let mut all = Table::new();
    for text in texts {
        all.extend(text.parse::<Table>().expect("texts of the program are valid TOML; a test resolves each"));
    }
    all
}
