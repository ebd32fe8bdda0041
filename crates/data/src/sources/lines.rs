//! Lines, and the documents of text files.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use memchr::memmem;

use super::{MAX_LINE_BYTES, PIECE_BYTES, Piece, Pieces};
use crate::config::Documents;
use crate::error::{Error, Result};

/// The lines of a file with their line numbers.
pub(super) struct Lines {
    reader: Box<dyn BufRead + Send>,
    path: PathBuf,
    /// Lines started so far.
    number: u64,
    line: Vec<u8>,
}

impl Lines {
    pub(super) fn new(reader: Box<dyn BufRead + Send>, path: PathBuf) -> Lines {
        Lines { reader, path, number: 0, line: Vec::new() }
    }

    /// The next line with its line break, or `None` at the end. A byte order mark at the start of the file is skipped.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>> {
        self.line.clear();
        let mut limited = (&mut self.reader).take(MAX_LINE_BYTES as u64 + 1);
        let read = limited.read_until(b'\n', &mut self.line);
        self.number += 1;
        match read {
            Err(error) => Err(self.error(unreadable(error))),
            Ok(0) => Ok(None),
            Ok(_) if self.line.len() > MAX_LINE_BYTES => Err(self.error(format!("more than {MAX_LINE_BYTES} bytes without a line break"))),
            Ok(_) if self.number == 1 => Ok(Some(self.line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&self.line))),
            Ok(_) => Ok(Some(&self.line)),
        }
    }

    /// An error for the line that was read last.
    pub(super) fn error(&self, problem: String) -> Error {
        Error::Document { path: self.path.clone(), unit: "line", number: self.number, problem }
    }
}

pub(super) fn unreadable(error: std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => format!("the file ends too early ({error}); it was truncated or is still being written"),
        _ => format!("cannot be read: {error}"),
    }
}

/// Decodes bytes of a file that start in line `line`.
fn text(bytes: Vec<u8>, path: &Path, line: u64) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let number = line + memchr::memchr_iter(b'\n', &bytes[..at]).count() as u64;
        let problem = format!("not UTF-8: byte 0x{:02x}; convert the file to UTF-8", bytes[at]);
        Error::Document { path: path.into(), unit: "line", number, problem }
    })
}

/// The documents of a text file.
pub(super) fn documents(reader: Box<dyn BufRead + Send>, path: PathBuf, documents: &Documents) -> Pieces {
    match documents {
        Documents::File => Box::new(Whole { reader, path, carry: Vec::new(), line: 1, first: true, done: false }),
        Documents::Line => Box::new(Cut::new(Lines::new(reader, path), Rule::Line)),
        Documents::BlankLine => Box::new(Cut::new(Lines::new(reader, path), Rule::BlankLine)),
        Documents::Separator(separator) => {
            Box::new(Cut::new(Lines::new(reader, path), Rule::Separator(Box::new(memmem::Finder::new(separator.as_bytes()).into_owned()))))
        }
    }
}

/// A file that is one document, in pieces.
struct Whole {
    reader: Box<dyn BufRead + Send>,
    path: PathBuf,
    /// Bytes read after the end of the last piece.
    carry: Vec<u8>,
    /// The line in which `carry` starts.
    line: u64,
    first: bool,
    done: bool,
}

impl Whole {
    fn piece(&mut self) -> Result<Piece> {
        let mut bytes = std::mem::take(&mut self.carry);
        let room = (PIECE_BYTES - bytes.len()) as u64;
        if let Err(error) = (&mut self.reader).take(room).read_to_end(&mut bytes) {
            let number = self.line + memchr::memchr_iter(b'\n', &bytes).count() as u64;
            return Err(Error::Document { path: self.path.clone(), unit: "line", number, problem: unreadable(error) });
        }
        if self.first && bytes.starts_with(b"\xef\xbb\xbf") {
            bytes.drain(..3);
        }
        let last = bytes.len() < PIECE_BYTES - 3;
        if !last {
            self.carry = bytes.split_off(cut(&bytes));
        }
        let text = text(bytes, &self.path, self.line)?;
        self.line += memchr::memchr_iter(b'\n', text.as_bytes()).count() as u64;
        self.done = last;
        Ok(Piece { text, first: std::mem::take(&mut self.first), last })
    }
}

/// Where to split a long text: after its last line break, otherwise before its last character.
fn cut(bytes: &[u8]) -> usize {
    match memchr::memrchr(b'\n', bytes) {
        Some(at) => at + 1,
        None => bytes.iter().rposition(|byte| byte & 0xc0 != 0x80).filter(|&at| at > 0).unwrap_or(bytes.len()),
    }
}

impl Iterator for Whole {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        if self.done {
            return None;
        }
        let piece = self.piece();
        self.done |= piece.is_err();
        Some(piece)
    }
}

enum Rule {
    Line,
    BlankLine,
    Separator(Box<memmem::Finder<'static>>),
}

/// A file with several documents.
struct Cut {
    lines: Lines,
    rule: Rule,
    /// Bytes read but not yet returned.
    held: Vec<u8>,
    /// The line in which `held` starts.
    line: u64,
    /// `held` has no separator before this offset.
    searched: usize,
    done: bool,
}

impl Cut {
    fn new(lines: Lines, rule: Rule) -> Cut {
        Cut { lines, rule, held: Vec::new(), line: 1, searched: 0, done: false }
    }

    /// The next document, which may be empty, or `None` at the end.
    fn document(&mut self) -> Result<Option<String>> {
        loop {
            if let Rule::Separator(finder) = &self.rule {
                if let Some(at) = finder.find(&self.held[self.searched..]) {
                    let end = self.searched + at;
                    let rest = self.held.split_off(end + finder.needle().len());
                    return self.give(end, rest).map(Some);
                }
                self.searched = (self.held.len() + 1).saturating_sub(finder.needle().len());
            }
            let Some(line) = self.lines.next()? else {
                self.done = true;
                return self.give(self.held.len(), Vec::new()).map(Some);
            };
            let blank = line.trim_ascii().is_empty();
            let before = self.held.len();
            self.held.extend_from_slice(line);
            if self.held.len() > MAX_LINE_BYTES {
                return Err(self
                    .lines
                    .error(format!("the document that ends here has more than {MAX_LINE_BYTES} bytes; is the separator right?")));
            }
            match self.rule {
                Rule::Line => return self.give(self.held.len(), Vec::new()).map(Some),
                Rule::BlankLine if blank => return self.give(before, Vec::new()).map(Some),
                _ => {}
            }
        }
    }

    /// The text of the first `end` bytes of `held`, without line breaks at its ends; `rest` remains.
    fn give(&mut self, end: usize, rest: Vec<u8>) -> Result<String> {
        let mut bytes = std::mem::replace(&mut self.held, rest);
        self.searched = 0;
        let breaks = memchr::memchr_iter(b'\n', &bytes).count() as u64;
        bytes.truncate(end);
        let text = text(bytes, &self.lines.path, self.line)?;
        self.line += breaks;
        Ok(match self.rule {
            Rule::Line => text.strip_suffix('\n').map_or(text.as_str(), |line| line.strip_suffix('\r').unwrap_or(line)).to_owned(),
            _ => text.trim_matches(['\n', '\r']).to_owned(),
        })
    }
}

impl Iterator for Cut {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        while !self.done {
            match self.document() {
                Ok(Some(text)) if text.trim_ascii().is_empty() => {}
                Ok(Some(text)) => return Some(Ok(Piece::whole(text))),
                Ok(None) => self.done = true,
                Err(error) => {
                    self.done = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}
