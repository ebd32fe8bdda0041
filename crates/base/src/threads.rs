//! Thread pools of a stated size: commands run inside one, and nothing is set for the whole process.

use rayon::{ThreadPool, ThreadPoolBuilder};

/// The system gave no threads.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} threads: {source}; ask for fewer with --threads")]
pub struct Error {
    /// How many were asked for.
    pub threads: usize,
    /// What the pool says.
    pub source: rayon::ThreadPoolBuildError,
}

/// Cores that this process may use.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A pool of that many threads.
pub fn pool(threads: usize) -> Result<ThreadPool, Error> {
    ThreadPoolBuilder::new().num_threads(threads).build().map_err(|source| Error { threads, source })
}
