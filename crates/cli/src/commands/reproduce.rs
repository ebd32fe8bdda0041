//! `termwise reproduce`.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use termwise_experiments::Error;
use termwise_experiments::reproduce::{self, FILE, Options, Scale, paper};
use termwise_report::duration;
use termwise_train::log::print_line;
use termwise_train::sweep::{Event, Plan, ProcessRunner, Status, SweepControl};

use super::share::ShareArgs;
use super::size;
use super::sweep::{STOPPING, waiting};
use crate::context::{Context, Print};
use crate::error::{Exit, Failure};
use crate::progress::{Bar, stop_or_kill};

/// Reproduce the experiments of two papers, with verdicts
///
/// Needs no data, network or GPU. Small models are trained on synthetic associative recall with several seeds. Every claim is decided by a
/// rule that is written to claims.json before the first run. Finished runs are reused, so the command can be interrupted and restarted.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise reproduce                                    everything, in about five minutes on two cores
  termwise reproduce e4 e7 --seeds 5
  termwise reproduce --scale laptop --data corpus.txt   about an hour; E1, E3 and E4 also on your own text
  termwise reproduce --scale text --data books          hours; loss on text by order and by bytes of state
  termwise reproduce orders --scale text --data books --tokens 1500000 --hours 1
  termwise reproduce mqar                               hours; which mixers solve multi-query associative recall
  termwise reproduce --scale paper                      estimate the cost of the paper's runs, and write their settings

Experiments:
  e1 softmax, Norm, Gate    e2 wider and longer       e3 linear attentions    e4 orders of the series    e5 ablations
  e6 term spectrum          e7 the series as softmax  separation, bridge      the theorem of the second paper
  Only at scale laptop, with a tuned learning rate per variant:
  overwrite, parity         orders 1 to 3, with and without write rule and decay, at equal state size
  distance                  window, sink and far orders against a longer window at equal bytes
  Only at scale text, in this order, with a tuned learning rate per variant; NAME-conv has a short convolution in every variant:
  orders, orders-conv       loss against the highest Taylor order
  state, state-conv         loss against bytes of state: windows, Taylor and delta states
  delta, delta-conv         orders with the delta rule and decay
  tokenization              the gap to softmax against training tokens, for bytes and two BPE vocabularies
  families, families-conv   loss against bytes of state: other head dimensions and families
  Only at scale mini and zoology:
  mqar                      multi-query associative recall, by the share of seeds that solve it

A verdict needs every seed; a claim with a failed or unfinished run is undecided. results.json has every number with the folder of its run.")]
pub struct ReproduceArgs {
    /// Experiments
    #[arg(value_name = "EXPERIMENT", default_value = "all")]
    pub experiments: Vec<String>,
    /// Compute budget [default: minute; for mqar alone: mini]
    #[arg(long, value_name = "SCALE", value_parser = scales())]
    pub scale: Option<Scale>,
    /// Text to train on: in addition (laptop), a folder with train.txt and valid.txt or files (text), instead of FineWeb (paper); may be repeated
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub data: Vec<String>,
    /// With --scale text: held-out text [default: valid.txt next to train.txt in the folder --data, or the end of the text]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub valid_data: Vec<String>,
    /// With --scale text: training tokens per run [default: 4194304]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub tokens: Option<u64>,
    /// Stop after this many hours; the same command resumes
    #[arg(long, value_name = "H")]
    pub hours: Option<f64>,
    /// Seeds per run [default: minute 4, laptop 3, text 3, mini 5, others 1]
    #[arg(long, value_name = "N", value_parser = size(1000))]
    pub seeds: Option<usize>,
    /// Folder of results [default: reproduce/SCALE]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Rerun failed runs
    #[arg(long)]
    pub retry: bool,
    /// Rerun runs that another build has finished
    #[arg(long)]
    pub rerun_other_builds: bool,
    /// With --scale paper: train the models instead of estimating their cost
    #[arg(long)]
    pub run_paper: bool,
    #[command(flatten)]
    pub share: ShareArgs,
    #[command(flatten)]
    pub print: Print,
}

/// Parses a scale. Help does not list the one for tests.
fn scales() -> impl TypedValueParser<Value = Scale> {
    let values = Scale::ALL.map(|(scale, name, help)| PossibleValue::new(name).help(help).hide(scale == Scale::Test));
    PossibleValuesParser::new(values).try_map(|name| Scale::named(&name).ok_or("it is not the name of a scale"))
}

impl ReproduceArgs {
    fn options(&self, context: &Context) -> Result<Options, Error> {
        let defaults = Options::named(&self.experiments, self.scale)?;
        Ok(Options {
            data: self.data.clone(),
            valid_data: self.valid_data.clone(),
            tokens: self.tokens,
            hours: self.hours,
            seeds: self.seeds,
            out: self.out.clone().unwrap_or_else(|| defaults.out.clone()),
            threads: context.threads,
            retry: self.retry,
            rerun_other_builds: self.rerun_other_builds,
            provenance: context.provenance.clone(),
            others: self.share.others(),
            ..defaults
        })
    }
}

/// Succeeds if every run is finished. A contradicted claim is a result.
pub fn run(args: &ReproduceArgs, context: &mut Context) -> Result<Exit, Failure> {
    let options = args.options(context)?;
    let declared = reproduce::declare(&options)?;
    let print = |text: &str| {
        if !args.print.quiet {
            print_line(text);
        }
    };
    if options.scale == Scale::Paper && !args.run_paper {
        context.print(&paper::plan(&options, &declared)?, args.print)?;
        print(&format!("written: {}", options.out.display()));
        return Ok(Exit::Success);
    }
    if args.share.submit.is_some() {
        return args.share.submit(declared.slurm_job(&options)?, context);
    }
    let SweepControl { stop, kill } = stop_or_kill(STOPPING);
    print(&declared.announcement(&options));
    let bar = Bar::new(args.print.quiet);
    let runner = ProcessRunner::new(context.respawn_argv()?, kill);
    let results = reproduce::run(&options, &declared, &runner, &stop, &mut |plan, event| show(&bar, plan, event));
    drop(bar);
    let results = results?;
    context.print(&results, args.print)?;
    results.notes().into_iter().for_each(print);
    print(&format!("written: {}, {}", options.out.join("index.html").display(), options.out.join(FILE).display()));
    Ok(match results.is_complete() {
        true => Exit::Success,
        false if stop.load(Ordering::Relaxed) => Exit::Interrupted,
        false => Exit::Failure,
    })
}

/// A progress bar, and a line for each run that fails or stops. Logs have a line for each run that ends.
fn show(bar: &Bar, plan: &Plan, event: &Event) {
    let (index, line) = match event {
        Event::Progress(progress) => return bar.runs(progress),
        Event::Started(_) => return,
        Event::Stopped(index) => (index, "stopped".to_owned()),
        Event::Waiting(runs) => return bar.print_line(&waiting(*runs)),
        Event::Ended(index, record) => match &record.status {
            Status::Failed { reason } => (index, format!("failed: {reason}")),
            Status::Finished { metrics } => {
                let number = |key: &str| metrics.get(key).map(|x| format!("{x:.3}"));
                let recall = number("held_out.recall.loss").map_or(String::new(), |x| format!(", on recall tokens {x}"));
                let beyond = number("held_out.beyond.loss").map_or(String::new(), |x| format!(", beyond the training length {x}"));
                let loss = number("held_out.loss").unwrap_or("not measured".into());
                let line = format!("loss {loss}{recall}{beyond}, {}", duration(record.seconds));
                return bar.log_line(&format!("{}: {line}", plan.name(&plan.jobs[*index])));
            }
        },
    };
    bar.print_line(&format!("{}: {line}", plan.name(&plan.jobs[*index])));
}
