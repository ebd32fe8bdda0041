//! What can be wrong with an attention: its text, its parts, its tensors.

use std::fmt;

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text that is not a variant.
    #[error("{0}")]
    Text(TextError),
    /// Parts that cannot stand together.
    #[error("`{variant}` is not possible: {reason}")]
    Combination {
        /// The variant as written by [`crate::Variant`]'s `Display`.
        variant: String,
        /// Why, and what to do.
        reason: String,
    },
    /// Sizes that no engine can run.
    #[error("impossible shape: {0}")]
    Shape(String),
    /// A tensor of another length than the shape says, or one that is missing.
    #[error("{tensor}: expected {expected} values, found {found}")]
    Tensor {
        /// Which tensor.
        tensor: String,
        /// Values that the shape asks for.
        expected: usize,
        /// Values that were given.
        found: usize,
    },
    /// Memory that the system does not have.
    #[error("no memory for {values} values of {bytes} bytes each: make batch, time, heads or the orders of a state smaller")]
    Memory {
        /// Values asked for.
        values: usize,
        /// Bytes of each.
        bytes: usize,
    },
    /// What a forward pass saved, given to another engine.
    #[error("what was saved belongs to another engine: give `backward` what `forward` of the same engine returned for the same inputs")]
    Saved,
    /// What a forward pass saved, given back with other documents or lengths.
    #[error("the forward pass had other documents or lengths: give `backward` the inputs that `forward` had")]
    SavedPartition,
    /// A file that cannot be written, or is not what was asked for.
    #[error("{path}: {problem}")]
    File {
        /// Where.
        path: String,
        /// What was asked, what was found, what to do.
        problem: String,
    },
}

/// A text that is not a variant, with the place and the nearest valid word.
#[derive(Clone, Debug, PartialEq)]
pub struct TextError {
    /// The whole text.
    pub text: String,
    /// Byte range of the offending word.
    pub span: std::ops::Range<usize>,
    /// What is wrong with it.
    pub problem: String,
    /// What to write instead.
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
