//! Reading of documents from files.
//!
//! Design:
//! - everything is streamed: memory contains one piece of a document, one JSON line or one page of a Parquet column;
//! - documents are ordered by source, then by file name, then by position in the file;
//! - every error names the file and the line or row.

mod json;
mod lines;
#[cfg(feature = "parquet")]
mod parquet;

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::config::{DataConfig, Documents};
use crate::error::{Error, Result};
use crate::hub;

/// A text file that is one document is split into pieces of at most this many bytes, after a line break if possible.
/// Each piece is tokenized separately.
pub const PIECE_BYTES: usize = 16 << 20;
/// Maximum size of a line, and of a document in a Parquet file or between separators, in bytes.
pub const MAX_LINE_BYTES: usize = 256 << 20;

/// A file with documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Its path.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Its compression, by file name.
    pub compression: Compression,
}

/// The format of a file, by file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `.txt`
    Text,
    /// `.jsonl`, `.ndjson`, `.json`: one object per line.
    JsonLines,
    /// `.parquet`
    Parquet,
}

/// The compression of a file, by file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not compressed.
    None,
    /// `.gz`
    Gzip,
    /// `.zst`
    Zstd,
}

/// A part of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its text.
    pub text: String,
    /// Whether it is the first of its document.
    pub first: bool,
    /// Whether it is the last of its document.
    pub last: bool,
}

impl Piece {
    fn whole(text: String) -> Piece {
        Piece { text, first: true, last: true }
    }
}

/// The documents of one file, in pieces. There are none after an error.
pub type Pieces = Box<dyn Iterator<Item = Result<Piece>> + Send>;

pub(crate) const ENDINGS: &str = ".txt, .jsonl, .ndjson, .json (each also with .gz or .zst) and .parquet";

impl SourceFile {
    /// A file by its name; `None` if the extension is unknown.
    pub fn new(path: impl Into<PathBuf>) -> Option<SourceFile> {
        let path = path.into();
        let name = path.file_name()?.to_str()?.to_ascii_lowercase();
        let (name, compression) = match (name.strip_suffix(".gz"), name.strip_suffix(".zst")) {
            (Some(name), _) => (name, Compression::Gzip),
            (_, Some(name)) => (name, Compression::Zstd),
            _ => (name.as_str(), Compression::None),
        };
        let format = match name.rsplit_once('.')?.1 {
            "txt" => Format::Text,
            "jsonl" | "ndjson" | "json" => Format::JsonLines,
            "parquet" if compression == Compression::None => Format::Parquet,
            _ => return None,
        };
        Some(SourceFile { path, format, compression })
    }

    /// Its documents. `read` counts the bytes read from the file.
    pub fn documents(&self, documents: &Documents, field: &str, read: &Arc<AtomicU64>) -> Result<Pieces> {
        let path = self.path.clone();
        Ok(match self.format {
            Format::Text => lines::documents(self.open(read)?, path, documents),
            Format::JsonLines => json::documents(self.open(read)?, path, field),
            #[cfg(feature = "parquet")]
            Format::Parquet => parquet::documents(path, field, read.clone())?,
            #[cfg(not(feature = "parquet"))]
            Format::Parquet => return Err(Error::left_out(path.display().to_string(), "Parquet files", "parquet")),
        })
    }

    fn open(&self, read: &Arc<AtomicU64>) -> Result<Box<dyn BufRead + Send>> {
        let file = File::open(&self.path).map_err(Error::io("open", &self.path))?;
        let counted = BufReader::with_capacity(1 << 18, Counted { inner: file, read: read.clone() });
        Ok(match self.compression {
            Compression::None => Box::new(counted),
            Compression::Gzip => Box::new(BufReader::with_capacity(1 << 18, flate2::bufread::MultiGzDecoder::new(counted))),
            #[cfg(not(feature = "zstd"))]
            Compression::Zstd => return Err(Error::left_out(self.path.display().to_string(), "Zstandard", "zstd")),
            #[cfg(feature = "zstd")]
            Compression::Zstd => {
                let decoder = zstd::stream::read::Decoder::with_buffer(counted).map_err(Error::io("read", &self.path))?;
                Box::new(BufReader::with_capacity(1 << 18, decoder))
            }
        })
    }
}

struct Counted<R> {
    inner: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// All files named by the sources, in order and without duplicates. Files of the hub are fetched into its cache.
pub fn files(config: &DataConfig) -> Result<Vec<SourceFile>> {
    config.check()?;
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    for requested in &config.sources {
        for file in files_of(requested)? {
            // The same file may be named twice, for instance by a glob and a directory.
            let same = file.path.canonicalize().map_err(Error::io("find", &file.path))?;
            if seen.insert(same) {
                found.push(file);
            }
        }
    }
    Ok(found)
}

fn files_of(requested: &str) -> Result<Vec<SourceFile>> {
    let refuse = |problem: String| Err(Error::DataSource { requested: requested.into(), problem });
    if requested.starts_with("hf://") {
        return hub::files(requested);
    }
    let path = Path::new(requested);
    if path.is_file() {
        return match SourceFile::new(path) {
            Some(file) => Ok(vec![file]),
            None => refuse(format!("its file extension is unknown; supported are {ENDINGS}")),
        };
    }
    if path.is_dir() {
        let mut files = Vec::new();
        walk(path, &mut HashSet::new(), &mut files)?;
        return match files.is_empty() {
            true => refuse(format!("the directory contains no file that ends in {ENDINGS}")),
            false => Ok(files),
        };
    }
    if !requested.contains(['*', '?', '[']) {
        return refuse(match std::fs::metadata(path) {
            Ok(_) => "it is neither a regular file nor a directory".into(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => "no such file or directory".into(),
            Err(error) => format!("it cannot be read: {error}"),
        });
    }
    let paths = match glob::glob(requested) {
        Ok(paths) => paths,
        Err(error) => return refuse(format!("not a valid glob: {error}")),
    };
    let mut files = Vec::new();
    for path in paths {
        let path = path.map_err(|error| Error::io("read", error.path().to_owned())(error.into()))?;
        if path.is_file() {
            files.extend(SourceFile::new(path));
        }
    }
    if files.is_empty() {
        return refuse(format!("no file matches and ends in {ENDINGS}"));
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// Files below a directory, sorted by name. Symbolic links are followed, but no directory is visited twice; hidden entries are skipped.
fn walk(folder: &Path, entered: &mut HashSet<PathBuf>, files: &mut Vec<SourceFile>) -> Result<()> {
    if !entered.insert(folder.canonicalize().map_err(Error::io("find", folder))?) {
        return Ok(());
    }
    let entries = std::fs::read_dir(folder).and_then(|entries| entries.collect::<std::io::Result<Vec<_>>>());
    let mut entries = entries.map_err(Error::io("list", folder))?;
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        let path = entry.path();
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if path.is_dir() {
            walk(&path, entered, files)?;
        } else if path.is_file() {
            files.extend(SourceFile::new(path));
        }
    }
    Ok(())
}
