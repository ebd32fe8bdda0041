//! What long work shows on a terminal, and how it is asked to end.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use termwise_train::run::STOPPED;
use termwise_train::tell::tell;

/// The first Ctrl-C sets the flag and says what is still being done, the second ends the process.
pub fn stop_on_interrupt(doing: &'static str) -> Arc<AtomicBool> {
    stop_or(doing, || std::process::exit(STOPPED.into()))
}

/// As [`stop_on_interrupt`]; with the second, something else happens. SIGTERM and SIGHUP, which a closed terminal sends, count as Ctrl-C.
pub fn stop_or(doing: &'static str, second: impl Fn() + Send + 'static) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let handler = move || match flag.swap(true, Ordering::Relaxed) {
        true => second(),
        false => tell(&format!("\n{doing}; Ctrl-C again ends at once")),
    };
    // Without a handler a signal ends the process; what it has written by then can be taken up again.
    with_hangups_as_they_were(|| {
        let _ = ctrlc::set_handler(handler);
    });
    stop
}

/// Who starts a program with `nohup` wants it to outlive the terminal: SIGHUP stays ignored where it was, though ctrlc takes it, too.
fn with_hangups_as_they_were(install: impl FnOnce()) {
    #[cfg(unix)]
    {
        use nix::sys::signal::{SigHandler, Signal, signal};
        // SAFETY: to ignore a signal installs no code that could run in its handler.
        let ignore = || unsafe { signal(Signal::SIGHUP, SigHandler::SigIgn) };
        let before = ignore();
        install();
        if matches!(before, Ok(SigHandler::SigIgn)) {
            // It was possible a moment ago.
            let _ = ignore();
        }
    }
    #[cfg(not(unix))]
    install();
}

/// Sets the flag when standard input ends, as it does when the process that holds its other end is gone in whatever way.
pub fn stop_with_input(stop: &Arc<AtomicBool>) {
    let stop = stop.clone();
    std::thread::spawn(move || {
        // An input that cannot be read has ended, too.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        stop.store(true, Ordering::Relaxed);
    });
}

/// A bar with `what` behind the counts and an estimate of what is left; nothing where standard error is no terminal.
pub fn bar(what: &str) -> ProgressBar {
    let target = if io::stderr().is_terminal() { ProgressDrawTarget::stderr_with_hz(5) } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(&format!("{{bar:24}} {{pos}}/{{len}} {what}, {{eta}} left"));
    ProgressBar::with_draw_target(None, target).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸ "))
}
