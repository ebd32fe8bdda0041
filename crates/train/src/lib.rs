//! Training of Llamas: the optimizer and the norm of gradients.

pub mod adamw;
pub mod norm;
#[cfg(test)]
mod testing;

pub use adamw::{AdamW, AdamWConfig};
pub use norm::{clip, gradient_norm};
