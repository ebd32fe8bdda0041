//! Errors of this crate.

/// A size that cannot be allocated or computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system has no memory for an array.
    #[error("cannot allocate {values} values of {bytes} bytes each: reduce batch, time, heads or the highest order")]
    Memory {
        /// Number of values.
        values: usize,
        /// Bytes of each value.
        bytes: usize,
    },
    /// A monomial basis is empty or too large.
    #[error("{0}")]
    Basis(String),
}
