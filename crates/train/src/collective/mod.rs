//! Several processes that train one model: who they are, and what they tell each other.
//!
//! Every process, a rank, holds all parameters and computes the gradient of some of a step's rows; [`Collective::sum`] adds what they have
//! found along one fixed [`Tree`], so that the sum has the same bytes whatever the number of ranks. Rank 0 alone writes files.

#[cfg(feature = "mpi")]
pub mod mpi;
pub mod threads;
pub(crate) mod tree;

use std::fmt::Debug;
use std::ops::Range;

use crate::error::Result;
pub use tree::Tree;

/// Values that are summed at a time, over all ranks: what a sum needs beside its operands stays small.
const BLOCK: usize = 1 << 22;

/// Ranks that work together. Every rank makes the same calls in the same order; a call returns once all have made it.
pub trait Collective: Debug + Send + Sync {
    /// Which one this is, from 0.
    fn rank(&self) -> usize;

    /// How many there are.
    fn size(&self) -> usize;

    /// What each rank brought, in the order of ranks; for messages, not for gradients.
    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// What each rank brought, in the order of ranks. Numbers with a fraction go as their bits.
    fn gather_words(&self, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
        let words = |bytes: Vec<u8>| bytes.as_chunks::<8>().0.iter().map(|&word| u64::from_le_bytes(word)).collect();
        Ok(self.gather(&bytes)?.into_iter().map(words).collect())
    }

    /// Sends to each rank its part of `out`, one after another of these lengths; receives from each so many values into `into`, likewise.
    fn exchange(&self, out: &[f32], lengths: &[usize], into: &mut [f32], expected: &[usize]) -> Result<()>;

    /// Each rank's part of `values`, one after another of these lengths, is given to all.
    fn spread(&self, values: &mut [f32], lengths: &[usize]) -> Result<()>;

    /// Ends every rank at once, after something that the others cannot know of. Where the ranks are threads, the others' next call fails.
    fn abort(&self, exit: u8);

    /// What rank 0 has; it is replaced on the others.
    fn broadcast(&self, bytes: &mut Vec<u8>) -> Result<()> {
        let own = if self.rank() == 0 { std::mem::take(bytes) } else { Vec::new() };
        *bytes = self.gather(&own)?.swap_remove(0);
        Ok(())
    }

    /// Returns once every rank is here.
    fn barrier(&self) -> Result<()> {
        self.gather(&[]).map(|_| ())
    }

    /// Whether any rank was asked to stop: all of them do, after the same step.
    fn agree(&self, stop: bool) -> Result<bool> {
        Ok(self.size() > 1 && self.gather(&[u8::from(stop)])?.iter().any(|said| said[..] == [1]) || stop)
    }

    /// The sum over all leaves of a tree, each a vector of the same length. `own` are the sums of [`Tree::nodes`] of this rank's leaves; the first is replaced by the
    /// sum of all, on every rank. Each rank sums one part of every block of values and gives it to the others, so that it sends about twice
    /// a vector's length, whatever the number of ranks.
    fn sum(&self, tree: Tree, own: &mut [&mut [f32]]) -> Result<()> {
        let (rank, size) = (self.rank(), self.size());
        let nodes: Vec<Vec<Range<usize>>> = (0..size).map(|rank| tree.nodes(tree.share(rank, size))).collect();
        let places: Vec<Range<usize>> = nodes.iter().flatten().cloned().collect();
        let (mut out, mut into) = (Vec::new(), Vec::new());
        let len = own.first().map_or(0, |node| node.len());
        // A rank without leaves has no operand, and as much room as the others for the sum.
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

/// The only process.
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

    /// There is nobody else to end.
    fn abort(&self, _: u8) {}
}
