//! One slice for several threads.

/// A mutable slice that several threads write to at places that do not overlap.
#[derive(Clone, Copy)]
pub struct Shared<T> {
    at: *mut T,
    len: usize,
}

// SAFETY: every use goes through `slice`, whose callers promise disjoint places.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Shares a slice for as long as its borrow lasts; the caller keeps it alive until all tasks are done.
    pub fn new(slice: &mut [T]) -> Shared<T> {
        Shared { at: slice.as_mut_ptr(), len: slice.len() }
    }

    /// `len` values from `start` on.
    ///
    /// # Safety
    /// No other live reference may cover any of them, and the shared slice must still be borrowed.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start + len <= self.len, "shared slice of {} asked for {start}..{}", self.len, start + len);
        // SAFETY: within bounds, and disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(start), len) }
    }
}
