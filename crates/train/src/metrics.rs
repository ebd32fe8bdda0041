//! `metrics.jsonl`: one JSON line per logged step and per evaluation. The same values are written as TensorBoard events.
//!
//! On resume, the file is truncated to the step of the checkpoint, so every step occurs once. The removed lines are kept in
//! `metrics.later.jsonl` until their steps are repeated, or until a later checkpoint is resumed, which restores them. The event file is rewritten.

use std::collections::HashSet;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::eval::Evaluation;
use crate::tensorboard::Events;
use termwise_base::files::write_whole;

/// Name of the metrics file.
pub const METRICS: &str = "metrics.jsonl";
/// Name of the file with lines beyond the checkpoint from which a run was resumed.
pub const LATER_METRICS: &str = "metrics.later.jsonl";

/// One line of metrics.
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
        /// The measurements; `None` if the loss was NaN or infinite, in the file `"loss": null, "finite": false`.
        #[serde(flatten, with = "measured")]
        evaluation: Option<Evaluation>,
    },
}

/// An evaluation, or the record of a loss that was NaN or infinite. Neither is the default: any other line is an error.
mod measured {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::eval::Evaluation;

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Measured {
        Finite(Evaluation),
        NotFinite { loss: (), finite: bool },
    }

    pub fn serialize<S: Serializer>(evaluation: &Option<Evaluation>, serializer: S) -> Result<S::Ok, S::Error> {
        evaluation.map_or(Measured::NotFinite { loss: (), finite: false }, Measured::Finite).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Evaluation>, D::Error> {
        Ok(match Measured::deserialize(deserializer)? {
            Measured::Finite(evaluation) => Some(evaluation),
            Measured::NotFinite { .. } => None,
        })
    }
}

/// A step of training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Train {
    /// Steps done.
    pub step: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// Mean loss of the steps since the previous line, in nats per token.
    pub loss: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Gradient norm of this step before clipping. Absent if it is NaN or infinite, which JSON cannot represent; the step was then skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Tokens seen so far that contribute to the loss.
    pub tokens: u64,
    /// Throughput since the previous line, without evaluations and checkpoints.
    pub tokens_per_second: f64,
    /// Whether a step since the previous line was a loss spike (see [`crate::spikes`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spike: bool,
    /// Number of updates skipped so far.
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

    /// Equal for a line and its repetition after a resume.
    fn key(&self) -> (u64, bool) {
        (self.step(), matches!(self, Line::Train(_)))
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Reads the metrics of a run as they are appended. This is the only reader of the file.
#[derive(Clone, Debug)]
pub struct Tail {
    path: PathBuf,
    /// Number of bytes read, identity of the file, and the last bytes read.
    offset: u64,
    file: u64,
    end: Vec<u8>,
}

/// Number of bytes before the offset that are compared to detect a replaced file.
const COMPARED: usize = 128;

/// The complete lines that were appended since the last call of [`Tail::read`].
#[derive(Debug, Default)]
pub struct Appended {
    /// Each line, or the reason why it cannot be read.
    pub lines: Vec<serde_json::Result<Line>>,
    /// Whether the file was truncated or replaced: these are all its lines, and earlier ones are obsolete.
    pub restarted: bool,
}

impl Tail {
    /// Starts at the first line of a run's metrics.
    pub fn new(folder: &Path) -> Tail {
        Tail { path: folder.join(METRICS), offset: 0, file: 0, end: Vec::new() }
    }

    /// Starts this many bytes before the end. The first line may then be incomplete and unreadable.
    pub fn from_end(folder: &Path, bytes: u64) -> Tail {
        let mut tail = Tail::new(folder);
        if let Ok(data) = tail.path.metadata() {
            (tail.offset, tail.file) = (data.len().saturating_sub(bytes), identity(&data));
        }
        tail
    }

    /// The lines that were appended. An incomplete last line is read once it is complete; a file that does not exist has no lines.
    pub fn read(&mut self) -> Result<Appended> {
        let mut appended = Appended::default();
        let mut file = match File::open(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                (appended.restarted, self.offset) = (self.offset > 0, 0);
                self.end.clear();
                return Ok(appended);
            }
            other => other.map_err(Error::io("read", &self.path))?,
        };
        let data = file.metadata().map_err(Error::io("read", &self.path))?;
        // Resuming a run removes the lines after its checkpoint, and another run may take its place.
        if self.offset > 0 && !(identity(&data) == self.file && self.is_continued_by(&mut file).map_err(Error::io("read", &self.path))?) {
            (self.offset, appended.restarted) = (0, true);
            self.end.clear();
        }
        self.file = identity(&data);
        let mut bytes = Vec::new();
        let read = file.seek(SeekFrom::Start(self.offset)).and_then(|_| file.read_to_end(&mut bytes));
        read.map_err(Error::io("read", &self.path))?;
        bytes.truncate(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1));
        self.offset += bytes.len() as u64;
        self.end.extend_from_slice(&bytes[bytes.len().saturating_sub(COMPARED)..]);
        self.end.drain(..self.end.len().saturating_sub(COMPARED));
        appended.lines = bytes.split_inclusive(|&byte| byte == b'\n').map(serde_json::from_slice).collect();
        Ok(appended)
    }

    /// Whether a file contains the last bytes read at the same offset.
    fn is_continued_by(&self, file: &mut File) -> std::io::Result<bool> {
        if file.metadata()?.len() < self.offset {
            return Ok(false);
        }
        file.seek(SeekFrom::Start(self.offset - self.end.len() as u64))?;
        let mut found = vec![0; self.end.len()];
        file.read_exact(&mut found)?;
        Ok(found == self.end)
    }
}

/// Distinguishes a file from another one of the same name.
#[cfg(unix)]
fn identity(data: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(data)
}

#[cfg(not(unix))]
fn identity(_: &Metadata) -> u64 {
    0
}

/// Lines of a file with their bytes, and the number of unreadable lines.
type Kept = (Vec<(Line, Vec<u8>)>, usize);

/// Every complete line of a file with its bytes, which a resumed run keeps unchanged. The file need not exist.
fn read_lines(path: &Path) -> Result<Kept> {
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

/// Writes a file with these lines, unless it already has them. Without lines the file is removed.
fn write_lines(path: &Path, lines: &[(Line, Vec<u8>)]) -> Result<()> {
    let bytes: Vec<u8> = lines.iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect();
    match std::fs::read(path) {
        Ok(found) if found == bytes && !bytes.is_empty() => Ok(()),
        Ok(_) if bytes.is_empty() => std::fs::remove_file(path).map_err(Error::io("remove", path)),
        Err(_) if bytes.is_empty() => Ok(()),
        _ => Ok(write_whole(path, &bytes)?),
    }
}

/// The last step of a run's metrics; 0 if there are none.
pub fn last_step(folder: &Path) -> Result<u64> {
    Ok(read_lines(&folder.join(METRICS))?.0.iter().map(|(line, _)| line.step()).max().unwrap_or(0))
}

/// The metrics of a run, open for appending.
#[derive(Debug)]
pub struct Metrics {
    file: File,
    path: PathBuf,
    later: PathBuf,
    events: Events,
}

impl Metrics {
    /// Opens the metrics of a run with the lines up to `step`. Also returns the number of unreadable lines. The last line is unreadable
    /// if a run was killed while writing it.
    pub fn open(folder: &Path, step: u64) -> Result<(Metrics, usize)> {
        let (path, later) = (folder.join(METRICS), folder.join(LATER_METRICS));
        let (mut lines, unreadable) = read_lines(&path)?;
        let before = lines.len();
        let mut beyond: Vec<_> = lines.extract_if(.., |(line, _)| line.step() > step).collect();
        let last = lines.iter().map(|(line, _)| line.step()).max().unwrap_or(0);
        // The lines removed just now are newer than those already set aside.
        let newer: HashSet<_> = beyond.iter().map(|(line, _)| line.key()).collect();
        let mut waiting = read_lines(&later)?.0;
        waiting.retain(|(line, _)| line.step() > last && !newer.contains(&line.key()));
        waiting.append(&mut beyond);
        waiting.sort_by_key(|(line, _)| line.step());
        // In this order, a line is in one of the two files whenever the process is killed.
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

    /// Discards set-aside lines up to this step, which are now in the metrics.
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

    /// Syncs to disk. Metrics must be durable before their checkpoint.
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
        // A loss that is NaN or infinite is not written to TensorBoard.
        Line::HeldOut { evaluation: None, .. } => Ok(()),
        Line::HeldOut { step, time, evaluation: Some(evaluation) } => {
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

/// All complete lines of a run's metrics.
///
/// # Errors
/// If the file does not exist, or a line of it cannot be read.
pub fn read(folder: &Path) -> Result<Vec<Line>> {
    let mut tail = Tail::new(folder);
    tail.path.metadata().map_err(Error::io("read", &tail.path))?;
    tail.read()?.lines.into_iter().map(|line| line.map_err(Error::json(&tail.path))).collect()
}

/// The last evaluation of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LastEvaluation {
    /// There was no evaluation.
    Missing,
    /// The loss at this step was NaN or infinite.
    NotFinite(u64),
    /// The measurements at this step.
    Finite(u64, Evaluation),
}

impl LastEvaluation {
    /// The last evaluation after one more line.
    pub fn after(self, line: &Line) -> LastEvaluation {
        match line {
            Line::Train(_) => self,
            Line::HeldOut { step, evaluation: None, .. } => LastEvaluation::NotFinite(*step),
            Line::HeldOut { step, evaluation: Some(evaluation), .. } => LastEvaluation::Finite(*step, *evaluation),
        }
    }

    /// The evaluation at the last step of a run with this many steps.
    ///
    /// # Errors
    /// The reason why there is no such evaluation.
    pub fn at(self, steps: u64) -> std::result::Result<Evaluation, String> {
        match self {
            LastEvaluation::Finite(step, evaluation) if step == steps => Ok(evaluation),
            LastEvaluation::NotFinite(step) => Err(format!("diverged: the held-out loss at step {step} is not finite")),
            LastEvaluation::Finite(step, _) => {
                Err(format!("no finite held-out loss at step {steps}; the last evaluation was at step {step}"))
            }
            LastEvaluation::Missing => Err(format!("no finite held-out loss at step {steps}; there was no evaluation")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(step: u64) -> Line {
        let (time, loss, lr) = (1.0, 2.5, 0.1);
        Line::Train(Train { step, time, loss, lr, grad_norm: None, tokens: 1, tokens_per_second: 1.0, spike: false, skipped: 0 })
    }

    fn held_out(step: u64, loss: Option<f64>) -> Line {
        let evaluation = loss.map(|loss| Evaluation { tokens: 9, loss, perplexity: loss.exp(), ..Evaluation::default() });
        Line::HeldOut { step, time: 1.0, evaluation }
    }

    fn text(line: &Line) -> String {
        serde_json::to_string(line).expect("JSON") + "\n"
    }

    fn steps(appended: Appended) -> Vec<u64> {
        appended.lines.into_iter().map(|line| line.expect("a line").step()).collect()
    }

    #[test]
    fn nan_and_infinite_losses_are_recorded() {
        let line = held_out(7, None);
        assert_eq!(text(&line), "{\"kind\":\"held_out\",\"step\":7,\"time\":1.0,\"loss\":null,\"finite\":false}\n");
        for line in [line, held_out(8, Some(2.0)), train(9)] {
            assert_eq!(serde_json::from_str::<Line>(&text(&line)).expect("a line"), line);
        }
        // A finite loss whose perplexity overflows is a measurement.
        let Line::HeldOut { evaluation: Some(found), .. } = serde_json::from_str(&text(&held_out(9, Some(800.0)))).expect("a line") else {
            panic!("not an evaluation")
        };
        assert_eq!(found.loss, 800.0);
        // Neither a measurement nor the record of a loss that is not finite.
        for wrong in [r#"{"kind":"held_out","step":7,"time":1.0}"#, r#"{"kind":"held_out","step":7,"time":1.0,"loss":null}"#] {
            assert!(serde_json::from_str::<Line>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_last_evaluation_is_never_replaced_by_an_earlier_one() {
        let last = |lines: &[Line]| lines.iter().fold(LastEvaluation::Missing, LastEvaluation::after);
        assert_eq!(last(&[held_out(5, Some(2.0)), train(5)]).at(5).map(|found| found.loss), Ok(2.0));
        for (lines, reason) in [
            (&[held_out(5, Some(2.0)), train(10), held_out(10, None)][..], "diverged: the held-out loss at step 10 is not finite"),
            (&[held_out(5, Some(2.0)), train(10)], "no finite held-out loss at step 10; the last evaluation was at step 5"),
            (&[train(10)], "no finite held-out loss at step 10; there was no evaluation"),
        ] {
            assert_eq!(last(lines).at(10).expect_err("no number"), reason);
        }
        assert!(last(&[held_out(5, None), held_out(10, Some(2.0))]).at(10).is_ok(), "it recovered");
    }

    #[test]
    fn a_tail_reads_every_line_once_and_starts_over_after_a_truncation() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(METRICS);
        let append = |text: &str| {
            let mut file = OpenOptions::new().create(true).append(true).open(&path).expect("a file");
            file.write_all(text.as_bytes()).expect("written");
        };
        let mut tail = Tail::new(folder.path());
        assert!(tail.read().expect("no file yet").lines.is_empty());
        let half = text(&held_out(2, None));
        append(&(text(&train(1)) + &half[..20]));
        assert_eq!(steps(tail.read().expect("a file")), [1]);
        append(&half[20..]);
        let second = tail.read().expect("a file");
        assert!(!second.restarted);
        assert_eq!(steps(second), [2]);
        assert!(tail.read().expect("a file").lines.is_empty());
        // From the end: only new lines.
        let mut late = Tail::from_end(folder.path(), 0);
        append("damaged\n");
        append(&text(&train(3)));
        let found = late.read().expect("a file").lines;
        assert!(matches!(&found[..], [Err(_), Ok(line)] if line.step() == 3), "{found:?}");
        assert!(read(folder.path()).is_err(), "a damaged line is not skipped");
        // Replaced by a file that is not shorter.
        let new = folder.path().join("new");
        std::fs::write(&new, (1..9).map(|step| text(&train(step))).collect::<String>()).expect("a file");
        std::fs::rename(&new, &path).expect("renamed");
        let found = tail.read().expect("a file");
        assert!(found.restarted);
        assert_eq!(steps(found), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(read(folder.path()).expect("metrics").len(), 8);
    }
}
