//! `metrics.jsonl`: one line of JSON for each logged step and each evaluation, and the same as TensorBoard events.
//!
//! After a resume the file is cut back to the step of the checkpoint, so that every step stands in it once. The event file is written
//! anew from it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::eval::Evaluation;
use crate::tensorboard::Events;
use termwise_base::files::write_whole;

/// Name of the file.
pub const METRICS: &str = "metrics.jsonl";

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// Training.
    Train(Train),
    /// An evaluation on held-out data.
    HeldOut {
        /// Steps done.
        step: u64,
        /// Seconds since 1970.
        time: f64,
        /// What was measured.
        #[serde(flatten)]
        evaluation: Evaluation,
    },
}

/// A step of training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Train {
    /// Steps done.
    pub step: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// Mean loss of the steps since the line before, in nats a token.
    pub loss: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Norm of this step's gradient before clipping; absent where it is not finite, since JSON has no such number. The step was skipped then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Tokens seen so far that counted.
    pub tokens: u64,
    /// Since the line before, evaluations and checkpoints not counted.
    pub tokens_per_second: f64,
    /// Whether a step since the line before was a spike (see [`crate::spikes`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spike: bool,
    /// Updates skipped so far.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Line {
    /// Steps done.
    pub fn step(&self) -> u64 {
        match self {
            Line::Train(train) => train.step,
            Line::HeldOut { step, .. } => *step,
        }
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// The metrics of a run, open for more.
#[derive(Debug)]
pub struct Metrics {
    file: File,
    path: PathBuf,
    events: Events,
}

impl Metrics {
    /// Opens the metrics of a run's folder and cuts them back to `step`; how many lines were not readable, which happens to the last
    /// one when a run is killed.
    pub fn open(folder: &Path, step: u64) -> Result<(Metrics, usize)> {
        let path = folder.join(METRICS);
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            other => other.map_err(Error::io("read", &path))?,
        };
        let (mut kept, mut lines, mut unreadable) = (Vec::with_capacity(text.len()), Vec::new(), 0);
        for bytes in text.split_inclusive(|&byte| byte == b'\n') {
            match serde_json::from_slice::<Line>(bytes) {
                Ok(line) if bytes.ends_with(b"\n") && line.step() <= step => {
                    kept.extend_from_slice(bytes);
                    lines.push(line);
                }
                Ok(_) => {}
                Err(_) => unreadable += 1,
            }
        }
        if kept.len() != text.len() {
            write_whole(&path, &kept)?;
        }
        let mut events = Events::create(folder, now())?;
        for line in &lines {
            point(&mut events, line)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io("open", &path))?;
        Ok((Metrics { file, path, events }, unreadable))
    }

    /// Appends a line.
    pub fn add(&mut self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_vec(line).map_err(Error::json(&self.path))?;
        text.push(b'\n');
        // In one call: a killed run leaves at most one line incomplete.
        self.file.write_all(&text).map_err(Error::io("write", &self.path))?;
        point(&mut self.events, line)
    }

    /// Flushes to the disk; a checkpoint must not be there before its metrics are.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(Error::io("flush to disk", &self.path))
    }
}

fn point(events: &mut Events, line: &Line) -> Result<()> {
    match line {
        Line::Train(Train { step, time, loss, lr, grad_norm, tokens_per_second, .. }) => {
            let mut values = vec![("loss/train", *loss), ("learning_rate", *lr), ("tokens_per_second", *tokens_per_second)];
            values.extend(grad_norm.map(|norm| ("gradient_norm", norm)));
            events.scalars(*time, *step, &values)
        }
        Line::HeldOut { step, time, evaluation } => {
            let mut values = vec![("loss/held_out", evaluation.loss), ("perplexity/held_out", evaluation.perplexity)];
            values.extend(evaluation.bits_per_byte.map(|bits| ("bits_per_byte/held_out", bits)));
            values.extend(evaluation.recall.map(|part| ("loss/recall", part.loss)));
            values.extend(evaluation.rest.map(|part| ("loss/rest", part.loss)));
            values.extend(evaluation.excess.map(|excess| ("loss/excess", excess.all)));
            events.scalars(*time, *step, &values)
        }
    }
}

/// All lines of a run's metrics.
pub fn read(folder: &Path) -> Result<Vec<Line>> {
    let path = folder.join(METRICS);
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    text.lines().map(|line| serde_json::from_str(line).map_err(Error::json(&path))).collect()
}
