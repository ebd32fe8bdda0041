//! `termwise reproduce`.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use termwise_papers::Error;
use termwise_papers::reproduce::{self, Id, Options, Scale, paper};
use termwise_train::sweep::{Event, Plan, ProcessRunner, Status};

use super::size;
use super::sweep::{duration, interrupts, moving};
use crate::print;

/// Reproduce the experiments of two papers, with a verdict for every claim
///
/// Without data, network or GPU: small models are trained on the built-in language, several seeds each, and every claim of the papers is
/// decided by a rule that is stated beforehand. Finished runs are never run twice, so the command can be broken off and started again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise reproduce                                    everything, within five minutes on two cores
  termwise reproduce e4 e7 --seeds 5
  termwise reproduce --scale laptop --data corpus.txt   about an hour; E1, E3 and E4 on your own text as well
  termwise reproduce --scale paper                      say what the paper's own runs would cost, and write their settings

Experiments:
  e1 softmax, Norm, Gate    e2 wider and longer       e3 linear attentions    e4 orders of the series    e5 ablations
  e6 term spectrum          e7 the series as softmax  separation, bridge      the theorem of the second paper

Verdicts compare means over seeds with their spread; results.json has every number with the folder of its run.")]
pub struct ReproduceArgs {
    /// Experiments, or all
    #[arg(value_name = "EXPERIMENT", default_value = "all")]
    pub experiments: Vec<String>,
    /// How much to spend
    #[arg(long, value_enum, default_value_t = Size::Minute)]
    pub scale: Size,
    /// Text to train on as well, at scale laptop; at scale paper instead of FineWeb; may be repeated
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub data: Vec<String>,
    /// Seeds of every run [default: minute 4, laptop 3, paper 1]
    #[arg(long, value_name = "N", value_parser = size(1000))]
    pub seeds: Option<usize>,
    /// Folder of results [default: reproduce/ and the scale]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Run again what failed
    #[arg(long)]
    pub retry: bool,
    /// Run again what another build of this program finished, instead of mixing its results with new ones
    #[arg(long)]
    pub rerun_other_builds: bool,
    /// Really train the paper's models; without it --scale paper only says what they would cost
    #[arg(long)]
    pub run_paper: bool,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// [`Scale`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// A few steps that show nothing
    #[value(hide = true)]
    Test,
    /// At most five minutes on two cores
    Minute,
    /// At most two hours on two cores
    Laptop,
    /// The paper's models and data: says what they cost
    Paper,
}

impl From<Size> for Scale {
    fn from(size: Size) -> Scale {
        match size {
            Size::Test => Scale::Test,
            Size::Minute => Scale::Minute,
            Size::Laptop => Scale::Laptop,
            Size::Paper => Scale::Paper,
        }
    }
}

impl ReproduceArgs {
    fn options(&self, threads: usize) -> Result<Options, Error> {
        let defaults = Options::new(self.scale.into());
        Ok(Options {
            ids: Id::parse(&self.experiments)?,
            data: self.data.clone(),
            seeds: self.seeds,
            out: self.out.clone().unwrap_or(defaults.out),
            threads,
            retry: self.retry,
            rerun_other_builds: self.rerun_other_builds,
            provenance: crate::build::here(),
            scale: defaults.scale,
        })
    }
}

/// Whether every run is finished; a claim that is contradicted is a result.
pub fn run<E: From<Error> + From<io::Error>>(args: &ReproduceArgs, threads: usize, out: &mut impl Write) -> Result<bool, E> {
    let options = args.options(threads)?;
    let declared = reproduce::declare(&options)?;
    if options.scale == Scale::Paper && !args.run_paper {
        let plan = paper::plan(&options, &declared)?;
        if args.json {
            print::json(&plan, out)?;
        } else {
            print::paper(&plan, &options.out, out)?;
        }
        return Ok(true);
    }
    let program = std::env::current_exe()?;
    let (stop, kill) = interrupts();
    let mut display = Display { plan: &declared.schedule.plan, moving: io::stderr().is_terminal() };
    if !args.json {
        print::announce(&options, &declared, out)?;
    }
    let results = reproduce::run(&options, &declared, &ProcessRunner::new(program, kill), &stop, &mut |event| display.show(event));
    display.clear();
    let results = results?;
    if args.json {
        print::json(&results, out)?;
    } else {
        print::results(&results, &options.out, out)?;
    }
    Ok(results.timing.finished == results.timing.runs)
}

/// Progress on standard error: a line for each run that ends, and where it is a terminal a line that moves.
struct Display<'a> {
    plan: &'a Plan,
    moving: bool,
}

impl Display<'_> {
    fn show(&mut self, event: &Event) {
        let (index, line) = match event {
            Event::Progress(progress) => {
                if self.moving {
                    eprint!("\r\x1b[K{}", moving(progress));
                }
                return;
            }
            Event::Started(_) => return,
            Event::Stopped(index) => (index, "stopped".to_owned()),
            Event::Ended(index, record) => match &record.status {
                Status::Failed { reason } => (index, format!("failed: {reason}")),
                Status::Finished { metrics } => {
                    let number = |key: &str| metrics.get(key).map(|x| format!("{x:.3}"));
                    let recall = number("held_out.recall.loss").map_or(String::new(), |x| format!(", on recall tokens {x}"));
                    let loss = number("held_out.loss").unwrap_or("not measured".into());
                    (index, format!("loss {loss}{recall}, {}", duration(Duration::from_secs_f64(record.seconds))))
                }
            },
        };
        self.clear();
        eprintln!("{}: {line}", self.plan.name(&self.plan.jobs[*index]));
    }

    fn clear(&self) {
        if self.moving {
            eprint!("\r\x1b[K");
        }
    }
}
