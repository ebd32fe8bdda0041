//! Data settings.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Text data: its sources, how it is split into documents and tokens, and the held-out split.
///
/// The first six settings determine the tokens on disk. The others are applied afterwards and need no rebuild.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Files, directories, globs and `hf://datasets/<owner>/<name>[@<revision>]/<glob>`, read in this order. Directories are searched
    /// recursively for names ending in `.txt`, `.jsonl`, `.ndjson`, `.json` (each also with `.gz` or `.zst`) and `.parquet`,
    /// sorted by name. A file named twice is read once.
    pub sources: Vec<String>,
    /// `bytes`, a `tokenizer.json`, or a directory that contains one.
    pub tokenizer: String,
    /// The end-of-document token. Default: the tokenizer's own, found by its usual names. `bytes` has one after
    /// the 256 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_of_document: Option<String>,
    /// Whether the tokenizer's template is applied to each document, such as a leading `<s>`.
    pub special_tokens: bool,
    /// The field of JSON lines, or the column of Parquet files, that contains the text.
    pub field: String,
    /// How text files are split into documents.
    pub documents: Documents,
    /// Held-out fraction, from 0 to below 1: this fraction of the documents, at least one, chosen by a hash of their text, so copies
    /// of a document are in the same split. If the text is a single document, its last tokens are held out: of n tokens,
    /// the first ⌊(1 − fraction)·n⌋ are for training. Default: 0.001 if that is at least ten documents, otherwise 0.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out: Option<f64>,
    /// Seed for the choice of held-out documents, independent of the run's seed.
    pub split_seed: u64,
    /// How documents are arranged in rows.
    pub layout: Layout,
    /// Text that is held out entirely, in place of a share of the sources.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub valid: Vec<String>,
    /// The part of the held-out tokens that is used.
    #[serde(skip_serializing_if = "HeldOutPart::is_whole")]
    pub part: HeldOutPart,
}

impl Default for DataConfig {
    fn default() -> DataConfig {
        DataConfig {
            sources: Vec::new(),
            tokenizer: "bytes".into(),
            end_of_document: None,
            special_tokens: true,
            field: "text".into(),
            documents: Documents::File,
            held_out: None,
            split_seed: 0,
            layout: Layout::Packed,
            valid: Vec::new(),
            part: HeldOutPart::default(),
        }
    }
}

impl DataConfig {
    /// Validates the settings without accessing files.
    pub fn check(&self) -> Result<()> {
        let refuse = |key, problem: &str| Err(Error::DataSetting { key, problem: problem.into() });
        if self.sources.is_empty() {
            return refuse("sources", "is empty; name files, directories, globs or hf://datasets/…");
        }
        if self.held_out.is_some_and(|share| !(0.0..1.0).contains(&share)) {
            return refuse("held_out", "must be at least 0 and below 1");
        }
        if self.field.is_empty() {
            return refuse("field", "is empty; name the field or column that contains the text");
        }
        if matches!(&self.documents, Documents::Separator(separator) if separator.is_empty()) {
            return refuse("documents", "has an empty separator; give the string between two documents");
        }
        if self.layout == Layout::Padded && !self.part.is_whole() {
            return refuse("valid_range", "and valid_tokens need layout = packed; with padded rows, use fewer documents");
        }
        Ok(())
    }
}

/// A part of the held-out tokens: a range of them, and a limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldOutPart {
    /// First token, as a fraction of all held-out tokens.
    pub start: f64,
    /// End, likewise.
    pub end: f64,
    /// Largest number of tokens, taken from the range in evenly spaced blocks; 0: all.
    pub tokens: u64,
}

impl Default for HeldOutPart {
    fn default() -> HeldOutPart {
        HeldOutPart { start: 0.0, end: 1.0, tokens: 0 }
    }
}

impl HeldOutPart {
    /// The part of a range such as `0.25..1`, or of an empty text for all.
    ///
    /// # Errors
    /// If the text is not a range within 0..1.
    pub fn new(range: &str, tokens: u64) -> std::result::Result<HeldOutPart, String> {
        if range.is_empty() {
            return Ok(HeldOutPart { tokens, ..HeldOutPart::default() });
        }
        let ends = range.split_once("..").and_then(|(start, end)| Some((start.parse().ok()?, end.parse().ok()?)));
        match ends {
            Some((start, end)) if 0.0 <= start && start < end && end <= 1.0 => Ok(HeldOutPart { start, end, tokens }),
            _ => Err(format!("is `{range}`; write a range of fractions such as 0.25..1")),
        }
    }

    /// Whether it is the whole held-out text.
    pub fn is_whole(&self) -> bool {
        *self == HeldOutPart::default()
    }
}

/// How a text file is split into documents. Empty documents are dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Documents {
    /// The file is one document.
    #[default]
    File,
    /// Every line is a document, without its line break.
    Line,
    /// Blank lines separate documents; line breaks at their ends are dropped.
    BlankLine,
    /// This string separates documents; line breaks next to it are dropped.
    Separator(String),
}

/// `file`, `line`, `blank-line`, or `separator:` followed by the separator.
impl FromStr for Documents {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Documents, String> {
        match (text, text.strip_prefix("separator:")) {
            ("file", _) => Ok(Documents::File),
            ("line", _) => Ok(Documents::Line),
            ("blank-line", _) => Ok(Documents::BlankLine),
            (_, Some(separator)) if !separator.is_empty() => Ok(Documents::Separator(separator.into())),
            _ => Err(format!("`{text}` is not a document boundary; use file, line, blank-line or separator:<text>")),
        }
    }
}

impl fmt::Display for Documents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Documents::File => f.write_str("file"),
            Documents::Line => f.write_str("line"),
            Documents::BlankLine => f.write_str("blank-line"),
            Documents::Separator(separator) => write!(f, "separator:{separator}"),
        }
    }
}

/// How documents are arranged in rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// Documents are concatenated, each with its end-of-document token, and split into windows of T. Every epoch visits all windows once in random order.
    #[default]
    Packed,
    /// One document per row, truncated after T tokens, padded on the right; drawn with replacement.
    Padded,
}

/// `packed` or `padded`.
impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Layout, String> {
        match text {
            "packed" => Ok(Layout::Packed),
            "padded" => Ok(Layout::Padded),
            _ => Err(format!("`{text}` is not a row layout; use packed or padded")),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layout::Packed => "packed",
            Layout::Padded => "padded",
        })
    }
}
