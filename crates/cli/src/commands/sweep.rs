//! `termwise sweep`.

use std::path::PathBuf;

use clap::Args;
use termwise_report::{counted, duration};
use termwise_train::log::print_line;
use termwise_train::sweep::{self, Event, Plan, PlanSource, Status, SweepRequest};

use super::share::ShareArgs;
use super::size;
use crate::context::{Context, Print};
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_or_kill};

/// Train every combination of settings
///
/// The file contains base settings and axes. Every combination of axis values is one run. Finished runs are reused, so a sweep can be
/// interrupted, extended and restarted.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise sweep recall.toml --list
  termwise sweep recall.toml --parallel 4
  termwise sweep recall.toml --retry --skip-equal
  termwise sweep recall.toml --submit slurm --dry-run       print the job script

A file:
  metric = \"held_out.recall.loss\"     # lower is better [default: held_out.loss]

  [base]                              # settings as for `termwise train --config`, or base = \"FILE\"
  model = \"tiny\"
  steps = 1000

  [axes]
  attention = [\"softmax conv=3\", \"linear_elu conv=3\"]
  lr = [1e-3, 3e-3, 1e-2]
  seed = [1, 2, 3]

Means and standard deviations are over seeds. Ctrl-C, SIGTERM and SIGUSR1 let every run write a checkpoint; the same command resumes. Several processes, also on several machines, can share a folder: each takes unclaimed runs.")]
pub struct SweepArgs {
    /// TOML file with base settings and axes
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Folder of the sweep [default: sweeps/FILE]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Concurrent runs; they share the threads
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = size(1024))]
    pub parallel: usize,
    /// Rerun failed runs
    #[arg(long)]
    pub retry: bool,
    /// Skip runs whose attention is mathematically equal to that of an earlier run
    #[arg(long)]
    pub skip_equal: bool,
    /// Rerun runs that another build has finished
    #[arg(long)]
    pub rerun_other_builds: bool,
    /// List runs and their status, without training
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub share: ShareArgs,
    #[command(flatten)]
    pub print: Print,
}

impl SweepArgs {
    fn request(&self, context: &Context) -> Result<SweepRequest, Failure> {
        let mut request = SweepRequest::new(PlanSource::File(self.file.clone()));
        request.folder = self.out.clone();
        (request.parallel, request.threads) = (self.parallel, context.threads);
        (request.retry, request.skip_equal, request.rerun_other_builds) = (self.retry, self.skip_equal, self.rerun_other_builds);
        request.others = self.share.others();
        request.respawn_argv = context.respawn_argv()?;
        request.provenance = context.provenance.clone();
        Ok(request)
    }
}

/// Exits with 0 if every run is finished.
pub fn run(args: &SweepArgs, context: &mut Context) -> Result<Exit, Failure> {
    let request = args.request(context)?;
    let print = |text: &str| {
        if !args.print.quiet {
            print_line(text);
        }
    };
    for equality in request.equal_runs(&request.read_plan()?) {
        print(&format!("note: {equality}"));
    }
    if args.share.submit.is_some() {
        return args.share.submit(sweep::list(&request)?.slurm_job(&request), context);
    }
    let outcome = match args.list {
        true => sweep::list(&request)?,
        false => {
            let control = stop_or_kill(STOPPING);
            let bar = Bar::new(args.print.quiet);
            sweep::execute(&request, &control, &mut |plan, event| show(&bar, plan, event))?
        }
    };
    outcome.mixed_builds.iter().for_each(|warning| print(warning));
    if args.list && !args.print.json {
        match args.print.details {
            true => context.print_document(&outcome.listing(), true)?,
            false => context.print_brief(&outcome.listing())?,
        }
        return Ok(Exit::Success);
    }
    context.print(&outcome.summary, args.print)?;
    if let Some(path) = &outcome.written {
        print(&format!("written: {}", path.display()));
    }
    outcome.check_metric(&request)?;
    Ok(match args.list || outcome.is_complete() {
        true => Exit::Success,
        false if outcome.interrupted => Exit::Interrupted,
        false => Exit::Failure,
    })
}

/// The message while other processes finish their runs.
pub(super) fn waiting(runs: usize) -> String {
    format!("waiting for {} of other processes; --no-wait exits instead", counted(runs, "run"))
}

/// The message after Ctrl-C.
pub(super) const STOPPING: &str = "waiting up to two minutes for checkpoints";

/// A line for each run that starts or ends, and a progress bar.
fn show(bar: &Bar, plan: &Plan, event: &Event) {
    let name = |index: &usize| plan.name(&plan.jobs[*index]);
    bar.print_line(&match event {
        Event::Progress(progress) => return bar.runs(progress),
        Event::Started(index) => format!("started   {}", name(index)),
        Event::Stopped(index) => format!("stopped   {}", name(index)),
        Event::Waiting(runs) => waiting(*runs),
        Event::Ended(index, record) => match &record.status {
            Status::Failed { reason } => format!("failed    {}: {reason}", name(index)),
            Status::Finished { metrics } => {
                let metric = &plan.metric;
                let value = metrics.get(metric).map_or("not measured".into(), |x| format!("{x:.4}"));
                format!("finished  {}: {metric} {value}, {}", name(index), duration(record.seconds))
            }
        },
    });
}
