//! The parts of the formula, one file each.
//!
//! ```text
//! y_t = P_t · N( O_t · (1/D_t) · Σ_{s visible from t}  M_ts · w(x_ts) · I_s · v_s ),   x_ts = scale · φ(q_t)·φ(k_s)
//! ```
//!
//! A slot (`kernel`, `denominator`, `gate`, `decay`, `norm`) is an enum over its parts. To add a part: write its file,
//! then add it to the list of its slot; the text form, the table of `termwise variants` and the tests follow.

pub mod slot;

pub mod decay;
pub mod denominator;
pub mod gate;
pub mod kernel;
pub mod norm;

pub mod conv;
pub mod rope;

#[cfg(test)]
pub(crate) mod testing;
