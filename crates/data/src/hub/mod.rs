//! Hugging Face models and data sets, through the standard cache.

#[cfg(feature = "hub")]
mod datasets;
#[cfg(feature = "hub")]
mod remote;

use std::path::PathBuf;

use crate::error::Result;
use crate::sources::SourceFile;

/// The `config.json` of a model on the hub. Its weights are not fetched.
pub fn config(requested: &str) -> Result<PathBuf> {
    #[cfg(feature = "hub")]
    return remote::config(requested, requested.trim_start_matches("hf://"));
    #[cfg(not(feature = "hub"))]
    Err(left_out(requested))
}

/// The directory of a model: the path itself, or for `hf://<owner>/<name>[@<revision>]` its directory in the hub's cache, fetched if necessary.
pub fn folder(requested: &str) -> Result<PathBuf> {
    match requested.strip_prefix("hf://") {
        None => Ok(PathBuf::from(requested)),
        #[cfg(feature = "hub")]
        Some(rest) => remote::model(requested, rest),
        #[cfg(not(feature = "hub"))]
        Some(_) => Err(left_out(requested)),
    }
}

/// The files of a data set, `hf://datasets/…`.
pub(crate) fn files(requested: &str) -> Result<Vec<SourceFile>> {
    #[cfg(feature = "hub")]
    return datasets::files(requested);
    #[cfg(not(feature = "hub"))]
    Err(left_out(requested))
}

#[cfg(not(feature = "hub"))]
fn left_out(requested: &str) -> crate::Error {
    crate::Error::left_out(requested, "the Hugging Face hub", "hub")
}
