//! The recurrent form: attention as a linear RNN with constant state
//!
//! ```text
//! w(x_ts) = Σ_n a_n·x^n/n! = Σ_α Q_α(q_t)·K_α(k_s),   K_α = k^α,   Q_α = a_n·scale^n/α! · q^α,   n = |α|
//! H_t = m_t·H_{t−1} + K(k_t)·(I_t·κ_t·v_t)ᵀ           z_t = m_t·z_{t−1} + K(k_t),              m_t = exp(c_t − c_{t−1})
//! y_t = P_t · N( O_t · Q(q_t)ᵀ·H_t / D_t ),            D_t from Q(q_t)ᵀ·z_t, or S_t, or 1
//! ```
//!
//! Scales and coefficients act on the query's side, so that one state serves every choice of them.
//!
//! [`crate::naive::Recurrent`] computes the form plainly, with gradients, in float64 or float32; [`State`] is what a
//! layer keeps between tokens, and takes one token at a time with vector instructions. Kernels without a finite map keep a cache
//! of keys and values in the same type. [`State::compress`] compresses a cache into moments, [`Truncation`] bounds what that costs exp, and
//! [`State::save`] and [`State::load`] keep states in files.
//!
//! Legend: α a multi-index, N rows (monomials), H [N, e] and z [N] the moments, M_ts = exp(c_t − c_s) the decay, κ the weight of the `position`
//! denominator, ep e in whole vectors.

pub(crate) mod cache;
mod compress;
mod file;
pub(crate) mod memory;
pub(crate) mod pool;
pub(crate) mod pool_step;
mod select;
mod step;
mod step_state;
mod token;
mod truncate;

pub use crate::state::memory::State;
pub use crate::state::truncate::Truncation;
