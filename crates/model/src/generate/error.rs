//! The error of text generation.

/// An error of text generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// An error of the prompt file or of the tokenizer.
    #[error(transparent)]
    Data(#[from] termwise_data::Error),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] crate::Error),
    /// An error of one of several prompts.
    #[error("prompt {number}: {error}")]
    Prompt {
        /// Number of the prompt, counted from 1.
        number: usize,
        /// The error.
        error: Box<GenerateError>,
    },
}

impl GenerateError {
    /// Whether the error is caused by the arguments.
    pub fn is_usage(&self) -> bool {
        match self {
            GenerateError::Data(error) => error.is_usage(),
            GenerateError::Prompt { error, .. } => error.is_usage(),
            _ => false,
        }
    }
}
