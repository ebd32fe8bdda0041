//! Learning a tokenizer from text: byte-level BPE, as GPT-2 has it.

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

/// Most tokens that can be learned: the library makes room for all before it has seen a text.
const MOST: usize = 1 << 24;

/// What tokenizer is learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BpeConfig {
    /// Tokens in all, special ones and the 256 bytes included.
    pub vocabulary: usize,
    /// Tokens that no text is turned into by merging; they come first in the vocabulary. One of them should end documents.
    pub special_tokens: Vec<String>,
    /// Pairs that occur less often are not merged.
    pub min_frequency: u64,
}

impl Default for BpeConfig {
    fn default() -> BpeConfig {
        BpeConfig { vocabulary: 8192, special_tokens: vec!["<|endoftext|>".into()], min_frequency: 2 }
    }
}

/// What was learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct BpeReport {
    /// Tokens; fewer than asked for where the text has no more pairs.
    pub vocabulary: usize,
    /// Documents read.
    pub documents: u64,
    /// Bytes of text read.
    pub bytes: u64,
}

/// Learns a tokenizer from the documents of `data` and writes a `tokenizer.json` that Hugging Face's library reads too; the file appears
/// whole or not at all. Of `data` only sources, field and documents count. The result is the same for any number of threads.
pub fn train(data: &DataConfig, config: &BpeConfig, path: &Path) -> Result<BpeReport> {
    let least = 256 + config.special_tokens.len();
    if config.vocabulary < least {
        let problem = format!("of {} is too small: the bytes and special tokens alone are {least}", config.vocabulary);
        return Err(Error::DataSetting { key: "vocabulary", problem });
    }
    if config.vocabulary > MOST {
        let problem = format!("of {} is too large: at most {MOST} tokens can be learned", config.vocabulary);
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
        problem: format!("cannot be learned: {error}"),
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

    // The library takes texts, not results: an error ends them and is looked at afterwards.
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
        return Err(Error::DataSource { asked: data.sources.join(", "), problem: "there is no text in it".into() });
    }
    let text = tokenizer.to_string(true).map_err(|error| wrong(&error))?;
    files::write_whole(path, text.as_bytes())?;
    Ok(BpeReport { vocabulary: tokenizer.get_vocab_size(true), documents, bytes })
}
