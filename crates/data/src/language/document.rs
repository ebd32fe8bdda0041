//! Generation of documents.

use super::LanguageConfig;
use crate::rng;

pub(super) const START: u32 = 0;
pub(super) const QUESTION: u32 = 1;
const MARKS: usize = 2;
/// A label that is ignored.
const IGNORED_LABEL: i32 = -100;

/// The generator of documents.
#[derive(Debug)]
pub(super) struct Grammar {
    pub config: LanguageConfig,
    /// Cumulative probability of the first j + 1 possible words.
    cumulative: Vec<f64>,
}

/// Position within a phrase.
#[derive(Clone, Copy)]
enum Place {
    /// The last phrase is complete.
    End,
    /// After the key of this fact; a fact that was stated before gets a new value.
    Fact { key: u32, fact: usize },
    /// After a question mark.
    Question,
    /// After the key of a question about this fact.
    Answer { fact: usize },
}

impl Grammar {
    pub fn new(config: LanguageConfig) -> Grammar {
        let mut sum = 0.0;
        let cumulative = word_probabilities(config.branching)
            .into_iter()
            .map(|p| {
                sum += p;
                sum
            })
            .collect();
        Grammar { config, cumulative }
    }

    pub fn vocabulary(&self) -> usize {
        MARKS + self.config.words + self.config.keys + self.config.values
    }

    pub fn word(&self, index: u64) -> u32 {
        MARKS as u32 + index as u32
    }

    pub fn key(&self, index: u32) -> u32 {
        (MARKS + self.config.words) as u32 + index
    }

    pub fn value(&self, index: u64) -> u32 {
        (MARKS + self.config.words + self.config.keys) as u32 + index as u32
    }

    pub fn is_word(&self, token: u32) -> bool {
        (MARKS as u32..self.key(0)).contains(&token)
    }

    /// The word of rank `rank` among the possible words after these tokens, the nearest last.
    pub fn successor(&self, before: &[u32], rank: usize) -> u32 {
        let order = self.config.order;
        // Positions before the first token count as blank, as do tokens that are not words.
        let recent = before.iter().rev().map(|&token| if self.is_word(token) { token } else { START });
        let context = recent.chain(std::iter::repeat(START)).take(order);
        let key = context.fold(rng::hash(&[3, self.config.dialect as u64]), |key, token| rng::hash(&[key, token as u64]));
        self.word(rng::permuted(key, self.config.words as u64, rank as u64))
    }

    /// Writes the document of this key: L inputs, L labels, and whether each label is a recall token.
    pub fn write(&self, key: u64, ids: &mut [u32], labels: &mut [i32], recall: &mut [bool]) {
        let config = &self.config;
        let mut draw = Draw { key, count: 0 };
        let mut keys = Shuffled::new(config.keys);
        let mut updates = Shuffled::new(config.facts);
        let mut round = Shuffled::new(config.facts);
        let mut facts: Vec<(u32, u32)> = Vec::with_capacity(config.facts);
        let (mut missing, mut gap) = (config.statements(), config.gap);
        let mut place = Place::End;
        ids[0] = START;
        for t in 0..config.length {
            let (token, next) = match place {
                Place::End if missing > 0 && draw.unit() < config.fact_rate => {
                    missing -= 1;
                    let (key, fact) = if facts.len() < config.facts {
                        (self.key(keys.next(&mut draw) as u32), facts.len())
                    } else {
                        let fact = updates.next(&mut draw);
                        (facts[fact].0, fact)
                    };
                    (key, Place::Fact { key, fact })
                }
                Place::End if missing == 0 && gap == 0 && draw.unit() < config.question_rate => (QUESTION, Place::Question),
                Place::End => {
                    if missing == 0 {
                        gap = gap.saturating_sub(1);
                    }
                    let u = draw.unit();
                    let rank = self.cumulative.iter().position(|&sum| u < sum).unwrap_or(config.branching - 1);
                    (self.successor(&ids[..=t], rank), Place::End)
                }
                Place::Fact { key, fact } => {
                    let value = self.value(draw.below(config.values));
                    match facts.get_mut(fact) {
                        Some(stated) => stated.1 = value,
                        None => facts.push((key, value)),
                    }
                    (value, Place::End)
                }
                Place::Question => {
                    let fact = if config.gap > 0 { round.next(&mut draw) } else { draw.below(config.facts) as usize };
                    (facts[fact].0, Place::Answer { fact })
                }
                Place::Answer { fact } => (facts[fact].1, Place::End),
            };
            labels[t] = if matches!(place, Place::Question) { IGNORED_LABEL } else { token as i32 };
            recall[t] = matches!(place, Place::Answer { .. });
            if let Some(id) = ids.get_mut(t + 1) {
                *id = token;
            }
            place = next;
        }
    }
}

/// 1/j for j = 1..=b, normalized.
pub(super) fn word_probabilities(branching: usize) -> Vec<f64> {
    let weights: Vec<f64> = (1..=branching).map(|j| 1.0 / j as f64).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// The numbers below n in random order, each once, then again in another order.
struct Shuffled {
    order: Vec<u32>,
    given: usize,
}

impl Shuffled {
    fn new(n: usize) -> Shuffled {
        Shuffled { order: (0..n as u32).collect(), given: 0 }
    }

    /// One step of a Fisher–Yates shuffle; numbers before this index were returned.
    fn next(&mut self, draw: &mut Draw) -> usize {
        let n = self.order.len();
        let place = self.given;
        self.order.swap(place, place + draw.below(n - place) as usize);
        self.given = (place + 1) % n;
        self.order[place] as usize
    }
}

/// Random numbers of one document, computed from their index.
struct Draw {
    key: u64,
    count: u64,
}

impl Draw {
    fn bits(&mut self) -> u64 {
        self.count += 1;
        rng::hash(&[self.key, self.count])
    }

    /// Uniform from 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> u64 {
        rng::below(self.bits(), n as u64)
    }
}
