//! Processes that share the work of one command, started by `mpirun` or a scheduler. Requires a build with MPI.

use std::sync::Arc;
use std::time::Duration;

use termwise_train::collective::{Alone, Collective};
use termwise_train::log::print_line;

use crate::error::Failure;

/// Delay of errors on other ranks: if rank 0 has the same error, it is printed once.
const ERROR_DELAY: Duration = Duration::from_secs(1);

/// Environment variables with the number of processes: Open MPI; MPICH, Intel MPI and others with PMI; MVAPICH.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"];

/// PMIx, which Slurm uses, sets only the rank.
const RANK: &str = "PMIX_RANK";

/// The ranks of this command.
pub struct Ranks {
    pub collective: Arc<dyn Collective>,
    /// Ends MPI when dropped.
    #[cfg(feature = "mpi")]
    _session: Option<termwise_train::collective::mpi::Session>,
}

/// `Some` if a launcher started this process, with the number of processes if known.
fn launched() -> Option<Option<usize>> {
    let size = SIZES.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    match size {
        None => std::env::var_os(RANK).map(|_| None),
        size => Some(size),
    }
}

/// Whether this process is an MPI rank.
pub fn is_rank() -> bool {
    cfg!(feature = "mpi") && launched().is_some()
}

impl Ranks {
    /// One process.
    pub fn alone() -> Ranks {
        Ranks {
            collective: Arc::new(Alone),
            #[cfg(feature = "mpi")]
            _session: None,
        }
    }

    /// All processes of the launcher.
    #[cfg(feature = "mpi")]
    pub fn join() -> Result<Ranks, Failure> {
        if launched().is_none() {
            return Ok(Ranks::alone());
        }
        let session = termwise_train::collective::mpi::Session::join()?;
        Ok(Ranks { collective: Arc::new(session.world()), _session: Some(session) })
    }

    /// All processes of the launcher.
    #[cfg(not(feature = "mpi"))]
    pub fn join() -> Result<Ranks, Failure> {
        match launched().flatten() {
            Some(size) if size > 1 => Err(Failure::usage(format!(
                "this process was started as one of {size} ranks, but this build has no MPI, so each would do all of the work; \
                 build with `--features mpi`, or start one process"
            ))),
            _ => Ok(Ranks::alone()),
        }
    }

    /// Prints the error of this rank and aborts the others. Does nothing with a single rank.
    pub fn fail(&self, failure: &Failure) {
        let Failure::Library(message, exit) = failure else { return };
        let rank = self.collective.rank();
        // An empty message: rank 0 has printed the error.
        if self.collective.size() == 1 || message.is_empty() {
            return;
        }
        if rank > 0 {
            std::thread::sleep(ERROR_DELAY);
        }
        print_line(&format!("error on rank {rank}: {message}"));
        self.collective.abort(*exit as u8);
    }
}
