//! Runs as they grow: each file of metrics is read once, and from then on only what was added.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use termwise_train::metrics::{Line, Tail};
use termwise_train::run::is_locked;
use termwise_train::runs::is_hidden;

use crate::Error;

const SETTINGS: &str = "settings.toml";
/// How deep below the folder runs are looked for: `runs/NAME`, `sweeps/NAME/RUN`, and one more.
const DEPTH: usize = 3;
/// How often new runs are looked for; those that are known are read at every request.
const AGAIN: Duration = Duration::from_millis(400);

/// The runs of a folder, as far as they have been read.
#[derive(Debug)]
pub struct Live {
    folder: PathBuf,
    runs: BTreeMap<String, Watched>,
    /// Counts refreshes that found something new; whoever has seen one asks for what came after.
    revision: u64,
    looked: Option<Instant>,
}

#[derive(Debug)]
struct Watched {
    path: PathBuf,
    tail: Tail,
    /// Grows when metrics were cut back: whoever has older points forgets them.
    generation: u64,
    settings: BTreeMap<String, String>,
    steps: Option<u64>,
    status: &'static str,
    /// The last step, and whether the loss of the last evaluation was not finite.
    last: Option<u64>,
    diverged: bool,
    curves: [Vec<Point>; 3],
    tokens_per_second: Option<f64>,
    changed: u64,
    begun: u64,
}

/// Loss of training, loss on held-out data, loss on its recall tokens.
const CURVES: [&str; 3] = ["train", "held_out", "recall"];

#[derive(Clone, Copy, Debug)]
struct Point {
    step: u64,
    value: f64,
    revision: u64,
}

/// What is new.
#[derive(Debug, Serialize)]
pub struct News {
    /// To ask with the next time.
    pub revision: u64,
    /// How many runs there are in all.
    pub count: usize,
    /// Those of which something is new.
    pub runs: Vec<RunNews>,
}

/// What is new of a run.
#[derive(Debug, Serialize)]
pub struct RunNews {
    /// Its path below the folder.
    pub name: String,
    /// Finished, diverged, running or stopped.
    pub status: &'static str,
    /// Steps in all.
    pub steps: Option<u64>,
    /// Of the last line.
    pub tokens_per_second: Option<f64>,
    /// Points of other generations are to be forgotten.
    pub generation: u64,
    /// Where the asker does not know them yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings: Option<BTreeMap<String, String>>,
    /// New points by curve: steps and values.
    pub points: BTreeMap<&'static str, (Vec<u64>, Vec<f64>)>,
}

impl Live {
    /// Reads all that is there.
    pub fn open(folder: &Path) -> Result<Live, Error> {
        std::fs::read_dir(folder).map_err(|source| Error::Folder { path: folder.into(), source })?;
        let mut live = Live { folder: folder.into(), runs: BTreeMap::new(), revision: 0, looked: None };
        live.refresh();
        Ok(live)
    }

    /// The folder of a run by its name.
    pub fn path(&self, name: &str) -> Option<&Path> {
        self.runs.get(name).map(|run| run.path.as_path())
    }

    /// Numbers that are kept.
    pub fn points(&self) -> usize {
        self.runs.values().flat_map(|run| &run.curves).map(Vec::len).sum()
    }

    /// Reads what was added. A run that cannot be read is left as it was.
    pub fn refresh(&mut self) {
        let next = self.revision + 1;
        let mut new = false;
        if self.looked.is_none_or(|looked| looked.elapsed() > AGAIN) {
            let mut found = Vec::new();
            runs_below(&self.folder, DEPTH, &mut found);
            self.runs.retain(|_, run| found.contains(&run.path));
            for path in found {
                let below = path.strip_prefix(&self.folder).unwrap_or(&path).display().to_string();
                let name =
                    if below.is_empty() { path.file_name().map_or("run".into(), |n| n.to_string_lossy().into_owned()) } else { below };
                self.runs.entry(name).or_insert_with(|| Watched::new(path, next));
            }
            self.looked = Some(Instant::now());
        }
        for run in self.runs.values_mut() {
            new |= run.refresh(next);
        }
        if new {
            self.revision = next;
        }
    }

    /// What came after a revision; everything after 0.
    pub fn since(&self, revision: u64) -> News {
        let changed = self.runs.iter().filter(|(_, run)| run.changed > revision);
        let runs = changed
            .map(|(name, run)| RunNews {
                name: name.clone(),
                status: run.status,
                steps: run.steps,
                tokens_per_second: run.tokens_per_second,
                generation: run.generation,
                settings: (run.begun > revision).then(|| run.settings.clone()),
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
        News { revision: self.revision, count: self.runs.len(), runs }
    }
}

fn runs_below(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if folder.join(SETTINGS).is_file() {
        found.push(folder.into());
        return;
    }
    if depth == 0 {
        return;
    }
    let mut below: Vec<PathBuf> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    below.sort();
    // A link could lead in circles or out of the folder; a hidden folder is a run that is being replaced.
    for path in below.iter().filter(|path| path.symlink_metadata().is_ok_and(|data| data.is_dir()) && !is_hidden(path)) {
        runs_below(path, depth - 1, found);
    }
}

impl Watched {
    fn new(path: PathBuf, revision: u64) -> Watched {
        let text = std::fs::read_to_string(path.join(SETTINGS)).unwrap_or_default();
        let table: toml::Table = text.parse().unwrap_or_default();
        let steps = table.get("steps").and_then(toml::Value::as_integer).and_then(|steps| steps.try_into().ok());
        let plain = |value: &toml::Value| match value {
            toml::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let settings = table.iter().map(|(key, value)| (key.clone(), plain(value))).collect();
        let (changed, begun) = (revision, revision);
        let (generation, status) = (0, "stopped");
        Watched {
            tail: Tail::new(&path),
            path,
            generation,
            settings,
            steps,
            status,
            last: None,
            diverged: false,
            curves: Default::default(),
            tokens_per_second: None,
            changed,
            begun,
        }
    }

    /// Whether anything is new.
    fn refresh(&mut self, revision: u64) -> bool {
        let mut new = self.changed == revision;
        if let Ok(appended) = self.tail.read() {
            if appended.restarted {
                (self.generation, self.curves, self.last, self.diverged) = (self.generation + 1, Default::default(), None, false);
            }
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
        }
        let finished = self.last.is_some() && self.last == self.steps;
        let status = match () {
            () if finished && !self.diverged => "finished",
            () if !finished && is_locked(&self.path) => "running",
            () if self.diverged => "diverged",
            () => "stopped",
        };
        new |= status != self.status;
        self.status = status;
        if new {
            self.changed = revision;
        }
        new
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
    fn what_is_added_is_read_once_and_what_is_cut_back_is_read_again() {
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
        assert!(live.since(first.revision).runs.is_empty(), "half a line is no news");

        let mut file = std::fs::OpenOptions::new().append(true).open(run.join(METRICS)).expect("a file");
        file.write_all(&line(2, 2.5).as_bytes()["{\"kind\":\"tr".len()..]).expect("written");
        live.refresh();
        let second = live.since(first.revision);
        assert_eq!((second.runs[0].points["train"].clone(), second.runs[0].settings.is_none()), ((vec![2], vec![2.5]), true));
        file.write_all(line(3, 2.0).as_bytes()).expect("written");
        live.refresh();
        let third = live.since(second.revision);
        assert_eq!((third.runs[0].status, third.runs[0].generation), ("finished", 0));
        assert_eq!(live.points(), 3);

        std::fs::write(run.join("new"), line(1, 3.0)).expect("a file");
        std::fs::rename(run.join("new"), run.join(METRICS)).expect("renamed");
        live.refresh();
        let cut = live.since(third.revision);
        assert_eq!((cut.runs[0].generation, cut.runs[0].status), (1, "stopped"));
        assert_eq!(cut.runs[0].points["train"], (vec![1], vec![3.0]), "points of the new generation, all of them");
        let mut file = std::fs::OpenOptions::new().append(true).open(run.join(METRICS)).expect("a file");
        let bad = "{\"kind\":\"held_out\",\"step\":3,\"time\":1.0,\"loss\":null,\"finite\":false}\n";
        file.write_all((line(3, 2.0) + bad).as_bytes()).expect("written");
        live.refresh();
        let diverged = live.since(cut.revision);
        assert_eq!(diverged.runs[0].status, "diverged");
        assert!(!diverged.runs[0].points.contains_key("held_out"), "no point where the loss is not finite");
        assert!(Live::open(&folder.path().join("missing")).is_err());
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
