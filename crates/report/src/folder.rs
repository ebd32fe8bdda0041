//! Pages with their figures and tables as files.

use std::fs;
use std::path::{Path, PathBuf};

use termwise_base::files::write_whole;

use crate::document::Document;
use crate::html::{Asset, Renderer};
use crate::markdown::markdown;

/// What can go wrong in writing and in reading again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A folder or file could not be written.
    #[error("cannot write {}: {source}; choose a folder that can be written to and has room", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A value that is no result, or none of the kind that was asked for.
    #[error("{}; a result of termwise is a JSON object that begins with \"kind\", as commands print with --json and write with --out",
        found.as_ref().map_or("it does not say what it is".into(), |kind| format!("it is of the kind `{}`", crate::text::clean(kind))))]
    Foreign {
        /// What it says it is.
        found: Option<String>,
    },
    /// A result in another form.
    #[error(
        "it is version {found} of `{kind}`, and this program reads version {known}; use the program that wrote it, or run its command again"
    )]
    Version {
        /// What it is.
        kind: &'static str,
        /// Of the file.
        found: u64,
        /// Of this program.
        known: u32,
    },
    /// A result with fields that are missing or wrong.
    #[error("it says that it is a `{kind}`, but {source}")]
    Fields {
        /// What it says it is.
        kind: &'static str,
        /// Why it is not.
        source: serde_json::Error,
    },
}

/// Pixels of PNG files for each of the figure: sharp on paper and on fine screens.
const SCALE: f64 = 2.0;

impl Document {
    /// Writes `index.html`, and beside it `figures/NAME.svg`, `.png`, `.csv` and `.vl.json` (Vega-Lite) and `tables/NAME.csv`, to which it leads, and `summary.md`.
    /// The page itself needs none of them. Existing files of these names are replaced.
    ///
    /// Gives the path of the page.
    ///
    /// # Errors
    /// [`Error::Write`] if the folder or a file cannot be written; the page is written last.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, Error> {
        let (html, assets) = Renderer::render(self, true);
        make(folder)?;
        write(&folder.join("summary.md"), markdown(self, &assets).as_bytes())?;
        for asset in assets {
            match asset {
                Asset::Figure(name, figure) => {
                    let folder = folder.join("figures");
                    make(&folder)?;
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
