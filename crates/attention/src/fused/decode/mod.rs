//! Calls that continue from a state, and sequential evaluation.

mod prefill;
mod ring_to_contiguous;
pub(in crate::fused) mod sequential;
