//! Shared utilities: a small source, small settings, and comparisons of runs.
#![allow(dead_code)]

use std::path::Path;

use termwise_data::{BestLoss, Rows, Source};
use termwise_train::metrics::{self, Line};
use termwise_train::progress::Display;
use termwise_train::{Outcome, RunOptions, Settings, Start, train};

pub const VOCABULARY: usize = 23;

/// Rows of a random walk: the next token is the previous one plus 1, 2 or 3. Row r of batch i is row i·B + r of the source, so batches of
/// another size contain the same rows. Every seventh label is marked as recall; the last two positions of every row are padding.
#[derive(Debug, Default)]
pub struct Walk {
    /// Batches from this index on fail.
    pub broken_from: Option<u64>,
    /// Part of the fingerprint.
    pub name: &'static str,
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Walk {
    fn fill(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) {
        out.reset(rows, time);
        out.recall.resize(rows * time, false);
        for row in 0..rows {
            let global = index * rows as u64 + row as u64;
            let mut token = mix(mix(seed) ^ global) % VOCABULARY as u64;
            for t in 0..time {
                let at = row * time + t;
                out.ids[at] = token as u32;
                token = (token + 1 + mix(seed ^ (global << 20) ^ t as u64) % 3) % VOCABULARY as u64;
                out.labels[at] = token as i32;
                out.recall[at] = at.is_multiple_of(7);
            }
            out.lengths.push(time - 2);
        }
        out.bytes = (rows * (time - 2)) as u64 * 2;
    }
}

impl Source for Walk {
    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn fingerprint(&self) -> String {
        format!("walk {}", self.name)
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> termwise_data::Result<()> {
        if self.broken_from.is_some_and(|broken| index >= broken) {
            return Err(termwise_data::Error::DataSource { requested: "walk".into(), problem: "it broke".into() });
        }
        self.fill(seed, index, rows, time, out);
        Ok(())
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> termwise_data::Result<bool> {
        self.fill(u64::MAX, index, rows, time, out);
        Ok(index < 3)
    }

    fn best_loss(&self) -> Option<BestLoss> {
        let entropy = 3f64.ln();
        Some(BestLoss { all: entropy, recall: entropy, rest: entropy })
    }
}

/// A model with a few thousand parameters, including gates, so every kind of parameter occurs.
pub const SMALL: &str = r#"
hidden = 24
mlp = 40
heads = 3
layers = 2
attention = "gated_softmax"
batch = 4
length = 16
steps = 12
warmup = 3
lr = 0.01
eval_every = 4
eval_batches = 0
checkpoint_every = 3
log_every = 2
threads = 1
"#;

pub fn settings(more: &str) -> Settings {
    let layers = [SMALL, more].map(|text| termwise_train::settings::Layer::parse(text, "test").expect("settings"));
    Settings::resolve(&layers).expect("settings")
}

pub fn options(folder: &Path, start: Start) -> RunOptions {
    RunOptions { start, display: Display::Silent, ..RunOptions::new(folder) }
}

pub fn run(settings: &Settings, folder: &Path, start: Start) -> Outcome {
    train(settings, &Walk::default(), &options(folder, start)).expect("a run")
}

/// The bytes that must not depend on how a run was executed.
pub fn weights(outcome: &Outcome) -> Vec<Vec<u8>> {
    ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"]
        .map(|name| std::fs::read(outcome.checkpoint.join(name)).expect("a file of a checkpoint"))
        .to_vec()
}

/// The metrics of a run without times.
pub fn timeless(folder: &Path) -> Vec<Line> {
    let mut lines = metrics::read(folder).expect("metrics");
    for line in &mut lines {
        match line {
            Line::Train(train) => (train.time, train.tokens_per_second) = (0.0, 0.0),
            Line::HeldOut { time, .. } => *time = 0.0,
        }
    }
    lines
}
