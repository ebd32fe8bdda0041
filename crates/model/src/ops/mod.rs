//! The operations of a transformer outside attention, each with its `forward` and `backward` function.
//!
//! Dimensions: B batch size, T sequence length, M = B·T rows, C hidden size, I intermediate size, V vocabulary size, H query heads,
//! G key-value heads, d head dimension. Tensors are row-major float32.
//!
//! Results do not depend on the number of threads. Work is split into chunks whose size depends only on the tensor shapes, each chunk writes
//! its own part of the output, and sums over chunks are taken in order.

pub(crate) mod activation;
pub mod chunks;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
pub(crate) mod interleave;
pub(crate) mod layernorm;
pub mod linear;
pub(crate) mod lm_head;
pub(crate) mod products;
pub(crate) mod rmsnorm;
#[cfg(test)]
pub(crate) mod testing;

pub use termwise_attention::Buffer;

use crate::error::{Error, Result};

/// The input of a norm, as its backward pass reads it.
#[derive(Clone, Copy)]
pub(crate) struct NormInput<'a> {
    /// [M, C]
    pub x: &'a [f32],
    /// r of each row: 1/rms for RMSNorm, 1/σ for LayerNorm. [M]
    pub inverse: &'a [f32],
}

/// A zeroed buffer of `rows`·`width` values. Fails if the size overflows or the allocation fails.
pub(crate) fn zeros(what: &str, rows: usize, width: usize) -> Result<Buffer> {
    let too_large = || Error::TooLarge { what: what.into() };
    let len = rows.checked_mul(width).ok_or_else(too_large)?;
    Buffer::zeros(len).map_err(|_| too_large())
}
