//! Opening data for commands: where tokens are kept, and progress while they are made.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use termwise_train::data::{Prepare, Progress, Source};
use termwise_train::{Result, Settings};

/// The folder that was asked for, or `termwise` in the user's cache.
pub fn cache_folder(asked: Option<&Path>) -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || variable("XDG_CACHE_HOME").or_else(|| variable("LOCALAPPDATA")).or_else(|| Some(variable("HOME")?.join(".cache")));
    asked.map(Path::to_owned).or_else(|| Some(user()?.join("termwise"))).unwrap_or_else(|| ".termwise-cache".into())
}

/// The data of these settings; says how far it is while text is tokenized.
pub fn prepare_with_progress(settings: &Settings, cache: &Path, quiet: bool) -> Result<Box<dyn Source>> {
    let show = !quiet && std::io::stderr().is_terminal();
    let shown = AtomicBool::new(false);
    let progress = |progress: &Progress| {
        if show {
            shown.store(true, Ordering::Relaxed);
            let share = 100.0 * progress.read as f64 / progress.file_bytes.max(1) as f64;
            eprint!("\rtokenizing: {share:.0} %, {} documents, {} tokens ", progress.documents, progress.tokens);
        }
    };
    let source = settings.open_source(cache, &Prepare { progress: &progress, ..Prepare::default() });
    if shown.load(Ordering::Relaxed) {
        eprintln!();
    }
    source
}
