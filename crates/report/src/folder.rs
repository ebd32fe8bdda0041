//! Pages with their figures and tables as files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::html::{Asset, Renderer};
use crate::markdown::markdown;
use crate::page::Page;

/// What can go wrong in writing.
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
}

/// Pixels of PNG files for each of the figure: sharp on paper and on fine screens.
const SCALE: f64 = 2.0;

impl Page {
    /// Writes `index.html`, and beside it `figures/NAME.svg`, `.png` and `.csv` and `tables/NAME.csv`, to which it leads, and `summary.md`.
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

fn make(folder: &Path) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(|source| Error::Write { path: folder.into(), source })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    fs::write(path, bytes).map_err(|source| Error::Write { path: path.into(), source })
}
