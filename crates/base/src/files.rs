//! Files and folders that appear whole or not at all, and files that are read whole.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
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

/// More than any configuration, index or list of settings has.
pub const TEXT: u64 = 64 << 20;

/// Reads a file of at most `most` bytes. Only a regular one: others, such as pipes and /dev/zero, may never end.
pub fn read(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    // Before it is opened, which already waits where it is a pipe.
    let kind = fs::metadata(path)?.file_type();
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

/// Reads exactly these bytes of an open file, which other threads may read at the same time.
pub fn read_at(file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, out, offset);
    #[cfg(not(unix))]
    {
        // Another handle on the same file has the same position, so that only this thread may use it meanwhile.
        static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut file = file;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(offset))?;
        file.read_exact(out)
    }
}

/// Takes a lock that the operating system frees however the process ends; `None` where another process holds it.
pub fn lock(path: &Path) -> Result<Option<File>> {
    let file = File::create(path).map_err(Error::io("create", path))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        Err(fs::TryLockError::Error(error)) => Err(Error::io("lock", path)(error)),
    }
}

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
