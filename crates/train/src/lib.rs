//! Training of Llamas: the optimizer and the norm of gradients.

pub mod adamw;
pub mod data;
pub mod error;
pub mod norm;
#[cfg(test)]
mod testing;

pub use adamw::{AdamW, AdamWConfig};
pub use error::{Error, Result};
pub use norm::{clip, gradient_norm};
