//! What can go wrong while papers are reproduced.

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An attention that is not possible, or a text that is none.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A model that cannot be built or run.
    #[error(transparent)]
    Model(Box<termwise_llama::Error>),
    /// Training, its settings or its data.
    #[error(transparent)]
    Train(Box<termwise_train::Error>),
    /// A plan, a count or a machine.
    #[error(transparent)]
    Lab(#[from] termwise_lab::Error),
    /// A model that cannot be looked into.
    #[error(transparent)]
    Inspect(#[from] termwise_inspect::Error),
    /// A report that cannot be written.
    #[error(transparent)]
    Report(#[from] termwise_report::Error),
    /// Sizes that do not fit together.
    #[error("{0}")]
    Sizes(String),
    /// An experiment that nobody knows.
    #[error("there is no {what} `{name}`; {}known are {known}", suggestion.as_ref().map_or(String::new(), |name| format!("did you mean `{name}`? ")))]
    Unknown {
        /// What was looked for.
        what: &'static str,
        /// Its name.
        name: String,
        /// A name that is much like it.
        suggestion: Option<String>,
        /// All names.
        known: String,
    },
    /// The system gave no threads.
    #[error(transparent)]
    Threads(#[from] termwise_base::threads::Error),
}

impl From<termwise_train::Error> for Error {
    fn from(error: termwise_train::Error) -> Error {
        Error::Train(Box::new(error))
    }
}

impl From<termwise_llama::Error> for Error {
    fn from(error: termwise_llama::Error) -> Error {
        Error::Model(Box::new(error))
    }
}

impl From<termwise_data::Error> for Error {
    fn from(error: termwise_data::Error) -> Error {
        Error::Train(Box::new(error.into()))
    }
}

impl Error {
    /// Whether the user's own words are at fault, as against a failure while working.
    pub fn is_usage(&self) -> bool {
        match self {
            Error::Attention(_) | Error::Sizes(_) | Error::Unknown { .. } => true,
            Error::Lab(error) => error.is_usage(),
            Error::Inspect(error) => error.is_usage(),
            _ => false,
        }
    }
}
