//! The runs at the paper's scale: their estimated cost, and their settings as files.

use std::path::Path;

use serde::{Deserialize, Serialize};
use termwise_report::{Block, Cell, Document, Documented, Section, duration};
use termwise_train::Settings;
use toml::{Table, Value};

use super::{Declared, Experiment, Options, scripts};
use termwise_analysis::plan::{self, Hardware};
use termwise_base::threads;

use crate::Error;

/// The estimated cost of the paper's runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PaperPlan {
    /// Every run once.
    pub runs: Vec<PaperRun>,
    /// For all runs, one after the other, on each machine.
    pub totals: Vec<Total>,
    /// Files for `termwise sweep`, relative to the folder of results.
    pub sweeps: Vec<String>,
    /// Scripts that train every run with PyTorch, likewise.
    #[serde(default)]
    pub scripts: Vec<String>,
    /// Everything that is assumed, one sentence each.
    pub assumptions: Vec<String>,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PaperRun {
    /// Hash of its settings, which are stored in `runs/<hash>.toml`.
    pub hash: String,
    /// The task's name.
    pub task: String,
    /// The variant's name.
    pub variant: String,
    /// Its attention.
    pub attention: String,
    /// Seed of weights and data.
    pub seed: u64,
    /// Of the model.
    pub parameters: u64,
    /// Positions trained on; documents that do not fill their rows have fewer tokens.
    pub tokens: u64,
    /// Operations in all.
    pub flops: f64,
    /// On this machine, by its measured peak.
    pub seconds_here: f64,
    /// On a machine with [`scripts::GPUS`] A100, by their data sheet, without communication between them.
    #[serde(default)]
    pub gpu_seconds: f64,
    /// Bytes that each of them needs: parameters, gradients and moments, and its part of a step's activations.
    #[serde(default)]
    pub gpu_memory: u64,
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Total {
    /// Its name in full.
    pub title: String,
    /// For all runs.
    pub seconds: f64,
}

impl Documented for PaperPlan {
    const KIND: &'static str = "paper-plan";

    fn document(&self) -> Document {
        let mut table = termwise_report::Table::new("", ["task", "variant", "parameters", "tokens", "FLOPs", "time here", "settings"]);
        for run in &self.runs {
            table.rows.push(vec![
                Cell::text(&run.task),
                Cell::text(&run.variant),
                Cell::Count(run.parameters),
                Cell::text(format!("{:.1e}", run.tokens as f64)),
                Cell::text(format!("{:.1e}", run.flops)),
                Cell::text(duration(run.seconds_here)),
                Cell::code(format!("runs/{}.toml", run.hash)),
            ]);
        }
        let count = self.runs.len();
        let total = |total: &Total| format!("on {}: {} for all {count} runs one after the other", total.title, duration(total.seconds));
        let files: Vec<String> = self.sweeps.iter().map(|sweep| format!("termwise sweep {sweep}")).collect();
        Document {
            title: "The paper's own runs, planned and not started".into(),
            lead: vec![
                Block::text("`--run-paper` starts them; settings of every run are for `termwise train --config`."),
                Block::table("runs", table),
                Block::List(self.totals.iter().map(total).collect()),
                Block::Code(files.join("\n")),
                Block::text(
                    "With PyTorch, on one machine with GPUs or by Slurm; memory and time of each run are in the scripts, planned and not measured:",
                ),
                Block::Code(
                    self.scripts
                        .iter()
                        .map(|script| if script.ends_with(".sh") { format!("bash {script}") } else { format!("sbatch {script}") })
                        .collect::<Vec<_>>()
                        .join("\n"),
                ),
            ],
            sections: vec![Section::new("Assumed", vec![Block::List(self.assumptions.clone())])],
        }
    }
}

/// Machines other than this one.
const ESTIMATED_MACHINES: [&str; 2] = ["a100", "h100"];
/// That scripts plan for.
const GPU: &str = "a100";
/// AdamW reads weights, gradient and two moments and writes three of them.
const OPTIMIZER_BYTES: f64 = 28.0;

/// Plans the runs and writes the settings of each, and of each experiment as a sweep. Nothing is trained.
pub fn plan(options: &Options, declared: &Declared) -> Result<PaperPlan, Error> {
    let names: Vec<String> = ["here"].iter().chain(&ESTIMATED_MACHINES).map(|&name| name.to_owned()).collect();
    let machines = Hardware::find(&names, options.threads.min(threads::available()))?;
    let mut totals: Vec<Total> = machines.iter().map(|machine| Total { title: machine.title.clone(), seconds: 0.0 }).collect();
    let mut assumptions: Vec<String> = Vec::new();
    let mut runs = Vec::new();
    let folder = options.out.join("runs");
    std::fs::create_dir_all(&folder).map_err(termwise_model::Error::io("create", &folder))?;
    for job in &declared.schedule.plan.jobs {
        write(&job.path(&options.out, "toml"), &job.settings.to_string())?;
        let settings = Settings::from_toml(&job.settings.to_string(), "a run of the paper")?;
        let attention = settings.attention.as_str().unwrap_or_default().to_owned();
        let tokens = settings.steps * (settings.batch * settings.accumulate * settings.length) as u64;
        let planned = plan::plan(&plan::Options {
            model: settings.model.clone(),
            attention: Some(attention.clone()),
            context: Some(settings.length as u64),
            batch: settings.batch as u64,
            tokens: Some(tokens),
            hardware: ESTIMATED_MACHINES.map(str::to_owned).into(),
            ..plan::Options::default()
        })?;
        for line in planned.assumptions {
            if !assumptions.contains(&line) {
                assumptions.push(line);
            }
        }
        let own = planned.training.times.iter().find(|time| time.column == planned.columns[0].label);
        let flops = own.map_or(0.0, |time| time.flops_a_token) * tokens as f64;
        let updates = OPTIMIZER_BYTES * planned.model.parameters as f64 * settings.steps as f64;
        let seconds = |machine: &Hardware| machine.compute_seconds(flops) + machine.memory_seconds(updates);
        totals.iter_mut().zip(&machines).for_each(|(total, machine)| total.seconds += seconds(machine));
        let gpu = machines.iter().find(|machine| machine.name == GPU);
        let parameter_bytes = planned.training.parameter_bytes;
        let on_one = planned.training.times.iter().find(|time| time.hardware == GPU && time.column == planned.columns[0].label);
        let activations = on_one.map_or(0, |time| time.memory.saturating_sub(parameter_bytes));
        let gpu_memory = parameter_bytes + activations / scripts::GPUS.min(settings.batch as u64).max(1);
        let text = |index: usize| job.point.get(index).and_then(Value::as_str).unwrap_or_default().to_owned();
        runs.push(PaperRun {
            hash: job.hash.clone(),
            task: text(0),
            variant: text(1),
            attention,
            seed: settings.seed,
            parameters: planned.model.parameters,
            tokens,
            flops,
            seconds_here: seconds(&machines[0]),
            gpu_seconds: gpu.map_or(0.0, |gpu| gpu.compute_seconds(flops) / scripts::GPUS as f64 + gpu.memory_seconds(updates)),
            gpu_memory,
        });
    }
    let seeds = options.seeds.unwrap_or(options.scale.seeds());
    let mut sweeps = Vec::new();
    for experiment in &declared.experiments {
        sweeps.extend(sweep_files(experiment, seeds, &options.out)?);
    }
    let files = [("node.sh", scripts::node(&runs)), ("paper.sbatch", scripts::slurm(&runs))];
    for (name, text) in &files {
        write(&options.out.join(name), text)?;
    }
    let scripts = files.map(|(name, _)| options.out.join(name).display().to_string()).into();
    Ok(PaperPlan { runs, totals, sweeps, scripts, assumptions })
}

/// A file for `termwise sweep` for each task of an experiment.
fn sweep_files(experiment: &Experiment, seeds: usize, folder: &Path) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for (index, task) in experiment.tasks.iter().enumerate() {
        let attention = experiment.variants.iter().map(|variant| Value::String(task.attention(variant))).collect();
        let seed = (1..=seeds as i64).map(Value::Integer).collect();
        let axes = Table::from_iter([("attention".to_owned(), Value::Array(attention)), ("seed".to_owned(), Value::Array(seed))]);
        let file = Table::from_iter([
            ("metric".to_owned(), Value::String(task.metric.key().into())),
            ("base".to_owned(), Value::Table(task.base.clone())),
            ("axes".to_owned(), Value::Table(axes)),
        ]);
        let name = match experiment.tasks.len() {
            1 => format!("{}.toml", experiment.id.name()),
            _ => format!("{}-{}.toml", experiment.id.name(), index + 1),
        };
        write(&folder.join(&name), &format!("# {}, {}: {}\n{file}", experiment.id.name(), task.name, experiment.question))?;
        names.push(name);
    }
    Ok(names)
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(termwise_model::Error::io("write", path))?;
    Ok(())
}
