//! `termwise sweep`.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use termwise_train::provenance::Provenance;
use termwise_train::sweep::{self, Event, Options, Plan, Point, ProcessRunner, Progress, Record, State, Status, Summary, TrainingSchema};
use termwise_train::{Error, Result};

use super::size;
use crate::text::{Align, Table};

/// What runs are compared by where the file does not say.
const METRIC: &str = "held_out.loss";

/// Train every combination of some settings, and compare
///
/// The file names a base and axes; every combination of the axes' values is one run. Runs that are finished are never run twice, so a
/// sweep can be broken off, extended and started again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise sweep recall.toml --list
  termwise sweep recall.toml --parallel 4
  termwise sweep recall.toml --retry --skip-equal

A file:
  metric = \"held_out.recall.loss\"     # the smaller the better [default: held_out.loss]

  [base]                              # settings as for `termwise train --config`, or base = \"FILE\"
  model = \"tiny\"
  steps = 1000

  [axes]
  attention = [\"softmax conv=3\", \"linear_elu conv=3\"]
  lr = [1e-3, 3e-3, 1e-2]
  seed = [1, 2, 3]

Means and standard deviations are over seeds. Ctrl-C lets every run write a checkpoint; the same command goes on from there.")]
pub struct SweepArgs {
    /// TOML file with a base and axes
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Folder of the sweep [default: sweeps/ and the file's name]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Runs at a time; threads are divided among them
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = size(1024))]
    pub parallel: usize,
    /// Run again what failed
    #[arg(long)]
    pub retry: bool,
    /// Leave out runs whose attention has the same output as that of an earlier one
    #[arg(long)]
    pub skip_equal: bool,
    /// Run again what another build of this program finished, instead of mixing its results with new ones
    #[arg(long)]
    pub rerun_other_builds: bool,
    /// Only say which runs there are and how they stand
    #[arg(long)]
    pub list: bool,
    /// Print the summary as JSON
    #[arg(long)]
    pub json: bool,
}

/// Whether every run is finished.
pub fn run(args: &SweepArgs, threads: usize, out: &mut impl Write) -> Result<bool> {
    let plan = Plan::read(&args.file, &TrainingSchema, METRIC)?;
    let folder = args.out.clone().unwrap_or_else(|| Path::new("sweeps").join(args.file.file_stem().unwrap_or_default()));
    for equality in sweep::equalities(&plan) {
        let hint = if args.skip_equal { "" } else { "; --skip-equal runs one of them" };
        eprintln!("note: {equality}{hint}");
    }
    let here = crate::build::here();
    let states = if args.list {
        sweep::states(&plan, &folder, args.skip_equal)?
    } else {
        let (stop, kill) = interrupts();
        let program = std::env::current_exe().map_err(|source| Error::Io { action: "find", path: "this program".into(), source })?;
        let options = Options {
            parallel: args.parallel,
            threads,
            retry: args.retry,
            skip_equal: args.skip_equal,
            only: args.rerun_other_builds.then(|| here.clone()),
        };
        let mut display = Display::new(&plan);
        sweep::run(&plan, &folder, &ProcessRunner::new(program, kill), &options, &stop, &mut |event| display.show(event))?
    };
    let ended: Vec<(&str, &Record)> =
        plan.jobs.iter().zip(&states).filter_map(|(job, state)| Some((job.hash.as_str(), ended(state)?))).collect();
    if let Some(warning) = mixed(&ended, &here) {
        eprintln!("{warning}");
    }
    let summary = Summary::new(&plan, &states);
    if !args.list {
        summary.write(&folder)?;
    }
    let text = if args.json {
        serde_json::to_string_pretty(&summary).map_err(io::Error::from).map_err(output)? + "\n"
    } else if args.list {
        listed(&plan, &states)
    } else {
        compared(&summary, &folder)
    };
    out.write_all(text.as_bytes()).map_err(output)?;
    let done = |state: &State| match state {
        State::Ended(record) => matches!(record.status, Status::Finished { .. }),
        State::Equal(_) => true,
        State::Open => false,
    };
    Ok(args.list || states.iter().all(done))
}

pub fn ended(state: &State) -> Option<&Record> {
    if let State::Ended(record) = state { Some(record) } else { None }
}

/// Names finished runs that this build did not make, by build.
pub fn mixed(records: &[(&str, &Record)], here: &Provenance) -> Option<String> {
    let mut builds: Vec<(String, Vec<&str>)> = Vec::new();
    for (hash, record) in records.iter().filter(|(_, record)| record.is_of_another(here)) {
        let name = record.made_by();
        match builds.iter_mut().find(|(other, _)| *other == name) {
            Some((_, hashes)) => hashes.push(&hash[..hash.len().min(6)]),
            None => builds.push((name, vec![&hash[..hash.len().min(6)]])),
        }
    }
    if builds.is_empty() {
        return None;
    }
    let list: Vec<String> =
        builds.iter().map(|(name, hashes)| format!("\n  {name}: {} runs ({})", hashes.len(), hashes.join(" "))).collect();
    Some(format!(
        "warning: finished runs of other builds stand among those of this one, {}, and their numbers may differ; \
         --rerun-other-builds runs them again{}",
        here.name(),
        list.concat()
    ))
}

fn output(source: io::Error) -> Error {
    Error::Io { action: "write", path: "standard output".into(), source }
}

/// The first Ctrl-C asks runs to stop, the second does not wait for them.
pub(super) fn interrupts() -> (Arc<AtomicBool>, Arc<AtomicBool>) {
    let (stop, kill) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let flags = (stop.clone(), kill.clone());
    // Without a handler Ctrl-C ends this process and leaves the runs under way to end by themselves.
    let _ = ctrlc::set_handler(move || {
        if flags.0.swap(true, Ordering::Relaxed) {
            flags.1.store(true, Ordering::Relaxed);
        } else {
            eprintln!("\nwaiting for checkpoints; Ctrl-C again ends at once");
        }
    });
    (stop, kill)
}

/// Progress on standard error: a line for each run that ends, and where it is a terminal a line that moves.
struct Display<'a> {
    plan: &'a Plan,
    moving: bool,
}

impl<'a> Display<'a> {
    fn new(plan: &'a Plan) -> Display<'a> {
        Display { plan, moving: io::stderr().is_terminal() }
    }

    fn show(&mut self, event: &Event) {
        let name = |index: &usize| self.plan.name(&self.plan.jobs[*index]);
        let line = match event {
            Event::Started(index) => format!("started   {}", name(index)),
            Event::Stopped(index) => format!("stopped   {}", name(index)),
            Event::Ended(index, record) => match &record.status {
                Status::Failed { reason } => format!("failed    {}: {reason}", name(index)),
                Status::Finished { metrics } => {
                    let metric = &self.plan.metric;
                    let value = metrics.get(metric).map_or("not measured".into(), |x| format!("{x:.4}"));
                    format!("finished  {}: {metric} {value}, {}", name(index), duration(Duration::from_secs_f64(record.seconds)))
                }
            },
            Event::Progress(progress) => {
                if self.moving {
                    eprint!("\r\x1b[K{}", moving(progress));
                }
                return;
            }
        };
        eprintln!("{}{line}", if self.moving { "\r\x1b[K" } else { "" });
    }
}

pub(super) fn moving(progress: &Progress) -> String {
    let &Progress { total, finished, failed, running, fraction, remaining } = progress;
    let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
    let left = remaining.map_or(String::new(), |left| format!(", about {} left", duration(left)));
    format!("{:.1} %: {finished} of {total} runs finished{failed}, {running} under way{left}", 100.0 * fraction)
}

/// 2 h 05 min, 3 min 20 s, 7 s
pub(crate) fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

fn listed(plan: &Plan, states: &[State]) -> String {
    let mut table = Table::new([Align::Left, Align::Left, Align::Left]);
    for (job, state) in plan.jobs.iter().zip(states) {
        let stands = match state {
            State::Open => "open".into(),
            State::Equal(earlier) => format!("equal to {}", plan.jobs[*earlier].hash),
            State::Ended(record) => match &record.status {
                Status::Finished { .. } => "finished".into(),
                Status::Failed { reason } => format!("failed: {reason}"),
            },
        };
        table.row([job.hash.clone(), plan.name(job), stands]);
    }
    table.lines().join("\n") + &format!("\n{} runs\n", plan.jobs.len())
}

fn compared(summary: &Summary, folder: &Path) -> String {
    let mut text = String::new();
    let rates = summary.best.iter().any(|best| best.learning_rate.is_some());
    let best_title = if rates { "At the best learning rate, best first" } else { "Best first" };
    for (title, table) in [("Mean ± standard deviation over seeds", groups(summary)), (best_title, best(summary))] {
        text += &format!("{title}, {}\n", summary.metric);
        table.lines().iter().for_each(|line| text += &format!("  {line}\n"));
        text += "\n";
    }
    for run in summary.runs.iter().filter(|run| run.status == "failed") {
        text += &format!("failed: run {}: {}\n", run.hash, run.note);
    }
    text + &format!("{}\n", folder.join("summary.json").display())
}

/// The values on the axes that have several.
fn words(point: &[(String, String)], all: &[Point]) -> String {
    let several = |key: &str, value: &str| all.iter().flatten().any(|(k, v)| k == key && v != value);
    let words: Vec<String> = point.iter().filter(|(key, value)| several(key, value)).map(|(key, value)| format!("{key}={value}")).collect();
    if words.is_empty() { "the base".into() } else { words.join(", ") }
}

fn groups(summary: &Summary) -> Table {
    let all: Vec<_> = summary.groups.iter().map(|group| group.point.clone()).collect();
    let mut table = Table::new([Align::Left, Align::Right, Align::Left]);
    for group in &summary.groups {
        let number = group.metrics.get(&summary.metric).map_or("–".into(), ToString::to_string);
        let (finished, failed, open) = (group.finished, group.failed, group.open);
        let mut note = format!("{finished} runs");
        for (count, what) in [(failed, "failed"), (open, "open")] {
            if count > 0 {
                note += &format!(", {count} {what}");
            }
        }
        table.row([words(&group.point, &all), number, note]);
    }
    table
}

fn best(summary: &Summary) -> Table {
    let all: Vec<_> = summary.best.iter().map(|best| best.point.clone()).collect();
    let mut table = Table::new([Align::Left, Align::Left, Align::Right, Align::Left]);
    for (i, best) in summary.best.iter().enumerate() {
        let rate = best.learning_rate.as_ref().map_or(String::new(), |rate| format!("lr={rate}"));
        let behind = match best.beyond_spread {
            _ if i == 0 => String::new(),
            Some(true) => format!("{:.4} behind", best.behind),
            Some(false) => "no difference beyond the spread over seeds".into(),
            None => format!("{:.4} behind, with one seed", best.behind),
        };
        let edge = if best.at_edge { "the best rate is at the edge; try further ones" } else { "" };
        let note = [behind.as_str(), edge].into_iter().filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ");
        table.row([words(&best.point, &all), rate, best.metric.to_string(), note]);
    }
    table
}
