//! Thread pools of a stated size: commands run inside one, and nothing is set for the whole process.

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::Error;

/// Cores that this process may use.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A pool of that many threads.
pub fn pool(threads: usize) -> Result<ThreadPool, Error> {
    ThreadPoolBuilder::new().num_threads(threads).build().map_err(|source| Error::Threads { threads, source })
}
