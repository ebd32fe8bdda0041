//! The dials of the language.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use termwise_base::nearest;

use crate::error::{Error, Result};

/// What the language is like. On the command line: `facts=20 keys=128`, the others as by default, separated by spaces or commas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LanguageConfig {
    /// L: positions of a document. Rows hold whole documents, so T is a multiple of it.
    pub length: usize,
    /// F: facts that a document states, all before its first question.
    pub facts: usize,
    /// K: different keys that facts can be about.
    pub keys: usize,
    /// V: different values that they can have.
    pub values: usize,
    /// W: different words between facts and questions.
    pub words: usize,
    /// How many tokens before it a word depends on.
    pub order: usize,
    /// b: different words that can follow the same tokens; the j-th has probability 1/j over their sum.
    pub branching: usize,
    /// α: the probability that a fact comes next, as long as some are missing; otherwise a word does.
    pub fact_rate: f64,
    /// β: the probability that a question comes next, once all facts are stated; otherwise a word does.
    pub question_rate: f64,
    /// Documents held out.
    pub held_out: usize,
    /// Which language of this kind it is: which words follow which.
    pub dialect: u32,
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
            dialect: 1,
        }
    }
}

impl LanguageConfig {
    /// Whether there is such a language.
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
                format!("is {} and there are {} keys; a document states a key once, so have as many keys", self.facts, self.keys),
            );
        }
        if self.branching > self.words {
            return refuse("branching", format!("is {} and there are {} words; have as many words", self.branching, self.words));
        }
        let needed = 2 * self.facts + 3;
        if self.length < needed {
            return refuse("length", format!("is {}; {} facts and a question take at least {needed} tokens", self.length, self.facts));
        }
        Ok(())
    }

    fn table(&self) -> toml::Table {
        toml::Table::try_from(self).expect("numbers of every size that TOML has")
    }
}

/// The settings that are not as by default, separated by spaces.
impl fmt::Display for LanguageConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = LanguageConfig::default().table();
        let changed = self.table().into_iter().filter(|(key, value)| default.get(key) != Some(value));
        for (i, (key, value)) in changed.enumerate() {
            write!(f, "{}{key}={value}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

impl FromStr for LanguageConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<LanguageConfig> {
        let refuse = |problem| Error::DataSetting { key: "language", problem };
        let mut table = LanguageConfig::default().table();
        let mut seen = Vec::new();
        for word in text.split([' ', ',']).filter(|word| !word.is_empty()) {
            let (key, value) =
                word.split_once('=').ok_or_else(|| refuse(format!("has the word `{word}`; write settings as `facts=12 keys=64`")))?;
            let Some(slot) = table.get_mut(key) else {
                let known: Vec<&str> = table.keys().map(String::as_str).collect();
                let hint = match nearest(key, known.iter().copied()) {
                    Some(close) => format!("did you mean `{close}`?"),
                    None => format!("there are {}", known.join(", ")),
                };
                return Err(refuse(format!("has no setting `{key}`; {hint}")));
            };
            if seen.contains(&key) {
                return Err(refuse(format!("gives `{key}` twice; give it once")));
            }
            seen.push(key);
            *slot = match slot {
                toml::Value::Float(_) => value.parse().ok().map(toml::Value::Float),
                _ => value.parse().ok().map(toml::Value::Integer),
            }
            .ok_or_else(|| refuse(format!("gives `{key}` the value `{value}`; it must be a number like {slot}")))?;
        }
        let config: LanguageConfig =
            table.try_into().map_err(|error: toml::de::Error| refuse(format!("cannot be: {}", error.message())))?;
        config.check()?;
        Ok(config)
    }
}
