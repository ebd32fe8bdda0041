//! What a run says while it works: a bar on a terminal, plain lines elsewhere, and a file of warnings.

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::eval::Evaluation;
use crate::metrics::{Train, now};
use crate::tell::tell;

/// Where progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Display {
    /// A bar if standard error is a terminal, otherwise lines.
    Auto,
    /// Nowhere.
    Silent,
}

/// Name of the file with warnings.
pub const WARNINGS: &str = "warnings.log";

pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    lines: bool,
    steps: u64,
    warnings: PathBuf,
    /// Operations of a step and what the machine can do in a second.
    share: Option<(f64, f64)>,
    pub(crate) count: usize,
}

impl Progress {
    pub(crate) fn new(display: Display, steps: u64, step: u64, folder: &std::path::Path, share: Option<(f64, f64)>) -> Progress {
        let terminal = display == Display::Auto && std::io::stderr().is_terminal();
        let bar = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr_with_hz(5));
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}, {eta} left");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸ "));
            bar.set_position(step);
            bar.reset_eta();
            bar
        });
        let lines = display == Display::Auto && !terminal;
        Progress { bar, lines, steps, warnings: folder.join(WARNINGS), share, count: 0 }
    }

    pub(crate) fn step(&self, step: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(step);
        }
    }

    pub(crate) fn train(&self, train: &Train, step_seconds: f64) {
        let speed = train.tokens_per_second;
        let share = self.share.map(|(operations, peak)| 100.0 * operations / step_seconds.max(1e-9) / peak);
        let share = share.map_or(String::new(), |share| format!(", {share:.0} % of peak"));
        if let Some(bar) = &self.bar {
            bar.set_message(format!("loss {:.4}, {speed:.0} tokens/s{share}", train.loss));
        } else if self.lines {
            let left = Duration::from_secs_f64(step_seconds.max(0.0) * self.steps.saturating_sub(train.step) as f64);
            let steps = self.steps;
            let Train { step, loss, lr, .. } = train;
            let norm = train.grad_norm.map_or("not finite".into(), |norm| format!("{norm:.3}"));
            tell(&format!(
                "step {step}/{steps}  loss {loss:.4}  norm {norm}  lr {lr:.3e}  {speed:.0} tokens/s{share}  {} left",
                short(left)
            ));
        }
    }

    pub(crate) fn held_out(&self, step: u64, evaluation: &Evaluation) {
        self.say(&format!("step {step}  {}", describe(evaluation)));
    }

    /// Tells the user, above the bar.
    pub(crate) fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| tell(text)),
            None if self.lines => tell(text),
            None => {}
        }
    }

    /// Tells the user and keeps it in the file of warnings.
    pub(crate) fn warn(&mut self, step: u64, text: &str) {
        self.count += 1;
        self.say(&format!("warning: {text}"));
        let file = OpenOptions::new().create(true).append(true).open(&self.warnings);
        // A warning that cannot be kept must not end a run that goes well.
        let _ = file.and_then(|mut file| writeln!(file, "{:.3} step {step}: {text}", now()));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// An evaluation in one line.
pub fn describe(evaluation: &Evaluation) -> String {
    let Evaluation { loss, perplexity, bits_per_byte, recall, rest, excess, .. } = evaluation;
    let mut text = format!("held-out loss {loss:.4}, perplexity {perplexity:.3}");
    if let Some(bits) = bits_per_byte {
        text += &format!(", {bits:.4} bits per byte");
    }
    if let (Some(recall), Some(rest)) = (recall, rest) {
        text += &format!(", recall {:.4}, rest {:.4}", recall.loss, rest.loss);
    }
    if let Some(excess) = excess {
        text += &format!(", {:.4} above the best possible", excess.all);
    }
    text
}

fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}
