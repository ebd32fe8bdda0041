//! Tiles of scores, forward and backward.

pub(in crate::fused) mod backward;
pub(in crate::fused) mod forward;
pub(in crate::fused) mod join;
