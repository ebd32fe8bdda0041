//! The parts of the formula, one file each.
//!
//! ```text
//! y_t = P_t ⊙ N( O_t · (1/D_t) · Σ_{s visible from t}  M_ts · w_c(x_ts) · I_s · u_s ),   x_ts = cap(scale · φ(q'_t)·φ(k'_s))
//! q', k' = A·rope(norm(conv(·))),   u_t = v_t or β_t·(v_t − Σ_{s<t} M_ts·w(x̂_ts)·u_s),   c the branch of key s: near or far
//! ```
//!
//! A slot (`kernel`, `denominator`, `gate`, `decay`, `norm`, `qk_norm`) is an enum over its parts. To add a part: write its file,
//! then add it to the list of its slot; variant strings, the table of `termwise variants` and the tests follow.

pub mod slot;

pub mod decay;
pub mod denominator;
pub mod gate;
pub mod kernel;
pub mod norm;
pub mod qk_norm;

pub mod cap;
pub mod conv;
pub mod distance;
pub mod heavy_hitters;
pub mod quantize;
pub mod rope;
pub mod write;

#[cfg(test)]
pub(crate) mod testing;
