//! All shards of a data set as one stream of documents.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::shards::{Document, Expected, Shard};
use crate::error::{Error, Result};

/// Name of the manifest, which is written last and makes a directory of shards a data set.
pub(super) const MANIFEST: &str = "dataset.json";

/// The manifest of a directory of shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Format version of the shards.
    pub version: u32,
    /// Hash of all inputs: files, settings, tokenizer, version.
    pub fingerprint: String,
    /// The tokenizer's name, and the hash of its file.
    pub tokenizer: (String, String),
    /// Vocabulary size.
    pub vocabulary: u64,
    /// The end-of-document token.
    pub end: u32,
    /// Whether documents start with a special token of the tokenizer.
    pub begins: bool,
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens, including ends of documents.
    pub tokens: u64,
    /// Bytes of text.
    pub bytes: u64,
    /// Separators found inside documents of text files; absent if there are none, and in data sets of earlier builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsplit: Option<Unsplit>,
    /// Files that were read, in order.
    pub files: Vec<PathBuf>,
    /// Hash of each shard.
    pub shards: Vec<String>,
}

/// A document separator that occurs inside documents, which were not split at it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unsplit {
    /// The separator, such as `<|endoftext|>`.
    pub separator: String,
    /// How often it occurs with text on both sides.
    pub count: u64,
}

impl std::fmt::Display for Unsplit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Unsplit { separator, count } = self;
        let times = termwise_report::counted(*count, "time");
        write!(
            f,
            "the text contains `{separator}` {times} inside documents, and each file is read as one document; \
             split it with --documents \"separator:{separator}\""
        )
    }
}

/// Name of a shard's file.
pub(super) fn shard_name(number: usize) -> String {
    format!("tokens-{number:05}.bin")
}

/// A data set: its documents as one stream of tokens.
#[derive(Debug)]
pub struct Tokens {
    manifest: Manifest,
    shards: Vec<Shard>,
    /// First token of each shard, and the end.
    starts: Vec<u64>,
    /// First document that ends in each shard, and the end.
    firsts: Vec<u64>,
}

impl Tokens {
    /// Opens the data set in a directory. With `verify`, all bytes are hashed and compared, in parallel; otherwise only lengths, headers and
    /// document tables are checked.
    pub fn open(folder: &Path, verify: bool) -> Result<Tokens> {
        let path = folder.join(MANIFEST);
        let damaged = |problem: String| Error::Shard { path: path.clone(), problem };
        let text = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| damaged(format!("damaged: {error}")))?;
        let fingerprint = blake3::Hash::from_hex(&manifest.fingerprint).map_err(|error| damaged(format!("damaged: {error}")))?;
        let open = |(number, hash): (usize, &String)| {
            let path = folder.join(shard_name(number));
            let expected = Expected { number: number as u32, vocabulary: manifest.vocabulary, fingerprint: fingerprint.as_bytes() };
            let shard = Shard::open(&path, expected, verify)?;
            match blake3::Hash::from(shard.hash()).to_hex().as_str() == hash {
                true => Ok(shard),
                false => Err(Error::Shard { path, problem: format!("not the shard listed in {MANIFEST}") }),
            }
        };
        // All results are collected before the first error is returned, so the error does not depend on the number of threads.
        let shards: Vec<Result<Shard>> = manifest.shards.par_iter().enumerate().map(open).collect();
        let shards = shards.into_iter().collect::<Result<Vec<Shard>>>()?;
        let sums = |count: fn(&Shard) -> u64| {
            let mut sums = vec![0u64];
            shards.iter().for_each(|shard| sums.push(sums[sums.len() - 1].saturating_add(count(shard))));
            sums
        };
        let (starts, firsts) = (sums(Shard::tokens), sums(Shard::documents));
        let tokens = Tokens { manifest, shards, starts, firsts };
        let (total, documents) = (tokens.len(), tokens.documents());
        if total != tokens.manifest.tokens || documents != tokens.manifest.documents || documents == 0 {
            return Err(damaged(format!("its shards contain {total} tokens and {documents} documents, which does not match")));
        }
        if tokens.document(documents - 1)?.end != total {
            return Err(damaged("damaged: the last document does not end with the last token".into()));
        }
        Ok(tokens)
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Number of tokens; at least 1.
    pub fn len(&self) -> u64 {
        self.starts[self.shards.len()]
    }

    /// Always false: a data set has at least one document.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of documents; at least 1.
    pub fn documents(&self) -> u64 {
        self.firsts[self.shards.len()]
    }

    /// Document `index`, which must exist; its end is relative to the start of the stream.
    pub fn document(&self, index: u64) -> Result<Document> {
        let shard = self.firsts.partition_point(|&first| first <= index) - 1;
        let document = self.shards[shard].document((index - self.firsts[shard]) as usize)?;
        Ok(Document { end: self.starts[shard] + document.end, ..document })
    }

    /// The start of document `index`; for the number of documents, the end of the stream.
    pub fn start(&self, index: u64) -> Result<u64> {
        if index == 0 { Ok(0) } else { Ok(self.document(index - 1)?.end) }
    }

    /// Reads tokens from `start` on, which must exist, into `out`.
    pub fn read(&self, mut start: u64, mut out: &mut [u32]) -> Result<()> {
        while !out.is_empty() {
            let shard = self.starts.partition_point(|&first| first <= start) - 1;
            let here = (self.starts[shard + 1] - start).min(out.len() as u64) as usize;
            let (now, later) = out.split_at_mut(here);
            self.shards[shard].read((start - self.starts[shard]) as usize, now)?;
            (start, out) = (start + here as u64, later);
        }
        Ok(())
    }
}
