//! Attention as a small algebra of parts, computed exactly and fast.
//!
//! ```text
//! y_t = P_t · N( O_t · (1/D_t) · Σ_{s ≤ t}  M_ts · w(x_ts) · I_s · v_s ),   x_ts = scale · q_t·k_s
//! ```
//!
//! A [`Variant`] is one choice of parts. [`Reference`] computes it plainly, in float64 where asked; [`Fused`] computes
//! it in tiles with vector instructions, float32, memory linear in T, bit-identical for any number of threads. Both
//! are an [`Attention`].
//!
//! Legend: B batch, T positions, H heads, G kv heads, d head dimension of q and k, e of v; q, k, v, y are [B, T, heads, dimension].

mod buffer;
pub mod combinatorics;
mod engine;
mod epilogue;
mod error;
mod fused;
mod kernels;
mod layer;
pub mod naive;
pub mod parts;
mod real;
pub mod state;
mod task_scratch;
mod tensors;
pub mod variant;

pub use buffer::Buffer;
pub use engine::{Attention, Saved};
pub use error::{Error, TextError, nearest};
pub use fused::{Fused, FusedOptions, Mode, Scratch, break_even};
pub use kernels::basis::{Basis, MAX_ROWS};
pub use kernels::score_rows::Rescale;
pub use kernels::simd;
pub use layer::{ExtraSpec, Init, Layer, LayerSizes, Memory, Source};
pub use naive::Reference;
pub use naive::recurrent::Recurrent;
pub use naive::view::View;
pub use parts::decay::Decay;
pub use parts::denominator::Denominator;
pub use parts::kernel::Kernel;
pub use parts::kernel::feature::Map;
pub use parts::norm::Norm;
pub use parts::rope::{Rope, RopeScaling};
pub use real::{Real, relative_rms};
pub use state::{State, Truncation};
pub use tensors::{Extra, Extras, Grads, Inputs, Nonpositive, Report, Rows, Shape};
pub use variant::{Variant, presets};
