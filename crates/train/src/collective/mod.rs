//! Collective operations of several processes that train one model (data parallelism).
//!
//! Every process (rank) has all parameters and computes the gradient of some of a step's rows. [`Collective::sum`] adds the gradients
//! in the order of one fixed [`Tree`], so the sum has the same bytes for any number of ranks. Only rank 0 writes files.

#[cfg(feature = "mpi")]
pub mod mpi;
pub mod threads;
pub(crate) mod tree;

use std::fmt::Debug;
use std::ops::Range;

use crate::error::Result;
pub use tree::Tree;

/// Number of values summed at a time over all ranks: bounds the memory of a sum.
const BLOCK: usize = 1 << 22;

/// A group of ranks. Every rank makes the same calls in the same order. A call returns after all ranks have made it.
pub trait Collective: Debug + Send + Sync {
    /// Index of this rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// All-gather: the bytes of each rank, in rank order. For messages, not for gradients.
    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// All-gather of 64-bit words, in rank order. Floating-point values are passed as their bits.
    fn gather_words(&self, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
        let words = |bytes: Vec<u8>| bytes.as_chunks::<8>().0.iter().map(|&word| u64::from_le_bytes(word)).collect();
        Ok(self.gather(&bytes)?.into_iter().map(words).collect())
    }

    /// All-to-all: `out` contains the values for each rank, consecutive and with these lengths. `into` receives `expected` values from each rank.
    fn exchange(&self, out: &[f32], lengths: &[usize], into: &mut [f32], expected: &[usize]) -> Result<()>;

    /// All-gather in place: `values` contains the part of each rank, consecutive and with these lengths. All ranks receive all parts.
    fn spread(&self, values: &mut [f32], lengths: &[usize]) -> Result<()>;

    /// Terminates every rank immediately, after a failure that the others cannot detect. If ranks are threads, the next call of the others fails.
    fn abort(&self, exit: u8);

    /// Replaces the bytes on all ranks with those of rank 0.
    fn broadcast(&self, bytes: &mut Vec<u8>) -> Result<()> {
        let own = if self.rank() == 0 { std::mem::take(bytes) } else { Vec::new() };
        *bytes = self.gather(&own)?.swap_remove(0);
        Ok(())
    }

    /// Returns after every rank has called it.
    fn barrier(&self) -> Result<()> {
        self.gather(&[]).map(|_| ())
    }

    /// Whether any rank received a request to stop. All ranks then stop after the same step.
    fn agree(&self, stop: bool) -> Result<bool> {
        Ok(self.size() > 1 && self.gather(&[u8::from(stop)])?.iter().any(|said| said[..] == [1]) || stop)
    }

    /// All-reduce over the leaves of a tree, each a vector of the same length. `own` are the sums of [`Tree::nodes`] of this rank's leaves; the first is replaced by the
    /// total on every rank. Each rank sums one part of every block of values and sends it to the others, so it sends about twice
    /// the length of a vector for any number of ranks.
    fn sum(&self, tree: Tree, own: &mut [&mut [f32]]) -> Result<()> {
        let (rank, size) = (self.rank(), self.size());
        let nodes: Vec<Vec<Range<usize>>> = (0..size).map(|rank| tree.nodes(tree.share(rank, size))).collect();
        let places: Vec<Range<usize>> = nodes.iter().flatten().cloned().collect();
        let (mut out, mut into) = (Vec::new(), Vec::new());
        let len = own.first().map_or(0, |node| node.len());
        // A rank without leaves has no operand but needs a buffer for the sum.
        for start in (0..len).step_by(BLOCK) {
            let block = (len - start).min(BLOCK);
            let lengths: Vec<usize> = (0..size).map(|rank| (rank + 1) * block / size - rank * block / size).collect();
            let mine = lengths[rank];
            out.clear();
            let mut at = start;
            for length in &lengths {
                let given = own.iter().take(nodes[rank].len());
                given.for_each(|node| out.extend_from_slice(&node[at..at + length]));
                at += length;
            }
            let sent: Vec<usize> = lengths.iter().map(|length| length * nodes[rank].len()).collect();
            let expected: Vec<usize> = nodes.iter().map(|nodes| mine * nodes.len()).collect();
            into.resize(mine * places.len(), 0.0);
            self.exchange(&out, &sent, &mut into, &expected)?;
            let slot = tree.combine(&places, &mut into, mine);
            let at = start + rank * block / size;
            own[0][at..at + mine].copy_from_slice(&into[slot * mine..][..mine]);
            self.spread(&mut own[0][start..start + block], &lengths)?;
        }
        Ok(())
    }
}

/// A single process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![own.to_vec()])
    }

    fn exchange(&self, out: &[f32], _: &[usize], into: &mut [f32], _: &[usize]) -> Result<()> {
        into.copy_from_slice(out);
        Ok(())
    }

    fn spread(&self, _: &mut [f32], _: &[usize]) -> Result<()> {
        Ok(())
    }

    /// There is no other rank.
    fn abort(&self, _: u8) {}
}
