//! `termwise runs`.

use std::path::PathBuf;

use clap::Args;
use termwise_train::runs::Runs;

use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

/// List training runs
///
/// Attention, steps, loss and status of every run, newest last.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise runs
  termwise runs sweeps/recall/runs
  termwise runs --json | jq '.runs[] | select(.status == \"stopped\") | .folder'")]
pub struct RunsArgs {
    /// Folders of runs, searched three levels deep
    #[arg(value_name = "DIR", default_value = "runs")]
    pub folders: Vec<PathBuf>,
    #[command(flatten)]
    pub output: Output,
}

pub fn run(args: &RunsArgs, context: &mut Context) -> Result<Exit, Failure> {
    context.emit(&Runs::list(&args.folders)?, &args.output).map(Exit::done)
}
