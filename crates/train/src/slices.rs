//! Loss on associative-recall hits, by training frequency, and by position.
//!
//! A predicted token is a *hit* if the n-gram that it ends occurred earlier in the same context: a bigram `a b` is a hit at its second and later
//! occurrences within a window. The other tokens are the rest. Both are grouped by the number of times that the n-gram occurs in the training
//! text. Arora et al. (arXiv 2312.04927) attribute most of the gap between attention and its efficient rivals to hits of rare bigrams.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use termwise_data::{Rows, Source};

use crate::error::Result;
use crate::eval::Part;
use crate::step::counts;

/// Smallest training frequency of each group.
const FREQUENCIES: [u64; 6] = [0, 1, 10, 100, 1000, 10_000];
/// Training tokens read at once.
const CHUNK: usize = 1 << 16;

/// The losses of an evaluation in groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Slices {
    /// Tokens of an n-gram; 2 is a bigram.
    pub ngram: usize,
    /// Tokens of the training text in which frequencies were counted; absent without a training text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training_tokens: Option<u64>,
    /// Tokens whose n-gram occurred earlier in the same context.
    pub hits: Part,
    /// The other tokens.
    pub rest: Part,
    /// Both by the frequency of the n-gram in the training text; empty without one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frequencies: Vec<FrequencySlice>,
    /// By position in the context; each group is twice as long as the one before.
    pub positions: Vec<PositionSlice>,
}

/// N-grams of one range of training frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FrequencySlice {
    /// Smallest frequency.
    pub from: u64,
    /// Largest frequency; absent for the last group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<u64>,
    /// Tokens whose n-gram occurred earlier in the same context.
    pub hits: Part,
    /// The other tokens.
    pub rest: Part,
}

/// Positions of one range.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PositionSlice {
    /// First position.
    pub from: usize,
    /// Last position.
    pub to: usize,
    /// Their loss.
    pub part: Part,
}

/// Collects losses by n-gram. [`SliceCounter::finish`] groups them.
#[derive(Clone, Debug)]
pub struct SliceCounter {
    ngram: usize,
    /// Sums of hits and of the rest for each n-gram that was predicted.
    grams: HashMap<Vec<u32>, [Total; 2]>,
    positions: Vec<Total>,
}

/// Counts of n-grams in a training text.
#[derive(Clone, Debug)]
pub struct NgramCounts {
    tokens: u64,
    counts: HashMap<Vec<u32>, u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Total {
    loss: f64,
    count: u64,
}

impl Total {
    fn add(&mut self, other: Total) {
        self.loss += other.loss;
        self.count += other.count;
    }

    fn part(self) -> Part {
        Part { tokens: self.count, loss: if self.count == 0 { 0.0 } else { self.loss / self.count as f64 } }
    }
}

impl SliceCounter {
    /// For n-grams of this many tokens, at least 2.
    pub fn new(ngram: usize) -> SliceCounter {
        SliceCounter { ngram: ngram.max(2), grams: HashMap::new(), positions: Vec::new() }
    }

    /// Adds a batch with the loss of every position, [B, T].
    pub fn add(&mut self, rows: &Rows, losses: &[f64]) {
        let time = rows.time.max(1);
        for (row, ids) in rows.ids.chunks(time).enumerate() {
            let mut seen: HashSet<&[u32]> = HashSet::new();
            for t in 0..ids.len() {
                // The n-gram that ends at the input of this position is in the context of its label.
                if let Some(start) = (t + 1).checked_sub(self.ngram) {
                    seen.insert(&ids[start..=t]);
                }
                let at = row * time + t;
                let (true, Some(&loss)) = (counts(rows, at), losses.get(at)) else { continue };
                let one = Total { loss, count: 1 };
                let group = (t + 1).ilog2() as usize;
                if self.positions.len() <= group {
                    self.positions.resize(group + 1, Total::default());
                }
                self.positions[group].add(one);
                let before = &ids[(t + 2).saturating_sub(self.ngram)..=t];
                let mut gram = before.to_vec();
                gram.push(rows.labels[at] as u32);
                let hit = gram.len() == self.ngram && seen.contains(&gram[..]);
                self.grams.entry(gram).or_default()[usize::from(!hit)].add(one);
            }
        }
    }

    /// How often each n-gram that was predicted occurs in the training text of a source.
    ///
    /// # Errors
    /// If the training text cannot be read.
    pub fn count_in(&self, training: &dyn Source) -> Result<NgramCounts> {
        let mut counts = NgramCounts { tokens: 0, counts: self.grams.keys().map(|gram| (gram.clone(), 0)).collect() };
        counts.tokens = count_ngrams(training, self.ngram, &mut counts.counts)?;
        Ok(counts)
    }

    /// The groups. Frequencies are those of [`SliceCounter::count_in`], of this counter or of another that was fed the same text.
    pub fn finish(&self, frequencies: Option<&NgramCounts>) -> Slices {
        let training_tokens = frequencies.map_or(0, |counts| counts.tokens);
        let mut groups = [[Total::default(); 2]; FREQUENCIES.len()];
        let mut both = [Total::default(); 2];
        // A fixed order, so that sums do not depend on that of the map.
        let mut grams: Vec<(&Vec<u32>, &[Total; 2])> = self.grams.iter().collect();
        grams.sort_unstable_by_key(|(gram, _)| *gram);
        for (gram, totals) in grams {
            let frequency = frequencies.and_then(|found| found.counts.get(gram)).copied().unwrap_or(0);
            let group = FREQUENCIES.partition_point(|&least| least <= frequency) - 1;
            for kind in 0..2 {
                both[kind].add(totals[kind]);
                groups[group][kind].add(totals[kind]);
            }
        }
        let slice = |(group, [hits, rest]): (usize, &[Total; 2])| FrequencySlice {
            from: FREQUENCIES[group],
            to: FREQUENCIES.get(group + 1).map(|next| next - 1),
            hits: hits.part(),
            rest: rest.part(),
        };
        let position = |(group, total): (usize, &Total)| PositionSlice { from: (1 << group) - 1, to: (2 << group) - 2, part: total.part() };
        Slices {
            ngram: self.ngram,
            training_tokens: (training_tokens > 0).then_some(training_tokens),
            hits: both[0].part(),
            rest: both[1].part(),
            frequencies: if training_tokens > 0 { groups.iter().enumerate().map(slice).collect() } else { Vec::new() },
            positions: self.positions.iter().enumerate().map(position).collect(),
        }
    }
}

/// Counts the known n-grams in the training text; the number of its tokens.
fn count_ngrams(source: &dyn Source, ngram: usize, frequencies: &mut HashMap<Vec<u32>, u64>) -> Result<u64> {
    let (mut total, mut kept) = (0, 0);
    let mut buffer = vec![0; CHUNK + ngram];
    loop {
        let found = source.training_text(total, &mut buffer[kept..])?;
        if found == 0 {
            return Ok(total);
        }
        total += found as u64;
        let end = kept + found;
        for gram in buffer[..end].windows(ngram) {
            if let Some(count) = frequencies.get_mut(gram) {
                *count += 1;
            }
        }
        // N-grams across two reads.
        kept = end.min(ngram - 1);
        buffer.copy_within(end - kept..end, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use termwise_data::Result as DataResult;

    #[derive(Debug)]
    struct Training(Vec<u32>);

    impl Source for Training {
        fn vocabulary(&self) -> usize {
            100
        }

        fn fingerprint(&self) -> String {
            String::new()
        }

        fn train(&self, _: u64, _: u64, _: usize, _: usize, _: &mut Rows) -> DataResult<()> {
            Ok(())
        }

        fn held_out(&self, _: u64, _: usize, _: usize, _: &mut Rows) -> DataResult<bool> {
            Ok(false)
        }

        /// Seven tokens at a time, so that n-grams cross reads.
        fn training_text(&self, start: u64, out: &mut [u32]) -> DataResult<usize> {
            let rest = &self.0[(start as usize).min(self.0.len())..];
            let count = rest.len().min(out.len()).min(7);
            out[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        }
    }

    fn rows(texts: &[&[u32]]) -> Rows {
        let mut rows = Rows::default();
        let time = texts[0].len() - 1;
        rows.reset(texts.len(), time);
        for (row, text) in texts.iter().enumerate() {
            rows.ids[row * time..(row + 1) * time].copy_from_slice(&text[..time]);
            for t in 0..time {
                rows.labels[row * time + t] = text[t + 1] as i32;
            }
        }
        rows
    }

    /// By hand. The text `1 2 3 1 2 4 2 3`, one loss per predicted token:
    /// `1→2` new, `2→3` new, `3→1` new, `1→2` hit, `2→4` new, `4→2` new, `2→3` hit.
    #[test]
    fn hits_are_second_occurrences_in_the_same_context() {
        let mut counter = SliceCounter::new(2);
        let losses = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
        counter.add(&rows(&[&[1, 2, 3, 1, 2, 4, 2, 3]]), &losses);
        // Another context: the same bigrams are new there. `5 5 5`: the second `5→5` is a hit.
        let mut second = rows(&[&[1, 2, 5, 5, 5, 2, 2, 9]]);
        second.labels[6] = -100;
        counter.add(&second, &[1.0, 1.0, 1.0, 128.0, 1.0, 1.0, 1e9]);
        // The training text has `1 2` twice, `2 3` never, `5 5` twelve times.
        let mut text = vec![1, 2, 0, 1, 2, 0];
        text.extend([5; 13]);
        let training = Training(text);
        let found = counter.finish(Some(&counter.count_in(&training).expect("counts")));
        assert_eq!(found.training_tokens, Some(19));
        assert_eq!(found.hits, Part { tokens: 3, loss: (8.0 + 64.0 + 128.0) / 3.0 });
        assert_eq!(found.rest, Part { tokens: 10, loss: (1.0 + 2.0 + 4.0 + 16.0 + 32.0 + 5.0) / 10.0 });
        let group = |from: u64| *found.frequencies.iter().find(|slice| slice.from == from).expect("a group");
        assert_eq!(group(0).hits, Part { tokens: 1, loss: 64.0 });
        assert_eq!(group(1).hits, Part { tokens: 1, loss: 8.0 });
        assert_eq!(group(1).rest, Part { tokens: 2, loss: 1.0 });
        assert_eq!(group(10).hits, Part { tokens: 1, loss: 128.0 });
        assert_eq!((group(1).to, group(10_000).to), (Some(9), None));
        // Positions 0, 1..2 and 3..6; the ignored label is in none.
        let positions: Vec<(usize, usize, u64)> = found.positions.iter().map(|slice| (slice.from, slice.to, slice.part.tokens)).collect();
        assert_eq!(positions, [(0, 0, 2), (1, 2, 4), (3, 6, 7)]);
        assert_eq!(found.positions[2].part.loss, (8.0 + 16.0 + 32.0 + 64.0 + 128.0 + 1.0 + 1.0) / 7.0);
    }

    /// Compares all positions of a random text with the definition, written out.
    #[test]
    fn hits_of_longer_ngrams_follow_the_definition() {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 60) as u32 % 3
        };
        let text: Vec<u32> = (0..65).map(|_| next()).collect();
        let losses: Vec<f64> = (0..64).map(|t| 1.0 + f64::from(t)).collect();
        for n in 2..5 {
            let mut counter = SliceCounter::new(n);
            counter.add(&rows(&[&text]), &losses);
            let found = counter.finish(None);
            let is_hit = |t: usize| t + 2 >= n && (0..t + 2 - n).any(|s| text[s..s + n] == text[t + 2 - n..t + 2]);
            let hits: Vec<f64> = (0..64).filter(|&t| is_hit(t)).map(|t| losses[t]).collect();
            assert_eq!((found.hits.tokens, found.rest.tokens), (hits.len() as u64, 64 - hits.len() as u64), "{n}");
            assert!((found.hits.loss - hits.iter().sum::<f64>() / hits.len() as f64).abs() < 1e-9, "{n}");
            assert!(found.training_tokens.is_none() && found.frequencies.is_empty());
        }
    }
}
