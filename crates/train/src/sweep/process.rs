//! Runs as separate processes.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use termwise_data::Prepare;

use super::plan::Job;
use super::record::Metrics;
use super::schedule::{Control, Outcome, Runner};
use crate::error::{Error, Result};
use crate::metrics::{LastEvaluation, Line, Tail, Train};
use crate::run::{EXIT_INTERRUPTED, EXIT_LOCKED};
use crate::settings::{Layer, Settings};
use crate::source::cache_folder;

/// Polling interval for processes.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time that a process may take to finish its step and checkpoint after a stop request, before it is terminated.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Time that a terminated process may take before it is killed.
const KILL_DELAY: Duration = Duration::from_secs(10);

/// Trains each job in a process: `PROGRAM… --threads N train --quiet --stop-with-input --config SETTINGS`, followed by `--runs DIR --name NAME`, or,
/// if the directory already contains a run, by `--resume FOLDER`. The process must write `metrics.jsonl` to the directory. When its standard
/// input is closed, it must write a checkpoint and exit with [`EXIT_INTERRUPTED`]. This process has the other end of that pipe, so child processes
/// stop however this process ends, and can be resumed.
#[derive(Debug)]
pub struct ProcessRunner {
    program: Vec<OsString>,
    kill: Arc<AtomicBool>,
    patience: [Duration; 2],
}

impl ProcessRunner {
    /// Runs this program, given as one or more words. After `kill` is set, stopped processes are not waited for. Otherwise they are
    /// terminated after [`PATIENCE`], and killed 10 s later.
    pub fn new(program: impl IntoIterator<Item = impl Into<OsString>>, kill: Arc<AtomicBool>) -> ProcessRunner {
        ProcessRunner { program: program.into_iter().map(Into::into).collect(), kill, patience: [PATIENCE, KILL_DELAY] }
    }

    /// With other times until a process is terminated, and from then until it is killed.
    pub fn with_patience(self, terminate: Duration, kill: Duration) -> ProcessRunner {
        ProcessRunner { patience: [terminate, kill], ..self }
    }

    fn name(&self) -> &Path {
        self.program.first().map_or(Path::new(""), Path::new)
    }

    fn command(&self, control: &Control) -> Result<Command> {
        let log = File::options().create(true).append(true).open(control.log).map_err(Error::io("open", control.log))?;
        let errors = log.try_clone().map_err(Error::io("open", control.log))?;
        let mut command = Command::new(self.name());
        command.args(self.program.iter().skip(1));
        command.arg("--threads").arg(control.threads.to_string());
        command.args(["train", "--quiet", "--stop-with-input", "--config"]).arg(control.settings);
        match (control.folder.parent(), control.folder.file_name()) {
            (Some(runs), Some(name)) if !control.folder.join("settings.toml").is_file() => {
                command.arg("--runs").arg(runs).arg("--name").arg(name);
            }
            _ => {
                command.arg("--resume").arg(control.folder);
            }
        }
        rank_variables().for_each(|name| {
            command.env_remove(name);
        });
        command.stdin(Stdio::piped()).stdout(log).stderr(errors);
        // A separate process group: Ctrl-C in the terminal reaches only this process, which then stops the other one.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Ok(command)
    }
}

impl Runner for ProcessRunner {
    fn fingerprint(&self, job: &Job) -> Option<String> {
        let settings = Settings::resolve(&[Layer::new(job.settings.clone(), "the sweep").ok()?]).ok()?;
        // If the data cannot be opened, the run reports it.
        Some(settings.open_source(&cache_folder(None), &Prepare::default()).ok()?.fingerprint())
    }

    fn run(&self, job: &Job, control: &Control) -> Result<Outcome> {
        let steps = job.settings.get("steps").and_then(toml::Value::as_integer).unwrap_or(0).max(0) as u64;
        let mut metrics = Latest::new(control.folder);
        let mut child = Ending(self.command(control)?.spawn().map_err(Error::io("start", self.name()))?);
        let mut stop_requested: Option<Instant> = None;
        let mut terminated = false;
        let status = loop {
            if let Some(status) = child.0.try_wait().map_err(Error::io("wait for", self.name()))? {
                break status;
            }
            if control.stop.load(Ordering::Relaxed) && stop_requested.is_none() {
                drop(child.0.stdin.take());
                stop_requested = Some(Instant::now());
            }
            if let Some(since) = stop_requested.map(|at| at.elapsed()) {
                // In each case the process may have ended in the meantime.
                if self.kill.load(Ordering::Relaxed) || since > self.patience[0] + self.patience[1] {
                    let _ = child.0.kill();
                } else if since > self.patience[0] && !terminated {
                    terminate(&mut child.0);
                    terminated = true;
                }
            }
            metrics.read();
            if let Some(step) = metrics.step
                && steps > 0
            {
                (control.report)(step as f64 / steps as f64);
            }
            thread::sleep(POLL_INTERVAL);
        };
        metrics.read();
        let complete = metrics.step.is_some_and(|step| step >= steps);
        // A system shutdown may stop both processes at once; this one may notice slightly later.
        let stopped = control.stop.load(Ordering::Relaxed) || status.code() == Some(EXIT_INTERRUPTED.into());
        Ok(match (status.success(), complete) {
            (true, true) => metrics.outcome(steps),
            _ if stopped => Outcome::Stopped,
            _ if status.code() == Some(EXIT_LOCKED.into()) => Outcome::Locked,
            (true, false) => Outcome::Failed(format!("ended after step {} of {steps}", metrics.step.unwrap_or(0))),
            (false, _) => Outcome::Failed(reason(status, control.log)),
        })
    }
}

/// A process that is killed on drop, also after an error or a panic.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        // Nothing to do if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Environment variables of `mpirun` that make a process a rank. They are removed for child processes.
pub fn rank_variables() -> impl Iterator<Item = OsString> {
    let ours = |name: &str| ["OMPI_", "PMIX_", "PMI_", "MV2_", "PRTE_"].iter().any(|prefix| name.starts_with(prefix));
    std::env::vars_os().map(|(name, _)| name).filter(move |name| name.to_str().is_some_and(ours))
}

/// Requests the termination of a process, with SIGTERM if available.
pub fn terminate(child: &mut Child) {
    #[cfg(unix)]
    {
        let pid = rustix::process::Pid::from_child(child);
        // It may have ended already; the next poll detects that.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    #[cfg(not(unix))]
    {
        // Without signals, kill it.
        let _ = child.kill();
    }
}

/// The error message of a process that ended.
fn reason(status: ExitStatus, log: &Path) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let from = lines.iter().rposition(|line| line.starts_with("error:")).unwrap_or(lines.len().saturating_sub(1));
    match lines[from.min(lines.len())..].join("\n") {
        said if said.is_empty() => format!("the process ended with {status}; see {}", log.display()),
        said => said.trim_start_matches("error: ").into(),
    }
}

/// The latest metrics of a run.
struct Latest {
    tail: Tail,
    /// Number of steps done.
    step: Option<u64>,
    train: Option<Train>,
    held_out: LastEvaluation,
}

impl Latest {
    fn new(folder: &Path) -> Latest {
        Latest { tail: Tail::new(folder), step: None, train: None, held_out: LastEvaluation::Missing }
    }

    /// A file that cannot be read now is retried.
    fn read(&mut self) {
        let Ok(appended) = self.tail.read() else { return };
        if appended.restarted {
            (self.step, self.train, self.held_out) = (None, None, LastEvaluation::Missing);
        }
        for line in appended.lines.into_iter().flatten() {
            self.step = Some(line.step());
            self.held_out = self.held_out.after(&line);
            if let Line::Train(train) = line {
                self.train = Some(train);
            }
        }
    }

    /// The result of a run that completed all steps. Only an evaluation at the last step is used.
    fn outcome(&self, steps: u64) -> Outcome {
        let mut metrics = Metrics::new();
        let mut add = |name: &str, value: serde_json::Result<Value>| value.iter().for_each(|value| flatten(name, value, &mut metrics));
        self.train.iter().for_each(|train| add("train", serde_json::to_value(train)));
        match (self.held_out, self.held_out.at(steps)) {
            (_, Ok(evaluation)) => add("held_out", serde_json::to_value(evaluation)),
            (LastEvaluation::NotFinite(_), Err(reason)) => return Outcome::Failed(reason),
            // Without evaluations, a sweep may compare training losses.
            (_, Err(_)) => {}
        }
        Outcome::Finished(metrics)
    }
}

/// Metrics that are not results.
const EXCLUDED_METRICS: &[&str] = &["step", "time", "tokens", "lr"];

/// Numbers of an object under dotted names.
fn flatten(name: &str, value: &Value, out: &mut Metrics) {
    match value {
        Value::Number(number) => {
            out.extend(number.as_f64().map(|x| (name.to_string(), x)));
        }
        Value::Object(map) => map
            .iter()
            .filter(|(key, _)| !EXCLUDED_METRICS.contains(&key.as_str()))
            .for_each(|(key, value)| flatten(&format!("{name}.{key}"), value, out)),
        _ => {}
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use rustix::process::{Pid, test_kill_process};

    #[test]
    fn a_panic_kills_the_child_process() {
        let child = Command::new("sleep").arg("600").spawn().expect("a process");
        let pid = Pid::from_child(&child);
        assert_eq!(test_kill_process(pid), Ok(()));
        let caught = std::panic::catch_unwind(move || {
            let _child = Ending(child);
            panic!("an error in the sweep");
        });
        assert!(caught.is_err());
        assert_eq!(test_kill_process(pid), Err(rustix::io::Errno::SRCH), "it was killed and waited for");
    }
}
