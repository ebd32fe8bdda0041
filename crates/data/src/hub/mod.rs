//! Models and data sets of the Hugging Face hub, through its ordinary cache.

#[cfg(feature = "hub")]
pub(crate) mod datasets;
#[cfg(feature = "hub")]
mod remote;

use std::path::PathBuf;

#[cfg(not(feature = "hub"))]
use crate::error::Error;
use crate::error::Result;

/// The folder of a model: the path itself, or for `hf://<owner>/<name>[@<revision>]` where the hub's cache holds it, fetched if it is not there.
pub fn folder(asked: &str) -> Result<PathBuf> {
    match asked.strip_prefix("hf://") {
        None => Ok(PathBuf::from(asked)),
        #[cfg(feature = "hub")]
        Some(rest) => remote::model(asked, rest),
        #[cfg(not(feature = "hub"))]
        Some(_) => {
            let problem = "this build cannot fetch from the hub; build it with the feature `hub`".into();
            Err(Error::HubModel { asked: asked.into(), problem })
        }
    }
}
