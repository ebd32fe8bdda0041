//! What can go wrong in a command.

/// The errors of this crate. Each says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An attention that is not possible, or a text that is none.
    #[error(transparent)]
    Attention(#[from] termwise_attention::Error),
    /// A model that cannot be built or run.
    #[error(transparent)]
    Model(#[from] termwise_llama::Error),
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
    /// The system gave no threads.
    #[error("cannot start {threads} threads: {source}; ask for fewer with --threads")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// What the pool says.
        source: rayon::ThreadPoolBuildError,
    },
}

impl Error {
    /// Whether the user's own words are at fault, as against a failure while working.
    pub fn is_usage(&self) -> bool {
        matches!(self, Error::Attention(_) | Error::ShapeText { .. } | Error::Sizes(_))
    }
}
