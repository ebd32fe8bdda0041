//! What can go wrong with data.

use std::path::PathBuf;

use termwise_base::files;

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read or written.
    #[error(transparent)]
    Io(#[from] files::Error),
    /// A setting of the data that cannot be.
    #[error("data: `{key}` {problem}")]
    DataSetting {
        /// Its key in the configuration.
        key: &'static str,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// A source that names no usable files.
    #[error("source `{asked}`: {problem}")]
    DataSource {
        /// As the configuration names it.
        asked: String,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// A model of the hub that cannot be had.
    #[error("model `{asked}`: {problem}")]
    HubModel {
        /// As the user named it.
        asked: String,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// Something that this build was made without.
    #[error("`{asked}` needs {support}, which this build leaves out; `cargo build --release --features {feature}` makes one that has it")]
    LeftOut {
        /// As the user named it.
        asked: String,
        /// What is missing.
        support: &'static str,
        /// The feature that brings it.
        feature: &'static str,
    },
    /// Something inside a file of documents.
    #[error("{}, {unit} {number}: {problem}", path.display())]
    Document {
        /// The file.
        path: PathBuf,
        /// What is counted: lines, rows.
        unit: &'static str,
        /// Which one, from 1.
        number: u64,
        /// What is wrong there.
        problem: String,
    },
    /// A tokenizer that cannot be used, or text it cannot take.
    #[error("tokenizer {name}: {problem}")]
    Tokenizer {
        /// `bytes` or its file.
        name: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Tokens on disk that cannot be trusted.
    #[error("{}: {problem}; delete the folder or ask for a rebuild", path.display())]
    Shard {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A part of the program that ended without an answer.
    #[error("internal error: {0}")]
    Internal(&'static str),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the arguments are at fault: they contradict each other, or name an input that does not exist or cannot be used.
    pub fn is_usage(&self) -> bool {
        match self {
            Error::DataSetting { .. } | Error::DataSource { .. } | Error::LeftOut { .. } => true,
            Error::Io(error) => error.source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// For what needs a feature that is off.
    #[allow(dead_code, reason = "with all features on, nothing is left out")]
    pub(crate) fn left_out(asked: impl Into<String>, support: &'static str, feature: &'static str) -> Error {
        Error::LeftOut { asked: asked.into(), support, feature }
    }

    /// For `map_err`: names what was attempted and on which file.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let with_source = files::Error::io(action, path);
        move |source| with_source(source).into()
    }
}
