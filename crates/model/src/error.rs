//! The error of this crate: configurations, weight files, batches, decoding.

use std::fmt::{self, Write as _};
use std::path::PathBuf;

use termwise_base::files;

/// An error of this crate. Messages state what was requested, what was found, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the attention crate.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A gradient was requested from a session with `forward_only`.
    #[error("this session was created with `forward_only` and has no backward pass; create one without it")]
    ForwardOnly,
    /// Logits were requested from a session without the output of a forward pass.
    #[error(
        "no forward output to compute logits from: the session has not run, its last run failed, or a backward pass followed; call `run` first"
    )]
    NoOutput,
    /// An error in a file.
    #[error("{file}: {error}")]
    In {
        /// The path of the file.
        file: String,
        /// The error.
        error: Box<Error>,
    },
    /// A file that cannot be read or written.
    #[error(transparent)]
    Io(#[from] files::Error),
    /// Invalid JSON, or a duplicate key.
    #[error("not valid JSON: {0}")]
    Json(serde_json::Error),

    /// A required key is missing.
    #[error("the key `{key}` is missing; set it to {expected}")]
    MissingKey {
        /// The path of the key.
        key: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A value has the wrong type.
    #[error("`{key}` must be {expected}, found {found}")]
    KeyType {
        /// The path of the key.
        key: String,
        /// The expected type.
        expected: &'static str,
        /// The value in the file.
        found: String,
    },
    /// A value is out of range.
    #[error("`{key}` is {found}, but {expected}")]
    KeyValue {
        /// The path of the key.
        key: String,
        /// The value in the file.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// A configuration that is not supported.
    #[error("`{key}` is {found}, which is not supported: {advice}")]
    Unsupported {
        /// The path of the key.
        key: String,
        /// The value in the file.
        found: String,
        /// What is supported, and what to do.
        advice: &'static str,
    },
    /// An unknown key in an object with a fixed set of keys.
    #[error("`{place}` has the unknown key `{key}`; {}", did_you_mean(suggestion.as_deref(), known))]
    UnknownKey {
        /// The path of the object.
        place: String,
        /// The key.
        key: String,
        /// The keys of such an object.
        known: &'static [&'static str],
        /// The most similar key.
        suggestion: Option<String>,
    },
    /// Two keys contradict each other.
    #[error("`{first}` is {first_value} but `{second}` is {second_value}; remove the wrong one")]
    Conflict {
        /// One key.
        first: String,
        /// Its value.
        first_value: String,
        /// The other key.
        second: String,
        /// Its value.
        second_value: String,
    },
    /// An invalid variant string in a configuration.
    #[error("`{place}`: {source}")]
    AttentionEntry {
        /// The path of the key.
        place: String,
        /// The error.
        source: termwise_attention::Error,
    },
    /// An error in the attention of a layer.
    #[error("layer {layer}: {source}")]
    Layer {
        /// Layer index.
        layer: usize,
        /// The error.
        source: termwise_attention::Error,
    },
    /// A buffer that cannot be allocated.
    #[error("not enough memory for {what}; check the requested sizes")]
    TooLarge {
        /// The buffer: a tensor, the model, a batch.
        what: String,
    },

    /// No weights were found.
    #[error(
        "no weights at {}: expected a directory with `model.safetensors` or `model.safetensors.index.json`, or the path of such a file",
        path.display()
    )]
    NoWeights {
        /// The requested path.
        path: PathBuf,
    },
    /// No model was found.
    #[error(
        "no model at {}: {}; expected a directory with config.json and safetensors files in Hugging Face format",
        path.display(), if *folder { "the directory contains no config.json" } else { "no such directory" }
    )]
    NoModel {
        /// The requested path.
        path: PathBuf,
        /// Whether the path is an existing directory.
        folder: bool,
    },
    /// A file that is shorter than its header.
    #[error("incomplete safetensors file: the header should have {header} bytes, the file has {file}; copy or download it again")]
    HeaderTruncated {
        /// Header length according to the first eight bytes; 8 if those are incomplete.
        header: u64,
        /// Length of the file in bytes.
        file: u64,
    },
    /// A header that is longer than the format allows.
    #[error("the safetensors header has {found} bytes, the limit of the format is {limit}; the file is damaged")]
    HeaderTooLarge {
        /// Header length according to the first eight bytes.
        found: u64,
        /// The limit of the format.
        limit: u64,
    },
    /// An invalid header.
    #[error("the safetensors header is damaged: {problem}")]
    Header {
        /// The problem.
        problem: String,
    },
    /// A tensor that overlaps the previous one or leaves a gap.
    #[error("tensor `{name}` starts at byte {found} of the data, expected {expected}: {}; the file is damaged", gap(*found, *expected))]
    Offsets {
        /// The tensor.
        name: String,
        /// End of the previous tensor.
        expected: u64,
        /// Start of the tensor.
        found: u64,
    },
    /// A tensor whose length does not match its shape and type.
    #[error("tensor `{name}`, {dtype} {}, needs {expected} bytes, the header specifies {found}; the file is damaged", Dims(shape))]
    TensorBytes {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes according to shape and type.
        expected: u64,
        /// Bytes according to the header.
        found: u64,
    },
    /// A file whose length does not match its header.
    #[error("the tensors end at byte {expected}, the file has {found} bytes; it is {}, copy or download it again", misfit(*found, *expected))]
    FileLength {
        /// Length according to the header in bytes.
        expected: u64,
        /// Length of the file in bytes.
        found: u64,
    },
    /// A missing shard.
    #[error("the shard `{shard}` of the index is missing; copy or download it")]
    MissingShard {
        /// Its file name.
        shard: String,
    },
    /// A shard name that is a path.
    #[error("the shard name `{shard}` in the index is a path; it must be a file name in the directory of the index")]
    ShardName {
        /// The name.
        shard: String,
    },
    /// An index that does not match a shard.
    #[error("the index does not match the shard `{shard}`: only the {holder} lists `{name}`; use files of one checkpoint")]
    IndexMismatch {
        /// The shard's file name.
        shard: String,
        /// The tensor.
        name: String,
        /// The file that lists the tensor: `index` or `shard`.
        holder: &'static str,
    },
    /// A tensor was not found.
    #[error("no tensor `{name}`{}", suggestion.as_ref().map_or(String::new(), |s| format!("; did you mean `{s}`?")))]
    NoTensor {
        /// The tensor.
        name: String,
        /// The most similar name.
        suggestion: Option<String>,
    },
    /// A tensor whose shape does not match the configuration.
    #[error(
        "tensor `{name}`: the configuration requires shape {}, the weights have {}{}; use the configuration of these weights",
        Dims(expected), Dims(found), others(*more)
    )]
    TensorShape {
        /// The tensor.
        name: String,
        /// Shape according to the configuration.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
        /// Number of further tensors with the wrong shape.
        more: usize,
    },
    /// Tensors that the configuration requires and the weights do not contain.
    #[error("{} missing: {}; {hint}", count_of(*count), list(names, *count))]
    MissingTensors {
        /// Number of tensors.
        count: usize,
        /// The first names.
        names: Vec<String>,
        /// What to do.
        hint: &'static str,
    },
    /// Tensors that the configuration does not use.
    #[error(
        "{} not used by the configuration: {}; use the configuration of these weights, including the attention variant",
        count_of(*count),
        list(names, *count)
    )]
    UnexpectedTensors {
        /// Number of tensors.
        count: usize,
        /// The first names.
        names: Vec<String>,
    },
    /// A conversion to fixed-size KV memory by an earlier build, with calibrated key ranges.
    #[error(
        "tensor `{0}` is a calibrated key range of fixed-size KV memory, which was removed; the last commit that supports it is e9b2d07; convert the original \
         model again"
    )]
    EarlierKvMemory(String),
    /// A tensor with an unsupported type.
    #[error("tensor `{name}` has type {found}, expected {expected}")]
    TensorType {
        /// The tensor.
        name: String,
        /// The supported types.
        expected: &'static str,
        /// Its type.
        found: String,
    },
    /// A buffer whose length does not match its tensor.
    #[error("tensor `{name}` {} needs {} values, the buffer has {found}", Dims(shape), count_values(shape))]
    Buffer {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Length of the buffer.
        found: usize,
    },
    /// A NaN or infinite value.
    #[error("tensor `{name}` contains {value} at index {}; the weights are damaged or training diverged", Dims(index))]
    NonFinite {
        /// The tensor.
        name: String,
        /// Index of the first such value.
        index: Vec<usize>,
        /// NaN, inf or -inf.
        value: f64,
    },
    /// A finite value outside the range of the requested type.
    #[error("tensor `{name}` contains {value} at index {}, outside the range of {dtype}; use float32", Dims(index))]
    OutOfRange {
        /// The tensor.
        name: String,
        /// Index of the first such value.
        index: Vec<usize>,
        /// The value.
        value: f32,
        /// The requested type.
        dtype: &'static str,
    },
    /// A batch whose length does not match the session.
    #[error("{what}: expected {expected} values, found {found}; create a session for this model and batch size")]
    BatchLength {
        /// The part of the batch.
        what: &'static str,
        /// Expected number of values.
        expected: usize,
        /// Actual number of values.
        found: usize,
    },
    /// Positions outside the batch.
    #[error("positions {start}..{end} were requested, but the session has {rows} positions, counted from 0; request a range within them")]
    Rows {
        /// First position.
        start: usize,
        /// One past the last position.
        end: usize,
        /// Positions of the session.
        rows: usize,
    },
    /// An empty prompt.
    #[error("the prompt has no tokens; start with the beginning-of-text token")]
    EmptyPrompt,
    /// A token, label or length that is out of range.
    #[error("{what} {found} at row {row}, position {position}: it must be {expected}")]
    BatchValue {
        /// The kind of value.
        what: &'static str,
        /// Batch row.
        row: usize,
        /// Position in the row.
        position: usize,
        /// The value.
        found: i64,
        /// The expected value.
        expected: String,
    },
    /// A KV cache that would exceed the context length of the model.
    #[error(
        "the KV cache of row {row} would contain {requested} tokens, the context length of the model is {context}; shorten the text, allow a longer \
         context (--beyond-context), or use a state of constant size (--order)"
    )]
    Context {
        /// Batch row.
        row: usize,
        /// Tokens that the cache would contain.
        requested: usize,
        /// `max_position_embeddings`.
        context: usize,
    },
    /// An attention denominator that is zero, negative or NaN during decoding.
    #[error("{at}, so decoding cannot continue; the attention of this head is `{variant}`: {advice}")]
    Denominator {
        /// The denominator and its position.
        at: crate::passes::NonpositiveDenominator,
        /// The attention of that head.
        variant: String,
        /// What to do.
        advice: &'static str,
    },
    /// States that are larger than the available memory.
    #[error("the states of `{variant}` need {bytes} bytes, {available} are available; use a lower order, fewer rows, or a KV cache")]
    Memory {
        /// The attention of a head.
        variant: String,
        /// Required bytes.
        bytes: u64,
        /// Available bytes.
        available: u64,
    },
    /// A NaN or infinite logit during decoding.
    #[error(
        "the logit of token {token} is {value} after position {position} of row {row}: the weights or the attention overflow on this text; use \
         another attention variant or check the weights"
    )]
    Logit {
        /// Batch row.
        row: usize,
        /// Position of the last token.
        position: usize,
        /// Token id.
        token: usize,
        /// NaN, inf or -inf.
        value: f32,
    },
    /// A row that failed before.
    #[error(
        "row {row} failed in an earlier call, and only some of its layers have processed the last token; clear the row before using it"
    )]
    FailedRow {
        /// Batch row.
        row: usize,
    },
    /// A model whose attention cannot be truncated.
    #[error("{problem}: the attention of this model is `{variant}`; omit the order")]
    NothingToTruncate {
        /// The reason.
        problem: &'static str,
        /// The attention of the first head.
        variant: String,
    },
    /// A saved decoder state that cannot be loaded.
    #[error("{}: {problem}", path.display())]
    StateFile {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A sampling option that is out of range.
    #[error("the {name} is {found}; it must be {expected}")]
    Sampling {
        /// The option.
        name: &'static str,
        /// Its value.
        found: f64,
        /// The expected value.
        expected: &'static str,
    },
    /// A tensor name that cannot be written.
    #[error("cannot write a tensor named `{name}`: {problem}")]
    TensorName {
        /// The name.
        name: String,
        /// The reason.
        problem: &'static str,
    },
}

/// The result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Adds the path of a file to an error.
    pub fn in_file(self, file: impl fmt::Display) -> Error {
        Error::In { file: file.to_string(), error: Box::new(self) }
    }

    /// For `map_err`: adds the action and the path.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let with_source = files::Error::io(action, path);
        move |source| with_source(source).into()
    }
}

impl From<termwise_kernels::Error> for Error {
    fn from(error: termwise_kernels::Error) -> Error {
        Error::Attention(error.into())
    }
}

/// The largest number of names in a message.
pub(crate) const NAMES_LISTED: usize = 5;

/// A shape or an index as `[2, 3]`.
struct Dims<'a>(&'a [usize]);

impl fmt::Display for Dims<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Saturating, since an invalid shape may overflow.
fn count_values(shape: &[usize]) -> usize {
    shape.iter().fold(1, |product, &n| product.saturating_mul(n))
}

fn did_you_mean(suggestion: Option<&str>, known: &[&str]) -> String {
    match suggestion {
        Some(word) => format!("did you mean `{word}`?"),
        None => format!("known keys: {}", known.join(", ")),
    }
}

fn gap(found: u64, expected: u64) -> &'static str {
    if found < expected { "it overlaps the tensor before it" } else { "the bytes before it belong to no tensor" }
}

fn misfit(found: u64, expected: u64) -> &'static str {
    if found < expected { "truncated" } else { "too long" }
}

fn others(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more tensors do not match)") }
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
