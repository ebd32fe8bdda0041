//! The operations of a Llama outside attention, each with `forward` and `backward` side by side.
//!
//! Legend: B batch, T positions, M = B·T rows, C width, I width of the MLP, V vocabulary, H heads, G kv heads, d head dimension.
//! Tensors are row-major float32.
//!
//! Results do not depend on the number of threads: work is cut into pieces whose size depends on the shapes alone, every
//! piece writes its own part of the output, and sums over pieces are taken in the order of the pieces.

pub mod cross_entropy;
pub mod embedding;
pub mod few;
pub mod head;
pub mod linear;
pub mod rmsnorm;
pub mod swiglu;
#[cfg(test)]
pub(crate) mod testing;
pub mod vector;

pub use termwise_attention::Buffer;
