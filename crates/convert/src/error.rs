//! What can go wrong while a model is converted.

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An attention that is not possible.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A model that cannot be built or run.
    #[error(transparent)]
    Model(Box<termwise_llama::Error>),
    /// Looking into the original model.
    #[error(transparent)]
    Inspect(#[from] termwise_inspect::Error),
    /// A file of ours.
    #[error(transparent)]
    File(#[from] termwise_base::files::Error),
    /// What was asked for cannot be done.
    #[error("{0}")]
    Asked(String),
    /// A model that predicts nothing.
    #[error("the model's predictions at position {0} are no numbers; there is nothing to compare with")]
    NoNumbers(usize),
    /// The work was stopped; what is finished is in the journal.
    #[error("interrupted; the same command goes on from here")]
    Stopped,
}

impl From<termwise_llama::Error> for Error {
    fn from(error: termwise_llama::Error) -> Error {
        Error::Model(Box::new(error))
    }
}

impl Error {
    /// Whether the user's own words are at fault, as against a failure while working.
    pub fn is_usage(&self) -> bool {
        match self {
            Error::Attention(_) | Error::Asked(_) => true,
            Error::Inspect(error) => error.is_usage(),
            _ => false,
        }
    }
}
