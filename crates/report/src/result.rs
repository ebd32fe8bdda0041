//! Results: values with a JSON form for programs and a document for people.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use termwise_base::provenance::Provenance;

use crate::document::Document;
use crate::folder::Error;

/// The result of a command. Its JSON form is an object with `kind`, `version` and, if a command wrote it, `made_by` before its own
/// fields, so it can be rendered again.
pub trait Documented: Serialize + DeserializeOwned {
    /// One word, also the name of its file.
    const KIND: &'static str;
    /// Incremented with every change after which older files cannot be read.
    const VERSION: u32 = 1;

    /// The complete document.
    fn document(&self) -> Document;

    /// The document that a command prints unless details are requested.
    fn summary(&self) -> Document {
        self.document()
    }

    /// Checks constraints that the field types do not: index ranges, list lengths, divisors. [`read`] calls it, so [`Documented::document`] can rely on it for
    /// files edited by hand. `raw` is the JSON object, for fields of earlier builds that were removed.
    ///
    /// # Errors
    /// The problem, as the end of a sentence.
    fn validate(&self, raw: &Value) -> Result<(), String> {
        let _ = raw;
        Ok(())
    }
}

#[derive(Serialize)]
struct Tagged<'a, T> {
    kind: &'static str,
    version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    made_by: Option<&'a Provenance>,
    #[serde(flatten)]
    result: &'a T,
}

/// A result as indented JSON with a final newline. NaN and infinity are `null`.
pub fn to_json<T: Documented>(result: &T, made_by: Option<&Provenance>) -> String {
    let tagged = Tagged { kind: T::KIND, version: T::VERSION, made_by, result };
    serde_json::to_string_pretty(&tagged).expect("results have names as keys, and writing to a string cannot fail") + "\n"
}

/// The kind of a result file.
///
/// # Errors
/// [`Error::Foreign`] if the value has no kind.
pub fn kind_of(value: &Value) -> Result<&str, Error> {
    value.get("kind").and_then(Value::as_str).ok_or(Error::Foreign { found: None })
}

/// The provenance recorded in a result file.
pub fn made_by(value: &Value) -> Option<Provenance> {
    Provenance::deserialize(value.get("made_by")?).ok()
}

/// Reads a result from a JSON value.
///
/// # Errors
/// [`Error::Foreign`] for another kind, [`Error::Version`] for another version, [`Error::Fields`] if fields are missing or invalid.
pub fn read<T: Documented>(mut value: Value) -> Result<T, Error> {
    let kind = kind_of(&value)?;
    if kind != T::KIND {
        return Err(Error::Foreign { found: Some(kind.into()) });
    }
    let found = value.get("version").and_then(Value::as_u64).unwrap_or(0);
    if found != u64::from(T::VERSION) {
        return Err(Error::Version { kind: T::KIND, found, known: T::VERSION });
    }
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|name, _| !["kind", "version", "made_by"].contains(&name.as_str()));
    }
    let wrong = |source| Error::Fields { kind: T::KIND, source };
    let result = T::deserialize(&value).map_err(wrong)?;
    result.validate(&value).map_err(|problem| wrong(serde::de::Error::custom(problem)))?;
    Ok(result)
}

/// Writes `KIND.json` and the document with its figures and tables, see [`Document::write`]. Returns the path of the HTML report.
///
/// # Errors
/// [`Error::Write`] if the directory or a file cannot be written.
pub fn write<T: Documented>(result: &T, folder: &Path, made_by: Option<&Provenance>) -> Result<PathBuf, Error> {
    crate::folder::make(folder)?;
    let path = folder.join(format!("{}.json", T::KIND));
    crate::folder::write(&path, to_json(result, made_by).as_bytes())?;
    let document = result.document();
    match made_by {
        Some(made_by) => document.made_by(made_by).write(folder),
        None => document.write(folder),
    }
}

/// For tests: a result that is written and read has the same document and the same JSON.
///
/// # Panics
/// If they differ.
pub fn reads_again<T: Documented>(result: &T) {
    let text = to_json(result, None);
    let again: T = read(serde_json::from_str(&text).expect("JSON")).unwrap_or_else(|error| panic!("{error}\n{text}"));
    assert_eq!(again.document().to_html(), result.document().to_html());
    assert_eq!(to_json(&again, None), text);
}

/// For tests: panics if reading or rendering panics on an edited form of this result's JSON. Every number is replaced by smaller and larger ones, and every
/// array is emptied, shortened and lengthened, one edit at a time. Of more than `most` edits, every n-th is tried.
pub fn survives_edits<T: Documented>(result: &T, most: usize) {
    /// Prints the edit if it panics.
    struct Edit<'a>(&'a str, &'a Value);
    impl Drop for Edit<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                #[allow(clippy::print_stderr, reason = "only tests run this")]
                {
                    eprintln!("{} = {}", self.0, self.1);
                }
            }
        }
    }
    fn edits(value: &Value, path: &str, all: &mut Vec<(String, Value)>) {
        match value {
            Value::Number(number) if number.is_f64() => {
                all.extend([0.0.into(), (-1.0).into(), 1e308.into(), Value::Null].map(|edit| (path.to_owned(), edit)));
            }
            Value::Number(number) => {
                let next = number.as_u64().map_or(1, |number| number.saturating_add(1));
                all.extend([0, 1, next, 1 << 20, 1 << 40, u64::MAX].map(|edit| (path.to_owned(), edit.into())));
                all.push((path.to_owned(), (-1).into()));
            }
            Value::Array(items) => {
                all.push((path.to_owned(), Value::Array(Vec::new())));
                if let Some((last, others)) = items.split_last() {
                    let longer: Vec<Value> = items.iter().chain([last]).cloned().collect();
                    all.extend([others.to_vec(), longer].map(|edit| (path.to_owned(), edit.into())));
                }
                items.iter().enumerate().for_each(|(i, item)| edits(item, &format!("{path}/{i}"), all));
            }
            Value::Object(fields) => {
                fields.iter().filter(|(name, _)| *name != "version").for_each(|(name, field)| edits(field, &format!("{path}/{name}"), all));
            }
            _ => {}
        }
    }
    let whole: Value = serde_json::from_str(&to_json(result, None)).expect("JSON");
    let mut all = Vec::new();
    edits(&whole, "", &mut all);
    let step = all.len().div_ceil(most.max(1)).max(1);
    for (path, edit) in all.iter().step_by(step) {
        let mut edited = whole.clone();
        // Keys that contain a slash are not edited.
        let Some(place) = edited.pointer_mut(path) else { continue };
        *place = edit.clone();
        let _named = Edit(path, edit);
        if let Ok(found) = read::<T>(edited) {
            let document = found.document();
            let _ = (document.to_html(), document.to_markdown());
        }
    }
}
