//! Rendering of saved results, for `termwise report`; `termwise show` is its earlier name.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::Value;
use termwise_base::files;
use termwise_report::{Document, Documented, Error, kind_of, made_by, read};
use termwise_train::log::tell;
use termwise_train::metrics::METRICS;

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

macro_rules! kinds {
    ($($result:ty,)*) => {
        const KINDS: &[&str] = &[$(<$result>::KIND),*];

        /// The document of a result of any kind, and its summary.
        fn documents(value: Value) -> Result<(Document, Document), Error> {
            let kind = kind_of(&value)?.to_owned();
            $(if kind == <$result>::KIND {
                let result = read::<$result>(value)?;
                return Ok((result.document(), result.summary()));
            })*
            Err(Error::Foreign { found: Some(kind) })
        }
    };
}

kinds! {
    termwise_analysis::kv::atlas::Atlas,
    termwise_analysis::kv::audit::Audit,
    termwise_analysis::kv::convert::Conversion,
    termwise_analysis::kv::frontier::Frontier,
    termwise_data::Prepared,
    termwise_data::bpe::BpeReport,
    termwise_analysis::truncate::Report,
    termwise_analysis::spectrum::Spectrum,
    termwise_analysis::bench::AttentionBench,
    termwise_analysis::bench::ChunkBench,
    termwise_analysis::bench::DecodeBench,
    termwise_analysis::bench::GemmBench,
    termwise_analysis::bench::StepBench,
    termwise_analysis::plan::Plan,
    termwise_analysis::variants::Catalogue,
    termwise_analysis::variants::Described,
    termwise_analysis::verify::Verification,
    termwise_experiments::reproduce::Results,
    termwise_experiments::reproduce::paper::PaperPlan,
    termwise_experiments::separation::Separation,
    termwise_train::Evaluated,
    termwise_train::Outcome,
    termwise_train::runs::Runs,
    termwise_train::sweep::Summary,
}

pub fn run(args: &ShowArgs, context: &mut Context) -> Result<Exit, Failure> {
    let (text, name) = text(&args.file)?;
    let wrong = |problem: String| Failure::usage(format!("cannot show {name}: {problem}"));
    let value = serde_json::from_str(&text).map_err(|error| wrong(format!("it is not JSON: {error}")))?;
    let made_by = made_by(&value);
    let (mut document, summary) = documents(value).map_err(|error| wrong(error.to_string()))?;
    if let Some(made_by) = &made_by {
        document = document.made_by(made_by);
    }
    if let Some(folder) = &args.out {
        tell(&format!("written: {}", document.write(folder)?.display()));
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

/// The result of a JSON text that a command gave.
///
/// # Errors
/// What is wrong with the text, in a sentence.
pub fn found(text: &str) -> Result<crate::host::Found, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let named = kind_of(&value).map_err(|error| error.to_string())?;
    let kind = KINDS.iter().find(|kind| **kind == named).copied().unwrap_or("");
    let (document, _) = documents(value).map_err(|error| error.to_string())?;
    Ok(crate::host::Found { kind, json: text.into(), document })
}

/// The only result in a folder.
pub(super) fn inside(folder: &Path) -> Result<PathBuf, Failure> {
    let entries = std::fs::read_dir(folder).map_err(files::Error::io("read", folder))?;
    let mut found: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_result(path)).collect();
    found.sort();
    let name = folder.display();
    match &found[..] {
        [only] => Ok(only.clone()),
        [] if folder.join(METRICS).is_file() => Err(Failure::usage(format!(
            "{name} is the folder of a run, not of a result; `termwise runs` and `termwise report {name}` show runs"
        ))),
        [] => Err(Failure::usage(format!("there is no result in {name}: no JSON that a command printed with --json or wrote with --out"))),
        several => {
            let names: Vec<String> = several.iter().map(|path| path.display().to_string()).collect();
            Err(Failure::usage(format!("{name} holds several results; name one of {}", names.join(", "))))
        }
    }
}

fn is_result(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "json") && kind(path).is_some_and(|kind| KINDS.contains(&kind.as_str()))
}

/// The kind of result in a JSON file.
pub(super) fn kind(path: &Path) -> Option<String> {
    let value = serde_json::from_str::<Value>(&files::read_text(path).ok()?).ok()?;
    kind_of(&value).ok().map(str::to_owned)
}

/// What the file holds, and its name.
fn text(file: &Path) -> Result<(String, String), Failure> {
    let mut text = String::new();
    if file == Path::new("-") {
        std::io::stdin().read_to_string(&mut text).map_err(files::Error::io("read", "standard input"))?;
        return Ok((text, "standard input".into()));
    }
    let path = if file.is_dir() { inside(file)? } else { file.to_owned() };
    text = std::fs::read_to_string(&path).map_err(files::Error::io("read", &path))?;
    Ok((text, path.display().to_string()))
}
