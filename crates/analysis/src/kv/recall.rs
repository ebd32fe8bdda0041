//! Recall of facts at several distances, by generation: key-value lines, and sentences in real text (needle in a haystack).
//!
//! Only facts that the original recalls are evaluated on the converted model.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use termwise_base::rng::Rng;
use termwise_data::Tokenizer;
use termwise_model::decode::{Decoder, DecoderOptions};
use termwise_model::{Config, Model};

use crate::kv::Error;
use crate::kv::audit::{Check, continuation};

/// Tokens of text between a fact and its question.
const DISTANCES: [usize; 7] = [16, 64, 192, 448, 960, 1984, 4032];
/// Adjacent pairs.
const PAIRS: usize = 4;
/// Tokens before a fact, of fact and question together, and of an answer.
const TOKENS_BEFORE: usize = 32;
const FACT_TOKENS: usize = 96;
const ANSWER_TOKENS: usize = 8;
/// Minimum share of recalled facts within all windows, among those that the original recalls.
const MIN_RECALL_SHARE: f64 = 0.9;
const TASKS: [&str; 2] = ["key and value", "needle"];

/// One task at one distance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recall {
    /// The task.
    pub task: String,
    /// Tokens between the fact's end and the question.
    pub distance: usize,
    /// Tokens from the start of the fact to the answer.
    pub reach: usize,
    /// Questions.
    pub asked: usize,
    /// Answered by the original.
    pub original: usize,
    /// Also answered by the converted model.
    pub converted: usize,
}

/// Distances that fit into contexts of this length.
pub fn distances(length: usize) -> Vec<usize> {
    DISTANCES.into_iter().filter(|distance| distance + TOKENS_BEFORE + FACT_TOKENS <= length).collect()
}

/// The shortest window of any head; `None` if a head has no window.
pub fn smallest_window(config: &Config) -> Option<usize> {
    let heads = (0..config.num_hidden_layers).flat_map(|layer| config.heads(layer));
    heads.map(|head| head.window).min().flatten()
}

/// A decoder of a model.
pub fn decoder(model: &Arc<Model>) -> Result<Decoder, Error> {
    Ok(Decoder::new(model.clone(), DecoderOptions::default())?)
}

/// A prompt that ends with a question, and its answer.
pub struct Question {
    prompt: Vec<u32>,
    answer: String,
    /// Tokens from the start of the fact to the answer.
    pub reach: usize,
}

impl Question {
    /// Whether a model generates the answer.
    pub fn is_answered(&self, tokenizer: &Tokenizer, decoder: &mut Decoder) -> Result<bool, Error> {
        let written = continuation(decoder, &self.prompt, ANSWER_TOKENS)?;
        let words = tokenizer.decode(&written, true).map_err(|error| Error::Request(error.to_string()))?;
        Ok(words.trim_start().starts_with(&self.answer))
    }
}

/// Generator of questions within real text.
pub struct Facts<'a> {
    tokenizer: &'a Tokenizer,
    filler: Vec<u32>,
    length: usize,
    count: usize,
    rng: Rng,
}

/// A fact: its lines, the question and the answer.
struct Fact {
    lines: String,
    question: String,
    answer: String,
}

impl<'a> Facts<'a> {
    /// Facts of each task and distance, within contexts of this length.
    pub fn new(tokenizer: &'a Tokenizer, contexts: &[Vec<u32>], length: usize, count: usize) -> Facts<'a> {
        Facts { tokenizer, filler: contexts.concat(), length, count, rng: Rng::new(0xfac7) }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    fn fact(&mut self, task: &str) -> Fact {
        const NAMES: [&str; 8] = ["London", "Paris", "Madrid", "Vienna", "Lisbon", "Berlin", "Dublin", "Warsaw"];
        let mut number = |digits: u32| {
            let least = 10usize.pow(digits - 1);
            (least + self.rng.below(9 * least)).to_string()
        };
        if task == TASKS[0] {
            let pairs: Vec<(String, String)> = (0..PAIRS).map(|_| (number(3), number(4))).collect();
            let lines: String = pairs.iter().map(|(key, value)| format!("\nkey {key}: {value}")).collect();
            let (key, answer) = pairs[self.rng.below(PAIRS)].clone();
            return Fact { lines: format!("{lines}\n"), question: format!("\nkey {key}:"), answer };
        }
        let answer = number(4);
        let name = NAMES[self.rng.below(NAMES.len())];
        let sentence = format!("The secret number of {name} is");
        Fact { lines: format!(" {sentence} {answer}. Remember it.\n"), question: format!("\n{sentence}"), answer }
    }

    /// Random excerpt of the text.
    fn text(&mut self, count: usize) -> Vec<u32> {
        let first = self.rng.below(self.filler.len().saturating_sub(count).max(1));
        self.filler[first..(first + count).min(self.filler.len())].to_vec()
    }

    /// A question of a task at a distance.
    pub fn question(&mut self, task: &str, distance: usize) -> Result<Question, Error> {
        let fact = self.fact(task);
        let encode = |text: &str| self.tokenizer.encode(text, false).map_err(|error| Error::Request(error.to_string()));
        let (lines, question) = (encode(&fact.lines)?, encode(&fact.question)?);
        let mut prompt = self.text(TOKENS_BEFORE);
        let place = prompt.len();
        prompt.extend(lines);
        prompt.extend(self.text(distance));
        prompt.extend(question);
        Ok(Question { reach: prompt.len() - place + ANSWER_TOKENS, prompt, answer: fact.answer })
    }

    /// Asks both models all questions.
    pub fn ask(
        &mut self,
        original: &mut Decoder,
        converted: &mut Decoder,
        step: &mut dyn FnMut(&str) -> Result<(), Error>,
    ) -> Result<Vec<Recall>, Error> {
        let mut all = Vec::new();
        for task in TASKS {
            for distance in distances(self.length) {
                step(&format!("{task} at a distance of {distance}"))?;
                let mut recall = Recall { task: task.into(), distance, reach: 0, asked: 0, original: 0, converted: 0 };
                for _ in 0..self.count {
                    let question = self.question(task, distance)?;
                    recall.asked += 1;
                    recall.reach = recall.reach.max(question.reach);
                    if question.is_answered(self.tokenizer, original)? {
                        recall.original += 1;
                        recall.converted += usize::from(question.is_answered(self.tokenizer, converted)?);
                    }
                }
                all.push(recall);
            }
        }
        Ok(all)
    }

    /// At most `count` questions at this distance that the original answers, alternating between tasks, from at most 3·`count` questions.
    pub fn answered_by(&mut self, original: &mut Decoder, distance: usize, count: usize) -> Result<Vec<Question>, Error> {
        let mut found = Vec::new();
        for task in TASKS.iter().cycle().take(3 * count) {
            if found.len() == count {
                break;
            }
            let question = self.question(task, distance)?;
            if question.is_answered(self.tokenizer, original)? {
                found.push(question);
            }
        }
        Ok(found)
    }
}

const RULE: &str =
    "recalls at least 90 % of the facts inside all windows, among those recalled by the original; not decided with fewer than three";

/// The check if the model could not be run.
pub fn refused(error: &termwise_model::Error) -> Check {
    Check::new("recall", RULE, format!("recall was not measured: {error}"), Some(false))
}

/// Facts within every window must be recalled; recall beyond the windows is only reported.
pub fn check(recall: &[Recall], window: Option<usize>) -> Check {
    let sum = |inside: bool| {
        let own = recall.iter().filter(|recall| window.is_none_or(|window| recall.reach <= window) == inside);
        own.fold((0, 0), |(original, converted), recall| (original + recall.original, converted + recall.converted))
    };
    let ((inside, found), (beyond, found_beyond)) = (sum(true), sum(false));
    let text = format!(
        "{found} of {inside} facts inside the shortest window of {}, {found_beyond} of {beyond} beyond it",
        window.map_or("any length".to_owned(), |window| format!("{window} keys"))
    );
    Check::new("recall", RULE, text, (inside >= 3).then_some(found as f64 >= MIN_RECALL_SHARE * inside as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgotten_facts_within_the_window_fail() {
        let row = |reach, original, converted| Recall { task: TASKS[0].into(), distance: 16, reach, asked: 10, original, converted };
        let verdict = |rows: &[Recall]| check(rows, Some(100)).passed;
        assert_eq!(verdict(&[row(100, 10, 9)]), Some(true));
        assert_eq!(verdict(&[row(100, 10, 8)]), Some(false));
        // Beyond the window nothing is required, and two facts are too few for a verdict.
        assert_eq!(verdict(&[row(100, 10, 10), row(101, 10, 0)]), Some(true));
        assert_eq!(verdict(&[row(100, 2, 0)]), None);
    }
}
