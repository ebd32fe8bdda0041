//! Several processes that share the runs of a folder: flags of `sweep` and `reproduce`.

use std::process::Command;

use clap::{Args, ValueEnum};
use termwise_train::log::print_line;
use termwise_train::sweep::{Others, Shard, SlurmJob, without_submitting};

use super::size;
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Other processes that share the folder.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Several processes")]
pub struct ShareArgs {
    /// Process K of N: start with every N-th run, then take over remaining ones [default: from Slurm, Open MPI, PMI or Kubernetes]
    #[arg(long, value_name = "K/N")]
    pub shard: Option<Shard>,
    /// Exit when no unclaimed run is left
    #[arg(long)]
    pub no_wait: bool,
    /// Write a job script for a scheduler and submit it
    #[arg(long, value_enum, value_name = "SCHEDULER")]
    pub submit: Option<Scheduler>,
    /// With --submit: write and print the script only
    #[arg(long, requires = "submit")]
    pub dry_run: bool,
    /// With --submit: jobs [default: number of unfinished runs, at most 16]
    #[arg(long, requires = "submit", value_name = "N", value_parser = size(100_000))]
    pub jobs: Option<usize>,
    /// With --submit: option of sbatch, such as --sbatch=--partition=long; may be repeated
    #[arg(long, requires = "submit", value_name = "OPTION", allow_hyphen_values = true)]
    pub sbatch: Vec<String>,
}

/// A scheduler of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scheduler {
    /// A job array, submitted with sbatch
    Slurm,
}

impl ShareArgs {
    /// The other processes.
    pub fn others(&self) -> Others {
        let shard = self.shard.or_else(|| Shard::of_environment(|name| std::env::var(name).ok()));
        Others { shard, wait: !self.no_wait, ..Others::DEFAULT }
    }

    /// Writes the script, and submits it without --dry-run.
    pub fn submit(&self, mut job: SlurmJob, context: &mut Context) -> Result<Exit, Failure> {
        job.jobs = self.jobs;
        job.options = self.sbatch.clone();
        job.threads = context.threads;
        job.command = [context.respawn_argv()?, without_submitting(&context.words)].concat();
        let (path, script) = job.write()?;
        if self.dry_run {
            context.out.write_all(script.as_bytes())?;
            print_line(&format!("written: {0}; submit it with: sbatch {0}", path.display()));
            return Ok(Exit::Success);
        }
        let status = Command::new("sbatch").arg(&path).status().map_err(|error| {
            let problem = if error.kind() == std::io::ErrorKind::NotFound { "`sbatch` was not found".into() } else { error.to_string() };
            Failure::Library(
                format!("{problem}; the script was written; submit it on a machine with Slurm: sbatch {}", path.display()),
                Exit::Failure,
            )
        })?;
        Ok(Exit::passed(status.success()))
    }
}
