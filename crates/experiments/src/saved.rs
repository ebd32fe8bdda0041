//! Saved results of all commands, and reports of runs.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use termwise_base::files::{self, write_whole};
use termwise_base::provenance::Provenance;
use termwise_report::{Document, Documented, Error as ReportError, kind_of, made_by, read};
use termwise_train::metrics::METRICS;
use termwise_train::runs::Runs;

use crate::Error;
use crate::reproduce::{self, Results};

macro_rules! kinds {
    ($($result:ty,)*) => {
        const KINDS: &[&str] = &[$(<$result>::KIND),*];

        /// The document of a result of any kind, and its summary.
        fn documents(value: Value) -> Result<(Document, Document), ReportError> {
            let kind = kind_of(&value)?.to_owned();
            $(if kind == <$result>::KIND {
                let result = read::<$result>(value)?;
                return Ok((result.document(), result.summary()));
            })*
            Err(ReportError::Foreign { found: Some(kind) })
        }
    };
}

kinds! {
    termwise_analysis::generate::Generation,
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
    crate::reproduce::Results,
    crate::reproduce::paper::PaperPlan,
    crate::separation::Separation,
    termwise_train::Evaluated,
    termwise_train::Outcome,
    termwise_train::runs::Runs,
    termwise_train::sweep::Summary,
}

/// A result that a command printed with `--json` or wrote with `--out`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SavedResult {
    /// Its kind in one word, such as `spectrum`.
    pub kind: &'static str,
    /// The whole document, with its provenance.
    pub document: Document,
    /// The first lines that the command prints.
    pub summary: Document,
}

impl SavedResult {
    /// Parses the JSON of a result.
    ///
    /// # Errors
    /// The problem, as the end of a sentence.
    pub fn parse(text: &str) -> Result<SavedResult, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
        let named = kind_of(&value).map_err(|error| error.to_string())?;
        let kind = KINDS.iter().find(|kind| **kind == named).copied().unwrap_or("");
        let provenance = made_by(&value);
        let (document, summary) = documents(value).map_err(|error| error.to_string())?;
        let document = match &provenance {
            Some(made_by) => document.made_by(made_by),
            None => document,
        };
        Ok(SavedResult { kind, document, summary })
    }

    /// Reads a result: a JSON file, its folder, or `-` for standard input.
    ///
    /// # Errors
    /// If there is no result, if a folder contains several, or if it cannot be read.
    pub fn read(file: &Path) -> Result<SavedResult, Error> {
        let (text, name) = if file == Path::new("-") {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map_err(|error| wrong("standard input", error.to_string()))?;
            (text, "standard input".to_owned())
        } else {
            let path = if file.is_dir() { inside(file)? } else { file.to_owned() };
            let text = std::fs::read_to_string(&path).map_err(|error| wrong(path.display(), error.to_string()))?;
            (text, path.display().to_string())
        };
        SavedResult::parse(&text).map_err(|problem| wrong(name, problem))
    }
}

fn wrong(name: impl ToString, problem: impl Into<String>) -> Error {
    Error::SavedResult { name: name.to_string(), problem: problem.into() }
}

/// The only result in a folder.
fn inside(folder: &Path) -> Result<PathBuf, Error> {
    let name = folder.display().to_string();
    let entries = std::fs::read_dir(folder).map_err(|error| wrong(&name, error.to_string()))?;
    let mut found: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_result(path)).collect();
    found.sort();
    match &found[..] {
        [only] => Ok(only.clone()),
        [] if folder.join(METRICS).is_file() => {
            Err(wrong(&name, format!("it is the folder of a run, not of a result; `termwise runs` and `termwise report {name}` show runs")))
        }
        [] => Err(wrong(&name, format!("there is no result in {name}: no JSON that a command printed with --json or wrote with --out"))),
        several => {
            let names: Vec<String> = several.iter().map(|path| path.display().to_string()).collect();
            Err(wrong(&name, format!("it contains several results; name one of {}", names.join(", "))))
        }
    }
}

fn is_result(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "json") && kind(path).is_some_and(|kind| KINDS.contains(&kind.as_str()))
}

/// The kind of result in a JSON file.
fn kind(path: &Path) -> Option<String> {
    let value = serde_json::from_str::<Value>(&files::read_text(path).ok()?).ok()?;
    kind_of(&value).ok().map(str::to_owned)
}

/// Options of [`report`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ReportOptions {
    /// Folders of runs, of sweeps or of parents of runs; or one `results.json` of `reproduce`.
    pub runs: Vec<PathBuf>,
    /// Folder of the report; default: `report`, unless there is `markdown`.
    pub out: Option<PathBuf>,
    /// File for text, verdicts and tables as Markdown, without figures.
    pub markdown: Option<PathBuf>,
    /// Build that makes the report.
    pub provenance: Provenance,
}

impl ReportOptions {
    /// A report of these runs in the folder `report`.
    pub fn new(runs: Vec<PathBuf>) -> ReportOptions {
        ReportOptions { runs, ..ReportOptions::default() }
    }
}

/// The result of [`report`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunsReport {
    /// The report.
    pub document: Document,
    /// Files that were written: the Markdown file, then `index.html`.
    pub written: Vec<PathBuf>,
}

/// Writes a report of runs, or of the results of `reproduce`, whose verdicts are recomputed.
///
/// # Errors
/// If there are no runs, or if a file cannot be read or written.
pub fn report(options: &ReportOptions) -> Result<RunsReport, Error> {
    let ReportOptions { runs, out, markdown, provenance } = options;
    let folder = out.clone().or_else(|| markdown.is_none().then(|| "report".into()));
    let links = folder.clone().or_else(|| Some(markdown.as_ref()?.parent()?.to_owned())).unwrap_or_default();
    let document = match &runs[..] {
        [file] if file.is_file() => reproduce::page(&Results::read(file)?, file.parent()),
        runs => reproduce::of_folders(runs, &links)?.made_by(provenance),
    };
    let mut written = Vec::new();
    if let Some(file) = markdown {
        write_whole(file, document.to_markdown_without_figures().as_bytes()).map_err(termwise_train::Error::from)?;
        written.push(file.clone());
    }
    if let Some(folder) = &folder {
        written.push(document.write(folder)?);
    }
    Ok(RunsReport { document, written })
}

/// Whether this is a saved result that is printed: not one of `reproduce`, whose report is written, and not a folder of runs.
pub fn is_saved_result(file: &Path) -> bool {
    match file {
        _ if file == Path::new("-") => true,
        _ if file.is_dir() => {
            let runs = Runs::list(&[file.to_owned()]).is_ok_and(|found| !found.runs.is_empty());
            !runs && inside(file).is_ok()
        }
        _ => file.exists() && kind(file).is_none_or(|kind| kind != Results::KIND),
    }
}
