//! Temporary directories with documents.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use termwise_data::Result;
use termwise_data::{DataConfig, Prepare, TextSource};

/// A temporary directory with sources and a cache next to them.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        std::fs::create_dir(folder.0.path().join("sources")).unwrap();
        folder
    }

    /// The path of a source, or next to the cache.
    pub fn path(&self, name: &str) -> String {
        let below = if name.starts_with("cache") { "" } else { "sources" };
        self.0.path().join(below).join(name).to_str().unwrap().to_owned()
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = PathBuf::from(self.path(name));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        self.path(name)
    }

    /// Compressed according to the name.
    pub fn write_compressed(&self, name: &str, content: &[u8]) -> String {
        self.write(name, compress(name, content))
    }
}

pub fn compress(name: &str, content: &[u8]) -> Vec<u8> {
    if name.ends_with(".gz") {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    } else if name.ends_with(".zst") {
        #[cfg(feature = "zstd")]
        return zstd::encode_all(content, 3).unwrap();
        #[cfg(not(feature = "zstd"))]
        unreachable!("{name}: only where the feature is on");
    } else {
        content.to_vec()
    }
}

/// The names that this build can read: `.zst` is a feature.
pub fn readable<'a>(names: &[&'a str]) -> Vec<&'a str> {
    names.iter().copied().filter(|name| cfg!(feature = "zstd") || !name.ends_with(".zst")).collect()
}

/// Documents `<0>`, `<1>`, … of different lengths, one per line.
pub fn numbered(count: usize) -> String {
    (0..count).map(|i| format!("<{i}>").repeat(1 + i % 7) + "\n").collect()
}

/// The source `name`.
pub fn config(folder: &Folder, name: &str) -> DataConfig {
    DataConfig { sources: vec![folder.path(name)], ..DataConfig::default() }
}

pub fn prepare(folder: &Folder, config: &DataConfig) -> Result<TextSource> {
    TextSource::prepare(config, Path::new(&folder.path("cache")), &Prepare::default())
}

/// The shards in a cache by name.
pub fn shards(cache: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut shards = BTreeMap::new();
    let folders = std::fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    for folder in folders {
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "bin") {
                shards.insert(path.strip_prefix(cache).unwrap().into(), std::fs::read(&path).unwrap());
            }
        }
    }
    shards
}

/// The shared reference data; the test is skipped if it is missing.
pub fn shared() -> Option<PathBuf> {
    termwise_base::test_skip::shared("data")
}

/// The first line of an HTTP request to a local fake hub, and the first and last requested byte.
#[cfg(feature = "hub")]
pub fn request(stream: &std::net::TcpStream) -> Option<(String, usize, usize)> {
    use std::io::BufRead;
    let mut reader = std::io::BufReader::new(stream.try_clone().ok()?);
    let (mut line, mut from, mut to) = (String::new(), 0usize, usize::MAX);
    reader.read_line(&mut line).ok()?;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        if header.trim().is_empty() {
            break;
        }
        if let Some((a, b)) = header.to_lowercase().trim().strip_prefix("range: bytes=").and_then(|range| range.split_once('-')) {
            (from, to) = (a.parse().ok()?, b.parse().unwrap_or(usize::MAX));
        }
    }
    Some((line, from, to))
}
