//! Progress and remaining time of a sweep.

use std::time::Duration;

use super::record::{Record, Status};
use super::schedule::State;

/// Progress of a sweep. Duplicates that are not run are not counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Total number of runs.
    pub total: usize,
    /// Finished runs, including earlier sessions.
    pub finished: usize,
    /// Failed runs, including earlier sessions, unless retried.
    pub failed: usize,
    /// Currently running.
    pub running: usize,
    /// Fraction of all work done.
    pub fraction: f64,
    /// Estimated remaining time at the current pace; absent until some work is done.
    pub remaining: Option<Duration>,
}

/// Updates the progress as runs report.
pub(super) struct Tracker {
    runs: Vec<Option<Run>>,
}

#[derive(Clone, Copy)]
struct Run {
    phase: Phase,
    /// Work relative to other runs.
    work: f64,
    /// Whether it is run in this session.
    wanted: bool,
    /// Fraction done before this session; known from its first report.
    before: Option<f64>,
    done: f64,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Waiting,
    Running,
    Finished,
    Failed,
}

impl Tracker {
    pub fn new(states: &[State], queue: &[usize], work: impl Fn(usize) -> f64) -> Tracker {
        let run = |(index, state): (usize, &State)| {
            let phase = match state {
                State::Equal(_) => return None,
                State::Open => Phase::Waiting,
                State::Ended(record) => phase_of(record),
            };
            let wanted = queue.contains(&index);
            Some(Run { phase, work: work(index), wanted, before: None, done: if wanted { 0.0 } else { 1.0 } })
        };
        Tracker { runs: states.iter().enumerate().map(run).collect() }
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut Run)) {
        if let Some(run) = &mut self.runs[index] {
            change(run);
        }
    }

    pub fn started(&mut self, index: usize) {
        self.change(index, |run| run.phase = Phase::Running);
    }

    pub fn done(&mut self, index: usize, fraction: f64) {
        self.change(index, |run| {
            run.done = fraction.clamp(0.0, 1.0);
            run.before.get_or_insert(run.done);
        });
    }

    pub fn ended(&mut self, index: usize, record: &Record) {
        self.change(index, |run| {
            (run.phase, run.done) = (phase_of(record), 1.0);
            run.before.get_or_insert(0.0);
        });
    }

    pub fn stopped(&mut self, index: usize) {
        self.change(index, |run| run.phase = Phase::Waiting);
    }

    pub fn progress(&self, elapsed: Duration) -> Progress {
        let runs = || self.runs.iter().flatten();
        let count = |phase| runs().filter(|run| run.phase == phase).count();
        let total = runs().count();
        let now: f64 = runs().filter(|run| run.wanted).filter_map(|run| Some(run.work * (run.done - run.before?))).sum();
        let left: f64 = runs().map(|run| run.work * (1.0 - run.done)).sum();
        let all: f64 = runs().map(|run| run.work).sum();
        Progress {
            total,
            finished: count(Phase::Finished),
            failed: count(Phase::Failed),
            running: count(Phase::Running),
            fraction: if all > 0.0 { 1.0 - left / all } else { 1.0 },
            remaining: (now > 0.0).then(|| elapsed.mul_f64((left / now).min(1e6))),
        }
    }
}

fn phase_of(record: &Record) -> Phase {
    match record.status {
        Status::Finished { .. } => Phase::Finished,
        Status::Failed { .. } => Phase::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_uses_only_work_of_this_session() {
        let states = [State::Open, State::Open, State::Equal(0)];
        let mut tracker = Tracker::new(&states, &[0, 1], |_| 1.0);
        assert_eq!(tracker.progress(Duration::from_secs(1)).remaining, None);
        // Half of run 0 was done before. A quarter of a run took 10 s, and one and a quarter remain.
        tracker.started(0);
        tracker.done(0, 0.5);
        assert_eq!(tracker.progress(Duration::from_secs(1)).remaining, None);
        tracker.done(0, 0.75);
        let progress = tracker.progress(Duration::from_secs(10));
        assert_eq!((progress.total, progress.running, progress.fraction), (2, 1, 0.375));
        assert_eq!(progress.remaining, Some(Duration::from_secs(50)));
    }

    #[test]
    fn runs_are_weighted_by_their_work() {
        let mut tracker = Tracker::new(&[State::Open, State::Open], &[0, 1], |index| [1.0, 3.0][index]);
        tracker.started(0);
        tracker.done(0, 0.0);
        tracker.done(0, 1.0);
        let progress = tracker.progress(Duration::from_secs(10));
        assert_eq!((progress.fraction, progress.remaining), (0.25, Some(Duration::from_secs(30))));
    }
}
