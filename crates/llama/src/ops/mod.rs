//! The operations of a Llama outside attention, each with `forward` and `backward` side by side.
//!
//! Legend: B batch, T positions, M = B·T rows, C width, I width of the MLP, V vocabulary, H heads, G kv heads, d head dimension.
//! Tensors are row-major float32.
//!
//! Results do not depend on the number of threads: work is cut into pieces whose size depends on the shapes alone, every
//! piece writes its own part of the output, and sums over pieces are taken in the order of the pieces.

pub(crate) mod activation;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
pub(crate) mod interleave;
pub(crate) mod layernorm;
pub mod linear;
pub(crate) mod lm_head;
pub mod pieces;
pub(crate) mod rmsnorm;
#[cfg(test)]
pub(crate) mod testing;

pub use termwise_attention::Buffer;

use crate::error::{Error, Result};

/// `rows`·`width` zeros; an error where they cannot be counted or the system has no room for them.
pub(crate) fn zeros(what: &str, rows: usize, width: usize) -> Result<Buffer> {
    let too_large = || Error::TooLarge { what: what.into() };
    let len = rows.checked_mul(width).ok_or_else(too_large)?;
    Buffer::zeros(len).map_err(|_| too_large())
}
