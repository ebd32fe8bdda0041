//! From declarations to runs: every combination of task, variant and seed; shared runs once.
//!
//! A task with several learning rates has two rounds: every variant at every rate with one seed, then every variant at its best rate with
//! other seeds. The rounds are evaluated on different held-out documents, so no rate is chosen on the data that decides the claims.

use std::collections::HashMap;

use termwise_train::sweep::{Axis, Job, Plan, TrainingSchema};
use toml::Value;

use super::experiment::{Experiment, TUNING_SEED, Task, Variant};
use super::results::Run;
use crate::Error;

/// The runs of some experiments.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Every run once. Seeds vary slowest, so an interrupted command has runs of every variant.
    pub plan: Plan,
    /// For each experiment, task, variant and seed, in this order, the run in the plan.
    pub places: Vec<Place>,
    /// Runs whose learning rate is not chosen yet.
    pub waiting: usize,
    /// Number of seeds of the comparison.
    seeds: usize,
}

/// The role of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Index of the experiment.
    pub experiment: usize,
    /// Index of the task.
    pub task: usize,
    /// Index of the variant.
    pub variant: usize,
    /// From 1; [`TUNING_SEED`] for a tuning run.
    pub seed: usize,
    /// Learning rate, if it is not that of the task.
    pub rate: Option<f64>,
    /// Index of the run in the plan.
    pub job: usize,
}

impl Place {
    /// Whether the run chooses a learning rate and is not part of the comparison.
    pub fn is_tuning(&self) -> bool {
        self.seed == TUNING_SEED
    }
}

impl Schedule {
    /// The runs of these experiments with seeds 1 to `seeds`; of variants that have their own learning rates, those that choose them.
    pub fn new(experiments: &[Experiment], seeds: usize) -> Result<Schedule, Error> {
        let axes = ["task", "variant", "lr", "seed"].map(|key| Axis { key: key.into(), values: Vec::new() });
        let plan = Plan { axes: axes.into(), metric: "held_out.loss".into(), jobs: Vec::new() };
        let mut schedule = Schedule { plan, places: Vec::new(), waiting: 0, seeds: seeds.max(1) };
        schedule.add(experiments, |task, _, seed| match (task.rates.is_empty(), seed) {
            (true, TUNING_SEED) => Vec::new(),
            (true, _) => vec![None],
            (false, TUNING_SEED) => task.rates.iter().copied().map(Some).collect(),
            (false, _) => Vec::new(),
        })?;
        let tuned = |experiment: &Experiment| {
            let tasks = experiment.tasks.iter().filter(|task| !task.rates.is_empty()).count();
            tasks * experiment.variants.iter().map(|variant| schedule.seeds_of(variant)).sum::<usize>()
        };
        schedule.waiting = experiments.iter().map(tuned).sum();
        Ok(schedule)
    }

    /// Seeds of a variant.
    fn seeds_of(&self, variant: &Variant) -> usize {
        variant.seeds.map_or(self.seeds, |seeds| seeds.clamp(1, self.seeds))
    }

    /// Adds the runs of variants whose learning rate has been selected: the rate of the finished tuning run with the smallest metric of the task. A variant
    /// waits while one of its tuning runs is open, or if none of them finished.
    pub fn with_rates(&self, experiments: &[Experiment], runs: &[Run]) -> Result<Schedule, Error> {
        let mut schedule = self.clone();
        schedule.waiting = 0;
        let mut chosen = HashMap::new();
        for (e, experiment) in experiments.iter().enumerate() {
            for (t, task) in experiment.tasks.iter().enumerate().filter(|(_, task)| !task.rates.is_empty()) {
                for (v, variant) in experiment.variants.iter().enumerate() {
                    match self.best_rate(e, t, v, task, runs) {
                        Some(rate) => _ = chosen.insert((e, t, v), rate),
                        None => schedule.waiting += self.seeds_of(variant),
                    }
                }
            }
        }
        schedule.add(experiments, |_, at, seed| {
            chosen.get(&at).filter(|_| seed != TUNING_SEED).map(|rate| Some(*rate)).into_iter().collect()
        })?;
        Ok(schedule)
    }

    fn best_rate(&self, experiment: usize, task: usize, variant: usize, of: &Task, runs: &[Run]) -> Option<f64> {
        let mut best: Option<(f64, f64)> = None;
        for place in self.tuning(experiment, task, variant) {
            let run = &runs[place.job];
            if run.status == "open" {
                return None;
            }
            let found = place.rate.zip(run.number(of.metric).map(|(_, number)| number));
            best = match (best, found) {
                (Some(best), Some(found)) if found.1 < best.1 => Some(found),
                (None, found) => found,
                (best, _) => best,
            };
        }
        best.map(|(rate, _)| rate)
    }

    /// Adds a run for each learning rate that `rates` gives for a task, a variant's place and a seed.
    fn add(
        &mut self,
        experiments: &[Experiment],
        rates: impl Fn(&Task, (usize, usize, usize), usize) -> Vec<Option<f64>>,
    ) -> Result<(), Error> {
        let mut known: HashMap<String, usize> = self.plan.jobs.iter().enumerate().map(|(index, job)| (job.hash.clone(), index)).collect();
        for seed in TUNING_SEED..=self.seeds {
            for (e, experiment) in experiments.iter().enumerate() {
                for (t, task) in experiment.tasks.iter().enumerate() {
                    let runs = |(_, variant): &(usize, &Variant)| seed <= self.seeds_of(variant);
                    for (v, variant) in experiment.variants.iter().enumerate().filter(runs).collect::<Vec<_>>() {
                        for rate in rates(task, (e, t, v), seed) {
                            let job = job(task, variant, rate, seed)?;
                            for (axis, value) in self.plan.axes.iter_mut().zip(&job.point) {
                                if !axis.values.contains(value) {
                                    axis.values.push(value.clone());
                                }
                            }
                            let index = *known.entry(job.hash.clone()).or_insert(self.plan.jobs.len());
                            if index == self.plan.jobs.len() {
                                self.plan.jobs.push(job);
                            }
                            self.places.push(Place { experiment: e, task: t, variant: v, seed, rate, job: index });
                        }
                    }
                }
            }
        }
        // Stable: rates stay in their order.
        self.places.sort_by_key(|place| (place.experiment, place.task, place.variant, place.seed));
        Ok(())
    }

    /// The runs of one experiment, task and variant that are compared, by seed.
    pub fn of(&self, experiment: usize, task: usize, variant: usize) -> impl Iterator<Item = &Place> {
        self.all_of(experiment, task, variant).filter(|place| !place.is_tuning())
    }

    /// Those that choose a learning rate, by rate.
    pub fn tuning(&self, experiment: usize, task: usize, variant: usize) -> impl Iterator<Item = &Place> {
        self.all_of(experiment, task, variant).filter(|place| place.is_tuning())
    }

    fn all_of(&self, experiment: usize, task: usize, variant: usize) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(move |place| (place.experiment, place.task, place.variant) == (experiment, task, variant))
    }
}

fn job(task: &Task, variant: &Variant, rate: Option<f64>, seed: usize) -> Result<Job, Error> {
    let mut requested = task.base.clone();
    requested.extend(variant.settings.clone());
    requested.insert("attention".into(), Value::String(task.attention(variant)));
    requested.insert("seed".into(), Value::Integer(seed as i64));
    if let Some(rate) = rate {
        requested.insert("lr".into(), Value::Float(rate));
        if seed == TUNING_SEED {
            requested.extend(task.tuning.clone());
        }
    }
    let lr = rate.map_or(Value::String("the task's".into()), Value::Float);
    let point = vec![Value::String(task.name.clone()), Value::String(variant.name.clone()), lr, Value::Integer(seed as i64)];
    Job::new(&requested, point, &TrainingSchema)
        .map_err(|problem| Error::Sizes(format!("the run of {} on {} is not possible: {problem}", variant.name, task.name)))
}
