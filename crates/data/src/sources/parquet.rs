//! One column of a Parquet file, one document per row.

mod claims;

use std::cell::Cell;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};

use parquet::basic::{Compression, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::Result as ParquetResult;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{MAX_LINE_BYTES, Piece, Pieces};
use crate::error::{Error, Result};

/// Number of documents read at a time.
const ROWS: usize = 64;

/// The documents of a byte array column. Empty rows are dropped; a null is an error.
pub(super) fn documents(path: PathBuf, field: &str, read: Arc<AtomicU64>) -> Result<Pieces> {
    let file = File::open(&path).map_err(Error::io("open", &path))?;
    let bytes = file.metadata().map_err(Error::io("read", &path))?.len();
    claims::check_footer(&file, bytes).map_err(|problem| wrong(&path, problem))?;
    let pages = file.try_clone().map_err(Error::io("open", &path))?;
    let reader = guarded(|| SerializedFileReader::new(file)).map_err(|problem| wrong(&path, problem))?;
    let column = column(&reader, field).map_err(|problem| wrong(&path, problem))?;
    let texts = Vec::new().into_iter();
    let mut column = Column { path, file: pages, bytes, reader, index: column, group: 0, rows: None, row: 0, texts, done: false };
    Ok(Box::new(std::iter::from_fn(move || {
        let next = column.next();
        if next.is_none() {
            read.fetch_add(bytes, Ordering::Relaxed);
        }
        next
    })))
}

fn wrong(path: &Path, problem: String) -> Error {
    Error::DataSource { requested: path.display().to_string(), problem }
}

thread_local! {
    /// Whether a panic of this thread is converted to an error.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Converts panics of the parquet crate, which occur on some damaged files, to errors without output. Panics of other
/// threads, and of this one elsewhere, go to the previous hook.
fn guarded<T>(read: impl FnOnce() -> ParquetResult<T>) -> std::result::Result<T, String> {
    static HOOK: Once = Once::new();
    // The hook cannot be changed while a thread panics.
    if !std::thread::panicking() {
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                if !GUARDED.try_with(Cell::get).unwrap_or(false) {
                    before(info);
                }
            }));
        });
    }
    let outer = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(read));
    GUARDED.set(outer);
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(format!("not a readable parquet file: {error}")),
        Err(_) => Err("not a readable parquet file: it is damaged".into()),
    }
}

/// The index of the column of this name, which must have one byte array per row.
fn column(reader: &SerializedFileReader<File>, field: &str) -> std::result::Result<usize, String> {
    let schema = reader.metadata().file_metadata().schema_descr();
    let Some(index) = schema.columns().iter().position(|column| column.path().string() == field) else {
        let names: Vec<String> = schema.columns().iter().take(20).map(|column| column.path().string()).collect();
        return Err(format!("there is no column `{field}`; it has {}", names.join(", ")));
    };
    let column = schema.column(index);
    if column.physical_type() != Type::BYTE_ARRAY {
        return Err(format!("the column `{field}` contains {}, not text", column.physical_type()));
    }
    if column.max_rep_level() > 0 {
        return Err(format!("the column `{field}` contains lists, not one string per row"));
    }
    Ok(index)
}

struct Column {
    path: PathBuf,
    /// A second handle of the file, to check pages before the reader does, and its length.
    file: File,
    bytes: u64,
    reader: SerializedFileReader<File>,
    index: usize,
    /// Row groups opened so far.
    group: usize,
    rows: Option<Rows>,
    /// Rows returned so far.
    row: u64,
    texts: std::vec::IntoIter<ByteArray>,
    done: bool,
}

/// The remaining rows of a row group.
struct Rows {
    column: ColumnReaderImpl<ByteArrayType>,
    left: u64,
    /// The definition level of a row that is not null.
    deepest: i16,
}

impl Column {
    /// Reads until there are strings; returns false at the end.
    fn fill(&mut self) -> std::result::Result<bool, String> {
        while self.texts.len() == 0 {
            let Some(rows) = self.rows.as_mut().filter(|rows| rows.left > 0) else {
                if self.group == self.reader.num_row_groups() {
                    return Ok(false);
                }
                let chunk = self.reader.metadata().row_group(self.group).column(self.index);
                let range = guarded(|| Ok(chunk.byte_range()))?;
                claims::check_pages(&self.file, self.bytes, range, chunk.compression() != Compression::UNCOMPRESSED)?;
                let column = guarded(|| self.reader.get_row_group(self.group)?.get_column_reader(self.index))?;
                let ColumnReader::ByteArrayColumnReader(column) = column else {
                    return Err("the type of the column changes within the file".into());
                };
                let left = u64::try_from(self.reader.metadata().row_group(self.group).num_rows());
                let deepest = self.reader.metadata().file_metadata().schema_descr().column(self.index).max_def_level();
                self.rows = Some(Rows { column, left: left.map_err(|_| "a group has a negative number of rows")?, deepest });
                self.group += 1;
                continue;
            };
            let (mut levels, mut values) = (Vec::new(), Vec::new());
            let (records, found, _) = guarded(|| rows.column.read_records(ROWS, Some(&mut levels), None, &mut values))?;
            if records == 0 {
                return Err(format!("{} rows are missing at the end of their row group", rows.left));
            }
            if found != records || values.len() != records {
                self.row += levels.iter().position(|&level| level < rows.deepest).unwrap_or(0) as u64;
                return Err("the row has no text (null)".into());
            }
            rows.left = rows.left.checked_sub(records as u64).ok_or("a row group has more rows than stated")?;
            self.texts = values.into_iter();
        }
        Ok(true)
    }

    fn text(&mut self) -> std::result::Result<Option<String>, String> {
        if !self.fill()? {
            return Ok(None);
        }
        let bytes = self.texts.next().map(|value| value.data().to_vec()).unwrap_or_default();
        if bytes.len() > MAX_LINE_BYTES {
            return Err(format!("the text has more than {MAX_LINE_BYTES} bytes"));
        }
        let text =
            String::from_utf8(bytes).map_err(|error| format!("not UTF-8 at byte {} of the text", error.utf8_error().valid_up_to()))?;
        self.row += 1;
        Ok(Some(text))
    }
}

impl Iterator for Column {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        while !self.done {
            match self.text() {
                Ok(Some(text)) if text.is_empty() => {}
                Ok(Some(text)) => return Some(Ok(Piece::whole(text))),
                Ok(None) => self.done = true,
                Err(problem) => {
                    self.done = true;
                    return Some(Err(Error::Document { path: self.path.clone(), unit: "row", number: self.row + 1, problem }));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Started as a separate process by the other test.
    #[test]
    #[ignore = "started by the other test"]
    fn child() {
        assert!(guarded(|| -> ParquetResult<()> { panic!("within") }).is_err());
        assert!(std::thread::spawn(|| panic!("elsewhere")).join().is_err());
        assert!(catch_unwind(|| panic!("afterwards")).is_err());
    }

    #[test]
    fn only_panics_of_the_parquet_crate_are_silent() {
        let this = std::env::current_exe().expect("this test");
        let name = concat!(module_path!(), "::child");
        let name = name.split_once("::").expect("a path with the crate's name").1;
        let output = std::process::Command::new(this).args(["--exact", name, "--ignored", "--nocapture"]).output().expect("a process");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("elsewhere") && text.contains("afterwards") && !text.contains("within"), "{text}");
    }
}
