//! `termwise report`.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use termwise_papers::{Error, reproduce};

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
pub fn run<E: From<Error> + From<io::Error>>(args: &ReportArgs, out: &mut impl Write) -> Result<(), E> {
    std::fs::create_dir_all(&args.out).map_err(termwise_llama::Error::io("create", &args.out)).map_err(Error::from)?;
    let page = reproduce::of_folders(&args.runs, &args.out)?;
    let index = page.write(&args.out).map_err(Error::from)?;
    Ok(writeln!(out, "{}", index.display())?)
}
