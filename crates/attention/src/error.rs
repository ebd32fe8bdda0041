//! Errors in variants, shapes and tensors.

use std::fmt;

/// Errors of this crate. Each states the request, the finding and the remedy.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid variant string.
    #[error("{0}")]
    Text(TextError),
    /// Parts that cannot be combined.
    #[error("`{variant}` is not supported: {reason}")]
    Combination {
        /// The variant as written by [`crate::Variant`]'s `Display`.
        variant: String,
        /// The reason and the remedy.
        reason: String,
    },
    /// Sizes that no engine supports.
    #[error("invalid shape: {0}")]
    Shape(String),
    /// A missing tensor, or one of the wrong length.
    #[error("{tensor}: expected {expected} values, found {found}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// Expected number of values.
        expected: usize,
        /// Number of values found.
        found: usize,
    },
    /// Memory that cannot be allocated.
    #[error("cannot allocate {values} values of {bytes} bytes each: reduce batch, time, heads or the highest order")]
    Memory {
        /// Number of values requested.
        values: usize,
        /// Bytes per value.
        bytes: usize,
    },
    /// Saved sums of another engine.
    #[error("the saved values are from another engine: pass `backward` the result of `forward` of the same engine for the same inputs")]
    Saved,
    /// Saved sums of a pass with other documents or lengths.
    #[error("documents or lengths differ from those of the forward pass: pass `backward` the inputs of `forward`")]
    SavedPartition,
    /// A file that cannot be written, or has unexpected content.
    #[error("{path}: {problem}")]
    File {
        /// The path.
        path: String,
        /// The request, the finding and the remedy.
        problem: String,
    },
}

/// An invalid variant string, with the position and the nearest valid word.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TextError {
    /// The complete string.
    pub text: String,
    /// Byte range of the offending word.
    pub span: std::ops::Range<usize>,
    /// The problem.
    pub problem: String,
    /// The suggestion.
    pub help: Option<String>,
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = self.text[..self.span.start].chars().count();
        let width = self.text[self.span.clone()].chars().count().max(1);
        writeln!(f, "{}", self.problem)?;
        writeln!(f, "  {}", self.text)?;
        write!(f, "  {}{}", " ".repeat(before), "^".repeat(width))?;
        match &self.help {
            Some(help) => write!(f, " {help}"),
            None => Ok(()),
        }
    }
}

impl From<termwise_kernels::Error> for Error {
    fn from(error: termwise_kernels::Error) -> Error {
        match error {
            termwise_kernels::Error::Memory { values, bytes } => Error::Memory { values, bytes },
            other => Error::Shape(other.to_string()),
        }
    }
}
