//! Finished measurements as JSON lines with key and checksum; they are not repeated.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use termwise_base::files;

use crate::kv::Error;

/// A journal, in a file or in memory alone.
pub struct Journal {
    known: HashMap<String, Value>,
    file: Option<File>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    key: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    what: String,
    value: Value,
}

impl Journal {
    /// Opens a file for reading and appending. Incomplete lines of an interrupted program and lines of earlier builds without a checksum are measured again.
    ///
    /// # Errors
    /// [`Error::Request`] if a line was edited.
    pub fn open(path: Option<&Path>) -> Result<Journal, Error> {
        let mut journal = Journal { known: HashMap::new(), file: None };
        let Some(path) = path else { return Ok(journal) };
        if let Ok(file) = File::open(path) {
            for (number, line) in BufReader::new(file).lines().map_while(Result::ok).enumerate() {
                let Sealed::Whole(object) = unseal(&line) else {
                    if serde_json::from_str::<Value>(&line).is_ok_and(|entry| entry.get("checksum").is_some()) {
                        let place = format!("line {} of {}", number + 1, path.display());
                        return Err(Error::Request(format!(
                            "{place} was edited: its checksum does not match; remove the line to measure it again"
                        )));
                    }
                    continue;
                };
                if let Ok(Entry { key, value, .. }) = serde_json::from_str(&object) {
                    journal.known.insert(key, value);
                }
            }
        }
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(files::Error::io("write", path))?;
        // An incomplete last line is terminated first.
        file.write_all(b"\n").map_err(files::Error::io("write", path))?;
        journal.file = Some(file);
        Ok(journal)
    }

    /// The stored value of a key.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        self.known.get(key).and_then(|value| serde_json::from_value(value.clone()).ok())
    }

    /// Stores a value; `what` describes it for readers of the file.
    pub fn put<T: Serialize>(&mut self, key: &str, what: &str, value: &T) {
        let Ok(value) = serde_json::to_value(value) else { return };
        if let Some(file) = &mut self.file
            && let Ok(line) = serde_json::to_string(&Entry { key: key.into(), what: what.into(), value: value.clone() })
        {
            // If the journal cannot be written, the next run measures again.
            let _ = file.write_all(format!("{}\n", seal(&line)).as_bytes());
        }
        self.known.insert(key.into(), value);
    }
}

/// A JSON object as text, with a checksum of that text as its first field.
pub(crate) fn seal(object: &str) -> String {
    format!("{PREFIX}{}\",{}", digest(object), object.strip_prefix('{').unwrap_or(object))
}

const PREFIX: &str = "{\"checksum\":\"";

/// The text of a JSON object that may have a checksum.
pub(crate) enum Sealed {
    /// The object without its checksum, which matches.
    Whole(String),
    /// The checksum is missing or does not match.
    Broken,
}

pub(crate) fn unseal(text: &str) -> Sealed {
    let parts = text.trim_end().strip_prefix(PREFIX).and_then(|rest| rest.split_once("\","));
    match parts.map(|(checksum, rest)| (checksum, format!("{{{rest}"))) {
        Some((checksum, object)) if digest(&object) == checksum => Sealed::Whole(object),
        _ => Sealed::Broken,
    }
}

/// A short hash of a string.
pub fn digest(of: &str) -> String {
    blake3::hash(of.as_bytes()).to_hex()[..24].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_again_and_half_a_line_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal.jsonl");
        let mut journal = Journal::open(Some(&path)).expect("a journal");
        journal.put("a", "first", &1.5);
        journal.put("b", "", &vec![1, 2]);
        drop(journal);
        let text = std::fs::read_to_string(&path).expect("lines");
        std::fs::write(&path, &text[..text.len() - 4]).expect("a cut");
        let mut journal = Journal::open(Some(&path)).expect("a journal");
        assert_eq!((journal.get::<f64>("a"), journal.get::<Vec<i32>>("b")), (Some(1.5), None));
        journal.put("c", "", &7);
        drop(journal);
        let journal = Journal::open(Some(&path)).expect("a journal");
        assert_eq!((journal.get::<f64>("a"), journal.get::<i32>("c")), (Some(1.5), Some(7)));
    }

    #[test]
    fn edited_lines_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal.jsonl");
        Journal::open(Some(&path)).expect("a journal").put("a", "first", &vec![1.5, 2.5]);
        let text = std::fs::read_to_string(&path).expect("lines");
        for (from, to) in [("1.5", "1.25"), ("2.5]", "2.5,3.5]"), ("\"a\"", "\"b\"")] {
            std::fs::write(&path, text.replace(from, to)).expect("an edit");
            let error = Journal::open(Some(&path)).err().expect("it was edited").to_string();
            assert!(error.contains("line 2 of") && error.contains("checksum"), "{error}");
        }
        // Lines of earlier builds have none, and are measured again.
        std::fs::write(&path, "{\"key\":\"a\",\"value\":1}\n").expect("an old line");
        assert_eq!(Journal::open(Some(&path)).expect("a journal").get::<i32>("a"), None);
    }
}
