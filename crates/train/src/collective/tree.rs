//! The order in which micro-batch gradients are added: pairwise, in a binary tree that depends only on the number of leaves.

use std::ops::Range;

use rayon::prelude::*;
use termwise_attention::simd::{Simd, Task, dispatch};
use termwise_model::ops::chunks::CHUNK_LEN;

/// A binary tree over this many leaves. The size of the left subtree is a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tree {
    /// At least 1.
    pub leaves: usize,
}

impl Tree {
    /// The leaves of a rank: contiguous and as even as possible. A rank beyond the number of leaves has none.
    pub fn share(self, rank: usize, size: usize) -> Range<usize> {
        rank * self.leaves / size..(rank + 1) * self.leaves / size
    }

    /// The maximal subtrees within these leaves, in order.
    pub fn nodes(self, leaves: Range<usize>) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        within(0..self.leaves, &leaves, &mut found);
        found
    }

    /// Adds the vectors of these nodes, which together cover all leaves, each with `len` values in `values`, in order. Returns the index of
    /// the vector that contains the sum.
    pub fn combine(self, nodes: &[Range<usize>], values: &mut [f32], len: usize) -> usize {
        combine(0..self.leaves, nodes, values, len)
    }
}

/// The first leaf of the right subtree.
pub(crate) fn middle(node: &Range<usize>) -> usize {
    node.start + node.len().next_power_of_two() / 2
}

/// Number of vectors needed at a time to add the leaves of a node sequentially.
pub(crate) fn depth(node: &Range<usize>) -> usize {
    if node.len() <= 1 { 1 } else { depth(&(node.start..middle(node))).max(1 + depth(&(middle(node)..node.end))) }
}

fn within(node: Range<usize>, leaves: &Range<usize>, found: &mut Vec<Range<usize>>) {
    if node.start >= leaves.start && node.end <= leaves.end {
        found.push(node);
    } else if node.start < leaves.end && leaves.start < node.end {
        let middle = middle(&node);
        within(node.start..middle, leaves, found);
        within(middle..node.end, leaves, found);
    }
}

fn combine(node: Range<usize>, nodes: &[Range<usize>], values: &mut [f32], len: usize) -> usize {
    if let Some(slot) = nodes.iter().position(|other| *other == node) {
        return slot;
    }
    let middle = middle(&node);
    let left = combine(node.start..middle, nodes, values, len);
    let right = combine(middle..node.end, nodes, values, len);
    // Slots are in leaf order.
    let (front, back) = values.split_at_mut(right * len);
    add(&mut front[left * len..][..len], &back[..len]);
    left
}

/// x ← x + y
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    x.par_chunks_mut(CHUNK_LEN).zip(y.par_chunks(CHUNK_LEN)).for_each(|(x, y)| dispatch(Add(x, y)));
}

struct Add<'a>(&'a mut [f32], &'a [f32]);

impl Task for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for i in (0..self.0.len()).step_by(S::LANES) {
            let sum = simd.add(simd.load_at(self.0, i), simd.load_at(self.1, i));
            simd.store_at(self.0, i, sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a string, which shows the order of additions.
    fn text(node: Range<usize>) -> String {
        match node.len() {
            1 => node.start.to_string(),
            _ => format!("({}+{})", text(node.start..middle(&node)), text(middle(&node)..node.end)),
        }
    }

    #[test]
    fn leaves_are_added_in_pairs() {
        assert_eq!(text(0..1), "0");
        assert_eq!(text(0..4), "((0+1)+(2+3))");
        assert_eq!(text(0..6), "(((0+1)+(2+3))+(4+5))");
        assert_eq!([1, 2, 4, 8, 6, 7].map(|n| depth(&(0..n))), [1, 2, 3, 4, 3, 3]);
    }

    #[test]
    fn shares_cover_every_leaf_once_and_powers_of_two_are_single_nodes() {
        let tree = Tree { leaves: 8 };
        for size in [1, 2, 4, 8] {
            for rank in 0..size {
                assert_eq!(tree.nodes(tree.share(rank, size)), [tree.share(rank, size)]);
            }
        }
        assert_eq!([0, 1, 2].map(|rank| tree.share(rank, 3)), [0..2, 2..5, 5..8]);
        assert_eq!(tree.nodes(2..5), [2..4, 4..5]);
        for (leaves, size) in [(8, 3), (6, 4), (12, 5), (3, 5), (1, 2)] {
            let tree = Tree { leaves };
            let all: Vec<usize> = (0..size).flat_map(|rank| tree.nodes(tree.share(rank, size))).flatten().collect();
            assert_eq!(all, (0..leaves).collect::<Vec<_>>(), "{leaves} leaves, {size} ranks");
        }
    }

    #[test]
    fn the_sum_is_bit_identical_for_any_number_of_ranks() {
        let value = |leaf: usize, i: usize| ((leaf * 37 + i * 11) % 101) as f32 / 7.0 - 5.0;
        let len = 21;
        for leaves in [1, 2, 6, 8, 12] {
            let tree = Tree { leaves };
            let sum = |size: usize| -> Vec<u32> {
                let nodes: Vec<_> = (0..size).flat_map(|rank| tree.nodes(tree.share(rank, size))).collect();
                let mut values = Vec::new();
                for node in &nodes {
                    let each: Vec<Range<usize>> = node.clone().map(|leaf| leaf..leaf + 1).collect();
                    let mut own: Vec<f32> = node.clone().flat_map(|leaf| (0..len).map(move |i| value(leaf, i))).collect();
                    let slot = combine(node.clone(), &each, &mut own, len);
                    values.extend_from_slice(&own[slot * len..][..len]);
                }
                let slot = tree.combine(&nodes, &mut values, len);
                values[slot * len..][..len].iter().map(|x| x.to_bits()).collect()
            };
            let one = sum(1);
            for size in [2, 3, 4, 5, 8] {
                assert_eq!(sum(size), one, "{leaves} leaves, {size} ranks");
            }
        }
    }
}
