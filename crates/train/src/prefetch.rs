//! Prefetching of batches on a separate thread during the previous step. The content of a batch depends only on its index, so
//! prefetching does not change results.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;

use crate::error::{Error, Result};
use termwise_data::Rows;

/// Batches in the order of their indices; `None` after the last.
pub(crate) struct Prefetch<T> {
    ready: Receiver<Result<Option<T>>>,
    used: SyncSender<T>,
    ended: bool,
}

impl<T: Default + Send + 'static> Prefetch<T> {
    /// Calls `fill` with 0, 1, 2… on a thread of `scope` until it returns false or fails, one ahead of the reader. The thread ends when
    /// the prefetch is dropped.
    pub(crate) fn start<'scope, 'env, F>(scope: &'scope Scope<'scope, 'env>, mut fill: F) -> Prefetch<T>
    where
        F: FnMut(u64, &mut T) -> Result<bool> + Send + 'scope,
    {
        let (send, ready) = sync_channel(1);
        let (used, reuse) = sync_channel::<T>(4);
        scope.spawn(move || {
            for index in 0.. {
                let mut item = reuse.try_recv().unwrap_or_default();
                let filled = match fill(index, &mut item) {
                    Ok(true) => Ok(Some(item)),
                    Ok(false) => Ok(None),
                    Err(error) => Err(error),
                };
                let last = !matches!(filled, Ok(Some(_)));
                if send.send(filled).is_err() || last {
                    return;
                }
            }
        });
        Prefetch { ready, used, ended: false }
    }

    /// The next item.
    pub(crate) fn next(&mut self) -> Result<Option<T>> {
        if self.ended {
            return Ok(None);
        }
        let next = self.ready.recv().unwrap_or(Err(Error::Internal("the thread that prepares data has panicked")));
        self.ended = !matches!(next, Ok(Some(_)));
        next
    }

    /// Returns a buffer for reuse.
    pub(crate) fn reuse(&self, item: T) {
        // If the channel is full or the thread has ended, the buffer is freed.
        let _ = self.used.try_send(item);
    }
}

/// The batches of one step.
pub(crate) type Parts = Vec<Rows>;
