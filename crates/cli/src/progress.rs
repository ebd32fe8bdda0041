//! What long work shows on a terminal, and how it is asked to end.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use termwise_report::duration;
use termwise_train::log::tell;
use termwise_train::metrics::Train;
use termwise_train::progress::{Event, describe};
use termwise_train::sweep::Progress;

use crate::error::Exit;

/// Signals within this time are one: `timeout` and a terminal that is closed send two, and nobody types so fast.
const ONE: Duration = Duration::from_millis(500);

/// The first Ctrl-C sets the flag and says what is still being done, the second ends the process.
pub fn stop_on_interrupt(doing: &'static str) -> Arc<AtomicBool> {
    stop_or(doing, || std::process::exit(Exit::Interrupted as i32))
}

/// As [`stop_on_interrupt`]; with the second, something else happens. SIGTERM, SIGUSR1 and SIGHUP, which a closed terminal sends, count as Ctrl-C.
pub fn stop_or(doing: &'static str, second: impl Fn() + Send + 'static) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let first = OnceLock::new();
    let action = move || {
        if !flag.swap(true, Ordering::Relaxed) {
            let _ = first.set(Instant::now());
            tell(&format!("\n{doing}; Ctrl-C again ends at once"));
        } else if first.get().is_none_or(|at| at.elapsed() > ONE) {
            second();
        }
    };
    *ACTION.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(action));
    signals::take();
    stop
}

/// What an interrupt does; between commands it ends the process.
static ACTION: Mutex<Option<Box<dyn Fn() + Send>>> = Mutex::new(None);

/// ctrlc calls it in a thread of its own, so that it may do anything.
fn interrupted() {
    match ACTION.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        Some(action) => action(),
        None => std::process::exit(Exit::Interrupted as i32),
    }
}

/// Gives signals back to the program that called, when dropped.
pub struct GiveBack;

impl Drop for GiveBack {
    fn drop(&mut self) {
        signals::give_back();
        *ACTION.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(unix)]
mod signals {
    use std::sync::{Mutex, OnceLock, PoisonError};

    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    /// SIGTERM before SIGUSR1, which schedulers send some time before they end a job; SIGHUP last.
    const TAKEN: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGHUP];
    type Actions = [SigAction; 4];
    /// What they did before they were taken.
    static BEFORE: Mutex<Option<Actions>> = Mutex::new(None);

    /// Gives what they did until now.
    fn set(actions: Actions) -> Actions {
        std::array::from_fn(|i| {
            // SAFETY: an action is to ignore the signal, or was in place before: that of ctrlc, or the caller's.
            let old = unsafe { sigaction(TAKEN[i], &actions[i]) };
            // It fails for signals that cannot be taken alone.
            old.unwrap_or(actions[i])
        })
    }

    pub fn take() {
        /// Ctrlc can be installed once in a process.
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
                // ctrlc leaves this one alone; its action for the others does not ask which signal it is.
                ours[2] = ours[1];
                ours
            }
            // A signal then ends the process; what it has written by then can be taken up again.
            Err(_) => before,
        });
        // Who starts a program with `nohup` wants it to outlive the terminal.
        if matches!(before[3].handler(), SigHandler::SigIgn) {
            ours[3] = ignore;
        }
        set(ours);
        *kept = Some(before);
    }

    pub fn give_back() {
        if let Some(before) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
            set(before);
        }
    }
}

#[cfg(not(unix))]
mod signals {
    pub fn take() {
        // It is there already after the first time, and without it an interrupt ends the process.
        let _ = ctrlc::set_handler(super::interrupted);
    }

    pub fn give_back() {}
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

/// Progress on standard error: a bar on a terminal, otherwise lines for a log; nothing with `--quiet`.
pub struct Bar {
    line: ProgressBar,
    quiet: bool,
    /// Where there is no line that moves.
    lines: Mutex<Option<Lines>>,
}

/// A part of the work as it is told in a log: a line every [`EVERY`].
struct Lines {
    /// When it began, what was done by then, and of how much.
    begun: Instant,
    first: u64,
    of: u64,
    /// What was last done, and when that was told.
    last: u64,
    told: Instant,
}

/// Between two lines of a log.
const EVERY: Duration = Duration::from_secs(60);

impl Bar {
    pub fn new(quiet: bool) -> Bar {
        let shown = !quiet && io::stderr().is_terminal();
        let target = if shown { ProgressDrawTarget::stderr_with_hz(5) } else { ProgressDrawTarget::hidden() };
        let line = ProgressBar::with_draw_target(None, target).with_style(style("{bar:24} {pos}/{len} {msg}, {eta} left"));
        Bar { line, quiet, lines: Mutex::new(None) }
    }

    /// So many of so many; `what` they are, or what is being done.
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

    /// Tells how far the work is once in a while, with an estimate of what is left of this part.
    fn log(&self, done: u64, of: u64, what: &str) {
        let now = Instant::now();
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let part = lines.get_or_insert(Lines { begun: now, first: done, of, last: done, told: now });
        if part.of != of || done < part.last {
            // Another part; silence is counted over both.
            *part = Lines { begun: now, first: done, of, last: done, told: part.told };
        }
        part.last = done;
        if now.duration_since(part.told) >= EVERY && done > part.first {
            part.told = now;
            let left = now.duration_since(part.begun).as_secs_f64() * of.saturating_sub(done) as f64 / (done - part.first) as f64;
            tell(&format!("{done}/{of} {what}, about {} left", duration(left)));
        }
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
        self.set((1000.0 * fraction) as u64, 1000, &format!("{finished} of {total} runs finished{failed}, {running} under way{left}"));
    }

    /// How a training goes: in the line that moves, or where there is none in one line for each that is logged.
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
                let norm = grad_norm.map_or("not finite".into(), |norm| format!("{norm:.3}"));
                let steps = self.line.length().unwrap_or(0);
                let left = if *step < steps { format!("  {} left", duration(left)) } else { String::new() };
                self.tell(&format!("step {step}/{steps}  loss {loss:.4}  norm {norm}  lr {lr:.3e}  {speed:.0} tokens/s{share}{left}"));
            }
            Event::HeldOut(step, evaluation) => self.tell(&format!("step {step}  {}", describe(evaluation))),
            Event::Remark(text) => self.tell(text),
        }
    }

    /// A line for logs; nothing if a progress bar shows the same.
    pub fn log_line(&self, text: &str) {
        if self.line.is_hidden() {
            self.tell(text);
        }
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
    fn every_call_takes_signals_and_gives_them_back() {
        // However this test was started.
        // SAFETY: ignored signals run no code.
        unsafe { signal(Signal::SIGTERM, SigHandler::SigIgn) }.expect("it can be ignored");
        for _ in 0..2 {
            let call = GiveBack;
            let ended = Arc::new(AtomicBool::new(false));
            let flag = ended.clone();
            let stop = stop_or("stopping", move || flag.store(true, Ordering::Relaxed));
            raise(Signal::SIGTERM).expect("this process");
            assert!(waits_for(&stop));
            // A second one a moment later belongs to the first; on a machine that is too busy to say, this checks nothing.
            let begun = Instant::now();
            raise(Signal::SIGTERM).expect("this process");
            std::thread::sleep(Duration::from_millis(50));
            assert!(!ended.load(Ordering::Relaxed) || begun.elapsed() > ONE / 2);
            std::thread::sleep(ONE);
            raise(Signal::SIGTERM).expect("this process");
            assert!(waits_for(&ended));
            drop(call);
            // Were it still taken, it would end this process.
            raise(Signal::SIGTERM).expect("this process");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
