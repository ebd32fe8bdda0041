//! Live metrics of runs. Each poll reads new lines of metrics and changed settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use termwise_train::checkpoint::SETTINGS;
use termwise_train::metrics::{Line, Tail};
use termwise_train::runs::{Status, find, saved_settings, steps_of};

use crate::serve::Error;

/// Interval at which the directory is searched for new and removed runs. Known runs are read at every request.
const SEARCH_INTERVAL: Duration = Duration::from_millis(400);

/// The runs of a directory, as read so far.
#[derive(Debug)]
pub struct Live {
    folder: PathBuf,
    runs: BTreeMap<String, Watched>,
    /// Number of refreshes that found changes. A client sends the last revision that it has seen.
    revision: u64,
    /// Revision of the last removal of a run.
    removed: u64,
    searched: Option<Instant>,
}

#[derive(Debug)]
struct Watched {
    path: PathBuf,
    metrics: Tail,
    /// Revision of the first point. Clients drop points of other generations.
    generation: u64,
    settings_file: Option<Stamp>,
    settings: BTreeMap<String, String>,
    steps: Option<u64>,
    /// Revision of the last change of settings.
    settings_changed: u64,
    status: Status,
    /// The last step, and whether the loss of the last evaluation was NaN or infinite.
    last: Option<u64>,
    diverged: bool,
    curves: [Vec<Point>; 3],
    tokens_per_second: Option<f64>,
    changed: u64,
}

/// Length, time and identity of a file or directory. If they are equal, the content is considered equal.
pub(crate) type Stamp = (u64, Option<SystemTime>, u64);

/// Training loss, held-out loss, loss on the recall tokens of held-out data.
const CURVES: [&str; 3] = ["train", "held_out", "recall"];

#[derive(Clone, Copy, Debug)]
struct Point {
    step: u64,
    value: f64,
    revision: u64,
}

/// Changes since a revision.
#[derive(Debug, Serialize)]
pub struct News {
    /// The revision to send with the next request.
    pub revision: u64,
    /// Number of runs.
    pub count: usize,
    /// Names of all runs, if some were removed. Clients drop the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub names: Option<Vec<String>>,
    /// Runs with changes.
    pub runs: Vec<RunNews>,
}

/// Changes of a run.
#[derive(Debug, Serialize)]
pub struct RunNews {
    /// Its path relative to the directory.
    pub name: String,
    /// Finished, diverged, running or stopped.
    pub status: &'static str,
    /// Total steps.
    pub steps: Option<u64>,
    /// Time of the last line.
    pub tokens_per_second: Option<f64>,
    /// Clients drop points of other generations.
    pub generation: u64,
    /// If they changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings: Option<BTreeMap<String, String>>,
    /// New points by curve: steps and values.
    pub points: BTreeMap<&'static str, (Vec<u64>, Vec<f64>)>,
}

impl Live {
    /// Reads all runs of a directory.
    pub fn open(folder: &Path) -> Result<Live, Error> {
        find(folder).map_err(|source| Error::Folder { path: folder.into(), source })?;
        let mut live = Live { folder: folder.into(), runs: BTreeMap::new(), revision: 0, removed: 0, searched: None };
        live.refresh();
        Ok(live)
    }

    /// The directory of a run by its name.
    pub fn path(&self, name: &str) -> Option<&Path> {
        self.runs.get(name).map(|run| run.path.as_path())
    }

    /// Number of runs.
    pub fn count(&self) -> usize {
        self.runs.len()
    }

    /// Number of stored points.
    pub fn points(&self) -> usize {
        self.runs.values().flat_map(|run| &run.curves).map(Vec::len).sum()
    }

    /// Reads changes. A run that cannot be read is unchanged.
    pub fn refresh(&mut self) {
        if self.searched.is_none_or(|searched| searched.elapsed() > SEARCH_INTERVAL) {
            self.search();
            self.searched = Some(Instant::now());
        }
        let next = self.revision + 1;
        let mut new = self.removed == next;
        for run in self.runs.values_mut() {
            new |= run.refresh(next);
        }
        if new {
            self.revision = next;
        }
    }

    /// Adds new runs and drops removed ones.
    fn search(&mut self) {
        let next = self.revision + 1;
        // The directory itself may have been removed.
        let found = find(&self.folder).unwrap_or_default();
        let before = self.runs.len();
        self.runs.retain(|_, run| found.binary_search(&run.path).is_ok());
        if self.runs.len() < before {
            self.removed = next;
        }
        for path in found {
            let below = path.strip_prefix(&self.folder).unwrap_or(&path).display().to_string();
            let name = if below.is_empty() { path.file_name().map_or("run".into(), |n| n.to_string_lossy().into_owned()) } else { below };
            self.runs.entry(name).or_insert_with(|| Watched::new(path, next));
        }
    }

    /// Changes after a revision; everything after 0.
    pub fn since(&self, revision: u64) -> News {
        let changed = self.runs.iter().filter(|(_, run)| run.changed > revision);
        let runs = changed
            .map(|(name, run)| RunNews {
                name: name.clone(),
                status: run.status.name(),
                steps: run.steps,
                tokens_per_second: run.tokens_per_second,
                generation: run.generation,
                settings: (run.settings_changed > revision).then(|| run.settings.clone()),
                points: CURVES
                    .into_iter()
                    .zip(&run.curves)
                    .map(|(name, points)| {
                        let first = points.partition_point(|point| point.revision <= revision);
                        (name, points[first..].iter().map(|point| (point.step, point.value)).unzip())
                    })
                    .filter(|(_, (steps, _)): &(_, (Vec<u64>, Vec<f64>))| !steps.is_empty())
                    .collect(),
            })
            .collect();
        let names = (self.removed > revision).then(|| self.runs.keys().cloned().collect());
        News { revision: self.revision, count: self.runs.len(), names, runs }
    }
}

pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let data = std::fs::metadata(path).ok()?;
    #[cfg(unix)]
    let identity = std::os::unix::fs::MetadataExt::ino(&data);
    #[cfg(not(unix))]
    let identity = 0;
    Some((data.len(), data.modified().ok(), identity))
}

impl Watched {
    fn new(path: PathBuf, revision: u64) -> Watched {
        Watched {
            metrics: Tail::new(&path),
            path,
            generation: revision,
            settings_file: None,
            settings: BTreeMap::new(),
            steps: None,
            settings_changed: revision,
            status: Status::Stopped,
            last: None,
            diverged: false,
            curves: Default::default(),
            tokens_per_second: None,
            changed: revision,
        }
    }

    /// Returns whether anything changed.
    fn refresh(&mut self, revision: u64) -> bool {
        let mut new = self.changed == revision;
        new |= self.refresh_settings(revision);
        // A file that cannot be read is retried at the next refresh.
        new |= self.refresh_metrics(revision).unwrap_or(false);
        let status = Status::of(&self.path, self.last, self.steps, self.diverged);
        new |= status != self.status;
        self.status = status;
        if new {
            self.changed = revision;
        }
        new
    }

    /// Returns whether the settings were read again: a run was resumed with other settings, or replaced.
    fn refresh_settings(&mut self, revision: u64) -> bool {
        let found = stamp(&self.path.join(SETTINGS));
        if found.is_none() || found == self.settings_file {
            return false;
        }
        self.settings_file = found;
        let table = saved_settings(&self.path);
        let plain = |value: &toml::Value| match value {
            toml::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        self.steps = steps_of(&table);
        self.settings = table.iter().map(|(key, value)| (key.clone(), plain(value))).collect();
        self.settings_changed = revision;
        true
    }

    /// Reads the new lines, or all of them if the file was replaced. Returns whether anything changed.
    fn refresh_metrics(&mut self, revision: u64) -> termwise_train::Result<bool> {
        let appended = self.metrics.read()?;
        if appended.restarted {
            (self.generation, self.curves, self.tokens_per_second) = (revision, Default::default(), None);
            (self.last, self.diverged) = (None, false);
        }
        let mut new = appended.restarted;
        for line in appended.lines.into_iter().flatten() {
            new = true;
            let step = line.step();
            self.last = Some(step);
            let mut add = |curve: usize, value: f64| self.curves[curve].push(Point { step, value, revision });
            match line {
                Line::Train(train) => {
                    add(0, train.loss);
                    self.tokens_per_second = Some(train.tokens_per_second);
                }
                Line::HeldOut { evaluation, .. } => {
                    self.diverged = evaluation.is_none();
                    if let Some(evaluation) = evaluation {
                        add(1, evaluation.loss);
                        if let Some(recall) = evaluation.recall {
                            add(2, recall.loss);
                        }
                    }
                }
            }
        }
        Ok(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use termwise_train::metrics::METRICS;

    fn line(step: u64, loss: f64) -> String {
        format!("{{\"kind\":\"train\",\"step\":{step},\"time\":1.0,\"loss\":{loss},\"lr\":0.1,\"tokens\":1,\"tokens_per_second\":1.0}}\n")
    }

    #[test]
    fn new_lines_are_read_once_and_truncated_files_are_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let run = folder.path().join("sweep/a");
        std::fs::create_dir_all(&run).expect("a folder");
        std::fs::write(run.join(SETTINGS), "steps = 3\nattention = \"softmax\"\n").expect("a file");
        std::fs::write(run.join(METRICS), line(1, 3.0) + "{\"kind\":\"tr").expect("a file");
        let mut live = Live::open(folder.path()).expect("a folder");
        let first = live.since(0);
        assert_eq!((first.count, first.runs[0].name.as_str(), first.runs[0].status), (1, "sweep/a", "stopped"));
        assert_eq!(first.runs[0].points["train"], (vec![1], vec![3.0]));
        assert_eq!(first.runs[0].settings.as_ref().map(|s| s["attention"].as_str()), Some("softmax"));
        live.refresh();
        assert!(live.since(first.revision).runs.is_empty(), "an incomplete line is not reported");

        let mut file = std::fs::OpenOptions::new().append(true).open(run.join(METRICS)).expect("a file");
        file.write_all(&line(2, 2.5).as_bytes()["{\"kind\":\"tr".len()..]).expect("written");
        live.refresh();
        let second = live.since(first.revision);
        assert_eq!((second.runs[0].points["train"].clone(), second.runs[0].settings.is_none()), ((vec![2], vec![2.5]), true));
        file.write_all(line(3, 2.0).as_bytes()).expect("written");
        live.refresh();
        let third = live.since(second.revision);
        assert_eq!((third.runs[0].status, third.runs[0].generation), ("finished", first.runs[0].generation));
        assert_eq!(live.points(), 3);

        std::fs::write(run.join("new"), line(1, 3.0)).expect("a file");
        std::fs::rename(run.join("new"), run.join(METRICS)).expect("renamed");
        live.refresh();
        let cut = live.since(third.revision);
        assert!(cut.runs[0].generation > first.runs[0].generation && cut.runs[0].status == "stopped");
        assert_eq!(cut.runs[0].points["train"], (vec![1], vec![3.0]), "points of the new generation, all of them");
        let mut file = std::fs::OpenOptions::new().append(true).open(run.join(METRICS)).expect("a file");
        let bad = "{\"kind\":\"held_out\",\"step\":3,\"time\":1.0,\"loss\":null,\"finite\":false}\n";
        file.write_all((line(3, 2.0) + bad).as_bytes()).expect("written");
        live.refresh();
        let diverged = live.since(cut.revision);
        assert_eq!(diverged.runs[0].status, "diverged");
        assert!(!diverged.runs[0].points.contains_key("held_out"), "no point if the loss is NaN or infinite");
        assert!(Live::open(&folder.path().join("missing")).is_err());
    }

    /// Refreshes a watched run after a file was written, with enough time for a new search.
    fn refreshed(live: &mut Live) -> News {
        let before = live.revision;
        live.searched = None;
        live.refresh();
        live.since(before)
    }

    #[test]
    fn settings_and_steps_are_read_again_when_they_change() {
        let folder = tempfile::tempdir().expect("a folder");
        let run = folder.path().join("a");
        std::fs::create_dir(&run).expect("a folder");
        std::fs::write(run.join(SETTINGS), "steps = 30\nlr = 0.01\n").expect("a file");
        std::fs::write(run.join(METRICS), line(30, 2.0)).expect("a file");
        let mut live = Live::open(folder.path()).expect("a folder");
        let first = live.since(0);
        assert_eq!((first.runs[0].steps, first.runs[0].status), (Some(30), "finished"));
        assert!(refreshed(&mut live).runs.is_empty(), "nothing changed");

        // Resumed with more steps.
        std::fs::write(run.join(SETTINGS), "steps = 90\nlr = 0.01\n").expect("a file");
        let resumed = refreshed(&mut live);
        assert_eq!((resumed.runs[0].steps, resumed.runs[0].status), (Some(90), "stopped"));
        assert_eq!(resumed.runs[0].settings.as_ref().map(|settings| settings["steps"].as_str()), Some("90"));
        assert!(resumed.runs[0].points.is_empty(), "its points are known");
        std::fs::write(run.join(METRICS), line(30, 2.0) + &line(90, 1.5)).expect("a file");
        let done = refreshed(&mut live);
        assert_eq!((done.runs[0].status, &done.runs[0].points["train"]), ("finished", &(vec![90], vec![1.5])));

        // Replaced by another run, whose metrics are longer than those already read, in the same file.
        std::fs::write(run.join(SETTINGS), "steps = 30\nlr = 0.5\n").expect("a file");
        std::fs::write(run.join(METRICS), (10..=20).map(|step| line(step, 7.0)).collect::<String>()).expect("a file");
        let other = refreshed(&mut live);
        assert_eq!(other.runs[0].settings.as_ref().map(|settings| settings["lr"].as_str()), Some("0.5"));
        assert_eq!((other.runs[0].steps, other.runs[0].status), (Some(30), "stopped"));
        assert!(other.runs[0].generation > done.runs[0].generation);
        assert_eq!(other.runs[0].points["train"], ((10..=20).collect(), vec![7.0; 11]), "no points of the previous run");

        // Without metrics yet.
        std::fs::remove_file(run.join(METRICS)).expect("removed");
        let empty = refreshed(&mut live);
        assert!(empty.runs[0].generation > other.runs[0].generation && empty.runs[0].points.is_empty());
        assert_eq!(live.points(), 0);
    }

    #[test]
    fn removed_runs_are_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["a", "b"] {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
            std::fs::write(folder.path().join(name).join(SETTINGS), "steps = 3\n").expect("a file");
            std::fs::write(folder.path().join(name).join(METRICS), line(1, 3.0)).expect("a file");
        }
        let mut live = Live::open(folder.path()).expect("a folder");
        let first = live.since(0);
        assert_eq!((first.count, first.names), (2, None));
        std::fs::remove_dir_all(folder.path().join("a")).expect("removed");
        let news = refreshed(&mut live);
        assert_eq!((news.count, news.names, news.runs.len()), (1, Some(vec!["b".to_owned()]), 0));
        assert_eq!(refreshed(&mut live).names, None, "reported once");
        assert_eq!(live.since(first.revision).names, Some(vec!["b".to_owned()]), "also for a late client");
        assert!(live.path("a").is_none());

        // Removed and recreated between two requests of a client: the client drops its points.
        let before = live.revision;
        let generation = first.runs[1].generation;
        std::fs::remove_dir_all(folder.path().join("b")).expect("removed");
        refreshed(&mut live);
        std::fs::create_dir(folder.path().join("b")).expect("a folder");
        std::fs::write(folder.path().join("b").join(SETTINGS), "steps = 3\n").expect("a file");
        refreshed(&mut live);
        let again = live.since(before);
        assert!(again.runs[0].name == "b" && again.runs[0].generation > generation && again.runs[0].settings.is_some());

        std::fs::remove_dir_all(folder.path()).expect("removed");
        assert_eq!((refreshed(&mut live).count, live.since(0).runs.len()), (0, 0), "the directory was removed");
    }

    #[cfg(unix)]
    #[test]
    fn links_are_not_followed() {
        let (folder, outside) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        std::fs::write(outside.path().join(SETTINGS), "steps = 3\n").expect("a file");
        std::os::unix::fs::symlink(outside.path(), folder.path().join("link")).expect("a link");
        assert_eq!(Live::open(folder.path()).expect("a folder").since(0).count, 0);
    }
}
