//! Ranks as processes, started by `mpirun` or a scheduler, on one or several machines.

use mpi::Threading;
use mpi::collective::Root;
use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::Universe;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Collective;
use crate::error::{Error, Result};

/// Maximum number of values per call: MPI counts are 32-bit integers.
const MAX_COUNT: usize = i32::MAX as usize;

/// An MPI environment. It is finalized on drop, where every rank waits for the others. It can be created once per process.
pub struct Session {
    _universe: Universe,
    world: World,
}

impl Session {
    /// Initializes MPI.
    pub fn join() -> Result<Session> {
        let problem = |problem: &str| Error::Mpi { problem: problem.into() };
        // Training runs on a thread of its own pool. Calls never overlap.
        let (universe, threading) =
            mpi::initialize_with_threading(Threading::Serialized).ok_or_else(|| problem("it was already initialized in this process"))?;
        if !matches!(threading, Threading::Serialized | Threading::Multiple) {
            return Err(problem("this installation does not support calls from other threads (MPI_THREAD_SERIALIZED)"));
        }
        let world = SimpleCommunicator::world();
        let world = World { rank: world.rank() as usize, size: world.size() as usize, one: Mutex::new(()) };
        Ok(Session { _universe: universe, world })
    }

    /// All ranks. It must not be used after the session is dropped.
    pub fn world(&self) -> World {
        World { rank: self.world.rank, size: self.world.size, one: Mutex::new(()) }
    }
}

/// All processes of an MPI program. A failure inside MPI terminates all of them.
#[derive(Debug)]
pub struct World {
    rank: usize,
    size: usize,
    one: Mutex<()>,
}

impl World {
    /// Locks MPI for one call: calls must not overlap.
    fn alone(&self) -> MutexGuard<'_, ()> {
        self.one.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts and offsets of consecutive parts.
fn parts(lengths: &[usize]) -> Result<(Vec<i32>, Vec<i32>)> {
    let total: usize = lengths.iter().sum();
    if total > MAX_COUNT {
        return Err(Error::Mpi { problem: format!("a message has {total} values, more than a 32-bit count allows") });
    }
    let places = lengths.iter().scan(0, |at, &length| {
        *at += length;
        Some((*at - length) as i32)
    });
    Ok((lengths.iter().map(|&length| length as i32).collect(), places.collect()))
}

impl Collective for World {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    /// Every message has a leading byte: the address of an empty Rust slice may equal the constant `MPI_IN_PLACE`.
    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let _one = self.alone();
        let world = SimpleCommunicator::world();
        let own = [&[0], own].concat();
        let mut lengths = vec![0u64; self.size];
        world.all_gather_into(&(own.len() as u64), &mut lengths[..]);
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        let (counts, places) = parts(&lengths)?;
        let mut bytes = vec![0u8; lengths.iter().sum()];
        world.all_gather_varcount_into(&own[..], &mut PartitionMut::new(&mut bytes[..], counts, places));
        let mut rest = &bytes[..];
        let next = |length: &usize| {
            let (own, more) = rest.split_at(*length);
            rest = more;
            own[1..].to_vec()
        };
        Ok(lengths.iter().map(next).collect())
    }

    fn exchange(&self, out: &[f32], lengths: &[usize], into: &mut [f32], expected: &[usize]) -> Result<()> {
        let _one = self.alone();
        let (counts, places) = parts(lengths)?;
        let (counts_in, places_in) = parts(expected)?;
        let out = Partition::new(out, counts, places);
        SimpleCommunicator::world().all_to_all_varcount_into(&out, &mut PartitionMut::new(into, counts_in, places_in));
        Ok(())
    }

    fn spread(&self, values: &mut [f32], lengths: &[usize]) -> Result<()> {
        let _one = self.alone();
        let (counts, places) = parts(lengths)?;
        let start = places[self.rank] as usize;
        let own = values[start..start + lengths[self.rank]].to_vec();
        SimpleCommunicator::world().all_gather_varcount_into(&own[..], &mut PartitionMut::new(values, counts, places));
        Ok(())
    }

    fn broadcast(&self, bytes: &mut Vec<u8>) -> Result<()> {
        let _one = self.alone();
        let root = SimpleCommunicator::world();
        let root = root.process_at_rank(0);
        let mut length = 1 + bytes.len() as u64;
        root.broadcast_into(&mut length);
        let mut message = [&[0], &bytes[..]].concat();
        message.resize(length as usize, 0);
        root.broadcast_into(&mut message[..]);
        *bytes = message.split_off(1);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        let _one = self.alone();
        SimpleCommunicator::world().barrier();
        Ok(())
    }

    /// Also terminates this process.
    fn abort(&self, exit: u8) {
        SimpleCommunicator::world().abort(exit.into());
    }
}
