//! Files that appear whole or not at all, and files that are read whole.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::{Error, Result};

/// More than any configuration, index or list of settings has.
pub const TEXT: u64 = 64 << 20;

/// Reads a file of at most `most` bytes. Only a regular one: others, such as pipes and /dev/zero, may never end.
pub fn read(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    // Before it is opened, which already waits where it is a pipe.
    let kind = std::fs::metadata(path)?.file_type();
    if !kind.is_file() {
        let what = if kind.is_dir() { "it is a folder" } else { "it is no regular file" };
        return Err(std::io::Error::new(ErrorKind::InvalidInput, what));
    }
    read_any(path, most)
}

/// As [`read`] for a file that a user names, which may be a pipe.
pub fn read_any(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(std::io::Error::new(ErrorKind::InvalidData, format!("it has more than {most} bytes"))),
        false => Ok(bytes),
    }
}

/// What was read, as text.
pub fn text(bytes: Vec<u8>) -> std::io::Result<String> {
    String::from_utf8(bytes)
        .map_err(|error| std::io::Error::new(ErrorKind::InvalidData, format!("it is not UTF-8 text ({})", error.utf8_error())))
}

/// Reads the text of a regular file of at most [`TEXT`] bytes.
pub fn read_text(path: &Path) -> std::io::Result<String> {
    text(read(path, TEXT)?)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_a_bounded_size_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, "abc").expect("a file");
        assert_eq!(read(&path, 3).expect("a file"), b"abc");
        assert!(read(&path, 2).expect_err("too long").to_string().contains("more than 2 bytes"));
        assert!(read(folder.path(), 3).expect_err("a folder").to_string().contains("a folder"));
        assert!(read(&folder.path().join("none"), 3).is_err_and(|error| error.kind() == ErrorKind::NotFound));
        std::fs::write(&path, b"a\xff").expect("a file");
        assert!(read_text(&path).expect_err("no text").to_string().contains("not UTF-8"));
    }

    #[cfg(unix)]
    #[test]
    fn what_may_never_end_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
        let zero = folder.path().join("zero");
        std::os::unix::fs::symlink("/dev/zero", &zero).expect("a link");
        for path in [pipe, zero] {
            assert!(read_text(&path).expect_err("no file").to_string().contains("no regular file"));
        }
    }
}
