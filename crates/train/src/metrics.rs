//! `metrics.jsonl`: one line of JSON for each logged step and each evaluation, and the same as TensorBoard events.
//!
//! After a resume the file is cut back to the step of the checkpoint, so that every step stands in it once. What is cut off waits in
//! `metrics.later.jsonl` until it is made again, or until a later checkpoint is resumed: then it is put back. The event file is written anew.

use std::collections::HashSet;
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
/// Name of the file with lines that lie beyond the checkpoint from which a run was resumed.
pub const LATER: &str = "metrics.later.jsonl";

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
    /// Mean loss of the steps since the line before, in nats per token.
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

    /// The same for a line and what it is when it is made again.
    fn key(&self) -> (u64, bool) {
        (self.step(), matches!(self, Line::Train(_)))
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Lines of a file, each with its bytes, and how many could not be read.
type Read = (Vec<(Line, Vec<u8>)>, usize);

/// Every complete line of a file, which need not exist.
fn read_lines(path: &Path) -> Result<Read> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        other => other.map_err(Error::io("read", path))?,
    };
    let (mut lines, mut unreadable) = (Vec::new(), 0);
    for bytes in text.split_inclusive(|&byte| byte == b'\n') {
        match serde_json::from_slice::<Line>(bytes) {
            Ok(line) if bytes.ends_with(b"\n") => lines.push((line, bytes.to_vec())),
            _ => unreadable += 1,
        }
    }
    Ok((lines, unreadable))
}

/// Makes a file hold these lines, and nothing is done where it does; without lines there is no file.
fn write_lines(path: &Path, lines: &[(Line, Vec<u8>)]) -> Result<()> {
    let bytes: Vec<u8> = lines.iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect();
    match std::fs::read(path) {
        Ok(found) if found == bytes && !bytes.is_empty() => Ok(()),
        Ok(_) if bytes.is_empty() => std::fs::remove_file(path).map_err(Error::io("remove", path)),
        Err(_) if bytes.is_empty() => Ok(()),
        _ => Ok(write_whole(path, &bytes)?),
    }
}

/// The last step of a run's metrics; 0 where there are none.
pub fn last_step(folder: &Path) -> Result<u64> {
    Ok(read_lines(&folder.join(METRICS))?.0.iter().map(|(line, _)| line.step()).max().unwrap_or(0))
}

/// The metrics of a run, open for more.
#[derive(Debug)]
pub struct Metrics {
    file: File,
    path: PathBuf,
    later: PathBuf,
    events: Events,
}

impl Metrics {
    /// Opens the metrics of a run's folder with the lines up to `step`; how many lines were not readable, which happens to the last
    /// one when a run is killed.
    pub fn open(folder: &Path, step: u64) -> Result<(Metrics, usize)> {
        let (path, later) = (folder.join(METRICS), folder.join(LATER));
        let (mut lines, unreadable) = read_lines(&path)?;
        let before = lines.len();
        let mut beyond: Vec<_> = lines.extract_if(.., |(line, _)| line.step() > step).collect();
        let last = lines.iter().map(|(line, _)| line.step()).max().unwrap_or(0);
        // Of what waits, that which was cut off just now is newer.
        let newer: HashSet<_> = beyond.iter().map(|(line, _)| line.key()).collect();
        let mut waiting = read_lines(&later)?.0;
        waiting.retain(|(line, _)| line.step() > last && !newer.contains(&line.key()));
        waiting.append(&mut beyond);
        waiting.sort_by_key(|(line, _)| line.step());
        // In this order a line is in one file or the other whenever the process is killed.
        write_lines(&later, &waiting)?;
        let restored: Vec<_> = waiting.extract_if(.., |(line, _)| line.step() <= step).collect();
        if lines.len() != before || !restored.is_empty() || unreadable > 0 {
            lines.extend(restored);
            write_whole(&path, &lines.iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect::<Vec<u8>>())?;
        }
        write_lines(&later, &waiting)?;
        let mut events = Events::create(folder, now())?;
        for (line, _) in &lines {
            point(&mut events, line)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io("open", &path))?;
        Ok((Metrics { file, path, later, events }, unreadable))
    }

    /// Lines up to this step stand in the metrics again, and wait no longer.
    pub fn finish(&self, step: u64) -> Result<()> {
        let mut waiting = read_lines(&self.later)?.0;
        waiting.retain(|(line, _)| line.step() > step);
        write_lines(&self.later, &waiting)
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
            values.extend(evaluation.beyond.map(|part| ("loss/beyond", part.loss)));
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
