//! Memory for the kernels: float32 on cache-line boundaries, grown once and reused.

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A row of float32 that starts on a cache line, so that no vector load straddles two.
#[derive(Default)]
pub struct Buffer {
    lines: Vec<Line>,
    len: usize,
}

impl Buffer {
    /// Makes room for `len` values; what was there may be lost. New memory is zero.
    pub fn ensure(&mut self, len: usize) {
        let lines = len.div_ceil(16);
        if lines > self.lines.len() {
            self.lines = vec![Line([0.0; 16]); lines];
        }
        self.len = len;
    }

    /// The values.
    pub fn as_slice(&self) -> &[f32] {
        // SAFETY: lines are plain arrays of 16 float32 without padding and hold at least len values.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    /// The values, to be changed.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }
}

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
