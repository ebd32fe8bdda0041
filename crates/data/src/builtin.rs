//! Synthetic tasks: data that the program generates.

use crate::error::Result;
use crate::language::Language;
use crate::mqar::Mqar;
use crate::parity::Parity;
use crate::s5::S5;
use crate::{BestLoss, Rows, Source, Tokenizer};

/// A synthetic task. Each is one file and a row of [`TASKS`].
pub trait SyntheticTask: Source {
    /// Its `tokenizer.json`.
    fn tokenizer_json(&self) -> Vec<u8>;

    /// Length of a document; `None` if documents have no end.
    fn document(&self) -> Option<usize> {
        None
    }

    /// Whether labels differ from the next tokens.
    fn has_own_labels(&self) -> bool {
        false
    }

    /// The associative-recall language; `None` for other tasks.
    fn into_language(self: Box<Self>) -> Option<Language> {
        None
    }
}

/// A row of the table of tasks.
struct Task {
    name: &'static str,
    title: &'static str,
    open: fn(&str) -> Result<Box<dyn SyntheticTask>>,
    /// Default training settings as TOML; empty for those of every run.
    settings: &'static str,
}

/// All tasks. The first is the default data.
const TASKS: [Task; 5] = [
    Task { name: Builtin::NAME, title: "associative recall", open: |options| Ok(Box::new(Language::new(options.parse()?)?)), settings: "" },
    Task { name: "parity", title: "parity of bits", open: |options| Ok(Box::new(Parity::new(options.parse()?))), settings: "" },
    Task {
        name: "mqar",
        title: "multi-query associative recall",
        open: |options| Ok(Box::new(Mqar::new(options.parse()?)?)),
        settings: MQAR,
    },
    Task {
        name: "mqar-mini",
        title: "multi-query associative recall, small",
        open: |options| Ok(Box::new(Mqar::mini(options)?)),
        settings: MINI,
    },
    Task { name: "s5", title: "word problem of S5", open: |options| Ok(Box::new(S5::new(options.parse()?))), settings: "length = 32\n" },
];

/// Two layers without positions, with a short convolution, as in Zoology; batches of 256 examples. The protocol has 32 epochs, 22,500 steps; this is one.
const MQAR: &str = r#"
attention = "softmax conv=3 rope=off"
hidden = 128
mlp = 128
heads = 1
layers = 2
tie = true
batch = 256
length = 256
eval_length = 1024
eval_batches = 0
eval_every = 100
steps = 704
lr = 3e-3
warmup = 70
weight_decay = 0.1
checkpoint_every = 200
"#;

const MINI: &str = r#"
attention = "softmax conv=3 rope=off"
hidden = 64
mlp = 64
heads = 1
layers = 2
tie = true
init_std = 0.125
batch = 64
length = 128
eval_length = 256
eval_batches = 0
eval_every = 250
steps = 1500
lr = 3e-3
warmup = 75
weight_decay = 0.1
checkpoint_every = 500
"#;

/// A synthetic task by its name.
#[derive(Debug)]
pub struct Builtin {
    task: Box<dyn SyntheticTask>,
}

impl Builtin {
    /// The name of the associative-recall language, and the prefix of the long names of the other tasks.
    pub const NAME: &str = "builtin";

    /// All names.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TASKS.iter().map(|task| task.name)
    }

    fn find(name: &str) -> Option<&'static Task> {
        let short = name.strip_prefix("builtin:").unwrap_or(name);
        TASKS.iter().find(|task| task.name == short)
    }

    /// Whether this is the name of a task: `parity`, or `builtin:parity`.
    pub fn is_name(name: &str) -> bool {
        Builtin::find(name).is_some()
    }

    /// A short description of a task; `None` if there is no such task.
    pub fn title(name: &str) -> Option<&'static str> {
        Builtin::find(name).map(|task| task.title)
    }

    /// Default training settings of a task as TOML.
    pub fn settings(name: &str) -> &'static str {
        Builtin::find(name).map_or("", |task| task.settings)
    }

    /// The task of this name with these options; `None` if there is no such task.
    ///
    /// # Errors
    /// If the options are invalid.
    pub fn open(name: &str, options: &str) -> Result<Option<Builtin>> {
        Builtin::find(name).map(|task| Ok(Builtin { task: (task.open)(options)? })).transpose()
    }

    /// Its `tokenizer.json`.
    pub fn tokenizer_json(&self) -> Vec<u8> {
        self.task.tokenizer_json()
    }

    /// The tokenizer of that file.
    ///
    /// # Errors
    /// Never for the tasks of this program.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::of_json("the built-in data", &self.tokenizer_json(), None)
    }

    /// Length of a document; `None` if documents have no end.
    pub fn document(&self) -> Option<usize> {
        self.task.document()
    }

    /// Whether labels differ from the next tokens.
    pub fn has_own_labels(&self) -> bool {
        self.task.has_own_labels()
    }

    /// The associative-recall language; `None` for other tasks.
    pub fn into_language(self) -> Option<Language> {
        self.task.into_language()
    }
}

impl Source for Builtin {
    fn vocabulary(&self) -> usize {
        self.task.vocabulary()
    }

    fn fingerprint(&self) -> String {
        self.task.fingerprint()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()> {
        self.task.train(seed, index, rows, time, out)
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool> {
        self.task.held_out(index, rows, time, out)
    }

    fn best_loss(&self) -> Option<BestLoss> {
        self.task.best_loss()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_has_batches_and_a_tokenizer_of_its_vocabulary() {
        for name in Builtin::names() {
            for name in [name.to_owned(), format!("builtin:{name}")] {
                let task = Builtin::open(&name, "").unwrap_or_else(|error| panic!("{name}: {error}")).expect("a task");
                assert_eq!(task.tokenizer().expect("a tokenizer").vocabulary(), task.vocabulary(), "{name}");
                let mut rows = Rows::default();
                let time = task.document().unwrap_or(16);
                task.train(1, 0, 2, time, &mut rows).expect("a batch");
                assert!(rows.ids.iter().all(|&id| (id as usize) < task.vocabulary()), "{name}");
                assert!(rows.labels.iter().any(|&label| label >= 0), "{name}");
                assert!(task.held_out(0, 2, time, &mut rows).expect("a batch"), "{name}");
            }
        }
        assert!(Builtin::open("mqar.txt", "").expect("no task").is_none() && !Builtin::is_name("builtin:other"));
    }
}
