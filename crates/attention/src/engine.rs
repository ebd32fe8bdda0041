//! What every engine that computes a batch is: forward, backward, and what passes from one to the other.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Buffer, Error, Grads, Inputs, Real, Report};

/// An attention ready to run on one shape: the naive and the fused engines have the same signature.
pub trait Attention<R: Real> {
    /// y [B, T, H, e] from the inputs; keeps nothing.
    fn infer(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Report, Error>;

    /// y [B, T, H, e] from the inputs, and what [`Attention::backward`] needs.
    fn forward(&mut self, inputs: &Inputs<R>, y: &mut [R]) -> Result<Saved, Error>;

    /// Adds the gradients of Σ y·dy to `grads`; `saved` is what `forward` of this engine returned for these inputs.
    fn backward(&mut self, inputs: &Inputs<R>, saved: &Saved, dy: &[R], grads: &mut Grads<R>) -> Result<(), Error>;
}

/// What a forward pass leaves for its backward pass: as many as one likes may wait at the same time. Memory goes back to the engine when
/// this is dropped, and serves its next forward pass.
#[derive(Debug)]
#[must_use = "a forward pass without a backward pass is `infer`, which keeps nothing"]
pub struct Saved {
    pub(crate) report: Report,
    pub(crate) rows: SavedRows,
    home: Arc<Home>,
}

/// The sums of every row: U [B, H, T, ep], z and ρ [B, H, T]. Empty where an engine computes them anew.
#[derive(Debug, Default)]
pub(crate) struct SavedRows {
    pub u: Buffer,
    pub z: Buffer,
    pub rho: Buffer,
    /// Boundaries of documents and lengths of rows in the pass; empty where it had none.
    partition: [Vec<usize>; 2],
}

impl SavedRows {
    /// Keeps how these inputs divide their rows.
    pub fn keep_partition<R: Real>(&mut self, inputs: &Inputs<R>) {
        for (own, given) in self.partition.iter_mut().zip(inputs.partition()) {
            own.clear();
            own.extend_from_slice(given);
        }
    }

    /// Refuses inputs that divide their rows in another way than those of the forward pass.
    pub fn check_partition<R: Real>(&self, inputs: &Inputs<R>) -> Result<(), Error> {
        if inputs.partition() == self.partition.each_ref().map(Vec::as_slice) { Ok(()) } else { Err(Error::SavedPartition) }
    }

    /// The sums of these of the B·T positions, of H heads; by head within them.
    pub fn part(&self, at: &Range<usize>, heads: usize) -> [&[f32]; 3] {
        [&self.u, &self.z, &self.rho].map(|x| {
            let row = x.len() / self.z.len().max(1) * heads;
            &x[at.start * row..at.end * row]
        })
    }

    /// The same, to be written.
    pub fn part_mut(&mut self, at: &Range<usize>, heads: usize) -> [&mut [f32]; 3] {
        let count = self.z.len().max(1);
        [&mut self.u, &mut self.z, &mut self.rho].map(|x| {
            let row = x.len() / count * heads;
            &mut x[at.start * row..at.end * row]
        })
    }
}

/// The memory of an engine for what it saves.
#[derive(Debug, Default)]
pub(crate) struct Home(Mutex<Vec<SavedRows>>);

impl Home {
    /// Memory that is free, or new.
    pub fn take(&self) -> SavedRows {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// What a pass saw and saved.
    pub fn saved(self: &Arc<Home>, report: Report, rows: SavedRows) -> Saved {
        Saved { report, rows, home: self.clone() }
    }

    /// Refuses what another engine saved.
    pub fn check(self: &Arc<Home>, saved: &Saved) -> Result<(), Error> {
        if Arc::ptr_eq(self, &saved.home) { Ok(()) } else { Err(Error::Saved) }
    }
}

impl Saved {
    /// What the forward pass saw.
    pub fn report(&self) -> Report {
        self.report
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.rows.u.bytes() + self.rows.z.bytes() + self.rows.rho.bytes()
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        let rows = std::mem::take(&mut self.rows);
        self.home.0.lock().unwrap_or_else(PoisonError::into_inner).push(rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_dropped_passes_is_used_again() {
        let (home, other) = (Arc::new(Home::default()), Arc::new(Home::default()));
        let mut rows = home.take();
        rows.u.ensure(100).expect("memory");
        let at = rows.u.as_ptr();
        let saved = home.saved(Report::default(), rows);
        assert!(home.take().u.is_empty(), "what is in use is not handed out");
        assert_eq!((home.check(&saved), other.check(&saved), saved.bytes()), (Ok(()), Err(Error::Saved), 400));
        drop(saved);
        assert_eq!(home.take().u.as_ptr(), at);
    }
}
