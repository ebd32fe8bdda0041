//! Thread pools of a given size. Commands run inside one; no process-wide setting is changed.

use rayon::{ThreadPool, ThreadPoolBuilder};

/// The threads could not be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} threads: {source}; request fewer with --threads")]
pub struct Error {
    /// Number of threads requested.
    pub threads: usize,
    /// The cause.
    pub source: rayon::ThreadPoolBuildError,
}

/// Number of cores available to this process.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A pool with this many threads.
pub fn pool(threads: usize) -> Result<ThreadPool, Error> {
    ThreadPoolBuilder::new().num_threads(threads).build().map_err(|source| Error { threads, source })
}
