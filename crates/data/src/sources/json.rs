//! JSON Lines: one object per line, with the document in one field.

use std::fmt;
use std::io::BufRead;
use std::path::PathBuf;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::lines::Lines;
use super::{Piece, Pieces};
use crate::error::Result;

/// The documents of a JSON Lines file. Blank lines and empty documents are dropped.
pub(super) fn documents(reader: Box<dyn BufRead + Send>, path: PathBuf, field: &str) -> Pieces {
    let (mut lines, field) = (Lines::new(reader, path), field.to_owned());
    let mut done = false;
    Box::new(std::iter::from_fn(move || {
        while !done {
            match next(&mut lines, &field) {
                Ok(Some(text)) if text.is_empty() => {}
                Ok(Some(text)) => return Some(Ok(Piece::whole(text))),
                Ok(None) => done = true,
                Err(error) => {
                    done = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }))
}

/// The next document; empty if the line is blank; `None` at the end.
fn next(lines: &mut Lines, field: &str) -> Result<Option<String>> {
    let Some(line) = lines.next()? else { return Ok(None) };
    let line = line.trim_ascii();
    if line.is_empty() {
        return Ok(Some(String::new()));
    }
    read(line, field).map(Some).map_err(|problem| lines.error(problem))
}

fn read(line: &[u8], field: &str) -> std::result::Result<String, String> {
    // Checked separately: serde_json does not validate strings that it skips.
    if let Err(error) = std::str::from_utf8(line) {
        return Err(format!("not UTF-8: byte 0x{:02x}; convert the file to UTF-8", line[error.valid_up_to()]));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(line);
    let text = Field(field).deserialize(&mut deserializer).and_then(|text| deserializer.end().map(|()| text));
    // serde_json counts lines within its input, which here is one line.
    let text = text.map_err(|error| format!("{}, column {}", without_place(&error), error.column()))?;
    text.ok_or_else(|| format!("the object has no field `{field}`; name the one that contains the text"))
}

fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message).to_owned()
}

/// Extracts the string of one field of an object and skips the others.
struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Option<String>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one JSON object per line")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Option<String>, A::Error> {
        let mut text = None;
        while let Some(key) = map.next_key::<std::borrow::Cow<str>>()? {
            if key != self.0 {
                map.next_value::<IgnoredAny>()?;
            } else if text.replace(map.next_value_seed(Text(self.0))?).is_some() {
                return Err(A::Error::custom(format_args!("the field `{}` occurs twice", self.0)));
            }
        }
        Ok(text)
    }
}

/// A string, with the name of its field in error messages.
struct Text<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Text<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<String, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Text<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "text in the field `{}`", self.0)
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<String, E> {
        Ok(text.to_owned())
    }

    fn visit_string<E>(self, text: String) -> std::result::Result<String, E> {
        Ok(text)
    }
}
