//! What can go wrong while attentions, models and papers are measured.

/// The errors of this crate, and of those that look into models and reproduce papers, which work with the same libraries. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An attention that is not possible, or a text that is none.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A model that cannot be built or run.
    #[error(transparent)]
    Model(Box<termwise_model::Error>),
    /// A list of sizes that cannot be read.
    #[error("`{text}` is not a shape: write {expected}")]
    ShapeText {
        /// What was written.
        text: String,
        /// What can be read.
        expected: &'static str,
    },
    /// Sizes that do not fit together.
    #[error("{0}")]
    Sizes(String),
    /// A model, a machine or an experiment that nobody knows.
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
    /// A number with a unit that cannot be read.
    #[error("`{text}` is no size: write {expected}")]
    Size {
        /// What was written.
        text: String,
        /// What can be read.
        expected: &'static str,
    },
    /// Training, its settings or its data.
    #[error(transparent)]
    Train(Box<termwise_train::Error>),
    /// A report that cannot be written.
    #[error(transparent)]
    Report(#[from] termwise_report::Error),
    /// A score that is no number.
    #[error(
        "the score of query {query} and key {key} in window {window} is not finite at layer {layer}, head {head}; the weights cannot take this text"
    )]
    Score {
        /// Layer, from 0.
        layer: usize,
        /// Head, from 0.
        head: usize,
        /// Window, from 0.
        window: usize,
        /// Position of the query.
        query: usize,
        /// Position of the key.
        key: usize,
    },
    /// A variant that cannot be written as other people's code.
    #[error("`{variant}` cannot be exported: {reason}")]
    Export {
        /// Which.
        variant: String,
        /// Why.
        reason: String,
    },
    /// Text generation.
    #[error(transparent)]
    Generate(Box<termwise_model::GenerateError>),
    /// A file or folder without a result that can be shown.
    #[error("cannot show {name}: {problem}")]
    SavedResult {
        /// The file or folder.
        name: String,
        /// The problem, as the end of a sentence.
        problem: String,
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

impl From<termwise_data::Error> for Error {
    fn from(error: termwise_data::Error) -> Error {
        Error::Train(Box::new(error.into()))
    }
}

impl From<termwise_model::Error> for Error {
    fn from(error: termwise_model::Error) -> Error {
        Error::Model(Box::new(error))
    }
}

impl From<termwise_model::GenerateError> for Error {
    fn from(error: termwise_model::GenerateError) -> Error {
        Error::Generate(Box::new(error))
    }
}

impl Error {
    /// Whether the user's own words are at fault, as against a failure while working.
    pub fn is_usage(&self) -> bool {
        match self {
            Error::Attention(_)
            | Error::ShapeText { .. }
            | Error::Sizes(_)
            | Error::Unknown { .. }
            | Error::Size { .. }
            | Error::Export { .. }
            | Error::SavedResult { .. } => true,
            Error::Train(error) => error.is_usage(),
            Error::Generate(error) => error.is_usage(),
            _ => false,
        }
    }
}
