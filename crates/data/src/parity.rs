//! Parity: random bits, with the parity of all bits so far as label. The state changes with every relevant token and must be kept indefinitely.
//!
//! A row is one sequence: a start token, then bits, each 0 or 1 with probability 1/2. The label at a position is the parity up to there, as the
//! token of that bit; at the start it is 0. Every label is determined, so the best loss is 0; a uniform prediction has ln 2. Sequences have no
//! end: rows of any length are prefixes of the same sequences, so a model can be evaluated at other lengths (`eval_length`).
//!
//! A recurrent network whose state is multiplied by factors from 0 to 1 cannot do this at every length; one with a factor of −1 can
//! (arXiv 2411.12537). The write rule has factors 1 − β·‖Φ(k)‖²: from 0 on with β up to 1, from −1 on with β up to 2.

use serde::{Deserialize, Serialize};

use crate::builtin::SyntheticTask;
use crate::error::{Error, Result};
use crate::{BestLoss, Rows, Source, rng, task_options};

/// The start token of a sequence.
const START: u32 = 0;
/// The token of bit 0; that of bit 1 follows.
const ZERO: u32 = 1;
/// Bits per random number.
const WORD: usize = 64;

/// Options of parity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParityConfig {
    /// Number of held-out sequences.
    pub held_out: usize,
    /// Index of the first held-out sequence. Another index selects other sequences, for example to tune a learning rate.
    pub held_out_from: usize,
}

impl Default for ParityConfig {
    fn default() -> ParityConfig {
        ParityConfig { held_out: 256, held_out_from: 0 }
    }
}

task_options::text_form!(ParityConfig);

/// Parity as a source of batches. Tokens: 0 starts a sequence, 1 and 2 are the bits 0 and 1.
#[derive(Clone, Debug)]
pub struct Parity {
    config: ParityConfig,
}

impl Parity {
    /// Parity with these options.
    pub fn new(config: ParityConfig) -> Parity {
        Parity { config }
    }

    /// Fills rows with the sequences from `first` up to `end`.
    fn fill(&self, stream: [u64; 2], first: u64, end: u64, rows: usize, time: usize, out: &mut Rows) {
        out.reset(rows, time);
        out.scored = true;
        if time == 0 {
            return;
        }
        for (number, (ids, labels)) in (first..end).zip(out.ids.chunks_mut(time).zip(out.labels.chunks_mut(time))) {
            let key = rng::hash(&[stream[0], stream[1], number]);
            let (mut word, mut parity) = (0, 0);
            for (t, (id, label)) in ids.iter_mut().zip(labels).enumerate() {
                *id = START;
                if let Some(bit) = t.checked_sub(1) {
                    if bit.is_multiple_of(WORD) {
                        word = rng::hash(&[key, (bit / WORD) as u64]);
                    }
                    let bit = (word >> (bit % WORD)) as u32 & 1;
                    parity ^= bit;
                    *id = ZERO + bit;
                }
                *label = (ZERO + parity) as i32;
            }
        }
    }
}

impl Source for Parity {
    fn vocabulary(&self) -> usize {
        3
    }

    fn fingerprint(&self) -> String {
        // Omitted at its default, so data of earlier builds keep their fingerprint.
        let text = format!("parity 1: {:?}", self.config).replace(", held_out_from: 0", "");
        blake3::hash(text.as_bytes()).to_hex()[..16].to_string()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()> {
        let past_the_end = || Error::DataSetting { key: "data", problem: format!("has no batch {index} of {rows} rows; numbers end") };
        let first = index.checked_mul(rows as u64).ok_or_else(past_the_end)?;
        let end = first.checked_add(rows as u64).ok_or_else(past_the_end)?;
        self.fill([4, seed], first, end, rows, time, out);
        Ok(())
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool> {
        let (first, count) = (index.saturating_mul(rows as u64), self.config.held_out as u64);
        let from = self.config.held_out_from as u64;
        if first >= count || rows == 0 {
            return Ok(false);
        }
        self.fill([5, 0], from.saturating_add(first), from.saturating_add(count), rows, time, out);
        Ok(true)
    }

    fn best_loss(&self) -> Option<BestLoss> {
        Some(BestLoss { all: 0.0, recall: 0.0, rest: 0.0 })
    }
}

impl SyntheticTask for Parity {
    /// `0` and `1`, separated by spaces.
    fn tokenizer_json(&self) -> Vec<u8> {
        crate::language::words_tokenizer(["0".to_owned(), "1".to_owned()])
    }

    fn has_own_labels(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(rows: usize, time: usize) -> Rows {
        let mut out = Rows::default();
        Parity::new(ParityConfig::default()).train(3, 1, rows, time, &mut out).expect("a batch");
        out
    }

    #[test]
    fn labels_are_the_parity_of_the_bits_so_far() {
        let rows = batch(200, 100);
        let mut ones = 0;
        for (ids, labels) in rows.ids.chunks(100).zip(rows.labels.chunks(100)) {
            assert_eq!((ids[0], labels[0]), (START, ZERO as i32));
            for t in 1..100 {
                let count = ids[1..=t].iter().filter(|&&id| id == 2).count();
                assert_eq!(labels[t], 1 + (count % 2) as i32);
            }
            ones += ids.iter().filter(|&&id| id == 2).count();
        }
        // 19 800 fair bits: 9900 ± 70.
        assert!((9500..10_300).contains(&ones), "{ones}");
    }

    #[test]
    fn longer_rows_begin_as_shorter_ones_and_held_out_ones_are_others() {
        let (short, long) = (batch(4, 16), batch(4, 130));
        for (short, long) in short.ids.chunks(16).zip(long.ids.chunks(130)) {
            assert_eq!(short, &long[..16]);
        }
        let parity = Parity::new("held_out=5".parse().expect("options"));
        let (mut out, mut count) = (Rows::default(), 0);
        while parity.held_out(count, 2, 130, &mut out).expect("a batch") {
            assert!(out.ids.chunks(130).all(|ids| long.ids.chunks(130).all(|other| other != ids)));
            count += 1;
        }
        // The last of three batches has an unused row.
        assert_eq!(count, 3);
        parity.held_out(2, 2, 130, &mut out).expect("a batch");
        assert!(out.labels[130..].iter().all(|&label| label == -100));
        let last = out.ids[..130].to_vec();
        Parity::new("held_out=1 held_out_from=4".parse().expect("options")).held_out(0, 1, 130, &mut out).expect("a batch");
        assert_eq!(out.ids, last, "sequence 4");
    }

    #[test]
    fn bits_are_text_and_wrong_options_are_named() {
        let parity = Parity::new(ParityConfig::default());
        let tokenizer = crate::Tokenizer::of_json("parity", &parity.tokenizer_json(), None).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(tokenizer.vocabulary(), parity.vocabulary());
        assert_eq!(tokenizer.encode("0 1 1", true).expect("tokens"), [0, 1, 2, 2]);
        let error = "held=3".parse::<ParityConfig>().expect_err("no such option").to_string();
        assert!(error.contains("did you mean `held_out`"), "{error}");
        assert_ne!(parity.fingerprint(), Parity::new("held_out=5".parse().expect("options")).fingerprint());
    }
}
