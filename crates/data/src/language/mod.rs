//! The associative-recall language: synthetic data with a known best loss.
//!
//! A document begins with a start token, followed by phrases of three kinds:
//!
//! ```text
//! word            one of b words that depend on the `order` tokens before it
//! key value       a fact: a key that the document has not named yet, and any value
//! ? key value     a question about one of its facts, and the answer: the value that was stated last
//! ```
//!
//! While facts are missing, the next phrase is a fact with probability α and otherwise a word. After all F facts, it is a question with
//! probability β and otherwise a word. With U `updates`, U of the F facts are stated again after the first F, by the same rule and with any
//! value: `k12 v7 … k12 v3 … ? k12 v3`. With a `gap`, G words are between the last statement and the first question, and questions are in
//! rounds: no fact is queried again before all were. A document has L + 1 tokens including the start token, and is cut off there, possibly inside
//! a phrase. Words depend on tokens; every token that is not a word counts as the same blank.
//!
//! Answers depend on the position at which the key was named: they are the recall tokens. All other tokens can be predicted almost optimally
//! from the preceding few. The key of a question has no label.
//!
//! # Rows
//! A row of T positions contains T/L whole documents. A document has L positions: its first L tokens are inputs, its last L are labels.
//! Document n of a seed is the same for every batch shape. Documents are independent, so earlier documents in a row carry no information.
//!
//! # The best loss
//! A predictor that knows the language knows the current phrase and the number of stated facts. Everything that follows is independent of the
//! rest, so its expected loss at a position depends only on this state (h is the binary entropy, H_w the entropy of 1/j normalized, j = 1..b):
//!
//! ```text
//! end of a phrase, f < F facts stated     h(α) + α·ln(K − f) + (1 − α)·H_w
//! end of a phrase, f < U of them again    h(α) + α·ln(F − f) + (1 − α)·H_w
//! after the key of a fact                 ln V
//! less than G words after the last one    H_w
//! end of a phrase, all facts stated       h(β) + (1 − β)·H_w
//! after ?                                 no label
//! after the key of a question             0: a recall token
//! ```
//!
//! The keys that can be stated again also require recall; they are counted with the other tokens.
//!
//! Probabilities of states are propagated from position to position. The best losses are sums over L positions and all states, divided by the
//! expected number of labels of each kind. They are exact up to rounding.
//!
//! # Defaults
//! Facts and questions are dense, because the copying circuit forms earlier with more of them. A softmax model with two layers, width 64 and a
//! short convolution (`softmax conv=3`) finds it after one or two million tokens if initial weights are about 1/√width or the learning rate is
//! near 0.01. Without the convolution it does not after 2.5 million.

mod config;
mod document;
mod optimum;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use config::LanguageConfig;
pub use tokenizer::Question;
pub(crate) use tokenizer::words_tokenizer;

use super::{BestLoss, Rows, Source, rng};
use crate::builtin::SyntheticTask;
use crate::error::{Error, Result};
use document::Grammar;

/// The associative-recall language as a source of batches.
///
/// Tokens: 0 starts a document, 1 is the question mark, followed by words, keys and values.
#[derive(Debug)]
pub struct Language {
    grammar: Grammar,
    best: BestLoss,
}

/// Training documents of each seed, and held-out documents.
#[derive(Clone, Copy)]
enum Stream {
    Train { seed: u64 },
    HeldOut,
}

impl Stream {
    fn document(self, number: u64) -> u64 {
        match self {
            Stream::Train { seed } => rng::hash(&[1, seed, number]),
            Stream::HeldOut => rng::hash(&[2, 0, number]),
        }
    }
}

impl Language {
    /// The language with these options.
    pub fn new(config: LanguageConfig) -> Result<Language> {
        config.check()?;
        let best = optimum::best_loss(&config);
        Ok(Language { grammar: Grammar::new(config), best })
    }

    /// Its options.
    pub fn config(&self) -> &LanguageConfig {
        &self.grammar.config
    }

    /// Fills rows with the documents from `first` up to `end`.
    fn fill(&self, stream: Stream, first: u64, end: u64, rows: usize, time: usize, out: &mut Rows) {
        let length = self.config().length;
        out.reset(rows, time);
        out.recall.resize(rows * time, false);
        let places = out.ids.chunks_mut(length).zip(out.labels.chunks_mut(length)).zip(out.recall.chunks_mut(length));
        for (number, ((ids, labels), recall)) in (first..end).zip(places) {
            self.grammar.write(stream.document(number), ids, labels, recall);
        }
    }

    /// Documents per batch of this shape.
    fn documents(&self, rows: usize, time: usize) -> Result<u64> {
        let length = self.config().length;
        if time == 0 || !time.is_multiple_of(length) {
            let problem = format!(
                "of the built-in language is {length} and rows have {time} positions; rows hold whole documents: make rows {length} positions long \
                 or a multiple of it, or documents as long as rows: --builtin-options length={}",
                if time == 0 { length } else { time }
            );
            return Err(Error::DataSetting { key: "length", problem });
        }
        Ok((rows * (time / length)) as u64)
    }
}

impl Source for Language {
    fn vocabulary(&self) -> usize {
        self.grammar.vocabulary()
    }

    fn fingerprint(&self) -> String {
        // Every option, so a change of defaults changes the fingerprint. Options added later are omitted at their defaults, so data of
        // earlier builds keep their fingerprint.
        let text = format!("language 1: {:?}", self.config()).replace(", updates: 0", "").replace(", gap: 0", "");
        let text = text.replace(", held_out_from: 0", "");
        blake3::hash(text.as_bytes()).to_hex()[..16].to_string()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()> {
        let count = self.documents(rows, time)?;
        let past_the_end =
            || Error::DataSetting { key: "builtin_options", problem: format!("has no batch {index} of {rows} rows; numbers end") };
        let first = index.checked_mul(count).ok_or_else(past_the_end)?;
        let end = first.checked_add(count).ok_or_else(past_the_end)?;
        self.fill(Stream::Train { seed }, first, end, rows, time, out);
        Ok(())
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool> {
        let first = index.saturating_mul(self.documents(rows, time)?);
        let (from, count) = (self.config().held_out_from as u64, self.config().held_out as u64);
        if first >= count {
            return Ok(false);
        }
        self.fill(Stream::HeldOut, from + first, from + count, rows, time, out);
        Ok(true)
    }

    fn best_loss(&self) -> Option<BestLoss> {
        Some(self.best)
    }
}

impl SyntheticTask for Language {
    fn tokenizer_json(&self) -> Vec<u8> {
        Language::tokenizer_json(self)
    }

    fn document(&self) -> Option<usize> {
        Some(self.config().length)
    }

    fn into_language(self: Box<Self>) -> Option<Language> {
        Some(*self)
    }
}
