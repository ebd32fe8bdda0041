//! Weights in safetensors files: a single file, or shards with an index.
//!
//! - Tensors are read one by one into float32 buffers of the caller. Files are not memory-mapped.
//! - The header is validated before any tensor is read, and no allocation depends on an unchecked length.
//! - NaN and infinite values are errors when reading and when writing.
//! - Files are written to a temporary name and renamed when they are complete on disk.

mod header;
mod read;
mod write;

use std::fmt;
use std::str::FromStr;

pub use read::{Checkpoint, TensorInfo};
pub use safetensors::Dtype;
pub use write::{NamedTensor, WriteOptions, write, write_file};

/// Name of a file with all weights.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the index that maps tensors to shards.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// A floating-point type of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum FloatType {
    /// 32 bits, as in memory.
    #[default]
    F32,
    /// 16 bits, 11 bits of precision, up to 65504; rounded to nearest even.
    F16,
    /// 16 bits, 8 bits of precision, the range of float32; rounded to nearest even.
    Bf16,
}

impl FloatType {
    /// Every type.
    pub const ALL: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::Bf16];

    /// Bytes per value.
    pub fn bytes(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 | FloatType::Bf16 => 2,
        }
    }

    /// The name in configurations.
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

/// Parses the name in configurations, or the short form `f32`, `f16`, `bf16`.
impl FromStr for FloatType {
    type Err = String;

    fn from_str(text: &str) -> Result<FloatType, String> {
        match text {
            "float32" | "f32" => Ok(FloatType::F32),
            "float16" | "f16" => Ok(FloatType::F16),
            "bfloat16" | "bf16" => Ok(FloatType::Bf16),
            other => Err(format!("unknown weight type `{other}`; use float32, float16 or bfloat16")),
        }
    }
}

/// The multi-dimensional index of a row-major offset.
pub(crate) fn unravel(mut place: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (slot, &n) in index.iter_mut().zip(shape).rev() {
        *slot = place % n.max(1);
        place /= n.max(1);
    }
    index
}
