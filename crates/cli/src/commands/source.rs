//! Opens data with a progress bar for tokenization.

use std::path::Path;

use termwise_data::{Prepare, Progress, Source};
use termwise_train::log::print_line;
use termwise_train::{Result, Settings};

pub use termwise_train::source::cache_folder;

use crate::progress::Bar;

/// Opens the data of these settings, with progress during tokenization.
pub fn prepare_with_progress(settings: &Settings, cache: &Path, quiet: bool) -> Result<Box<dyn Source>> {
    let bar = Bar::new(quiet);
    let progress = |progress: &Progress| bar.at(progress.read, progress.file_bytes, "bytes tokenized");
    settings.open_source(cache, &Prepare { progress: &progress, warn: &warning(quiet), ..Prepare::default() })
}

/// Prints warnings to standard error, unless `quiet`.
pub fn warning(quiet: bool) -> impl Fn(&str) {
    move |text| {
        if !quiet {
            print_line(&format!("warning: {text}"));
        }
    }
}
