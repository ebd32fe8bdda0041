//! The binary format of token shards.
//!
//! A shard consists of a header of 128 bytes, a table of the documents that end in it, and its tokens, all little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | `TWTOKENS` |
//! | 8..12 | version, 1 |
//! | 12..16 | bytes per token, 2 or 4 |
//! | 16..24 | tokens |
//! | 24..32 | documents that end here |
//! | 32..40 | vocabulary; every token is below it |
//! | 40..44 | index of the shard, from 0 |
//! | 44..64 | zero |
//! | 64..96 | BLAKE3 of bytes 0..64 and of all bytes from 128 on |
//! | 96..128 | fingerprint of the inputs of the stream |
//! | 128.. | for each document: end within this shard in tokens, bytes of text, weight, hash of its text; u64 each |
//! | then | tokens |
//!
//! A document may begin in one shard and end in a later one. Reading checks every length against the file size before using it and makes
//! no allocation that depends on the content of the file.
//!
//! Shards are read, not memory-mapped: if a file is truncated while in use, a read returns an error, while an access to a map
//! beyond the end of its file terminates the process (SIGBUS).

use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use termwise_base::files::read_at;

use crate::error::{Error, Result};

/// Format version.
pub const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"TWTOKENS";
const HEADER: usize = 128;
const RECORD: usize = 32;
/// Number of table records read at once: they are mostly accessed in order.
const BLOCK: usize = 512;

/// A document in a stream of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document {
    /// Its end in the stream, exclusive, including its end-of-document token.
    pub end: u64,
    /// Bytes of its text.
    pub bytes: u64,
    /// Σ over its tokens of the bytes of each according to the tokenizer; close to `bytes`.
    pub weight: u64,
    /// Hash of its text.
    pub hash: u64,
}

/// One shard.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    hash: [u8; 32],
    wide: bool,
    tokens: u64,
    documents: u64,
    vocabulary: u64,
    /// The records read last, and the index of the first.
    block: Mutex<(usize, Vec<u8>)>,
}

/// Expected properties of a shard of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// Its index.
    pub number: u32,
    /// Vocabulary size.
    pub vocabulary: u64,
    /// Fingerprint of the stream's inputs.
    pub fingerprint: &'a [u8; 32],
}

/// Writes a shard of little-endian tokens with 2 or 4 bytes each. Returns the hash in its header.
pub(super) fn write(path: &Path, expected: Expected, wide: bool, documents: &[Document], tokens: &[u8]) -> Result<[u8; 32]> {
    let width = if wide { 4 } else { 2 };
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(width as u32).to_le_bytes());
    header[16..24].copy_from_slice(&((tokens.len() / width) as u64).to_le_bytes());
    header[24..32].copy_from_slice(&(documents.len() as u64).to_le_bytes());
    header[32..40].copy_from_slice(&expected.vocabulary.to_le_bytes());
    header[40..44].copy_from_slice(&expected.number.to_le_bytes());
    let mut table = Vec::with_capacity(documents.len() * RECORD);
    for document in documents {
        for value in [document.end, document.bytes, document.weight, document.hash] {
            table.extend_from_slice(&value.to_le_bytes());
        }
    }
    let hash = *blake3::Hasher::new().update(&header[..64]).update(&table).update(tokens).finalize().as_bytes();
    header[64..96].copy_from_slice(&hash);
    header[96..].copy_from_slice(expected.fingerprint);
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    let written = [&header[..], &table, tokens].into_iter().try_for_each(|part| file.write_all(part));
    written.and_then(|()| file.sync_all()).map_err(Error::io("write", path))?;
    Ok(hash)
}

impl Shard {
    /// Opens a shard and checks its header and table; with `verify` also the hash of all its bytes.
    pub fn open(path: &Path, expected: Expected, verify: bool) -> Result<Shard> {
        let file = File::open(path).map_err(Error::io("open the tokens in", path))?;
        let length = file.metadata().map_err(Error::io("read the size of", path))?.len();
        let refuse = |problem: String| Error::Shard { path: path.into(), problem };
        if length < HEADER as u64 {
            return Err(refuse(format!("truncated: a shard has at least {HEADER} bytes, this file has {length}")));
        }
        let mut header = [0; HEADER];
        read_at(&file, 0, &mut header).map_err(Error::io("read the tokens in", path))?;
        let mut shard = Shard::new(path.into(), file, &header, length, expected).map_err(refuse)?;
        let mut last = 0;
        for index in 0..shard.documents as usize {
            let end = shard.document(index)?.end;
            if end < last || end > shard.tokens {
                return Err(refuse("damaged: its documents are not consecutive".into()));
            }
            last = end;
        }
        if verify && shard.hash_of_content(&header).map_err(Error::io("read the tokens in", path))? != shard.hash {
            return Err(refuse("damaged: the checksum differs".into()));
        }
        Ok(shard)
    }

    fn new(path: PathBuf, file: File, header: &[u8; HEADER], bytes: u64, expected: Expected) -> std::result::Result<Shard, String> {
        if &header[..8] != MAGIC {
            return Err("not a shard of tokens".into());
        }
        let word = |at: usize| header[at..at + 4].try_into().map(u32::from_le_bytes).unwrap_or_default();
        let long = |at: usize| header[at..at + 8].try_into().map(u64::from_le_bytes).unwrap_or_default();
        if word(8) != VERSION {
            return Err(format!("of version {}; this program reads version {VERSION}", word(8)));
        }
        let (width, tokens, documents, vocabulary) = (word(12), long(16), long(24), long(32));
        if (width != 2 && width != 4) || vocabulary == 0 || (width == 2 && vocabulary > 1 << 16) || vocabulary > 1 << 32 {
            return Err(format!("damaged: {width} bytes per token for a vocabulary of {vocabulary}"));
        }
        let length =
            (|| tokens.checked_mul(width.into())?.checked_add(documents.checked_mul(RECORD as u64)?)?.checked_add(HEADER as u64))();
        if length != Some(bytes) {
            return Err(format!("truncated or damaged: its header states {tokens} tokens and {documents} documents, it has {bytes} bytes"));
        }
        if header[44..64].iter().any(|&byte| byte != 0) {
            return Err("damaged: reserved bytes of its header are not zero".into());
        }
        if word(40) != expected.number || vocabulary != expected.vocabulary || &header[96..] != expected.fingerprint {
            return Err("not a shard of this stream: index, vocabulary or fingerprint differ".into());
        }
        let hash = header[64..96].try_into().unwrap_or_default();
        Ok(Shard { path, file, hash, wide: width == 4, tokens, documents, vocabulary, block: Mutex::default() })
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of documents that end here.
    pub fn documents(&self) -> u64 {
        self.documents
    }

    /// Document `index` of those that end here; its end is relative to the start of this shard.
    pub fn document(&self, index: usize) -> Result<Document> {
        let mut block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, records) = &mut *block;
        if index < *first || index >= *first + records.len() / RECORD {
            *first = index / BLOCK * BLOCK;
            records.resize((self.documents as usize - *first).min(BLOCK) * RECORD, 0);
            if let Err(error) = self.bytes(HEADER + *first * RECORD, records) {
                records.clear();
                return Err(error);
            }
        }
        let at = (index - *first) * RECORD;
        let value = |i: usize| records[at + 8 * i..at + 8 * i + 8].try_into().map(u64::from_le_bytes).unwrap_or_default();
        Ok(Document { end: value(0), bytes: value(1), weight: value(2), hash: value(3) })
    }

    fn bytes(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        read_at(&self.file, offset as u64, out).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => Error::Shard { path: self.path.clone(), problem: "truncated while it was in use".into() },
            _ => Error::io("read the tokens in", &self.path)(error),
        })
    }

    /// Reads tokens from `start` on into `out`. A token beyond the vocabulary, which indicates damage, is an error.
    pub fn read(&self, start: usize, out: &mut [u32]) -> Result<()> {
        let width = if self.wide { 4 } else { 2 };
        let mut bytes = vec![0; out.len() * width];
        self.bytes(HEADER + self.documents as usize * RECORD + start * width, &mut bytes)?;
        match self.wide {
            true => out.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(out, &bytes)| *out = u32::from_le_bytes(bytes)),
            false => out.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(out, &bytes)| *out = u16::from_le_bytes(bytes).into()),
        }
        match out.iter().position(|&id| u64::from(id) >= self.vocabulary) {
            None => Ok(()),
            Some(at) => {
                let problem = format!("damaged: token {} is {}, the vocabulary has {}", start + at, out[at], self.vocabulary);
                Err(Error::Shard { path: self.path.clone(), problem })
            }
        }
    }

    /// The hash in its header.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    fn hash_of_content(&mut self, header: &[u8; HEADER]) -> std::io::Result<[u8; 32]> {
        self.file.seek(SeekFrom::Start(HEADER as u64))?;
        Ok(*blake3::Hasher::new().update(&header[..64]).update_reader(&self.file)?.finalize().as_bytes())
    }
}
