//! Scratch memory of single tasks.

use std::sync::{Mutex, PoisonError};

use crate::{Buffer, Error};

/// Memory of single tasks, one buffer for each thread of the pool that runs them: a task finds what its thread used before in the cache.
#[derive(Debug, Default)]
pub(crate) struct TaskScratch(Vec<Mutex<Buffer>>);

impl TaskScratch {
    /// `len` values for each thread.
    pub fn ensure(&mut self, len: usize) -> Result<(), Error> {
        // One more for a caller outside of the pool.
        let threads = rayon::current_num_threads() + 1;
        if self.0.len() < threads {
            self.0.resize_with(threads, Mutex::default);
        }
        self.0.iter_mut().try_for_each(|buffer| buffer.get_mut().unwrap_or_else(PoisonError::into_inner).ensure(len))
    }

    /// Runs f with the memory of this thread, all that [`TaskScratch::ensure`] gave it. f runs no tasks itself.
    pub fn with<T>(&self, f: impl FnOnce(&mut [f32]) -> T) -> T {
        let own = rayon::current_thread_index().unwrap_or(self.0.len() - 1).min(self.0.len() - 1);
        let mut buffer = self.0[own].lock().unwrap_or_else(PoisonError::into_inner);
        f(buffer.as_mut_slice())
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|buffer| buffer.lock().unwrap_or_else(PoisonError::into_inner).bytes()).sum()
    }
}

impl Clone for TaskScratch {
    /// Nothing: its contents never outlive a task.
    fn clone(&self) -> TaskScratch {
        TaskScratch::default()
    }
}
