//! Data: tokenization of text, and batches for training and evaluation.
//!
//! A [`Source`] is a pure function from (seed, index) to a batch. The position in the data is a number, so a run
//! resumes exactly and any batch can be recomputed.
#![forbid(unsafe_code)]

pub mod bpe;
mod builtin;
pub mod config;
mod detokenize;
mod document;
pub mod error;
pub mod hub;
pub mod language;
pub mod mqar;
pub mod parity;
pub mod prepare;
mod rng;
pub mod s5;
pub mod shards;
pub mod sources;
mod split;
mod task_options;
pub mod text;
pub mod tokenizer;
pub mod tokens;

use std::fmt;

pub use builtin::{Builtin, SyntheticTask};
pub use config::{DataConfig, Documents, HeldOutPart, Layout};
pub use detokenize::Text;
pub use document::Prepared;
pub use error::{Error, Result};
pub use prepare::{Prepare, Progress};
pub use text::TextSource;
pub use tokenizer::Tokenizer;

/// A batch of rows of T positions, reused across steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// B, batch size.
    pub rows: usize,
    /// T, sequence length.
    pub time: usize,
    /// Tokens [B, T].
    pub ids: Vec<u32>,
    /// Labels [B, T]: the next token, except for parity; −100 for positions without a label.
    pub labels: Vec<i32>,
    /// Number of valid positions in each row, [B]; empty if all are.
    pub lengths: Vec<usize>,
    /// Whether a label is a recall token, [B, T]; empty if the source does not mark them.
    pub recall: Vec<bool>,
    /// Bytes of text of the labels; 0 if the source is not text.
    pub bytes: u64,
    /// Whether labels are answers of a task, whose accuracy is measured.
    pub scored: bool,
}

impl Rows {
    /// Resizes to B rows of T positions without labels.
    pub fn reset(&mut self, rows: usize, time: usize) {
        self.rows = rows;
        self.time = time;
        self.ids.clear();
        self.ids.resize(rows * time, 0);
        self.labels.clear();
        self.labels.resize(rows * time, -100);
        self.lengths.clear();
        self.recall.clear();
        self.bytes = 0;
        self.scored = false;
    }
}

/// A source of batches.
pub trait Source: Send + Sync + fmt::Debug {
    /// Vocabulary size: token ids are below it.
    fn vocabulary(&self) -> usize;

    /// A short hash of everything that determines its batches except seed, index, B and T.
    fn fingerprint(&self) -> String;

    /// Training batch `index` for this seed, with `rows` rows of `time` positions. Equal arguments give equal batches.
    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()>;

    /// Held-out batch `index`, in order; every held-out token is a label once. Returns false past the end. The last batch may have
    /// rows without labels.
    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool>;

    /// Fills `out` with training tokens in order, from `start` on. Returns their number: less than the length of `out` at the end, 0 past the end or without a
    /// training text.
    fn training_text(&self, _start: u64, _out: &mut [u32]) -> Result<usize> {
        Ok(0)
    }

    /// The loss of the optimal predictor in nats per token, if known: over all tokens, over recall tokens
    /// and over the others.
    fn best_loss(&self) -> Option<BestLoss> {
        None
    }
}

/// The known entropy of a source, in nats per token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BestLoss {
    /// Over all tokens.
    pub all: f64,
    /// Over recall tokens.
    pub recall: f64,
    /// Over the others.
    pub rest: f64,
}
