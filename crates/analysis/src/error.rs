//! Errors of this crate and of `termwise-experiments`.

/// Errors of this crate and of `termwise-experiments`. Each message contains the request, the finding and a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid variant or layer.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A model that cannot be built or run.
    #[error(transparent)]
    Model(Box<termwise_model::Error>),
    /// A list of shapes that cannot be parsed.
    #[error("`{text}` is not a shape: write {expected}")]
    ShapeText {
        /// The text.
        text: String,
        /// The accepted form.
        expected: &'static str,
    },
    /// Inputs that do not fit together.
    #[error("{0}")]
    Sizes(String),
    /// An unknown name of a model, machine or experiment.
    #[error("there is no {what} `{name}`; {}known are {known}", suggestion.as_ref().map_or(String::new(), |name| format!("did you mean `{name}`? ")))]
    Unknown {
        /// The kind of thing.
        what: &'static str,
        /// Its name.
        name: String,
        /// A similar name.
        suggestion: Option<String>,
        /// All names.
        known: String,
    },
    /// A number with a unit that cannot be parsed.
    #[error("`{text}` is not a size: write {expected}")]
    Size {
        /// The text.
        text: String,
        /// The accepted form.
        expected: &'static str,
    },
    /// Training, its settings or its data.
    #[error(transparent)]
    Train(Box<termwise_train::Error>),
    /// A report that cannot be written.
    #[error(transparent)]
    Report(#[from] termwise_report::Error),
    /// A score that is NaN or infinite.
    #[error(
        "the score of query {query} and key {key} in window {window} is NaN or infinite at layer {layer}, head {head}; the model overflows on this text"
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
    /// A variant that cannot be exported.
    #[error("`{variant}` cannot be exported: {reason}")]
    Export {
        /// The variant.
        variant: String,
        /// The reason.
        reason: String,
    },
    /// Text generation.
    #[error(transparent)]
    Generate(Box<termwise_model::GenerateError>),
    /// A file or directory without a result that can be rendered.
    #[error("cannot show {name}: {problem}")]
    SavedResult {
        /// The file or folder.
        name: String,
        /// The problem, as the end of a sentence.
        problem: String,
    },
    /// Threads could not be started.
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
    /// Whether the request is at fault, as opposed to a failure at run time.
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
