//! Batches of text.

use std::ops::Range;
use std::path::Path;

use super::config::{DataConfig, Layout};
use super::prepare::{Prepare, prepare};
use super::split::{Held, Split, Stretches, proportion};
use super::tokenizer::Tokenizer;
use super::tokens::Tokens;
use super::{Rows, Source, rng};
use crate::error::{Error, Result};

/// Distance between positions of the held-out stream with precomputed byte counts.
const MARK_INTERVAL: u64 = 4096;

/// Text as a source of batches.
///
/// Packed: a training row is a window of T tokens and the next token. In an epoch, all windows that start at multiples of T after a random offset
/// occur once, in random order. Fewer than 2T tokens at the two ends of the stream are dropped, different ones in each epoch. The
/// held-out stream is split into windows in order. Its first token is preceded by an end-of-document token, or by the last training token if the
/// end of a single document is held out. Every held-out token is a label once, including ends of documents.
///
/// Padded: a row is the beginning of a document. Training documents are drawn with replacement, held-out documents are in order. A row begins with the
/// tokenizer's begin-of-document token, which is not a label, or else with an end-of-document token. Tokens beyond T are dropped,
/// including held-out ones; every other held-out token is a label once.
///
/// Bytes of held-out batches add up exactly to the bytes of the held-out documents (of the labels, if documents are truncated).
/// Within a document they are distributed by the bytes of each token. Bytes of training batches are those of the tokens.
#[derive(Debug)]
pub struct TextSource {
    tokenizer: Tokenizer,
    tokens: Tokens,
    /// The held-out text, if it is separate.
    valid: Option<Tokens>,
    split: Split,
    layout: Layout,
    /// Bytes of held-out text before every [`MARK_INTERVAL`]th token, and its document.
    marks: Vec<Mark>,
    fingerprint: String,
}

#[derive(Clone, Copy, Debug)]
struct Mark {
    document: usize,
    /// Token bytes within the document so far.
    weight: u64,
    /// Bytes of the preceding documents.
    bytes: u64,
}

impl TextSource {
    /// Tokenizes the sources into `cache`, unless it already contains them, and splits them.
    pub fn prepare(config: &DataConfig, cache: &Path, how: &Prepare) -> Result<TextSource> {
        let (tokenizer, tokens) = prepare(config, cache, how)?;
        let valid = match config.valid.is_empty() {
            true => None,
            false => Some(prepare(&DataConfig { sources: config.valid.clone(), ..config.clone() }, cache, how)?.1),
        };
        TextSource::new(config, tokenizer, tokens, valid)
    }

    fn new(config: &DataConfig, tokenizer: Tokenizer, tokens: Tokens, valid: Option<Tokens>) -> Result<TextSource> {
        let weights = tokenizer.bytes_of_tokens();
        let mut split = match &valid {
            Some(valid) => Split::separate(&tokens, valid)?,
            None => Split::new(&tokens, config.held_out, config.split_seed, weights)?,
        };
        if !config.part.is_whole() {
            split.restrict(config.part, valid.as_ref().unwrap_or(&tokens), weights)?;
        }
        if config.layout == Layout::Padded && tokens.documents() == 1 {
            let problem = "= padded needs several documents, and the text is one; use packed, or split it with `documents`".into();
            return Err(Error::DataSetting { key: "layout", problem });
        }
        let mut hasher = blake3::Hasher::new();
        let manifest = tokens.manifest();
        manifest.shards.iter().for_each(|hash| _ = hasher.update(hash.as_bytes()));
        hasher.update(manifest.tokenizer.1.as_bytes());
        hasher.update(format!("{} {} {} {}", manifest.end, split.share, config.split_seed, config.layout).as_bytes());
        valid.iter().flat_map(|valid| &valid.manifest().shards).for_each(|hash| _ = hasher.update(hash.as_bytes()));
        if !config.part.is_whole() {
            hasher.update(format!("{:?}", config.part).as_bytes());
        }
        let fingerprint = hasher.finalize().to_hex()[..16].to_string();
        let mut source = TextSource { tokenizer, tokens, valid, split, layout: config.layout, marks: Vec::new(), fingerprint };
        source.marks = source.mark()?;
        Ok(source)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tokens of all documents.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// Held-out fraction: as requested, or the default.
    pub fn held_out_share(&self) -> f64 {
        self.split.share
    }

    /// Number of training tokens.
    pub fn train_tokens(&self) -> u64 {
        self.split.train.len()
    }

    /// Number of held-out tokens.
    pub fn held_out_tokens(&self) -> u64 {
        self.split.held.len()
    }

    /// Number of held-out documents; 1 if the end of a single document is held out.
    pub fn held_out_documents(&self) -> usize {
        self.split.held_documents.len()
    }

    /// Bytes of the held-out documents.
    pub fn held_out_bytes(&self) -> u64 {
        self.split.held_documents.iter().map(|held| held.bytes).sum()
    }

    /// The text that the held-out stream is a part of.
    fn held_text(&self) -> &Tokens {
        self.valid.as_ref().unwrap_or(&self.tokens)
    }

    fn read_train(&self, at: u64, out: &mut [u32]) -> Result<()> {
        read(&self.tokens, &self.split.train, at, out)
    }

    fn read_held(&self, at: u64, out: &mut [u32]) -> Result<()> {
        read(self.held_text(), &self.split.held, at, out)
    }

    fn weight(&self, ids: &[u32]) -> u64 {
        let weights = self.tokenizer.bytes_of_tokens();
        ids.iter().map(|&id| u64::from(weights[id as usize])).sum()
    }

    /// One pass over the held-out tokens.
    fn mark(&self) -> Result<Vec<Mark>> {
        let mut marks = Vec::new();
        let mut mark = Mark { document: 0, weight: 0, bytes: 0 };
        for start in (0..self.split.held.len()).step_by(MARK_INTERVAL as usize) {
            marks.push(mark);
            self.advance(&mut mark, start, (start + MARK_INTERVAL).min(self.split.held.len()))?;
        }
        Ok(marks)
    }

    /// Advances a mark from `start` to `end` of the held-out stream.
    fn advance(&self, mark: &mut Mark, mut start: u64, end: u64) -> Result<()> {
        let mut ids = Vec::new();
        while start < end {
            let Held { end: stop, bytes, .. } = self.split.held_documents[mark.document];
            ids.resize((stop.min(end) - start).min(MARK_INTERVAL) as usize, 0);
            self.read_held(start, &mut ids)?;
            start += ids.len() as u64;
            mark.weight += self.weight(&ids);
            if start == stop {
                *mark = Mark { document: mark.document + 1, weight: 0, bytes: mark.bytes + bytes };
            }
        }
        Ok(())
    }

    /// Bytes of text before position `at` of the held-out stream.
    fn bytes_before(&self, at: u64) -> Result<u64> {
        let Some(&(mut mark)) = self.marks.get((at / MARK_INTERVAL) as usize) else { return Ok(self.held_out_bytes()) };
        self.advance(&mut mark, at - at % MARK_INTERVAL, at)?;
        let partial = self.split.held_documents.get(mark.document).map_or(0, |held| proportion(held.bytes, mark.weight, held.weight));
        Ok(mark.bytes + partial)
    }

    fn train_packed(&self, seed: u64, index: u64, out: &mut Rows) -> Result<()> {
        let (stream, time) = (&self.split.train, out.time as u64);
        if stream.len() <= time {
            let problem = format!("have {} training tokens, and a row needs {time} and one more; use shorter rows", stream.len());
            return Err(Error::DataSetting { key: "sources", problem });
        }
        // One window less than would fit leaves space for the offset.
        let windows = (stream.len() / time).saturating_sub(1).max(1);
        let offsets = stream.len() - windows * time;
        let mut window = vec![0; out.time + 1];
        for row in 0..out.rows {
            let number = index.wrapping_mul(out.rows as u64).wrapping_add(row as u64);
            let (epoch, place) = (number / windows, number % windows);
            let offset = rng::below(rng::hash(&[seed, epoch, 1]), offsets);
            let start = offset + time * rng::permuted(rng::hash(&[seed, epoch, 2]), windows, place);
            self.read_train(start, &mut window)?;
            put(out, row, &window);
            out.bytes += self.weight(&window[1..]);
        }
        Ok(())
    }

    fn held_packed(&self, index: u64, out: &mut Rows) -> Result<bool> {
        let (stream, time) = (&self.split.held, out.time as u64);
        let Some(first) = index.checked_mul(out.rows as u64 * time).filter(|&first| first < stream.len()) else { return Ok(false) };
        let mut window = vec![0; out.time + 1];
        for row in 0..out.rows {
            let start = first + row as u64 * time;
            if start >= stream.len() {
                break;
            }
            let count = time.min(stream.len() - start) as usize;
            match start {
                0 => window[0] = self.before_held_out()?,
                _ => self.read_held(start - 1, &mut window[..1])?,
            }
            self.read_held(start, &mut window[1..=count])?;
            put(out, row, &window[..=count]);
        }
        let end = (first + out.rows as u64 * time).min(stream.len());
        out.bytes = self.bytes_before(end)? - self.bytes_before(first)?;
        Ok(true)
    }

    /// The token before the held-out stream.
    fn before_held_out(&self) -> Result<u32> {
        let mut token = [self.tokenizer.end()];
        if self.split.tail {
            self.read_train(self.split.train.len() - 1, &mut token)?;
        }
        Ok(token[0])
    }

    /// Fills a row with the document at these positions of a text. Returns the labels.
    fn put_document(&self, out: &mut Rows, row: usize, text: &Tokens, place: Range<u64>) -> Result<Vec<u32>> {
        let Range { start, end } = place;
        let begins = text.manifest().begins;
        let count = (end - start).min(out.time as u64 + u64::from(begins)) as usize;
        let mut ids = vec![self.tokenizer.end(); count + usize::from(!begins)];
        text.read(start, &mut ids[usize::from(!begins)..])?;
        put(out, row, &ids);
        out.lengths[row] = (ids.len() - 1).max(1);
        Ok(ids.split_off(1))
    }

    fn train_padded(&self, seed: u64, index: u64, out: &mut Rows) -> Result<()> {
        out.lengths.resize(out.rows, 1);
        for row in 0..out.rows {
            let place = rng::below(rng::hash(&[seed, index, row as u64, 3]), self.split.train_documents.len());
            let (document, _) = self.split.train_documents.find(place);
            let targets = self.put_document(out, row, &self.tokens, self.tokens.start(document)?..self.tokens.document(document)?.end)?;
            out.bytes += self.weight(&targets);
        }
        Ok(())
    }

    fn held_padded(&self, index: u64, out: &mut Rows) -> Result<bool> {
        let documents = &self.split.held_documents;
        let Some(first) = index.checked_mul(out.rows as u64).filter(|&first| first < documents.len() as u64) else { return Ok(false) };
        out.lengths.resize(out.rows, 1);
        for row in 0..out.rows.min(documents.len() - first as usize) {
            let number = first as usize + row;
            let begin = if number == 0 { 0 } else { documents[number - 1].end };
            let Held { end, bytes, weight } = documents[number];
            let (start, _) = self.split.held.find(begin);
            let targets = self.put_document(out, row, self.held_text(), start..start + (end - begin))?;
            // All bytes of a document that fits are counted, whatever the sum over its tokens.
            let whole = targets.len() as u64 + u64::from(self.tokens.manifest().begins) == end - begin;
            out.bytes += if whole { bytes } else { proportion(bytes, self.weight(&targets), weight) };
        }
        Ok(true)
    }
}

fn read(text: &Tokens, stretches: &Stretches, mut at: u64, mut out: &mut [u32]) -> Result<()> {
    while !out.is_empty() {
        let (start, here) = stretches.find(at);
        let (now, later) = out.split_at_mut(here.min(out.len() as u64) as usize);
        text.read(start, now)?;
        (at, out) = (at + now.len() as u64, later);
    }
    Ok(())
}

/// Tokens as the row's inputs, and each one's successor as its label.
fn put(out: &mut Rows, row: usize, window: &[u32]) {
    let (place, count) = (row * out.time, window.len() - 1);
    out.ids[place..place + count].copy_from_slice(&window[..count]);
    out.labels[place..place + count].iter_mut().zip(&window[1..]).for_each(|(label, &id)| *label = id as i32);
}

impl Source for TextSource {
    fn vocabulary(&self) -> usize {
        self.tokenizer.vocabulary()
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    fn train(&self, seed: u64, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<()> {
        out.reset(rows, time);
        match self.layout {
            _ if rows == 0 || time == 0 => Ok(()),
            Layout::Packed => self.train_packed(seed, index, out),
            Layout::Padded => self.train_padded(seed, index, out),
        }
    }

    fn held_out(&self, index: u64, rows: usize, time: usize, out: &mut Rows) -> Result<bool> {
        out.reset(rows, time);
        match self.layout {
            _ if rows == 0 || time == 0 => Ok(false),
            Layout::Packed => self.held_packed(index, out),
            Layout::Padded => self.held_padded(index, out),
        }
    }

    fn training_text(&self, start: u64, out: &mut [u32]) -> Result<usize> {
        let count = self.split.train.len().saturating_sub(start).min(out.len() as u64) as usize;
        self.read_train(start, &mut out[..count])?;
        Ok(count)
    }
}
