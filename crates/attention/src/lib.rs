//! Attention as an algebra of parts, with a float64 reference and a fast float32 engine.
//!
//! ```text
//! y_t = P_t ⊙ N( O_t · (1/D_t) · Σ_{s visible from t}  M_ts · w_c(x_ts) · I_s · u_s ),   x_ts = cap( scale · q_t·k_s ),   u = v, or by a write rule
//! ```
//!
//! A [`Variant`] is one choice of parts, parsed from a variant string such as `taylor=0..4 norm=l2`. A [`Layer`] is a validated plan: heads with their
//! variants, sizes, RoPE, auxiliary inputs, and the heads that share keys and states. It builds the engines:
//!
//! ```text
//!                  ┌─ layer.fused(B, T)         tiles with vector instructions, float32, memory linear in T        ┐
//! Layer ───────────┼─ layer.naive::<f64>(B, T)  the formula in plain loops: the reference                          ┴─ Attention
//!                  └─ layer.state(B)            recurrent state or KV cache: one token at a time
//!
//! a batch   Inputs { q, k, v, aux } ─ forward ─► y, Saved       Inputs, Saved, dy ─ backward ─► Grads
//!           check ─► gates, prepare ─► tiles or chunks ─► epilogue          the same stages in reverse
//!
//! decoding  Inputs (one position) ─ State::step ─► y
//!           check ─► gates, prepare ─► for each state group: read and update its recurrent state, or its cache ─► epilogue
//!
//! a prompt  Inputs ─ Fused::extend(State) ─► y: the stages of a batch, from the state and into it
//! ```
//!
//! Start with [`naive::softmax_as_rnn`]: softmax attention as a sum of recurrent networks, one per Taylor order, in plain loops. The example
//! `softmax_as_rnn` prints its parallel and recurrent forms next to each other.
//!
//! Results of the fused engine and of states are bit-identical for any number of threads on one instruction set.
//!
//! Legend: B batch, T positions, H heads, G kv heads, d head dimension of q and k, e of v; q, k, v, y are [B, T, heads, dimension]. See also
//! `docs/glossary.md`. The engine is described in `docs/engine.md`.
#![forbid(unsafe_code)]

mod engine;
mod epilogue;
mod error;
mod fused;
mod layer;
pub mod naive;
pub mod operations;
pub mod parts;
pub mod state;
mod tensors;
pub mod variant;

pub use engine::{Attention, Saved};
pub use error::{Error, TextError};
pub use fused::{Fused, FusedOptions, Mode, Scratch, break_even};
pub use layer::{AuxSource, AuxSpec, Init, Layer, LayerSizes, StateKind};
pub use naive::Reference;
pub use naive::view::{ScaledSums, View};
pub use parts::decay::Decay;
pub use parts::denominator::Denominator;
pub use parts::distance::KeyRange;
pub use parts::kernel::Kernel;
pub use parts::kernel::feature::Map;
pub use parts::norm::Norm;
pub use parts::qk_norm::QkNorm;
pub use parts::rope::{Rope, RopeScaling};
pub use state::{State, Truncation};
pub use tensors::{AuxKind, AuxTensor, AuxTensors, Grads, Inputs, Nonpositive, Report, Rows, Shape};
pub use termwise_kernels::basis::{Basis, MAX_ROWS};
pub use termwise_kernels::real::relative_rms;
pub use termwise_kernels::score_rows::Rescale;
pub use termwise_kernels::{Buffer, Real, combinatorics, simd};
pub use variant::{ScoreFn, Variant, presets};
