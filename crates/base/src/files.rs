//! Files and folders that appear whole or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A file or folder that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct Error {
    /// What was attempted.
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// Why it failed.
    pub source: std::io::Error,
}

impl Error {
    /// For `map_err`: names what was attempted and on which file.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error { action, path, source }
    }
}

/// Results of this module.
pub type Result<T> = std::result::Result<T, Error>;

/// Writes a file beside its destination, flushes it to the disk and puts it in place of whatever was there.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let part = beside(path, "part");
    let written = write_as(&part, bytes, path).and_then(|()| fs::rename(&part, path).map_err(Error::io("put in place", path)));
    if written.is_err() {
        // Room on a full disk; the error that matters is the first one.
        let _ = fs::remove_file(&part);
    }
    written?;
    sync_folder(path.parent().unwrap_or(Path::new("")))
}

/// Writes a file and flushes it to the disk.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    write_as(path, bytes, path)
}

/// As [`write_synced`]; errors name what the file will become.
fn write_as(path: &Path, bytes: &[u8], name: &Path) -> Result<()> {
    let mut file = File::create(path).map_err(Error::io("create", name))?;
    file.write_all(bytes).map_err(Error::io("write", name))?;
    file.sync_all().map_err(Error::io("flush to disk", name))
}

/// A hidden name in the same folder.
pub fn beside(path: &Path, ending: &str) -> PathBuf {
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    path.with_file_name(format!(".{name}.{ending}"))
}

/// A rename outlives a power cut only once its folder is on the disk.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if cfg!(unix) {
        File::open(folder).and_then(|file| file.sync_all()).map_err(Error::io("flush to disk", folder))?;
    }
    Ok(())
}

/// Creates a folder and those around it.
pub fn create_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(Error::io("create the folder", folder))
}
