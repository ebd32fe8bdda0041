//! What long work shows on a terminal, and how it is asked to end.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use termwise_report::duration;
use termwise_train::sweep::Progress;
use termwise_train::tell::tell;

use crate::error::Exit;

/// The first Ctrl-C sets the flag and says what is still being done, the second ends the process.
pub fn stop_on_interrupt(doing: &'static str) -> Arc<AtomicBool> {
    stop_or(doing, || std::process::exit(Exit::Interrupted as i32))
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

/// Progress on standard error: a line that moves where that is a terminal, and remarks; nothing with `--quiet`.
pub struct Bar {
    line: ProgressBar,
    quiet: bool,
}

impl Bar {
    pub fn new(quiet: bool) -> Bar {
        let shown = !quiet && io::stderr().is_terminal();
        let target = if shown { ProgressDrawTarget::stderr_with_hz(5) } else { ProgressDrawTarget::hidden() };
        let line = ProgressBar::with_draw_target(None, target).with_style(style("{bar:24} {pos}/{len} {msg}, {eta} left"));
        Bar { line, quiet }
    }

    /// So many of so many; `what` they are, or what is being done.
    pub fn at(&self, done: u64, of: u64, what: &str) {
        self.line.set_length(of);
        self.line.set_position(done);
        self.line.set_message(what.to_owned());
    }

    /// So many, of nobody knows how many.
    pub fn count(&self, done: u64, what: &str) {
        if self.line.length().is_none() {
            self.line.set_style(style("{pos} {msg}, {elapsed}"));
        }
        self.line.set_position(done);
        self.line.set_message(what.to_owned());
    }

    /// How far several runs are.
    pub fn runs(&self, progress: &Progress) {
        let &Progress { total, finished, failed, running, fraction, remaining } = progress;
        let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
        let left = remaining.map_or(String::new(), |left| format!(", about {} left", duration(left.as_secs_f64())));
        self.line.set_style(style("{bar:24} {percent} %: {msg}"));
        self.at((1000.0 * fraction) as u64, 1000, &format!("{finished} of {total} runs finished{failed}, {running} under way{left}"));
    }

    /// A remark that stays, above the line that moves.
    pub fn tell(&self, text: &str) {
        if !self.quiet {
            self.line.suspend(|| tell(text));
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸ ")
}

/// What was shown goes.
impl Drop for Bar {
    fn drop(&mut self) {
        self.line.finish_and_clear();
    }
}
