//! The summary of a sweep.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::plan::{Job, Plan, Role, plain};
use super::record::{Metrics, Record, Status};
use super::schedule::State;

/// Axes and their values as strings.
pub type Point = Vec<(String, String)>;

/// Mean and standard deviation over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Statistic {
    /// Mean.
    pub mean: f64,
    /// Standard deviation with n − 1; absent for a single run.
    pub deviation: Option<f64>,
    /// Number of runs.
    pub count: usize,
}

impl Statistic {
    /// Of these values; `None` if there are none.
    pub fn of(numbers: &[f64]) -> Option<Statistic> {
        let count = numbers.len();
        if count == 0 {
            return None;
        }
        let mean = numbers.iter().sum::<f64>() / count as f64;
        let squares: f64 = numbers.iter().map(|x| (x - mean).powi(2)).sum();
        Some(Statistic { mean, deviation: (count > 1).then(|| (squares / (count - 1) as f64).sqrt()), count })
    }
}

/// Mean ± standard deviation.
impl std::fmt::Display for Statistic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.deviation {
            Some(deviation) => write!(f, "{:.4} ± {deviation:.4}", self.mean),
            None => write!(f, "{:.4}", self.mean),
        }
    }
}

/// Runs that differ only in the seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Axes and their values, without the seed.
    pub point: Point,
    /// Runs that finished with a finite metric.
    pub finished: usize,
    /// Runs that failed, or finished without a finite metric.
    pub failed: usize,
    /// Runs that have not ended.
    pub open: usize,
    /// All metrics of finished runs.
    pub metrics: BTreeMap<String, Statistic>,
}

/// The best learning rate for one combination of the other axes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Axes and their values, without seed and learning rate.
    pub point: Point,
    /// The learning rate with the smallest mean among those with the fewest failures; absent without such an axis.
    pub learning_rate: Option<String>,
    /// Whether it is the smallest or largest of several: a better one may be outside the grid.
    pub at_edge: bool,
    /// The metric at this learning rate.
    pub metric: Statistic,
    /// Failed runs at this learning rate.
    pub failed: usize,
    /// Its mean minus the smallest mean of all combinations.
    pub behind: f64,
    /// Whether that difference exceeds both standard deviations; absent if one of them is unknown.
    #[serde(alias = "beyond_spread")]
    pub beyond_deviation: Option<bool>,
}

/// The result of one run, for tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRow {
    /// Hash of its settings.
    pub hash: String,
    /// Axes and their values.
    pub point: Point,
    /// `finished`, `failed`, `open` or `equal`.
    pub status: String,
    /// The reason of a failure, or the run that it equals.
    pub note: String,
    /// The builds that worked on it; empty if it has not ended.
    pub build: String,
    /// Its metrics.
    pub metrics: Metrics,
}

/// The results of a sweep so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The metric to compare, smaller is better.
    pub metric: String,
    /// Combinations in plan order.
    pub groups: Vec<Group>,
    /// Best first.
    pub best: Vec<Best>,
    /// Every run.
    pub runs: Vec<RunRow>,
}

impl Summary {
    /// The summary of a plan with these states. A skipped duplicate counts as the run that it equals.
    pub fn new(plan: &Plan, states: &[State]) -> Summary {
        let mut groups: Vec<(Point, Vec<&State>)> = Vec::new();
        for (job, state) in plan.jobs.iter().zip(states) {
            let point = point(plan, job, |role| role != Role::Seed);
            let state = if let State::Equal(earlier) = state { &states[*earlier] } else { state };
            match groups.iter_mut().find(|(other, _)| *other == point) {
                Some((_, members)) => members.push(state),
                None => groups.push((point, vec![state])),
            }
        }
        let groups: Vec<Group> = groups.into_iter().map(|(point, members)| group(point, &members, &plan.metric)).collect();
        let best = best(plan, &groups);
        let runs = plan.jobs.iter().zip(states).map(|(job, state)| run_row(plan, job, state)).collect();
        Summary { metric: plan.metric.clone(), groups, best, runs }
    }
}

fn point(plan: &Plan, job: &Job, keep: impl Fn(Role) -> bool) -> Point {
    let kept = plan.axes.iter().zip(&job.point).filter(|(axis, _)| keep(axis.role()));
    kept.map(|(axis, value)| (axis.key.clone(), plain(value))).collect()
}

fn group(point: Point, members: &[&State], metric: &str) -> Group {
    let mut group = Group { point, finished: 0, failed: 0, open: 0, metrics: BTreeMap::new() };
    let mut numbers: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for member in members {
        match member {
            State::Ended(Record { status: Status::Finished { metrics }, .. }) => {
                match metrics.contains_key(metric) {
                    true => group.finished += 1,
                    false => group.failed += 1,
                }
                for (name, &x) in metrics {
                    numbers.entry(name).or_default().push(x);
                }
            }
            State::Ended(_) => group.failed += 1,
            State::Open | State::Equal(_) => group.open += 1,
        }
    }
    group.metrics = numbers.into_iter().filter_map(|(name, numbers)| Some((name.to_string(), Statistic::of(&numbers)?))).collect();
    group
}

fn best(plan: &Plan, groups: &[Group]) -> Vec<Best> {
    let rate_axis = plan.axes.iter().find(|axis| axis.role() == Role::LearningRate);
    let mut best: Vec<Best> = Vec::new();
    for group in groups {
        let Some(&metric) = group.metrics.get(&plan.metric) else { continue };
        let is_rate = |key: &String| rate_axis.is_some_and(|axis| axis.key == *key);
        let point: Vec<_> = group.point.iter().filter(|(key, _)| !is_rate(key)).cloned().collect();
        let learning_rate = group.point.iter().find(|(key, _)| is_rate(key)).map(|(_, value)| value.clone());
        let candidate = Best { point, learning_rate, at_edge: false, metric, failed: group.failed, behind: 0.0, beyond_deviation: None };
        match best.iter_mut().find(|other| other.point == candidate.point) {
            Some(other) if (candidate.failed, candidate.metric.mean) < (other.failed, other.metric.mean) => *other = candidate,
            Some(_) => {}
            None => best.push(candidate),
        }
    }
    best.sort_by(|a, b| a.metric.mean.total_cmp(&b.metric.mean));
    let Some(first) = best.first().map(|best| best.metric) else { return best };
    let mut rates: Vec<f64> = rate_axis.iter().flat_map(|axis| &axis.values).filter_map(|value| plain(value).parse().ok()).collect();
    rates.sort_by(f64::total_cmp);
    for entry in &mut best {
        entry.behind = entry.metric.mean - first.mean;
        entry.beyond_deviation = entry.metric.deviation.zip(first.deviation).map(|(own, firsts)| entry.behind > own.max(firsts));
        let rate: Option<f64> = entry.learning_rate.as_ref().and_then(|text| text.parse().ok());
        entry.at_edge = rates.len() > 1 && (rate == rates.first().copied() || rate == rates.last().copied());
    }
    best
}

fn run_row(plan: &Plan, job: &Job, state: &State) -> RunRow {
    let (status, note, metrics) = match state {
        State::Open => ("open", String::new(), Metrics::new()),
        State::Equal(earlier) => ("equal", plan.jobs[*earlier].hash.clone(), Metrics::new()),
        State::Ended(Record { status: Status::Failed { reason }, .. }) => ("failed", reason.clone(), Metrics::new()),
        State::Ended(Record { status: Status::Finished { metrics }, .. }) if metrics.contains_key(&plan.metric) => {
            ("finished", String::new(), metrics.clone())
        }
        State::Ended(Record { status: Status::Finished { metrics }, .. }) => {
            ("failed", format!("no finite {} at its end", plan.metric), metrics.clone())
        }
    };
    let build = if let State::Ended(record) = state { record.made_by() } else { String::new() };
    RunRow { hash: job.hash.clone(), point: point(plan, job, |_| true), status: status.into(), note, build, metrics }
}
