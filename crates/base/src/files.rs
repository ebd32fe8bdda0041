//! Files and folders that appear whole or not at all, and files that are read whole.

use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

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
///
/// A child that another thread starts holds a copy of every lock until it begins its own program, also of one that has just been given back: what looks taken is
/// looked at again for a moment.
pub fn lock(path: &Path) -> Result<Option<File>> {
    for pause in [1, 4, 20, 75, 0] {
        let file = File::create(path).map_err(Error::io("create", path))?;
        match file.try_lock() {
            // The file may have been moved or removed with its folder since it was opened: then the lock protects nothing.
            Ok(()) if is_at(&file, path).map_err(Error::io("lock", path))? => return Ok(Some(file)),
            Ok(()) | Err(fs::TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(pause)),
            Err(fs::TryLockError::Error(error)) => return Err(Error::io("lock", path)(error)),
        }
    }
    Ok(None)
}

/// How a path is written.
enum Output {
    /// To a temporary file next to this regular file, which it then replaces. Symbolic links are resolved.
    Replace(PathBuf),
    /// Through the open device, pipe or file descriptor: it cannot be replaced, and must not be.
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
                // A descriptor of this process, such as /dev/stdout redirected to a file. Its own output comes after what is there.
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

/// As many as Linux follows.
const MAX_LINKS: usize = 40;

/// A file that is written and flushed to the disk next to its destination, where [`Staged::publish`] puts it. Dropped unpublished, it is removed.
///
/// A symbolic link keeps its place: the file that it leads to is replaced. Devices, pipes and file descriptors are written directly.
///
/// The temporary file always has the same name, so a process that is killed leaves at most one, which the next writer replaces. Concurrent writers
/// of one file wait for each other.
#[derive(Debug)]
pub struct Staged {
    /// The temporary file, which holds a lock, and the file that it replaces; `None` where the destination was written directly.
    part: Option<(File, PathBuf)>,
}

impl Staged {
    /// Writes the future content of `path`.
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

    /// Puts the file in place of an earlier one.
    pub fn publish(mut self) -> Result<()> {
        let Some((_file, target)) = &self.part else { return Ok(()) };
        fs::rename(beside(target, PART), target).map_err(Error::io("put in place", target))?;
        let folder = target.parent().unwrap_or(Path::new("")).to_owned();
        self.part = None;
        sync_folder(&folder)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some((_file, target)) = &self.part {
            // Room on a full disk; the error that matters is another one.
            let _ = fs::remove_file(beside(target, PART));
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

/// The temporary file next to `path`, empty and locked.
fn open_part(path: &Path) -> std::io::Result<File> {
    let part = beside(path, PART);
    loop {
        // Not truncated before the lock is held: another process may be writing it.
        let file = File::options().write(true).create(true).truncate(false).open(&part)?;
        match file.lock() {
            // A file system that has no locks.
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            locked => locked?,
        }
        // The process that held the lock may have renamed or removed the file.
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

/// Writes a file that appears whole or not at all, in place of an earlier one; as [`Staged`] through links, and directly to devices and pipes.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    Staged::write(path, |out| out.write_all(bytes).map_err(Error::io("write", path)))?.publish()
}

/// Writes a file and flushes it to the disk.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(bytes).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("flush to disk", path))
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
    #[test]
    fn files_appear_whole_or_not_at_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let names = || {
            let entries = fs::read_dir(folder.path()).expect("a folder");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
            names.sort();
            names
        };
        // What a killed process left, longer than what comes.
        fs::write(beside(&path, PART), "left behind").expect("a file");
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
    fn symbolic_links_keep_their_place_and_their_target_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("other")).expect("a folder");
        fs::write(at("other/file"), "old").expect("a file");
        // Relative to its own folder, by another link, and to a file that does not exist yet.
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
        // A descriptor of a regular file, as /dev/stdout is after `> file`.
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
    fn a_lock_file_that_was_moved_away_is_not_locked() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, moved) = (folder.path().join("lock"), folder.path().join("moved"));
        let held = lock(&path).expect("a lock").expect("free");
        fs::rename(&path, &moved).expect("moved");
        let other = lock(&path).expect("a lock").expect("another file");
        assert!(is_at(&other, &path).expect("a file") && is_at(&held, &moved).expect("a file"));
        assert!(lock(&path).expect("a lock").is_none());
    }

    /// Locks belong to open files: threads wait for each other as processes do.
    #[test]
    fn who_writes_the_same_file_waits() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let content = |writer: u8| vec![writer; 100_000];
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..10 {
                        let written = Staged::write::<Error>(path, |out| {
                            // In pieces that would be mixed with others'.
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
