//! Errors of conversions.

/// Errors of this module. Each message contains the request, the finding and a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid variant.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A model that cannot be built or run.
    #[error(transparent)]
    Model(Box<termwise_model::Error>),
    /// An error of another module of this crate.
    #[error(transparent)]
    Inspect(#[from] crate::Error),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] termwise_base::files::Error),
    /// An invalid request.
    #[error("{0}")]
    Request(String),
    /// A model with invalid logits.
    #[error("logits at position {0} are NaN or infinite")]
    NoNumbers(usize),
    /// Interrupted. Finished measurements are in the journal.
    #[error("interrupted; the same command resumes")]
    Stopped,
}

impl From<termwise_train::Error> for Error {
    fn from(error: termwise_train::Error) -> Error {
        Error::Inspect(error.into())
    }
}

impl From<termwise_model::Error> for Error {
    fn from(error: termwise_model::Error) -> Error {
        Error::Model(Box::new(error))
    }
}

impl Error {
    /// Whether the request is at fault, as opposed to a failure at run time.
    pub fn is_usage(&self) -> bool {
        match self {
            Error::Attention(_) | Error::Request(_) => true,
            Error::Inspect(error) => error.is_usage(),
            _ => false,
        }
    }
}
