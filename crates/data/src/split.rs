//! The split into training and held-out documents.

use std::ops::Range;

use termwise_report::counted;

use super::config::HeldOutPart;
use super::rng;
use super::tokens::Tokens;
use crate::error::{Error, Result};

/// A sequence made of ranges of a longer one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stretches {
    /// (position in this sequence, position in the longer one) of the start of each range.
    begins: Vec<(u64, u64)>,
    len: u64,
}

impl Stretches {
    /// Appends `start..end` of the longer sequence.
    fn push(&mut self, start: u64, end: u64) {
        if end > start {
            self.begins.push((self.len, start));
            self.len += end - start;
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Position of element `at` < len in the longer sequence, and the number of elements up to the end of its range, itself included.
    pub(super) fn find(&self, at: u64) -> (u64, u64) {
        let next = self.begins.partition_point(|&(place, _)| place <= at);
        let (place, start) = self.begins[next - 1];
        let end = self.begins.get(next).map_or(self.len, |&(place, _)| place);
        (start + (at - place), end - at)
    }
}

/// A document, or part of one, of the held-out stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// Its end in the held-out stream.
    pub(super) end: u64,
    /// Bytes of its text.
    pub(super) bytes: u64,
    /// Σ over its tokens of their bytes according to the tokenizer.
    pub(super) weight: u64,
}

/// The training and held-out parts of a data set. Its memory grows only with the held-out part.
#[derive(Clone, Debug, Default)]
pub(super) struct Split {
    /// The requested held-out fraction, or the default.
    pub(super) share: f64,
    pub(super) train: Stretches,
    pub(super) held: Stretches,
    /// Indices of the training documents.
    pub(super) train_documents: Stretches,
    pub(super) held_documents: Vec<Held>,
    /// Whether the end of a single document is held out.
    pub(super) tail: bool,
}

impl Split {
    pub(super) fn new(tokens: &Tokens, share: Option<f64>, seed: u64, weights: &[u32]) -> Result<Split> {
        let documents = tokens.documents();
        let share = share.unwrap_or(if documents as f64 * 0.001 >= 10.0 { 0.001 } else { 0.1 });
        let split = match (share > 0.0, documents) {
            (false, _) => Split::of(tokens, share, &[])?,
            (true, 1) => Split::tail(tokens, share, weights)?,
            (true, _) => Split::of(tokens, share, &choose(tokens, share, seed)?)?,
        };
        if split.train.len() == 0 {
            // The shortest decimal form: 1e-300 must not have 300 zeros.
            let share = if share < 1e-4 { format!("{share:e}") } else { share.to_string() };
            let equal = if split.tail { "" } else { ", and equal documents are held out together, so no held-out document is trained on" };
            let problem = format!("= {share} leaves no training data: {}, {} tokens{equal}", counted(documents, "document"), tokens.len());
            return Err(Error::DataSetting { key: "held_out", problem });
        }
        Ok(split)
    }

    /// Holds out these documents, which are sorted.
    fn of(tokens: &Tokens, share: f64, chosen: &[u64]) -> Result<Split> {
        let mut split = Split { share, ..Split::default() };
        let mut next = 0;
        for &index in chosen {
            let (start, document) = (tokens.start(index)?, tokens.document(index)?);
            split.train.push(tokens.start(next)?, start);
            split.train_documents.push(next, index);
            split.held.push(start, document.end);
            split.held_documents.push(Held { end: split.held.len(), bytes: document.bytes, weight: document.weight });
            next = index + 1;
        }
        split.train.push(tokens.start(next)?, tokens.len());
        split.train_documents.push(next, tokens.documents());
        Ok(split)
    }

    /// With nothing of `tokens` held out, and all of `valid`, another text, in its place.
    pub(super) fn separate(tokens: &Tokens, valid: &Tokens) -> Result<Split> {
        let all: Vec<u64> = (0..valid.documents()).collect();
        let Split { held, held_documents, .. } = Split::of(valid, 0.0, &all)?;
        Ok(Split { held, held_documents, ..Split::of(tokens, 0.0, &[])? })
    }

    /// With only a part of the held-out tokens, which are tokens of `text`.
    pub(super) fn restrict(&mut self, part: HeldOutPart, text: &Tokens, weights: &[u32]) -> Result<()> {
        let [first, last] = [part.start, part.end].map(|share| (share * self.held.len() as f64).round() as u64);
        let blocks = blocks(first..last, part.tokens);
        let (mut held, mut documents, mut ids) = (Stretches::default(), Vec::new(), Vec::new());
        let mut start = 0;
        for document in &self.held_documents {
            for block in &blocks {
                let (mut at, end) = (block.start.max(start), block.end.min(document.end));
                let mut weight = 0;
                if at >= end {
                    continue;
                }
                while at < end {
                    let (place, here) = self.held.find(at);
                    let here = here.min(end - at);
                    held.push(place, place + here);
                    ids.resize(here as usize, 0);
                    text.read(place, &mut ids)?;
                    weight += ids.iter().map(|&id| u64::from(weights[id as usize])).sum::<u64>();
                    at += here;
                }
                let bytes = proportion(document.bytes, weight, document.weight);
                documents.push(Held { end: held.len(), bytes, weight });
            }
            start = document.end;
        }
        if held.len() == 0 {
            let problem = format!("= {}..{} contains none of {} held-out tokens", part.start, part.end, self.held.len());
            return Err(Error::DataSetting { key: "valid_range", problem });
        }
        // The token before the range is not that before the held-out text.
        self.tail &= first == 0;
        (self.held, self.held_documents) = (held, documents);
        Ok(())
    }

    /// Holds out the last tokens of a single document.
    fn tail(tokens: &Tokens, share: f64, weights: &[u32]) -> Result<Split> {
        let document = tokens.document(0)?;
        // The end-of-document token is not counted.
        let cut = ((document.end - 1) as f64 * (1.0 - share)) as u64;
        let mut split = Split { share, tail: true, ..Split::default() };
        split.train.push(0, cut);
        split.train_documents.push(0, 1);
        split.held.push(cut, document.end);
        let mut weight = 0u64;
        let mut buffer = vec![0; 1 << 16];
        for start in (cut..document.end).step_by(buffer.len()) {
            let here = buffer.len().min((document.end - start) as usize);
            tokens.read(start, &mut buffer[..here])?;
            weight += buffer[..here].iter().map(|&id| u64::from(weights[id as usize])).sum::<u64>();
        }
        let bytes = proportion(document.bytes, weight, document.weight);
        split.held_documents.push(Held { end: split.held.len(), bytes, weight });
        Ok(split)
    }
}

/// Tokens of a block.
const BLOCK: u64 = 8192;

/// A range, or evenly spaced blocks of it with at most this many tokens in total.
fn blocks(range: Range<u64>, tokens: u64) -> Vec<Range<u64>> {
    let length = range.end - range.start;
    if tokens == 0 || tokens >= length {
        return vec![range];
    }
    let count = tokens.div_ceil(BLOCK);
    let start = |block: u64| range.start + (u128::from(block) * u128::from(length) / u128::from(count)) as u64;
    (0..count).map(|block| start(block)..start(block) + BLOCK.min(tokens - block * BLOCK)).collect()
}

/// `bytes` · `part` / `whole`, rounded down; `bytes` for the whole.
pub(super) fn proportion(bytes: u64, part: u64, whole: u64) -> u64 {
    if whole == 0 { 0 } else { (bytes as u128 * part as u128 / whole as u128) as u64 }
}

/// The documents with the smallest hashes: the requested fraction, at least one. Documents with equal text have equal hashes, so either all or none are chosen.
fn choose(tokens: &Tokens, share: f64, seed: u64) -> Result<Vec<u64>> {
    let documents = tokens.documents();
    let count = ((documents as f64 * share).round() as usize).clamp(1, documents as usize - 1);
    let hash = |index: u64| Ok(rng::hash(&[seed, tokens.document(index)?.hash]));
    let hashes = (0..documents).map(hash).collect::<Result<Vec<u64>>>()?;
    let last = *hashes.clone().select_nth_unstable(count - 1).1;
    Ok((0..documents).filter(|&index| hashes[index as usize] <= last).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_evenly_spaced_and_have_the_number_of_tokens() {
        let whole = 100..5000;
        assert_eq!(blocks(whole.clone(), 0), std::slice::from_ref(&whole));
        assert_eq!(blocks(whole.clone(), 4900), std::slice::from_ref(&whole));
        let found = blocks(1000..101_000, 20_000);
        assert_eq!(found, [1000..9192, 34_333..42_525, 67_666..71_282]);
        assert_eq!(found.iter().map(|block| block.end - block.start).sum::<u64>(), 20_000);
    }
}
