//! Training, sweeps, reproductions, the separation theorem, and the command-line program.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};
use termwise_data::Prepare;
use termwise_experiments::reproduce::{self, Id, Scale};
use termwise_experiments::separation::{self, SeparationRequest};
use termwise_train::metrics::Tail;
use termwise_train::progress::Display;
use termwise_train::settings::Layer;
use termwise_train::settings::keys::{KEYS, Kind};
use termwise_train::source::cache_folder;
use termwise_train::sweep::{self, Event, Plan, PlanSource, ProcessRunner, Status, SweepControl, SweepRequest};
use termwise_train::{Error, RunOptions, TrainRequest, train as train_run};

use crate::engine::torch;
use crate::errors::{runtime, value};
use crate::result::{Found, provenance};
use crate::threads::{Watch, get_threads, supervise};

/// The arguments of a call, which Python passes as JSON.
pub fn parsed<T: for<'a> Deserialize<'a>>(text: &str) -> PyResult<T> {
    serde_json::from_str(text).map_err(|error| crate::errors::input(argument_error(text, &error)))
}

/// The message of an argument of the wrong type in terms of Python, such as `tokens must be a non-negative integer, found -1`.
fn argument_error(text: &str, error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = message.rsplit_once(" at line ").map_or(&message[..], |(message, _)| message);
    // The last key before the error.
    let name = text.get(..error.column()).and_then(|before| before.rsplit_once("\": ")).and_then(|(before, _)| before.rsplit_once('"'));
    let types = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    let (Some((_, name)), Some((found, expected))) = (name, types.and_then(|types| types.rsplit_once(", expected "))) else {
        return format!("invalid argument: {message}");
    };
    let expected = match expected {
        "usize" | "u64" | "u32" => "a non-negative integer",
        "f64" => "a number",
        "a boolean" => "True or False",
        "a sequence" => "a list",
        "path string" => "a path",
        other => other,
    };
    let found = match found {
        "null" => "None",
        "boolean `true`" => "True",
        "boolean `false`" => "False",
        "sequence" => "a list",
        "map" => "a dict",
        other => {
            let number = ["integer `", "floating point `"].iter().find_map(|kind| other.strip_prefix(kind)?.strip_suffix('`'));
            number.or_else(|| other.strip_prefix("string ")).unwrap_or(other)
        }
    };
    format!("{name} must be {expected}, found {found}")
}

/// Errors of training: invalid arguments, or failures.
fn training(error: Error) -> PyErr {
    match error {
        Error::Sweep { .. } => value(error),
        Error::RunLocked { .. } => crate::errors::busy(error.to_string()),
        _ if error.is_usage() => value(error),
        _ => runtime(error),
    }
}

/// Runs the program with the arguments `args` and returns its exit code; `respawn_argv` is the command that starts it in child processes.
#[pyfunction]
pub fn main(py: Python<'_>, args: Vec<OsString>, respawn_argv: Vec<OsString>) -> u8 {
    py.detach(|| termwise::run(args, Some(respawn_argv)))
}

/// Every setting of training: name, type (count, number, switch, text, list or attention), group and description.
#[pyfunction]
pub fn settings() -> Vec<(&'static str, &'static str, &'static str, &'static str)> {
    let kind = |kind| match kind {
        Kind::Count => "count",
        Kind::Number => "number",
        Kind::Switch => "switch",
        Kind::Text => "text",
        Kind::List => "list",
        Kind::Attention => "attention",
    };
    KEYS.iter().map(|key| (key.shown(), kind(key.kind), key.group, key.help)).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Train {
    settings: toml::Table,
    folder: Option<PathBuf>,
    runs: PathBuf,
    resume: bool,
    overwrite: bool,
    cache: Option<PathBuf>,
    /// Files with settings, which `settings` override.
    #[serde(default)]
    files: Vec<PathBuf>,
    /// The checkpoint to resume from.
    #[serde(default)]
    checkpoint: Option<PathBuf>,
    /// Whether to print warnings to standard error.
    #[serde(default)]
    remarks: bool,
}

/// Trains a model. The callback receives every line of `metrics.jsonl`. `engine` is a factory of learners and a collective, as in [`crate::engine::torch`].
#[pyfunction]
#[pyo3(signature = (options, callback, engine=None))]
pub fn train(
    py: Python<'_>,
    options: &str,
    callback: Option<&Bound<'_, PyAny>>,
    engine: Option<(Py<PyAny>, Py<PyAny>)>,
) -> PyResult<Found> {
    let Train { settings, folder, runs, resume, overwrite, cache, files, checkpoint, remarks } = parsed(options)?;
    let engine = engine.map(|(factory, collective)| torch(py, factory, collective)).transpose()?;
    supervise(py, callback, |watch| {
        let mut settings = settings;
        if files.is_empty() {
            settings.entry("threads").or_insert(toml::Value::Integer(get_threads() as i64));
        }
        let mut above = files.iter().map(Layer::read).collect::<Result<Vec<_>, _>>().map_err(training)?;
        above.push(Layer::new(settings, "the arguments").map_err(training)?);
        let mut request = TrainRequest::new(above);
        (request.runs, request.overwrite) = (runs, overwrite);
        request.resume = checkpoint.or_else(|| resume.then(|| folder.clone().unwrap_or_default()));
        request.folder = folder;
        let planned = request.plan().map_err(training)?;
        let settings = &planned.settings;
        let source = settings.open_source(&cache_folder(cache.as_deref()), &Prepare::default()).map_err(training)?;
        let display = match remarks {
            true => Display::To(Arc::new(|event| {
                if let termwise_train::progress::Event::Remark(text) = event {
                    termwise_train::log::print_line(text);
                }
            })),
            false => Display::Silent,
        };
        let usual = planned.options().map_err(training)?;
        let (engine, collective) = engine.map_or((None, usual.collective.clone()), |(engine, ranks)| (Some(engine), ranks));
        let options = RunOptions { display, stop: watch.stop.clone(), provenance: provenance().clone(), collective, engine, ..usual };
        let outcome = with_reports(&planned.folder, watch, || train_run(settings, source.as_ref(), &options)).map_err(training)?;
        Ok(Found::of(&outcome))
    })
}

/// Runs the training, and reports every line that it appends to `metrics.jsonl`.
fn with_reports<T>(folder: &Path, watch: &Watch, work: impl FnOnce() -> T) -> T {
    let (over, mut tail) = (AtomicBool::new(false), Tail::from_end(folder, 0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                // Loaded before reading, so the last lines are not missed.
                let last = over.load(Ordering::Acquire);
                // A failed read is repeated.
                let lines = tail.read().unwrap_or_default().lines;
                lines.into_iter().flatten().filter_map(|line| serde_json::to_value(line).ok()).for_each(|event| watch.send(event));
                if last {
                    break;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        // The scope waits for the thread, also after a panic.
        let _end = SetOnDrop(&over);
        work()
    })
}

/// Sets a flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn event(plan: &Plan, event: &Event) -> Value {
    let name = |index: &usize| plan.name(&plan.jobs[*index]);
    match event {
        Event::Started(index) => json!({ "event": "started", "run": name(index) }),
        Event::Stopped(index) => json!({ "event": "stopped", "run": name(index) }),
        Event::Waiting(runs) => json!({ "event": "waiting", "runs": runs }),
        Event::Ended(index, record) => match &record.status {
            Status::Failed { reason } => json!({ "event": "failed", "run": name(index), "reason": reason, "seconds": record.seconds }),
            Status::Finished { metrics } => {
                json!({ "event": "finished", "run": name(index), "metrics": metrics, "seconds": record.seconds })
            }
        },
        Event::Progress(progress) => json!({
            "event": "progress",
            "done": progress.finished + progress.failed,
            "of": progress.total,
            "fraction": progress.fraction,
            "remaining": progress.remaining.map(|left| left.as_secs_f64()),
        }),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SweepOptions {
    /// A file, or its content.
    file: Option<PathBuf>,
    plan: Option<toml::Table>,
    folder: PathBuf,
    parallel: usize,
    retry: bool,
    skip_equal: bool,
    again: Vec<String>,
}

/// Trains every combination of some settings.
#[pyfunction]
pub fn run_sweep(py: Python<'_>, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
    let options: SweepOptions = parsed(options)?;
    let plan = match (options.file, options.plan) {
        (Some(file), _) => PlanSource::File(file),
        (None, table) => PlanSource::Text(table.unwrap_or_default().to_string()),
    };
    let mut request = SweepRequest::new(plan);
    request.folder = Some(options.folder);
    (request.parallel, request.threads) = (options.parallel, get_threads());
    (request.retry, request.skip_equal) = (options.retry, options.skip_equal);
    request.respawn_argv = options.again.into_iter().map(OsString::from).collect();
    request.provenance = provenance().clone();
    request.read_plan().map_err(training)?;
    supervise(py, callback, |watch| {
        let control = SweepControl { stop: watch.stop.clone(), kill: watch.kill.clone() };
        let outcome = sweep::execute(&request, &control, &mut |plan, seen| watch.send(event(plan, seen)));
        Ok(Found::of(&outcome.map_err(training)?.summary))
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReproduceOptions {
    experiments: Vec<String>,
    scale: String,
    data: Vec<String>,
    seeds: Option<usize>,
    folder: Option<PathBuf>,
    retry: bool,
    again: Vec<String>,
}

/// Runs the experiments of two papers.
#[pyfunction]
pub fn run_reproduce(py: Python<'_>, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
    let options: ReproduceOptions = parsed(options)?;
    let scale = Scale::named(&options.scale).filter(|scale| !matches!(scale, Scale::Zoology | Scale::Paper));
    let scale = scale.ok_or_else(|| {
        crate::errors::input(format!("a scale is \"minute\", \"laptop\", \"text\" or \"mini\", found {:?}", options.scale))
    })?;
    let usual = reproduce::Options::new(scale);
    let how = reproduce::Options {
        ids: Id::parse(&options.experiments, scale).map_err(value)?,
        data: options.data,
        seeds: options.seeds,
        out: options.folder.unwrap_or(usual.out.clone()),
        threads: get_threads(),
        retry: options.retry,
        provenance: provenance().clone(),
        ..usual
    };
    let declared = reproduce::declare(&how).map_err(value)?;
    supervise(py, callback, |watch| {
        let runner = ProcessRunner::new(options.again, watch.kill.clone());
        let results = reproduce::run(&how, &declared, &runner, &watch.stop, &mut |plan, seen| watch.send(event(plan, seen)));
        Ok(Found::of(&results.map_err(runtime)?))
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SeparationOptions {
    networks: Vec<String>,
    n: Vec<u64>,
    d: Vec<usize>,
    m: Vec<usize>,
    a1: Vec<f64>,
    cross: bool,
    bridge: bool,
    draws: u64,
    seed: u64,
}

/// Reproduces the softmax/linear separation theorem.
#[pyfunction]
pub fn run_separation(py: Python<'_>, options: &str, callback: Option<&Bound<'_, PyAny>>) -> PyResult<Found> {
    let SeparationOptions { networks, n, d, m, a1, cross, bridge, draws, seed } = parsed(options)?;
    let mut request = SeparationRequest::new();
    (request.networks, request.n, request.d, request.m, request.a1) = (networks, n, d, m, a1);
    (request.cross, request.bridge, request.draws, request.seed) = (cross, bridge, draws, seed);
    supervise(py, callback, |watch| {
        let found = separation::run(&request, &mut |done, of| watch.send(json!({ "done": done, "of": of })));
        Ok(Found::of(&found.map_err(value)?))
    })
}
