//! Sweeps with a fake program.

mod plan;
#[cfg(unix)]
mod processes;
mod running;
mod summary;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use toml::{Table, Value};

use super::*;
use crate::error::{Error, Result};

/// Settings of the fake program.
struct Plain;

impl Schema for Plain {
    fn keys(&self) -> Vec<String> {
        ["steps", "seed", "optimizer.lr", "model.attention", "model.width", "data.width", "log"].map(String::from).into()
    }

    fn resolve(&self, requested: &Table) -> std::result::Result<Table, String> {
        let mut table: Table = toml::from_str("steps = 10\nseed = 1\n[model]\nwidth = 64\n").expect("TOML");
        for (key, value) in requested {
            match (table.get_mut(key), value) {
                (Some(Value::Table(inner)), Value::Table(above)) => inner.extend(above.clone()),
                _ => {
                    table.insert(key.clone(), value.clone());
                }
            }
        }
        if table["steps"].as_integer() == Some(0) { Err("`steps` is 0; it must be positive".into()) } else { Ok(table) }
    }

    fn decides(&self, key: &str) -> bool {
        key != "log"
    }
}

fn parse(text: &str) -> Result<Plan> {
    Plan::parse(text, Path::new("sweep.toml"), &Plain, "loss")
}

fn plan(text: &str) -> Plan {
    parse(text).unwrap_or_else(|error| panic!("{error}"))
}

const GRID: &str = r#"
[axes]
attention = ["softmax", "norm"]
lr = [0.001, 0.003]
seed = [1, 2]
"#;

/// Ends each job as a function decides, and records the jobs and their threads.
struct Fake<F> {
    end: F,
    ran: Mutex<Vec<(String, usize)>>,
    at_once: AtomicUsize,
    most: AtomicUsize,
}

fn fake<F: Fn(&Job, &Control) -> Outcome + Sync>(end: F) -> Fake<F> {
    Fake { end, ran: Mutex::default(), at_once: AtomicUsize::new(0), most: AtomicUsize::new(0) }
}

impl<F: Fn(&Job, &Control) -> Outcome + Sync> Runner for Fake<F> {
    fn run(&self, job: &Job, control: &Control) -> Result<Outcome> {
        let now = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.ran.lock().expect("a lock").push((job.hash.clone(), control.threads));
        assert_eq!(std::fs::read_to_string(control.settings).expect("settings").parse::<Table>().expect("TOML"), job.settings);
        (control.report)(0.5);
        let outcome = (self.end)(job, control);
        self.at_once.fetch_sub(1, Ordering::SeqCst);
        Ok(outcome)
    }
}

impl<F> Fake<F> {
    fn count(&self) -> usize {
        self.ran.lock().expect("a lock").len()
    }
}

fn number(job: &Job, key: &str) -> f64 {
    let value = key.split('.').fold(Value::Table(job.settings.clone()), |value, part| value[part].clone());
    value.as_float().or(value.as_integer().map(|n| n as f64)).expect("a number")
}

fn loss(x: f64) -> Outcome {
    Outcome::Finished(BTreeMap::from([("loss".to_string(), x), ("speed".to_string(), 10.0)]))
}

const ONE: Options = Options { parallel: 1, threads: 1, retry: false, skip_equal: false, only: None, others: Others::DEFAULT };

fn go(plan: &Plan, folder: &Path, runner: &dyn Runner, options: Options) -> Vec<State> {
    run(plan, folder, runner, &options, &AtomicBool::new(false), &mut |_| {}).unwrap_or_else(|error| panic!("{error}"))
}
