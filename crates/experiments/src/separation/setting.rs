//! Sizes and constants of a pair of data sets.

use serde::{Deserialize, Serialize};

use crate::Error;

/// n is represented in float64.
const MAX_N: u64 = 1 << 53;
const MAX_D: usize = 1 << 16;
const MAX_M: usize = 1 << 24;
/// Above this, logarithms of powers of 1 + a are inaccurate in float64.
const MAX_A: f64 = 1e6;

/// D_0, D_1 and the readout.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// Rows.
    pub n: u64,
    /// Columns: one for the spike, d − 2 for the identity, one that is constant.
    pub d: usize,
    /// Vectors y_i of the readout.
    pub m: usize,
    /// The spike in D_0.
    pub a0: f64,
    /// The spike in D_1.
    pub a1: f64,
    /// Scale of the identity.
    pub b: f64,
    /// Scale of the constant column; b + c = 1.
    pub c: f64,
    /// Whether the queries' row sums are all √ln n, instead of those of the data.
    pub cross: bool,
}

/// m = max(⌈ln(n/0.01)⌉, 15).
pub fn default_m(n: u64) -> usize {
    ((n as f64 / 0.01).ln().ceil() as usize).max(15)
}

impl Setting {
    /// The setting of the reference figures at this n: a_0 = 0.01, a_1 = 0.7, b = 0.1, c = 0.9, d = 12, m by [`default_m`], self-attention.
    pub fn of(n: u64) -> Setting {
        Setting { n, d: 12, m: default_m(n), a0: 0.01, a1: 0.7, b: 0.1, c: 0.9, cross: false }
    }

    /// √ln n.
    pub fn length(&self) -> f64 {
        (self.n as f64).ln().sqrt()
    }

    /// Checks that the values are valid.
    pub fn check(&self) -> Result<(), Error> {
        let Setting { n, d, m, a0, a1, b, c, .. } = *self;
        let invalid_size = |text: String| Err(Error::Sizes(text));
        if !(2..=MAX_N).contains(&n) {
            return invalid_size(format!("n = {n} is invalid: scores are multiples of ln n, so n must be 2 or more, and at most 2^53"));
        }
        if !(3..=MAX_D).contains(&d) {
            return invalid_size(format!("d = {d} is invalid: a spike, an identity of size d − 2 and a constant need d from 3 to {MAX_D}"));
        }
        if !(1..=MAX_M).contains(&m) {
            return invalid_size(format!("m = {m} is invalid: the readout has from 1 to {MAX_M} vectors y_i"));
        }
        if !(0.0..0.1).contains(&a0) {
            return invalid_size(format!("a_0 = {a0} is invalid: the spike of D_0 must be from 0 to below 0.1"));
        }
        if !(a1 > a0 && a1 <= MAX_A) {
            return invalid_size(format!("a_1 = {a1} is invalid: the spike of D_1 must be above a_0 = {a0} and at most {MAX_A}"));
        }
        if !(b >= 0.0 && c >= 0.0) {
            return invalid_size(format!("b = {b} and c = {c} are invalid: both must be nonnegative"));
        }
        // Tolerance for decimal fractions that sum to one.
        if (b + c - 1.0).abs() > 1e-12 {
            return invalid_size(format!("b = {b} and c = {c} sum to {}, but b + c = 1 is required; give only one of them", b + c));
        }
        Ok(())
    }
}
