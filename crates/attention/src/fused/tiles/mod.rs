//! Tiles of scores, forward and backward.

pub(in crate::fused) mod backward;
pub(in crate::fused) mod forward;
pub(in crate::fused) mod join;

/// Consecutive parts of these lengths.
fn split<const N: usize>(mut memory: &mut [f32], lens: [usize; N]) -> [&mut [f32]; N] {
    lens.map(|len| memory.split_off_mut(..len).expect("enough memory"))
}
