//! `termwise train`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use termwise_analysis::bench::peak_gflops;
use termwise_train::log::print_line;
use termwise_train::progress::Display;
use termwise_train::settings::Layer;
use termwise_train::source::cache_folder;
use termwise_train::torch::{self, TorchEnd, TorchOptions};
use termwise_train::{PlannedRun, RunOptions, TrainRequest, run as runs};

use super::config;
use super::settings::AllSettings;
use crate::context::{Context, Print};
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_on_interrupt, stop_or_kill, stop_with_input, while_tokenizing};
use crate::ranks::is_rank;

/// Train a model
///
/// Flags override files given with --config, which override defaults. The run's folder contains all settings, metrics (metrics.jsonl and
/// TensorBoard events) and checkpoints in the Hugging Face format.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise train --model tiny --attention norm --steps 2000
  termwise train --data corpus/ --tokenizer tokenizer.json --model small-test --name first
  termwise train --recipe paper --data \"hf://datasets/HuggingFaceFW/fineweb/data/CC-MAIN-2024-51/*.parquet\"
  termwise train --resume first
  termwise train --resume runs/first --steps 5000
  termwise train --print-config > settings.toml
  mpirun -n 4 termwise train --model tiny         four processes share each step (a build with --features mpi)
  termwise train --engine torch --model small-test --data corpus/

Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 finish the step, write a checkpoint and exit with code 130. A second Ctrl-C exits at once. A resumed run is bit-identical to an uninterrupted one.")]
pub struct TrainArgs {
    /// TOML file with settings; may be repeated
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    /// Name of the run [default: model, attention and a hash of the settings]
    #[arg(long, value_name = "NAME", value_parser = runs::check_name)]
    pub name: Option<String>,
    /// Folder of runs
    #[arg(long, default_value = "runs", value_name = "DIR")]
    pub runs: PathBuf,
    /// Replace a run of this name; it is kept until the new run has its first checkpoint
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    /// Resume a run (folder or name) from its newest valid checkpoint, or from this checkpoint
    #[arg(long, value_name = "RUN_OR_CHECKPOINT", num_args = 0..=1, default_missing_value = "")]
    pub resume: Option<PathBuf>,
    /// Folder for tokenized text [default: termwise in the user's cache]
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub cache: Option<PathBuf>,
    /// With --engine torch: processes, started by torchrun
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = super::size(1024), hide_short_help = true)]
    pub processes: usize,
    /// Stop as after Ctrl-C when standard input ends: a run that another process has started does not outlive it
    #[arg(long, hide = true)]
    pub stop_with_input: bool,
    /// Print a settings file with every setting and exit
    #[arg(long)]
    pub print_config: bool,
    /// Suppress progress and warnings
    #[arg(long, short)]
    pub quiet: bool,
    /// Print JSON, which `termwise report` renders
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: AllSettings,
}

pub fn run(args: &TrainArgs, threads: Option<usize>, context: &mut Context) -> Result<Exit, Failure> {
    if args.print_config {
        return config::print(&args.config, &args.settings, context);
    }
    context.join()?;
    let quiet = args.quiet || context.is_silent();
    let mut layers = args.config.iter().map(Layer::read).collect::<Result<Vec<_>, _>>()?;
    layers.push(args.settings.layer(threads)?);
    let ranks = context.ranks.collective.clone();
    let mut request = TrainRequest::new(layers);
    (request.runs, request.name) = (args.runs.clone(), args.name.clone());
    (request.resume, request.overwrite) = (args.resume.clone(), args.overwrite);
    request.ranks = is_rank().then(|| ranks.size());
    let planned = request.plan()?;
    if planned.settings.engine == "torch" {
        return train_with_torch(args, &planned, context);
    }
    let source = while_tokenizing(quiet, |how| planned.open_source(&cache_folder(args.cache.as_deref()), &how, ranks.as_ref()))?;
    // A resumed run was introduced when it started. An existing run is an error.
    if !quiet && planned.is_first() {
        print_line(&planned.introduction(source.vocabulary())?);
    }
    let stop = stop_on_interrupt(match ranks.size() > 1 {
        false => "finishing the step and writing a checkpoint",
        true => "finishing the step and writing a checkpoint; if a rank is lost, the newest checkpoint is the last",
    });
    if args.stop_with_input {
        stop_with_input(&stop);
    }
    let bar = Bar::new(quiet);
    let options = RunOptions {
        display: Display::To(Arc::new(move |event| bar.training(event))),
        stop,
        peak: (!quiet).then(|| peak_gflops() * 1e9),
        provenance: context.provenance.clone(),
        collective: ranks,
        ..planned.options()?
    };
    let outcome = runs::train(&planned.settings, source.as_ref(), &options)?;
    // Clears the progress bar before the result is printed.
    drop(options);
    context.print(&outcome, Print { json: args.json, ..Print::default() })?;
    Ok(if outcome.finished { Exit::Success } else { Exit::Interrupted })
}

/// Starts the PyTorch trainer, forwards signals, and exits with its exit code.
fn train_with_torch(args: &TrainArgs, planned: &PlannedRun, context: &Context) -> Result<Exit, Failure> {
    if context.ranks.collective.size() > 1 {
        return Err(Failure::usage(
            "engine = torch starts its own processes: run one process with --processes N, or use torchrun instead of mpirun",
        ));
    }
    let mut options = TorchOptions::new(torch::interpreter(context.called_by()));
    (options.processes, options.cache, options.quiet) = (args.processes, args.cache.clone(), args.quiet);
    let control = stop_or_kill("waiting for the step and a checkpoint");
    if args.stop_with_input {
        stop_with_input(&control.stop);
    }
    Ok(match torch::train(planned, &options, &control)? {
        TorchEnd::Finished => Exit::Success,
        TorchEnd::Interrupted => Exit::Interrupted,
        TorchEnd::Locked => Exit::Locked,
        TorchEnd::Usage => Exit::Usage,
        TorchEnd::Failed => Exit::Failure,
    })
}
