//! Processes that share the work of one command: started by `mpirun` or a scheduler, with a build that has MPI.

use std::sync::Arc;
use std::time::Duration;

use termwise_train::collective::{Alone, Collective};
use termwise_train::log::tell;

use crate::error::Failure;

/// How long a rank keeps its error to itself: where rank 0 has the same one, it is said once.
const FIRST_WORD: Duration = Duration::from_secs(1);

/// Variables by which launchers say how many processes they have started: Open MPI; MPICH, Intel MPI and others with PMI; MVAPICH.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"];

/// With PMIx, by which Slurm starts processes, only the rank is said.
const RANK: &str = "PMIX_RANK";

/// The ranks of this command.
pub struct Ranks {
    pub collective: Arc<dyn Collective>,
    /// Ends MPI when dropped.
    #[cfg(feature = "mpi")]
    _session: Option<termwise_train::collective::mpi::Session>,
}

/// Whether a launcher has started this process, and as one of how many if it says so.
fn launched() -> Option<Option<usize>> {
    let size = SIZES.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    match size {
        None => std::env::var_os(RANK).map(|_| None),
        size => Some(size),
    }
}

/// Whether a launcher has started this process as a rank of a build that can be one.
pub fn is_rank() -> bool {
    cfg!(feature = "mpi") && launched().is_some()
}

impl Ranks {
    /// Nobody else.
    pub fn alone() -> Ranks {
        Ranks {
            collective: Arc::new(Alone),
            #[cfg(feature = "mpi")]
            _session: None,
        }
    }

    /// The processes that were started with this one.
    #[cfg(feature = "mpi")]
    pub fn join() -> Result<Ranks, Failure> {
        if launched().is_none() {
            return Ok(Ranks::alone());
        }
        let session = termwise_train::collective::mpi::Session::join()?;
        Ok(Ranks { collective: Arc::new(session.world()), _session: Some(session) })
    }

    /// The processes that were started with this one.
    #[cfg(not(feature = "mpi"))]
    pub fn join() -> Result<Ranks, Failure> {
        match launched().flatten() {
            Some(size) if size > 1 => Err(Failure::usage(format!(
                "this process was started as one of {size} ranks, but this build has no MPI: each would do the whole work by itself; \
                 build it with `--features mpi`, or start it once"
            ))),
            _ => Ok(Ranks::alone()),
        }
    }

    /// Says what went wrong on this rank, and ends the others, who cannot know of it. Where there are none, nothing is done.
    pub fn fail(&self, failure: &Failure) {
        let Failure::Library(message, exit) = failure else { return };
        let rank = self.collective.rank();
        // What rank 0 has said is known to all.
        if self.collective.size() == 1 || message.is_empty() {
            return;
        }
        if rank > 0 {
            std::thread::sleep(FIRST_WORD);
        }
        tell(&format!("error on rank {rank}: {message}"));
        self.collective.abort(*exit as u8);
    }
}
