//! Errors of this crate.

use std::path::PathBuf;

use termwise_base::files;

/// Errors of this crate. Each states the request, the finding and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error(transparent)]
    Io(#[from] files::Error),
    /// An invalid data setting.
    #[error("data: `{key}` {problem}")]
    DataSetting {
        /// Its key in the configuration.
        key: &'static str,
        /// The problem and the remedy.
        problem: String,
    },
    /// A source without usable files.
    #[error("source `{requested}`: {problem}")]
    DataSource {
        /// As written in the configuration.
        requested: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// A model that cannot be fetched from the hub.
    #[error("model `{requested}`: {problem}")]
    HubModel {
        /// As the user wrote it.
        requested: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// A feature that this build does not include.
    #[error("`{requested}` needs {support}, which this build does not include; rebuild with `cargo build --release --features {feature}`")]
    LeftOut {
        /// As the user wrote it.
        requested: String,
        /// The missing support.
        support: &'static str,
        /// The feature that enables it.
        feature: &'static str,
    },
    /// An invalid document in a file.
    #[error("{}, {unit} {number}: {problem}", path.display())]
    Document {
        /// The file.
        path: PathBuf,
        /// The unit of the position: line or row.
        unit: &'static str,
        /// The position, from 1.
        number: u64,
        /// The problem.
        problem: String,
    },
    /// A tokenizer that cannot be used, or text that it cannot encode.
    #[error("tokenizer {name}: {problem}")]
    Tokenizer {
        /// `bytes` or its file.
        name: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// Invalid tokens on disk.
    #[error("{}: {problem}; delete the directory or rebuild it with --rebuild", path.display())]
    Shard {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A part of the program ended without a result.
    #[error("internal error: {0}")]
    Internal(&'static str),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the arguments are invalid: they contradict each other, or name an input that does not exist or cannot be used.
    pub fn is_usage(&self) -> bool {
        match self {
            Error::DataSetting { .. } | Error::DataSource { .. } | Error::LeftOut { .. } => true,
            Error::Io(error) => error.source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// For requests that need a disabled feature.
    #[allow(dead_code, reason = "unused if all features are enabled")]
    pub(crate) fn left_out(requested: impl Into<String>, support: &'static str, feature: &'static str) -> Error {
        Error::LeftOut { requested: requested.into(), support, feature }
    }

    /// For `map_err`: adds the action and the path.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let with_source = files::Error::io(action, path);
        move |source| with_source(source).into()
    }
}
