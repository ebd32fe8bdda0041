//! Reports as a directory: HTML with figures and tables as separate files.

use std::fs;
use std::path::{Path, PathBuf};

use termwise_base::files::write_whole;

use crate::document::Document;
use crate::html::{Asset, Renderer};
use crate::markdown::markdown;

/// Errors in writing a report or reading a result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A directory or file could not be written.
    #[error("cannot write {}: {source}; choose a writable directory with free space", path.display())]
    Write {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The value is not a result, or is a result of another kind.
    #[error("{}; a termwise result is a JSON object with the key \"kind\", as commands print with --json and write with --out",
        found.as_ref().map_or("it has no \"kind\"".into(), |kind| format!("it is of the kind `{}`", crate::text::clean(kind))))]
    Foreign {
        /// The kind that was found.
        found: Option<String>,
    },
    /// A result with another format version.
    #[error(
        "it is version {found} of `{kind}`, and this program reads version {known}; read it with the program that wrote it, or rerun its command"
    )]
    Version {
        /// The kind.
        kind: &'static str,
        /// Version of the file.
        found: u64,
        /// Version that this program reads.
        known: u32,
    },
    /// A result with missing or invalid fields.
    #[error("it has the kind `{kind}` but is invalid: {source}")]
    Fields {
        /// The kind.
        kind: &'static str,
        /// The problem.
        source: serde_json::Error,
    },
}

/// PNG pixels per SVG pixel, for print and high-resolution screens.
const SCALE: f64 = 2.0;

impl Document {
    /// Writes `index.html` with links to `figures/NAME.svg`, `.png`, `.csv` and `.vl.json` (Vega-Lite), `figures/column/NAME.svg` and `.pdf` for papers,
    /// `tables/NAME.csv` and `summary.md` in the same directory.
    /// The HTML report works without them. Existing files of these names are replaced.
    ///
    /// Returns the path of the HTML report.
    ///
    /// # Errors
    /// [`Error::Write`] if the directory or a file cannot be written. The HTML report is written last.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, Error> {
        let (html, assets) = Renderer::render(self, true);
        make(folder)?;
        write(&folder.join("summary.md"), markdown(self, &assets).as_bytes())?;
        for asset in assets {
            match asset {
                Asset::Figure(name, figure) => {
                    let folder = folder.join("figures");
                    let column = folder.join("column");
                    make(&column)?;
                    write(&column.join(format!("{name}.svg")), figure.to_column_svg().as_bytes())?;
                    write(&column.join(format!("{name}.pdf")), &figure.to_column_pdf())?;
                    write(&folder.join(format!("{name}.svg")), figure.to_svg().as_bytes())?;
                    write(&folder.join(format!("{name}.png")), &figure.to_png(SCALE))?;
                    write(&folder.join(format!("{name}.csv")), figure.to_csv().as_bytes())?;
                    write(&folder.join(format!("{name}.vl.json")), format!("{:#}\n", figure.to_vega_lite()).as_bytes())?;
                }
                Asset::Table(name, table) => {
                    let folder = folder.join("tables");
                    make(&folder)?;
                    write(&folder.join(format!("{name}.csv")), table.to_csv().as_bytes())?;
                }
            }
        }
        let index = folder.join("index.html");
        write(&index, html.as_bytes())?;
        Ok(index)
    }
}

pub fn make(folder: &Path) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(|source| Error::Write { path: folder.into(), source })
}

pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write_whole(path, bytes).map_err(|error| Error::Write { path: path.into(), source: error.source })
}
