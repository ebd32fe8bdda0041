//! Scratch memory for parallel tasks.

use std::sync::{Mutex, PoisonError};

use crate::{Buffer, Error};

/// One scratch buffer per thread of the current rayon pool. The buffer of a thread stays in its cache from task to task.
#[derive(Debug, Default)]
pub struct TaskScratch(Vec<Mutex<Buffer>>);

impl TaskScratch {
    /// Provides `len` values for each thread.
    ///
    /// # Errors
    /// If the system has no memory for them.
    pub fn ensure(&mut self, len: usize) -> Result<(), Error> {
        // One more for a caller outside the pool.
        let threads = rayon::current_num_threads() + 1;
        if self.0.len() < threads {
            self.0.resize_with(threads, Mutex::default);
        }
        self.0.iter_mut().try_for_each(|buffer| buffer.get_mut().unwrap_or_else(PoisonError::into_inner).ensure(len))
    }

    /// Runs f with the buffer of this thread, whose length [`TaskScratch::ensure`] set. f must not start parallel tasks: one that this thread takes over
    /// would wait for the same buffer.
    pub fn with<T>(&self, f: impl FnOnce(&mut [f32]) -> T) -> T {
        let own = rayon::current_thread_index().unwrap_or(self.0.len() - 1).min(self.0.len() - 1);
        let mut buffer = self.0[own].lock().unwrap_or_else(PoisonError::into_inner);
        f(buffer.as_mut_slice())
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|buffer| buffer.lock().unwrap_or_else(PoisonError::into_inner).bytes()).sum()
    }
}

impl Clone for TaskScratch {
    /// Returns an empty one: contents are not kept between tasks.
    fn clone(&self) -> TaskScratch {
        TaskScratch::default()
    }
}
