//! `termwise report`.

use std::path::PathBuf;

use clap::Args;
use termwise_base::files::write_whole;
use termwise_papers::reproduce::{self, Results};

use crate::context::Context;
use crate::error::{Exit, Failure};

/// Make a page with figures and tables from runs, or from a file of results
///
/// Runs that differ by seed alone are taken together: curves with bands, means with deviations. The page is one HTML file; figures lie
/// beside it as SVG, PNG and CSV. A results.json of `termwise reproduce` is decided and shown again by the rules of this program.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise report runs/first runs/second
  termwise report sweeps/recall --out report
  termwise report runs reproduce/minute
  termwise report reproduce/minute/results.json --markdown results.md")]
pub struct ReportArgs {
    /// Folders of runs, of sweeps, or that hold runs; or one results.json
    #[arg(value_name = "RUNS", required = true)]
    pub runs: Vec<PathBuf>,
    /// Folder of the page [default: report, and none with --markdown]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write text, verdicts and tables as one Markdown file, without figures
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

/// Writes the page and says where it is.
pub fn run(args: &ReportArgs, context: &mut Context) -> Result<Exit, Failure> {
    let folder = args.out.clone().or_else(|| args.markdown.is_none().then(|| "report".into()));
    let links = folder.clone().or_else(|| Some(args.markdown.as_ref()?.parent()?.to_owned())).unwrap_or_default();
    let page = match &args.runs[..] {
        [file] if file.is_file() => reproduce::page(&Results::read(file)?, file.parent()),
        runs => reproduce::of_folders(runs, &links)?.made_by(&context.provenance),
    };
    if let Some(file) = &args.markdown {
        write_whole(file, page.to_markdown_without_figures().as_bytes())?;
        writeln!(context.out, "{}", file.display())?;
    }
    if let Some(folder) = &folder {
        writeln!(context.out, "{}", page.write(folder)?.display())?;
    }
    Ok(Exit::Success)
}
