//! Hugging Face models and data sets, through the standard cache.

#[cfg(feature = "hub")]
mod datasets;
#[cfg(feature = "hub")]
mod remote;

use std::path::PathBuf;

use crate::error::Result;
use crate::sources::SourceFile;

/// The `config.json` of a model on the hub. Its weights are not fetched.
pub fn config(asked: &str) -> Result<PathBuf> {
    #[cfg(feature = "hub")]
    return remote::config(asked, asked.trim_start_matches("hf://"));
    #[cfg(not(feature = "hub"))]
    Err(left_out(asked))
}

/// The directory of a model: the path itself, or for `hf://<owner>/<name>[@<revision>]` its directory in the hub's cache, fetched if necessary.
pub fn folder(asked: &str) -> Result<PathBuf> {
    match asked.strip_prefix("hf://") {
        None => Ok(PathBuf::from(asked)),
        #[cfg(feature = "hub")]
        Some(rest) => remote::model(asked, rest),
        #[cfg(not(feature = "hub"))]
        Some(_) => Err(left_out(asked)),
    }
}

/// The files of a data set, `hf://datasets/…`.
pub(crate) fn files(asked: &str) -> Result<Vec<SourceFile>> {
    #[cfg(feature = "hub")]
    return datasets::files(asked);
    #[cfg(not(feature = "hub"))]
    Err(left_out(asked))
}

#[cfg(not(feature = "hub"))]
fn left_out(asked: &str) -> crate::Error {
    crate::Error::left_out(asked, "the Hugging Face hub", "hub")
}
