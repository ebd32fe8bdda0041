//! Progress on a terminal, and signals that request a stop.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use termwise_data::{Prepare, Progress as Tokenized};
use termwise_report::duration;
use termwise_train::log::print_line;
use termwise_train::metrics::Train;
use termwise_train::progress::{Event, compact, describe};
use termwise_train::sweep::{Progress, SweepControl};

use crate::error::Exit;

/// Signals within this time count as one: `timeout` and a closed terminal send two.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// The first Ctrl-C sets the flag and prints the work that is still being done. The second exits the process.
pub fn stop_on_interrupt(doing: &'static str) -> Arc<AtomicBool> {
    stop_or(doing, || std::process::exit(Exit::Interrupted as i32))
}

/// As [`stop_on_interrupt`] for work in other processes: the second kills them.
pub fn stop_or_kill(doing: &'static str) -> SweepControl {
    let kill = Arc::new(AtomicBool::new(false));
    let flag = kill.clone();
    SweepControl { stop: stop_or(doing, move || flag.store(true, Ordering::Relaxed)), kill }
}

/// As [`stop_on_interrupt`], with another action for the second. SIGTERM, SIGUSR1 and SIGHUP (sent by a closed terminal) count as Ctrl-C.
fn stop_or(doing: &'static str, second: impl Fn() + Send + 'static) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let first = OnceLock::new();
    let action = move || {
        if !flag.swap(true, Ordering::Relaxed) {
            let _ = first.set(Instant::now());
            print_line(&format!("\n{doing}; press Ctrl-C again to exit at once"));
        } else if first.get().is_none_or(|at| at.elapsed() > DEBOUNCE) {
            second();
        }
    };
    *ACTION.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(action));
    signals::take();
    stop
}

/// The action of a signal; between commands it exits the process.
static ACTION: Mutex<Option<Box<dyn Fn() + Send>>> = Mutex::new(None);

/// ctrlc calls it in a separate thread, so it need not be async-signal-safe.
fn interrupted() {
    match ACTION.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        Some(action) => action(),
        None => std::process::exit(Exit::Interrupted as i32),
    }
}

/// Restores the caller's signal handlers on drop.
pub struct RestoreSignals;

impl Drop for RestoreSignals {
    fn drop(&mut self) {
        signals::restore();
        *ACTION.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(unix)]
mod signals {
    use std::sync::{Mutex, OnceLock, PoisonError};

    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    /// The handled signals. Schedulers send SIGUSR1 some time before they end a job.
    const HANDLED: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGHUP];
    type Actions = [SigAction; 4];
    /// The previous handlers.
    static BEFORE: Mutex<Option<Actions>> = Mutex::new(None);

    /// Installs handlers and returns the previous ones.
    fn set(actions: Actions) -> Actions {
        std::array::from_fn(|i| {
            // SAFETY: an action ignores the signal, or was installed before by ctrlc or by the caller.
            let old = unsafe { sigaction(HANDLED[i], &actions[i]) };
            // It fails only for signals that cannot be handled.
            old.unwrap_or(actions[i])
        })
    }

    pub fn take() {
        /// ctrlc can be installed once per process.
        static OURS: OnceLock<Actions> = OnceLock::new();
        let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
        let mut kept = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_some() {
            return;
        }
        let before = set([ignore; 4]);
        let mut ours = *OURS.get_or_init(|| match ctrlc::set_handler(super::interrupted) {
            Ok(()) => {
                let mut ours = set([ignore; 4]);
                // ctrlc does not handle SIGUSR1; its handler is the same for all signals.
                ours[2] = ours[1];
                ours
            }
            // A signal then ends the process, which can be resumed from its last checkpoint.
            Err(_) => before,
        });
        // With `nohup`, the program must outlive the terminal.
        if matches!(before[3].handler(), SigHandler::SigIgn) {
            ours[3] = ignore;
        }
        set(ours);
        *kept = Some(before);
    }

    pub fn restore() {
        if let Some(before) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
            set(before);
        }
    }
}

#[cfg(not(unix))]
mod signals {
    pub fn take() {
        // It fails after the first time. Without it, an interrupt ends the process.
        let _ = ctrlc::set_handler(super::interrupted);
    }

    pub fn restore() {}
}

/// Sets the flag when standard input ends. It ends when the process at its other end exits or is killed.
pub fn stop_with_input(stop: &Arc<AtomicBool>) {
    let stop = stop.clone();
    std::thread::spawn(move || {
        // An input that cannot be read counts as ended.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        stop.store(true, Ordering::Relaxed);
    });
}

/// Calls with options that show the progress of tokenization and warnings on standard error, unless `quiet`.
pub fn while_tokenizing<T>(quiet: bool, open: impl FnOnce(Prepare) -> T) -> T {
    let bar = Bar::new(quiet);
    let progress = |progress: &Tokenized| bar.at(progress.read, progress.file_bytes, "bytes tokenized");
    let warn = |text: &str| {
        if !quiet {
            print_line(&format!("warning: {text}"));
        }
    };
    open(Prepare { progress: &progress, warn: &warn, ..Prepare::default() })
}

/// Progress on standard error: a bar on a terminal, otherwise lines for a log; nothing with `--quiet`.
pub struct Bar {
    line: ProgressBar,
    quiet: bool,
    /// Without a progress bar.
    lines: Mutex<Option<Lines>>,
}

/// Progress in a log: one line per [`LOG_INTERVAL`].
struct Lines {
    /// Its start, the items done by then, and their total.
    begun: Instant,
    first: u64,
    of: u64,
    /// The items done, and the time of the last line.
    last: u64,
    told: Instant,
}

/// Time between two lines of a log.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

impl Bar {
    pub fn new(quiet: bool) -> Bar {
        let shown = !quiet && io::stderr().is_terminal();
        let target = if shown { ProgressDrawTarget::stderr_with_hz(5) } else { ProgressDrawTarget::hidden() };
        let line = ProgressBar::with_draw_target(None, target).with_style(style("{bar:24} {pos}/{len} {msg}, {eta} left"));
        Bar { line, quiet, lines: Mutex::new(None) }
    }

    /// Shows `done` of `of` items. `what` names the items or the current work.
    pub fn at(&self, done: u64, of: u64, what: &str) {
        self.set(done, of, what);
        if !self.quiet && self.line.is_hidden() {
            self.log(done, of, what);
        }
    }

    fn set(&self, done: u64, of: u64, what: &str) {
        self.line.set_length(of);
        self.line.set_position(done);
        self.line.set_message(what.to_owned());
    }

    /// Prints a line from time to time, with an estimate of the remaining time.
    fn log(&self, done: u64, of: u64, what: &str) {
        let now = Instant::now();
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let part = lines.get_or_insert(Lines { begun: now, first: done, of, last: done, told: now });
        if part.of != of || done < part.last {
            // Another stage; the time since the last line continues.
            *part = Lines { begun: now, first: done, of, last: done, told: part.told };
        }
        part.last = done;
        if now.duration_since(part.told) >= LOG_INTERVAL && done > part.first {
            part.told = now;
            let left = now.duration_since(part.begun).as_secs_f64() * of.saturating_sub(done) as f64 / (done - part.first) as f64;
            print_line(&format!("{done}/{of} {what}, about {} left", duration(left)));
        }
    }

    /// Shows `done` items of an unknown total.
    pub fn count(&self, done: u64, what: &str) {
        if self.line.length().is_none() {
            self.line.set_style(style("{pos} {msg}, {elapsed}"));
        }
        self.line.set_position(done);
        self.line.set_message(what.to_owned());
    }

    /// Shows the progress of several runs.
    pub fn runs(&self, progress: &Progress) {
        let &Progress { total, finished, failed, running, fraction, remaining } = progress;
        let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
        let left = remaining.map_or(String::new(), |left| format!(", about {} left", duration(left.as_secs_f64())));
        self.line.set_style(style("{bar:24} {percent} %: {msg}"));
        self.set((1000.0 * fraction) as u64, 1000, &format!("{finished} of {total} runs finished{failed}, {running} running{left}"));
    }

    /// Shows the progress of a training: in the bar, or one line per logged step.
    pub fn training(&self, event: &Event) {
        match *event {
            Event::Begun(step, steps) => {
                self.set(step, steps, "");
                self.line.reset_eta();
            }
            Event::Step(step) => self.line.set_position(step),
            Event::Logged { train: Train { step, loss, lr, grad_norm, tokens_per_second: speed, .. }, left, share } => {
                let share = share.map_or(String::new(), |share| format!(", {:.0} % of peak FLOP/s", 100.0 * share));
                if !self.line.is_hidden() {
                    return self.line.set_message(format!("loss {loss:.4}, {speed:.0} tokens/s{share}"));
                }
                let norm = grad_norm.map_or("not finite".into(), |norm| compact(norm, 3));
                let loss = compact(*loss, 4);
                let steps = self.line.length().unwrap_or(0);
                let left = if *step < steps { format!("  {} left", duration(left)) } else { String::new() };
                self.print_line(&format!(
                    "step {step}/{steps}  loss {loss}  gradient norm {norm}  lr {lr:.3e}  {speed:.0} tokens/s{share}{left}"
                ));
            }
            Event::HeldOut(step, evaluation) => self.print_line(&format!("step {step}  {}", describe(evaluation))),
            Event::Remark(text) => self.print_line(text),
        }
    }

    /// Prints a line in logs. A progress bar shows the same.
    pub fn log_line(&self, text: &str) {
        if self.line.is_hidden() {
            self.print_line(text);
        }
    }

    /// Prints a line above the bar.
    pub fn print_line(&self, text: &str) {
        if !self.quiet {
            self.line.suspend(|| print_line(text));
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸ ")
}

/// Clears the bar.
impl Drop for Bar {
    fn drop(&mut self) {
        self.line.finish_and_clear();
    }
}

#[cfg(all(test, unix))]
mod tests {
    use nix::sys::signal::{SigHandler, Signal, raise, signal};

    use super::*;

    fn waits_for(flag: &AtomicBool) -> bool {
        let begun = Instant::now();
        while !flag.load(Ordering::Relaxed) && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        flag.load(Ordering::Relaxed)
    }

    #[test]
    fn every_call_handles_signals_and_restores_the_previous_handlers() {
        // The previous handler ignores the signal.
        // SAFETY: ignored signals run no code.
        unsafe { signal(Signal::SIGTERM, SigHandler::SigIgn) }.expect("SIGTERM can be ignored");
        for _ in 0..2 {
            let call = RestoreSignals;
            let ended = Arc::new(AtomicBool::new(false));
            let flag = ended.clone();
            let stop = stop_or("stopping", move || flag.store(true, Ordering::Relaxed));
            raise(Signal::SIGTERM).expect("this process");
            assert!(waits_for(&stop));
            // A second one within DEBOUNCE counts as the first. On a very busy machine this checks nothing.
            let begun = Instant::now();
            raise(Signal::SIGTERM).expect("this process");
            std::thread::sleep(Duration::from_millis(50));
            assert!(!ended.load(Ordering::Relaxed) || begun.elapsed() > DEBOUNCE / 2);
            std::thread::sleep(DEBOUNCE);
            raise(Signal::SIGTERM).expect("this process");
            assert!(waits_for(&ended));
            drop(call);
            // The previous handler ignores it.
            raise(Signal::SIGTERM).expect("this process");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
