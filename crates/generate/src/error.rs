//! What can go wrong while text is written.

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Prompts that cannot be read, or the tokenizer.
    #[error(transparent)]
    Data(#[from] termwise_data::Error),
    /// The model.
    #[error(transparent)]
    Model(#[from] termwise_llama::Error),
    /// Another error, with the prompt of a file that it belongs to.
    #[error("prompt {number}: {error}")]
    Prompt {
        /// Which one, from 1.
        number: usize,
        /// What is wrong with it.
        error: Box<Error>,
    },
}

impl Error {
    /// Whether the arguments are at fault.
    pub fn is_usage(&self) -> bool {
        match self {
            Error::Data(error) => error.is_usage(),
            Error::Prompt { error, .. } => error.is_usage(),
            _ => false,
        }
    }
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
