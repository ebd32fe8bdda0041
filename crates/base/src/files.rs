//! Atomic file writes, bounded reads, file locks, and the I/O error of all crates.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An I/O error with the action and the path. The error types of other crates wrap it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct Error {
    /// The action that failed, a verb phrase such as "read".
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// The cause.
    pub source: std::io::Error,
}

impl Error {
    /// For `map_err`: adds the action and the path.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error { action, path, source }
    }
}

/// Results of this module.
pub type Result<T> = std::result::Result<T, Error>;

/// Maximum size of a text file in bytes, larger than any configuration, index or list of settings.
pub const TEXT: u64 = 64 << 20;

/// Reads a regular file of at most `most` bytes. Pipes and devices are rejected: /dev/zero has no end.
pub fn read(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    // Checked before opening: opening a pipe blocks.
    let kind = fs::metadata(path)?.file_type();
    if !kind.is_file() {
        let what = if kind.is_dir() { "it is a directory" } else { "it is not a regular file" };
        return Err(std::io::Error::new(ErrorKind::InvalidInput, what));
    }
    read_any(path, most)
}

/// Like [`read`], but accepts pipes and devices.
pub fn read_any(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(std::io::Error::new(ErrorKind::InvalidData, format!("it has more than {most} bytes"))),
        false => Ok(bytes),
    }
}

/// Decodes UTF-8.
pub fn text(bytes: Vec<u8>) -> std::io::Result<String> {
    String::from_utf8(bytes)
        .map_err(|error| std::io::Error::new(ErrorKind::InvalidData, format!("it is not UTF-8 text ({})", error.utf8_error())))
}

/// Reads a regular UTF-8 file of at most [`TEXT`] bytes.
pub fn read_text(path: &Path) -> std::io::Result<String> {
    text(read(path, TEXT)?)
}

/// Reads exactly `out.len()` bytes at an offset. Several threads may read the same file at once.
pub fn read_at(file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, out, offset);
    #[cfg(not(unix))]
    {
        // Handles of one file share its position, so reads are serialised.
        static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut file = file;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(offset))?;
        file.read_exact(out)
    }
}

/// Takes an advisory lock, which the operating system releases when the process ends. Returns `None` if another process has it.
///
/// A forked child has a copy of every lock until it executes its program, even of a lock that was just released. A lock that appears taken is therefore
/// retried for 100 ms.
pub fn lock(path: &Path) -> Result<Option<File>> {
    for pause in [1, 4, 20, 75, 0] {
        let file = File::create(path).map_err(Error::io("create", path))?;
        match file.try_lock() {
            // If the file was moved or removed after it was opened, the lock has no effect.
            Ok(()) if is_at(&file, path).map_err(Error::io("lock", path))? => return Ok(Some(file)),
            Ok(()) | Err(fs::TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(pause)),
            Err(fs::TryLockError::Error(error)) => return Err(Error::io("lock", path)(error)),
        }
    }
    Ok(None)
}

/// How an output path is written.
enum Output {
    /// To a temporary file in the same directory, which then replaces this regular file. Symbolic links are resolved.
    Replace(PathBuf),
    /// Directly to an open device, pipe or file descriptor, which cannot be replaced.
    Direct(File),
}

impl Output {
    fn of(path: &Path) -> std::io::Result<Output> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(ErrorKind::IsADirectory.into()),
            Ok(found) if !found.is_file() => return File::options().write(true).open(path).map(Output::Direct),
            _ => {}
        }
        let mut target = path.to_owned();
        for _ in 0..MAX_LINKS {
            let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if folder.canonicalize().is_ok_and(|folder| folder.starts_with("/proc")) {
                // A file descriptor of this process, such as /dev/stdout redirected to a file: append.
                return File::options().append(true).open(path).map(Output::Direct);
            }
            match fs::read_link(&target) {
                Ok(next) => target = folder.join(next),
                Err(_) => return Ok(Output::Replace(target)),
            }
        }
        Err(std::io::Error::new(ErrorKind::InvalidInput, format!("it is a chain of more than {MAX_LINKS} symbolic links")))
    }
}

/// Maximum number of symbolic links that Linux follows.
const MAX_LINKS: usize = 40;

/// An atomic write: a temporary file that is written and synced to disk in the directory of its destination. [`Staged::publish`] renames it to the
/// destination. It is removed if it is dropped before.
///
/// A symbolic link is kept, and its target is replaced. Devices, pipes and file descriptors are written directly.
///
/// The name of the temporary file is fixed, unlike that of `tempfile::NamedTempFile`: a killed process leaves at most one file, which the next writer
/// reuses. A process killed repeatedly while it writes checkpoints would otherwise fill the disk. Concurrent writers of one file wait for each other.
#[derive(Debug)]
pub struct Staged {
    /// The locked temporary file and its destination; `None` if the destination was written directly.
    part: Option<(File, PathBuf)>,
}

impl Staged {
    /// Writes the content to a temporary file, or directly if `path` is not a regular file.
    ///
    /// # Errors
    /// If a file cannot be created, written or synced, or `content` fails.
    pub fn write<E: From<Error>>(
        path: &Path,
        content: impl FnOnce(&mut dyn Write) -> std::result::Result<(), E>,
    ) -> std::result::Result<Staged, E> {
        match Output::of(path).map_err(Error::io("write", path))? {
            Output::Direct(file) => {
                fill(&file, path, content)?;
                Ok(Staged { part: None })
            }
            Output::Replace(target) => {
                let file = open_part(&target).map_err(Error::io("create", path))?;
                let staged = Staged { part: Some((file, target)) };
                if let Some((file, _)) = &staged.part {
                    fill(file, path, content)?;
                    file.sync_all().map_err(Error::io("flush to disk", path))?;
                }
                Ok(staged)
            }
        }
    }

    /// Renames the temporary file to the destination and syncs the directory.
    ///
    /// # Errors
    /// If the file cannot be renamed or the directory cannot be synced.
    pub fn publish(mut self) -> Result<()> {
        let Some((_file, target)) = &self.part else { return Ok(()) };
        fs::rename(hidden_sibling(target, PART), target).map_err(Error::io("replace", target))?;
        let folder = target.parent().unwrap_or(Path::new("")).to_owned();
        self.part = None;
        sync_folder(&folder)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some((_file, target)) = &self.part {
            // Frees space on a full disk. The original error is reported, not this one.
            let _ = fs::remove_file(hidden_sibling(target, PART));
        }
    }
}

fn fill<E: From<Error>>(
    file: &File,
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    content(&mut writer)?;
    Ok(writer.flush().map_err(Error::io("write", path))?)
}

const PART: &str = "part";

/// Opens and locks the temporary file of `path`, and truncates it.
fn open_part(path: &Path) -> std::io::Result<File> {
    let part = hidden_sibling(path, PART);
    loop {
        // Truncated only under the lock: another process may be writing it.
        let file = File::options().write(true).create(true).truncate(false).open(&part)?;
        match file.lock() {
            // The file system does not support locks.
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            locked => locked?,
        }
        // The previous owner of the lock may have renamed or removed the file.
        if is_at(&file, &part)? {
            file.set_len(0)?;
            return Ok(file);
        }
    }
}

/// Whether an open file still has this name.
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let own = file.metadata()?;
        Ok(fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (own.dev(), own.ino())))
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.try_exists()
    }
}

/// Replaces a file atomically, see [`Staged`].
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    Staged::write(path, |out| out.write_all(bytes).map_err(Error::io("write", path)))?.publish()
}

/// Writes a file and syncs it to disk. Not atomic.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(bytes).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("flush to disk", path))
}

/// The path `.name.ending` in the directory of `path`.
pub fn hidden_sibling(path: &Path, ending: &str) -> PathBuf {
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    path.with_file_name(format!(".{name}.{ending}"))
}

/// Syncs a directory: a rename is durable only after that.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if cfg!(unix) {
        File::open(folder).and_then(|file| file.sync_all()).map_err(Error::io("flush to disk", folder))?;
    }
    Ok(())
}

/// Creates a directory and its parents.
pub fn create_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(Error::io("create the folder", folder))
}

/// Adds metadata, in key order, to a safetensors file that has none. Equal contents give equal bytes.
pub fn with_metadata(file: &[u8], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    const LEN: usize = size_of::<u64>();
    let content = file.get(LEN..).unwrap_or_default();
    let header_len = file.first_chunk::<LEN>().map_or(0, |len| u64::from_le_bytes(*len) as usize);
    let (header, tensors) = content.split_at(header_len.min(content.len()));
    let entries: Vec<String> = metadata.iter().map(|(key, value)| format!("{}:{}", json_string(key), json_string(value))).collect();
    let tensor_entries = header.trim_ascii().strip_prefix(b"{").unwrap_or(b"}");
    let mut new = format!("{{\"__metadata__\":{{{}}}{}", entries.join(","), if tensor_entries == b"}" { "" } else { "," }).into_bytes();
    new.extend_from_slice(tensor_entries);
    new.resize(new.len().next_multiple_of(LEN), b' ');
    let mut whole = Vec::with_capacity(LEN + new.len() + tensors.len());
    whole.extend((new.len() as u64).to_le_bytes());
    whole.extend(new);
    whole.extend(tensors);
    whole
}

/// A string as a JSON string literal.
fn json_string(text: &str) -> String {
    let mut json = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c < ' ' => json.push_str(&format!("\\u{:04x}", c as u32)),
            c => json.push(c),
        }
    }
    json.push('"');
    json
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
        assert!(read(folder.path(), 3).expect_err("a folder").to_string().contains("a directory"));
        assert!(read(&folder.path().join("none"), 3).is_err_and(|error| error.kind() == ErrorKind::NotFound));
        std::fs::write(&path, b"a\xff").expect("a file");
        assert!(read_text(&path).expect_err("no text").to_string().contains("not UTF-8"));
    }

    #[cfg(unix)]
    #[test]
    fn pipes_and_devices_are_not_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
        let zero = folder.path().join("zero");
        std::os::unix::fs::symlink("/dev/zero", &zero).expect("a link");
        for path in [pipe, zero] {
            assert!(read_text(&path).expect_err("no file").to_string().contains("not a regular file"));
        }
    }

    #[test]
    fn files_are_replaced_atomically() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let names = || {
            let entries = fs::read_dir(folder.path()).expect("a folder");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
            names.sort();
            names
        };
        // The file of a killed process, longer than the new content.
        fs::write(hidden_sibling(&path, PART), "left behind").expect("a file");
        write_whole(&path, b"old").expect("written");
        assert_eq!((fs::read(&path).expect("a file"), names().len()), (b"old".to_vec(), 1));
        let failed = Staged::write(&path, |out| {
            out.write_all(b"ne").map_err(Error::io("write", &path))?;
            Err(Error::io("make", &path)(ErrorKind::Other.into()))
        });
        assert!(failed.is_err_and(|error| error.action == "make"));
        let staged = Staged::write::<Error>(&path, |out| out.write_all(b"new").map_err(Error::io("write", &path))).expect("written");
        assert_eq!((fs::read(&path).expect("a file"), names().len()), (b"old".to_vec(), 2));
        drop(staged);
        assert_eq!((fs::read(&path).expect("a file"), names().len()), (b"old".to_vec(), 1));
    }

    #[cfg(unix)]
    #[test]
    fn symbolic_links_are_kept_and_their_target_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("other")).expect("a folder");
        fs::write(at("other/file"), "old").expect("a file");
        // A relative link, a link to a link, and a link to a file that does not exist.
        for (link, target) in [("one", "other/file"), ("two", "one"), ("new", "other/absent")] {
            std::os::unix::fs::symlink(target, at(link)).expect("a link");
        }
        for (link, file) in [("one", "other/file"), ("two", "other/file"), ("new", "other/absent")] {
            write_whole(&at(link), link.as_bytes()).expect("written");
            assert!(fs::symlink_metadata(at(link)).expect("a link").is_symlink(), "{link}");
            assert_eq!(fs::read(at(file)).expect("a file"), link.as_bytes());
        }
        assert_eq!(fs::read_dir(at("other")).expect("a folder").count(), 2, "no temporary file is left");
        std::os::unix::fs::symlink("round", at("round")).expect("a link");
        assert!(write_whole(&at("round"), b"x").expect_err("a loop").to_string().contains("round"));
        assert!(write_whole(&at("other"), b"x").is_err_and(|error| error.source.kind() == ErrorKind::IsADirectory));
    }

    #[cfg(unix)]
    #[test]
    fn pipes_and_descriptors_are_written_directly() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| fs::read(&pipe).expect("a pipe"));
            write_whole(&pipe, b"through").expect("written");
            assert_eq!(reader.join().expect("read"), b"through");
        });
        assert!(!fs::symlink_metadata(&pipe).expect("a pipe").is_file());
        // A descriptor of a regular file, such as /dev/stdout after `> file`.
        let path = folder.path().join("file");
        fs::write(&path, "before ").expect("a file");
        let file = File::options().append(true).open(&path).expect("a file");
        let descriptor = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        if Path::new(&descriptor).exists() {
            write_whole(Path::new(&descriptor), b"after").expect("written");
            assert_eq!(fs::read(&path).expect("a file"), b"before after");
            assert!(is_at(&file, &path).expect("a file"), "it is the same file");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_lock_on_a_renamed_file_has_no_effect() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, moved) = (folder.path().join("lock"), folder.path().join("moved"));
        let held = lock(&path).expect("a lock").expect("free");
        fs::rename(&path, &moved).expect("moved");
        let other = lock(&path).expect("a lock").expect("another file");
        assert!(is_at(&other, &path).expect("a file") && is_at(&held, &moved).expect("a file"));
        assert!(lock(&path).expect("a lock").is_none());
    }

    #[test]
    fn metadata_are_written_in_the_order_of_their_keys() {
        let file = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"data"].concat();
        let metadata = BTreeMap::from([("b", "1\n\"x\""), ("a", "\\é")].map(|(key, value)| (key.to_string(), value.to_string())));
        let found = with_metadata(&file("{\"t\":{}}  "), &metadata);
        let header = r#"{"__metadata__":{"a":"\\é","b":"1\u000a\"x\""},"t":{}}"#;
        assert_eq!(
            found,
            file(&format!("{header:<width$}", width = header.chars().count() + header.len().next_multiple_of(8) - header.len()))
        );
        let empty = with_metadata(&file("{}"), &BTreeMap::new());
        assert_eq!(empty, file(r#"{"__metadata__":{}}     "#));
    }

    /// Locks belong to open files, so threads wait for each other like processes.
    #[test]
    fn concurrent_writers_of_one_file_wait() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let content = |writer: u8| vec![writer; 100_000];
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..10 {
                        let written = Staged::write::<Error>(path, |out| {
                            // In parts, which would be interleaved without a lock.
                            content(writer)
                                .chunks(7_000)
                                .try_for_each(|piece| out.write_all(piece).and_then(|()| out.flush()))
                                .map_err(Error::io("write", path))
                        });
                        written.and_then(Staged::publish).expect("written");
                        let found = fs::read(path).expect("a file");
                        assert_eq!(found, content(found[0]));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}
