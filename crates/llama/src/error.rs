//! What can be wrong with a model: its configuration, its files, its tensors.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use termwise_base::files;

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An attention that is not possible.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A gradient was asked of a session that keeps nothing for it.
    #[error("this session keeps no activations and has no backward pass; make one without `forward_only`")]
    ForwardOnly,
    /// Logits were asked of a session whose last pass left no output behind.
    #[error(
        "this session has no output to compute logits from: it has not run, its last run failed, or a backward pass followed; run it first"
    )]
    NoOutput,
    /// Another error, with the file in which it was found.
    #[error("{file}: {error}")]
    In {
        /// The file as the user would name it.
        file: String,
        /// What is wrong with it.
        error: Box<Error>,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Its answer.
        source: std::io::Error,
    },
    /// A text that is not JSON, or says a key twice.
    #[error("not valid JSON: {0}")]
    Json(serde_json::Error),

    /// A key that a configuration must have.
    #[error("the key `{key}` is missing; add it, {expected}")]
    MissingKey {
        /// The key, with the keys around it.
        key: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// A value of the wrong type.
    #[error("`{key}` must be {expected}, found {found}")]
    KeyType {
        /// The key, with the keys around it.
        key: String,
        /// The type that belongs there.
        expected: &'static str,
        /// The value in the file.
        found: String,
    },
    /// A value of the right type that cannot be.
    #[error("`{key}` is {found}, but {expected}")]
    KeyValue {
        /// The key, with the keys around it.
        key: String,
        /// The value in the file.
        found: String,
        /// What it has to be.
        expected: String,
    },
    /// A model that differs from Llama in a way that is not computed here.
    #[error("`{key}` is {found}, which is not supported: {advice}")]
    Unsupported {
        /// The key, with the keys around it.
        key: String,
        /// The value in the file.
        found: String,
        /// What is supported and what to do.
        advice: &'static str,
    },
    /// A key that means nothing where it stands.
    #[error("`{place}` has the unknown key `{key}`; {}", did_you_mean(suggestion.as_deref(), known))]
    UnknownKey {
        /// The object around it.
        place: String,
        /// The key.
        key: String,
        /// Every key that could stand there.
        known: &'static [&'static str],
        /// The one that was probably meant.
        suggestion: Option<String>,
    },
    /// Two keys that say the same thing differently.
    #[error("`{first}` says {first_value} and `{second}` says {second_value}; keep the one that is meant")]
    Conflict {
        /// One key.
        first: String,
        /// What it says.
        first_value: String,
        /// The other key.
        second: String,
        /// What it says.
        second_value: String,
    },
    /// An attention in a configuration that is not a variant.
    #[error("`{place}`: {source}")]
    AttentionEntry {
        /// The key, with the keys around it.
        place: String,
        /// What is wrong with it.
        source: termwise_attention::Error,
    },
    /// A layer whose heads cannot have the attention that they are given.
    #[error("layer {layer}: {source}")]
    Layer {
        /// The layer.
        layer: usize,
        /// Why not.
        source: termwise_attention::Error,
    },
    /// Sizes whose product no machine can hold.
    #[error("{what} has more values than this machine has memory for; check the sizes that were asked for")]
    TooLarge {
        /// A tensor, the model, a batch.
        what: String,
    },

    /// A folder or file without weights.
    #[error(
        "no weights at {}: expected a folder with `model.safetensors` or `model.safetensors.index.json`, or a path to such a file",
        path.display()
    )]
    NoWeights {
        /// Where they were looked for.
        path: PathBuf,
    },
    /// No model where one was looked for.
    #[error(
        "there is no model at {}: {}; give a folder with a config.json and safetensors, in Hugging Face's form",
        path.display(), if *folder { "the folder holds no config.json" } else { "no such folder" }
    )]
    NoModel {
        /// Where it was looked for.
        path: PathBuf,
        /// Whether there is a folder at all.
        folder: bool,
    },
    /// A file too short for its header, or whose header's length cannot be.
    #[error("not a complete safetensors file: its header should have {header} bytes, the file has {file}; copy or download it again")]
    HeaderTruncated {
        /// Length that the first eight bytes promise; eight where even those are incomplete.
        header: u64,
        /// Bytes in the file.
        file: u64,
    },
    /// A header beyond the format's limit.
    #[error("the safetensors header has {found} bytes, more than the {limit} that the format allows; the file is damaged")]
    HeaderTooLarge {
        /// Length that the first eight bytes promise.
        found: u64,
        /// The format's limit.
        limit: u64,
    },
    /// A header that is not what the format says.
    #[error("the safetensors header is damaged: {problem}")]
    Header {
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor whose place in the file overlaps the one before it, or leaves a hole.
    #[error("tensor `{name}` begins at byte {found} of the data, expected {expected}: {}; the file is damaged", gap(*found, *expected))]
    Offsets {
        /// The tensor.
        name: String,
        /// End of the tensor before it.
        expected: u64,
        /// Where it begins.
        found: u64,
    },
    /// A tensor whose bytes are not as many as its shape and type need.
    #[error("tensor `{name}`, {dtype} {}, needs {expected} bytes, the header gives it {found}; the file is damaged", Dims(shape))]
    TensorBytes {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes that it needs.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// A file that ends before its last tensor does, or goes on after it.
    #[error("the tensors end at byte {expected}, the file has {found} bytes; it is {}, copy or download it again", misfit(*found, *expected))]
    FileLength {
        /// Bytes that the header promises.
        expected: u64,
        /// Bytes in the file.
        found: u64,
    },
    /// A shard that an index names and that is not there.
    #[error("the index names the shard `{shard}`, which is not there; copy or download it")]
    MissingShard {
        /// Its file name.
        shard: String,
    },
    /// A shard's name that leads out of the folder.
    #[error("the index names the shard `{shard}`; a shard must be a plain file name in the folder of its index")]
    ShardName {
        /// The name.
        shard: String,
    },
    /// An index and a shard that disagree about where a tensor is.
    #[error("the index and the shard `{shard}` disagree: only the {holder} has `{name}` there; the files are not of one checkpoint")]
    IndexMismatch {
        /// The shard's file name.
        shard: String,
        /// The tensor.
        name: String,
        /// Who has it: `index` or `shard`.
        holder: &'static str,
    },
    /// A tensor that a checkpoint does not have.
    #[error("there is no tensor `{name}`{}", suggestion.as_ref().map_or(String::new(), |s| format!("; the nearest name is `{s}`")))]
    NoTensor {
        /// The tensor.
        name: String,
        /// A similar one that exists.
        suggestion: Option<String>,
    },
    /// A tensor of another shape than the configuration says.
    #[error(
        "tensor `{name}`: the configuration asks for shape {}, the weights have {}{}; use the configuration that belongs to these weights",
        Dims(expected), Dims(found), others(*more)
    )]
    TensorShape {
        /// The tensor.
        name: String,
        /// Shape by the configuration.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
        /// How many more tensors disagree.
        more: usize,
    },
    /// Tensors that the configuration asks for and the weights lack.
    #[error("{} missing: {}; {hint}", count_of(*count), list(names, *count))]
    MissingTensors {
        /// How many.
        count: usize,
        /// The first of them.
        names: Vec<String>,
        /// What to do.
        hint: &'static str,
    },
    /// Tensors that the weights have and the configuration has no use for.
    #[error(
        "{} no place in the configuration: {}; use the configuration that belongs to these weights, attention variant included",
        if *count == 1 { "1 tensor has".into() } else { format!("{count} tensors have") },
        list(names, *count)
    )]
    UnexpectedTensors {
        /// How many.
        count: usize,
        /// The first of them.
        names: Vec<String>,
    },
    /// A tensor of a type that cannot be read as asked.
    #[error("tensor `{name}` has type {found}, expected {expected}")]
    TensorType {
        /// The tensor.
        name: String,
        /// Types that can be read.
        expected: &'static str,
        /// Its type.
        found: String,
    },
    /// A buffer that is not as long as its tensor.
    #[error("tensor `{name}` {} needs {} values, the buffer has {found}", Dims(shape), count_values(shape))]
    Buffer {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Length of the buffer.
        found: usize,
    },
    /// A number that is none.
    #[error("tensor `{name}` holds {value} at index {}; the weights are damaged or their training diverged", Dims(index))]
    NonFinite {
        /// The tensor.
        name: String,
        /// Where, the first such place.
        index: Vec<usize>,
        /// NaN, inf or -inf.
        value: f64,
    },
    /// A finite number that the type of a file cannot hold.
    #[error("tensor `{name}` holds {value} at index {}, beyond the range of {dtype}; write it as float32", Dims(index))]
    OutOfRange {
        /// The tensor.
        name: String,
        /// Where, the first such place.
        index: Vec<usize>,
        /// The number.
        value: f32,
        /// The type that was asked for.
        dtype: &'static str,
    },
    /// A batch that is not as long as the session it is given to.
    #[error("{what}: the session expects {expected} values, found {found}; make a session for this model and batch")]
    BatchLength {
        /// Which part of the batch.
        what: &'static str,
        /// Values that belong there.
        expected: usize,
        /// Values that were given.
        found: usize,
    },
    /// Positions that a batch does not have.
    #[error("positions {start}..{end} were asked for, and the session has {rows}, counted from 0; ask for some of these")]
    Rows {
        /// The first.
        start: usize,
        /// One past the last.
        end: usize,
        /// Positions that there are.
        rows: usize,
    },
    /// Nothing to continue.
    #[error("the prompt has no token; begin with the one that starts a text")]
    EmptyPrompt,
    /// A token, label or length that cannot be.
    #[error("{what} {found} at row {row}, position {position}: it must be {expected}")]
    BatchValue {
        /// What it is.
        what: &'static str,
        /// Batch row.
        row: usize,
        /// Position in the row.
        position: usize,
        /// The value.
        found: i64,
        /// What it has to be.
        expected: String,
    },
    /// More tokens than the model was made for, with a memory that keeps each of them.
    #[error(
        "row {row} would hold {asked} tokens in its cache of keys and values, and the model was made for {context}; shorten the text, \
         go beyond the context all the same (--beyond-context), or use a memory of constant size (--order)"
    )]
    Context {
        /// Batch row.
        row: usize,
        /// Tokens that it would hold.
        asked: usize,
        /// `max_position_embeddings`.
        context: usize,
    },
    /// A denominator of an attention that was zero, negative or NaN while writing.
    #[error("{at}, so nothing more can be written; its attention is `{variant}`, {advice}")]
    Denominator {
        /// Where.
        at: crate::model::Nonpositive,
        /// The attention of that head.
        variant: String,
        /// What to do.
        advice: &'static str,
    },
    /// States larger than the memory of the machine.
    #[error(
        "the states of `{variant}` need {bytes} bytes, and {available} are free; take a lower order, fewer rows, or keep keys and values"
    )]
    Memory {
        /// The attention of a head.
        variant: String,
        /// Bytes that they need at least.
        bytes: u64,
        /// Bytes that the system has.
        available: u64,
    },
    /// A logit that is no number while writing.
    #[error(
        "the logit of token {token} is {value} after position {position} of row {row}; the weights or the attention cannot take this text"
    )]
    Logit {
        /// Batch row.
        row: usize,
        /// Position of the last token that was read.
        position: usize,
        /// Token.
        token: usize,
        /// NaN, inf or -inf.
        value: f32,
    },
    /// A row whose layers have not all taken the last token in.
    #[error(
        "row {row} failed in an earlier call, and only some of its layers have taken the last token in; clear the row before it is used"
    )]
    FailedRow {
        /// Batch row.
        row: usize,
    },
    /// A model without anything that an order could cut.
    #[error("{problem}: the attention of this model is `{variant}`; leave the order out")]
    NothingToCut {
        /// What is missing.
        problem: &'static str,
        /// The attention of the first head.
        variant: String,
    },
    /// A saved memory that cannot be gone on with.
    #[error("{}: {problem}", path.display())]
    StateFile {
        /// The file.
        path: PathBuf,
        /// What was found and what was asked for.
        problem: String,
    },
    /// A number for choosing tokens that cannot be.
    #[error("the {name} is {found}, it must be {expected}")]
    Sampling {
        /// Which number.
        name: &'static str,
        /// What it is.
        found: f64,
        /// What it has to be.
        expected: &'static str,
    },
    /// A name that a file to be written cannot have, or has already.
    #[error("cannot write a tensor named `{name}`: {problem}")]
    TensorName {
        /// The name.
        name: String,
        /// Why not.
        problem: &'static str,
    },
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// This error, found in that file.
    pub fn in_file(self, file: impl fmt::Display) -> Error {
        Error::In { file: file.to_string(), error: Box::new(self) }
    }

    /// The operating system's refusal, for `map_err`.
    pub fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.as_ref().to_owned();
        move |source| Error::Io { action, path, source }
    }
}

impl From<files::Error> for Error {
    fn from(files::Error { action, path, source }: files::Error) -> Error {
        Error::Io { action, path, source }
    }
}

/// How many names a message lists before it counts the rest.
pub(crate) const NAMES_LISTED: usize = 5;

/// A shape or an index as `[2, 3]`.
struct Dims<'a>(&'a [usize]);

impl fmt::Display for Dims<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Saturating, since a shape in an error may be the absurd one that the error is about.
fn count_values(shape: &[usize]) -> usize {
    shape.iter().fold(1, |product, &n| product.saturating_mul(n))
}

fn did_you_mean(suggestion: Option<&str>, known: &[&str]) -> String {
    match suggestion {
        Some(word) => format!("did you mean `{word}`?"),
        None => format!("known are: {}", known.join(", ")),
    }
}

fn gap(found: u64, expected: u64) -> &'static str {
    if found < expected { "it overlaps the tensor before it" } else { "bytes before it belong to no tensor" }
}

fn misfit(found: u64, expected: u64) -> &'static str {
    if found < expected { "truncated" } else { "too long" }
}

fn others(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more tensors disagree)") }
}

fn count_of(count: usize) -> String {
    if count == 1 { "1 tensor is".into() } else { format!("{count} tensors are") }
}

fn list(names: &[String], count: usize) -> String {
    let mut text = String::new();
    for (i, name) in names.iter().enumerate() {
        let _ = write!(text, "{}`{name}`", if i == 0 { "" } else { ", " });
    }
    if count > names.len() {
        let _ = write!(text, " and {} more", count - names.len());
    }
    text
}
