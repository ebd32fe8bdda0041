//! `termwise report`.

use std::path::PathBuf;

use clap::Args;
use termwise_experiments::saved::{ReportOptions, is_saved_result, report};
use termwise_train::log::print_line;

use super::show::{self, Format, ShowArgs};
use crate::context::Context;
use crate::error::{Exit, Failure};

/// Make an HTML report of runs, or render a saved result
///
/// Runs that differ only in their seed are grouped: curves with bands, means with deviations. The report is one HTML file; figures are
/// written next to it as SVG, PNG and CSV. The verdicts of a results.json of `termwise reproduce` are recomputed with the rules of this
/// version. Any other saved result (--json or --out of a command) is printed, or written with --out.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise report runs/first runs/second
  termwise report sweeps/recall --out report
  termwise report reproduce/minute/results.json --markdown results.md
  termwise report results/spectrum.json --format markdown > spectrum.md
  termwise plan tiny --json | termwise report - --format html > plan.html")]
pub struct ReportArgs {
    /// Folders of runs, sweeps or parents of runs; or one saved result: a JSON file, its folder, or - for standard input
    #[arg(value_name = "RUNS_OR_RESULT", required = true)]
    pub runs: Vec<PathBuf>,
    /// Folder of the report [default for runs: report]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write text, verdicts and tables to one Markdown file, without figures
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Print a saved result in this format
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with_all = ["out", "markdown"])]
    pub format: Option<Format>,
    /// Also print sections that are collapsed in the HTML report
    #[arg(long)]
    pub details: bool,
}

pub fn run(args: &ReportArgs, context: &mut Context) -> Result<Exit, Failure> {
    if let [file] = &args.runs[..]
        && (args.format.is_some() || args.markdown.is_none() && is_saved_result(file))
    {
        let (format, out) = (args.format.unwrap_or_default(), args.out.clone());
        return show::run(&ShowArgs { file: file.clone(), format, out, details: args.details }, context);
    }
    let mut options = ReportOptions::new(args.runs.clone());
    (options.out, options.markdown) = (args.out.clone(), args.markdown.clone());
    options.provenance = context.provenance.clone();
    let found = report(&options)?;
    match args.details {
        true => context.print_document(&found.document, true)?,
        false => context.print_brief(&found.document)?,
    }
    for path in found.written {
        print_line(&format!("written: {}", path.display()));
    }
    Ok(Exit::Success)
}
