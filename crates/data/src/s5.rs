//! The word problem of S₅: permutations of five elements, with the product of all permutations so far as label.
//!
//! A row is a start token and then elements of S₅, uniform and independent. The label at a position is the product gₜ∘…∘g₁, as the token of that
//! element; at the start it is the identity. Every label is determined, and uniform predictions have ln 120 = 4.787 nats. The problem is complete
//! for NC¹: models whose state changes by commuting factors cannot solve it at every length (arXiv 2404.08819).

use serde::{Deserialize, Serialize};

use crate::builtin::SyntheticTask;
use crate::error::Result;
use crate::language::words_tokenizer;
use crate::{BestLoss, Rows, Source, rng, task_options};

/// The start token of a sequence; element i is token i + 1.
const START: u32 = 0;
const ELEMENTS: usize = 120;

/// Options of the word problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct S5Config {
    /// Number of held-out sequences.
    pub held_out: usize,
    /// Index of the first held-out sequence.
    pub held_out_from: usize,
}

impl Default for S5Config {
    fn default() -> S5Config {
        S5Config { held_out: 256, held_out_from: 0 }
    }
}

task_options::text_form!(S5Config);

/// The word problem of S₅ as a source of batches.
#[derive(Clone, Debug)]
pub struct S5 {
    config: S5Config,
    /// The elements, in lexicographic order.
    elements: Vec<[u8; 5]>,
}

impl S5 {
    /// The word problem with these options.
    pub fn new(config: S5Config) -> S5 {
        let mut elements = Vec::with_capacity(ELEMENTS);
        for code in 0..5u32.pow(5) {
            let element = [0, 1, 2, 3, 4].map(|place| (code / 5u32.pow(4 - place) % 5) as u8);
            if (0..5).all(|thing| element.contains(&thing)) {
                elements.push(element);
            }
        }
        S5 { config, elements }
    }

    fn fill(&self, stream: [u64; 2], first: u64, end: u64, out: &mut Rows) {
        let time = out.time.max(1);
        out.scored = true;
        for (number, (ids, labels)) in (first..end).zip(out.ids.chunks_mut(time).zip(out.labels.chunks_mut(time))) {
            let key = rng::hash(&[stream[0], stream[1], number]);
            let mut product = [0, 1, 2, 3, 4];
            for (t, (id, label)) in ids.iter_mut().zip(labels).enumerate() {
                *id = START;
                if t > 0 {
                    let element = rng::below(rng::hash(&[key, t as u64]), ELEMENTS as u64) as usize;
                    product = product.map(|thing| self.elements[element][usize::from(thing)]);
                    *id = element as u32 + 1;
                }
                *label = self.elements.binary_search(&product).map_or(-100, |element| element as i32 + 1);
            }
        }
    }
}

impl Source for S5 {
    fn vocabulary(&self) -> usize {
        ELEMENTS + 1
    }

    fn fingerprint(&self) -> String {
        blake3::hash(format!("s5 1: {:?}", self.config).as_bytes()).to_hex()[..16].to_string()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()> {
        out.reset(rows, time);
        let first = index.wrapping_mul(rows as u64);
        self.fill([9, seed], first, first.saturating_add(rows as u64), out);
        Ok(())
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool> {
        out.reset(rows, time);
        let (first, count) = (index.saturating_mul(rows as u64), self.config.held_out as u64);
        if first >= count || rows == 0 {
            return Ok(false);
        }
        let from = self.config.held_out_from as u64;
        self.fill([10, 0], from.saturating_add(first), from.saturating_add(count), out);
        Ok(true)
    }

    fn best_loss(&self) -> Option<BestLoss> {
        Some(BestLoss { all: 0.0, recall: 0.0, rest: 0.0 })
    }
}

impl SyntheticTask for S5 {
    fn tokenizer_json(&self) -> Vec<u8> {
        words_tokenizer(self.elements.iter().map(|element| element.map(|thing| (b'1' + thing) as char).iter().collect()))
    }

    fn has_own_labels(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_products_and_noncommuting_elements_differ_by_order() {
        let s5 = S5::new(S5Config::default());
        assert_eq!(s5.elements.len(), 120);
        assert!(s5.elements.is_sorted());
        let mut rows = Rows::default();
        s5.train(1, 0, 20, 30, &mut rows).expect("a batch");
        let mut seen = std::collections::HashSet::new();
        for (ids, labels) in rows.ids.chunks(30).zip(rows.labels.chunks(30)) {
            assert_eq!((ids[0], labels[0]), (START, 1), "the identity is the first element");
            // The image of each element under all permutations so far, followed one element at a time.
            for t in 1..30 {
                let end = |thing: u8| ids[1..=t].iter().fold(thing, |at, &id| s5.elements[id as usize - 1][usize::from(at)]);
                assert_eq!(s5.elements[labels[t] as usize - 1], [0, 1, 2, 3, 4].map(end));
                seen.insert(ids[t]);
            }
        }
        assert!(seen.len() > 110, "{}", seen.len());
    }
}
