//! Ranks as threads of one process, for testing. There is no speedup.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::Collective;
use crate::error::{Error, Result};

/// One of several ranks. After one is dropped, calls of the others fail.
#[derive(Debug)]
pub struct Thread {
    rank: usize,
    team: Arc<Team>,
}

#[derive(Debug)]
struct Team {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The messages of this round, by rank.
    brought: Vec<Option<Vec<u8>>>,
    /// The complete round, and the number of ranks that have not read it yet.
    complete: Option<(Arc<Vec<Vec<u8>>>, usize)>,
    gone: Option<usize>,
}

/// A team of this many ranks.
pub fn team(size: usize) -> Vec<Thread> {
    let state = State { brought: vec![None; size], complete: None, gone: None };
    let team = Arc::new(Team { state: Mutex::new(state), changed: Condvar::new() });
    (0..size).map(|rank| Thread { rank, team: team.clone() }).collect()
}

impl Thread {
    fn state(&self) -> MutexGuard<'_, State> {
        self.team.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.team.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.abort(1);
    }
}

impl Collective for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.state().brought.len()
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut state = self.state();
        // Wait until all ranks have left the previous round.
        while state.complete.is_some() && state.gone.is_none() {
            state = self.wait(state);
        }
        if let (Some(_), Some(rank)) = (&state.complete, state.gone) {
            return Err(Error::RankLost { rank });
        }
        state.brought[self.rank] = Some(own.to_vec());
        if state.brought.iter().all(Option::is_some) {
            let all: Vec<Vec<u8>> = state.brought.iter_mut().map(|own| own.take().unwrap_or_default()).collect();
            let size = all.len();
            state.complete = Some((Arc::new(all), size));
            self.team.changed.notify_all();
        }
        loop {
            if let Some((all, left)) = &mut state.complete {
                let all = all.clone();
                *left -= 1;
                if *left == 0 {
                    state.complete = None;
                    self.team.changed.notify_all();
                }
                return Ok(all.to_vec());
            }
            if let Some(rank) = state.gone {
                return Err(Error::RankLost { rank });
            }
            state = self.wait(state);
        }
    }

    fn exchange(&self, out: &[f32], lengths: &[usize], into: &mut [f32], _: &[usize]) -> Result<()> {
        let bytes = lengths.iter().flat_map(|&n| (n as u64).to_le_bytes()).chain(out.iter().flat_map(|x| x.to_le_bytes()));
        let all = self.gather(&bytes.collect::<Vec<u8>>())?;
        let mut received = Vec::with_capacity(into.len());
        for bytes in all {
            let (head, values) = bytes.split_at(8 * lengths.len());
            let (lengths, _) = head.as_chunks::<8>();
            let lengths: Vec<usize> = lengths.iter().map(|&n| u64::from_le_bytes(n) as usize).collect();
            let start: usize = lengths[..self.rank].iter().sum();
            let (values, _) = values.as_chunks::<4>();
            received.extend(values[start..start + lengths[self.rank]].iter().map(|&x| f32::from_le_bytes(x)));
        }
        into.copy_from_slice(&received);
        Ok(())
    }

    fn spread(&self, values: &mut [f32], lengths: &[usize]) -> Result<()> {
        let start: usize = lengths[..self.rank].iter().sum();
        let own: Vec<u8> = values[start..start + lengths[self.rank]].iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = self.gather(&own)?.concat();
        values.iter_mut().zip(all.as_chunks::<4>().0).for_each(|(x, &bytes)| *x = f32::from_le_bytes(bytes));
        Ok(())
    }

    fn abort(&self, _: u8) {
        self.state().gone.get_or_insert(self.rank);
        self.team.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Tree;

    fn each<T: Send>(size: usize, work: impl Fn(&Thread) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = team(size)
                .into_iter()
                .map(|rank| {
                    scope.spawn(|| {
                        let rank = rank;
                        (work(&rank), rank)
                    })
                })
                .collect();
            // No rank leaves before all are done.
            let done: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect();
            done.into_iter().map(|(found, _)| found).collect()
        })
    }

    #[test]
    fn gather_returns_messages_in_rank_order() {
        for found in each(3, |rank| {
            let mut word = if rank.rank() == 0 { b"go".to_vec() } else { Vec::new() };
            rank.broadcast(&mut word).expect("all are there");
            rank.barrier().expect("all are there");
            let stop = rank.agree(rank.rank() == 2).expect("all are there");
            (rank.gather(&[rank.rank() as u8]).expect("all are there"), word, stop, rank.agree(false).expect("all are there"))
        }) {
            assert_eq!(found, (vec![vec![0], vec![1], vec![2]], b"go".to_vec(), true, false));
        }
    }

    #[test]
    fn a_sum_over_ranks_is_bit_identical_to_a_local_sum() {
        let value = |leaf: usize, i: usize| ((leaf * 37 + i * 11) % 101) as f32 / 7.0 - 5.0;
        let len = super::super::BLOCK + 77;
        let tree = Tree { leaves: 6 };
        let sum = |size: usize| {
            each(size, |rank| {
                let nodes = tree.nodes(tree.share(rank.rank(), size));
                let each_node = |node: &std::ops::Range<usize>| {
                    let leaves: Vec<_> = node.clone().map(|leaf| leaf..leaf + 1).collect();
                    let mut values: Vec<f32> = node.clone().flat_map(|leaf| (0..len).map(move |i| value(leaf, i))).collect();
                    // A node is a subtree at an offset.
                    let slot = Tree { leaves: node.len() }.combine(
                        &leaves.iter().map(|l| l.start - node.start..l.end - node.start).collect::<Vec<_>>(),
                        &mut values,
                        len,
                    );
                    values[slot * len..][..len].to_vec()
                };
                let mut own: Vec<Vec<f32>> = nodes.iter().map(each_node).collect();
                own.resize(own.len().max(1), vec![0.0; len]);
                let mut own: Vec<&mut [f32]> = own.iter_mut().map(Vec::as_mut_slice).collect();
                rank.sum(tree, &mut own).expect("all are there");
                own[0].iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
            })
        };
        let one = sum(1).remove(0);
        for size in [2, 4] {
            assert!(sum(size).iter().all(|found| *found == one), "{size} ranks");
        }
    }

    #[test]
    fn calls_fail_after_a_rank_has_ended() {
        let mut ranks = team(3);
        let gone = ranks.pop().expect("a rank");
        std::thread::scope(|scope| {
            let left: Vec<_> = ranks.iter().map(|rank| scope.spawn(|| rank.barrier())).collect();
            drop(gone);
            for rank in left {
                let error = rank.join().expect("a rank").expect_err("one is gone");
                assert!(matches!(error, Error::RankLost { rank: 2 }), "{error}");
            }
        });
    }
}
