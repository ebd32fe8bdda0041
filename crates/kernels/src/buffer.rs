//! Large float32 arrays with page alignment, in huge pages if the system provides them.

use std::ops::{Deref, DerefMut};

use crate::Error;

/// Resizes a vector to `len` values; new values are zero.
///
/// # Errors
/// If the system has no memory for them.
pub fn resize<T: Clone + Default>(values: &mut Vec<T>, len: usize) -> Result<(), Error> {
    let more = len.saturating_sub(values.len());
    values.try_reserve_exact(more).map_err(|_| Error::Memory { values: len, bytes: size_of::<T>() })?;
    values.resize(len, T::default());
    Ok(())
}

/// An array of float32 values, initially zero, aligned to at least 64 bytes. The system allocates a page when it is first written.
///
/// Column accesses of matrix products and tiles of attention touch many pages. With huge pages their address translations stay in the TLB.
#[derive(Default)]
pub struct Buffer {
    /// None if there are no values: a mapping of length zero is an error.
    pages: Option<memmap2::MmapMut>,
    len: usize,
}

impl Buffer {
    /// `len` zeros.
    ///
    /// # Errors
    /// If the system has no memory for them.
    pub fn zeros(len: usize) -> Result<Buffer, Error> {
        let missing = || Error::Memory { values: len, bytes: size_of::<f32>() };
        let bytes = len.checked_mul(size_of::<f32>()).filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(missing)?;
        if bytes == 0 {
            return Ok(Buffer::default());
        }
        let pages = memmap2::MmapMut::map_anon(bytes).map_err(|_| missing())?;
        #[cfg(target_os = "linux")]
        // A hint: a system without huge pages rejects it.
        let _ = pages.advise(memmap2::Advice::HugePage);
        Ok(Buffer { pages: Some(pages), len })
    }

    /// Sets the length to `len`. Reallocates if the capacity is too small; all values are then zero.
    ///
    /// # Errors
    /// If the system has no memory for them.
    pub fn ensure(&mut self, len: usize) -> Result<(), Error> {
        if len > self.bytes() / size_of::<f32>() {
            *self = Buffer::zeros(len)?;
        }
        self.len = len;
        Ok(())
    }

    /// The values.
    pub fn as_slice(&self) -> &[f32] {
        self
    }

    /// The values, mutable.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        self
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.len())
    }
}

impl AsRef<[f32]> for Buffer {
    fn as_ref(&self) -> &[f32] {
        self
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.pages {
            // SAFETY: the mapping has room for `len` float32 values, is page-aligned and initialised, and every bit pattern is a valid float32.
            Some(pages) => unsafe { std::slice::from_raw_parts(pages.as_ptr().cast(), self.len) },
            None => &[],
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.pages {
            // SAFETY: as in `deref`, and the mapping is borrowed mutably.
            Some(pages) => unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), self.len) },
            None => &mut [],
        }
    }
}

impl Clone for Buffer {
    /// # Panics
    /// If the system has no memory left.
    fn clone(&self) -> Buffer {
        let mut copy = Buffer::zeros(self.len).unwrap_or_else(|error| panic!("{error}"));
        copy.copy_from_slice(self);
        copy
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} float32 values)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zero_and_aligned_and_clones_are_independent() {
        let mut a = Buffer::zeros(1000).expect("memory");
        assert!(a.iter().all(|&x| x == 0.0) && (a.as_ptr() as usize).is_multiple_of(64) && a.len() == 1000);
        a[999] = 2.0;
        let b = a.clone();
        a[999] = 3.0;
        assert_eq!(b[999], 2.0);
        assert!(Buffer::zeros(0).expect("nothing").is_empty());
        a.ensure(10).expect("memory");
        assert_eq!((a.len(), a.bytes()), (10, 4000));
        a.ensure(2000).expect("memory");
        assert!(a.len() == 2000 && a.iter().all(|&x| x == 0.0));
    }

    #[test]
    fn too_large_sizes_are_errors() {
        for len in [usize::MAX, (1 << 62) + 1, 1 << 61, 1 << 60] {
            assert_eq!(Buffer::zeros(len).err(), Some(Error::Memory { values: len, bytes: 4 }));
            assert!(Buffer::default().ensure(len).is_err() && resize(&mut vec![0.0f64], len).is_err());
        }
    }
}
