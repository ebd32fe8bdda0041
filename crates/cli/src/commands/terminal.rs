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
        eprintln!("\n{doing}; Ctrl-C again ends at once");
    });
    stop
}

/// A bar with `what` behind the counts and an estimate of what is left; nothing where standard error is no terminal.
pub fn bar(what: &str) -> ProgressBar {
    let target = if io::stderr().is_terminal() { ProgressDrawTarget::stderr_with_hz(5) } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(&format!("{{bar:24}} {{pos}}/{{len}} {what}, {{eta}} left"));
    ProgressBar::with_draw_target(None, target).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸ "))
}
