//! The experiments of two papers (arXiv 2507.23632, arXiv 2310.11685), and experiments on text, windows and write rules.
//!
//! An [`Experiment`] declares a question, variants, tasks and [`Claim`]s, each with a [`Rule`] that decides it. Rules are written to
//! [`CLAIMS_FILE`] before the first run. A [`Schedule`] contains the runs of some experiments, shared runs once, as the plan of a sweep. Finished
//! runs are not repeated, so an interrupted command resumes. [`Results`] has every number with the folder of its run.
//!
//! ```
//! use termwise_experiments::reproduce::{Id, Options, Scale, declare};
//!
//! let options = Options { ids: vec![Id::E1, Id::E4], ..Options::new(Scale::Minute) };
//! let declared = declare(&options)?;
//! assert_eq!(declared.experiments[0].variants[0].name, "softmax");
//! // Softmax and linear attention belong to both and are run once per seed.
//! assert_eq!(declared.schedule.plan.jobs.len(), 4 * (4 + 6));
//! # Ok::<(), termwise_experiments::Error>(())
//! ```
//!
//! # The folder of results
//! ```text
//! claims.json          claims, rules, seeds and settings, written before the first run
//! index.html           HTML report, with figures and tables also as files in figures/ and tables/
//! results.json         all results: `Results`
//! runs/                the runs, as in the folder of a sweep
//! ```

mod claim;
mod collect;
mod declaration;
mod environment;
mod experiment;
mod figures;
mod folders;
mod inside;
mod interval;
mod list;
mod mqar;
mod page;
pub mod paper;
mod recall;
mod results;
mod scale;
mod schedule;
pub mod scripts;
mod second_half;
mod text;
mod text_page;
mod theorem;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use termwise_report::counted;
use termwise_train::provenance::Provenance;
use termwise_train::sweep::{self, Event, Plan, Runner, SlurmJob, State};

pub use claim::{Claim, Decision, Rule, Side, Verdict};
pub use declaration::{Declaration, FILE as CLAIMS_FILE};
pub use environment::Environment;
pub use experiment::{Experiment, Id, Metric, TUNING_SEED, Task, Variant};
pub use folders::of_folders;
pub use inside::{Inside, LayerTerms, ModelTerms};
pub use interval::{Difference, Method, Numbers};
use list::SHARE;
pub use list::{LINEAR, SOFTMAX};
pub use page::page;
pub use recall::RunSlices;
pub use results::{ClaimOutcome, CurvePoint, FILE, FORMAT, LeftOut, Outcome, Results, Run, Summary, TaskOutcome, Timing, VariantOutcome};
pub use scale::{PAPER_DATA, Scale};
pub use schedule::{Place, Schedule};
pub use theorem::Theorem;

use crate::Error;

/// Options of [`run`].
#[derive(Clone, Debug)]
pub struct Options {
    /// The experiments.
    pub ids: Vec<Id>,
    /// The compute budget.
    pub scale: Scale,
    /// Training text: in addition to synthetic recall at scale laptop, required at scale text.
    pub data: Vec<String>,
    /// At scale text: the held-out text; default: the end of the training text.
    pub valid_data: Vec<String>,
    /// At scale text: training tokens per run; default: 4 Mi.
    pub tokens: Option<u64>,
    /// Hours after which runs are stopped; the same call resumes them. Default: no limit.
    pub hours: Option<f64>,
    /// Seeds per variant; default: the number of the scale.
    pub seeds: Option<usize>,
    /// Folder of results.
    pub out: PathBuf,
    /// Concurrent runs, each on one core.
    pub threads: usize,
    /// Whether failed runs are repeated.
    pub retry: bool,
    /// Whether finished runs of other builds are repeated.
    pub rerun_other_builds: bool,
    /// The build and command of this process.
    pub provenance: Provenance,
    /// Other processes that share the runs.
    pub others: sweep::Others,
}

impl Options {
    /// Experiments by name; `all` or no names: all of the scale. Default scale: minute, or mini for mqar alone.
    ///
    /// # Errors
    /// If an experiment is unknown or not part of the scale.
    pub fn named(names: &[String], scale: Option<Scale>) -> Result<Options, Error> {
        let mqar = !names.is_empty() && names.iter().all(|name| name.eq_ignore_ascii_case(Id::Mqar.name()));
        let scale = scale.unwrap_or(if mqar { Scale::Mini } else { Scale::Minute });
        Ok(Options { ids: Id::parse(names, scale)?, ..Options::new(scale) })
    }

    /// All experiments of this scale.
    pub fn new(scale: Scale) -> Options {
        let out = Path::new("reproduce").join(scale.name());
        let threads = termwise_base::threads::available();
        let (retry, rerun_other_builds, provenance) = (false, false, Provenance::default());
        let (ids, others) = (Id::of_scale(scale), sweep::Others::DEFAULT);
        let (data, valid_data, tokens, hours) = (Vec::new(), Vec::new(), None, None);
        Options { ids, scale, data, valid_data, tokens, hours, seeds: None, out, threads, retry, rerun_other_builds, provenance, others }
    }
}

/// The declared experiments and runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Declared {
    /// Experiments that train models.
    pub experiments: Vec<Experiment>,
    /// Experiments that are computed in closed form.
    pub theorems: Vec<Id>,
    /// Their runs.
    pub schedule: Schedule,
    /// Experiments that are left out, and the reason.
    pub left_out: Vec<(Id, String)>,
}

impl Declared {
    /// Experiments, scale, number of runs and folder, and a note if an option has no effect.
    pub fn announcement(&self, options: &Options) -> String {
        let names: Vec<&str> = self.experiments.iter().map(|experiment| experiment.id.name()).collect();
        let (runs, waiting) = (self.schedule.plan.jobs.len(), self.schedule.waiting);
        let (many, seeds) = (counted(runs, "run"), counted(options.seeds.unwrap_or(options.scale.seeds()), "seed"));
        let (names, scale, at_once) = (names.join(", "), options.scale.name(), options.threads.min(runs.max(1)));
        let waiting = if waiting == 0 { String::new() } else { format!(" and {waiting} more once learning rates are chosen") };
        let ignored = options.scale == Scale::Minute && !options.data.is_empty();
        let note = if ignored { "\nnote: --data is ignored at scale minute" } else { "" };
        format!("{names} at scale {scale}: {many} with {seeds} each{waiting}, {at_once} at a time, in {}{note}", options.out.display())
    }

    /// The job array of all open runs.
    ///
    /// # Errors
    /// If the folder of results cannot be read.
    pub fn slurm_job(&self, options: &Options) -> Result<SlurmJob, Error> {
        let states = sweep::states(&self.schedule.plan, &options.out, false)?;
        Ok(SlurmJob::of(&format!("reproduce-{}", options.scale.name()), &options.out, &self.schedule.plan, &states))
    }
}

/// Resolves the options into experiments and runs.
pub fn declare(options: &Options) -> Result<Declared, Error> {
    let experiments = list::experiments(options)?;
    let schedule = Schedule::new(&experiments, options.seeds.unwrap_or(options.scale.seeds()))?;
    let requested = |id: &Id| options.ids.contains(id);
    let theorems: Vec<Id> = [Id::Separation, Id::Bridge].into_iter().filter(requested).collect();
    let missing = |id: &&Id| !theorems.contains(id) && !experiments.iter().any(|experiment| experiment.id == **id);
    let left_out = options.ids.iter().filter(missing).map(|&id| (id, list::why_left_out(id, options.scale))).collect();
    Ok(Declared { experiments, theorems, schedule, left_out })
}

/// Runs all open runs, decides every claim, and writes `results.json` and `index.html`. Tuning runs come before the runs that use their learning rate.
///
/// After `stop` some runs are open; the same call resumes. `observe` receives each event with the plan to which its indices refer.
pub fn run(
    options: &Options,
    declared: &Declared,
    runner: &dyn Runner,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(&Plan, &Event),
) -> Result<Results, Error> {
    let start = Instant::now();
    std::fs::create_dir_all(&options.out).map_err(termwise_model::Error::io("create", &options.out))?;
    let theorems = declared.theorems.iter().map(|&id| theorem::compute(id, options.scale));
    let theorems = theorems.collect::<Result<Vec<_>, Error>>()?.into_iter().flatten().collect();
    let declarations = declaration::record(&declared.experiments, options.seeds.unwrap_or(options.scale.seeds()), &options.out)?;
    let only = options.rerun_other_builds.then(|| options.provenance.clone());
    let (parallel, others) = (options.threads, options.others);
    let how = sweep::Options { parallel, threads: options.threads, retry: options.retry, skip_equal: false, only, others };
    text::train_tokenizers(options, &declared.experiments)?;
    let seeds = options.seeds.unwrap_or(options.scale.seeds());
    let mut go = |plan: &Plan| {
        sweep::run(plan, &options.out, runner, &how, stop, &mut |event| {
            observe(plan, event);
            if options.hours.is_some_and(|hours| start.elapsed().as_secs_f64() > 3600.0 * hours) {
                stop.store(true, Ordering::Relaxed);
            }
        })
    };
    for stage in stages(&declared.experiments) {
        let schedule = Schedule::new(stage, seeds)?;
        let states = go(&schedule.plan)?;
        if schedule.waiting > 0 && !stop.load(Ordering::Relaxed) {
            // The tuning runs choose the learning rates; their indices in the plan stay the same.
            go(&schedule.with_rates(stage, &collect::runs(&schedule, &states, &options.out)?)?.plan)?;
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    let mut schedule = declared.schedule.clone();
    let mut states = sweep::states(&schedule.plan, &options.out, false)?;
    if schedule.waiting > 0 {
        schedule = schedule.with_rates(&declared.experiments, &collect::runs(&schedule, &states, &options.out)?)?;
        states = sweep::states(&schedule.plan, &options.out, false)?;
    }
    let mut results = results_of(options, &Declared { schedule, ..declared.clone() }, &states, theorems, start)?;
    results.recall = recall::measure(&results, &options.out)?;
    results.declarations = declarations;
    let _alone = sweep::writing_alone(&options.out);
    results.write(&options.out)?;
    page::write(&results, &options.out)?;
    Ok(results)
}

/// Experiments whose runs are scheduled together: first all without learning rates of their own, then each of the others, so that stopping early leaves the
/// first ones complete.
fn stages(experiments: &[Experiment]) -> Vec<&[Experiment]> {
    let tuned = |experiment: &Experiment| experiment.tasks.iter().any(|task| !task.rates.is_empty());
    experiments.chunk_by(|one, next| !tuned(one) && !tuned(next)).collect()
}

fn results_of(options: &Options, declared: &Declared, states: &[State], theorems: Vec<Theorem>, start: Instant) -> Result<Results, Error> {
    let Declared { experiments, schedule, left_out, .. } = declared;
    let runs = collect::runs(schedule, states, &options.out)?;
    let outcome = |(index, experiment)| collect::outcome(index, experiment, schedule, &runs);
    let experiments = experiments.iter().enumerate().map(outcome).collect::<Result<Vec<_>, Error>>()?;
    let of_status = |status: &'static str| runs.iter().filter(move |run| run.status == status);
    let timing = Timing {
        seconds: start.elapsed().as_secs_f64(),
        // An empty sum of floats is -0.0.
        run_seconds: of_status("finished").map(|run| run.seconds).sum::<f64>() + 0.0,
        parallel: options.threads,
        runs: runs.len(),
        finished: of_status("finished").count(),
        failed: of_status("failed").count(),
    };
    let left_out = left_out.iter().map(|(id, reason)| LeftOut { id: *id, reason: reason.clone() }).collect();
    let inside = declared.experiments.iter().find(|experiment| experiment.id == Id::E6);
    let inside = inside.map(|experiment| inside::look(&experiment.tasks, &runs, &options.out)).transpose()?.flatten();
    let environment = Environment::here(options.provenance.clone());
    let (note, declarations) = (String::new(), Vec::new());
    let mut results = Results {
        format: FORMAT,
        note,
        scale: options.scale,
        environment,
        timing,
        declarations,
        experiments,
        inside,
        theorems,
        left_out,
        recall: Vec::new(),
        tokens: options.tokens,
        runs,
    };
    results.decide();
    Ok(results)
}
