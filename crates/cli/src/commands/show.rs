//! Rendering of saved results, for `termwise report`; `termwise show` is its earlier name.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use termwise_experiments::saved::SavedResult;
use termwise_train::log::print_line;

use crate::context::Context;
use crate::error::{Exit, Failure};

/// Render a saved result (earlier name of `termwise report`)
///
/// Tables and text are those that the command prints. Charts are in HTML reports and folders.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise show results/cut.json
  termwise show results --format markdown > cut.md
  termwise plan tiny --json | termwise show - --format html > plan.html
  termwise show spectrum.json --out page")]
pub struct ShowArgs {
    /// A JSON file, its folder, or - for standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What to print
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub format: Format,
    /// Write an HTML report with figures and tables into this folder instead of printing
    #[arg(long, value_name = "DIR", conflicts_with = "format")]
    pub out: Option<PathBuf>,
    /// Also print sections that are collapsed in the HTML report
    #[arg(long)]
    pub details: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Plain text
    #[default]
    Terminal,
    /// Markdown without figures
    Markdown,
    /// One self-contained HTML file
    Html,
}

pub fn run(args: &ShowArgs, context: &mut Context) -> Result<Exit, Failure> {
    let SavedResult { document, summary, .. } = SavedResult::read(&args.file)?;
    if let Some(folder) = &args.out {
        print_line(&format!("written: {}", document.write(folder)?.display()));
        return Ok(Exit::Success);
    }
    let shown = match args.format {
        Format::Terminal if args.details => return context.print_document(&document, true).map(Exit::done),
        Format::Terminal => return context.print_brief(&summary).map(Exit::done),
        Format::Markdown => document.to_markdown(),
        Format::Html => document.to_html(),
    };
    Ok(context.out.write_all(shown.as_bytes()).map(Exit::done)?)
}
