//! The options of a decoder.

use termwise_attention::Mode;

use crate::weights::FloatType;

/// The memory that a decoder keeps of the tokens that it has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryPolicy {
    /// A recurrent state of constant size for kernels with a finite feature map and no clamp, a KV cache for all others.
    #[default]
    Auto,
    /// Truncates every exp kernel to its Taylor series up to this order, which has a finite feature map.
    Truncate(usize),
    /// A KV cache until it is larger, in bytes, than the recurrent state of the series up to this order. The cache is then compressed into that
    /// state. Each layer of each row switches separately, after a decoded token or a prefill chunk. Layers with a window, a clamp or a cap never
    /// switch. [`super::Decoder::new`] fails if no layer can switch.
    SwitchToState(usize),
}

/// Options of a [`super::Decoder`].
///
/// ```
/// use termwise_model::decode::{DecoderOptions, MemoryPolicy};
///
/// let options = DecoderOptions::default().rows(4).memory(MemoryPolicy::Truncate(2));
/// assert_eq!((options.rows, options.prefill_chunk), (4, 256));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecoderOptions {
    /// B, sequences decoded in parallel.
    pub rows: usize,
    /// Prompt tokens per prefill chunk. Buffers grow with it.
    pub prefill_chunk: usize,
    /// The evaluation mode of attention within a prefill chunk.
    pub mode: Mode,
    /// The memory of past tokens.
    pub memory: MemoryPolicy,
    /// The type of the weights in memory: float32, or bfloat16, which halves the bytes read per token and rounds matrices to 8 bits of precision.
    pub weights: FloatType,
    /// Whether a KV cache may grow beyond the context length of the model.
    pub beyond_context: bool,
}

/// One row, prefill chunks of 256 tokens, float32 weights, no decoding beyond the context length.
impl Default for DecoderOptions {
    fn default() -> DecoderOptions {
        DecoderOptions {
            rows: 1,
            prefill_chunk: 256,
            mode: Mode::Auto,
            memory: MemoryPolicy::Auto,
            weights: FloatType::F32,
            beyond_context: false,
        }
    }
}

setters!(DecoderOptions { rows: usize, prefill_chunk: usize, mode: Mode, memory: MemoryPolicy, weights: FloatType, beyond_context: bool });
