//! Training of byte-level BPE tokenizers, as in GPT-2.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use termwise_base::files;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::{AddedToken, TokenizerBuilder};

use super::config::DataConfig;
use super::sources;
use crate::error::{Error, Result};

/// Maximum vocabulary size: the library allocates all of it before reading any text.
const MAX_VOCABULARY: usize = 1 << 24;

/// Settings for training a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BpeConfig {
    /// Vocabulary size, including special tokens and the 256 bytes.
    pub vocabulary: usize,
    /// Special tokens, first in the vocabulary. One of them should be an end-of-document token.
    pub special_tokens: Vec<String>,
    /// Pairs that occur less often are not merged.
    pub min_frequency: u64,
}

impl Default for BpeConfig {
    fn default() -> BpeConfig {
        BpeConfig { vocabulary: 8192, special_tokens: vec!["<|endoftext|>".into()], min_frequency: 2 }
    }
}

/// Result of training a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct BpeReport {
    /// Vocabulary size; smaller than requested if the text has no more pairs.
    pub vocabulary: usize,
    /// Documents read.
    pub documents: u64,
    /// Bytes of text read.
    pub bytes: u64,
}

/// Trains a tokenizer on the documents of `data` and writes a `tokenizer.json` in Hugging Face format, atomically.
/// Only sources, field and documents of `data` are used. The result is the same for any number of threads.
pub fn train(data: &DataConfig, config: &BpeConfig, path: &Path) -> Result<BpeReport> {
    let least = 256 + config.special_tokens.len();
    if config.vocabulary < least {
        let problem = format!("of {} is too small: bytes and special tokens need {least}", config.vocabulary);
        return Err(Error::DataSetting { key: "vocabulary", problem });
    }
    if config.vocabulary > MAX_VOCABULARY {
        let problem = format!("of {} is too large: the maximum is {MAX_VOCABULARY}", config.vocabulary);
        return Err(Error::DataSetting { key: "vocabulary", problem });
    }
    let files = sources::files(data)?;
    let read = Arc::new(AtomicU64::new(0));
    let pieces = files.iter().flat_map(|file| match file.documents(&data.documents, &data.field, &read) {
        Ok(pieces) => pieces,
        Err(error) => Box::new(std::iter::once(Err(error))),
    });
    let wrong = |error: &dyn std::fmt::Display| Error::Tokenizer {
        name: path.display().to_string(),
        problem: format!("cannot be trained: {error}"),
    };

    let mut builder = BpeTrainerBuilder::new();
    builder = builder.show_progress(false).vocab_size(config.vocabulary).min_frequency(config.min_frequency);
    builder = builder.special_tokens(config.special_tokens.iter().map(|token| AddedToken::from(token.clone(), true)).collect());
    let mut trainer = builder.initial_alphabet(ByteLevel::alphabet().into_iter().collect()).build();
    let tokenizer = TokenizerBuilder::<BPE, NormalizerWrapper, ByteLevel, ByteLevel, ByteLevel>::new()
        .with_model(BPE::default())
        .with_normalizer(None)
        .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
        .with_post_processor(Some(ByteLevel::new(false, false, true)))
        .with_decoder(Some(ByteLevel::default()));
    let mut tokenizer = tokenizer.build().map_err(|error| wrong(&error))?;

    // The library takes an iterator of strings, not of results: an error ends it and is checked afterwards.
    let (mut failed, mut documents, mut bytes) = (None, 0, 0);
    let texts = pieces.map_while(|piece| match piece {
        Ok(piece) => {
            documents += u64::from(piece.last && !(piece.first && piece.text.is_empty()));
            bytes += piece.text.len() as u64;
            Some(piece.text)
        }
        Err(error) => {
            failed = Some(error);
            None
        }
    });
    let trained = tokenizer.train(&mut trainer, texts).map(|_| ());
    if let Some(error) = failed {
        return Err(error);
    }
    trained.map_err(|error| wrong(&error))?;
    if documents == 0 {
        return Err(Error::DataSource { requested: data.sources.join(", "), problem: "it contains no text".into() });
    }
    let text = tokenizer.to_string(true).map_err(|error| wrong(&error))?;
    files::write_whole(path, text.as_bytes())?;
    Ok(BpeReport { vocabulary: tokenizer.get_vocab_size(true), documents, bytes })
}
