//! Summary files.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::summary::{Statistic, Summary};
use crate::error::{Error, Result};
use termwise_base::files::write_whole;
use termwise_base::provenance::Provenance;
use termwise_report::{Csv, to_json};

impl Summary {
    /// Writes `runs.csv`, `summary.csv`, `best.csv` and `summary.json` to the directory of a sweep.
    pub fn write(&self, folder: &Path, made_by: &Provenance) -> Result<()> {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        write_whole(&folder.join("runs.csv"), self.runs_csv().as_bytes())?;
        write_whole(&folder.join("summary.csv"), self.groups_csv().as_bytes())?;
        write_whole(&folder.join("best.csv"), self.best_csv().as_bytes())?;
        Ok(write_whole(&folder.join("summary.json"), to_json(self, Some(made_by)).as_bytes())?)
    }

    fn runs_csv(&self) -> String {
        let names: BTreeSet<&String> = self.runs.iter().flat_map(|run| run.metrics.keys()).collect();
        let mut csv = Csv::default();
        let axes = keys(self.runs.first().map(|run| &run.point));
        csv.line(["hash"].into_iter().chain(axes).chain(["status", "note", "build"]).chain(names.iter().map(|name| name.as_str())));
        for run in &self.runs {
            let metrics = names.iter().map(|name| run.metrics.get(*name).map_or(String::new(), f64::to_string));
            let front = [run.hash.clone()].into_iter().chain(values(&run.point));
            csv.line(front.chain([run.status.to_string(), run.note.clone(), run.build.clone()]).chain(metrics));
        }
        csv.finish()
    }

    fn groups_csv(&self) -> String {
        let names: BTreeSet<&String> = self.groups.iter().flat_map(|group| group.metrics.keys()).collect();
        let mut csv = Csv::default();
        let axes = keys(self.groups.first().map(|group| &group.point)).map(String::from);
        let columns = names.iter().flat_map(|name| [format!("{name} mean"), format!("{name} deviation")]);
        csv.line(axes.chain(["finished", "failed", "open"].map(String::from)).chain(columns));
        for group in &self.groups {
            let counts = [group.finished, group.failed, group.open].map(|n| n.to_string());
            let metrics = names.iter().flat_map(|name| cells(group.metrics.get(*name)));
            csv.line(values(&group.point).chain(counts).chain(metrics));
        }
        csv.finish()
    }

    fn best_csv(&self) -> String {
        let mut csv = Csv::default();
        let axes = keys(self.best.first().map(|best| &best.point)).map(String::from);
        let metric = &self.metric;
        let columns = ["learning_rate", "at_edge", "runs", "failed"].map(String::from);
        let compared = [format!("{metric} mean"), format!("{metric} deviation"), "behind".into(), "beyond_deviation".into()];
        csv.line(axes.chain(columns).chain(compared));
        for best in &self.best {
            let rate = best.learning_rate.clone().unwrap_or_default();
            let front = [rate, best.at_edge.to_string(), best.metric.count.to_string(), best.failed.to_string()];
            let beyond = best.beyond_deviation.map_or(String::new(), |beyond| beyond.to_string());
            csv.line(values(&best.point).chain(front).chain(cells(Some(&best.metric))).chain([best.behind.to_string(), beyond]));
        }
        csv.finish()
    }
}

fn keys(point: Option<&Vec<(String, String)>>) -> impl Iterator<Item = &str> {
    point.into_iter().flatten().map(|(key, _)| key.as_str())
}

fn values(point: &[(String, String)]) -> impl Iterator<Item = String> + '_ {
    point.iter().map(|(_, value)| value.clone())
}

fn cells(statistic: Option<&Statistic>) -> [String; 2] {
    let number = |x: Option<f64>| x.map_or(String::new(), |x| x.to_string());
    [number(statistic.map(|s| s.mean)), number(statistic.and_then(|s| s.deviation))]
}
