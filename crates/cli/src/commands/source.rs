//! Progress and warnings while data are opened.

use termwise_data::{Prepare, Progress};
use termwise_train::log::tell;

pub use termwise_train::source::cache_folder;

use crate::progress::Bar;

/// Opens data, with progress during tokenization.
pub fn with_tokenizing<T>(quiet: bool, open: impl FnOnce(&Prepare) -> T) -> T {
    let bar = Bar::new(quiet);
    let progress = |progress: &Progress| bar.at(progress.read, progress.file_bytes, "bytes tokenized");
    open(&Prepare { progress: &progress, warn: &warning(quiet), ..Prepare::default() })
}

/// Prints warnings to standard error, unless `quiet`.
pub fn warning(quiet: bool) -> impl Fn(&str) {
    move |text| {
        if !quiet {
            tell(&format!("warning: {text}"));
        }
    }
}
