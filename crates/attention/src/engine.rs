//! The interface of batch engines: forward, backward, and the sums that a forward pass saves.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Buffer, Error, Grads, Inputs, Real, Report};

/// An attention engine for one shape. The naive and the fused engines have the same interface.
pub trait Attention<R: Real> {
    /// y [B, T, H, e] from the inputs; saves nothing.
    fn infer(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Report, Error>;

    /// y [B, T, H, e] from the inputs, and the sums that [`Attention::backward`] reads.
    fn forward(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Saved, Error>;

    /// Adds the gradients of Σ y·dy to `grads`; `saved` is the result of `forward` of this engine for these inputs.
    fn backward(&mut self, inputs: &Inputs<R>, saved: &Saved, dy: &[R], grads: &mut Grads<R>) -> Result<(), Error>;
}

/// The saved sums of a forward pass, for its backward pass. Any number may exist at the same time. Dropping one returns its memory to the engine
/// for the next forward pass.
#[derive(Debug)]
#[must_use = "use `infer` for a forward pass without a backward pass"]
pub struct Saved {
    pub(crate) report: Report,
    pub(crate) rows: SavedRows,
    pool: Arc<SavedBufferPool>,
}

/// The sums of every row: U [B, H, T, ep], z and ρ [B, H, T]. Empty if the engine recomputes them.
#[derive(Debug, Default)]
pub(crate) struct SavedRows {
    pub u: Buffer,
    pub z: Buffer,
    pub rho: Buffer,
    /// Boundaries of documents and lengths of rows in the pass; empty if it had none.
    partition: [Vec<usize>; 2],
}

impl SavedRows {
    /// Stores the documents and lengths of these inputs.
    pub fn keep_partition<R: Real>(&mut self, inputs: &Inputs<R>) {
        for (own, given) in self.partition.iter_mut().zip(inputs.partition()) {
            own.clear();
            own.extend_from_slice(given);
        }
    }

    /// Rejects inputs whose documents or lengths differ from those of the forward pass.
    pub fn check_partition<R: Real>(&self, inputs: &Inputs<R>) -> Result<(), Error> {
        if inputs.partition() == self.partition.each_ref().map(Vec::as_slice) { Ok(()) } else { Err(Error::SavedPartition) }
    }

    /// The sums of a range of the B·T positions, of H heads.
    pub fn part(&self, at: &Range<usize>, heads: usize) -> [&[f32]; 3] {
        [&self.u, &self.z, &self.rho].map(|x| {
            let row = x.len() / self.z.len().max(1) * heads;
            &x[at.start * row..at.end * row]
        })
    }

    /// The same, mutable.
    pub fn part_mut(&mut self, at: &Range<usize>, heads: usize) -> [&mut [f32]; 3] {
        let count = self.z.len().max(1);
        [&mut self.u, &mut self.z, &mut self.rho].map(|x| {
            let row = x.len() / count * heads;
            &mut x[at.start * row..at.end * row]
        })
    }
}

/// Buffers of an engine for saved sums, reused across passes.
#[derive(Debug, Default)]
pub(crate) struct SavedBufferPool(Mutex<Vec<SavedRows>>);

impl SavedBufferPool {
    /// A free buffer, or a new one.
    pub fn take(&self) -> SavedRows {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// The result of a pass.
    pub fn saved(self: &Arc<SavedBufferPool>, report: Report, rows: SavedRows) -> Saved {
        Saved { report, rows, pool: self.clone() }
    }

    /// Rejects sums that another engine saved.
    pub fn check(self: &Arc<SavedBufferPool>, saved: &Saved) -> Result<(), Error> {
        if Arc::ptr_eq(self, &saved.pool) { Ok(()) } else { Err(Error::Saved) }
    }
}

impl Saved {
    /// The report of the forward pass.
    pub fn report(&self) -> Report {
        self.report
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.rows.u.bytes() + self.rows.z.bytes() + self.rows.rho.bytes()
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        let rows = std::mem::take(&mut self.rows);
        self.pool.0.lock().unwrap_or_else(PoisonError::into_inner).push(rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_passes_return_their_memory() {
        let (pool, other) = (Arc::new(SavedBufferPool::default()), Arc::new(SavedBufferPool::default()));
        let mut rows = pool.take();
        rows.u.ensure(100).expect("memory");
        let at = rows.u.as_ptr();
        let saved = pool.saved(Report::default(), rows);
        assert!(pool.take().u.is_empty(), "memory in use is not handed out");
        assert_eq!((pool.check(&saved), other.check(&saved), saved.bytes()), (Ok(()), Err(Error::Saved), 400));
        drop(saved);
        assert_eq!(pool.take().u.as_ptr(), at);
    }
}
