//! The manifest of a checkpoint: sizes and hashes of its files, to detect corruption.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

use super::damaged;
use crate::error::{Error, Result};
use termwise_base::files::write_synced;

/// Name of the manifest.
pub const MANIFEST: &str = "manifest.json";

const FORMAT: &str = "termwise checkpoint 1";
/// Maximum size of a manifest in bytes: a damaged directory must not exhaust memory.
const MAX_BYTES: u64 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: String,
    files: BTreeMap<String, Entry>,
    /// Hash of the list of files.
    hash: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    bytes: u64,
    blake3: String,
}

impl Manifest {
    fn of(files: BTreeMap<String, Entry>) -> Manifest {
        let mut hasher = blake3::Hasher::new();
        for (name, entry) in &files {
            hasher.update(format!("{name}\n{}\n{}\n", entry.bytes, entry.blake3).as_bytes());
        }
        Manifest { format: FORMAT.into(), files, hash: hasher.finalize().to_hex().to_string() }
    }

    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("strings and numbers are always valid JSON")
    }
}

/// Writes the manifest of these files of a directory.
pub(super) fn write(folder: &Path, names: &[&str]) -> Result<()> {
    let entries = names.iter().map(|&name| Ok((name.to_owned(), measure(&folder.join(name))?)));
    let manifest = Manifest::of(entries.collect::<Result<_>>()?);
    Ok(write_synced(&folder.join(MANIFEST), &manifest.to_bytes())?)
}

/// Checks that every file of a checkpoint is unchanged. The error names the first file that differs.
pub fn verify(folder: &Path) -> Result<()> {
    for (name, expected) in &read(folder)?.files {
        let path = folder.join(name);
        // The length first: it is cheap, and the error is more specific.
        let length = std::fs::metadata(&path).map_err(|error| damaged(path.clone(), format!("it cannot be read: {error}")))?.len();
        if length != expected.bytes {
            return Err(damaged(path, format!("it has {length} bytes, {} were written", expected.bytes)));
        }
        if measure(&path)?.blake3 != expected.blake3 {
            return Err(damaged(path, "its content was modified or damaged (the checksum differs)"));
        }
    }
    Ok(())
}

/// Whether a directory has a manifest and files of the expected sizes. Contents are not read.
pub(super) fn looks_complete(folder: &Path) -> bool {
    let right = |(name, entry): (&String, &Entry)| std::fs::metadata(folder.join(name)).is_ok_and(|data| data.len() == entry.bytes);
    read(folder).is_ok_and(|manifest| manifest.files.iter().all(right))
}

fn read(folder: &Path) -> Result<Manifest> {
    let path = folder.join(MANIFEST);
    let length = std::fs::metadata(&path).map_err(|error| damaged(path.clone(), format!("it cannot be read: {error}")))?.len();
    if length > MAX_BYTES {
        return Err(damaged(path, format!("it has {length} bytes, more than any manifest")));
    }
    let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| damaged(path.clone(), error.to_string()))?;
    let plain = |name: &str| matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(only)] if only == name);
    if let Some(name) = manifest.files.keys().find(|name| !plain(name)) {
        return Err(damaged(path, format!("`{name}` is not the name of a file in the directory")));
    }
    // Serialized again, an intact manifest is byte-identical.
    if Manifest::of(manifest.files).to_bytes() != bytes {
        return Err(damaged(path, "its content was modified or damaged (the checksum differs)"));
    }
    serde_json::from_slice(&bytes).map_err(|error| damaged(path, error.to_string()))
}

fn measure(path: &Path) -> Result<Entry> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut hasher = blake3::Hasher::new();
    let bytes = std::io::copy(&mut file, &mut hasher).map_err(Error::io("read", path))?;
    Ok(Entry { bytes, blake3: hasher.finalize().to_hex().to_string() })
}
