//! What long work shows on a terminal, and how it is interrupted.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The first Ctrl-C sets the flag and says what is still being done, the second ends the process.
pub fn stop_on_interrupt(doing: &'static str) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    // Without a handler Ctrl-C ends the process; what it has written by then can be taken up again.
    let _ = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        crate::context::note(&format!("\n{doing}; Ctrl-C again ends at once"));
    });
    stop
}

/// Progress on standard error: nothing where that is no terminal, or with `--quiet`.
pub struct Bar(ProgressBar);

impl Bar {
    pub fn new(quiet: bool) -> Bar {
        let shown = !quiet && io::stderr().is_terminal();
        let target = if shown { ProgressDrawTarget::stderr_with_hz(5) } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}, {eta} left").unwrap_or_else(|_| ProgressStyle::default_bar());
        Bar(ProgressBar::with_draw_target(None, target).with_style(style.progress_chars("━╸ ")))
    }

    /// So many of so many; `what` they are, or what is being done.
    pub fn at(&self, done: u64, of: u64, what: &str) {
        self.0.set_length(of);
        self.0.set_position(done);
        self.0.set_message(what.to_owned());
    }

    /// So many, of nobody knows how many.
    pub fn count(&self, done: u64, what: &str) {
        if self.0.length().is_none() {
            self.0.set_style(ProgressStyle::with_template("{pos} {msg}, {elapsed}").unwrap_or_else(|_| ProgressStyle::default_spinner()));
        }
        self.0.set_position(done);
        self.0.set_message(what.to_owned());
    }
}

/// What was shown goes.
impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
