//! What data a run learns from.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Text to learn from: where it is, how it is cut into documents and tokens, and what is held out.
///
/// The first six settings decide the tokens on disk; the others are applied to them and cost no rebuild.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Files, folders, globs and `hf://datasets/<owner>/<name>[@<revision>]/<glob>`, read in this order. Folders are searched
    /// through and through for names ending in `.txt`, `.jsonl`, `.ndjson`, `.json` (each also with `.gz` or `.zst`) and `.parquet`,
    /// in the order of their names. A file named twice is read once.
    pub sources: Vec<String>,
    /// `bytes`, a `tokenizer.json`, or a folder that holds one.
    pub tokenizer: String,
    /// The token that ends every document; where not given, the tokenizer's own, found by its usual names. `bytes` has one beyond
    /// the 256.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_of_document: Option<String>,
    /// Whether the tokenizer adds to each document what its own template says, such as `<s>` in front.
    pub special_tokens: bool,
    /// The field of JSON lines, or the column of parquet files, that holds the text.
    pub field: String,
    /// How text files are cut into documents.
    pub documents: Documents,
    /// Share held out, from 0 to below 1: that share of the documents, at least one, chosen by a hash of their text, so that copies
    /// of one document stay on one side. A text that is one single document has its last tokens held out instead: of n tokens,
    /// the first ⌊(1 − share)·n⌋ are for training. Where not given: 0.001 if that is at least ten documents, otherwise 0.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out: Option<f64>,
    /// Which documents are held out is decided with this seed, whatever the seed of the run.
    pub split_seed: u64,
    /// How documents become rows.
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
    /// Whether the settings make sense by themselves; files are not looked at.
    pub fn check(&self) -> Result<()> {
        let refuse = |key, problem: &str| Err(Error::DataSetting { key, problem: problem.into() });
        if self.sources.is_empty() {
            return refuse("sources", "is empty; name files, folders, globs or hf://datasets/…");
        }
        if self.held_out.is_some_and(|share| !(0.0..1.0).contains(&share)) {
            return refuse("held_out", "must be at least 0 and below 1");
        }
        if self.field.is_empty() {
            return refuse("field", "is empty; name the field or column that holds the text");
        }
        if matches!(&self.documents, Documents::Separator(separator) if separator.is_empty()) {
            return refuse("documents", "has an empty separator; give the text between two documents");
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

    /// Whether nothing is left out.
    pub fn is_whole(&self) -> bool {
        *self == HeldOutPart::default()
    }
}

/// How a text file is cut into documents. Documents without text are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Documents {
    /// The file is one document.
    #[default]
    File,
    /// Every line is one, without its line break.
    Line,
    /// Lines without text separate them; line breaks at their ends do not belong to them.
    BlankLine,
    /// This text separates them; line breaks beside it belong to neither.
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
            _ => Err(format!("`{text}` is no way to cut documents; use file, line, blank-line or separator:<text>")),
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

/// How documents become rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// Documents joined, each with its end, and cut into windows of T. In an epoch windows come in a random order, each once.
    #[default]
    Packed,
    /// One document a row, cut off after T tokens, padded on the right; drawn with replacement.
    Padded,
}

/// `packed` or `padded`.
impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Layout, String> {
        match text {
            "packed" => Ok(Layout::Packed),
            "padded" => Ok(Layout::Padded),
            _ => Err(format!("`{text}` is no layout of rows; use packed or padded")),
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
