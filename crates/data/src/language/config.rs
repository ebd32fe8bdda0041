//! Options of the language.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::task_options;

/// Options of the language. On the command line: `facts=20 keys=128`, separated by spaces or commas; omitted options have their defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LanguageConfig {
    /// L: length of a document. Rows contain whole documents, so T is a multiple of it.
    pub length: usize,
    /// F: facts per document, all before the first question.
    pub facts: usize,
    /// K: number of keys.
    pub keys: usize,
    /// V: number of values.
    pub values: usize,
    /// W: number of words.
    pub words: usize,
    /// Number of preceding tokens that a word depends on.
    pub order: usize,
    /// b: number of words that can follow the same tokens; the j-th has a probability proportional to 1/j.
    pub branching: usize,
    /// α: probability that the next phrase is a fact while facts are missing; otherwise it is a word.
    pub fact_rate: f64,
    /// β: probability that the next phrase is a question after all facts; otherwise it is a word.
    pub question_rate: f64,
    /// Number of held-out documents.
    pub held_out: usize,
    /// Index of the first held-out document. Another index selects other documents, for example to tune a learning rate.
    pub held_out_from: usize,
    /// Seed of the word transitions.
    pub dialect: u32,
    /// U: facts that are stated again, with any value, after all facts and before the first question; the last value counts.
    pub updates: usize,
    /// G: words between the last statement and the first question. If it is not 0, questions are in rounds: each fact is queried once before
    /// any is queried again, so all answers of the first round are at a larger distance than G.
    pub gap: usize,
}

impl Default for LanguageConfig {
    fn default() -> LanguageConfig {
        LanguageConfig {
            length: 128,
            facts: 12,
            keys: 64,
            values: 64,
            words: 64,
            order: 1,
            branching: 4,
            fact_rate: 0.8,
            question_rate: 0.8,
            held_out: 256,
            held_out_from: 0,
            dialect: 1,
            updates: 0,
            gap: 0,
        }
    }
}

impl LanguageConfig {
    /// Checks that the options are consistent.
    pub fn check(&self) -> Result<()> {
        let refuse = |key, problem: String| Err(Error::DataSetting { key, problem: format!("of the built-in language {problem}") });
        let largest = 1 << 24;
        for (key, value, least, most) in [
            ("facts", self.facts, 1, largest),
            ("keys", self.keys, 1, largest),
            ("values", self.values, 2, largest),
            ("words", self.words, 1, largest),
            ("order", self.order, 0, 8),
            ("branching", self.branching, 1, largest),
            ("length", self.length, 1, largest),
            ("held_out", self.held_out, 0, largest),
            ("held_out_from", self.held_out_from, 0, largest),
            ("updates", self.updates, 0, largest),
            ("gap", self.gap, 0, largest),
        ] {
            if !(least..=most).contains(&value) {
                return refuse(key, format!("is {value}; it must be between {least} and {most}"));
            }
        }
        for (key, value) in [("fact_rate", self.fact_rate), ("question_rate", self.question_rate)] {
            if !(value > 0.0 && value <= 1.0) {
                return refuse(key, format!("is {value}; it is a probability above 0 and at most 1"));
            }
        }
        if self.facts > self.keys {
            return refuse(
                "facts",
                format!("is {} and there are {} keys; a document states a key once, so use at least as many keys", self.facts, self.keys),
            );
        }
        if self.branching > self.words {
            return refuse("branching", format!("is {} and there are {} words; use at least as many words", self.branching, self.words));
        }
        if self.updates > self.facts {
            let problem = format!("is {} and there are {} facts; a fact is stated once more at most", self.updates, self.facts);
            return refuse("updates", problem);
        }
        let needed = 2 * self.statements() + self.gap + 3;
        if self.length < needed {
            let more = [(self.updates, "updates"), (self.gap, "words between")];
            let more: String = more.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {n} {what}")).collect();
            return refuse(
                "length",
                format!("is {}; {} facts{more} and a question take at least {needed} tokens", self.length, self.facts),
            );
        }
        Ok(())
    }
    /// Facts and updates of a document.
    pub(super) fn statements(&self) -> usize {
        self.facts + self.updates
    }
}

/// The options that differ from their defaults, separated by spaces.
impl fmt::Display for LanguageConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        task_options::write(self, f)
    }
}

impl FromStr for LanguageConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<LanguageConfig> {
        let config: LanguageConfig = task_options::read(text)?;
        config.check()?;
        Ok(config)
    }
}
