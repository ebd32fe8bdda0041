//! Tokenization of documents to shards on disk.
//!
//! Documents are read in order, tokenized in parallel, and written in order, so shards are the same for any number of threads. A data set
//! is stored in a directory named by the fingerprint of its inputs. It is built in a temporary directory and renamed, so
//! it is always complete, and concurrent builders do not interfere.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use memchr::memmem;
use rayon::prelude::*;
use tempfile::TempDir;

use super::config::{DataConfig, Documents};
use super::shards::{self, Document, Expected};
use super::sources::{self, Format, Piece, SourceFile};
use super::tokenizer::Tokenizer;
use super::tokens::{MANIFEST, Manifest, Tokens, Unsplit, shard_name};
use crate::error::{Error, Result};

/// Bytes of text tokenized at a time.
const CHUNK: usize = 8 << 20;
/// Number of tokens in a full shard.
const SHARD: usize = 1 << 26;

/// Prefix of the directories in which data sets are built, and the file in them that their builder locks.
const BUILDING: &str = ".building-";
const LOCK: &str = ".lock";
/// After this time, a directory without a lock is abandoned.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Options of tokenization.
#[derive(Clone, Copy)]
pub struct Prepare<'a> {
    /// Rebuild the shards even if they exist.
    pub rebuild: bool,
    /// Verify the hash of every byte of the shards before use.
    pub verify: bool,
    /// Called regularly while shards are built.
    pub progress: &'a dyn Fn(&Progress),
    /// Called with each warning about the text, whether it is tokenized now or was tokenized before.
    pub warn: &'a dyn Fn(&str),
    /// Number of tokens in a full shard.
    pub shard_tokens: usize,
}

/// Shards are reused, verified, and built silently.
impl Default for Prepare<'_> {
    fn default() -> Self {
        Prepare { rebuild: false, verify: true, progress: &|_| {}, warn: &|_| {}, shard_tokens: SHARD }
    }
}

/// Progress of building.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Total bytes of all files on disk.
    pub file_bytes: u64,
    /// Bytes read.
    pub read: u64,
    /// Documents so far.
    pub documents: u64,
    /// Tokens so far.
    pub tokens: u64,
    /// Bytes of text so far.
    pub bytes: u64,
}

/// The tokens of the sources, from `cache` if it contains them for the same inputs; otherwise they are built and stored there.
///
/// Same inputs means: files of the same paths, sizes and modification times, the same tokenizer file, the same settings, the same format. Damaged
/// tokens are an error unless `rebuild` is set.
pub fn prepare(config: &DataConfig, cache: &Path, how: &Prepare) -> Result<(Tokenizer, Tokens)> {
    config.check()?;
    let tokenizer = Tokenizer::open(&config.tokenizer, config.end_of_document.as_deref())?;
    let files = sources::files(config)?;
    let (fingerprint, file_bytes) = fingerprint(config, &tokenizer, &files)?;
    let folder = cache.join(&fingerprint.to_hex()[..32]);
    if how.rebuild || !folder.join(MANIFEST).exists() {
        build(config, &tokenizer, &files, fingerprint, file_bytes, &folder, how)?;
    }
    let tokens = Tokens::open(&folder, how.verify)?;
    if let Some(unsplit) = &tokens.manifest().unsplit {
        (how.warn)(&unsplit.to_string());
    }
    Ok((tokenizer, tokens))
}

/// A hash of everything that determines the shards, and the total bytes of the files.
fn fingerprint(config: &DataConfig, tokenizer: &Tokenizer, files: &[SourceFile]) -> Result<(blake3::Hash, u64)> {
    let mut hasher = blake3::Hasher::new();
    // Each item with its length, so the encoding is injective.
    let mut add = |part: &[u8]| {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    };
    add(&shards::VERSION.to_le_bytes());
    add(tokenizer.hash().as_bytes());
    add(&tokenizer.end().to_le_bytes());
    add(&[config.special_tokens.into()]);
    add(config.field.as_bytes());
    add(config.documents.to_string().as_bytes());
    let mut bytes = 0;
    for file in files {
        let metadata = std::fs::metadata(&file.path).map_err(Error::io("read", &file.path))?;
        let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        add(std::path::absolute(&file.path).map_err(Error::io("find", &file.path))?.as_os_str().as_encoded_bytes());
        add(&metadata.len().to_le_bytes());
        add(&changed.as_nanos().to_le_bytes());
        bytes += metadata.len();
    }
    Ok((hasher.finalize(), bytes))
}

fn build(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    files: &[SourceFile],
    fingerprint: blake3::Hash,
    file_bytes: u64,
    folder: &Path,
    how: &Prepare,
) -> Result<()> {
    let cache = folder.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(cache).map_err(Error::io("create the folder", cache))?;
    let (staging, lock) = stage(cache)?;
    let vocabulary = tokenizer.vocabulary() as u64;
    let mut writer = Writer::new(staging.path(), vocabulary, *fingerprint.as_bytes(), how.shard_tokens.max(1));
    let read = Arc::new(AtomicU64::new(0));
    let mut pieces = files.iter().flat_map(|file| match file.documents(&config.documents, &config.field, &read) {
        Ok(pieces) => pieces,
        Err(error) => Box::new(std::iter::once(Err(error))),
    });

    // Only text files are split at a separator, and only those that are not split otherwise.
    let whole = config.documents == Documents::File && files.iter().all(|file| file.format == Format::Text);
    let mut separators = if whole { separators(tokenizer)? } else { Vec::new() };
    let mut chunk = next_chunk(&mut pieces)?;
    while !chunk.is_empty() {
        // The next chunk is read while the previous one is tokenized.
        let (encoded, next) = rayon::join(|| encode(tokenizer, &chunk, config.special_tokens), || next_chunk(&mut pieces));
        for (piece, ids) in chunk.iter().zip(encoded) {
            separators.iter_mut().for_each(|(finder, count)| *count += within(&piece.text, finder));
            writer.add(piece, ids?, tokenizer)?;
        }
        let Totals { documents, tokens, bytes } = writer.totals;
        (how.progress)(&Progress { file_bytes, read: read.load(Ordering::Relaxed), documents, tokens, bytes });
        chunk = next?;
    }

    let (totals, shards) = writer.finish()?;
    if totals.documents == 0 {
        return Err(Error::DataSource { requested: config.sources.join(", "), problem: "it contains no text".into() });
    }
    let manifest = Manifest {
        version: shards::VERSION,
        fingerprint: fingerprint.to_hex().to_string(),
        tokenizer: (tokenizer.name().into(), tokenizer.hash().into()),
        vocabulary,
        end: tokenizer.end(),
        begins: config.special_tokens && tokenizer.begins()?,
        documents: totals.documents,
        tokens: totals.tokens,
        bytes: totals.bytes,
        unsplit: separators
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .max_by_key(|(_, count)| *count)
            .map(|(finder, count)| Unsplit { separator: String::from_utf8_lossy(finder.needle()).into_owned(), count }),
        files: files.iter().map(|file| file.path.clone()).collect(),
        shards,
    };
    let path = staging.path().join(MANIFEST);
    let text = serde_json::to_vec_pretty(&manifest).map_err(|error| Error::io("write", &path)(error.into()))?;
    std::fs::write(&path, text).map_err(Error::io("write", &path))?;
    // In this order: an unlocked lock file would make it look abandoned.
    let path = staging.path().join(LOCK);
    std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
    drop(lock);
    publish(staging, folder, how.rebuild)
}

/// Creates a locked directory to build in, and removes those left by builders that were killed.
fn stage(cache: &Path) -> Result<(TempDir, File)> {
    // One process at a time, by locking the cache directory: no other process checks locks between the creation of a directory and of its lock. If
    // directories cannot be locked, nothing is removed.
    let turn = File::open(cache).and_then(|folder| folder.lock().map(|()| folder));
    let entries = std::fs::read_dir(cache).map_err(Error::io("list", cache))?.filter_map(|entry| Some(entry.ok()?.path()));
    for left in entries
        .filter(|path| turn.is_ok() && path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(BUILDING)))
    {
        let busy = |file: File| matches!(file.try_lock(), Err(std::fs::TryLockError::WouldBlock));
        // Without a lock file its builder is about to publish it, or is an earlier version; it may disappear.
        let is_left = match File::open(left.join(LOCK)) {
            Ok(file) => !busy(file),
            Err(_) => std::fs::metadata(&left).and_then(|meta| meta.modified()).is_ok_and(|at| at.elapsed().is_ok_and(|age| age > DAY)),
        };
        if is_left {
            // Harmless if it cannot be removed.
            let _ = std::fs::remove_dir_all(&left);
        }
    }
    let staging = tempfile::Builder::new().prefix(BUILDING).tempdir_in(cache).map_err(Error::io("create a directory in", cache))?;
    let path = staging.path().join(LOCK);
    let lock = File::create(&path).map_err(Error::io("create", &path))?;
    lock.lock().map_err(Error::io("lock", &path))?;
    Ok((staging, lock))
}

/// Renames the finished directory to its final name.
fn publish(staging: TempDir, folder: &Path, replace: bool) -> Result<()> {
    for place in [staging.path().join(MANIFEST), staging.path().to_owned()] {
        File::open(&place).and_then(|file| file.sync_all()).map_err(Error::io("flush to disk", &place))?;
    }
    // A directory without a manifest is not a data set. One with a manifest was finished by another process from the same inputs.
    if folder.exists() && (replace || !folder.join(MANIFEST).exists()) {
        std::fs::remove_dir_all(folder).map_err(Error::io("remove the old directory", folder))?;
    }
    match std::fs::rename(staging.path(), folder) {
        Ok(()) => {
            // It was renamed, so there is nothing to remove.
            let _ = staging.keep();
            Ok(())
        }
        Err(_) if folder.join(MANIFEST).exists() => Ok(()),
        Err(error) => Err(Error::io("replace", folder)(error)),
    }
}

/// Common document separators: `<|endoftext|>` and the tokenizer's own end-of-document token, each with a count of 0.
fn separators(tokenizer: &Tokenizer) -> Result<Vec<(memmem::Finder<'static>, u64)>> {
    let own = tokenizer.decode(&[tokenizer.end()], false)?;
    let mut texts = vec!["<|endoftext|>".to_owned()];
    texts.extend(Some(own.trim().to_owned()).filter(|own| !own.is_empty() && *own != texts[0]));
    Ok(texts.into_iter().map(|text| (memmem::Finder::new(text.as_bytes()).into_owned(), 0)).collect())
}

/// How often a separator occurs with text on both sides.
fn within(text: &str, finder: &memmem::Finder) -> u64 {
    let blank = |part: &[u8]| part.trim_ascii().is_empty();
    let (bytes, length) = (text.as_bytes(), finder.needle().len());
    let mut places: Vec<usize> = finder.find_iter(bytes).collect();
    if places.last().is_some_and(|&last| blank(&bytes[last + length..])) {
        places.pop();
    }
    let first = places.first().is_some_and(|&first| blank(&bytes[..first]));
    places.len() as u64 - u64::from(first)
}

/// Documents of up to about [`CHUNK`] bytes; empty at the end.
fn next_chunk(pieces: &mut (impl Iterator<Item = Result<Piece>> + Send)) -> Result<Vec<Piece>> {
    let (mut chunk, mut bytes) = (Vec::new(), 0);
    while bytes < CHUNK {
        let Some(piece) = pieces.next().transpose()? else { break };
        // Short documents cost more than their bytes.
        bytes += piece.text.len() + 64;
        chunk.push(piece);
    }
    Ok(chunk)
}

fn encode(tokenizer: &Tokenizer, chunk: &[Piece], special: bool) -> Vec<Result<Vec<u32>>> {
    chunk.par_iter().map(|piece| tokenizer.encode(&piece.text, special && piece.first)).collect()
}

#[derive(Clone, Copy, Default)]
struct Totals {
    documents: u64,
    tokens: u64,
    bytes: u64,
}

/// Writes tokens to consecutive shards.
struct Writer {
    folder: PathBuf,
    vocabulary: u64,
    fingerprint: [u8; 32],
    wide: bool,
    shard_tokens: usize,
    documents: Vec<Document>,
    tokens: Vec<u8>,
    hashes: Vec<String>,
    totals: Totals,
    /// The current document.
    hasher: blake3::Hasher,
    bytes: u64,
    weight: u64,
}

impl Writer {
    fn new(folder: &Path, vocabulary: u64, fingerprint: [u8; 32], shard_tokens: usize) -> Writer {
        let (documents, tokens, hashes) = (Vec::new(), Vec::new(), Vec::new());
        let (hasher, totals, wide) = (blake3::Hasher::new(), Totals::default(), vocabulary > 1 << 16);
        Writer {
            folder: folder.into(),
            vocabulary,
            fingerprint,
            wide,
            shard_tokens,
            documents,
            tokens,
            hashes,
            totals,
            hasher,
            bytes: 0,
            weight: 0,
        }
    }

    fn add(&mut self, piece: &Piece, mut ids: Vec<u32>, tokenizer: &Tokenizer) -> Result<()> {
        self.hasher.update(piece.text.as_bytes());
        self.bytes += piece.text.len() as u64;
        // A template may add the end-of-document token itself, to every piece.
        if ids.last() == Some(&tokenizer.end()) {
            ids.pop();
        }
        if piece.last && self.bytes == 0 {
            return Ok(());
        }
        let weights = tokenizer.bytes_of_tokens();
        self.weight += ids.iter().map(|&id| u64::from(weights[id as usize])).sum::<u64>();
        if piece.last {
            ids.push(tokenizer.end());
        }
        self.push(&ids)?;
        if piece.last {
            let hash = self.hasher.finalize().as_bytes()[..8].try_into().map(u64::from_le_bytes).unwrap_or_default();
            let end = (self.tokens.len() / self.width()) as u64;
            self.documents.push(Document { end, bytes: self.bytes, weight: self.weight, hash });
            self.totals.documents += 1;
            self.totals.bytes += self.bytes;
            self.hasher.reset();
            (self.bytes, self.weight) = (0, 0);
        }
        Ok(())
    }

    fn width(&self) -> usize {
        if self.wide { 4 } else { 2 }
    }

    fn push(&mut self, mut ids: &[u32]) -> Result<()> {
        self.totals.tokens += ids.len() as u64;
        while !ids.is_empty() {
            let mut room = self.shard_tokens - self.tokens.len() / self.width();
            if room == 0 {
                self.flush()?;
                room = self.shard_tokens;
            }
            let (now, later) = ids.split_at(room.min(ids.len()));
            match self.wide {
                true => now.iter().for_each(|id| self.tokens.extend_from_slice(&id.to_le_bytes())),
                false => now.iter().for_each(|&id| self.tokens.extend_from_slice(&(id as u16).to_le_bytes())),
            }
            ids = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let number = self.hashes.len();
        let expected = Expected { number: number as u32, vocabulary: self.vocabulary, fingerprint: &self.fingerprint };
        let hash = shards::write(&self.folder.join(shard_name(number)), expected, self.wide, &self.documents, &self.tokens)?;
        self.hashes.push(blake3::Hash::from(hash).to_hex().to_string());
        self.documents.clear();
        self.tokens.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<(Totals, Vec<String>)> {
        if !self.tokens.is_empty() {
            self.flush()?;
        }
        Ok((self.totals, self.hashes))
    }
}
