//! Files that appear whole or not at all.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::{Error, Result};

/// A file written and flushed to the disk beside its destination, which [`Staged::publish`] puts in place.
/// Dropped unpublished, it is gone.
pub struct Staged {
    file: NamedTempFile,
    path: PathBuf,
}

impl Staged {
    /// Writes what will become `path`.
    pub fn write(path: &Path, content: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<Staged> {
        let file = temporary_beside(path).map_err(Error::io("create a file beside", path))?;
        let mut writer = BufWriter::with_capacity(1 << 20, file.as_file());
        content(&mut writer)?;
        writer.flush().map_err(Error::io("write", path))?;
        drop(writer);
        file.as_file().sync_all().map_err(Error::io("flush to disk", path))?;
        Ok(Staged { file, path: path.to_owned() })
    }

    /// Puts the file in place of whatever was there.
    pub fn publish(self) -> Result<()> {
        let Staged { file, path } = self;
        file.persist(&path).map_err(|refused| Error::io("put in place", &path)(refused.error))?;
        sync_folder(folder_of(&path)).map_err(Error::io("flush to disk", &path))
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn temporary_beside(path: &Path) -> std::io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".termwise-").suffix(".part");
    // A temporary file is private by default; the finished one should be as readable as any the user creates.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder_of(path))
}

/// A rename outlives a power cut only once its folder is on the disk.
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}
