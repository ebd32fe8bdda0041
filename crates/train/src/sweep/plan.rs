//! Expansion of a sweep file to a list of runs.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use termwise_base::files;
use termwise_base::nearest;
use toml::{Table, Value};

use crate::error::{Error, Result};

/// Maximum number of runs of a sweep: more indicates a mistake in the file.
const MAX_RUNS: usize = 100_000;

/// The settings of a run.
pub trait Schema {
    /// All dotted keys.
    fn keys(&self) -> Vec<String>;

    /// The complete settings for those requested: checked, with defaults.
    fn resolve(&self, requested: &Table) -> std::result::Result<Table, String>;

    /// Whether a setting, given by the first component of its key, affects the result of a run. Other settings are not part of the hash.
    fn decides(&self, _key: &str) -> bool {
        true
    }

    /// Relative duration of a run with these complete settings, in any unit, for estimates.
    fn work(&self, _settings: &Table) -> f64 {
        1.0
    }
}

/// The role of an axis in the summary, by the last component of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A seed: runs that differ in it are repetitions.
    Seed,
    /// A learning rate: only the best value is reported.
    LearningRate,
    /// An attention variant, for which duplicates are detected.
    Attention,
    /// Anything else.
    Other,
}

impl Role {
    /// The role of a dotted key.
    pub fn of(key: &str) -> Role {
        match key.rsplit('.').next() {
            Some("seed") => Role::Seed,
            Some("lr" | "learning_rate") => Role::LearningRate,
            Some("attention" | "attention_variant" | "variant") => Role::Attention,
            _ => Role::Other,
        }
    }
}

/// A setting and its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Its dotted key.
    pub key: String,
    /// Its values, at least one.
    pub values: Vec<Value>,
}

impl Axis {
    /// Its role in the summary.
    pub fn role(&self) -> Role {
        Role::of(&self.key)
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// 16 hexadecimal digits: a hash of the settings that affect its result.
    pub hash: String,
    /// Its value on each axis.
    pub point: Vec<Value>,
    /// Complete settings.
    pub settings: Table,
    /// Duration relative to the plan's other runs, in any unit.
    pub work: f64,
}

impl Job {
    /// The run with the requested settings; `point` is its value on each axis of its plan.
    pub fn new(requested: &Table, point: Vec<Value>, schema: &dyn Schema) -> std::result::Result<Job, String> {
        let settings = schema.resolve(requested)?;
        let decisive = settings.iter().filter(|(key, _)| schema.decides(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(Job { hash: hash(&decisive), point, work: schema.work(&settings), settings })
    }

    /// A file of the run in the directory of a sweep: `toml`, `json` or `log`. An empty extension gives the run's directory.
    pub fn path(&self, folder: &Path, extension: &str) -> PathBuf {
        let name = if extension.is_empty() { self.hash.clone() } else { format!("{}.{extension}", self.hash) };
        folder.join("runs").join(name)
    }
}

/// A sweep: its axes and all runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Sorted by name.
    pub axes: Vec<Axis>,
    /// The metric to compare, smaller is better.
    pub metric: String,
    /// Every combination, the last axis fastest, without duplicates.
    pub jobs: Vec<Job>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    metric: Option<String>,
    base: Option<Base>,
    #[serde(default)]
    axes: Table,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Base {
    File(String),
    Table(Table),
}

impl Plan {
    /// Reads a sweep file. `metric` is the default metric.
    pub fn read(path: &Path, schema: &dyn Schema, metric: &str) -> Result<Plan> {
        let text = files::read_any(path, files::TEXT).and_then(files::text).map_err(Error::io("read", path))?;
        Plan::parse(&text, path, schema, metric)
    }

    /// Parses a sweep; `path` is its file, for messages and to find the file of a base.
    pub fn parse(text: &str, path: &Path, schema: &dyn Schema, metric: &str) -> Result<Plan> {
        let refuse = |problem: String| Error::Sweep { path: path.into(), problem };
        let file: File = toml::from_str(text).map_err(|error| refuse(error.to_string().trim_end().into()))?;
        let base = match file.base {
            None => Table::new(),
            Some(Base::Table(table)) => table,
            Some(Base::File(name)) => {
                let name = path.parent().unwrap_or(Path::new("")).join(name);
                let text = files::read_any(&name, files::TEXT).and_then(files::text).map_err(Error::io("read", &name))?;
                toml::from_str(&text)
                    .map_err(|error: toml::de::Error| Error::Sweep { path: name, problem: error.to_string().trim_end().into() })?
            }
        };
        let keys = schema.keys();
        let mut axes: Vec<Axis> = Vec::new();
        for (written, values) in flatten(file.axes, &keys) {
            let key = find_key(&written, &keys).map_err(refuse)?;
            let values = match values {
                Value::Array(values) if !values.is_empty() => values,
                Value::Array(_) => return Err(refuse(format!("the axis `{written}` has no values; give at least one"))),
                value => return Err(refuse(format!("the axis `{written}` is {value}; give a list of values"))),
            };
            if axes.iter().any(|axis| axis.key == key) {
                return Err(refuse(format!("two axes set `{key}`; merge their values into one axis")));
            }
            axes.push(Axis { key, values });
        }
        let count = axes.iter().try_fold(1usize, |product, axis| product.checked_mul(axis.values.len())).filter(|&n| n <= MAX_RUNS);
        let count = count.ok_or_else(|| refuse(format!("more than {MAX_RUNS} combinations; remove values or axes")))?;
        let mut jobs: Vec<Job> = Vec::with_capacity(count);
        let mut known: HashSet<String> = HashSet::new();
        for index in 0..count {
            let point = point(&axes, index);
            let mut requested = base.clone();
            for (axis, value) in axes.iter().zip(&point) {
                set(&mut requested, &axis.key, value.clone()).map_err(refuse)?;
            }
            let name = describe(&axes, &point);
            let job = Job::new(&requested, point, schema).map_err(|problem| refuse(format!("{name}: {problem}")))?;
            if known.insert(job.hash.clone()) {
                jobs.push(job);
            }
        }
        Ok(Plan { axes, metric: file.metric.unwrap_or_else(|| metric.into()), jobs })
    }

    /// A description of a job: its value on each axis with several values.
    pub fn name(&self, job: &Job) -> String {
        describe(&self.axes, &job.point)
    }
}

/// The values of combination `index`.
fn point(axes: &[Axis], mut index: usize) -> Vec<Value> {
    let mut point: Vec<Value> = axes
        .iter()
        .rev()
        .map(|axis| {
            let value = axis.values[index % axis.values.len()].clone();
            index /= axis.values.len();
            value
        })
        .collect();
    point.reverse();
    point
}

fn describe(axes: &[Axis], point: &[Value]) -> String {
    let words: Vec<String> = axes
        .iter()
        .zip(point)
        .filter(|(axis, _)| axis.values.len() > 1)
        .map(|(axis, value)| format!("{}={}", axis.key.rsplit('.').next().unwrap_or(&axis.key), plain(value)))
        .collect();
    if words.is_empty() { "the base".into() } else { words.join(", ") }
}

/// A value as a string, strings without quotes.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Axes may be written as `model.width = […]`, which TOML parses as a nested table.
fn flatten(table: Table, keys: &[String]) -> Vec<(String, Value)> {
    let mut flat = Vec::new();
    for (key, value) in table {
        match value {
            Value::Table(inner) if !keys.contains(&key) => {
                flat.extend(flatten(inner, &[]).into_iter().map(|(rest, value)| (format!("{key}.{rest}"), value)));
            }
            value => flat.push((key, value)),
        }
    }
    flat
}

/// Resolves a key: itself, or the only key that ends with it.
fn find_key(written: &str, keys: &[String]) -> std::result::Result<String, String> {
    if keys.iter().any(|key| key == written) {
        return Ok(written.into());
    }
    let ending = format!(".{written}");
    let meant: Vec<&String> = keys.iter().filter(|key| key.ends_with(&ending)).collect();
    match meant[..] {
        [key] => Ok(key.clone()),
        [] => {
            let last = keys.iter().map(|key| key.rsplit('.').next().unwrap_or(key));
            let hint = match nearest(written, keys.iter().map(String::as_str).chain(last)) {
                Some(close) => format!("did you mean `{close}`?"),
                None => format!("available: {}", keys.join(", ")),
            };
            Err(format!("the axis `{written}` is not a setting; {hint}"))
        }
        _ => {
            let meant: Vec<&str> = meant.iter().map(|key| key.as_str()).collect();
            Err(format!("the axis `{written}` is ambiguous; write {}", meant.join(" or ")))
        }
    }
}

fn set(table: &mut Table, key: &str, value: Value) -> std::result::Result<(), String> {
    match key.split_once('.') {
        None => {
            table.insert(key.into(), value);
            Ok(())
        }
        Some((first, rest)) => match table.entry(first).or_insert_with(|| Value::Table(Table::new())) {
            Value::Table(inner) => set(inner, rest, value),
            other => Err(format!("`{first}` is {other} in the base and an axis sets `{key}`; make it a table")),
        },
    }
}

/// A hash of all keys and values, sorted by key.
pub(super) fn hash(settings: &Table) -> String {
    let mut text = String::new();
    write_sorted(&Value::Table(settings.clone()), &mut text);
    blake3::hash(text.as_bytes()).to_hex()[..16].to_string()
}

fn write_sorted(value: &Value, out: &mut String) {
    match value {
        Value::Table(table) => {
            let mut entries: Vec<(&String, &Value)> = table.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            out.push('{');
            for (key, value) in entries {
                out.push_str(&format!("{key:?}:"));
                write_sorted(value, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::Array(values) => {
            out.push('[');
            for value in values {
                write_sorted(value, out);
                out.push(',');
            }
            out.push(']');
        }
        // Not TOML's own formatting, whose choice of quotes may change.
        Value::String(text) => out.push_str(&format!("{text:?}")),
        Value::Float(x) => out.push_str(&format!("{x:?}")),
        other => out.push_str(&other.to_string()),
    }
}
