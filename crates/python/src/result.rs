//! Results as JSON and as a document.

use std::path::PathBuf;
use std::sync::LazyLock;

use pyo3::prelude::*;
use termwise_base::provenance::Provenance;
use termwise_experiments::saved::SavedResult;
use termwise_report::{Block, Document, Documented, Terminal, to_json};

use crate::errors::value;

/// Provenance of this build in this process.
pub fn provenance() -> &'static Provenance {
    static HERE: LazyLock<Provenance> = LazyLock::new(|| termwise::provenance(&std::env::args_os().collect::<Vec<_>>()));
    &HERE
}

/// A result.
#[pyclass(frozen, module = "termwise._core")]
pub struct Found {
    #[pyo3(get)]
    kind: &'static str,
    json: String,
    document: Document,
}

impl Found {
    pub fn of<T: Documented>(result: &T) -> Found {
        Found { kind: T::KIND, json: to_json(result, Some(provenance())), document: result.document().made_by(provenance()) }
    }
}

#[pymethods]
impl Found {
    /// A result from its JSON.
    #[staticmethod]
    fn of_json(text: &str) -> PyResult<Found> {
        let SavedResult { kind, document, .. } =
            SavedResult::parse(text).map_err(|problem| crate::errors::input(format!("this is not a result: {problem}")))?;
        Ok(Found { kind, json: text.into(), document })
    }

    fn json(&self) -> &str {
        &self.json
    }

    fn html(&self) -> String {
        self.document.to_html()
    }

    fn markdown(&self) -> String {
        self.document.to_markdown_without_figures()
    }

    fn text(&self, width: usize) -> String {
        self.document.to_terminal(&Terminal { width, ..Terminal::default() })
    }

    /// Names and SVG of all figures.
    fn figures(&self) -> Vec<(String, String)> {
        fn collect(blocks: &[Block], into: &mut Vec<(String, String)>) {
            for block in blocks {
                match block {
                    Block::Figure { name, figure, .. } => into.push((name.clone(), figure.to_svg())),
                    Block::Details { blocks, .. } | Block::Fold { blocks, .. } => collect(blocks, into),
                    _ => {}
                }
            }
        }
        let mut figures = Vec::new();
        collect(&self.document.lead, &mut figures);
        self.document.sections.iter().for_each(|section| collect(&section.blocks, &mut figures));
        figures
    }

    /// Writes the JSON, the HTML report, figures and tables into a folder; returns the path of the report.
    fn write(&self, folder: PathBuf) -> PyResult<PathBuf> {
        std::fs::create_dir_all(&folder)?;
        termwise_base::files::write_whole(&folder.join(format!("{}.json", self.kind)), self.json.as_bytes()).map_err(value)?;
        self.document.write(&folder).map_err(value)
    }
}
