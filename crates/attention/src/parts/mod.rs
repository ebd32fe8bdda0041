//! The parts of the formula, one file each.
//!
//! ```text
//! y_t = P_t · N( O_t · (1/D_t) · Σ_{s visible from t}  M_ts · w(x_ts) · I_s · v_s ),   x_ts = scale · φ(q_t)·φ(k_s)
//! ```
//!
//! A slot (`kernel`, `denominator`, `gate`, `decay`, `norm`) is an enum over its parts. To add a part: write its file,
//! then add it to the list of its slot; the text form, the table of `termwise variants` and the tests follow.

pub mod slot;

pub mod kernel;

pub mod exp;
pub mod feature;
pub mod power;
pub mod taylor;

pub mod denominator;

pub mod length;
pub mod no_denominator;
pub mod position;
pub mod sum;

pub mod gate;

pub mod cumulative;
pub mod shared;
pub mod sigmoid;

pub mod decay;

pub mod linear_decay;
pub mod softplus_decay;

pub mod norm;

pub mod l2;
pub mod layer;
pub mod no_norm;
pub mod rms;
pub mod scaled_l2;

pub mod conv;
pub mod rope;

#[cfg(test)]
pub(crate) mod testing;
