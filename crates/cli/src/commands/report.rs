//! `termwise report`.

use std::path::PathBuf;

use clap::Args;
use termwise_base::files::create_folder;
use termwise_papers::reproduce;

use crate::context::Context;
use crate::error::{Exit, Failure};

/// Make a page with figures and tables from finished or unfinished runs
///
/// Runs that differ by seed alone are taken together: curves with bands, means with deviations. The page is one HTML file; figures lie
/// beside it as SVG, PNG and CSV.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise report runs/first runs/second
  termwise report sweeps/recall --out report
  termwise report runs reproduce/minute")]
pub struct ReportArgs {
    /// Folders of runs, of sweeps, or that hold runs
    #[arg(value_name = "RUNS", required = true)]
    pub runs: Vec<PathBuf>,
    /// Folder of the page
    #[arg(long, default_value = "report", value_name = "DIR")]
    pub out: PathBuf,
}

/// Writes the page and says where it is.
pub fn run(args: &ReportArgs, context: &mut Context) -> Result<Exit, Failure> {
    create_folder(&args.out)?;
    let index = reproduce::of_folders(&args.runs, &args.out)?.write(&args.out)?;
    Ok(writeln!(context.out, "{}", index.display()).map(Exit::done)?)
}
