//! Progress of a run: events for displays, and a file of warnings.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::eval::Evaluation;
use crate::metrics::{Train, now};

/// Name of the warnings file.
pub const WARNINGS: &str = "warnings.log";

/// An event of a run.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The run starts after this many of its steps.
    Begun(u64, u64),
    /// This many steps are done.
    Step(u64),
    /// A line of metrics was logged.
    Logged {
        /// Mean values since the previous line.
        train: &'a Train,
        /// Estimated remaining seconds.
        left: f64,
        /// Fraction of the machine's peak throughput, if known.
        share: Option<f64>,
    },
    /// An evaluation after this step.
    HeldOut(u64, &'a Evaluation),
    /// A message, such as a warning.
    Remark(&'a str),
}

/// Receiver of events.
#[derive(Clone, Default)]
pub enum Display {
    /// None.
    #[default]
    Silent,
    /// A callback.
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
    /// Whether this is rank 0.
    warnings: Option<PathBuf>,
    /// Operations of a step, and peak operations per second of the machine.
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

    pub(crate) fn message(&self, text: &str) {
        self.emit(Event::Remark(text));
    }

    /// Emits a warning and appends it to the warnings file.
    pub(crate) fn warn(&mut self, step: u64, text: &str) {
        self.count += 1;
        self.message(&format!("warning: {text}"));
        let Some(path) = &self.warnings else { return };
        let file = OpenOptions::new().create(true).append(true).open(path);
        // A failure to write the warnings file must not stop the run.
        let _ = file.and_then(|mut file| writeln!(file, "{:.3} step {step}: {text}", now()));
    }
}

/// A value with this many decimals, or in scientific notation if it is large.
pub fn compact(value: f64, decimals: usize) -> String {
    if value < 1e6 { format!("{value:.decimals$}") } else { format!("{value:.3e}") }
}

/// An evaluation as one line.
pub fn describe(evaluation: &Evaluation) -> String {
    let Evaluation { loss, bits_per_byte, accuracy, recall, rest, excess, within, beyond, .. } = evaluation;
    let mut text = format!("held-out loss {loss:.4}, perplexity {}", compact(evaluation.perplexity, 3));
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
