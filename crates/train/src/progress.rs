//! What a run says while it works: events for whoever shows them, and a file of warnings.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::eval::Evaluation;
use crate::metrics::{Train, now};

/// Name of the file with warnings.
pub const WARNINGS: &str = "warnings.log";

/// What happens during a run.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// It begins after so many steps of so many.
    Begun(u64, u64),
    /// So many steps are done.
    Step(u64),
    /// What was logged.
    Logged {
        /// Mean values since the last.
        train: &'a Train,
        /// Seconds that the rest will take at this pace.
        left: f64,
        /// Of what the machine can do at most, where that is known.
        share: Option<f64>,
    },
    /// An evaluation after this step.
    HeldOut(u64, &'a Evaluation),
    /// Something to tell, such as a warning.
    Remark(&'a str),
}

/// Who is told.
#[derive(Clone, Default)]
pub enum Display {
    /// Nobody.
    #[default]
    Silent,
    /// This function.
    To(Arc<dyn Fn(&Event) + Send + Sync>),
}

impl fmt::Debug for Display {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Display::Silent) { "Silent" } else { "To(…)" })
    }
}

pub(crate) struct Progress {
    display: Display,
    steps: u64,
    /// Of rank 0.
    warnings: Option<PathBuf>,
    /// Operations of a step and what the machine can do in a second.
    share: Option<(f64, f64)>,
    pub(crate) count: usize,
}

impl Progress {
    pub(crate) fn new(display: Display, steps: u64, step: u64, folder: Option<&Path>, share: Option<(f64, f64)>) -> Progress {
        let progress = Progress { display, steps, warnings: folder.map(|folder| folder.join(WARNINGS)), share, count: 0 };
        progress.emit(Event::Begun(step, steps));
        progress
    }

    fn emit(&self, event: Event) {
        if let Display::To(display) = &self.display {
            display(&event);
        }
    }

    pub(crate) fn step(&self, step: u64) {
        self.emit(Event::Step(step));
    }

    pub(crate) fn train(&self, train: &Train, step_seconds: f64) {
        let share = self.share.map(|(operations, peak)| operations / step_seconds.max(1e-9) / peak);
        let left = step_seconds.max(0.0) * self.steps.saturating_sub(train.step) as f64;
        self.emit(Event::Logged { train, left, share });
    }

    pub(crate) fn held_out(&self, step: u64, evaluation: &Evaluation) {
        self.emit(Event::HeldOut(step, evaluation));
    }

    pub(crate) fn say(&self, text: &str) {
        self.emit(Event::Remark(text));
    }

    /// Tells it and keeps it in the file of warnings.
    pub(crate) fn warn(&mut self, step: u64, text: &str) {
        self.count += 1;
        self.say(&format!("warning: {text}"));
        let Some(path) = &self.warnings else { return };
        let file = OpenOptions::new().create(true).append(true).open(path);
        // A warning that cannot be kept must not end a run that goes well.
        let _ = file.and_then(|mut file| writeln!(file, "{:.3} step {step}: {text}", now()));
    }
}

/// A perplexity with three digits after the point, or in scientific notation if it is large.
pub fn perplexity(value: f64) -> String {
    if value < 1e6 { format!("{value:.3}") } else { format!("{value:.3e}") }
}

/// An evaluation in one line.
pub fn describe(evaluation: &Evaluation) -> String {
    let Evaluation { loss, bits_per_byte, accuracy, recall, rest, excess, within, beyond, .. } = evaluation;
    let mut text = format!("held-out loss {loss:.4}, perplexity {}", perplexity(evaluation.perplexity));
    if let Some(bits) = bits_per_byte {
        text += &format!(", {bits:.4} bits per byte");
    }
    if let Some(accuracy) = accuracy {
        text += &format!(", accuracy {:.1} %", 100.0 * accuracy);
    }
    if let (Some(recall), Some(rest)) = (recall, rest) {
        text += &format!(", recall {:.4}, rest {:.4}", recall.loss, rest.loss);
    }
    if let (Some(within), Some(beyond)) = (within, beyond) {
        text += &format!(", within the length of training {:.4}, beyond {:.4}", within.loss, beyond.loss);
    }
    if let Some(excess) = excess {
        text += &format!(", {:.4} above the best possible", excess.all);
    }
    text
}
