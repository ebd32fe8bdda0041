//! A language that the program makes up itself, so that the best possible loss is known.
//!
//! A document begins with a mark and is a sequence of three kinds of phrases:
//!
//! ```text
//! word            drawn from b words that depend on the `order` tokens before it
//! key value       a fact: a key that this document has not named yet, and any value
//! ? key value     a question about one of its facts, and the answer: the value that was stated last
//! ```
//!
//! At the end of a phrase: while facts are missing the next phrase is a fact with probability α and otherwise a word; once all F are
//! stated it is a question with probability β and otherwise a word. With U `updates`, U of the F facts are stated once more after the first F, by
//! the same rule and with any value: `k12 v7 … k12 v3 … ? k12 v3`. With a `gap`, G words follow the last statement before the first
//! question, and questions go round: no fact is asked for again before all were. After L + 1 tokens, the mark included, the document breaks off,
//! inside a phrase if need be. What a word depends on are tokens, where everything that is no word counts as one and the same blank.
//!
//! Answers need the one place where the key was named: they are the recall tokens. All others are predicted as well as possible, but for
//! a trifle, from the tokens just before them. The key of a question has no label: to know which keys it can be is recall of another kind,
//! and whom a question is about is for whoever asks to decide.
//!
//! # Rows
//! A row of T positions holds T/L whole documents. A document fills L positions: its first L tokens as inputs, its last L as labels, so
//! that a document's last token is asked for but never shown. Document n of a seed is the same for every shape of batch; documents are
//! independent of each other, so that what a row shows of earlier ones helps nobody.
//!
//! # The best loss
//! A predictor that knows the language and sees the document so far knows where in a phrase it is and how many facts were stated, and
//! all that is drawn next is independent of the rest. Hence its expected loss at a position depends on this state alone (h is the
//! entropy of a yes or no, H_w that of 1/j over its sum, j = 1..b):
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
//! (Which keys can be stated again is recall, too, and counts among the rest.)
//!
//! Probabilities of states follow from position to position; the best losses are sums over L positions and all states, divided
//! by the expected number of labels of each kind. They are exact up to rounding.
//!
//! # The defaults
//! Dense facts and questions, since the circuit that copies an answer forms the earlier the more of them there are. A softmax of two
//! layers and width 64 with a short convolution (`softmax conv=3`) finds it after one or two million tokens, if weights start at about
//! 1/√width or the learning rate is near 0.01; without the convolution it is far from it after 2.5 million.

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

/// The built-in language as a source of batches.
///
/// Tokens: 0 begins a document, 1 is the question mark, then come words, keys and values.
#[derive(Debug)]
pub struct Language {
    grammar: Grammar,
    best: BestLoss,
}

/// Documents of training and those held out, apart for every seed.
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
    /// The language of these settings.
    pub fn new(config: LanguageConfig) -> Result<Language> {
        config.check()?;
        let best = optimum::best_loss(&config);
        Ok(Language { grammar: Grammar::new(config), best })
    }

    /// Its settings.
    pub fn config(&self) -> &LanguageConfig {
        &self.grammar.config
    }

    /// Fills rows with documents from number `first` on, as long as they are below `end`.
    fn fill(&self, stream: Stream, first: u64, end: u64, rows: usize, time: usize, out: &mut Rows) {
        let length = self.config().length;
        out.reset(rows, time);
        out.recall.resize(rows * time, false);
        let places = out.ids.chunks_mut(length).zip(out.labels.chunks_mut(length)).zip(out.recall.chunks_mut(length));
        for (number, ((ids, labels), recall)) in (first..end).zip(places) {
            self.grammar.write(stream.document(number), ids, labels, recall);
        }
    }

    /// Documents in a batch of that shape.
    fn documents(&self, rows: usize, time: usize) -> Result<u64> {
        let length = self.config().length;
        if time == 0 || !time.is_multiple_of(length) {
            let problem = format!(
                "of the built-in language is {length} and rows have {time} positions; rows hold whole documents: make rows {length} positions long \
                 or a multiple of it, or documents as long as rows: --language length={}",
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
        // Every setting, so that a change of defaults is a change too. Dials that came later are left out where they do nothing: data of
        // earlier builds keep their name.
        let text = format!("language 1: {:?}", self.config()).replace(", updates: 0", "").replace(", gap: 0", "");
        let text = text.replace(", held_out_from: 0", "");
        blake3::hash(text.as_bytes()).to_hex()[..16].to_string()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()> {
        let count = self.documents(rows, time)?;
        let past_the_end = || Error::DataSetting { key: "language", problem: format!("has no batch {index} of {rows} rows; numbers end") };
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
