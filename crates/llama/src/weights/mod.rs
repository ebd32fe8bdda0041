//! Weights in safetensors files: one file, or shards with an index.
//!
//! Notable choices:
//! - files are read tensor by tensor into the caller's float32 buffers;
//! - a header is checked completely before any tensor is read, and nothing is allocated that a damaged length could blow up;
//! - a number that is not finite is an error on reading and on writing, never passed on;
//! - files are written tensor by tensor beside their destination and renamed once they are on the disk.

mod header;
mod read;
mod write;

use std::fmt;
use std::str::FromStr;

pub use read::{Checkpoint, TensorInfo};
pub use safetensors::Dtype;
pub use write::{Tensor, WriteOptions, write, write_file};

/// Name of the file that holds all weights.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the file that says which shard holds which tensor.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// A type in which weights can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum FloatType {
    /// 32 bits, exactly what is in memory.
    #[default]
    F32,
    /// 16 bits, 11 of precision, up to 65504; rounded to nearest even.
    F16,
    /// 16 bits, 8 of precision, the range of float32; rounded to nearest even.
    Bf16,
}

impl FloatType {
    /// Every type.
    pub const ALL: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::Bf16];

    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 | FloatType::Bf16 => 2,
        }
    }

    /// The name that configurations use.
    pub fn name(self) -> &'static str {
        match self {
            FloatType::F32 => "float32",
            FloatType::F16 => "float16",
            FloatType::Bf16 => "bfloat16",
        }
    }

    fn in_header(self) -> Dtype {
        match self {
            FloatType::F32 => Dtype::F32,
            FloatType::F16 => Dtype::F16,
            FloatType::Bf16 => Dtype::BF16,
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// By the name that configurations use, or the short `f32`, `f16`, `bf16`.
impl FromStr for FloatType {
    type Err = String;

    fn from_str(text: &str) -> Result<FloatType, String> {
        match text {
            "float32" | "f32" => Ok(FloatType::F32),
            "float16" | "f16" => Ok(FloatType::F16),
            "bfloat16" | "bf16" => Ok(FloatType::Bf16),
            other => Err(format!("`{other}` is not a type of weights; use float32, float16 or bfloat16")),
        }
    }
}

/// The index of the value at a place in row-major order.
pub(crate) fn unravel(mut place: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (slot, &n) in index.iter_mut().zip(shape).rev() {
        *slot = place % n.max(1);
        place /= n.max(1);
    }
    index
}
