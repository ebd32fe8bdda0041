//! The recurrent form: attention as a linear RNN with constant state
//!
//! ```text
//! w(x_ts) = Σ_n a_n·x^n/n! = Σ_α Q_α(q_t)·K_α(k_s),   K_α = k^α,   Q_α = a_n·scale^n/α! · q^α,   n = |α|
//! H_t = m_t·H_{t−1} + K(k_t)·(I_t·κ_t·v_t)ᵀ           z_t = m_t·z_{t−1} + K(k_t),              m_t = exp(c_t − c_{t−1})
//! y_t = P_t · N( O_t · Q(q_t)ᵀ·H_t / D_t ),            D_t from Q(q_t)ᵀ·z_t, or S_t, or 1
//! ```
//!
//! Scales and coefficients act on the query's side, so one state serves every choice of them.
//!
//! [`crate::naive::recurrence`] computes the recurrence of one head in plain float64 loops. [`State`] is the state of a layer between tokens; it processes
//! one token at a time with vector instructions. Kernels without a finite feature map have a KV cache in the same type, windows a ring buffer.
//! [`State::compress`] compresses a cache into a recurrent state, [`Truncation`] bounds the error of that for exp, and [`State::save`] and
//! [`State::load`] store states in files.
//!
//! Legend: α a multi-index, N rows (monomials), H [N, e] and z [N] the recurrent state, M_ts = exp(c_t − c_s) the decay, κ the weight of the `position`
//! denominator, ep e in whole vectors.

pub(crate) mod block;
mod compress;
mod file;
pub(crate) mod group_context;
pub(crate) mod kv_cache;
pub(crate) mod memory;
mod recurrent_step;
pub(crate) mod ring;
pub(crate) mod ring_step;
mod select;
pub(crate) mod step;
mod token;
mod truncate;

pub use crate::state::memory::State;
pub use crate::state::truncate::Truncation;
