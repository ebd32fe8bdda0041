//! Errors of this crate.

/// A size that cannot be allocated or computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system has no memory for an array.
    #[error("no memory for {values} values of {bytes} bytes each: make batch, time, heads or the orders of a state smaller")]
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
