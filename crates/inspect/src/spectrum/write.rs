//! A spectrum as files.

use std::path::{Path, PathBuf};

use super::Spectrum;
use crate::Error;

/// Name of the file with all numbers.
pub const FILE: &str = "spectrum.json";

impl Spectrum {
    /// Writes `spectrum.json`, `index.html` with figures and tables beside it. Existing files of these names are replaced. Gives the path of
    /// the page.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, Error> {
        let page = self.page().write(folder)?;
        let path = folder.join(FILE);
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from);
        let written = text.and_then(|text| std::fs::write(&path, text + "\n"));
        written.map_err(termwise_llama::Error::io("write", &path))?;
        Ok(page)
    }
}
