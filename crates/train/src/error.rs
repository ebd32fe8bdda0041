//! What can go wrong in training.

use std::path::PathBuf;

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The model.
    #[error(transparent)]
    Model(#[from] termwise_llama::Error),
    /// Attention.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
