//! From declarations to runs: every combination of task, variant and seed, shared ones once.

use std::collections::HashMap;

use termwise_train::sweep::{Axis, Job, Plan, TrainingSchema};
use toml::Value;

use super::experiment::{Experiment, Task, Variant};
use crate::Error;

/// The runs of some experiments.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Every run once. Seeds come slowest, so that a command that is broken off has something of everything.
    pub plan: Plan,
    /// For each experiment, task, variant and seed, in this order, the run in the plan.
    pub places: Vec<Place>,
}

/// What a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Among the experiments.
    pub experiment: usize,
    /// Among its tasks.
    pub task: usize,
    /// Among its variants.
    pub variant: usize,
    /// From 1 on.
    pub seed: usize,
    /// Among the plan's runs.
    pub job: usize,
}

impl Schedule {
    /// The runs of these experiments with seeds 1 to `seeds`.
    pub fn new(experiments: &[Experiment], seeds: usize) -> Result<Schedule, Error> {
        let mut axes = ["task", "variant", "seed"].map(|key| Axis { key: key.into(), values: Vec::new() });
        let mut jobs: Vec<Job> = Vec::new();
        let mut known: HashMap<String, usize> = HashMap::new();
        let mut places = Vec::new();
        for seed in 1..=seeds.max(1) {
            for (e, experiment) in experiments.iter().enumerate() {
                for (t, task) in experiment.tasks.iter().enumerate() {
                    for (v, variant) in experiment.variants.iter().enumerate() {
                        let job = job(task, variant, seed)?;
                        for (axis, value) in axes.iter_mut().zip(&job.point) {
                            if !axis.values.contains(value) {
                                axis.values.push(value.clone());
                            }
                        }
                        let index = *known.entry(job.hash.clone()).or_insert(jobs.len());
                        if index == jobs.len() {
                            jobs.push(job);
                        }
                        places.push(Place { experiment: e, task: t, variant: v, seed, job: index });
                    }
                }
            }
        }
        places.sort_by_key(|place| (place.experiment, place.task, place.variant, place.seed));
        Ok(Schedule { plan: Plan { axes: axes.into(), metric: "held_out.loss".into(), jobs }, places })
    }

    /// The runs of one experiment, task and variant, by seed.
    pub fn of(&self, experiment: usize, task: usize, variant: usize) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(move |place| (place.experiment, place.task, place.variant) == (experiment, task, variant))
    }
}

fn job(task: &Task, variant: &Variant, seed: usize) -> Result<Job, Error> {
    let mut asked = task.base.clone();
    asked.insert("attention".into(), Value::String(task.attention(variant)));
    asked.insert("seed".into(), Value::Integer(seed as i64));
    let point = vec![Value::String(task.name.clone()), Value::String(variant.name.clone()), Value::Integer(seed as i64)];
    Job::new(&asked, point, &TrainingSchema)
        .map_err(|problem| Error::Sizes(format!("the run of {} on {} is not possible: {problem}", variant.name, task.name)))
}
